"""The half of the connector that runs beside vLLM's model: it moves blocks between the KV cache and the node.

Saves are copied to host memory at the end of the step that made them whole, so that the engine may do with its blocks
what it likes from then on; loads go into blocks that the engine keeps for a request that waits for them. All transfers
are made by threads, and each has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from forebay.client import Client, ClientOptions, Hints, WritePlan
from forebay.clock import Clock
from forebay.connectors.vllm.blocks import BlockTensors
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Load, Rows, Save, SessionOffer, StepWork, WorkerFacts, WorkerReport
from forebay.connectors.vllm.settings import Settings
from forebay.ranks import held_tiles, written_tiles
from forebay.schema import Group, Schema

__all__ = ["Received", "WorkerHalf"]

_log = logging.getLogger("vllm.forebay")

_LOADERS = 4
_PART_BYTES = 16 << 20
"""A load is made in parts of about this size, each copied into the cache while others are read."""
_IDLE_S = 0.001
_NOT_PLANNED = frozenset({"already_exists", "pending"})
_LOST = {"absent": "evicted", "deadline_exceeded": "late"}
"""What a block is lost to that was there when it was looked up."""


@dataclass(frozen=True, slots=True)
class _Held:
    """One group as this rank holds it: its tiles, and the tensors that they are of."""

    group: Group
    tiles: tuple[int, ...]
    tensors: BlockTensors


@dataclass(frozen=True, slots=True)
class Received:
    """Requests whose load has ended, well or not; what could not be loaded is told by request, or by block."""

    requests: set[str]
    failed: set[str]
    failed_blocks: set[int]


class WorkerHalf:
    """One rank, ``place`` which of how many. Called by the model runner's thread; `register` comes first."""

    def __init__(
        self, settings: Settings, place: tuple[int, int], counters: Counters, options: ClientOptions, clock: Clock
    ) -> None:
        self._settings = settings
        self._rank, self._ranks = place
        self._counters = counters
        self._options = options
        self._clock = clock
        self._caches: Sequence[Sequence[Any]] = ()
        self._facts: WorkerFacts | None = None
        self._offer: SessionOffer | None = None
        self._link: Link | None = None
        self._by_block = True
        self._groups: list[_Held] = []
        self._told = (0, "")
        self._loading = ThreadPoolExecutor(_LOADERS, "forebay-load")
        self._storing = ThreadPoolExecutor(1, "forebay-save")
        self._happened = threading.Condition()
        self._under_way: dict[str, Load] = {}
        self._cancelled: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport()
        self._staged_bytes = 0
        self._staged: dict[int, tuple[Save, Any]] = {}

    def register(self, caches: Sequence[Sequence[Any]], facts: WorkerFacts) -> None:
        """The KV cache: of each group the tensor of each layer, in the order of ``facts``."""
        self._caches = caches
        self._facts = facts
        self._by_block = facts.cache_groups.plain

    @property
    def facts(self) -> WorkerFacts | None:
        """What this rank holds."""
        return self._facts

    def close(self) -> None:
        """Finish what is being saved, give up loads, and end the connection."""
        with self._happened:
            self._cancelled.update(self._under_way)
        self._storing.shutdown(wait=True)
        self._loading.shutdown(wait=True, cancel_futures=True)
        if self._link is not None:
            self._link.close()

    # --- each step --------------------------------------------------------------------------------------------------

    def begin(self, work: StepWork) -> None:
        """Take note of the session that is offered, and start loads."""
        if work.offer is not None and work.offer != self._offer:
            self._join(work.offer)
        for number, plan in work.plans:
            staged = self._staged.pop(number, None)
            if staged is not None:
                self._storing.submit(self._store, *staged, plan)
        for number in work.dropped:
            staged = self._staged.pop(number, None)
            if staged is not None:
                self._done(staged[1].numel())
        for load in work.loads:
            with self._happened:
                self._under_way[load.request] = load
            self._loading.submit(self._load, load, self._clock.monotonic_ms())

    def _join(self, offer: SessionOffer) -> None:
        settings, schema = self._settings, Schema.from_cbor(offer.schema)
        assert self._facts is not None, "vLLM registers the caches before the first step"
        self._groups = [
            _Held(group, held_tiles(group, self._rank, self._ranks), BlockTensors(layers, group, held.heads))
            for group, layers, held in zip(schema.groups, self._caches, self._facts.groups, strict=True)
        ]
        if self._link is not None:
            self._loading.submit(self._link.close)
        self._offer = offer
        self._link = Link(
            lambda: settings.connect(schema, self._options, session_token=offer.token),
            self._clock,
            f"forebay rank {self._rank}",
        )

    def end(self, work: StepWork) -> None:
        """The step has been computed: take copies of the blocks that are whole now, and store them."""
        for save in work.saves:
            tensors, size = self._groups[save.rows.group].tensors, 0
            if self._writes(save):
                size = len(save) * tensors.value_bytes
            with self._happened:
                fits = self._staged_bytes + size <= self._settings.staging_bytes
                self._staged_bytes += size if fits else 0
            if not fits:
                self._counters.add("unstored_blocks", len(save), "no_staging")
            if not fits or not size:
                self._done(0, save.number, failed=not fits)
                continue
            try:
                values = torch.empty((len(save), tensors.value_bytes), dtype=torch.uint8)
                tensors.gather(save.rows.blocks, values)
            except Exception:  # the engine must live on, and the scheduler's half must hear of the end of each save
                _log.exception("a save failed")
                self._counters.add("unstored_blocks", len(save), "error")
                self._done(size, save.number, failed=True)
                continue
            if self._ranks == 1:
                self._storing.submit(self._store, save, values, b"")
            else:
                self._staged[save.number] = save, values

    def _writes(self, save: Save) -> bool:
        """Whether it is this rank that writes what it holds of a save: of ranks that hold the same, one does."""
        group = self._groups[save.rows.group].group
        return bool(written_tiles(group, self._rank, self._ranks, turn=save.number))

    def _done(self, staged_bytes: int, number: int | None = None, *, failed: bool = False) -> None:
        with self._happened:
            self._staged_bytes -= staged_bytes
            if number is not None:
                self._report.saved[number] = 1
                if failed:
                    self._report.failed.add(number)

    def received(self, ended: set[str], *, idle: bool) -> Received:
        """What has ended since the last call; ``ended`` are requests that wait no more."""
        with self._happened:
            self._cancelled.update(ended & self._under_way.keys())
            if idle and not self._received and (self._under_way or self._staged):
                self._happened.wait(_IDLE_S)
            received = Received(self._received, self._failed, self._failed_blocks)
            self._received, self._failed, self._failed_blocks = set(), set(), set()
        return received

    def report(self) -> WorkerReport:
        """What the scheduler's half should know."""
        client = None if self._link is None else self._link.client
        with self._happened:
            report, self._report = self._report, WorkerReport()
        if client is not None and self._offer is not None:
            joined = (self._offer.number, client.host_nqn)
            if joined != self._told:
                self._told = report.joined[self._rank] = joined
        return report

    # --- in threads -------------------------------------------------------------------------------------------------

    def _load(self, load: Load, began_ms: int) -> None:
        missing = {block for rows in load.rows for block in rows.blocks}
        try:
            missing = self._read(load, began_ms + self._settings.load_timeout_ms)
        except Exception:  # the engine must live on; what is not there is computed
            _log.exception("a load failed")
            self._counters.add("lost_blocks", len(load), "error")
        seconds = (self._clock.monotonic_ms() - began_ms) / 1000
        self._counters.add("load_seconds", seconds)
        with self._happened:
            self._report.loaded[load.request] = seconds
            del self._under_way[load.request]
            self._cancelled.discard(load.request)
            if missing and self._by_block:
                self._failed_blocks |= missing
            elif missing:
                self._failed.add(load.request)
            self._received.add(load.request)
            self._happened.notify_all()

    def _read(self, load: Load, until_ms: int) -> set[int]:
        """Read a load's blocks part by part, until one is not to be had; the engine's blocks that have nothing."""
        link = self._link
        assert link is not None, "a session is offered before the first load"
        link.wait(self._settings.load_timeout_ms)
        parts = [part for rows in load.rows for part in self._parts(rows)]
        for number, part in enumerate(parts):
            rest = parts[number + 1 :]
            client, left_ms = link.client, until_ms - self._clock.monotonic_ms()
            with self._happened:
                cancelled = load.request in self._cancelled
            if client is None or left_ms <= 0 or cancelled:
                why = "cancelled" if cancelled else "unavailable" if client is None else "late"
                self._counters.add("lost_blocks", sum(len(each.keys) for each in parts[number:]), why)
                return {block for each in parts[number:] for block in each.blocks}
            missing = self._read_part(link, client, part, load.advice.hints, left_ms)
            if missing:  # what comes after a gap is computed anyway
                self._counters.add("lost_blocks", sum(len(each.keys) for each in rest), "behind_gap")
                return missing | {block for each in rest for block in each.blocks}
        return set()

    def _parts(self, rows: Rows) -> Iterator[Rows]:
        step = max(1, _PART_BYTES // self._groups[rows.group].tensors.value_bytes)
        for start in range(0, len(rows.keys), step):
            yield Rows(rows.group, rows.keys[start : start + step], rows.blocks[start : start + step])

    def _read_part(self, link: Link, client: Client, rows: Rows, hints: Hints | None, left_ms: int) -> set[int]:
        """Read blocks into the cache; those that could not be."""
        held = self._groups[rows.group]
        values = torch.empty((len(rows.keys), held.tensors.value_bytes), dtype=torch.uint8)
        named = self._settings.named(client, rows.keys, rows.group)
        buffers = list(values.numpy())
        results = client.get_into(named, buffers, tiles=held.tiles, hints=hints, deadline_ms=left_ms)
        link.note([result.reason for result in results])
        hits = [row for row, result in enumerate(results) if result.hit]
        if hits:
            held.tensors.scatter([rows.blocks[i] for i in hits], values if len(hits) == len(results) else values[hits])
        self._counters.add("loaded_blocks", len(hits))
        self._counters.add("loaded_bytes", len(hits) * held.tensors.value_bytes)
        for result in results:
            if not result.hit:
                self._counters.add("lost_blocks", reason=_LOST.get(result.reason, result.reason))
        return {block for block, result in zip(rows.blocks, results, strict=True) if not result.hit}

    def _store(self, save: Save, values: Any, plan: bytes) -> None:
        failed = True
        try:
            failed = not self._put(save, values, plan)
        except Exception:  # the engine must live on; what is not stored is a miss later
            _log.exception("a save failed")
            self._counters.add("unstored_blocks", len(save), "error")
        self._done(values.numel(), save.number, failed=failed)

    def _put(self, save: Save, values: Any, plan: bytes) -> bool:
        """Write a save, or this rank's tiles by a plan; whether nothing of it is left to be given up."""
        link, held = self._link, self._groups[save.rows.group]
        assert link is not None, "a session is offered before the first save"
        client = link.wait(self._settings.save_timeout_ms)
        if client is None:
            self._counters.add("unstored_blocks", len(save), "unavailable")
            return False
        rows, deadline_ms = list(values.numpy()), self._settings.save_timeout_ms
        if plan:
            parts = client.put_tiles(WritePlan.from_bytes(plan), held.tiles, rows, deadline_ms=deadline_ms)
            # What was not planned was counted by whoever planned.
            ended = [(part.reason, part.committed, part.reason in _NOT_PLANNED) for part in parts]
        else:
            named = self._settings.named(client, save.rows.keys, save.rows.group)
            describe = save.advice.describe(save.parents, held.group.block_tokens)
            blocks = client.put(named, rows, hints=save.advice.hints, describe=describe, deadline_ms=deadline_ms)
            ended = [(block.reason, block.stored, block.present) for block in blocks]
            self._counters.add("present_blocks", sum(block.present and not block.stored for block in blocks))
        link.note([reason for reason, _, _ in ended])
        stored = sum(done for _, done, _ in ended)
        self._counters.add("stored_blocks", stored)
        self._counters.add("stored_bytes", stored * held.tensors.value_bytes)
        failed = [reason for reason, done, present in ended if not (done or present)]
        for reason in failed:
            self._counters.add("unstored_blocks", reason=reason)
        return not failed
