"""The steps of the protocols between the parts of a node, as `forebay.testing.proxy` finds them on the wire."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import ClassVar

from forebay.nvmetcp import spec
from forebay.nvmetcp.spec import AdminOpcode, FabricsType, IoOpcode, PduType
from forebay.proto import forebay_pb2 as pb
from forebay.testing.proxy import Message

__all__ = ["GrpcSteps", "JsonRpcSteps", "NvmeTcpSteps"]


class NvmeTcpSteps:
    """NVMe/TCP without digests (TCP §3.6): one step a kind of PDU and command.

    ``ic_req``, ``ic_resp``, ``connect_admin``, ``identify``, ``read``, ``write``, ``write_in_capsule``, ...: a command
    capsule; ``read.c2h_data``, ``write.r2t``, ``write.h2c_data``, ``read.response``, ...: what follows it.
    """

    def __init__(self) -> None:
        self._buffers = {True: bytearray(), False: bytearray()}
        self._commands: dict[int, str] = {}
        self._queue_id = 0

    def feed(self, data: bytes, *, up: bool) -> Sequence[Message]:
        buffer = self._buffers[up]
        buffer += data
        found = []
        while len(buffer) >= spec.COMMON_HEADER.size:
            kind, _, _, _, length_bytes = spec.COMMON_HEADER.unpack_from(buffer)
            if len(buffer) < length_bytes:
                break
            raw = bytes(buffer[:length_bytes])
            del buffer[:length_bytes]
            found.append(Message(self._step(PduType(kind), raw), raw))
        return found

    def _step(self, kind: PduType, raw: bytes) -> str:
        if kind in (PduType.IC_REQ, PduType.IC_RESP):
            return kind.name.lower()
        if kind in (PduType.H2C_TERM_REQ, PduType.C2H_TERM_REQ):
            return ""  # an end in itself
        if kind is PduType.CAPSULE_CMD:
            name = self._command(raw)
            self._commands[struct.unpack_from("<H", raw, 10)[0]] = name
            return name
        if kind is PduType.CAPSULE_RESP:
            return f"{self._commands[struct.unpack_from('<H', raw, 20)[0]]}.response"
        # CCCID stands at the same place in H2CData, C2HData and R2T. TCP §3.6.2.7 to §3.6.2.9.
        return f"{self._commands[struct.unpack_from('<H', raw, 8)[0]]}.{kind.name.lower()}"

    def _command(self, raw: bytes) -> str:
        opcode, in_capsule = raw[8], len(raw) > spec.CAPSULE_CMD.size
        if opcode == spec.FABRICS_OPCODE:
            kind = FabricsType(raw[12])
            if kind is not FabricsType.CONNECT:
                return kind.name.lower()
            self._queue_id = struct.unpack_from("<H", raw, 8 + 42)[0]
            return "connect_io" if self._queue_id else "connect_admin"
        if not self._queue_id:
            return AdminOpcode(opcode).name.lower()
        return IoOpcode(opcode).name.lower() + ("_in_capsule" if in_capsule else "")


class JsonRpcSteps:
    """JSON-RPC as the target speaks it: ``method.request`` and ``method.response``."""

    def __init__(self) -> None:
        self._buffers = {True: "", False: ""}
        self._methods: dict[int | str, str] = {}
        self._decoder = json.JSONDecoder()

    def feed(self, data: bytes, *, up: bool) -> Sequence[Message]:
        text = self._buffers[up] + data.decode()
        found = []
        while text := text.lstrip():
            try:
                value, end = self._decoder.raw_decode(text)
            except ValueError:
                break
            raw, text = text[:end].encode(), text[end:]
            if up:
                self._methods[value["id"]] = value["method"]
                found.append(Message(f"{value['method']}.request", raw))
            else:
                found.append(Message(f"{self._methods.pop(value['id'])}.response", raw))
        self._buffers[up] = text
        return found


class GrpcSteps:
    """gRPC over HTTP/2 (RFC 9113): what it takes to tell calls apart, on connections whose first calls these are.

    ``settings`` and ``settings.response``: the first frames of both ends. ``Match``, ``Match.response``: the request's
    and the answer's data, whether the call has a stream of its own or goes by ``Calls``. Names are found where a path
    is not yet in the peer's HPACK table, which is once a path and connection.
    """

    _PREFACE: ClassVar[bytes] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    _DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
    _PATH: ClassVar[bytes] = b"/forebay.v1."

    def __init__(self) -> None:
        self._buffers = {True: bytearray(), False: bytearray()}
        self._streams: dict[int, str] = {}
        self._calls: dict[tuple[int, int], str] = {}
        self._greeted = {True: False, False: False}

    def feed(self, data: bytes, *, up: bool) -> Sequence[Message]:
        buffer = self._buffers[up]
        buffer += data
        found = []
        if up and buffer.startswith(self._PREFACE):
            found.append(Message("", self._PREFACE))
            del buffer[: len(self._PREFACE)]
        elif up and self._PREFACE.startswith(bytes(buffer)):
            return found
        while len(buffer) >= 9:
            length_bytes = 9 + int.from_bytes(buffer[:3], "big")
            if len(buffer) < length_bytes:
                break
            raw = bytes(buffer[:length_bytes])
            del buffer[:length_bytes]
            found.append(Message(self._step(raw, up), raw))
        return found

    def _step(self, raw: bytes, up: bool) -> str:
        kind, stream, payload = raw[3], int.from_bytes(raw[5:9], "big") & 0x7FFFFFFF, raw[9:]
        if kind == self._SETTINGS and not self._greeted[up]:
            self._greeted[up] = True
            return "settings" if up else "settings.response"
        if kind == self._HEADERS and up and (at := payload.find(self._PATH)) >= 0:
            length_bytes = payload[at - 1]  # a literal without Huffman coding, shorter than 127. RFC 7541 §5.2
            self._streams[stream] = payload[at : at + length_bytes].rpartition(b"/")[2].decode()
            return ""
        name = self._streams.get(stream, "")
        if kind != self._DATA or not payload or not name:
            return ""
        if name == "Calls":
            name = self._by_stream(stream, payload[5:], up)
        return name if up else f"{name}.response"

    def _by_stream(self, stream: int, message: bytes, up: bool) -> str:
        if up:
            request = pb.CallRequest.FromString(message)
            self._calls[stream, request.id] = request.method
            return request.method or "cancel"
        return self._calls.pop((stream, pb.CallReply.FromString(message).id), "")
