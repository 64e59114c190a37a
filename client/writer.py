"""The write path (docs/design.md §5): allocate, write tiles, commit with checksums; abort what failed.

A block is written by one process, or by the ranks of a group, each its tiles (docs/ranks.md): in both cases by way of
a `WritePlan`, which here is made, carried out, or given up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from forebay import request_id
from forebay.checksum import tile_seed
from forebay.client.advice import describe_to_proto
from forebay.client.layouts import group_of, runs
from forebay.client.options import ClientOptions
from forebay.client.plans import PlannedWrite, WritePlan
from forebay.client.results import Describe
from forebay.client.session import Session, SessionView
from forebay.client.transports.base import Outcome, Segment, Transport, WriteOp
from forebay.client.waiter import wait_visible
from forebay.clock import Clock
from forebay.errors import (
    OK,
    AlreadyExists,
    ForebayError,
    GridInvalid,
    InvalidArgument,
    NoSpace,
    Pending,
    ProtocolError,
    SessionExpired,
    TargetFailed,
    Unavailable,
    WriteFenced,
)
from forebay.ids import LBA_BYTES, BlockKey, Extent, VolumeId, stored_key
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, pack, rows16, unpack

__all__ = ["Wanted", "Writer"]

_log = logging.getLogger(__name__)
_NOT_COMMITTED = (NoSpace.code, Unavailable.code, TargetFailed.code)
"""A commit that ended so is not tried again by a writer that is alone."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks to be written: their keys, the bytes of each value, and what is said about them."""

    keys: Sequence[BlockKey]
    lengths: Sequence[int]
    hints: pb.Hints | None = None
    describe: Describe | None = None


@dataclass(slots=True)
class _Writing:
    """One block of a call: where its tiles go, and the checksums of those that are there."""

    row: int
    write: PlannedWrite
    transport: Transport
    ops: list[WriteOp]
    tiles: list[tuple[int, ...]]
    """The tiles of each operation."""
    sums: dict[int, int] = field(default_factory=dict)


