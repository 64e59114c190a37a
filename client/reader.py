"""The read path (docs/design.md §5): lease, read the tiles, and let bytes through only after one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay import request_id
from forebay.checksum import CRC32C, tile_seed
from forebay.client.layouts import group_of, runs, selected_bytes
from forebay.client.options import ClientOptions
from forebay.client.results import GetResult
from forebay.client.session import Route, Session, SessionView
from forebay.client.transports.base import Outcome, ReadOp, Segment, Transport
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
from forebay.ids import LBA_BYTES, BlockKey, stored_key
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, rows16, unpack
from forebay.schema import TileLayout

__all__ = ["Reader", "verdict"]

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


@dataclass(frozen=True, slots=True)
class _Located:
    """A row of Acquire's answer that has been checked against the schema."""

    layout: TileLayout
    volume: int
    offset_bytes: int
    write_id: bytes
    checksums: tuple[int, ...]


@dataclass(slots=True)
class _Wanted:
    """One key of a call on its way: where its bytes go, the operations that bring them, and what they must be."""

    view: memoryview
    transport: Transport
    ops: list[ReadOp]
    expected: list[tuple[int | None, ...]]
    first_op: int = 0


class Reader:
    """Reads blocks for one session. Thread-safe; keeps no state of its own."""

    def __init__(self, session: Session, options: ClientOptions, clock: Clock) -> None:
        self._session = session
        self._options = options
        self._clock = clock
        self._schema = session.opening.schema

    @request_id.request()  # its calls are of one request
    def read(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview] | None,
        tiles: Sequence[int] | None,
        hints: pb.Hints | None,
        deadline_ms: int,
    ) -> list[GetResult]:
        """Read blocks into ``buffers``, or into new memory. Arguments have been checked; nothing raises."""
        results: list[GetResult] = []
        for start, end in self._batches(keys, buffers):
            part = None if buffers is None else buffers[start:end]
            try:
                results += self._read(keys[start:end], part, tiles, hints, deadline_ms)
            except ForebayError as e:
                results += [GetResult(False, reason(e.code))] * (end - start)
        return results

    def _batches(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview] | None) -> list[tuple[int, int]]:
        """Parts of a long call, so that no lease has to last for all of it."""
        cuts, size = [0], 0
        for i, block in enumerate(keys):
            group = group_of(self._schema, block)
            if buffers is not None:
                length = len(buffers[i])
            else:
                length = 1 << 20 if group.kind == "opaque" else group.layout().value_bytes
            if size and size + length > self._options.batch_bytes:
                cuts.append(i)
                size = 0
            size += length
        return list(zip(cuts, [*cuts[1:], len(keys)], strict=True))

    def _read(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview] | None,
        tiles: Sequence[int] | None,
        hints: pb.Hints | None,
        deadline_ms: int,
    ) -> list[GetResult]:
        rows = {block: i for i, block in enumerate(dict.fromkeys(keys))}
        columns = keys_to_proto(list(rows))
        asked_ms = self._clock.monotonic_ms()  # a lease counts from before the request was sent

        def request(_: SessionView, context: pb.Context) -> pb.AcquireRequest:
            nonlocal asked_ms
            asked_ms = self._clock.monotonic_ms()
            return pb.AcquireRequest(
                context=context, keys=columns, lease_ttl_ms=self._options.lease_ttl_ms, hints=hints
            )

        view, reply = self._session.call(self._session.rpc.blocks.Acquire, request, deadline_ms)
        lease_until_ms = asked_ms + reply.lease_ttl_ms
        try:
            located = self._locate(list(rows), reply)
            wanted: list[_Wanted | int] = []
            for i, block in enumerate(keys):
                row = located[rows[block]]
                buffer = None if buffers is None else buffers[i]
                if isinstance(row, _Located):
                    route = self._session.route(view, row.volume, deadline_ms)
                    stored = stored_key(view.reply.namespace_id, view.reply.keyspace, view.reply.generation, block)
                    wanted.append(Unavailable.code if route is None else _want(row, stored, route, buffer, tiles))
                else:
                    wanted.append(row)
            outcomes = self._transfer([w for w in wanted if isinstance(w, _Wanted)], min(deadline_ms, lease_until_ms))
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
            else:
                value = want.view if buffers is None else None
                results.append(GetResult(True, "ok", value, len(want.view)))
        if damaged:
            self._session.report(view, list(damaged), deadline_ms)
        return results

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
    def _transfer(wanted: Sequence[_Wanted], deadline_ms: int) -> dict[int, list[Outcome]]:
        """Read everything, one call a transport; outcomes by ``id`` of what they are of."""
        by_transport: dict[int, tuple[Transport, list[ReadOp]]] = {}
        for want in wanted:
            ops = by_transport.setdefault(id(want.transport), (want.transport, []))[1]
            want.first_op = len(ops)
            ops += want.ops
        done = {key: transport.read(ops, deadline_ms) for key, (transport, ops) in by_transport.items()}
        return {id(want): done[id(want.transport)][want.first_op : want.first_op + len(want.ops)] for want in wanted}


def _want(
    row: _Located, stored: bytes, route: Route, buffer: memoryview | None, tiles: Sequence[int] | None
) -> _Wanted | int:
    """The operations that bring a block's tiles into ``buffer``, or an error code."""
    layout = row.layout
    size = selected_bytes(layout, tiles)
    if buffer is None:
        buffer = np.empty(size, np.uint8).data
    elif len(buffer) < size:
        return ValueSize.code
    ops: list[ReadOp] = []
    expected: list[tuple[int | None, ...]] = []
    for offset_bytes, pieces in runs(layout, tiles, bridge_bytes=_BRIDGE_BYTES):
        segments: list[Segment] = []
        sums: list[int | None] = []
        for tile, start, length_bytes in pieces:
            if tile is None:
                segments.append(Segment(None, length_bytes))
                sums.append(None)
                continue
            view = buffer[start : start + length_bytes]
            segments.append(Segment(view, length_bytes, tile_seed(stored, tile, row.write_id)))
            sums.append(row.checksums[tile])
        ops.append(ReadOp(route.nsid, row.offset_bytes + offset_bytes, tuple(segments)))
        expected.append(tuple(sums))
    return _Wanted(buffer[:size], route.transport, ops, expected)
