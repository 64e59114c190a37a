"""One NVMe/TCP transport connection, either end, without a socket (NVMe/TCP Transport Specification 1.1, §3).

The shell reads bytes and gives them to `Connection.receive_data`, which answers with events; it sends what the `send_*`
methods return, header and payload as separate pieces of one `sendmsg`. Nothing here copies payload:

* `bytes_wanted` is how many bytes may be read next without reading into payload (it is an upper bound, a shorter read
  is fine, and 0 while payload is due);
* after a `DataStart` event, `payload_remaining` bytes of the stream are payload. The shell receives them straight into
  their destination and reports them with `payload_received`. Payload that reaches `receive_data` all the same comes
  back as `DataChunk` events that point into it;
* where data digests are in use (`data_digest`), the shell gives every piece of payload to `digest_payload` before it
  reports it, while the piece is in the cache, and puts what `data_digest_of` makes of the data behind data that it
  sends. Received digests are read like headers: `DataEnd` comes after them.

One thread may receive while another sends: the two sides touch no common state but the dictionary of open transfers,
whose single operations are atomic. Calls of one side need to be serialised by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from forebay.checksum import crc32c
from forebay.nvmetcp import pdu, spec
from forebay.nvmetcp.command import Command, Completion
from forebay.nvmetcp.events import (
    CommandReceived,
    DataChunk,
    DataEnd,
    DataStart,
    Event,
    ICReqReceived,
    ICRespReceived,
    R2TReceived,
    ResponseReceived,
    TermReceived,
)
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import FabricsType, FatalError, PduFlag, PduType
from forebay.nvmetcp.states import RECEIVE_INPUTS, TRANSITIONS, Input, Role, State

__all__ = ["MAX_HEADER_BYTES", "MIN_MAX_H2C_DATA_BYTES", "Buffer", "Connection"]

Buffer = bytes | bytearray | memoryview

#: A peer's data may start this far behind the start of its header, where PDO says so (one byte): `bytes_wanted` is
#: never more.
MAX_HEADER_BYTES: Final = 255
#: MAXH2CDATA is at least this. TCP §3.6.2.3.
MIN_MAX_H2C_DATA_BYTES: Final = 4096
_MAX_DATA_ALIGNMENT: Final = 31
"""Largest HPDA or CPDA, 0's based in dwords: 128 bytes. TCP §3.6.2.2."""

_CMD: Final = int(PduType.CAPSULE_CMD)
_CMD_BYTES: Final = spec.CAPSULE_CMD.size
_CH_BYTES: Final = spec.COMMON_HEADER.size
_HEADER_DIGEST: Final = int(PduFlag.HEADER_DIGEST)
_DATA_DIGEST: Final = int(PduFlag.DATA_DIGEST)
_DIGEST_FLAGS: Final = _HEADER_DIGEST | _DATA_DIGEST
_DIGEST_BYTES: Final = spec.DIGEST_BYTES
_LAST: Final = int(PduFlag.LAST)
_SUCCESS: Final = int(PduFlag.SUCCESS)
_DATA_TYPES: Final = frozenset((int(PduType.H2C_DATA), int(PduType.C2H_DATA)))
_TERM_TYPES: Final = frozenset((int(PduType.H2C_TERM_REQ), int(PduType.C2H_TERM_REQ)))
#: Byte offsets of header fields, as FEI reports them.
_FLAGS_AT, _HLEN_AT, _PDO_AT, _PLEN_AT, _CCCID_AT, _TTAG_AT, _DATAO_AT, _DATAL_AT = 1, 2, 3, 4, 8, 10, 12, 16


class _Transfer:
    """Host role: how far one command's data has come."""

    __slots__ = ("least_bytes", "r2t_open", "read_bytes", "received_bytes", "requested_bytes", "write_bytes")

    def __init__(self, read_bytes: int, write_bytes: int, *, exact: bool) -> None:
        self.read_bytes = read_bytes
        self.least_bytes = read_bytes if exact else 1
        self.received_bytes = 0
        self.write_bytes = write_bytes
        self.requested_bytes = 0
        self.r2t_open = False


