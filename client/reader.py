"""The read path (docs/design.md §5): lease, read the tiles, and let bytes through only after one verdict."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forebay import request_id
from forebay.checksum import CRC32C, tile_seed
from forebay.client.device import DeviceView, Lane, View, lane_of
from forebay.client.layouts import Piece, Run, group_of, runs, selected_bytes
from forebay.client.options import ClientOptions
from forebay.client.results import GetResult
from forebay.client.session import Route, Session, SessionView
from forebay.client.transports.base import DeviceReadOp, DeviceSegment, Outcome, ReadOp, Segment, Transport
from forebay.clock import Clock
from forebay.errors import (
    OK,
    ChecksumMismatch,
    ForebayError,
    InvalidArgument,
    LeaseExpired,
    ProtocolError,
    TargetFailed,
    Unavailable,
    ValueSize,
    reason,
)
from forebay.ids import LBA_BYTES, BlockKey, stored_prefix
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, rows16, unpack
from forebay.schema import TileLayout

__all__ = ["Reader", "verdict"]

_log = logging.getLogger(__name__)

_STAGED_PARTS = 2
"""How many parts of a call are in pinned memory: one on its way to the device while the next is read."""

_BRIDGE_BYTES = 32 << 10
"""Tiles this close together come by one command, with what lies between them thrown away: on loopback every second tile
of 4 KiB then takes a third of the time, every second of 32 KiB two thirds. Over a network the bytes weigh more."""


def verdict(
    outcomes: Sequence[Outcome], expected: Sequence[Sequence[int | None]], now_ms: int, lease_until_ms: int
) -> int:
    """Whether the bytes of a block may be used: 0, or the error code that makes it a miss.

    Every path to a caller's bytes ends here, after the last byte has arrived: the lease must still be good at
    ``now_ms``, every operation must have succeeded, and every checksum must be the ``expected`` one.
    """
    if now_ms >= lease_until_ms:
        return LeaseExpired.code
    for outcome in outcomes:
        if outcome.error is not None:
            return outcome.error.code
    for outcome, sums in zip(outcomes, expected, strict=True):
        if tuple(outcome.checksums) != tuple(sums):
            return ChecksumMismatch.code
    return OK


class _Located(NamedTuple):
    """A row of Acquire's answer that has been checked against the schema."""

    layout: TileLayout
    volume: int
    offset_bytes: int
    write_id: bytes
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call asks beside its keys. ``lane`` leads to the device that its buffers are on, if they are on one."""

    tiles: Sequence[int] | None
    hints: pb.Hints | None
    deadline_ms: int
    lane: Lane | None


@dataclass(slots=True)
class _Wanted:
    """One key of a call on its way: where its bytes go, the operations that bring them, and what they must be."""

    view: View
    transport: Transport
    ops: list[ReadOp]
    device_ops: list[DeviceReadOp]
    """One of the two is empty."""
    expected: list[tuple[int | None, ...]]
    staged: Any = None
    """Pinned host memory that ``ops`` fill in the place of ``view``, which is a device's."""
    write_id: bytes = b""


class _Alike:
    """What blocks of one answer have in common, worked out for the first of them."""

    def __init__(self, session: Session, view: SessionView, call: _Call) -> None:
        self._session = session
        self._view = view
        self._call = call
        self._routes: dict[int, Route | None] = {}
        self._shapes: dict[tuple[int, int], tuple[int, list[Run]]] = {}
        self._prefixes: dict[tuple[int, int], bytes] = {}

    def route(self, volume: int) -> Route | None:
        """How to reach a volume, if it can be."""
        if volume not in self._routes:
            self._routes[volume] = self._session.route(self._view, volume, self._call.deadline_ms)
        return self._routes[volume]

    def shape(self, group: int, layout: TileLayout) -> tuple[int, list[Run]]:
        """Bytes of the tiles that are asked for of a block of ``group``, and where they lie."""
        shape = self._shapes.get((group, layout.value_bytes))
        if shape is None:
            ranges = runs(layout, self._call.tiles, bridge_bytes=_BRIDGE_BYTES)
            shape = self._shapes[group, layout.value_bytes] = selected_bytes(layout, self._call.tiles), ranges
        return shape

    def stored_key(self, block: BlockKey) -> bytes:
        """The block's key in metadata, which its checksums are bound to."""
        key, group, scope = block
        prefix = self._prefixes.get((scope, group))
        if prefix is None:
            reply = self._view.reply
            prefix = stored_prefix(reply.namespace_id, reply.keyspace, reply.generation, scope, group)
            self._prefixes[scope, group] = prefix
        return prefix + key


