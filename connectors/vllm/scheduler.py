"""The half of the connector that runs in vLLM's scheduler: what to load, what to save, and nothing that waits.

Calls on the node are made by other threads; the scheduler's thread looks for their answers when it comes by. All state
belongs to that thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from forebay.client import Client, ClientOptions
from forebay.clock import Clock
from forebay.connectors.guard import Guard
from forebay.connectors.keys import block_key, variant
from forebay.connectors.vllm.adapters import Adapters
from forebay.connectors.vllm.advice import Advice, token_limit
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.elsewhere import Elsewhere
from forebay.connectors.vllm.fills import StepFills
from forebay.connectors.vllm.groups import CacheGroups
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Load, Rows, Save, SessionOffer, StepWork, WorkerReport
from forebay.connectors.vllm.modes import ModeSwitch
from forebay.connectors.vllm.other_loads import OtherLoads
from forebay.connectors.vllm.requests import Probe, Tracked, Whole
from forebay.connectors.vllm.saves import Saves
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.shared_loads import SharedLoads
from forebay.ids import MAX_BATCH_KEYS, BlockKey
from forebay.schema import Schema

__all__ = ["SchedulerHalf"]

_log = logging.getLogger("vllm.forebay")

_TOUCHED = 100_000
"""Blocks that are remembered for the policy of second touches."""
_SAVE_BYTES = 16 << 20
"""A step's blocks are saved in parts of about this size, so that those that find staging memory go, and go at once."""
_IDLE_S = 0.001
"""How long a step that computes nothing waits for an answer that is on its way."""
_LATE_MS = 100
"""A probe that has not answered this long after its deadline is not waited for."""


