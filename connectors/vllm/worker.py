"""The half of the connector that runs beside vLLM's model: it moves blocks between the KV cache and the node.

Loads go into blocks that the engine keeps for a request that waits for them, or that the step under way computes with
(`forebay.connectors.vllm.layers`); saves are copies (`forebay.connectors.vllm.staging`). All transfers are made by
threads (`forebay.connectors.vllm.loads`), and each has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from forebay.client import Client, ClientOptions, GetResult, Hints
from forebay.clock import Clock
from forebay.connectors.vllm.blocks import HeldGroup
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.host_memory import HostMemory, room
from forebay.connectors.vllm.layers import Piece, StepLoads
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.loads import LOADERS, PART_BYTES, Loads, PartedLoad, lost_to, part_blocks
from forebay.connectors.vllm.messages import Load, Rows, SessionOffer, StepWork, WorkerFacts, WorkerReport
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.staging import Staging
from forebay.schema import Schema

__all__ = ["Received", "WorkerHalf"]

_log = logging.getLogger("vllm.forebay")

_LAYERERS = 2
"""Loads of a step are read by so many: one copies into the cache while the other reads, in the order of layers."""
_IDLE_S = 0.001


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
        self._loads = Loads(settings, counters, clock)
        self._passing: HostMemory | None = None
        """Where what is read is verified before it is copied into the cache: a place for each thread."""
        self._place_bytes = 0
        self._layering = ThreadPoolExecutor(_LAYERERS, "forebay-layers")
        self._step: StepLoads | None = None
        self._happened = threading.Condition()
        self._under_way: dict[str, Load] = {}
        self._cancelled: set[str] = set()
        self._received: dict[str, float] = {}
        """Requests whose load has ended, and how many seconds it took."""
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
        self._loads.close()
        if self._passing is not None:
            self._passing.close()
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
                self._loads.begin(self._parted(load, began_ms))
        now = [load for load in work.loads if load.in_step]
        if now:
            self._begin_step(now, began_ms)

    def _begin_step(self, loads: Sequence[Load], began_ms: int) -> None:
        (held,) = self._groups
        blocks = part_blocks(max(part.tensors.value_bytes for part in held.parts))
        until_ms = began_ms + self._settings.load_timeout_ms
        step = self._step = StepLoads(loads, len(held.parts), blocks, until_ms, self._clock)
        hints = {load.request: load.advice.hints for load in loads}
        for piece in step.pieces:
            try:
                self._layering.submit(self._read_piece, step, piece, hints[piece.request])
            except RuntimeError as e:  # no thread can be had
                _log.warning("a load is given up: %s", e)
                step.done(piece, 0, "error")

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
        if self._passing is None:  # a session after this one is of the same caches
            self._place_bytes = room(max(PART_BYTES, *(held.value_bytes for held in self._groups)))
            self._passing = HostMemory((LOADERS + _LAYERERS) * self._place_bytes)
        self._offer = offer
        self._link = Link(
            lambda: settings.connect(schema, self._options, session_token=offer.token),
            self._clock,
            f"forebay rank {self._rank}",
        )
        self._loads.replace_link(self._link)
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
            received = Received(set(self._received), self._failed, self._failed_blocks)
            self._report.loaded |= self._received  # the scheduler's half looks for it once it hears of the end
            self._received, self._failed, self._failed_blocks = {}, set(), set()
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

    def _parted(self, load: Load, began_ms: int) -> PartedLoad:
        parts = [part for rows in load.rows for part in rows.cut(part_blocks(self._groups[rows.group].value_bytes))]

        def read(client: Client, part: Rows, left_ms: int) -> Sequence[GetResult]:
            return self._read(client, part, load.advice.hints, left_ms)

        def cancelled() -> bool:
            with self._happened:
                return load.request in self._cancelled

        def ended(there: list[bool], seconds: float) -> None:
            blocks = [block for part in parts for block in part.blocks]
            self._loaded(load, {block for block, is_there in zip(blocks, there, strict=True) if not is_there}, seconds)

        limit_ms = self._settings.load_timeout_ms
        return PartedLoad(parts, read, began_ms, limit_ms, chained=True, cancelled=cancelled, ended=ended)

    def _loaded(self, load: Load, missing: set[int], seconds: float) -> None:
        """A load has ended, and these of the engine's blocks have nothing."""
        with self._happened:
            del self._under_way[load.request]
            self._cancelled.discard(load.request)
            if missing and self._by_block:
                self._failed_blocks |= missing
            elif missing:
                self._failed.add(load.request)
            self._received[load.request] = seconds
            self._happened.notify_all()

    def _read(self, client: Client, rows: Rows, hints: Hints | None, left_ms: int) -> Sequence[GetResult]:
        """Read blocks into the cache."""
        held = self._groups[rows.group].whole
        with self._passed(len(rows.keys), held.tensors.value_bytes) as values:
            results = self._loads.into(client, rows, list(values.numpy()), left_ms, tiles=held.tiles, hints=hints)
            hits = [row for row, result in enumerate(results) if result.hit]
            if hits:
                blocks = [rows.blocks[row] for row in hits]
                held.tensors.scatter(blocks, values if len(hits) == len(results) else values[hits])
        return results

    @contextmanager
    def _passed(self, count: int, value_bytes: int) -> Iterator[Any]:
        """Host memory for ``count`` values, until nothing reads or writes them any more, ``[count, value_bytes]``."""
        assert self._passing is not None, "it comes with the session"
        with self._passing.lent(self._place_bytes) as space:
            yield torch.from_numpy(space.rows(count, value_bytes))

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
        rows = Rows(piece.rows.group, keys, blocks)
        with self._passed(useful, part.tensors.value_bytes) as values:
            results = self._loads.into(client, rows, list(values.numpy()), left_ms, tiles=part.tiles, hints=hints)
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
        return whole, lost_to(results[whole].reason)
