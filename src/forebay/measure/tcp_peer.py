"""The reference: the same bytes over bare TCP, from and into memory or a file, with nothing else around them.

One process, one thread, one connection. A request is a 24-byte header (operation, blocks, number of the first block,
bytes of a block); each block travels behind a header of the same shape. There are no keys, no checksums, no metadata
and no second process: what this costs is what Python, the kernel and the memory bus cost.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["TcpPeer", "send_all"]

_HEADER = struct.Struct("<4sIQQ")
_STAGING_BYTES = 16 << 20
_MAX_PIECES = 1024
"""IOV_MAX of Linux."""
_GET, _PUT, _LOAD, _DATA = b"GET ", b"PUT ", b"LOAD", b"DATA"


def send_all(sock: socket.socket, pieces: list[bytes | memoryview]) -> None:
    """All of ``pieces`` in one call, or what it takes."""
    for first in range(0, len(pieces), _MAX_PIECES):
        part = pieces[first : first + _MAX_PIECES]
        sent = sock.sendmsg(part)
        for piece in part:
            if sent < len(piece):
                sock.sendall(memoryview(piece)[sent:])
                sent = 0
            else:
                sent -= len(piece)


def _receive(sock: socket.socket, into: memoryview, seen: Callable[[memoryview], object] | None = None) -> None:
    at = 0
    while at < len(into):
        count = sock.recv_into(into[at:])
        if not count:
            raise ConnectionError("the peer went away")
        if seen is not None:
            seen(into[at : at + count])
        at += count


class TcpPeer:
    """The client's end; starts the other one as a process. ``file`` makes that one read with O_DIRECT from it."""

    def __init__(self, total_bytes: int, file: Path | None = None) -> None:
        command = [sys.executable, __file__, str(total_bytes), *([str(file)] if file else [])]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        port = int(self._server.stdout.readline())
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = memoryview(bytearray(_HEADER.size))

    @property
    def pid(self) -> int:
        """The serving process."""
        return self._server.pid

    def get(
        self, first: int, buffers: Sequence[memoryview], *, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill ``buffers`` with the blocks from number ``first`` on; ``seen`` is called with each piece as it comes."""
        self._sock.sendall(_HEADER.pack(_GET, len(buffers), first, len(buffers[0])))
        for buffer in buffers:
            _receive(self._sock, self._head)
            _receive(self._sock, buffer, seen)

    def put(self, first: int, values: Sequence[memoryview]) -> None:
        """Have ``values`` taken as the blocks from number ``first`` on; returns when the other end has them all."""
        self._write(_PUT, first, values)

    def load(self, first: int, values: Sequence[memoryview]) -> None:
        """`put`, to the file if there is one."""
        self._write(_LOAD, first, values)

    def _write(self, operation: bytes, first: int, values: Sequence[memoryview]) -> None:
        self._sock.sendall(_HEADER.pack(operation, len(values), first, len(values[0])))
        for i, value in enumerate(values):
            send_all(self._sock, [_HEADER.pack(_DATA, 1, first + i, len(value)), value])
        _receive(self._sock, self._head)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()
        self._server.wait(10)
        assert self._server.stdout is not None
        self._server.stdout.close()


def _serve(total_bytes: int, file: str | None) -> None:
    memory = memoryview(mmap.mmap(-1, total_bytes))
    media = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600) if file else -1
    if file:
        os.posix_fallocate(media, 0, total_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = memoryview(bytearray(_HEADER.size))
    staging = memoryview(mmap.mmap(-1, _STAGING_BYTES))  # page-aligned, as O_DIRECT wants it
    while True:
        try:
            _receive(sock, head)
        except ConnectionError:
            return
        operation, count, first, block_bytes = _HEADER.unpack(head)
        for i in range(first, first + count):
            view = memory[i * block_bytes : (i + 1) * block_bytes]
            if operation == _GET:
                if file:
                    view = staging[:block_bytes]
                    os.preadv(media, [view], i * block_bytes)
                send_all(sock, [_HEADER.pack(_DATA, 1, i, block_bytes), view])
            else:
                _receive(sock, head)
                _receive(sock, view)
                if file and operation == _LOAD:
                    os.pwritev(media, [view], i * block_bytes)
        if operation != _GET:
            sock.sendall(head)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
