"""The write path (docs/design.md §5): allocate, write whole tiles, commit with checksums; abort what failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.checksum import tile_seed
from forebay.client.advice import describe_to_proto
from forebay.client.layouts import group_of
from forebay.client.options import ClientOptions
from forebay.client.results import Describe, PutResult
from forebay.client.session import Route, Session, SessionView
from forebay.client.transports.base import Outcome, Segment, Transport, WriteOp
from forebay.client.waiter import wait_visible
from forebay.clock import Clock
from forebay.errors import (
    OK,
    AlreadyExists,
    ForebayError,
    InvalidArgument,
    Pending,
    ProtocolError,
    Unavailable,
    reason,
)
from forebay.ids import LBA_BYTES, BlockKey, align_up, stored_key
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, pack, rows16, unpack
from forebay.schema import TileLayout

__all__ = ["Writer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Granted:
    """A row of Allocate's answer: an extent to write, checked against the schema."""

    row: int
    write_id: bytes
    route: Route
    op: WriteOp
    tiles: int


class Writer:
    """Writes blocks for one session. Thread-safe."""

    def __init__(self, session: Session, options: ClientOptions, clock: Clock) -> None:
        self._session = session
        self._options = options
        self._clock = clock
        self._schema = session.opening.schema
        self.quiesced = True
        """Whether every write command that this writer ever sent has completed."""

    def write(
        self,
        keys: Sequence[BlockKey],
        values: Sequence[memoryview],
        hints: pb.Hints | None,
        describe: Describe | None,
        deadline_ms: int,
    ) -> list[PutResult]:
        """Store blocks. Arguments have been checked; nothing raises."""
        codes: list[int] = []
        for part in self._batches(values):
            try:
                about = describe_to_proto(describe, part)
                codes += self._write(keys[part], values[part], hints, about, deadline_ms)
            except ForebayError as e:
                codes += [e.code] * (part.stop - part.start)
        return [PutResult(code == OK, code in (OK, AlreadyExists.code), reason(code)) for code in codes]

    def _batches(self, values: Sequence[memoryview]) -> list[slice]:
        """Parts of a long call, so that no grant has to last for all of it."""
        cuts, size = [0], 0
        for i, value in enumerate(values):
            if size and size + len(value) > self._options.batch_bytes:
                cuts.append(i)
                size = 0
            size += len(value)
        return [slice(start, end) for start, end in zip(cuts, [*cuts[1:], len(values)], strict=True)]

    def _write(
        self,
        keys: Sequence[BlockKey],
        values: Sequence[memoryview],
        hints: pb.Hints | None,
        describe: pb.Describe | None,
        deadline_ms: int,
    ) -> list[int]:
        columns = keys_to_proto(keys)
        lengths = pack("u64", [len(value) for value in values])

        def request(view: SessionView, context: pb.Context) -> pb.AllocateRequest:
            return pb.AllocateRequest(
                context=context,
                keys=columns,
                value_lengths=lengths,
                host_nqn=view.host.nqn,
                ttl_ms=self._options.write_ttl_ms,
                hints=hints,
                describe=describe,
            )

        view, reply = self._session.call(self._session.rpc.blocks.Allocate, request, deadline_ms)
        codes, granted, bad = self._granted(view, keys, values, reply, deadline_ms)
        outcomes = self._transfer(granted, deadline_ms)
        good: list[tuple[_Granted, tuple[int, ...]]] = []
        failed: list[_Granted] = []
        quiesced = True
        for grant, outcome in zip(granted, outcomes, strict=True):
            quiesced = quiesced and outcome.quiesced
            if outcome.error is None:
                good.append((grant, tuple(c for c in outcome.checksums if c is not None)))
            else:
                failed.append(grant)
                codes[grant.row] = outcome.error.code
        if not quiesced:
            self.quiesced = False
        if failed or bad:  # give extents back at once rather than at their deadlines
            self._session.abort(view, [grant.write_id for grant in failed] + bad, quiesced=quiesced)
        if good:
            for (grant, _), code in zip(good, self._commit(view, good, deadline_ms), strict=True):
                codes[grant.row] = code
        if self._options.wait_pending_ms and Pending.code in codes:
            self._await_pending(keys, codes, deadline_ms)
        return codes

    def _granted(
        self,
        view: SessionView,
        keys: Sequence[BlockKey],
        values: Sequence[memoryview],
        reply: pb.AllocateReply,
        deadline_ms: int,
    ) -> tuple[list[int], list[_Granted], list[bytes]]:
        """Codes of all rows, the rows to write, and write ids of extents that cannot be written."""
        count = len(keys)
        try:
            codes = unpack("u16", reply.status, "status", count)
            if all(codes):
                return codes, [], []
            write_ids = rows16(reply.write_ids, "write_ids")
            volumes = unpack("u32", reply.volumes, "volumes", count)
            offsets = unpack("u64", reply.offsets, "offsets", count)
            lengths = unpack("u64", reply.lengths, "lengths", count)
        except InvalidArgument as e:
            raise ProtocolError(f"the answer to Allocate is malformed: {e.message}") from e
        if len(write_ids) != count:
            raise ProtocolError("the answer to Allocate lacks write ids")
        granted: list[_Granted] = []
        bad: list[bytes] = []
        for i, block in enumerate(keys):
            if codes[i] != OK:
                continue
            layout = group_of(self._schema, block).layout(len(values[i]))
            route = self._session.route(view, volumes[i], deadline_ms)
            if route is None or lengths[i] < layout.extent_bytes or offsets[i] % LBA_BYTES:
                codes[i] = Unavailable.code if route is None else ProtocolError.code
                bad.append(write_ids[i])
                continue
            segments = self._segments(view, block, write_ids[i], layout, values[i])
            op = WriteOp(route.nsid, offsets[i], segments)
            granted.append(_Granted(i, write_ids[i], route, op, layout.tiles))
        return codes, granted, bad

    @staticmethod
    def _segments(
        view: SessionView, block: BlockKey, write_id: bytes, layout: TileLayout, value: memoryview
    ) -> tuple[Segment, ...]:
        reply = view.reply
        stored = stored_key(reply.namespace_id, reply.keyspace, reply.generation, block)
        segments: list[Segment] = []
        for tile, (length_bytes, at) in enumerate(zip(layout.lengths, layout.value_offsets, strict=True)):
            seed = tile_seed(stored, tile, write_id)
            segments.append(Segment(value[at : at + length_bytes], length_bytes, seed))
            padding = align_up(length_bytes) - length_bytes
            if padding:
                segments.append(Segment(None, padding))
        return tuple(segments)

    @staticmethod
    def _transfer(granted: Sequence[_Granted], deadline_ms: int) -> list[Outcome]:
        by_transport: dict[int, tuple[Transport, list[int]]] = {}
        for i, grant in enumerate(granted):
            by_transport.setdefault(id(grant.route.transport), (grant.route.transport, []))[1].append(i)
        outcomes: dict[int, Outcome] = {}
        for transport, rows in by_transport.values():
            outcomes |= zip(rows, transport.write([granted[i].op for i in rows], deadline_ms), strict=True)
        return [outcomes[i] for i in range(len(granted))]

    def _commit(
        self, view: SessionView, good: Sequence[tuple[_Granted, tuple[int, ...]]], deadline_ms: int
    ) -> list[int]:
        try:
            request = pb.CommitRequest(
                context=view.context(self._session.rpc.left_ms(deadline_ms)),
                write_ids=b"".join([grant.write_id for grant, _ in good]),
                checksums=pack("u32", [c for _, sums in good for c in sums]),
                host_nqn=view.host.nqn,
            )
            reply = self._session.rpc.call(self._session.rpc.blocks.Commit, request, deadline_ms)
            return unpack("u16", reply.status, "status", len(good))
        except InvalidArgument as e:
            _log.warning("commit: %s", e)
            return [ProtocolError.code] * len(good)
        except ForebayError as e:
            return [e.code] * len(good)

    def _await_pending(self, keys: Sequence[BlockKey], codes: list[int], deadline_ms: int) -> None:
        rows = [i for i, code in enumerate(codes) if code == Pending.code]
        until_ms = min(deadline_ms, self._clock.monotonic_ms() + self._options.wait_pending_ms)
        for i, code in zip(rows, wait_visible(self._session, [keys[i] for i in rows], until_ms), strict=True):
            codes[i] = AlreadyExists.code if code == OK else Pending.code