class _OpenR2T:
    """Controller role: a range that was asked for and has not arrived whole."""

    __slots__ = ("cid", "end_bytes", "next_bytes")

    def __init__(self, cid: int, offset_bytes: int, length_bytes: int) -> None:
        self.cid = cid
        self.next_bytes = offset_bytes
        self.end_bytes = offset_bytes + length_bytes


class Connection:
    """The state machine of one transport connection.

    Args:
        role: which end this is.
        max_h2c_data_bytes: controller role: the MAXH2CDATA to announce and enforce (at least 4,096).
        in_capsule_bytes: controller role: the most in-capsule data to accept. May be changed later
            (`in_capsule_limit_bytes`), since admin and I/O queues differ and Connect says which this is.
        header_digest, data_digest: host role: ask for them; controller role: agree if asked. They are in use once
            ICResp was sent or received and the attributes of these names are True.
    """

    def __init__(
        self,
        role: Role,
        *,
        max_h2c_data_bytes: int = 1 << 20,
        in_capsule_bytes: int = spec.ADMIN_IN_CAPSULE_BYTES,
        header_digest: bool = False,
        data_digest: bool = False,
    ) -> None:
        assert max_h2c_data_bytes >= MIN_MAX_H2C_DATA_BYTES, f"MAXH2CDATA of {max_h2c_data_bytes}"
        self.role = role
        self.in_capsule_limit_bytes = in_capsule_bytes
        self.max_h2c_data_bytes = max_h2c_data_bytes
        """MAXH2CDATA: ours (controller role), or the controller's once ICResp was received (host role)."""
        self.payload_remaining = 0
        """Bytes of payload that come next in the stream; 0 outside payload."""
        self.header_digest = False
        self.data_digest = False
        self.state = State.NEW
        self._wanted_digests = (1 if header_digest else 0) | (2 if data_digest else 0)
        self._header_digest_bytes = 0
        self._table = TRANSITIONS[role]
        self._inputs = RECEIVE_INPUTS[role]
        self._takes_commands = role is Role.CONTROLLER
        self._align_bytes = 4  # of data in PDUs that we send, as the peer asked
        self._peer_align_bytes = 4  # of data in PDUs that we receive
        self._buffer = bytearray(MAX_HEADER_BYTES)  # a header that arrived in pieces
        self._have = 0
        self._need = _CH_BYTES
        self._payload: DataStart | None = None
        self._payload_at = 0
        self._payload_digest = False  # whether a digest follows the current payload
        self._payload_crc = 0
        self._transfers: dict[int, _Transfer] = {}
        self._r2ts: dict[int, _OpenR2T] = {}

    # --- receiving --------------------------------------------------------------------------------------------------

    @property
    def bytes_wanted(self) -> int:
        """The most bytes that can be read now without reading past a header; 0 while payload is due or all is over."""
        if self.payload_remaining:
            return 0
        if self._have >= _CH_BYTES or self.state is State.DIGEST:
            return self._need - self._have
        if self.state is State.READY:
            # Without an open R2T a host can only send capsules (or end the connection), so 72 bytes hold no payload.
            capsules_only = self.role is Role.CONTROLLER and not self._r2ts
            return (_CMD_BYTES if capsules_only else spec.MIN_HEADER_BYTES) + self._header_digest_bytes - self._have
        if self.state is State.TERMINATED or self.state is State.CLOSED:
            return 0
        return spec.IC_REQ.size - self._have if self.role is Role.CONTROLLER else spec.MIN_HEADER_BYTES - self._have

    @property
    def between_pdus(self) -> bool:
        """Whether the next byte received is the first of a PDU."""
        return not self.payload_remaining and not self._have and self.state is not State.DIGEST

    @property
    def open_commands(self) -> int:
        """Host role: commands sent and not answered."""
        return len(self._transfers)

    def receive_data(self, data: Buffer) -> list[Event]:
        """Take bytes of the stream, in order, and say what they mean.

        Raises `PduError` if the peer broke the protocol; the connection is then terminated and ignores further data.
        """
        events: list[Event] = []
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            if self.payload_remaining:
                take = min(end - at, self.payload_remaining)
                assert self._payload is not None
                events.append(DataChunk(self._payload.cid, self._payload_at, view[at : at + take]))
                if self._payload_digest:
                    self.digest_payload(view[at : at + take])
                at += take
                events += self.payload_received(take)
                continue
            if self.state is State.TERMINATED or self.state is State.CLOSED:
                break
            if self._have == 0 and end - at >= _CH_BYTES and self.state is not State.DIGEST:
                if view[at] == _CMD and end - at >= _CMD_BYTES and self.state is State.READY:
                    fields = spec.CAPSULE_CMD.unpack_from(view, at)
                    plain = fields[2] == fields[4] == _CMD_BYTES and not fields[1] & _DIGEST_FLAGS
                    if plain and self._takes_commands and not self._header_digest_bytes:
                        events.append(CommandReceived(Command._make(fields[5:]), 0))
                        at += _CMD_BYTES
                        continue
                need = self._check_common_header(view[at:])
                if end - at >= need:
                    self._receive_pdu(view[at : at + need], events)
                    at += need
                    continue
            at += self._accumulate(view[at:], events)
        return events

    def _accumulate(self, view: memoryview, events: list[Event]) -> int:
        """Add to a header or a digest that comes in pieces; returns how many bytes were taken."""
        take = min(len(view), self._need - self._have)
        self._buffer[self._have : self._have + take] = view[:take]
        self._have += take
        if self.state is State.DIGEST:
            if self._have == _DIGEST_BYTES:
                self._have, self._need = 0, _CH_BYTES
                found = int.from_bytes(self._buffer[:_DIGEST_BYTES], "little")
                events.append(self._end_payload(Input.DIGEST_COMPLETE, digest_ok=found == self._payload_crc))
            return take
        if self._have == _CH_BYTES:
            self._need = self._check_common_header(memoryview(self._buffer)[:_CH_BYTES])
        if self._have == self._need:
            header = memoryview(bytes(self._buffer[: self._need]))
            self._have, self._need = 0, _CH_BYTES
            self._receive_pdu(header, events)
        return take

    def digest_payload(self, data: Buffer) -> None:
        """Take a piece of the current payload into its digest; needed if `data_digest`, before `payload_received`."""
        self._payload_crc = crc32c(data, self._payload_crc)

    def data_digest_of(self, *pieces: Buffer) -> list[Buffer]:
        """What has to follow data that is sent in one PDU: its digest, or nothing where none was negotiated."""
        if not self.data_digest:
            return []
        value = 0
        for piece in pieces:
            value = crc32c(piece, value)
        return [value.to_bytes(_DIGEST_BYTES, "little")]

    def payload_received(self, count: int) -> list[Event]:
        """`count` bytes (1 to `payload_remaining`) of payload were received elsewhere.

        With the last one comes `DataEnd`, unless a digest is due first.
        """
        payload = self._payload
        assert payload is not None and 0 < count <= self.payload_remaining, (
            f"{count} bytes reported of {self.payload_remaining} due"
        )
        self.payload_remaining -= count
        self._payload_at += count
        if self.payload_remaining:
            return []
        if self._payload_digest:
            self.state = self._table[self.state][Input.PAYLOAD_COMPLETE_DIGEST_DUE]
            self._need = _DIGEST_BYTES
            return []
        return [self._end_payload(Input.PAYLOAD_COMPLETE, digest_ok=True)]

    def _end_payload(self, cause: Input, *, digest_ok: bool) -> DataEnd:
        payload, self._payload = self._payload, None
        assert payload is not None, "the end of no payload"
        self.state = self._table[self.state][cause]
        if payload.success:
            self._transfers.pop(payload.cid, None)
        return DataEnd(payload.cid, payload.tag, payload.last, payload.success, digest_ok)

    def receive_eof(self) -> bool:
        """The peer closed its end. Returns whether that was between PDUs."""
        clean = self.between_pdus
        if self.state is not State.CLOSED:
            self.state = self._table[self.state][Input.END_OF_STREAM]
        self.payload_remaining = 0
        return clean

    def _check_common_header(self, header: memoryview) -> int:
        """Judge the first 8 bytes of a PDU; returns how long it is up to its payload."""
        kind, flags, hlen, pdo, plen = spec.COMMON_HEADER.unpack_from(header)
        cause = self._inputs.get(kind)
        if cause is None:
            self._refuse(
                f"PDU type {kind:#x} is not for a {self.role.value}", FatalError.INVALID_HEADER_FIELD, 0, header
            )
        if cause not in self._table[self.state]:
            self._refuse(f"{cause.value} while {self.state.value}", FatalError.SEQUENCE_ERROR, 0, header)
        expected = spec.HEADER_BYTES[kind]
        if hlen != expected:
            self._refuse(f"HLEN {hlen}, not {expected}", FatalError.INVALID_HEADER_FIELD, _HLEN_AT, header)
        if kind in _TERM_TYPES:
            if not expected <= plen <= spec.TERM_MAX_BYTES:
                self._refuse(f"PLEN {plen} of a TermReq", FatalError.INVALID_HEADER_FIELD, _PLEN_AT, header)
            return int(plen)
        expected += self._header_digest_bytes
        with_data = kind in _DATA_TYPES or (kind == _CMD and plen > expected)
        digests = (_HEADER_DIGEST if self._header_digest_bytes else 0) | (
            _DATA_DIGEST if with_data and self.data_digest else 0
        )
        if flags & _DIGEST_FLAGS != digests:
            self._refuse("other digests than were negotiated", FatalError.INVALID_HEADER_FIELD, _FLAGS_AT, header)
        if not with_data:
            if plen != expected:
                self._refuse(f"PLEN {plen}, not {expected}", FatalError.INVALID_HEADER_FIELD, _PLEN_AT, header)
            return expected
        if pdo < expected or pdo % self._peer_align_bytes:
            self._refuse(f"PDO {pdo}", FatalError.INVALID_HEADER_FIELD, _PDO_AT, header)
        data_bytes = plen - pdo - (_DIGEST_BYTES if digests & _DATA_DIGEST else 0)
        if data_bytes <= 0:
            self._refuse(f"PLEN {plen} with PDO {pdo}", FatalError.INVALID_HEADER_FIELD, _PLEN_AT, header)
        if kind == _CMD and data_bytes > self.in_capsule_limit_bytes:
            self._refuse(
                f"{data_bytes} bytes in capsule, at most {self.in_capsule_limit_bytes}",
                FatalError.LIMIT_EXCEEDED,
                _PLEN_AT,
                header,
            )
        return int(pdo)

    def _check_header_digest(self, header: memoryview) -> None:
        hlen = header[2]
        found = int.from_bytes(header[hlen : hlen + _DIGEST_BYTES], "little")
        if found != crc32c(header[:hlen]):
            # FEI is the digest that came. TCP §3.6.2.4, §3.6.2.5.
            self._refuse("the header's digest does not match", FatalError.HEADER_DIGEST_ERROR, found, header[:hlen])

    def _receive_pdu(self, header: memoryview, events: list[Event]) -> None:
        """Act on a PDU whose common header was judged and whose header is here whole."""
        kind = header[0]
        if self._header_digest_bytes and kind not in _TERM_TYPES:
            self._check_header_digest(header)
        if kind in _DATA_TYPES:
            self._receive_data_pdu(header, events)
        elif kind == PduType.CAPSULE_RESP:
            self._receive_response(header, events)
        elif kind == PduType.R2T:
            self._receive_r2t(header, events)
        elif kind == _CMD:
            self._receive_command(header, events)
        elif kind in _TERM_TYPES:
            self.state = self._table[self.state][Input.RECV_TERM]
            fatal_error, fatal_info = spec.TERM_REQ.unpack_from(header)[5:]
            events.append(TermReceived(fatal_error, fatal_info, bytes(header[spec.TERM_REQ.size :])))
        elif kind == PduType.IC_REQ:
            self._receive_ic_req(header, events)
        else:
            self._receive_ic_resp(header, events)

    def _receive_ic_req(self, header: memoryview, events: list[Event]) -> None:
        pfv, hpda, digests, max_r2t = spec.IC_REQ.unpack_from(header)[5:]
        if pfv:
            self._refuse(f"PDU format version {pfv}", FatalError.UNSUPPORTED_PARAMETER, 8, header)
        if hpda > _MAX_DATA_ALIGNMENT:
            self._refuse(f"HPDA {hpda}", FatalError.INVALID_HEADER_FIELD, 10, header)
        self._align_bytes = (hpda + 1) * 4
        self._wanted_digests &= digests
        self.state = self._table[self.state][Input.RECV_IC_REQ]
        events.append(ICReqReceived(hpda, bool(digests & 1), bool(digests & 2), max_r2t + 1))

    def _receive_ic_resp(self, header: memoryview, events: list[Event]) -> None:
        pfv, cpda, digests, max_h2c_data_bytes = spec.IC_RESP.unpack_from(header)[5:]
        if pfv:
            self._refuse(f"PDU format version {pfv}", FatalError.UNSUPPORTED_PARAMETER, 8, header)
        if cpda > _MAX_DATA_ALIGNMENT:
            self._refuse(f"CPDA {cpda}", FatalError.INVALID_HEADER_FIELD, 10, header)
        if digests & ~self._wanted_digests:
            self._refuse("digests that were not asked for", FatalError.UNSUPPORTED_PARAMETER, 11, header)
        if max_h2c_data_bytes < MIN_MAX_H2C_DATA_BYTES:
            self._refuse(f"MAXH2CDATA {max_h2c_data_bytes}", FatalError.INVALID_HEADER_FIELD, 12, header)
        self._align_bytes = (cpda + 1) * 4
        self.max_h2c_data_bytes = max_h2c_data_bytes
        self._use_digests(digests)
        self.state = self._table[self.state][Input.RECV_IC_RESP]
        events.append(ICRespReceived(cpda, max_h2c_data_bytes, self.header_digest, self.data_digest))

    def _use_digests(self, digests: int) -> None:
        self.header_digest, self.data_digest = bool(digests & 1), bool(digests & 2)
        self._header_digest_bytes = _DIGEST_BYTES if self.header_digest else 0

    def _receive_command(self, header: memoryview, events: list[Event]) -> None:
        fields = spec.CAPSULE_CMD.unpack_from(header)
        flags, _, pdo, plen = fields[1:5]
        command = Command._make(fields[5:])
        in_capsule_bytes = 0
        if plen > _CMD_BYTES + self._header_digest_bytes:
            in_capsule_bytes = plen - pdo - (_DIGEST_BYTES if flags & _DATA_DIGEST else 0)
        events.append(CommandReceived(command, in_capsule_bytes))
        if in_capsule_bytes:
            self._start_payload(
                Input.RECV_COMMAND_DATA, DataStart(command.cid, None, 0, in_capsule_bytes, True, False), events
            )

    def _receive_response(self, header: memoryview, events: list[Event]) -> None:
        result, sq_head, sq_id, cid, status = spec.CAPSULE_RESP.unpack_from(header)[5:]
        transfer = self._transfers.get(cid)
        if transfer is None:
            self._refuse(f"a response to command {cid}, which is not open", FatalError.INVALID_HEADER_FIELD, 20, header)
        code = (status >> 1) & 0x7FF
        if code == 0 and (
            transfer.received_bytes < transfer.least_bytes
            or transfer.requested_bytes != transfer.write_bytes
            or transfer.r2t_open
        ):
            self._refuse(f"success of command {cid} before all its data", FatalError.SEQUENCE_ERROR, 0, header)
        del self._transfers[cid]
        events.append(ResponseReceived(Completion(result, sq_head, sq_id, cid, code, bool(status & 0x8000))))

    def _receive_r2t(self, header: memoryview, events: list[Event]) -> None:
        cid, tag, offset_bytes, length_bytes = spec.R2T.unpack_from(header)[5:]
        transfer = self._transfers.get(cid)
        if transfer is None:
            self._refuse(f"R2T of command {cid}, which is not open", FatalError.INVALID_HEADER_FIELD, _CCCID_AT, header)
        if transfer.r2t_open:
            self._refuse(f"a second R2T of command {cid}", FatalError.LIMIT_EXCEEDED, 0, header)
        if offset_bytes != transfer.requested_bytes:
            self._refuse(f"R2T at {offset_bytes} out of order", FatalError.DATA_OUT_OF_RANGE, _DATAO_AT, header)
        if not 0 < length_bytes <= transfer.write_bytes - offset_bytes:
            self._refuse(f"R2T of {length_bytes} bytes", FatalError.DATA_OUT_OF_RANGE, _DATAL_AT, header)
        transfer.requested_bytes += length_bytes
        transfer.r2t_open = True
        events.append(R2TReceived(cid, tag, offset_bytes, length_bytes))

    def _receive_data_pdu(self, header: memoryview, events: list[Event]) -> None:
        _, flags, _, pdo, plen, cid, tag, offset_bytes, length_bytes = spec.DATA_PDU.unpack_from(header)
        last = bool(flags & _LAST)
        data_bytes = plen - pdo - _DIGEST_BYTES if self.data_digest else plen - pdo
        if data_bytes != length_bytes:
            self._refuse(
                f"DATAL {length_bytes} in {data_bytes} bytes", FatalError.INVALID_HEADER_FIELD, _DATAL_AT, header
            )
        if self.role is Role.HOST:
            success = bool(flags & _SUCCESS)
            transfer = self._transfers.get(cid)
            if transfer is None:
                self._refuse(
                    f"data of command {cid}, which is not open", FatalError.INVALID_HEADER_FIELD, _CCCID_AT, header
                )
            if offset_bytes != transfer.received_bytes:
                self._refuse(f"data at {offset_bytes} out of order", FatalError.DATA_OUT_OF_RANGE, _DATAO_AT, header)
            if length_bytes > transfer.read_bytes - offset_bytes:
                self._refuse(f"{length_bytes} bytes too many", FatalError.DATA_OUT_OF_RANGE, _DATAL_AT, header)
            transfer.received_bytes += length_bytes
            if success and not (last and transfer.received_bytes >= transfer.least_bytes):
                self._refuse("SUCCESS before the last byte", FatalError.INVALID_HEADER_FIELD, _FLAGS_AT, header)
            start = DataStart(cid, None, offset_bytes, length_bytes, last, success)
            self._start_payload(Input.RECV_C2H_DATA, start, events)
            return
        r2t = self._r2ts.get(tag)
        if r2t is None:
            self._refuse(f"data for tag {tag}, which is not open", FatalError.INVALID_HEADER_FIELD, _TTAG_AT, header)
        if cid != r2t.cid:
            self._refuse(f"tag {tag} is not of command {cid}", FatalError.INVALID_HEADER_FIELD, _CCCID_AT, header)
        if offset_bytes != r2t.next_bytes:
            self._refuse(f"data at {offset_bytes} out of order", FatalError.DATA_OUT_OF_RANGE, _DATAO_AT, header)
        if length_bytes > self.max_h2c_data_bytes:
            self._refuse(f"{length_bytes} bytes in one H2CData", FatalError.LIMIT_EXCEEDED, _DATAL_AT, header)
        if length_bytes > r2t.end_bytes - offset_bytes:
            self._refuse(f"{length_bytes} bytes too many", FatalError.DATA_OUT_OF_RANGE, _DATAL_AT, header)
        r2t.next_bytes += length_bytes
        if last != (r2t.next_bytes == r2t.end_bytes):
            self._refuse("LAST_PDU does not fit the R2T", FatalError.INVALID_HEADER_FIELD, _FLAGS_AT, header)
        if last:
            del self._r2ts[tag]
        self._start_payload(Input.RECV_H2C_DATA, DataStart(cid, tag, offset_bytes, length_bytes, last, False), events)

    def _start_payload(self, cause: Input, start: DataStart, events: list[Event]) -> None:
        self.state = self._table[self.state][cause]
        self._payload = start
        self._payload_digest = self.data_digest
        self._payload_crc = 0
        self._payload_at = start.offset_bytes
        self.payload_remaining = start.length_bytes
        events.append(start)

    def _refuse(self, message: str, fatal_error: FatalError, fatal_info: int, header: memoryview) -> NoReturn:
        about = bytes(header[:128])
        self.state = State.TERMINATED
        raise PduError(
            message,
            fatal_error=fatal_error,
            fatal_info=fatal_info,
            header=about,
            termination=pdu.term_req(
                from_host=self.role is Role.HOST, fatal_error=fatal_error, fatal_info=fatal_info, header=about
            ),
        )

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send(self, cause: Input) -> None:
        state = self.state  # read once: the receiving thread may move it, and what keeps it must not write it
        target = self._table[state].get(cause)
        assert target is not None, f"{cause.value} while {state.value}"
        if target is not state:
            self.state = target

    def send_ic_req(self) -> list[Buffer]:
        """Open the connection (host role)."""
        self._send(Input.SEND_IC_REQ)
        return [pdu.ic_req(digests=self._wanted_digests)]

    def send_ic_resp(self) -> list[Buffer]:
        """Accept the connection, with those digests that the host asked for and this end offers (controller role)."""
        self._send(Input.SEND_IC_RESP)
        self._use_digests(self._wanted_digests)
        return [pdu.ic_resp(max_h2c_data_bytes=self.max_h2c_data_bytes, digests=self._wanted_digests)]

    def _digested(self, header: bytes) -> bytes:
        """A header as this connection sends it."""
        if not self.header_digest and not self.data_digest:
            return header
        return pdu.digested(header, self._align_bytes, header_digest=self.header_digest, data_digest=self.data_digest)

    def send_command(
        self, command: Command, *, data: Buffer | None = None, read_bytes: int = 0, write_bytes: int = 0
    ) -> list[Buffer]:
        """A command capsule (host role); sets the command's SGL.

        `data` goes with it in the capsule; or `write_bytes` are what the controller may ask for with R2T; `read_bytes`
        are what it will send, or at most send to Authentication Receive, which says how much room there is for a
        message. The cid must not be open.
        """
        self._send(Input.SEND_COMMAND)
        assert command.cid not in self._transfers, f"command {command.cid} is open"
        in_capsule_bytes = len(memoryview(data).cast("B")) if data is not None else 0
        kind = spec.SGL_DATA_BLOCK_OFFSET if in_capsule_bytes else spec.SGL_TRANSPORT_DATA_BLOCK
        sgl = (0, in_capsule_bytes or read_bytes or write_bytes, kind)
        header = pdu.capsule_cmd_header(command[:7] + sgl + command[10:], in_capsule_bytes, self._align_bytes)
        exact = command.opcode != spec.FABRICS_OPCODE or command.fabrics_type != FabricsType.AUTHENTICATION_RECEIVE
        self._transfers[command.cid] = _Transfer(read_bytes, write_bytes, exact=exact)
        header = self._digested(header)
        return [header] if data is None else [header, data, *self.data_digest_of(data)]

    def send_h2c_data(self, request: R2TReceived, pieces: Sequence[Buffer]) -> list[Buffer]:
        """The data that an R2T asked for (host role), in as many PDUs as MAXH2CDATA makes of it.

        `pieces` are the bytes of the R2T's range, in order; they are sliced and not copied.
        """
        self._send(Input.SEND_H2C_DATA)
        transfer = self._transfers[request.cid]
        views = [memoryview(piece).cast("B") for piece in pieces]
        assert sum(map(len, views)) == request.length_bytes, "pieces do not make up the range that R2T asked for"
        out: list[Buffer] = []
        sent = 0
        while sent < request.length_bytes:
            length_bytes = min(self.max_h2c_data_bytes, request.length_bytes - sent)
            header = pdu.h2c_data_header(
                request.cid,
                request.tag,
                request.offset_bytes + sent,
                length_bytes,
                last=sent + length_bytes == request.length_bytes,
                align_bytes=self._align_bytes,
            )
            out.append(self._digested(header))
            first = len(out)
            sent += length_bytes
            while length_bytes:
                take = views[0][:length_bytes]
                out.append(take)
                length_bytes -= len(take)
                if len(take) == len(views[0]):
                    del views[0]
                else:
                    views[0] = views[0][len(take) :]
            out += self.data_digest_of(*out[first:])
        transfer.r2t_open = False
        return out

    def send_response(self, cid: int, status: int = 0, *, result: int = 0, sq_head: int = 0, sq_id: int = 0) -> bytes:
        """A response capsule (controller role); `status` is a `spec.Status`, with `spec.DNR` or not."""
        self._send(Input.SEND_RESPONSE)
        return self.response(cid, status, result=result, sq_head=sq_head, sq_id=sq_id)

    def response(self, cid: int, status: int = 0, *, result: int = 0, sq_head: int = 0, sq_id: int = 0) -> bytes:
        """`send_response` for a thread that cannot know whether the other one has just ended the connection."""
        return self._digested(pdu.capsule_resp(result, sq_head, sq_id, cid, status))

    def send_c2h_data(
        self, cid: int, length_bytes: int, *, offset_bytes: int = 0, last: bool = True, success: bool = False
    ) -> bytes:
        """The header before `length_bytes` of a command's data (controller role); exactly those must be sent next.

        Then what `data_digest_of` makes of them.
        """
        self._send(Input.SEND_C2H_DATA)
        header = pdu.c2h_data_header(
            cid, offset_bytes, length_bytes, last=last, success=success, align_bytes=self._align_bytes
        )
        return self._digested(header)

    def send_r2t(self, cid: int, tag: int, offset_bytes: int, length_bytes: int) -> bytes:
        """Ask for a range of a command's data (controller role); `tag` must not be open."""
        self._send(Input.SEND_R2T)
        assert tag not in self._r2ts, f"tag {tag} is open"
        assert length_bytes > 0, "an R2T of no bytes"
        self._r2ts[tag] = _OpenR2T(cid, offset_bytes, length_bytes)
        return self._digested(pdu.r2t(cid, tag, offset_bytes, length_bytes))

    def send_term(self, fatal_error: FatalError, fatal_info: int = 0, header: bytes = b"") -> bytes:
        """End the connection because of an error that the caller found in a PDU."""
        self._send(Input.SEND_TERM)
        self.payload_remaining = 0
        return pdu.term_req(
            from_host=self.role is Role.HOST, fatal_error=fatal_error, fatal_info=fatal_info, header=header
        )
