"""Descriptors for the node itself, however many connect to it.

gRPC accepts connections until the process can open no more files, and then neither metadata nor a drive can be opened.
It has no setting against that, so that the last connections to come are ended here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["Doorkeeper"]

_log = logging.getLogger(__name__)

_RESERVED: Final = 96
"""Descriptors that connections leave free: RocksDB's files, volumes, the target's control socket, a new target."""
_LOOK_S: Final = (0.02, 0.25)
"""Shortest and longest time between two looks."""
_FASTEST_PER_S: Final = 40_000
"""More connections than are accepted in a second: where many descriptors are free there is time until the next look."""
_SAY_AGAIN_S: Final = 10.0
_BYTES_RECEIVED_AT: Final = 128
"""tcpi_bytes_received of struct tcp_info, linux/tcp.h."""


class Doorkeeper:
    """Ends connections to ``ports`` of this process when fewer than `_RESERVED` of ``limit`` descriptors are free.

    Those end first that have sent least: who comes in a crowd and says nothing, before who is at work.
    """

    def __init__(self, ports: Collection[int], limit: int) -> None:
        self.ended = 0
        self._ports = frozenset(ports)
        self._limit = limit
        self._most = max(limit - _RESERVED, limit // 2)
        self._said_s = -_SAY_AGAIN_S

    async def watch(self) -> None:
        """Look before what is free at least can be used up, for ever."""
        shortest_s, longest_s = _LOOK_S
        while True:
            free = self._most - _slots()
            await asyncio.sleep(min(max(free / _FASTEST_PER_S, shortest_s), longest_s))
            if _lowest_free() >= self._most:
                self.clear()

    def clear(self) -> None:
        """End as many connections as it takes."""
        used, found = 0, []
        for fd in self._descriptors():
            used += 1
            with suppress(OSError), _borrowed(fd) as sock:  # most are no sockets, or closed meanwhile
                if self._is_guest(sock):
                    found.append((_received_bytes(sock), -fd, fd))
        for _, _, fd in sorted(found)[: max(0, used - self._most)]:
            with suppress(OSError), _borrowed(fd) as sock:
                if self._is_guest(sock):
                    sock.shutdown(socket.SHUT_RDWR)
                    self.ended += 1
        if found and time.monotonic() - self._said_s >= _SAY_AGAIN_S:
            self._said_s = time.monotonic()
            _log.warning(
                "%d of %d descriptors are in use: connections are ended, %d so far; raise the limit (ulimit -n, "
                "LimitNOFILE) or have fewer clients",
                *(used, self._limit, self.ended),
            )

    def _descriptors(self) -> list[int]:
        """Those that are open; looked for one by one where none is left to read the list by."""
        try:
            return [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError:
            return [fd for fd in range(self._limit) if _is_open(fd)]

    def _is_guest(self, sock: socket.socket) -> bool:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return sock.getsockname()[1] in self._ports


def _lowest_free() -> int:
    """The number that the next descriptor would have, near enough to how many there are."""
    try:
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 1 << 30
    os.close(fd)
    return fd


def _slots() -> int:
    """How many descriptors the process has room for before its table grows: it has no more than these."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1]) for line in status if line.startswith(b"FDSize:")), 1 << 30)
    except OSError:
        return 1 << 30


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of somebody else's as a socket, for a moment. Raises OSError if it is none."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _received_bytes(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return int(struct.unpack_from("<Q", raw, _BYTES_RECEIVED_AT)[0]) if len(raw) >= _BYTES_RECEIVED_AT + 8 else 0
