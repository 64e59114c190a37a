"""The socket end of a queue: whole sends and receives around the codec, bounded in time by the kernel."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import Final

from forebay.nvmetcp.connection import Buffer, Connection

__all__ = ["PeerLost", "Stream"]

_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 64 << 20


class PeerLost(Exception):
    """The connection ended or stood still in the middle of something."""


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

    def receive(self, view: memoryview) -> None:
        """Fill `view` with payload. Raises `PeerLost`, OSError."""
        while view:
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                raise PeerLost("the peer stopped sending data") from None
            if not count:
                raise PeerLost("the peer closed in the middle of data")
            self.conn.payload_received(count)
            view = view[count:]

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
