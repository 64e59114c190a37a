"""Both halves of vLLM's connector, with caches but no engine: `python -m tests.connectors.halves URL TARGET`.

It wants torch. A scheduler's half and the workers' halves of some ranks take steps together, as vLLM would make them.
``TARGET`` is the process of the node's target, which is stopped for a while. Prints a JSON object of what was seen.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch

from forebay.client import ClientOptions, registered
from forebay.client.registered import address_of, find
from forebay.clock import SystemClock
from forebay.connectors.keys import STABLE_HASH, tiled
from forebay.connectors.vllm import loads
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.messages import GroupFacts, Load, WorkerFacts, WorkerReport
from forebay.connectors.vllm.scheduler import SchedulerHalf
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.worker import WorkerHalf
from forebay.schema import Group, HashAlgorithm, Schema
from tests.connectors.fakes import BLOCK, BLOCKS, PLAIN, Output, Request, hashes
from tests.waiting import halted

HEADS, LAYERS, CONTENT = 4, 3, 10
ROWS = 120
OPTIONS = ClientOptions(attempt_ms=20_000, connect_ms=20_000)
NAMES = [f"layer {i}" for i in range(LAYERS)]


def schema(layer_groups: int) -> Schema:
    """Blocks of all heads and layers, cut into so many parts by layers."""
    plain = Group("full", tuple(range(LAYERS)), BLOCK, HEADS, CONTENT * 4, "float32", "test")
    group = tiled(plain, max_ranks=4, layer_groups=layer_groups)
    return Schema("vllm", bytes(32), HashAlgorithm(STABLE_HASH, BLOCK), (group,))


class Engine:
    """Some ranks, each with its heads of a cache whose every number is random."""

    def __init__(self, url: str, ranks: int, seed: int, *, layer_groups: int = 1, **config: Any) -> None:
        config = {"url": url, "guard": False, "probe_timeout_ms": 30_000, "load_timeout_ms": 30_000, **config}
        self.settings = settings = Settings.from_config(config)
        torch.manual_seed(seed)
        self.cache = torch.rand((LAYERS, ROWS, HEADS, BLOCK, CONTENT))
        self.counters = Counters()
        self.counts: dict[str, float] = {}
        self.scheduler = SchedulerHalf(settings, PLAIN, ranks, self.counters, SystemClock())
        self.scheduler.start(schema(layer_groups), OPTIONS)
        self.workers = []
        each = HEADS // ranks
        for rank in range(ranks):
            worker = WorkerHalf(settings, (rank, ranks), self.counters, OPTIONS, SystemClock())
            mine = [layer[:, rank * each : (rank + 1) * each] for layer in self.cache]
            held = GroupFacts(PLAIN.groups[0], tuple(range(LAYERS)), each, CONTENT * 4, "float32", "test")
            worker.register([mine], WorkerFacts((held,), BLOCK), [NAMES])
            self.workers.append(worker)
        self.received: dict[str, int] = {}
        self.failed: set[int] = set()

    def step(self, output: Output, ended: Collection[str] = ()) -> None:
        """One step of all ranks; a load has ended when it has for every rank."""
        work = self.scheduler.step(output)
        report, done, failed = WorkerReport(), set(), set()
        first = any(load.in_step for load in work.loads)
        for worker in self.workers:
            if first:  # vLLM begins other loads once the step has been computed
                worker.begin(work)
            for name in NAMES:
                worker.wait_for_layer(name)
                worker.layer_computed(name, work)
            if not first:
                worker.begin(work)
            worker.end(work)
            seen = worker.received(set(ended), idle=work.idle)
            for ident in seen.requests:
                self.received[ident] = self.received.get(ident, 0) + 1
                if self.received[ident] == len(self.workers):
                    done.add(ident)
            failed |= seen.failed_blocks
            report.add(worker.report())
        self.failed |= failed
        self.scheduler.heard(report, done, self.failed)
        for name, count in self.counters.take().items():
            self.counts[name] = self.counts.get(name, 0) + count

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until something holds; the deadline only ends a test that fails."""
        end = time.monotonic() + 60
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within a minute: {self.counts}")
            self.step(Output())

    def ask(self, request: Request) -> int:
        """How many tokens of a request the node has."""
        self.scheduler.arrived(request)
        answers: list[int | None] = []

        def answered() -> bool:
            answers.append(self.scheduler.matched(request, 0)[0])
            return answers[-1] is not None

        self.until(answered)
        return answers[-1] or 0

    @property
    def client(self) -> Any:
        """The first worker's, if it is there."""
        link = self.workers[0]._link
        return None if link is None else link.client

    def compute(self, request: Request) -> None:
        """A step that computes a request of which the node has nothing, into the rows that `Output` gives it."""
        assert self.ask(request) == 0
        self.step(Output({request.request_id: request.num_prompt_tokens}))

    def compute_crowded(self, request: Request) -> list[float]:
        """`compute`, whose blocks find no memory: how many are counted, and the saves that are left."""
        memory = self.workers[0]._staging._memory
        lent = memory.take(self.settings.staging_bytes)
        assert lent is not None
        self.compute(request)
        memory.give(lent)
        return [self.counts["unstored_blocks:no_staging"], len(self.scheduler._saves._saving)]

    def save(self, request: Request) -> None:
        """Have it that a request was computed, and is stored."""
        self.until(lambda: self.scheduler._saves.ready)
        self.compute(request)
        self.until(lambda: self.counts.get("stored_blocks", 0) == BLOCKS * len(self.workers))

    def load(self, request: Request, first: int) -> set[int]:
        """Load a request into the rows from ``first`` on; which of its blocks are missing."""
        return self.take(request, first, self.ask(request))

    def take(self, request: Request, first: int, tokens: int) -> set[int]:
        """`load` so many tokens of a request that has been asked about."""
        self.scheduler.allocated(request, [list(range(first, first + BLOCKS))], tokens)
        self.failed = set()
        if self.scheduler._in_step:
            self.step(Output({request.request_id: 1}))
        else:
            self.until(lambda: self.received.get(request.request_id, 0) == len(self.workers))
        return {row - first for row in self.failed}

    def load_at_last(self, text: str, first: int) -> None:
        """Load what may not be to be had for a while: its target may have been given up, and be started anew."""
        end, number = time.monotonic() + 60, 0
        while self.load(Request(f"{text} at {first} {number}", hashes(text)), first):
            if time.monotonic() > end:
                raise TimeoutError(f"not within a minute: {self.counts}")
            number += 1
            self.until(lambda: self.client is not None)

    def same(self, other: Engine, first: int, blocks: list[int]) -> bool:
        """Whether blocks here, from ``first`` on, are what another engine computed."""
        mine, theirs = self.cache[:, first : first + BLOCKS], other.cache[:, 100 : 100 + BLOCKS]
        return bool((mine[:, blocks] == theirs[:, blocks]).all())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def layered(url: str) -> dict[str, Any]:
    """Blocks in parts by layers: what ranks wrote part by part others read, before a step or in it."""
    seen: dict[str, Any] = {}
    writers = {ranks: Engine(url, ranks, 10 + ranks, layer_groups=2) for ranks in (1, 2)}
    for ranks, writer in writers.items():
        writer.save(Request(f"in parts by {ranks}", hashes(f"parts {ranks}")))
    readers = [Engine(url, ranks, 20 + ranks, layer_groups=2, load="layers") for ranks in (1, 2, 4)]
    for wrote, writer in writers.items():
        for reader in (*readers, writers[3 - wrote]):
            ranks, first = len(reader.workers), 10 * wrote
            untouched = reader.cache[:, first + BLOCKS].clone()
            missing = reader.load(Request(f"parts {wrote} {ranks}", hashes(f"parts {wrote}")), first)
            exact = not missing and reader.same(writer, first, list(range(BLOCKS)))
            exact = exact and bool((reader.cache[:, first + BLOCKS] == untouched).all())
            seen[f"parts of {wrote} to {ranks}{' in a step' * reader.scheduler._in_step}"] = exact
    # One block goes between the lookup and the step: it and those after it are lost, and those before it are there.
    gone, reader = Request("gone", hashes("parts 2")), readers[1]
    tokens = reader.ask(gone)
    writers[1].client.delete([hashes("parts 2")[3]])
    seen["lost in a step"] = sorted(reader.take(gone, 60, tokens))
    seen["kept in a step"] = reader.same(writers[2], 60, [0, 1, 2])
    # Saves that find no memory are counted, and told of, once for all their parts.
    writer = writers[1]
    seen["no room for parts"] = writer.compute_crowded(Request("crowded parts", hashes("crowded parts")))
    writer.workers[0]._groups[0].parts[0].tensors.gather = None  # type: ignore[assignment,method-assign]
    writer.compute(Request("spoilt parts", hashes("spoilt parts")))
    writer.until(lambda: not writer.scheduler._saves._saving)
    seen["unstored parts"] = [writer.counts["unstored_blocks:error"], writer.workers[0]._staging.staged_bytes]
    for engine in (*writers.values(), *readers):
        engine.close()
    return seen


