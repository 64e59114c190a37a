"""A small NVMe/TCP host for tests: blocking, one command at a time unless the test does it step by step."""

from __future__ import annotations

import socket
from collections import deque
from typing import TypeVar
from uuid import UUID

from forebay.nvmetcp import command, spec
from forebay.nvmetcp.command import Command, Completion, ConnectData
from forebay.nvmetcp.connection import Buffer, Connection
from forebay.nvmetcp.events import (
    DataChunk,
    DataEnd,
    DataStart,
    Event,
    R2TReceived,
    ResponseReceived,
    TermReceived,
)
from forebay.nvmetcp.states import Role

E = TypeVar("E", bound=Event)

HOST_ID = UUID("11111111-2222-3333-4444-555555555555")
OTHER_ID = UUID("aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
OTHER_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{OTHER_ID}"


def get_log_page(cid: int, page: int, length_bytes: int, offset_bytes: int = 0, *, retain: bool = False) -> Command:
    """Get Log Page. Base §5.16."""
    dwords = length_bytes // 4 - 1
    return Command(
        spec.AdminOpcode.GET_LOG_PAGE,
        spec.SQE_PSDT_SGL,
        cid,
        0xFFFFFFFF,
        cdw10=page | retain << 15 | (dwords & 0xFFFF) << 16,
        cdw11=dwords >> 16,
        cdw12=offset_bytes & 0xFFFFFFFF,
        cdw13=offset_bytes >> 32,
    )


class Gone(Exception):
    """The target closed the connection."""


class RawHost:
    """One queue."""

    def __init__(
        self, port: int, *, receive_buffer_bytes: int = 0, header_digest: bool = False, data_digest: bool = False
    ) -> None:
        self.sock = socket.socket()
        if receive_buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.settimeout(60)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self.conn = Connection(Role.HOST, header_digest=header_digest, data_digest=data_digest)
        self.events: deque[Event] = deque()
        self.cid = 0

    def __enter__(self) -> RawHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, pieces: list[Buffer]) -> None:
        self.sock.sendall(b"".join(bytes(piece) for piece in pieces))

    def event(self) -> Event:
        """The next event; raises `Gone` at the end of the stream."""
        while not self.events:
            try:
                data = self.sock.recv(65536)
            except ConnectionError as error:
                raise Gone from error
            if not data:
                raise Gone
            for one in self.conn.receive_data(data):
                self.events.append(
                    one._replace(data=memoryview(bytes(one.data))) if isinstance(one, DataChunk) else one
                )
        return self.events.popleft()

    def expect(self, kind: type[E]) -> E:
        got = self.event()
        assert isinstance(got, kind), f"{got}, not {kind.__name__}"
        return got

    def initialize(self) -> RawHost:
        self.send(self.conn.send_ic_req())
        self.event()
        return self

    def next_cid(self) -> int:
        self.cid += 1
        return self.cid

    def run(
        self, one: Command, *, data: bytes | None = None, read_bytes: int = 0, write: bytes | None = None
    ) -> tuple[Completion, bytes]:
        """Run one command to its end, answering R2Ts; returns its completion (made up for SUCCESS) and data."""
        self.send(
            self.conn.send_command(
                one, data=data, read_bytes=read_bytes, write_bytes=len(write) if write is not None else 0
            )
        )
        got = bytearray(read_bytes)
        while True:
            event = self.event()
            if isinstance(event, ResponseReceived):
                assert event.completion.cid == one.cid
                return event.completion, bytes(got)
            if isinstance(event, DataChunk):
                got[event.offset_bytes : event.offset_bytes + len(event.data)] = event.data
            elif isinstance(event, DataEnd) and event.success:
                assert event.digest_ok
                return Completion(0, 0, 0, one.cid, 0, False), bytes(got)
            elif isinstance(event, R2TReceived):
                assert write is not None
                part = write[event.offset_bytes : event.offset_bytes + event.length_bytes]
                self.send(self.conn.send_h2c_data(event, [part]))
            else:
                assert isinstance(event, DataStart | DataEnd), event

    def connect(
        self,
        nqn: str,
        *,
        qid: int = 0,
        cntlid: int = command.DYNAMIC_CONTROLLER,
        host_nqn: str = HOST_NQN,
        host_id: UUID = HOST_ID,
        entries: int = 32,
        flow_control: bool = False,
        keep_alive_ms: int = 0,
    ) -> Completion:
        one = command.connect(
            self.next_cid(), qid, entries, disable_flow_control=not flow_control, keep_alive_ms=keep_alive_ms
        )
        data = ConnectData(host_id, cntlid, nqn, host_nqn).to_bytes()
        return self.run(one, data=data)[0]

    def enable(self) -> None:
        done, _ = self.run(command.property_set(self.next_cid(), spec.Property.CC, 0x460001))
        assert done.status == 0
        done, _ = self.run(command.property_get(self.next_cid(), spec.Property.CSTS, wide=False))
        assert done.result & 1

    def read(self, slba: int, nlb: int, nsid: int = 1) -> tuple[Completion, bytes]:
        return self.run(command.read(self.next_cid(), nsid, slba, nlb), read_bytes=nlb * 4096)

    def write(self, slba: int, data: bytes, nsid: int = 1, *, in_capsule: bool = False, tag: int = 0) -> Completion:
        one = command.write(self.next_cid(), nsid, slba, len(data) // 4096, tag)
        if in_capsule:
            return self.run(one, data=data)[0]
        return self.run(one, write=data)[0]

    def log_page(self, page: int, length_bytes: int, *, offset_bytes: int = 0, retain: bool = False) -> bytes:
        """A log page that must be there."""
        one = get_log_page(self.next_cid(), page, length_bytes, offset_bytes, retain=retain)
        done, raw = self.run(one, read_bytes=length_bytes)
        assert done.status == 0, f"{done.status:#x}"
        return raw

    def start_write(self, slba: int, length_bytes: int, nsid: int = 1, *, tag: int = 0) -> R2TReceived:
        """Send a Write and wait for its R2T."""
        one = command.write(self.next_cid(), nsid, slba, length_bytes // 4096, tag)
        self.send(self.conn.send_command(one, write_bytes=length_bytes))
        return self.expect(R2TReceived)

    def finish(self) -> Completion:
        return self.expect(ResponseReceived).completion

    def gone(self) -> TermReceived | None:
        """Wait until the target has closed; a termination PDU if it sent one."""
        term = None
        try:
            while True:
                event = self.event()
                if isinstance(event, TermReceived):
                    term = event
        except Gone:
            self.sock.close()
            return term


class Association:
    """An admin queue and I/O queues of one controller."""

    def __init__(
        self,
        port: int,
        nqn: str,
        *,
        queues: int = 1,
        host_nqn: str = HOST_NQN,
        host_id: UUID = HOST_ID,
        flow_control: bool = False,
        receive_buffer_bytes: int = 0,
        keep_alive_ms: int = 0,
        header_digest: bool = False,
        data_digest: bool = False,
    ) -> None:
        digests = {"header_digest": header_digest, "data_digest": data_digest}
        identity = {"host_nqn": host_nqn, "host_id": host_id}
        self.admin = RawHost(port, **digests).initialize()
        done = self.admin.connect(nqn, flow_control=flow_control, keep_alive_ms=keep_alive_ms, **identity)  # type: ignore[arg-type]
        assert done.status == 0, f"{done.status:#x}"
        self.cntlid = done.result & 0xFFFF
        self.admin.enable()
        self.io: list[RawHost] = []
        for qid in range(1, queues + 1):
            queue = RawHost(
                port, receive_buffer_bytes=receive_buffer_bytes, header_digest=header_digest, data_digest=data_digest
            ).initialize()
            done = queue.connect(nqn, qid=qid, cntlid=self.cntlid, flow_control=flow_control, **identity)  # type: ignore[arg-type]
            assert done.status == 0, f"{done.status:#x}"
            self.io.append(queue)

    def close(self) -> None:
        for queue in (*self.io, self.admin):
            queue.sock.close()

    def __enter__(self) -> Association:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
