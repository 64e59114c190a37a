"""One NVMe/TCP queue: a socket, its codec and the commands in flight, driven by whichever thread holds it.

Only the holder's own calls receive into a command's memory, and there is no other thread, so a command whose connection
was closed can never be written to again (docs/design.md §6.5).
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from forebay.client.transports.addresses import addresses_of
from forebay.client.transports.base import Segment
from forebay.client.transports.queues import IoQueue
from forebay.client.transports.requests import CHUNK_BYTES, Request
from forebay.client.transports.status import error_of
from forebay.clock import Clock
from forebay.errors import ConnectionLost, DeadlineExceeded, ForebayError, ProtocolError, TargetRefused
from forebay.ids import LBA_BYTES
from forebay.nvmetcp import command as nvme
from forebay.nvmetcp.command import Command, Completion
from forebay.nvmetcp.connection import MAX_HEADER_BYTES, Buffer, Connection
from forebay.nvmetcp.events import (
    DataEnd,
    DataStart,
    Event,
    ICRespReceived,
    R2TReceived,
    ResponseReceived,
    TermReceived,
)
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import Status
from forebay.nvmetcp.states import Role, State

__all__ = ["QueuePair"]

_IOV = 64
"""Pieces of one sendmsg; far below IOV_MAX."""
_MAX_POLL_MS = 1_000


class QueuePair(IoQueue):
    """A connected queue. Not thread-safe: it is held by one thread at a time.

    Every method that touches the socket raises `ConnectionLost` or `ProtocolError` when the connection is no good any
    more; the holder then calls `close`.
    """

    def __init__(
        self, sock: socket.socket, clock: Clock, *, header_digest: bool = False, data_digest: bool = False
    ) -> None:
        self._sock = sock
        self._clock = clock
        self._codec = Connection(Role.HOST, header_digest=header_digest, data_digest=data_digest)
        self._wanted_digests = (header_digest, data_digest)
        self._out: deque[Buffer] = deque()
        self._head = memoryview(bytearray(MAX_HEADER_BYTES))
        self._open: dict[int, Request] = {}
        self._admin: dict[int, Completion | None] = {}
        self._payload: Request | None = None
        self._free = list(range(1))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.fd = sock.fileno()
        self.queue_id = 0
        self.in_capsule_bytes = 0
        self.bytes_in_flight = 0
        self.closed = False

    @classmethod
    def dial(
        cls,
        address: str,
        port: int,
        deadline_ms: int,
        clock: Clock,
        *,
        header_digest: bool = False,
        data_digest: bool = False,
    ) -> QueuePair:
        """Connect and initialise the transport connection (ICReq, TCP §3.1).

        Raises `ConnectionLost` and its kin, and `TargetRefused` if the target does not do the digests asked for.
        """
        sock = _connected(address, port, deadline_ms, clock)
        pair = cls(sock, clock, header_digest=header_digest, data_digest=data_digest)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            pair._out += pair._codec.send_ic_req()
            pair._drive(deadline_ms, lambda: pair._codec.state is State.READY)
        except BaseException:
            pair.close()
            raise
        return pair

    def set_depth(self, commands: int) -> None:
        self._free = list(range(commands))

    # --- one command at a time: the admin queue and Connect ---------------------------------------------------------

    def execute(
        self, command: Command, deadline_ms: int, *, data: bytes | None = None, read_bytes: int = 0
    ) -> tuple[Completion, bytearray]:
        cid = self._free.pop()
        into = bytearray(read_bytes)
        segments = [Segment(memoryview(into), read_bytes)] if read_bytes else []
        request = Request(0, 0, read_bytes, segments, write=False)
        self._open[cid] = request
        self.bytes_in_flight += read_bytes
        self._admin[cid] = None
        self._out += self._codec.send_command(command._replace(cid=cid), data=data, read_bytes=read_bytes)
        try:
            self._finish(request, lambda: cid not in self._open, deadline_ms)
        finally:
            completion = self._admin.pop(cid)
        return completion or Completion(0, 0, 0, cid, 0, False), into

    def _drive(self, deadline_ms: int, done: Callable[[], bool]) -> None:
        while not done():
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                raise DeadlineExceeded("the target did not answer in time")
            self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
            for _, ready in self._poll.poll(min(left_ms, _MAX_POLL_MS)):
                if ready & select.POLLOUT:
                    self.flush()
                if ready & ~select.POLLOUT:
                    self.receive(CHUNK_BYTES)

    # --- many commands: I/O queues ----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def takes(self, request: Request) -> bool:
        return bool(self._free)

    @property
    def wants_to_send(self) -> bool:
        return bool(self._out)

    def submit(self, request: Request) -> None:
        cid = self._free.pop()
        slba, blocks = request.offset_bytes // LBA_BYTES, request.length_bytes // LBA_BYTES
        self._open[cid] = request
        request.quiesced = False
        self.bytes_in_flight += request.length_bytes
        if not request.write:
            command = nvme.read(cid, request.nsid, slba, blocks)
            self._out += self._codec.send_command(command, read_bytes=request.length_bytes)
            return
        request.seal()
        command = nvme.write(cid, request.nsid, slba, blocks, request.tag)
        if request.length_bytes <= self.in_capsule_bytes:
            data = b"".join(request.pieces(0, request.length_bytes))
            self._out += self._codec.send_command(command, data=data)
        else:
            self._out += self._codec.send_command(command, write_bytes=request.length_bytes)

    def flush(self) -> None:
        out = self._out
        while out:
            try:
                sent = self._sock.sendmsg(list(islice(out, _IOV)))
            except BlockingIOError:
                return
            except OSError as e:
                raise ConnectionLost(f"sending to the target: {e}") from e
            while sent:
                piece = out[0]
                if sent < len(piece):
                    out[0] = memoryview(piece)[sent:]
                    break
                sent -= len(piece)
                out.popleft()

    def receive(self, budget_bytes: int) -> bool:
        codec, sock, head = self._codec, self._sock, self._head
        while budget_bytes > 0:
            due = codec.payload_remaining
            try:
                if due:
                    request = self._payload
                    assert request is not None, "payload of no request"
                    digest = codec.digest_payload if codec.data_digest else None
                    count, short = request.fill(sock, min(due, budget_bytes), digest)
                else:
                    wanted = codec.bytes_wanted
                    count = sock.recv_into(head, wanted)
                    short = count < wanted
            except BlockingIOError:
                return False
            except OSError as e:
                raise ConnectionLost(f"receiving from the target: {e}") from e
            if not count:
                codec.receive_eof()
                raise ConnectionLost("the target closed the connection")
            budget_bytes -= count
            try:
                self._take(codec.payload_received(count) if due else codec.receive_data(head[:count]))
            except PduError as e:
                self._terminate(e)
                raise
            if short:
                return False
        return True

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, DataStart):
                self._payload = self._open[event.cid]
            elif isinstance(event, DataEnd):
                self._payload = None
                if not event.digest_ok:
                    self._open[event.cid].damaged = True
                if event.success:
                    self._complete(event.cid, 0)
            elif isinstance(event, ResponseReceived):
                completion = event.completion
                if completion.cid in self._admin:
                    self._admin[completion.cid] = completion
                self._complete(completion.cid, completion.status)
            elif isinstance(event, R2TReceived):
                request = self._open[event.cid]
                self._out += self._codec.send_h2c_data(event, request.pieces(event.offset_bytes, event.length_bytes))
            elif isinstance(event, TermReceived):
                raise ProtocolError(f"the target ended the connection: fatal error {event.fatal_error}")
            else:
                assert isinstance(event, ICRespReceived), f"event of the other role: {event}"
                if (event.header_digest, event.data_digest) != self._wanted_digests:
                    raise TargetRefused("the target does not do the digests that were asked for")

    def _complete(self, cid: int, status: int) -> None:
        request = self._open.pop(cid)
        if not status and request.damaged:
            status = Status.TRANSIENT_TRANSPORT_ERROR  # as if the target had said so. TCP §3.3.1.1
        request.error = error_of(status) if status else None
        request.quiesced = True
        self.bytes_in_flight -= request.length_bytes
        self._free.append(cid)

    def _terminate(self, error: PduError) -> None:
        """Tell the target why, as far as that is possible, before the connection is closed. TCP §3.5."""
        if not self._out:
            try:
                self._sock.send(error.termination)
            except OSError:
                return

    # --- between holders --------------------------------------------------------------------------------------------

    def usable(self) -> bool:
        return not self.closed and not self._open and not self._out and not self._poll_idle()

    def _poll_idle(self) -> bool:
        self._poll.modify(self._sock, select.POLLIN)
        return bool(self._poll.poll(0))

    def fail(self, error: ForebayError) -> None:
        self.close()
        for request in self._open.values():
            request.error = error
        self._open.clear()

    def cut(self) -> None:
        with suppress(OSError):  # it may have ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._out.clear()
            self._sock.close()


def _connected(name: str, port: int, deadline_ms: int, clock: Clock) -> socket.socket:
    """A socket to the first address of ``name`` that answers; each has its share of the time that is left."""
    left_ms = deadline_ms - clock.monotonic_ms()
    if left_ms <= 0:
        raise DeadlineExceeded("no time left to connect to the target")
    addresses = addresses_of(name, port, left_ms)
    error: OSError | None = None
    for i, (family, address) in enumerate(addresses):
        left_ms = deadline_ms - clock.monotonic_ms()
        if left_ms <= 0:
            break
        sock: socket.socket | None = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(left_ms / (len(addresses) - i) / 1000)
            sock.connect(address)
            return sock
        except BaseException as e:
            if sock is not None:
                sock.close()
            if not isinstance(e, OSError):
                raise
            error = e
    if error is None or isinstance(error, TimeoutError):
        raise DeadlineExceeded(f"connecting to {name}:{port} took too long")
    raise ConnectionLost(f"connecting to {name}:{port}: {error}") from error
