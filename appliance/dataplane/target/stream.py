"""The socket end of a queue: whole sends and receives around the codec, bounded in time by the kernel."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import Final

from forebay.nvmetcp.connection import Buffer, Connection
from forebay.nvmetcp.events import DataEnd
from forebay.nvmetcp.spec import DIGEST_BYTES
from forebay.nvmetcp.states import State

__all__ = ["NotProven", "PeerLost", "Stream"]

_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 64 << 20


class PeerLost(Exception):
    """The connection ended or stood still in the middle of something."""


class NotProven(PeerLost):
    """The host did not prove who it is, and was told so."""


class Stream:
    """A connected socket and the state of the protocol on it. One thread uses it; any may `cut`."""

    def __init__(self, sock: socket.socket, conn: Connection) -> None:
        self.conn = conn
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished without a word, and asked for no keep-alive of NVMe's, is noticed within a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.local_address: str = sock.getsockname()[0]
        """Where the peer reached this end."""
        self.receive_header = sock.recv_into
        """`recv_into` itself: raises BlockingIOError after the time-out."""

    def set_timeout(self, seconds: float) -> None:
        """How long one call may wait. In the kernel, since Python's own time-outs cost a poll before each call."""
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, pieces: list[Buffer]) -> None:
        """Send all of it, in one call if the peer keeps up. Raises `PeerLost`, OSError."""
        total = sum(map(len, pieces))
        try:
            sent = self._sock.sendmsg(pieces)
            while sent < total:
                total -= sent
                while sent >= len(pieces[0]):
                    sent -= len(pieces.pop(0))
                pieces[0] = memoryview(pieces[0])[sent:]
                sent = self._sock.sendmsg(pieces)
        except BlockingIOError:
            raise PeerLost("the peer stopped receiving") from None

    def send_now(self, pieces: list[Buffer]) -> bool:
        """Send without waiting; False if the socket did not take all, and then the stream is broken."""
        try:
            return self._sock.sendmsg(pieces, (), socket.MSG_DONTWAIT) == sum(map(len, pieces))
        except OSError:
            return False

    def receive(self, view: memoryview) -> bool:
        """Fill `view` with payload. Raises `PeerLost`, OSError.

        If it ends its PDU, so does a digest that was negotiated; False if that does not match.
        """
        conn = self.conn
        while view:
            count = self._receive_some(view)
            if conn.data_digest:
                conn.digest_payload(view[:count])
            conn.payload_received(count)
            view = view[count:]
        return conn.state is not State.DIGEST or self._receive_digest()

    def _receive_digest(self) -> bool:
        scratch = memoryview(bytearray(DIGEST_BYTES))
        while True:
            count = self._receive_some(scratch[: self.conn.bytes_wanted])
            for event in self.conn.receive_data(scratch[:count]):
                assert isinstance(event, DataEnd), f"{event} in the middle of a digest"
                return event.digest_ok

    def _receive_some(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            raise PeerLost("the peer stopped sending data") from None
        if not count:
            raise PeerLost("the peer closed in the middle of data")
        return count

    def drain(self, scratch: memoryview) -> None:
        """Throw the current payload away."""
        while self.conn.payload_remaining:
            self.receive(scratch[: self.conn.payload_remaining])

    def terminate(self, termination: bytes) -> None:
        """Send a termination PDU, then read on until the peer closes.

        Closing with unread data would reset the connection and could take the PDU away before it was read.
        """
        with suppress(OSError):  # a courtesy, to a peer that may be gone
            self._sock.sendall(termination)
            self._sock.shutdown(socket.SHUT_WR)
        self.linger()

    def linger(self) -> None:
        """Leave the peer a moment to read what was sent last, and to close."""
        with suppress(OSError):
            self.set_timeout(_LINGER_S)
            end_s, left = time.monotonic() + _LINGER_S, _LINGER_BYTES
            while left > 0 and time.monotonic() < end_s and (data := self._sock.recv(65536)):
                left -= len(data)

    def cut(self) -> None:
        """End the connection from any thread; whoever waits in it wakes up."""
        with suppress(OSError):  # it may have ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
