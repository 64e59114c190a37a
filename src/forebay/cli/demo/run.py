"""The demo itself: a node, two replicas, a kill in the middle, and the books kept."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from forebay.cli.demo.display import Display
from forebay.cli.demo.ledger import Audit, Ledger, audit
from forebay.cli.demo.node import DemoNode
from forebay.cli.demo.replica import Outcome, ReplicaSettings, replica_main
from forebay.cli.demo.report import PREFILL_SOURCE, PREFILL_TOKENS_PER_S, Inputs, Report, TimeToFirstToken
from forebay.cli.demo.signals import ignored
from forebay.cli.demo.trace import Request, Sample, ceiling_tokens, generate, read_trace, sample
from forebay.cli.demo.workload import MODEL, Contents, Scale, block_schema
from forebay.cli.sizes import format_size
from forebay.errors import CapacityShort, ForebayError, Unavailable
from forebay.ids import align_up

if TYPE_CHECKING:
    from forebay.client import Client

__all__ = ["DemoOptions", "run_demo"]

REPLICAS = 2
_GENERATED_REQUESTS = 2_000
_READY_S = 30.0
_OUTCOME_S = 60.0
_STOP_S = 10.0
_EVENTS_S = 2.0
_RETRY_S = 0.1
_NAMED = 5
_REGION_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run. ``budget_bytes`` bounds what is written and read; None takes every conversation."""

    trace: Path | None = None
    seed: int = 1
    budget_bytes: int | None = 2 << 30
    block_bytes: int = 512 << 10
    capacity_bytes: int | None = None
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S


class _Watcher(Thread):
    """Brings the node's events into the ledger. While the node is away there are none to bring."""

    def __init__(self, client: Client, ledger: Ledger) -> None:
        super().__init__(name="demo watch", daemon=True)
        self._client = client
        self._ledger = ledger
        self._stopping = Event()

    def run(self) -> None:
        """Follow until `stop`; the client's end ends the last call."""
        while not self._stopping.is_set():
            try:
                for event in self._client.watch():
                    self._ledger.note(event)
            except ForebayError:
                self._stopping.wait(_RETRY_S)

    def stop(self) -> None:
        """Follow no longer."""
        self._stopping.set()


class _Worker:
    """A replica's process as the parent sees it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.busy: int | None = None
        """The request that it works on."""
        self._process = context.Process(target=replica_main, args=(theirs, settings), daemon=True)
        with ignored():  # signals are ours alone to handle; the end of the pipe ends the process
            self._process.start()
        theirs.close()  # so that its end is the end of the pipe

    def receive(self) -> Outcome | None:
        """What it sent: an outcome, or None when it has become ready. Raises `Unavailable` if it has failed."""
        try:
            told = self.pipe.recv()
        except EOFError:
            raise Unavailable("a replica's process ended", field="replica") from None
        if isinstance(told, str):
            raise Unavailable(f"a replica failed: {told}", field="replica")
        self.busy = None
        return told if isinstance(told, Outcome) else None

    def give(self, number: int, request: Request) -> None:
        """Let it serve a request."""
        self.busy = number
        self.pipe.send((number, request))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process: at the end of its request and cleanly, or at once if the run was broken off."""
        self.pipe.close()
        if kind is None:
            self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