def in_parts(url: str) -> dict[str, Any]:
    """Loads of several parts, two of which are under way at once: exact, and lost from the first gap on."""
    whole, loads.PART_BYTES = loads.PART_BYTES, 2 * LAYERS * HEADS * BLOCK * CONTENT * 4
    writer, reader = Engine(url, 1, 60), Engine(url, 1, 61)
    writer.save(Request("in parts", hashes("in parts")))
    missing = reader.load(Request("all parts", hashes("in parts")), 10)
    seen: dict[str, Any] = {"parts": not missing and reader.same(writer, 10, list(range(BLOCKS)))}
    gone = Request("a part gone", hashes("in parts"))
    tokens = reader.ask(gone)
    writer.client.delete([hashes("in parts")[3]])
    seen["lost of parts"] = sorted(reader.take(gone, 20, tokens))
    seen["kept of parts"] = reader.same(writer, 20, [0, 1, 2])
    seen["counted of parts"] = [reader.counts.get(f"lost_blocks:{why}") for why in ("evicted", "behind_gap")]
    for engine in (writer, reader):
        engine.close()
    loads.PART_BYTES = whole
    return seen


def reached(url: str) -> dict[str, Any]:
    """Whatever is read into, or written from, devices may reach: it lies in memory that is registered."""
    calls: Counter[str] = Counter()
    engine = Engine(url, 1, 40)
    engine.until(lambda: engine.client is not None)
    client = engine.client

    def watched(name: str) -> Callable[..., Any]:
        call = getattr(client, name)

        def around(keys: Any, buffers: Any, **options: Any) -> Any:
            found = [find(address_of(memoryview(buffer)), len(buffer)) for buffer in buffers]
            calls[name if all(found) else f"{name} elsewhere"] += 1
            return call(keys, buffers, **options)

        return around

    client.get_into, client.put = watched("get_into"), watched("put")
    engine.save(Request("reached", hashes("reached")))
    assert engine.load(Request("reached again", hashes("reached")), 20) == set()
    before = [len(every) for every in registered._known]
    engine.close()
    return {"reached": dict(calls), "left registered": len(registered._known[0]) - before[0]}


