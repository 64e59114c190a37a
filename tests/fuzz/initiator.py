"""The initiator against a target that lies: whatever is answered, a call ends in coded errors or verified bytes.

Bytes come only to the views of a call that has not returned, and nothing else of the process is touched.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from functools import lru_cache

from forebay.checksum import crc32c
from forebay.client.transports.base import ReadOp, Segment, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.errors import ForebayError, InvalidArgument
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp import pdu, spec
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.connection import Connection
from forebay.nvmetcp.events import CommandReceived, DataChunk, DataEnd, Event, ICReqReceived
from forebay.nvmetcp.spec import DNR, AdminOpcode, CnsValue, FabricsType, FatalError, IoOpcode, Property, Status
from forebay.nvmetcp.states import Role
from tests.fuzz.damage import damaged, framed
from tests.fuzz.source import Source
from tests.fuzz.watch import Faults, settled

__all__ = ["close", "run"]

_NQN = "nqn.2026-11.test:liar"
_NGUID = bytes(range(16))
_HOST = HostIdentity("nqn.2026-11.test:host", "00000000-0000-0000-0000-0000000000f1")
_VOLUME_BYTES = 1 << 20
_CONTENT = b"".join(crc32c(i.to_bytes(4, "little")).to_bytes(4, "little") for i in range(_VOLUME_BYTES // 4))
_CLEAN = b"\xee" * (1 << 20)
_DEADLINE_MS = 20_000
_SILENT_MS = 60
"""Deadline of calls that meet silence; it is all that they wait for."""
_KIND_STATUS = (0, 0, Status.LBA_OUT_OF_RANGE | DNR, Status.UNRECOVERED_READ_ERROR, Status.ACCESS_DENIED | DNR)


class _Link:
    """One connection of the initiator, as the liar sees it."""

    def __init__(self, sock: socket.socket, lies: Source, digests: int) -> None:
        self.sock = sock
        self.lies = lies
        self.digests = 0
        self.qid: int | None = None
        self.lied = False
        self.silent = False
        self._offered = digests
        self._queued: list[tuple[Command, int]] = []
        self._writes: dict[int, tuple[Command, int]] = {}
        self.codec = Connection(
            Role.CONTROLLER,
            in_capsule_bytes=1 << 20,
            header_digest=bool(digests & 1),
            data_digest=bool(digests & 2),
            max_h2c_data_bytes=1 << 20,
        )

    def feed(self, data: bytes) -> bytes:
        """What to answer to this. Raises what the codec does of a peer that breaks the protocol, or was led to."""
        out = bytearray()
        for event in self.codec.receive_data(data):
            for piece in self._answer(event):
                out += piece
        return bytes(out)

    def _answer(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, ICReqReceived):
            agreed = b"".join(map(bytes, self.codec.send_ic_resp()))
            self.digests = (1 if self.codec.header_digest else 0) | (2 if self.codec.data_digest else 0)
            if self._lie(24):
                limit = self.lies.number(32)
                agreed = pdu.ic_resp(max_h2c_data_bytes=limit, cpda=self.lies.below(64), digests=self.lies.below(8))
            yield self._damaged(agreed)
        elif isinstance(event, CommandReceived):
            if event.in_capsule_bytes:
                self._queued.append((event.command, event.in_capsule_bytes))
            else:
                yield from self._command(event.command)
        elif isinstance(event, DataEnd) and event.last:
            if event.tag is None:
                yield from self._command(self._queued.pop()[0], in_capsule=True)
            else:
                yield from self._after_data(event.cid)
        elif isinstance(event, DataChunk):
            assert event.data, "a piece of nothing"

    def _lie(self, one_in: int) -> bool:
        told = self.lies.chance(one_in)
        self.lied |= told
        return told

    def _damaged(self, raw: bytes) -> bytes:
        out = damaged(self.lies, raw)
        self.lied |= out != raw
        return out

    def _sent(self, header: bytes, data: bytes = b"") -> bytes:
        raw = framed(self.lies, header, data, self.digests)
        self.lied |= raw != framed(Source(b""), header, data, self.digests)
        return self._damaged(raw)

    def _response(self, cid: int, status: int = 0, result: int = 0) -> bytes:
        return self._sent(pdu.capsule_resp(result, 0, 0, cid, status))

    # ------------------------------------------------------------------------------------------------ commands

    def _command(self, command: Command, *, in_capsule: bool = False) -> Iterator[bytes]:
        if self._lie(48):
            yield self._odd(command.cid)
        if command.opcode == spec.FABRICS_OPCODE:
            yield self._fabrics(command)
        elif self.qid == 0:
            yield from self._admin(command)
        elif command.opcode == IoOpcode.READ:
            yield from self._read(command)
        elif in_capsule:
            yield self._response(command.cid, self.lies.pick(_KIND_STATUS) if self._lie(8) else 0)
        else:
            self._writes[command.cid] = (command, 0)
            yield from self._after_data(command.cid)

    def _odd(self, cid: int) -> bytes:
        """Something that has no place here."""
        lies = self.lies
        return lies.pick(
            [
                pdu.capsule_resp(0, 0, 0, lies.number(16), 0),
                pdu.capsule_resp(0, 0, 0, cid, lies.number(15)),
                pdu.r2t(lies.number(16), lies.number(16), 0, 4096),
                pdu.r2t(cid, 1, lies.number(32), lies.number(32)),
                pdu.c2h_data_header(lies.number(16), 0, 4096, last=True, success=True) + bytes(4096),
                pdu.term_req(from_host=False, fatal_error=FatalError.SEQUENCE_ERROR, header=lies.take(100)),
                pdu.ic_resp(max_h2c_data_bytes=4096),
                lies.take(40),
            ]
        )

    def _fabrics(self, command: Command) -> bytes:
        result = 0
        if command.fabrics_type == FabricsType.CONNECT:
            self.qid = command.cdw10 >> 16
            result = 7
        elif command.fabrics_type == FabricsType.PROPERTY_GET:
            result = {Property.CAP: 127 | 1 << 24, Property.CSTS: 1}.get(Property(command.cdw11), 0)
        if self._lie(24):
            result = self.lies.number(64)
        status = self.lies.number(15) if self._lie(48) else 0
        return self._response(command.cid, status, result)

    def _admin(self, command: Command) -> Iterator[bytes]:
        if command.opcode == AdminOpcode.IDENTIFY:
            if command.cdw10 == CnsValue.CONTROLLER:
                fields = {"cntlid": 7, "mdts": 5, "ioccsz": (64 + 4096) // 16, "maxcmd": 64}
                raw = bytearray(spec.IDENTIFY_CONTROLLER.pack(**self._fields(fields)))
            else:
                fields = {"nsze": _VOLUME_BYTES // LBA_BYTES, "lbaf0_lbads": 12}
                nguid = _NGUID if not self._lie(24) else bytes(16)
                raw = bytearray(spec.IDENTIFY_NAMESPACE.pack(nguid=nguid, **self._fields(fields)))
            yield from self._data(command.cid, bytes(raw), spec.IDENTIFY_BYTES)
        else:
            yield self._response(command.cid, 0, self.lies.number(32) if self._lie(16) else command.cdw11)

    def _fields(self, true: dict[str, int]) -> dict[str, int]:
        widths = {"cntlid": 16, "mdts": 8, "ioccsz": 32, "maxcmd": 16, "nsze": 64, "lbaf0_lbads": 8}
        return {name: self.lies.number(widths[name]) if self._lie(24) else value for name, value in true.items()}

    def _read(self, command: Command) -> Iterator[bytes]:
        start = command.slba * LBA_BYTES
        data = _CONTENT[start : start + command.block_count * LBA_BYTES]
        if self._lie(24):
            yield self._response(command.cid, self.lies.pick(_KIND_STATUS[2:]))
            return
        if self._lie(24):
            data = bytes(len(data))
        yield from self._data(command.cid, data, command.block_count * LBA_BYTES)

    def _data(self, cid: int, data: bytes, wanted: int) -> Iterator[bytes]:
        """Data in PDUs of a size of their own; where the lies say so out of order, too long, too short or twice."""
        lies = self.lies
        step = lies.pick([len(data) or 1, 4096, 10_000, 1000]) if len(data) <= 65_536 else len(data)
        by_response = lies.chance(3)
        at = 0
        while at < len(data):
            piece = data[at : at + step]
            offset, last = at, at + len(piece) == wanted
            if self._lie(40):
                offset = lies.number(32)
            if self._lie(40):
                last = not last
            if self._lie(40):
                piece = lies.pick([piece + piece, piece[:-1] or b"x", piece + b"x"])
            success = last and not by_response
            yield self._sent(pdu.c2h_data_header(cid, offset, len(piece), last=last, success=success), piece)
            at += step
            if self._lie(40):
                return
        if by_response or self._lie(40):
            yield self._response(cid)

    def _after_data(self, cid: int) -> Iterator[bytes]:
        """The next R2T of a write, or its end."""
        known = self._writes.get(cid)
        if known is None:
            return
        command, asked = known
        size, lies = command.block_count * LBA_BYTES, self.lies
        if asked >= size or self._lie(16):
            self._writes.pop(cid)
            yield self._response(cid, lies.pick(_KIND_STATUS) if self._lie(8) else 0)
            return
        take = min(lies.pick([size, 8192, 65_536, 1 << 20]), size - asked)
        self._writes[cid] = (command, asked + take)
        if self._lie(16):
            yield self._sent(pdu.r2t(cid, lies.number(16), lies.number(32), lies.number(32)))
        else:
            raw = self.codec.send_r2t(cid, cid, asked, take)
            yield self._damaged(raw)
        if self._lie(24):
            yield self._response(cid, lies.pick(_KIND_STATUS))


class _Liar:
    """Listens for ever in a thread of its own and serves one connection after the other, in order."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lies = Source(b"")
        self.digests = 0
        self.lied = False
        self.silence = False
        self.broken = ""
        self.open: dict[int, _Link] = {}
        self._poller = select.poll()
        self._poller.register(self._listener, select.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True, name="liar")
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            for fd, _ in self._poller.poll():
                if fd == self._listener.fileno():
                    try:
                        sock, _ = self._listener.accept()
                    except OSError:
                        return  # closed
                    sock.settimeout(60)
                    self.open[sock.fileno()] = _Link(sock, self.lies, self.digests)
                    self._poller.register(sock, select.POLLIN)
                else:
                    self._serve(fd)

    def _serve(self, fd: int) -> None:
        link = self.open[fd]
        try:
            data = link.sock.recv(1 << 20)
            if data:
                out = link.feed(data)
                self.lied |= link.lied
                if out:
                    link.sock.sendall(out)
                # Nothing more comes after a lie, and the end says so at once; or nobody says anything.
                if not link.lied or (self.silence and not link.silent):
                    link.silent = link.lied
                    return
        except OSError:
            pass
        except Exception as error:  # of the codec, which a lie may have led astray, as it did the initiator
            if not link.lied:
                self.broken = f"the initiator broke the protocol: {error!r}"
        self._poller.unregister(fd)
        del self.open[fd]
        link.sock.close()


