"""The half of the connector that runs in vLLM's scheduler: what to load, what to save, and nothing that waits.

Calls on the node are made by other threads; the scheduler's thread looks for their answers when it comes by. All state
belongs to that thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from forebay.client import Client, ClientOptions
from forebay.clock import Clock
from forebay.connectors.guard import Guard
from forebay.connectors.keys import block_key, variant
from forebay.connectors.vllm.adapters import Adapters
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Load, Save, SessionOffer, StepWork, WorkerReport
from forebay.connectors.vllm.modes import ModeSwitch
from forebay.connectors.vllm.requests import Probe, Tracked
from forebay.connectors.vllm.saves import Saves
from forebay.connectors.vllm.settings import Settings
from forebay.ids import MAX_BATCH_KEYS
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

    def __init__(self, settings: Settings, block_tokens: int, ranks: int, counters: Counters, clock: Clock) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._counters = counters
        self._clock = clock
        self._adapters = Adapters()
        self._mode = ModeSwitch(settings.mode, settings.mode_file, clock)
        self._guard = Guard(clock, tokens_per_s=settings.prefill_tokens_per_s, limit_ms=settings.load_timeout_ms)
        self._steps: deque[tuple[int, int]] = deque(maxlen=64)
        self._stepped_ms = 0
        self._link: Link | None = None
        self._schema: Schema | None = None
        self._block_bytes = 0
        self._probing = ThreadPoolExecutor(2, "forebay-probe")
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._offer: SessionOffer | None = None
        self._touched: OrderedDict[bytes, None] = OrderedDict()
        self._saves = Saves(ranks, settings.save_timeout_ms, counters)

    def start(self, schema: Schema, options: ClientOptions) -> None:
        """Connect to the node; if that fails, go on trying in the background."""
        settings = self._settings
        self._schema = schema
        self._block_bytes = schema.groups[0].layout().value_bytes
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
        if client is None or tracked.computed or not tracked.plain or self._mode.now == "off":
            return
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[:MAX_BATCH_KEYS]]
        tracked.asked_at_ms = self._clock.monotonic_ms()
        adapter, salt = request.lora_request, request.cache_salt or ""
        tracked.probe = self._probing.submit(self._probe, client, adapter, salt, hashes)

    def _probe(self, client: Client, adapter: Any, salt: str, hashes: Sequence[bytes]) -> Probe:
        """In a thread: the answer to `_ask`. Raises nothing."""
        try:
            content = b"" if adapter is None else self._adapters.digest(adapter)
            if content is None:
                return Probe(None)
            prefix = variant(adapter=content, salt=salt)
            if not hashes:
                return Probe(prefix)
            keys = self._settings.named(client, [block_key(block_hash, prefix) for block_hash in hashes])
            reasons = client.match(keys, deadline_ms=self._settings.probe_timeout_ms).reasons
            if self._link is not None:
                self._link.note(reasons)
            return Probe(prefix, reasons)
        except Exception:  # the engine must live on; the request is computed
            _log.exception("a lookup failed")
            return Probe(None)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed_tokens`` can be loaded, and that it takes a while; None: ask again."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
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
        tracked.first = computed_tokens // self._block_tokens
        blocks = answer.present(tracked.first)
        if not tracked.counted:
            tracked.counted = True
            tracked.wanted = self._decide(answer, tracked.first, blocks)
        blocks = min(blocks, tracked.wanted)
        if not blocks or self._mode.now != "on" or self._session() is None:
            return 0, False
        return blocks * self._block_tokens, True

    def _decide(self, answer: Probe, first: int, blocks: int) -> int:
        """How many of the ``blocks`` that are there to load; counts the answer and the decision."""
        self._counters.add("hit_blocks", blocks)
        for reason in answer.reasons[first + blocks :]:
            self._counters.add("missed_blocks", reason="behind_gap" if reason == "ok" else reason)
        if not blocks or not self._settings.guard:
            return blocks
        verdict = self._guard.verdict(blocks, self._block_tokens)
        self._counters.add("decisions", reason=verdict.reason)
        if verdict.blocks < blocks:
            self._counters.add("lost_blocks", blocks - verdict.blocks, "guard")
        return verdict.blocks

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """The scheduler commits to loading ``tokens``, and ``blocks`` are the request's, from its first on."""
        tracked = self._requests.get(request.request_id)
        if not tokens or tracked is None:
            return
        answer = tracked.answer
        assert answer is not None and answer.variant is not None, "the scheduler was told that there is something"
        rows = range(tracked.first, tracked.first + tokens // self._block_tokens)
        tracked.loading, tracked.failed = tuple(blocks[rows.start : rows.stop]), False
        self._guard.began(request.request_id, len(rows))
        self._loads.append(Load(request.request_id, tracked.keys(answer.variant, rows), tracked.loading))

    # --- each step --------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepWork:
        """What the workers are to do with the step that the scheduler has just made (vLLM's `SchedulerOutput`)."""
        saves: tuple[Save, ...] = ()
        plans: list[tuple[int, bytes]] = []
        dropped: list[int] = []
        try:
            plans, dropped = self._saves.tell()
            if self._mode.now == "on" and self._session() is not None and self._settings.save != "none":
                saves = self._to_save(output)
        except Exception:  # loads must begin whatever becomes of saves: requests wait for them
            _log.exception("no saves in this step")
        loads, self._loads = tuple(self._loads), []
        idle = not output.total_num_scheduled_tokens
        if idle:
            self._yield()
        self._steps.append((self._clock.monotonic_ms(), output.total_num_scheduled_tokens))
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
        blocks: dict[bytes, int] = {}
        for ident, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(ident)
            if tracked is not None:
                self._whole_blocks(tracked, scheduled, output.kv_connector_block_state, blocks)
        rows, each = list(blocks.items()), min(MAX_BATCH_KEYS, max(1, _SAVE_BYTES // self._block_bytes))
        scope = self._settings.scope_id(client)
        return tuple([self._saves.begin(link, scope, dict(rows[i : i + each])) for i in range(0, len(rows), each)])

    def _whole_blocks(self, tracked: Tracked, scheduled: int, state: Any, blocks: dict[bytes, int]) -> None:
        """Add a request's blocks that are whole after this step, and that nobody has as far as is known, by key."""
        request, answer = tracked.request, tracked.answer
        if answer is None or answer.variant is None or not tracked.plain:
            return
        if request.num_prompt_tokens < self._settings.save_min_tokens:
            return
        # Tokens whose KV there will be, without those that are only guessed: the engine hashes accepted ones alone.
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if self._settings.save == "prompt":
            tokens = min(tokens, request.num_prompt_tokens)
        whole = min(tokens // self._block_tokens, len(request.block_hashes))
        rows = range(tracked.considered, whole)
        if not rows:
            return
        tracked.considered = whole
        (table,) = state.get_block_ids(request.request_id)
        for row, key in zip(rows, tracked.keys(answer.variant, rows), strict=True):
            if answer.has(row) or self._saves.has(key) or key in blocks:
                continue
            if self._settings.save != "second_touch" or self._touch(key):
                blocks[key] = table[row]

    def _touch(self, key: bytes) -> bool:
        """Whether a block has come by before, as far as is remembered."""
        known = key in self._touched
        self._touched[key] = None
        self._touched.move_to_end(key)
        if len(self._touched) > _TOUCHED:
            self._touched.popitem(last=False)
        return known

    @property
    def waited_for(self) -> bool:
        """Whether workers wait for another step, to be told what they write by."""
        return self._saves.to_tell

    # --- what workers tell ------------------------------------------------------------------------------------------

    def heard(self, report: WorkerReport, received: set[str], failed_blocks: set[int]) -> None:
        """What happened at the workers in a step: ``received`` are requests whose load has ended, well or not."""
        if failed_blocks:
            for each in self._requests.values():
                each.failed = each.failed or not failed_blocks.isdisjoint(each.loading)
        for ident in received:
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

    def ended(self, request: Any) -> None:
        """A request is over, in whatever way."""
        self._requests.pop(request.request_id, None)
        self._guard.ended(request.request_id, None)

    # --- shared -----------------------------------------------------------------------------------------------------

    def _client(self) -> Client | None:
        return None if self._link is None else self._link.client