class SchedulerHalf:
    """Decides for all ranks. ``ranks`` is how many there are; `start` gives it the schema they agree on."""

    def __init__(self, settings: Settings, groups: CacheGroups, ranks: int, counters: Counters, clock: Clock) -> None:
        self._settings = settings
        self._groups = groups
        self.null_block: int | None = None
        """What stands in the engine's block tables where a block is not needed."""
        self._ranks = ranks
        self._counters = counters
        self._clock = clock
        self._adapters = Adapters()
        self._elsewhere = Elsewhere()
        self._mode = ModeSwitch(settings.mode, settings.mode_file, clock)
        self._guard = Guard(clock, tokens_per_s=settings.prefill_tokens_per_s, limit_ms=settings.load_timeout_ms)
        self._steps: deque[tuple[int, int]] = deque(maxlen=64)
        self._stepped_ms = 0
        self._link: Link | None = None
        self._schema: Schema | None = None
        self._block_bytes: list[int] = []
        self._probing = ThreadPoolExecutor(2, "forebay-probe")
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._in_step = settings.load == "layers"
        self._fills = StepFills(groups)
        self._shared = SharedLoads()
        self._others = OtherLoads()
        self._offer: SessionOffer | None = None
        self._touched: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._saves = Saves(ranks, settings.save_timeout_ms, counters)

    def start(self, schema: Schema, options: ClientOptions) -> None:
        """Connect to the node; if that fails, go on trying in the background."""
        settings = self._settings
        self._schema = schema
        self._block_bytes = [group.layout().value_bytes for group in schema.groups]
        what = f"forebay {settings.url} {settings.namespace}"
        self._link = Link(lambda: settings.connect(schema, options), self._clock, what)
        self._link.wait(options.connect_ms)

    def close(self) -> None:
        """End the session."""
        self._probing.shutdown(wait=False, cancel_futures=True)
        self._saves.close()
        if self._link is not None:
            self._link.close()

    # --- looking up -------------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request: ask what is stored of it before the scheduler does."""
        tracked = self._requests[request.request_id] = Tracked(request)
        self._ask(tracked)

    def _ask(self, tracked: Tracked) -> None:
        request = tracked.request
        tracked.probe, tracked.counted = None, False
        tracked.preemptions = request.num_preemptions
        client = self._client()
        if client is None or tracked.computed or not self._plain(tracked) or self._mode.now == "off":
            return
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[: self._most_hashes]]
        tracked.asked_at_ms = self._clock.monotonic_ms()
        adapter, salt = request.lora_request, request.cache_salt or ""
        until_ms = tracked.asked_at_ms + self._settings.probe_timeout_ms
        tracked.probe = self._probing.submit(self._probe, adapter, salt, hashes, until_ms)

    def _plain(self, tracked: Tracked) -> bool:
        return tracked.plain(multimodal=self._settings.multimodal)

    def _probe(self, adapter: Any, salt: str, hashes: Sequence[bytes], until_ms: int) -> Probe:
        """In a thread: the answer to `_ask`, that nobody waits for after ``until_ms``. Raises nothing."""
        try:
            content = b"" if adapter is None else self._adapters.digest(adapter)
            if content is None:
                return Probe(None)
            prefix = variant(adapter=content, salt=salt)
            return Probe.of(prefix, self._match(prefix, hashes, until_ms))
        except Exception:  # the engine must live on; the request is computed
            _log.exception("a lookup failed")
            return Probe(None)

    @property
    def _most_hashes(self) -> int:
        """Of how many hashes all groups' blocks go into one call."""
        blocks = sum(self._groups.unit_tokens // group.block_tokens for group in self._groups.groups)
        return MAX_BATCH_KEYS // blocks * self._groups.unit_tokens // self._groups.hash_tokens

    def _match(self, prefix: bytes, hashes: Sequence[bytes], until_ms: int) -> list[tuple[str, ...]]:
        """In a thread: the node's word for each whole block of each group."""
        groups = self._groups
        counts = [groups.blocks(group, len(hashes) * groups.hash_tokens) for group in range(len(groups.groups))]
        names = [
            (block_key(hashes[groups.hashed(group, block)], prefix), group)
            for group, count in enumerate(counts)
            for block in range(count)
        ]
        words = self._words(names, until_ms)
        ends = [sum(counts[: group + 1]) for group in range(len(counts))]
        return [words[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _words(self, names: Sequence[tuple[bytes, int]], until_ms: int) -> tuple[str, ...]:
        """In a thread: what the node says of each key and group, if it answers by ``until_ms``.

        What waited for a thread behind calls that got no answer is not asked any more.
        """
        client, left_ms, link = self._client(), until_ms - self._clock.monotonic_ms(), self._link
        if client is None or link is None or left_ms <= 0:
            return ("deadline_exceeded" if left_ms <= 0 else "unavailable",) * len(names)
        if not names:
            return ()
        scope = self._settings.scope_id(client)
        keys = [BlockKey(name, group, scope) for name, group in names]
        words = self._elsewhere.explained(client, client.match(keys, deadline_ms=left_ms), left_ms)
        # A node is not slow because a lookup has spent most of its time waiting for a thread.
        if 2 * left_ms >= self._settings.probe_timeout_ms or "deadline_exceeded" not in words:
            link.note(words)
        return words

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed_tokens`` can be loaded, and whether that takes a while; None: ask again."""
        self._others.asked(request, computed_tokens)
        if self._fills.shared(request, computed_tokens):
            return None, False
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:  # it wants what only computing gives
            return 0, False
        if request.num_preemptions != tracked.preemptions:
            self._ask(tracked)
        if tracked.probe is None or tracked.computed:
            return 0, False
        answer = tracked.answer
        if answer is None:
            waited_ms = self._clock.monotonic_ms() - tracked.asked_at_ms
            if waited_ms < self._settings.probe_timeout_ms + _LATE_MS:
                return None, False
            if not tracked.counted:
                tracked.counted = True
                self._counters.add("missed_blocks", len(request.block_hashes), "deadline_exceeded")
            return 0, False
        if answer.variant is None:
            return 0, False
        start = tracked.start_tokens = computed_tokens
        # The last token is computed again where all are there: on top of its block, which a window or a state forbids.
        # A step that computes with what it loads has to have something to compute.
        whole = self._groups.plain and not self._in_step
        most = request.num_tokens if whole else request.num_tokens - 1
        if self._groups.redrafted:
            most = max(start, self._groups.longest(answer.present, start, most) - self._groups.unit_tokens)
        limit = token_limit(request, "max_load_tokens")
        if limit is not None:
            most = min(most, start + limit)
        if start < most and self._shared.waits(request.request_id, self._next_hash(request, start)):
            return None, False
        if not tracked.counted:
            tracked.counted = True
            tracked.wanted_tokens = self._decide(answer, start, self._groups.longest(answer.present, start, most))
        tokens = self._groups.longest(answer.present, start, min(most, start + tracked.wanted_tokens)) - start
        if not tokens or self._mode.now != "on" or self._session() is None:
            return 0, False
        return tokens, not self._in_step

    def _next_hash(self, request: Any, tokens: int) -> bytes:
        """The hash of what comes after so many tokens; empty if that is not a whole block."""
        number = tokens // self._groups.hash_tokens
        return bytes(request.block_hashes[number]) if number < len(request.block_hashes) else b""

    def _decide(self, answer: Probe, start: int, end: int) -> int:
        """How many of the tokens from ``start`` to ``end`` to load; counts the answer and the decision."""
        groups, unit = self._groups, self._groups.unit_tokens
        blocks = self._blocks(start, end)
        self._counters.add("hit_blocks", blocks)
        for group, reasons in enumerate(answer.reasons):
            for reason in reasons[groups.blocks(group, end) :]:
                self._counters.add("missed_blocks", reason="behind_gap" if reason == "ok" else reason)
        if not blocks or not self._settings.guard:
            return end - start
        verdict = self._guard.verdict((end - start) // unit, unit)
        self._counters.add("decisions", reason=verdict.reason)
        wanted = groups.longest(answer.present, start, start + verdict.blocks * unit)
        if wanted < end:
            self._counters.add("lost_blocks", max(0, blocks - self._blocks(start, wanted)), "guard")
        return wanted - start

    def _blocks(self, start: int, end: int) -> int:
        """How many blocks of all groups are loaded for the tokens from ``start`` to ``end``."""
        return sum(len(self._groups.rows(group, start, end)) for group in range(len(self._groups.groups)))

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The scheduler commits to loading ``tokens``; ``tables`` are the request's blocks, by group."""
        tracked = self._requests.get(request.request_id)
        if not tokens or tracked is None:
            return
        answer = tracked.answer
        assert answer is not None and answer.variant is not None, "the scheduler was told that there is something"
        start, end = tracked.start_tokens, tracked.start_tokens + tokens
        parts = []
        for group, table in enumerate(tables):
            rows = range(self._groups.blocks(group, start), self._groups.blocks(group, end))
            held = [row for row in rows if table[row] != self.null_block]
            keys = [tracked.key(answer.variant, self._groups.hashed(group, row)) for row in held]
            parts.append(Rows(group, tuple(keys), tuple([table[row] for row in held])))
        if self._in_step:
            self._fills.load(tracked)
        else:
            self._shared.begin(request.request_id, self._next_hash(request, start))
        tracked.loading, tracked.failed = parts[0].blocks if self._groups.plain else (), False
        self._guard.began(request.request_id, tokens // self._groups.unit_tokens)
        self._loads.append(
            Load(
                request.request_id,
                tuple([part for part in parts if part.keys]),
                advice=Advice.of(request),
                in_step=self._in_step,
            )
        )

    # --- each step --------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepWork:
        """What the workers are to do with the step that the scheduler has just made (vLLM's `SchedulerOutput`)."""
        saves: tuple[Save, ...] = ()
        plans: list[tuple[int, bytes]] = []
        dropped: list[int] = []
        try:
            may_save = self._others.made(output, [load.request for load in self._loads if load.in_step])
            plans, dropped = self._saves.tell(self._link)
            if self._mode.now == "on" and self._session() is not None and self._settings.save != "none" and may_save:
                saves = self._to_save(output)
        except Exception:  # loads must begin whatever becomes of saves: requests wait for them
            _log.exception("no saves in this step")
        loads, self._loads = tuple(self._loads), []
        self._fills.made(loads, output, self._requests)
        idle = not output.total_num_scheduled_tokens
        if idle:
            self._yield()
        # A step that waits for loads says nothing about how fast it computes.
        self._steps.append(
            (self._clock.monotonic_ms(), 0 if self._fills.loading else output.total_num_scheduled_tokens)
        )
        offer = self._offer if len(self._saves.hosts) < self._ranks else None
        return StepWork(offer, loads, saves, tuple(plans), tuple(dropped), idle)

    def _yield(self) -> None:
        """Let the threads that ask the node go on: an engine that has nothing to compute steps in a tight loop.

        Each of them would get the interpreter only when it is taken from that loop, every five milliseconds.
        """
        asked = [each.probe for each in self._requests.values() if each.probe is not None and not each.probe.done()]
        if asked:
            wait(asked, _IDLE_S, FIRST_COMPLETED)

    def stepped(self) -> None:
        """The output of the oldest step under way is there: learn how long it took."""
        self._others.known()
        if not self._steps:
            return
        began_ms, tokens = self._steps.popleft()
        now_ms = self._clock.monotonic_ms()
        # With asynchronous scheduling a step is made while the one before it is still being computed.
        self._guard.computed(tokens, (now_ms - max(began_ms, self._stepped_ms)) / 1000)
        self._stepped_ms = now_ms

    def _session(self) -> SessionOffer | None:
        """The session that workers join, if there is one: without it they are given nothing to do."""
        client = self._client()
        if client is None or self._schema is None:
            return self._offer
        # Several ranks write together in one session only: when it was lost, they join the new one. One alone that has
        # joined goes on in a session of its own; before that it would ask for one that is gone for ever.
        stays = self._ranks == 1 and self._saves.hosts
        if self._offer is None or (self._offer.token != client.join_token and not stays):
            number = self._offer.number + 1 if self._offer else 1
            self._offer = SessionOffer(number, client.join_token, self._schema.cbor)
            self._saves.hosts.clear()
        return self._offer

    def _to_save(self, output: Any) -> tuple[Save, ...]:
        client, link = self._client(), self._link
        if client is None or link is None or not self._saves.ready:
            return ()
        state = output.kv_connector_block_state
        blocks: list[dict[bytes, Whole]] = [{} for _ in self._groups.groups]
        for ident, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(ident)
            if tracked is not None:
                self._whole_blocks(tracked, scheduled, state, blocks)
        for ident, states in state.boundary_state_offloads.items():
            tracked = self._requests.get(ident)
            for group, block, tokens in states:
                if tracked is not None and tokens % self._groups.groups[group].block_tokens == 0:
                    row = self._groups.blocks(group, tokens) - 1
                    self._consider(tracked, tokens, group, {row: block}, blocks)
        scope, saves = self._settings.scope_id(client), []
        for group, found in enumerate(blocks):
            each = min(MAX_BATCH_KEYS, max(1, _SAVE_BYTES // self._block_bytes[group]))
            for advice in dict.fromkeys(whole.advice for whole in found.values()):
                rows = [(key, whole) for key, whole in found.items() if whole.advice == advice]
                saves += [self._saves.begin(link, scope, group, rows[i : i + each]) for i in range(0, len(rows), each)]
        return tuple(saves)

    def _whole_blocks(self, tracked: Tracked, scheduled: int, state: Any, blocks: list[dict[bytes, Whole]]) -> None:
        """Add a request's blocks that are whole after this step, by group and key."""
        request, groups = tracked.request, self._groups
        # Tokens whose KV there will be, without those that are only guessed: the engine hashes accepted ones alone.
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        tokens = min(tokens, len(request.block_hashes) * groups.hash_tokens)
        if tracked.answer is None or tokens // groups.hash_tokens == tracked.considered_tokens // groups.hash_tokens:
            return
        tables = state.get_block_ids(request.request_id)
        for group, spec in enumerate(groups.groups):
            if spec.kind == "mamba":
                continue  # of these the engine tells which block holds the state at which token
            rows = range(groups.blocks(group, tracked.considered_tokens), groups.blocks(group, tokens))
            held = {row: tables[group][row] for row in rows if tables[group][row] != self.null_block}
            self._consider(tracked, tokens, group, held, blocks)
        tracked.considered_tokens = tokens

    def _consider(
        self, tracked: Tracked, tokens: int, group: int, rows: Mapping[int, int], blocks: list[dict[bytes, Whole]]
    ) -> None:
        """Add those of a request's blocks that are to be saved, and that nobody has as far as is known."""
        request, answer = tracked.request, tracked.answer
        if answer is None or answer.variant is None or not self._plain(tracked) or tracked.spoilt:
            return
        if request.num_prompt_tokens < self._settings.save_min_tokens:
            return
        if self._settings.save == "prompt":
            tokens = min(tokens, request.num_prompt_tokens)
        limit = token_limit(request, "max_offload_tokens")
        if limit is not None:
            tokens = min(tokens, limit)
        most = min(tokens, request.num_tokens, len(request.block_hashes) * self._groups.hash_tokens)
        advice = Advice.of(request)
        for row, block in rows.items():
            if row >= self._groups.blocks(group, most) or answer.has(group, row):
                continue
            key = tracked.key(answer.variant, self._groups.hashed(group, row))
            if self._saves.has(group, key) or key in blocks[group]:
                continue
            if self._settings.save != "second_touch" or self._touch(group, key):
                before = row and tracked.key(answer.variant, self._groups.hashed(group, row - 1))
                blocks[group][key] = Whole(block, before or b"", advice)

    def _touch(self, group: int, key: bytes) -> bool:
        """Whether a block has come by before, as far as is remembered."""
        block = group, key
        known = block in self._touched
        self._touched[block] = None
        self._touched.move_to_end(block)
        if len(self._touched) > _TOUCHED:
            self._touched.popitem(last=False)
        return known

    @property
    def waited_for(self) -> bool:
        """Whether workers wait for another step, to be told what they write by."""
        return self._saves.to_tell

    # --- what workers tell ------------------------------------------------------------------------------------------

    def heard(
        self, report: WorkerReport, received: set[str], failed_blocks: set[int], failed: Collection[str] = ()
    ) -> set[int]:
        """What happened at the workers in a step: ``received`` are requests whose load has ended, well or not.

        What was not loaded is told by the engine's block, or by request (``failed``). Returns blocks that the engine
        must forget: it takes those of a step that had not all it computed with for good before they are.
        """
        for ident in failed:
            if ident in self._requests:
                self._requests[ident].failed = True
        if failed_blocks:
            for each in self._requests.values():
                each.failed = each.failed or not failed_blocks.isdisjoint(each.loading)
        requests, forget_too = self._others.failed() if failed_blocks else ((), frozenset[int]())
        for ident in requests:
            if ident in self._requests:
                self._requests[ident].spoilt = True
        ended = self._fills.loading
        spoilt = bool(failed_blocks and ended)
        forget = self._fills.over(spoilt=spoilt)
        if spoilt:  # the step went on with whatever was there
            self._saves.spoil()
        for ident in (*received, *ended):
            self._shared.end(ident)
            tracked = self._requests.get(ident)
            if tracked is None:
                continue
            self._guard.ended(ident, None if tracked.failed else report.loaded.get(ident))
            if tracked.failed:
                tracked.lost()
            tracked.loading = ()
        for rank, (number, host) in report.joined.items():
            if self._offer is not None and number == self._offer.number:
                self._saves.hosts[rank] = host
        self._saves.heard(self._link, report.saved, report.failed)
        return forget | forget_too

    def ended(self, request: Any, *, given_up: bool = False) -> set[int]:
        """A request is over, in whatever way. Returns blocks that the engine must forget, as `heard` does.

        When a request is ``given_up`` in the middle of a step, vLLM does not hear what of its blocks was lost.
        """
        self._requests.pop(request.request_id, None)
        self._shared.forget(request.request_id)
        self._guard.ended(request.request_id, None)
        return self._fills.given_up(request.request_id) if given_up else set()

    # --- shared -----------------------------------------------------------------------------------------------------

    def _client(self) -> Client | None:
        return None if self._link is None else self._link.client
