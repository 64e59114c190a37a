"""libnbd's client: as many requests under way as a batch has blocks, straight from and into the caller's memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import nbd

from perf.peers.slots import Mover, serve

__all__: list[str] = []


class _Nbd(Mover):
    def __init__(self, port: str) -> None:
        self._handle = nbd.NBD()
        self._handle.connect_tcp("127.0.0.1", port)

    def prepare(self, memory: mmap.mmap) -> None:
        """Any memory will do."""

    def renew(self) -> None:
        """A disk is overwritten in place."""

    def put(self, first: int, values: Sequence[memoryview]) -> None:
        self._all(self._handle.aio_pwrite, first, values)

    def get(self, first: int, buffers: Sequence[memoryview]) -> None:
        self._all(self._handle.aio_pread, first, buffers)

    def _all(self, start: object, first: int, pieces: Sequence[memoryview]) -> None:
        assert callable(start)
        shared = [nbd.Buffer.from_buffer(piece) for piece in pieces]  # which libnbd does not keep alive
        cookies = [start(piece, (first + i) * len(pieces[i])) for i, piece in enumerate(shared)]
        for cookie in cookies:
            while not self._handle.aio_command_completed(cookie):
                self._handle.poll(-1)


if __name__ == "__main__":
    serve(_Nbd(sys.argv[1]), sys.stdout)