@lru_cache(maxsize=1)
def _liar() -> _Liar:
    return _Liar()


def close() -> None:
    """End the liar, if any input was run."""
    if _liar.cache_info().currsize:
        _liar().close()
        _liar.cache_clear()


def run(data: bytes) -> None:
    """One transport, some calls, and what it is told."""
    faults, liar = Faults.install(), _liar()
    asks = Source(data[: 1 + (data[0] if data else 0) % 48])
    asks.take(1)
    liar.lies = Source(data[1 + (data[0] if data else 0) % 48 :])
    liar.digests = asks.pick([0, 0, 3, 1, 2])
    liar.silence = asks.chance(24)
    liar.lied = False
    threads = threading.active_count()
    options = NvmeTcpOptions(
        connections=1,
        call_connections=1,
        backoff_ms=(1, 1),
        header_digest=bool(liar.digests & 1),
        data_digest=bool(liar.digests & 2),
    )
    nguids = {1: _NGUID.hex()}
    transport = NvmeTcpTransport(
        SubsystemAddress("127.0.0.1", liar.port, _NQN), _HOST, nguids=nguids, options=options, seed=1
    )
    arenas = []
    try:
        for _ in range(1 + asks.below(3)):
            arenas.append(_call(asks, transport, liar))
    finally:
        transport.close()
    settled(lambda: not liar.open, "the connections of a closed transport are gone")
    settled(lambda: threading.active_count() <= threads, "its threads are gone")
    faults.check()
    assert not liar.broken, liar.broken
    for arena in arenas:
        assert arena == _CLEAN, "bytes came to a buffer after its call had returned"