class _Demo:
    """One run. `serve` drives requests through the replicas, `interrupt` kills the node, `check` keeps the books."""

    def __init__(self, options: DemoOptions, inputs: Inputs, part: Sample, scale: Scale, display: Display) -> None:
        self.outcomes: list[Outcome] = []
        self.lost: set[int] = set()
        self.wrong: set[int] = set()
        self.report = Report(inputs)
        self._options = options
        self._part = part
        self._scale = scale
        self._display = display
        self._ledger = Ledger(block for request in part.requests for block in request.blocks)
        self._contents = Contents(scale.block_bytes, options.seed)
        self._pending = deque(range(len(part.requests)))
        self._workers: list[_Worker] = []
        self._evictions = 0
        """Evictions that incarnations of the node before this one counted."""

    def run(self, node: DemoNode, while_down: Callable[[Path], None]) -> None:
        """Everything between start and stop of the node."""
        from forebay.client import connect

        self._display.say(f"starting a node in {node.data}")
        self.report.node_start_s = node.start()
        settings = ReplicaSettings(node.url, node.token, self._scale, self._options.seed)
        with ExitStack() as stack:
            for _ in range(REPLICAS):
                self._workers.append(stack.enter_context(_Worker(settings)))
            schema = block_schema(self._scale)
            client = stack.enter_context(connect(node.url, schema=schema, token=node.token))
            watcher = _Watcher(client, self._ledger)
            stack.callback(watcher.stop)
            watcher.start()
            for worker in self._workers:
                if not worker.pipe.poll(_READY_S):
                    raise Unavailable(f"a replica was not ready in {_READY_S:.0f} s", field="replica")
                worker.receive()
            half = len(self._part.requests) // 2
            self._display.say(f"{REPLICAS} replicas serve {len(self._part.requests)} requests")
            self._serve(half)
            self._interrupt(node, while_down)
            self._serve(len(self._part.requests))
            self._finish(node)

    def _serve(self, until: int) -> None:
        """Drive requests until so many are done; leaves replicas at work if there is more to do."""
        while len(self.outcomes) < until:
            self._dispatch()
            self._collect(_OUTCOME_S)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give idle replicas the next requests. A conversation's next turn waits for the one before, as people do."""
        talking = {self._part.groups[w.busy] for w in self._workers if w.busy is not None}
        for worker in self._workers:
            if worker.busy is not None:
                continue
            number = next((n for n in self._pending if self._part.groups[n] not in talking), None)
            if number is None:
                return
            self._pending.remove(number)
            talking.add(self._part.groups[number])
            worker.give(number, self._part.requests[number])

    def _collect(self, timeout_s: float) -> None:
        """Take the outcomes that there are; waits for one."""
        by_pipe = {w.pipe: w for w in self._workers if w.busy is not None}
        ready = wait(list(by_pipe), timeout_s)
        if not ready and timeout_s:
            raise Unavailable(f"no replica finished a request in {timeout_s:.0f} s", field="replica")
        for pipe in ready:
            outcome = by_pipe[cast("Connection", pipe)].receive()
            if outcome is not None:
                self.outcomes.append(outcome)
                self.wrong.update(outcome.wrong)
                self._ledger.acknowledge(outcome)
        self._show()

    def _show(self) -> None:
        tokens = sum(o.input_tokens for o in self.outcomes)
        hit = sum(o.hit_tokens for o in self.outcomes) / tokens if tokens else 0.0
        written = format_size(sum(o.written_bytes for o in self.outcomes))
        read = format_size(sum(o.read_bytes for o in self.outcomes))
        note = f"hit rate {hit:.0%}, written {written}, read {read}"
        self._display.show(len(self.outcomes), len(self._part.requests), note)

    def _interrupt(self, node: DemoNode, while_down: Callable[[Path], None]) -> None:
        """Kill daemon and target while replicas are at work, start them again, and read everything back."""
        counted = _counted_evictions(node)
        if counted:
            # Events end with the daemon. What the writes under way may have evicted since cannot have been told.
            counted += sum(len(self._part.requests[w.busy].blocks) for w in self._workers if w.busy is not None)
        self._evictions += counted
        acknowledged = sorted(self._ledger.acknowledged)
        node.kill()
        self._display.say(f"daemon and target killed (SIGKILL) with {len(acknowledged)} blocks acknowledged")
        while_down(node.data)
        self.report.node_restart_s = node.start()
        self.report.acknowledged_at_kill = len(acknowledged)
        found = self._check(node, acknowledged)
        self.report.found_after_kill = found.good
        self._display.say(
            f"the node is back after {self.report.node_restart_s:.1f} s; "
            f"{found.good} of {len(acknowledged)} blocks found and equal"
        )

    def _finish(self, node: DemoNode) -> None:
        """Read back everything that was ever acknowledged."""
        acknowledged = sorted(self._ledger.acknowledged)
        found = self._check(node, acknowledged)
        report = self.report
        report.acknowledged = len(acknowledged)
        report.found_at_end = found.good
        report.evicted = max(len(self._ledger.evicted), self._evictions + _counted_evictions(node))

    def _check(self, node: DemoNode, blocks: Sequence[int]) -> Audit:
        from forebay.client import connect

        with connect(node.url, schema=block_schema(self._scale), token=node.token) as client:
            found = audit(client, self._contents, blocks)
        lost = self._lost(node, found)
        self.report.bytes_audited += found.read_bytes
        self.lost.update(lost)
        self.wrong.update(found.wrong)
        for block in lost[:_NAMED]:
            why = "dropped by the node as bad" if block in self._ledger.bad else found.missing[block]
            self._display.say(f"LOST: block {block}, acknowledged and not evicted, is a miss: {why}")
        for block in found.wrong[:_NAMED]:
            self._display.say(f"WRONG: block {block} has other bytes than those stored")
        return found

    def _lost(self, node: DemoNode, found: Audit) -> list[int]:
        """The losses. Where events may be under way that say why a block went, a suspicion stands after a while."""
        deadline = time.monotonic() + _EVENTS_S
        while True:
            evictions = self._evictions + _counted_evictions(node)
            lost = self._ledger.lost(found.missing, evictions)
            told = all(found.missing[b] != "absent" or b in self._ledger.bad for b in lost)
            if not lost or (told and not evictions) or time.monotonic() > deadline:
                return lost
            time.sleep(_RETRY_S)