class Writer:
    """Writes blocks for one session. Thread-safe."""

    def __init__(self, session: Session, options: ClientOptions, clock: Clock) -> None:
        self._session = session
        self._options = options
        self._clock = clock
        self._schema = session.opening.schema
        self._counting = threading.Lock()
        self._under_way = 0
        self._lost = False

    @property
    def quiesced(self) -> bool:
        """Whether every write command that this writer ever sent has completed."""
        with self._counting:
            return not self._lost and not self._under_way

    # --- one writer -------------------------------------------------------------------------------------------------

    @request_id.request()  # its calls are of one request
    def put(self, wanted: Wanted, values: Sequence[memoryview], deadline_ms: int) -> list[int]:
        """Store whole blocks by this process alone: a code a block. Arguments have been checked; nothing raises."""
        codes: list[int] = []
        for part in self._batches(wanted.lengths):
            mine = wanted.keys[part]
            try:
                view, plan = self._allocate(wanted, part, (), deadline_ms)
                done = self._carry_out(view, plan, None, values[part], deadline_ms, alone=True)
            except ForebayError as e:
                done = [e.code] * len(mine)
            if self._options.wait_pending_ms and Pending.code in done:
                self._await_pending(mine, done, deadline_ms)
            codes += done
        return codes

    def _batches(self, lengths: Sequence[int]) -> list[slice]:
        """Parts of a long call, so that no grant has to last for all of it."""
        cuts, size = [0], 0
        for i, length in enumerate(lengths):
            if size and size + length > self._options.batch_bytes:
                cuts.append(i)
                size = 0
            size += length
        return [slice(start, end) for start, end in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]

    def _await_pending(self, keys: Sequence[BlockKey], codes: list[int], deadline_ms: int) -> None:
        rows = [i for i, code in enumerate(codes) if code == Pending.code]
        until_ms = min(deadline_ms, self._clock.monotonic_ms() + self._options.wait_pending_ms)
        ends = wait_visible(self._session, [keys[i] for i in rows], until_ms, pending_only=True)
        for i, code in zip(rows, ends, strict=True):
            codes[i] = AlreadyExists.code if code == OK else Pending.code

    # --- groups of ranks --------------------------------------------------------------------------------------------

    def allocate(self, wanted: Wanted, hosts: Sequence[str] | None, deadline_ms: int) -> WritePlan:
        """A plan for ``hosts``, or for the session's processes (None). Arguments have been checked; nothing raises."""
        try:
            return self._allocate(wanted, slice(0, len(wanted.keys)), hosts, deadline_ms)[1]
        except ForebayError as e:
            rows = [PlannedWrite(key, length, e.code) for key, length in zip(wanted.keys, wanted.lengths, strict=True)]
            return WritePlan(self._session.view.reply.session, tuple(rows))

    @request_id.request()  # its calls are of one request
    def put_tiles(
        self, plan: WritePlan, tiles: Sequence[int] | None, values: Sequence[memoryview], deadline_ms: int
    ) -> list[int]:
        """Write and commit tiles of a plan's blocks: a code a block. Arguments have been checked; nothing raises."""
        view = self._session.view
        if view.reply.session != plan.session:  # it was lost, and this process has another one now
            return [write.code or SessionExpired.code for write in plan.writes]
        return self._carry_out(view, plan, tiles, values, deadline_ms, alone=False)

    def abort(self, plan: WritePlan, deadline_ms: int) -> int:
        """Give a plan's writes up, for all ranks. How many there were; 0 if the node is away, and they expire."""
        view = self._session.view
        write_ids = [write.write_id for write in plan.writes if write.code == OK]
        if view.reply.session != plan.session or not write_ids:
            return 0
        request = pb.AbortRequest(
            context=view.context(self._session.rpc.left_ms(deadline_ms)),
            write_ids=b"".join(write_ids),
            quiesced=self.quiesced,
            host_nqn=view.host.nqn,
        )
        try:
            return self._session.rpc.call(self._session.rpc.blocks.Abort, request, deadline_ms).aborted
        except ForebayError as e:
            _log.info("%d writes were not aborted, they will expire: %s", len(write_ids), e)
            return 0

    # --- both -------------------------------------------------------------------------------------------------------

    def _allocate(
        self, wanted: Wanted, part: slice, hosts: Sequence[str] | None, deadline_ms: int
    ) -> tuple[SessionView, WritePlan]:
        """Ask for extents; for this process alone if ``hosts`` is empty, for the whole session if it is None."""
        keys, lengths = wanted.keys[part], wanted.lengths[part]
        columns, packed, about = keys_to_proto(keys), pack("u64", lengths), describe_to_proto(wanted.describe, part)

        def request(view: SessionView, context: pb.Context) -> pb.AllocateRequest:
            return pb.AllocateRequest(
                context=context,
                keys=columns,
                value_lengths=packed,
                host_nqn=view.host.nqn,
                host_nqns=hosts,
                session_hosts=hosts is None,
                ttl_ms=self._options.write_ttl_ms,
                hints=wanted.hints,
                describe=about,
            )

        view, reply = self._session.call(self._session.rpc.blocks.Allocate, request, deadline_ms)
        return view, self._planned(view, keys, lengths, reply)

    def _planned(
        self, view: SessionView, keys: Sequence[BlockKey], lengths: Sequence[int], reply: pb.AllocateReply
    ) -> WritePlan:
        """The answer to Allocate, checked against the schema. Raises `ProtocolError`."""
        count = len(keys)
        try:
            codes = unpack("u16", reply.status, "status", count)
            if all(codes):
                rows = [PlannedWrite(*row) for row in zip(keys, lengths, codes, strict=True)]
                return WritePlan(view.reply.session, tuple(rows))
            write_ids = rows16(reply.write_ids, "write_ids")
            volumes = unpack("u32", reply.volumes, "volumes", count)
            offsets = unpack("u64", reply.offsets, "offsets", count)
            sizes = unpack("u64", reply.lengths, "lengths", count)
        except InvalidArgument as e:
            raise ProtocolError(f"the answer to Allocate is malformed: {e.message}") from e
        if len(write_ids) != count:
            raise ProtocolError("the answer to Allocate lacks write ids")
        writes: list[PlannedWrite] = []
        bad: list[bytes] = []
        for i, block in enumerate(keys):
            if codes[i] != OK:
                writes.append(PlannedWrite(block, lengths[i], codes[i]))
            elif sizes[i] < group_of(self._schema, block).layout(lengths[i]).extent_bytes or offsets[i] % LBA_BYTES:
                writes.append(PlannedWrite(block, lengths[i], ProtocolError.code))
                bad.append(write_ids[i])
            else:
                extent = Extent(VolumeId(volumes[i]), offsets[i], sizes[i])
                writes.append(PlannedWrite(block, lengths[i], OK, write_ids[i], extent))
        if bad:
            self._session.abort(view, bad, quiesced=True)
        return WritePlan(view.reply.session, tuple(writes), reply.write_tag)

    def _carry_out(
        self,
        view: SessionView,
        plan: WritePlan,
        tiles: Sequence[int] | None,
        values: Sequence[memoryview],
        deadline_ms: int,
        *,
        alone: bool,
    ) -> list[int]:
        """Write tiles, commit what was written, give up what was not."""
        codes = [write.code for write in plan.writes]
        writing: list[_Writing] = []
        failed: list[bytes] = []
        for row, write in enumerate(plan.writes):
            if write.code != OK or write.extent is None:
                continue
            route = self._session.route(view, write.extent.volume, deadline_ms)
            if route is None:
                codes[row] = Unavailable.code
                failed.append(write.write_id)
                continue
            ops, parts = self._ops(view, write, partial(WriteOp, route.nsid, tag=plan.tag), tiles, values[row])
            writing.append(_Writing(row, write, route.transport, ops, parts))
        good: list[_Writing] = []
        outcomes, quiesced = self._transfer(writing, deadline_ms)
        for one, results in zip(writing, outcomes, strict=True):
            error = next((outcome.error for outcome in results if outcome.error is not None), None)
            if error is None:
                for part, outcome in zip(one.tiles, results, strict=True):
                    one.sums.update(zip(part, [c for c in outcome.checksums if c is not None], strict=True))
                good.append(one)
                continue
            codes[one.row] = error.code
            # A rank that has no grant says nothing about the group, whose other ranks may have one.
            if alone or not isinstance(error, WriteFenced):
                failed.append(one.write.write_id)
        for one, code in zip(good, self._commit(view, good, deadline_ms, whole=tiles is None), strict=True):
            codes[one.row] = code
            # GridInvalid: another rank wrote other bytes there, and nobody knows which are on media
            if code == GridInvalid.code or (alone and code in _NOT_COMMITTED):
                failed.append(one.write.write_id)
        if failed:  # give extents back at once rather than at their deadlines
            # Another thread may be writing other tiles of the same blocks.
            self._session.abort(view, failed, quiesced=quiesced and (alone or self.quiesced))
        return codes

    def _ops(
        self,
        view: SessionView,
        write: PlannedWrite,
        operation: Callable[[int, tuple[Segment, ...]], WriteOp],
        tiles: Sequence[int] | None,
        value: memoryview,
    ) -> tuple[list[WriteOp], list[tuple[int, ...]]]:
        """The operations that write a block's tiles, and the tiles of each."""
        reply, extent = view.reply, cast(Extent, write.extent)
        stored = stored_key(reply.namespace_id, reply.keyspace, reply.generation, write.key)
        layout = group_of(self._schema, write.key).layout(write.length_bytes)
        ops: list[WriteOp] = []
        parts: list[tuple[int, ...]] = []
        for offset_bytes, pieces in runs(layout, tiles):
            segments: list[Segment] = []
            part: list[int] = []
            for tile, start, length_bytes in pieces:
                if tile is None:
                    segments.append(Segment(None, length_bytes))
                    continue
                seed = tile_seed(stored, tile, write.write_id)
                segments.append(Segment(value[start : start + length_bytes], length_bytes, seed))
                part.append(tile)
            ops.append(operation(extent.offset_bytes + offset_bytes, tuple(segments)))
            parts.append(tuple(part))
        return ops, parts

    def _transfer(self, writing: Sequence[_Writing], deadline_ms: int) -> tuple[list[list[Outcome]], bool]:
        """Carry out all operations, one call a transport: the outcomes of each block, and whether all are quiesced."""
        by_transport: dict[int, tuple[Transport, list[int]]] = {}
        for i, one in enumerate(writing):
            by_transport.setdefault(id(one.transport), (one.transport, []))[1].append(i)
        done: dict[int, list[Outcome]] = {}
        with self._counting:
            self._under_way += 1
        quiesced = False
        try:
            for transport, rows in by_transport.values():
                outcomes = iter(transport.write([op for i in rows for op in writing[i].ops], deadline_ms))
                for i in rows:
                    done[i] = [next(outcomes) for _ in writing[i].ops]
            quiesced = all(outcome.quiesced for outcomes in done.values() for outcome in outcomes)
        finally:
            with self._counting:
                self._under_way -= 1
                self._lost = self._lost or not quiesced
        return [done[i] for i in range(len(writing))], quiesced

    def _commit(self, view: SessionView, good: Sequence[_Writing], deadline_ms: int, *, whole: bool) -> list[int]:
        """Commit the tiles of these blocks, all of the grid if ``whole``; a code a block."""
        if not good:
            return []
        try:
            request = pb.CommitRequest(
                context=view.context(self._session.rpc.left_ms(deadline_ms)),
                write_ids=b"".join([one.write.write_id for one in good]),
                checksums=pack("u32", [one.sums[tile] for one in good for tile in sorted(one.sums)]),
                host_nqn=view.host.nqn,
            )
            if not whole:
                request.tile_counts = pack("u16", [len(one.sums) for one in good])
                request.tiles = pack("u16", [tile for one in good for tile in sorted(one.sums)])
            reply = self._session.rpc.call(self._session.rpc.blocks.Commit, request, deadline_ms)
            return unpack("u16", reply.status, "status", len(good))
        except GridInvalid as e:
            if len(good) == 1:
                _log.warning("commit: %s", e)
                return [e.code]
            # One block's tiles are refused and nothing was done: the others go on without it.
            return [code for one in good for code in self._commit(view, [one], deadline_ms, whole=whole)]
        except InvalidArgument as e:
            _log.warning("commit: %s", e)
            return [ProtocolError.code] * len(good)
        except ForebayError as e:
            return [e.code] * len(good)