def late(url: str, target: int) -> dict[str, Any]:
    """A load that is late, whose bytes the target sends afterwards: they reach nobody who has its memory next."""
    writer, reader = Engine(url, 1, 50), Engine(url, 1, 51, load_timeout_ms=2_000)
    writer.save(Request("late", hashes("late")))
    reader.load_at_last("late", 10)
    passing: Any = reader.workers[0]._passing
    slow = Request("slow", hashes("late"))
    tokens, before = reader.ask(slow), reader.cache[:, 20 : 20 + BLOCKS].clone()
    with halted(target):
        missing = sorted(reader.take(slow, 20, tokens))
        left = passing.lent_bytes
        spaces = []
        while (space := passing.take(1 << 20)) is not None:
            space.memory[:] = 0x5A
            spaces.append(space)
    writer.load_at_last("late", 30)  # the target has got over what it owed
    seen = {
        "late": missing,
        "late left": left,
        "late wrote": sum(int((space.memory != 0x5A).sum()) for space in spaces),
        "late in the cache": bool((reader.cache[:, 20 : 20 + BLOCKS] == before).all()),
    }
    for space in spaces:
        passing.give(space)
    reader.load_at_last("late", 40)
    seen["after all"] = reader.same(writer, 40, list(range(BLOCKS)))
    for engine in (writer, reader):
        engine.close()
    return seen


