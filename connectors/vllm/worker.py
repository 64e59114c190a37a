"""The half of the connector that runs beside vLLM's model: it moves blocks between the KV cache and the node.

Loads go into blocks that the engine keeps for a request that waits for them, or that the step under way computes with
(`forebay.connectors.vllm.layers`); saves are copies (`forebay.connectors.vllm.staging`). All transfers are made by
threads, and each has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from forebay.client import Client, ClientOptions, Hints
from forebay.clock import Clock
from forebay.connectors.vllm.blocks import HeldGroup
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.layers import Piece, StepLoads
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Load, Rows, SessionOffer, StepWork, WorkerFacts, WorkerReport
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.staging import Staging
from forebay.schema import Schema

__all__ = ["Received", "WorkerHalf"]

_log = logging.getLogger("vllm.forebay")

_LOADERS = 4
_LAYERERS = 2
"""Loads of a step are read by so many: one copies into the cache while the other reads, in the order of layers."""
_PART_BYTES = 16 << 20
"""A load is made in parts of about this size, each copied into the cache while others are read."""
_IDLE_S = 0.001
_LOST = {"absent": "evicted", "deadline_exceeded": "late"}
"""What a block is lost to that was there when it was looked up."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer belongs, and whether it is the last of its layer group."""

    group: int
    layer_group: int
    last: bool


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
        self._names: Sequence[Sequence[str]] = ()
        self._groups: list[HeldGroup] = []
        self._places: dict[str, _Place] = {}
        self._told = (0, "")
        self._loading = ThreadPoolExecutor(_LOADERS, "forebay-load")
        self._layering = ThreadPoolExecutor(_LAYERERS, "forebay-layers")
        self._step: StepLoads | None = None
        self._happened = threading.Condition()
        self._under_way: dict[str, Load] = {}
        self._cancelled: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport()
        self._staging = Staging(settings, self._ranks, counters, self._saved)

    def register(
        self, caches: Sequence[Sequence[Any]], facts: WorkerFacts, names: Sequence[Sequence[str]] = ()
    ) -> None:
        """The KV cache: of each group the tensor of each layer, in the order of ``facts``, and the layers' names."""
        self._caches = caches
        self._names = names
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
        self._staging.close()
        self._layering.shutdown(wait=True, cancel_futures=True)
        self._loading.shutdown(wait=True, cancel_futures=True)
        if self._link is not None:
            self._link.close()

    # --- each step --------------------------------------------------------------------------------------------------

    def begin(self, work: StepWork) -> None:
        """Take note of the session that is offered, and start loads."""
        self._take_up(work.offer)
        for number, plan in work.plans:
            self._staging.planned(number, plan)
        for number in work.dropped:
            self._staging.dropped(number)
        began_ms = self._clock.monotonic_ms()
        for load in work.loads:
            if not load.in_step:
                with self._happened:
                    self._under_way[load.request] = load
                self._loading.submit(self._load, load, began_ms)
        now = [load for load in work.loads if load.in_step]
        if now:
            self._begin_step(now, began_ms)

    def _begin_step(self, loads: Sequence[Load], began_ms: int) -> None:
        (held,) = self._groups
        blocks = max(1, _PART_BYTES // max(part.tensors.value_bytes for part in held.parts))
        until_ms = began_ms + self._settings.load_timeout_ms
        step = self._step = StepLoads(loads, len(held.parts), blocks, until_ms, self._clock)
        hints = {load.request: load.advice.hints for load in loads}
        for piece in step.pieces:
            self._layering.submit(self._read_piece, step, piece, hints[piece.request])

    def _take_up(self, offer: SessionOffer | None) -> None:
        if offer is not None and offer != self._offer:
            self._join(offer)

    def _join(self, offer: SessionOffer) -> None:
        settings, schema = self._settings, Schema.from_cbor(offer.schema)
        assert self._facts is not None, "vLLM registers the caches before the first step"
        self._groups = [
            HeldGroup(group, layers, held.heads, self._rank, self._ranks)
            for group, layers, held in zip(schema.groups, self._caches, self._facts.groups, strict=True)
        ]
        self._places = {
            name: _Place(number, layer_group, last=position == within[-1])
            for number, (held, names) in enumerate(zip(self._groups, self._names, strict=False))
            for layer_group in range(len(held.parts))
            for within in (held.group.layer_range(layer_group),)
            for position, name in enumerate(names)
            if position in within
        }
        if self._link is not None:
            self._loading.submit(self._link.close)
        self._offer = offer
        self._link = Link(
            lambda: settings.connect(schema, self._options, session_token=offer.token),
            self._clock,
            f"forebay rank {self._rank}",
        )
        self._staging.link = self._link

    def wait_for_layer(self, name: str) -> None:
        """A layer is about to be computed: wait until what was begun for this step is there, or too late."""
        step, place = self._step, self._places.get(name)
        if step is not None and place is not None:
            step.wait(place.layer_group)

    def layer_computed(self, name: str, work: StepWork) -> None:
        """A layer has been computed: copy out what is whole with it, where saves are made by layer groups."""
        if not work.saves:
            return
        self._take_up(work.offer)
        place = self._places.get(name)
        if place is not None and place.last and len(self._groups[place.group].parts) > 1:
            self._staging.computed(work.saves, self._groups, place.group, place.layer_group)

    def end(self, work: StepWork) -> None:
        """The step has been computed: take copies of the blocks that are whole now, and store them."""
        spoilt = False
        if self._step is not None:
            step, self._step = self._step, None
            spoilt = self._end_step(step)
        self._staging.end(work.saves, self._groups, spoilt=spoilt)

    def _end_step(self, step: StepLoads) -> bool:
        """Take note of what the step did not have; whether there was any such."""
        (held,) = self._groups
        ended = step.end()
        missed = {block for _, missing, _ in ended.values() for block in missing}
        with self._happened:  # before anything else: the engine must hear of it
            self._failed_blocks |= missed
        for request, (blocks, missing, reasons) in ended.items():
            loaded = blocks - len(missing)
            self._counters.add("loaded_blocks", loaded)
            self._counters.add("loaded_bytes", loaded * held.value_bytes)
            self._counters.add("load_seconds", step.seconds)
            for reason, count in reasons.items():
                self._counters.add("lost_blocks", count, reason)
            with self._happened:
                self._report.loaded[request] = step.seconds
        return bool(missed)

    def _saved(self, number: int, failed: bool) -> None:
        """A save has ended here."""
        with self._happened:
            self._report.saved[number] = 1
            if failed:
                self._report.failed.add(number)

    def received(self, ended: set[str], *, idle: bool) -> Received:
        """What has ended since the last call; ``ended`` are requests that wait no more."""
        with self._happened:
            self._cancelled.update(ended & self._under_way.keys())
            if idle and not self._received and (self._under_way or self._staging.waiting):
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
        link.wait(max(0, until_ms - self._clock.monotonic_ms()))
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
        step = max(1, _PART_BYTES // self._groups[rows.group].value_bytes)
        for start in range(0, len(rows.keys), step):
            yield Rows(rows.group, rows.keys[start : start + step], rows.blocks[start : start + step])

    def _read_part(self, link: Link, client: Client, rows: Rows, hints: Hints | None, left_ms: int) -> set[int]:
        """Read blocks into the cache; those that could not be."""
        held = self._groups[rows.group].whole
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

    def _read_piece(self, step: StepLoads, piece: Piece, hints: Hints | None) -> None:
        """Read some blocks of one layer group into the cache. Raises nothing."""
        lost: int | None = 0
        why = "error"
        try:
            lost, why = self._read_layers(step, piece, hints)
        except Exception:  # the engine must live on; what is not there is computed
            _log.exception("a load failed")
        step.done(piece, lost, why)

    def _read_layers(self, step: StepLoads, piece: Piece, hints: Hints | None) -> tuple[int | None, str]:
        """The first block that is not in the cache now, and why not."""
        part, link, useful = self._groups[piece.rows.group].parts[piece.layer_group], self._link, step.useful(piece)
        assert link is not None, "a session is offered before the first load"
        if not useful:
            return None, ""  # a block before these is lost already
        client, left_ms = link.wait(max(1, step.left_ms())), step.left_ms()
        if client is None or left_ms <= 0:
            return 0, "unavailable" if client is None else "late"
        keys, blocks = piece.rows.keys[:useful], piece.rows.blocks[:useful]
        values = torch.empty((useful, part.tensors.value_bytes), dtype=torch.uint8)
        named = self._settings.named(client, keys, piece.rows.group)
        buffers = list(values.numpy())
        results = client.get_into(named, buffers, tiles=part.tiles, hints=hints, deadline_ms=left_ms)
        link.note([result.reason for result in results])
        hits = next((row for row, result in enumerate(results) if not result.hit), useful)
        whole = step.alike(piece, [result.write_id for result in results[:hits]])
        with step.copying() as may:
            if not may:
                return 0, "late"
            if whole:
                part.tensors.scatter(blocks[:whole], values[:whole])
        if whole == useful:
            return None, ""
        if whole < hits:
            return whole, "replaced"
        return whole, _LOST.get(results[whole].reason, results[whole].reason)