class Reader:
    """Reads blocks for one session. Thread-safe; keeps no state of its own."""

    def __init__(self, session: Session, options: ClientOptions, clock: Clock) -> None:
        self._sampled = itertools.count()
        self._session = session
        self._options = options
        self._clock = clock
        self._schema = session.opening.schema

    @request_id.request()  # its calls are of one request
    def read(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[View] | None,
        tiles: Sequence[int] | None,
        hints: pb.Hints | None,
        deadline_ms: int,
    ) -> list[GetResult]:
        """Read blocks into ``buffers``, or into new memory. Arguments have been checked; only mistakes raise."""
        if not buffers or not isinstance(buffers[0], DeviceView):
            return self._parts(keys, buffers, _Call(tiles, hints, deadline_ms, lane_of(buffers or ())))
        try:
            return self._parts(keys, buffers, _Call(tiles, hints, deadline_ms, lane_of(buffers)))
        except RuntimeError as e:  # what torch raises when a device fails: no engine ends by its cache
            _log.warning("blocks could not be copied to the device: %s", e)
            return [GetResult(False, reason(Unavailable.code))] * len(keys)

    def _parts(self, keys: Sequence[BlockKey], buffers: Sequence[View] | None, call: _Call) -> list[GetResult]:
        results: list[GetResult] = []
        lane, marks = call.lane, deque[Any]()
        try:
            for start, end in self._batches(keys, buffers, staged=lane is not None):
                part = None if buffers is None else buffers[start:end]
                if lane is not None and len(marks) == _STAGED_PARTS:
                    lane.wait(marks.popleft())
                try:
                    results += self._read(keys[start:end], part, call)
                except ForebayError as e:
                    results += [GetResult(False, reason(e.code))] * (end - start)
                if lane is not None:
                    marks.append(lane.mark())
        finally:
            if lane is not None:  # nothing writes to the buffers once this has returned
                lane.drain()
        return results

    def _batches(self, keys: Sequence[BlockKey], buffers: Sequence[View] | None, staged: bool) -> list[tuple[int, int]]:
        """Parts of a long call, so that no lease has to last for all of it, and one is copied while another comes."""
        cuts, size = [0], 0
        limit = min(self._options.batch_bytes, self._options.staging_bytes) if staged else self._options.batch_bytes
        for i, block in enumerate(keys):
            if buffers is not None:
                length = len(buffers[i])
            else:
                group = group_of(self._schema, block)
                length = 1 << 20 if group.kind == "opaque" else group.layout().value_bytes
            if size and size + length > limit:
                cuts.append(i)
                size = 0
            size += length
        return list(zip(cuts, [*cuts[1:], len(keys)], strict=True))

    def _read(self, keys: Sequence[BlockKey], buffers: Sequence[View] | None, call: _Call) -> list[GetResult]:
        deadline_ms = call.deadline_ms
        asked = list(dict.fromkeys(keys))
        columns = keys_to_proto(asked)
        asked_ms = self._clock.monotonic_ms()  # a lease counts from before the request was sent

        def request(_: SessionView, context: pb.Context) -> pb.AcquireRequest:
            nonlocal asked_ms
            asked_ms = self._clock.monotonic_ms()
            return pb.AcquireRequest(
                context=context, keys=columns, lease_ttl_ms=self._options.lease_ttl_ms, hints=call.hints
            )

        view, reply = self._session.call(self._session.rpc.blocks.Acquire, request, deadline_ms)
        lease_until_ms = asked_ms + reply.lease_ttl_ms
        try:
            located = dict(zip(asked, self._locate(asked, reply), strict=True))
            alike = _Alike(self._session, view, call)
            wanted: list[_Wanted | int] = []
            for i, block in enumerate(keys):
                row = located[block]
                buffer = None if buffers is None else buffers[i]
                wanted.append(row if isinstance(row, int) else self._want(block, row, alike, buffer, call))
            outcomes = self._transfer(
                [want for want in wanted if isinstance(want, _Wanted)], call.lane, min(deadline_ms, lease_until_ms)
            )
            now_ms = self._clock.monotonic_ms()
        finally:
            if reply.lease:
                self._session.release(view, reply.lease)
        results = []
        damaged: dict[BlockKey, None] = {}
        for block, want in zip(keys, wanted, strict=True):
            if isinstance(want, int):
                results.append(GetResult(False, reason(want)))
                continue
            code = verdict(outcomes[id(want)], want.expected, now_ms, lease_until_ms)
            if code in (ChecksumMismatch.code, TargetFailed.code):  # the node sees whether it is block or drive
                damaged[block] = None
            if code != OK:
                results.append(GetResult(False, reason(code)))
                continue
            if call.lane is not None and want.staged is not None and isinstance(want.view, DeviceView):
                call.lane.copy(want.view, want.staged)
            value = want.view if isinstance(want.view, memoryview) and buffers is None else None
            results.append(GetResult(True, "ok", value, len(want.view), want.write_id))
        if damaged:
            self._session.report(view, list(damaged), deadline_ms)
        return results

    def _verifies(self, route: Route) -> bool:
        """Whether the next block's checksums are looked at: always, unless its reads are fenced and it may be less."""
        options = self._options
        if options.verify == "always" or not route.reads_fenced:
            return True
        return options.verify == "sample" and next(self._sampled) % options.verify_one_in == 0

    def _want(self, block: BlockKey, row: _Located, alike: _Alike, buffer: View | None, call: _Call) -> _Wanted | int:
        """The operations that bring a block's tiles into ``buffer``, or an error code."""
        route = alike.route(row.volume)
        if route is None:
            return Unavailable.code
        size, ranges = alike.shape(block.group, row.layout)
        if buffer is None:
            buffer = np.empty(size, np.uint8).data
        elif len(buffer) < size:
            return ValueSize.code
        verified, stored = self._verifies(route), alike.stored_key(block)
        view: View = buffer[:size]
        staged: Any = None
        target = view
        if isinstance(view, DeviceView) and call.lane is not None and not route.transport.capabilities.device_memory:
            staged = call.lane.host(size)
            target = memoryview(staged.numpy())
        want = _Wanted(view, route.transport, [], [], [], staged, row.write_id)
        for offset_bytes, pieces in ranges:
            at_bytes = row.offset_bytes + offset_bytes
            numbers = [piece.tile if verified else None for piece in pieces]
            seeds = [None if tile is None else tile_seed(stored, tile, row.write_id) for tile in numbers]
            if isinstance(target, DeviceView):
                want.device_ops.append(DeviceReadOp(route.nsid, at_bytes, _device_segments(target, pieces, seeds)))
            else:
                want.ops.append(ReadOp(route.nsid, at_bytes, _segments(target, pieces, seeds)))
            want.expected.append(tuple([None if tile is None else row.checksums[tile] for tile in numbers]))
        return want

    def _locate(self, keys: Sequence[BlockKey], reply: pb.AcquireReply) -> list[_Located | int]:
        """The rows of an answer, each a place or an error code; what makes no sense is `ProtocolError`, as a code.

        Raises `ProtocolError` when the columns themselves do not fit together.
        """
        count = len(keys)
        try:
            status = unpack("u16", reply.status, "status", count)
            if all(status):
                return list(status)
            volumes = unpack("u32", reply.volumes, "volumes", count)
            offsets = unpack("u64", reply.offsets, "offsets", count)
            lengths = unpack("u64", reply.lengths, "lengths", count)
            value_lengths = unpack("u64", reply.value_lengths, "value_lengths", count)
            write_ids = rows16(reply.write_ids, "write_ids")
            tile_counts = unpack("u16", reply.tiles, "tiles", count)
            present = sum(tiles for tiles, code in zip(tile_counts, status, strict=True) if code == OK)
            checksums = unpack("u32", reply.checksums, "checksums", present)
        except InvalidArgument as e:
            raise ProtocolError(f"the answer to Acquire is malformed: {e.message}") from e
        if len(write_ids) != count or not reply.lease or reply.checksum_kind != CRC32C:
            raise ProtocolError("the answer to Acquire lacks its lease or write ids, or has checksums of another kind")
        rows: list[_Located | int] = []
        at = 0
        for i, block in enumerate(keys):
            if status[i] != OK:
                rows.append(status[i])
                continue
            sums = tuple(checksums[at : at + tile_counts[i]])
            at += tile_counts[i]
            try:
                layout = group_of(self._schema, block).layout(value_lengths[i])
            except ValueSize:
                rows.append(ProtocolError.code)
                continue
            fits = layout.tiles == len(sums) and lengths[i] >= layout.extent_bytes and offsets[i] % LBA_BYTES == 0
            rows.append(_Located(layout, volumes[i], offsets[i], write_ids[i], sums) if fits else ProtocolError.code)
        return rows

    @staticmethod
    def _transfer(wanted: Sequence[_Wanted], lane: Lane | None, deadline_ms: int) -> dict[int, list[Outcome]]:
        """Read everything, one call a transport and kind of memory; outcomes by ``id`` of what they are of."""
        outcomes: dict[int, list[Outcome]] = {}
        by_way: dict[tuple[int, bool], list[_Wanted]] = {}
        for want in wanted:
            by_way.setdefault((id(want.transport), bool(want.device_ops)), []).append(want)
        for (_, straight), group in by_way.items():
            transport = group[0].transport
            if straight:
                if lane is not None:
                    lane.settle()
                done = transport.read_device([op for want in group for op in want.device_ops], deadline_ms)
            else:
                done = transport.read([op for want in group for op in want.ops], deadline_ms)
            at = 0
            for want in group:
                count = len(want.device_ops) or len(want.ops)
                outcomes[id(want)] = done[at : at + count]
                at += count
        return outcomes


def _segments(view: memoryview, pieces: Sequence[Piece], seeds: Sequence[int | None]) -> tuple[Segment, ...]:
    return tuple(
        [
            Segment(None if tile is None else view[start : start + length_bytes], length_bytes, seed)
            for (tile, start, length_bytes), seed in zip(pieces, seeds, strict=True)
        ]
    )


def _device_segments(
    view: DeviceView, pieces: Sequence[Piece], seeds: Sequence[int | None]
) -> tuple[DeviceSegment, ...]:
    return tuple(
        DeviceSegment(None if tile is None else view[start : start + length_bytes], length_bytes, seed)
        for (tile, start, length_bytes), seed in zip(pieces, seeds, strict=True)
    )