def main(url: str, target: str) -> None:
    engines = {ranks: Engine(url, ranks, ranks) for ranks in (1, 2, 4)}
    seen: dict[str, Any] = {}
    everything = list(range(BLOCKS))
    for ranks, engine in engines.items():
        engine.save(Request(f"saved by {ranks}", hashes(str(ranks))))
    for wrote, writer in engines.items():
        for read, reader in engines.items():
            if read == wrote:
                continue
            first = 10 * wrote
            untouched = reader.cache[:, first + BLOCKS].clone()
            missing = reader.load(Request(f"{wrote} {read}", hashes(str(wrote))), first)
            exact = not missing and reader.same(writer, first, everything)
            seen[f"{wrote} to {read}"] = exact and bool((reader.cache[:, first + BLOCKS] == untouched).all())
    one, two = engines[1], engines[2]
    # A block that goes between the lookup and the load.
    gone = Request("gone", hashes("1"))
    assert two.ask(gone) == BLOCKS * BLOCK
    one.client.delete([hashes("1")[3]])
    seen["missing"] = sorted(two.take(gone, 60, BLOCKS * BLOCK))
    seen["rest"] = two.same(one, 60, [0, 1, 2, 4])
    seen["evicted"] = two.counts.get("lost_blocks:evicted")
    # One that ends when the step's ends have been told already: how long it took is told with its end.
    ended, worker = Load("ended late", ()), one.workers[0]
    worker._under_way[ended.request] = ended
    worker._loaded(ended, set(), 0.5)
    told = [worker.report().loaded, worker.received(set(), idle=False).requests, worker.report().loaded]
    seen["told together"] = [list(each) for each in told]
    # One that is given up: it ends, and says what it did not load.
    given_up = Request("given up", hashes("2"))
    tokens = one.ask(given_up)
    one.scheduler.allocated(given_up, [list(range(80, 80 + BLOCKS))], tokens)
    one.step(Output(), ["given up"])
    one.until(lambda: "given up" in one.received)
    seen["ended"] = one.received["given up"]
    # Two replicas that compute the same prompt at once: each block is one's or the other's, and whole.
    both = [Request("of one", hashes("both")), Request("of two", hashes("both"))]
    before = [engine.counts["stored_blocks"] for engine in (one, two)]
    assert [one.ask(both[0]), two.ask(both[1])] == [0, 0]
    for engine, request in zip((one, two), both, strict=True):
        engine.step(Output({request.request_id: request.num_prompt_tokens}))
    for engine in (one, two):
        engine.until(lambda: not engine.scheduler._saves._saving)  # noqa: B023
    stored = [engine.counts["stored_blocks"] - count for engine, count in zip((one, two), before, strict=True)]
    seen["stored at once"] = stored[0] + stored[1] / 2
    four = engines[4]
    assert four.load(Request("of both", hashes("both")), 90) == set()
    seen["whole"] = [four.same(one, 90, [block]) != four.same(two, 90, [block]) for block in everything]
    # A step whose blocks find no memory: they are not saved, and are once they come by again.
    seen["no room"] = one.compute_crowded(Request("crowded", hashes("crowded")))
    so_far = one.counts["stored_blocks"]
    one.compute(Request("with room", hashes("crowded")))
    one.until(lambda: one.counts["stored_blocks"] == so_far + BLOCKS)
    # A copy that fails: the save has ended, and holds no memory.
    one.workers[0]._groups[0].parts[0].tensors.gather = None  # type: ignore[assignment,method-assign]
    one.compute(Request("spoilt", hashes("spoilt")))
    seen["unstored"] = one.counts["unstored_blocks:error"]
    seen["left over"] = [len(one.scheduler._saves._saving), one.workers[0]._staging.staged_bytes]
    for engine in engines.values():
        engine.close()
    print(json.dumps({**seen, **layered(url), **in_parts(url), **reached(url), **late(url, int(target))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