def _call(asks: Source, transport: NvmeTcpTransport, liar: _Liar) -> bytearray:
    """One call; its arena, given to something else now."""
    deadline_ms = time.monotonic_ns() // 1_000_000 + (_SILENT_MS if liar.silence else _DEADLINE_MS)
    arena = bytearray(_CLEAN)
    reads = not asks.chance(3)
    ops: list[ReadOp | WriteOp] = []
    used: list[tuple[int, int]] = []
    at = LBA_BYTES
    for _ in range(1 + asks.below(4)):
        count = 1 + asks.below(3)
        offset = asks.below(_VOLUME_BYTES // LBA_BYTES - 128) * LBA_BYTES
        segments: list[Segment] = []
        total = 0
        for _ in range(count):
            length = asks.pick([4096, 1, 5000, 65_536, 70_001])
            segments.append(Segment(memoryview(arena)[at : at + length], length, asks.pick([9, None])))
            used.append((at, at + length))
            at, total = at + length + 64, total + length
        if total % LBA_BYTES:
            segments.append(Segment(None, -total % LBA_BYTES))
        nsid = 1 if not asks.chance(32) else 2
        kind = ReadOp(nsid, offset, tuple(segments)) if reads else WriteOp(nsid, offset, tuple(segments), 3)
        ops.append(kind)
    try:
        outcomes = transport.read(ops, deadline_ms) if reads else transport.write(ops, deadline_ms)  # type: ignore[arg-type]
    except InvalidArgument as error:
        raise AssertionError(f"the harness asked for nonsense: {error}") from error
    for op, outcome in zip(ops, outcomes, strict=True):
        assert outcome.error is None or isinstance(outcome.error, ForebayError)
        assert len(outcome.checksums) == len(op.segments)
        for (view, _, seed), found in zip(op.segments, outcome.checksums, strict=True):
            if outcome.error is None and seed is not None and view is not None:
                assert found == crc32c(view, seed), "a checksum that is not the one of the bytes"
        if outcome.error is None and reads and not liar.lied:
            got = b"".join(bytes(view) for view, _, _ in op.segments if view is not None)
            assert got == _CONTENT[op.offset_bytes : op.offset_bytes + len(got)], "wrong bytes from a true target"
        assert outcome.error is None or liar.lied or liar.silence or op.nsid != 1, f"a true target: {outcome.error!r}"
    for start, end in used:
        arena[start:end] = _CLEAN[start:end]
    assert arena == _CLEAN, "bytes outside of the views of a call"
    return arena
