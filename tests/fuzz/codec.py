"""The codec, both roles: whatever arrives, in whatever pieces, is events or a `PduError`, and the same for any cut."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from forebay.nvmetcp import command as nvme
from forebay.nvmetcp import pdu, spec
from forebay.nvmetcp.connection import Connection
from forebay.nvmetcp.events import (
    CommandReceived,
    DataEnd,
    DataStart,
    Event,
    ICReqReceived,
    ICRespReceived,
    R2TReceived,
    ResponseReceived,
)
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import FatalError, Status
from forebay.nvmetcp.states import Role, State
from tests.fuzz.damage import damaged, framed
from tests.fuzz.host_pdus import HostPdus
from tests.fuzz.source import Source

__all__ = ["controller", "host"]

_OPEN = 4
"""Commands that the host has open."""
_BYTES = 16_384
"""Data of each."""


class _Shell:
    """Drives a connection as the real ends do, and notes what it is told."""

    def __init__(self, role: Role, digests: int) -> None:
        self.told: list[object] = []
        self.sent = 0
        self.tags: set[int] = set()
        self.conn = Connection(
            role,
            max_h2c_data_bytes=8192,
            in_capsule_bytes=8192,
            header_digest=bool(digests & 1),
            data_digest=bool(digests & 2),
        )
        if role is Role.HOST:
            self.conn.send_ic_req()

    def run(self, stream: bytes, piece_bytes: int) -> None:
        """Take a stream in pieces, never more than the connection says."""
        at = 0
        try:
            while at < len(stream):
                most = self.conn.payload_remaining or self.conn.bytes_wanted
                if not most:
                    assert self.conn.state in (State.TERMINATED, State.CLOSED), f"idle while {self.conn.state}"
                    return
                assert self.conn.payload_remaining or most <= 255, f"a header of {most} bytes"
                piece = stream[at : at + min(most, piece_bytes)]
                at += len(piece)
                if self.conn.payload_remaining:
                    if self.conn.data_digest:
                        self.conn.digest_payload(piece)
                    events = self.conn.payload_received(len(piece))
                else:
                    events = self.conn.receive_data(piece)
                for event in events:
                    self._take(event)
            self.told.append(("end", self.conn.receive_eof()))
        except PduError as error:
            self.told.append((error.fatal_error, error.fatal_info, error.header[:8]))
            assert self.conn.state is State.TERMINATED
            assert self.conn.receive_data(bytes(64)) == []
            assert len(error.termination) <= spec.TERM_MAX_BYTES and error.termination[2] == spec.TERM_REQ.size

    def _take(self, event: Event) -> None:
        conn = self.conn
        self.told.append(event)
        if isinstance(event, ICReqReceived):
            conn.send_ic_resp()
        elif isinstance(event, ICRespReceived):
            for cid in range(_OPEN):
                self._send(cid)
        elif isinstance(event, CommandReceived):
            cid, kind = event.command.cid, event.command.opcode & 3
            if not event.in_capsule_bytes and kind == 1 and cid not in self.tags:
                self.tags.add(cid)
                conn.send_r2t(cid, cid, 0, max(4, min(event.command.sgl_length_bytes, 1 << 20)))
        elif isinstance(event, R2TReceived):
            pieces = conn.send_h2c_data(event, [bytes(event.length_bytes)])
            assert sum(map(len, pieces)) >= event.length_bytes
        elif isinstance(event, ResponseReceived):
            assert event.completion.cid < _OPEN
            self._send(event.completion.cid)
        elif isinstance(event, DataStart):
            if event.tag is not None and event.last:
                self.tags.remove(event.tag)
            assert event.length_bytes > 0 and conn.payload_remaining == event.length_bytes
            assert conn.role is Role.CONTROLLER or event.offset_bytes + event.length_bytes <= _BYTES
        elif isinstance(event, DataEnd) and event.success and conn.role is Role.HOST:
            self._send(event.cid)

    def _send(self, cid: int) -> None:
        """Open a command: even ones read, odd ones write."""
        self.sent += 1
        if self.sent < 64:
            if cid % 2:
                self.conn.send_command(nvme.write(cid, 1, 0, 4), write_bytes=_BYTES)
            else:
                self.conn.send_command(nvme.read(cid, 1, 0, 4), read_bytes=_BYTES)


def _compare(role: Role, stream: bytes, digests: int, piece_bytes: int) -> None:
    whole, cut = _Shell(role, digests), _Shell(role, digests)
    whole.run(stream, 1 << 30)
    cut.run(stream, piece_bytes)
    assert whole.told == cut.told, f"cut into pieces of {piece_bytes}:\n{whole.told}\n{cut.told}"


def controller(data: bytes) -> None:
    """A host's stream, into the controller role."""
    source = Source(data)
    digests, piece_bytes = source.pick([3, 0, 1, 2]), 1 + source.below(100)
    if source.chance(4):
        stream = source.take(source.left)
    else:
        drawn = HostPdus(
            source, subsystem_nqn="nqn.s", host_nqn="nqn.h", host_id=UUID(int=7), qid=1, offered_digests=digests
        )
        stream = b"".join([*drawn.opening(), *drawn.more()])
    _compare(Role.CONTROLLER, stream, digests, piece_bytes)


def host(data: bytes) -> None:
    """A target's stream, into the host role, which has commands open."""
    source = Source(data)
    digests, piece_bytes = source.pick([0, 3, 1, 2]), 1 + source.below(100)
    _compare(Role.HOST, b"".join(_target_pdus(source, digests)), digests, piece_bytes)


def _target_pdus(source: Source, digests: int) -> Iterator[bytes]:
    if source.chance(6):
        yield source.take(source.left)
        return
    agreed = source.pick([digests, digests, digests, 0, source.below(4)])
    limit = source.pick([4096, 8192, 1 << 20, 4095, 0xFFFFFFFF])
    yield damaged(source, pdu.ic_resp(max_h2c_data_bytes=limit, digests=agreed, cpda=source.pick([0, 0, 0, 31, 32])))
    at = dict.fromkeys(range(6), 0)
    while source.left:
        cid, kind = source.below(6), source.below(6)
        if kind <= 1:
            length = source.pick([4096, 16_384, 1, source.number(16)])
            offset = source.number(32) if source.chance(8) else at[cid]
            end = at[cid] = offset + length
            last = source.chance(2) or end == _BYTES
            header = pdu.c2h_data_header(cid, offset & 0xFFFFFFFF, length, last=last, success=end == _BYTES)
            yield damaged(source, framed(source, header, b"\xda" * length, agreed))
            at[cid] %= _BYTES
        elif kind == 2:
            length = source.number(32) if source.chance(4) else source.pick([4096, 16_384])
            yield damaged(source, framed(source, pdu.r2t(cid, source.number(16), at[cid], length), b"", agreed))
            at[cid] = (at[cid] + length) % _BYTES
        elif kind == 3:
            status = source.pick([0, Status.LBA_OUT_OF_RANGE | spec.DNR, source.number(15)])
            yield damaged(source, framed(source, pdu.capsule_resp(source.number(64), 0, 1, cid, status), b"", agreed))
            at[cid] = 0
        elif kind == 4:
            yield source.pick(
                [
                    pdu.term_req(from_host=False, fatal_error=FatalError.SEQUENCE_ERROR, header=source.take(150)),
                    pdu.ic_resp(max_h2c_data_bytes=4096),
                    pdu.ic_req(),
                    pdu.capsule_cmd_header(nvme.keep_alive(1), 0),
                ]
            )
        else:
            yield source.take(32)
