"""vLLM's `SecondaryTierManager` for Forebay: what its scheduler calls, none of which waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from forebay.client import ClientOptions, Hints, WatchEvent
from forebay.clock import SystemClock
from forebay.connectors.guard import Guard
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.elsewhere import Elsewhere
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.modes import ModeSwitch
from forebay.connectors.vllm.shielding import shielded
from forebay.connectors.vllm.tier.allowance import Allowance
from forebay.connectors.vllm.tier.counting import TIER_METRICS
from forebay.connectors.vllm.tier.hints import hints_of
from forebay.connectors.vllm.tier.identity import configuration_of, tier_schema
from forebay.connectors.vllm.tier.inventory import Inventory
from forebay.connectors.vllm.tier.lookups import Lookups
from forebay.connectors.vllm.tier.settings import TierSettings
from forebay.connectors.vllm.tier.transfers import Job, Outcome, Pool, Transfers
from forebay.connectors.vllm.versions import check_version

__all__ = ["ForebayTier"]

_log = logging.getLogger("vllm.forebay")

_IDLE_S = 0.001
"""A step that took less computed nothing, and the next may wait that long for what is under way."""
_LATE_MS = 100
"""A lookup that has not answered this long after its deadline is not waited for."""
_TOUCHED = 4096
"""Blocks of a step that the node is told were of use; of more, the rest go untold."""


def _metric(name: str) -> str:
    return f"vllm:forebay_tier_{name}"


class ForebayTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps rows of vLLM's host pool at a Forebay node; see docs/engines/vllm.md.

    Raises `ConfigInvalid` at start for what it does not support; after that whatever happens is a miss.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.from_config(config)
        node, clock = settings.connector, SystemClock()
        check_version(node)
        offloading = offloading_spec.config
        schema, notes = tier_schema(*configuration_of(offloading.engine_id), offloading, node)
        for note in notes:
            _log.warning("%s", note)
        _log.info("forebay keyspace %s", schema.keyspace.hex())
        (self._group_id,) = (group.group_id for group in offloading.groups)
        self.locality = Locality(settings.locality) if settings.locality else None
        self._settings = node
        self._keyspace = schema.keyspace
        self._counters = Counters()
        self._mode = ModeSwitch(node.mode, node.mode_file, clock)
        self._touched: dict[bytes, None] = {}
        self._stepped_at = 0.0
        self._elsewhere = Elsewhere()
        options = ClientOptions(client=f"vllm {vllm.__version__} {offloading.engine_id} tier", attempt_ms=2_000)
        self._link = Link(lambda: node.connect(schema, options), clock, f"forebay {node.url} {node.namespace}")
        self._lookups = Lookups(self._match, self._counters, clock, node.probe_timeout_ms + _LATE_MS)
        pool = Pool(primary_kv_view.cast("B"), self.block_size_bytes, schema.groups[0].layout().value_bytes)
        assert pool.value_bytes <= pool.row_bytes, "a chunk does not end behind its row"
        pending_bytes = settings.pending_bytes or len(pool.memory) // 2
        self._transfers = Transfers(pool, self._link, node, self._counters, clock, pending_bytes=pending_bytes)
        self._inventory = self._events(settings, offloading_spec)
        self._allowance = None
        if node.guard and node.prefill_tokens_per_s:  # no step tells a tier how long it takes
            guard = Guard(clock, tokens_per_s=node.prefill_tokens_per_s, limit_ms=node.load_timeout_ms)
            self._allowance = Allowance(guard, self._counters, schema.groups[0].block_tokens)
        self._link.wait(options.connect_ms)

    def _events(self, settings: TierSettings, offloading_spec: Any) -> Inventory | None:
        if not settings.enable_kv_events:
            return None
        if not offloading_spec.kv_events_config.enable_kv_cache_events:
            _log.warning("enable_kv_events is set, and the engine publishes no KV events (kv_events_config)")
            return None

        def watch() -> Iterator[WatchEvent] | None:
            client = self._link.client
            return None if client is None else client.watch()

        def ours(event: WatchEvent) -> bool:
            client = self._link.client
            scope = 0 if client is None else self._settings.scope_id(client)
            place = (event.keyspace, event.generation, event.scope)
            return place == (self._keyspace, self._settings.generation, scope)

        return Inventory(watch, ours, self._match)

    # --- looking up -------------------------------------------------------------------------------------------------

    def _match(self, keys: Sequence[bytes]) -> Sequence[str]:
        """In a thread: why each key is not to be had, or ``ok``."""
        client = self._link.client
        if client is None:
            return ["unavailable"] * len(keys)
        named = self._settings.named(client, keys)
        found = client.match(named, deadline_ms=self._settings.probe_timeout_ms)
        self._link.note(found.reasons)
        self._elsewhere.explained(client, found, self._settings.probe_timeout_ms)  # says so; keys are of many requests
        return found.reasons

    @shielded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._mode.now == "off":
            return LookupResult.MISS
        reason = self._lookups.ask(get_offload_block_hash(key), req_context.req_id)
        if reason is None:
            return LookupResult.RETRY
        if reason != "ok" or self._mode.now != "on" or not self._allows(req_context.req_id, key):
            return LookupResult.MISS
        return LookupResult.HIT

    def _allows(self, request: str, key: OffloadKey) -> bool:
        if self._allowance is None:
            return True
        return self._allowance.grants(request, get_offload_block_hash(key), self._lookups.present(request))

    @shielded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        hints = hints_of(req_context.kv_transfer_params, req_context.kv_hints)
        if hints is not None:
            req_context.set_state(hints)
        return RequestOffloadingContext()

    @shielded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)
        if self._allowance is not None:
            self._allowance.forget(req_context.req_id)

    @shielded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()
        if self._touched:
            touched, self._touched = list(self._touched), {}
            self._lookups.background(lambda: self._touch(touched))
        # An engine with nothing to compute steps in a tight loop, and the threads would get the interpreter from it
        # every five milliseconds only.
        if time.monotonic() - self._stepped_at < _IDLE_S:
            self._lookups.pause(_IDLE_S)
            self._transfers.pause(_IDLE_S)
        self._stepped_at = time.monotonic()

    @shielded(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._mode.now == "on" and len(self._touched) < _TOUCHED:
            self._touched.update(dict.fromkeys(get_offload_block_hash(key) for key in keys))

    def _touch(self, keys: Sequence[bytes]) -> None:
        """In a thread: blocks were of use, wherever they were read."""
        client = self._link.client
        if client is not None:
            client.touch(self._settings.named(client, keys), deadline_ms=self._settings.probe_timeout_ms)

    # --- jobs -------------------------------------------------------------------------------------------------------

    # A job that is never reported would keep its rows, and its requests, for ever: these are not shielded.

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = self._job(job_metadata)
        if self._mode.now == "on":
            self._transfers.submit(job)
        else:
            self._transfers.spare(job)

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = self._job(job_metadata)
        if self._allowance is not None:
            self._allowance.began(job.ident, len(job.keys))
        self._transfers.submit(job)

    def _job(self, job: TransferJob) -> Job:
        """A job of ours, in the order of the prompt: what lies in that order is read by fewer commands."""
        position = job.req_context.get_offload_key_position
        rows = sorted(zip(job.keys, job.chunk_ids, strict=True), key=lambda row: position(row[0]) or 0)
        return Job(
            job.job_id,
            "load" if job.is_promotion else "store",
            tuple(get_offload_block_hash(key) for key, _ in rows),
            tuple(int(chunk) for _, chunk in rows),
            job.req_context.get_state(Hints),
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(outcome) for outcome in self._transfers.finished()]

    def _result(self, outcome: Outcome) -> JobResult:
        job, done = outcome.job, outcome.done
        if job.kind == "load":
            self._lookups.lost(set(job.keys).difference(done))
            if self._allowance is not None:
                self._allowance.ended(job.ident, outcome.seconds if outcome.whole else None)
        else:
            self._lookups.stored(outcome.moved)
            if self._inventory is not None:
                self._inventory.stored(done)
        partial = job.kind == "load" and not outcome.whole and bool(done)
        return JobResult(
            job_id=job.ident,
            success=outcome.whole,
            successful_keys=tuple(self._key(each) for each in done) if partial else None,
            transfer_time=outcome.seconds,
            transfer_bytes=len(outcome.moved) * self._transfers.value_bytes,
        )

    def _key(self, block_hash: bytes) -> OffloadKey:
        return make_offload_key(block_hash, self._group_id)

    def drain_jobs(self) -> None:
        self._transfers.drain()

    # --- what happened ----------------------------------------------------------------------------------------------

    @shielded(list)
    def take_events(self) -> Iterable[OffloadingEvent]:
        changes = [] if self._inventory is None else self._inventory.take()
        return [
            OffloadingEvent([self._key(key) for key in keys], self.medium, removed=not stored, locality=self.locality)
            for stored, keys in changes
        ]

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            _metric(name): OffloadingCounterMetadata(documentation=meaning, labelnames=("reason",))
            for name, meaning in TIER_METRICS.items()
        }

    @shielded(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = self._counters.take()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for key, count in counts.items():
            name, _, reason = key.partition(":")
            stats.increase_counter(_metric(name), count, (reason,))
        return stats

    def shutdown(self) -> None:
        """Finish what is being stored, and let go of the pool's memory; each job has its deadline."""
        self._lookups.close()
        self._transfers.close()
        if self._inventory is not None:
            self._inventory.close()
        self._link.close()