def _counted_evictions(node: DemoNode) -> int:
    with node.admin() as admin:
        return int(admin.status().counters.get("blocks_evicted", 0))


def _plan(options: DemoOptions) -> tuple[Inputs, Sample, Scale]:
    """Choose the requests and the size of a block."""
    scale = Scale.of(MODEL, options.block_bytes)
    if options.trace is not None:
        source, requests = f"trace {options.trace.name}", read_trace(options.trace)
    else:
        source, requests = "generated conversations", generate(options.seed, _GENERATED_REQUESTS)
    most = None if options.budget_bytes is None else max(1, options.budget_bytes // scale.block_bytes)
    part = sample(requests, options.seed, most)
    written = len({block for r in part.requests for block in r.blocks}) * scale.block_bytes
    # Nothing need be evicted: a quarter more than is written, and some regions for size classes and writes under way.
    capacity = options.capacity_bytes or align_up(written * 5 // 4, _REGION_BYTES) + 4 * _REGION_BYTES
    inputs = Inputs(
        source=source,
        seed=options.seed,
        model=MODEL.name,
        model_bytes_per_token=MODEL.bytes_per_token,
        bytes_per_token=scale.bytes_per_token,
        block_bytes=scale.block_bytes,
        conversations=part.conversations,
        conversations_total=part.conversations_total,
        requests=len(part.requests),
        input_tokens=sum(r.input_tokens for r in part.requests),
        ceiling_tokens=ceiling_tokens(part.requests),
        capacity_bytes=capacity,
    )
    return inputs, part, scale


def run_demo(
    options: DemoOptions, data: Path, display: Display, while_down: Callable[[Path], None] = lambda _data: None
) -> Report:
    """Run the demo with a node in ``data`` (a directory that is absent or empty) and return what came of it.

    ``while_down`` is called with the node's directory while the node is dead. Every process has ended on return,
    however that comes about. Raises `InvalidArgument` for bad options, `CapacityShort` when the drive is too small, and
    `Unavailable` when the node or a replica fails, or nothing at all was stored.
    """
    began = time.monotonic()
    inputs, part, scale = _plan(options)
    display.say(
        f"{inputs.source}: {inputs.conversations} of {inputs.conversations_total} conversations, "
        f"{inputs.requests} requests; blocks of {format_size(inputs.block_bytes)}, 1 in {scale.factor:.3g} of "
        f"{inputs.model}'s; an infinite cache would give back "
        f"{inputs.ceiling_tokens / max(1, inputs.input_tokens):.1%} of the tokens"
    )
    free = shutil.disk_usage(data).free
    if inputs.capacity_bytes > free:
        raise CapacityShort(
            f"the run needs {format_size(inputs.capacity_bytes)} and {data} has {format_size(free)} free: take a "
            "smaller --budget or --block-size, or --data (or TMPDIR) on a larger drive",
            field="capacity",
            limit=free,
        )
    node = DemoNode(data / "node", inputs.capacity_bytes, data / "node.log")
    demo = _Demo(options, inputs, part, scale, display)
    try:
        demo.run(node, while_down)
    finally:
        with ignored():  # a second Ctrl-C must not leave processes behind
            node.stop()
    report = demo.report
    report.add(demo.outcomes, scale)
    report.lost_blocks, report.wrong_blocks = len(demo.lost), len(demo.wrong)
    assumption = PREFILL_SOURCE if options.prefill_tokens_per_s == PREFILL_TOKENS_PER_S else "--prefill-tokens-per-s"
    report.ttft = TimeToFirstToken.of(demo.outcomes, scale, options.prefill_tokens_per_s, assumption)
    report.wall_s = time.monotonic() - began
    if not report.acknowledged:
        raise Unavailable(f"the node stored nothing: {report.misses}", field="node")
    return report
