"""A peer's client as a process: told by lines on its standard input what to move, it answers when it has moved it.

It has values and buffers of its own, touched before anything is timed, and proves that it reads what it wrote. Nothing
but the standard library is imported, since the interpreter may be any.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, Any

__all__ = ["Mover", "serve"]


class Mover(ABC):
    """How one store is written and read, by numbers of blocks."""

    @abstractmethod
    def prepare(self, memory: mmap.mmap) -> None:
        """Values are sent from and read into this memory from now on."""

    @abstractmethod
    def put(self, first: int, values: Sequence[memoryview]) -> None:
        """Store ``values`` as the blocks from number ``first`` on. Raises `ConnectionError`."""

    @abstractmethod
    def get(self, first: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with the blocks from number ``first`` on. Raises `ConnectionError`."""

    @abstractmethod
    def renew(self) -> None:
        """Make room, so that the next puts are of new blocks where that matters."""


class _Work:
    def __init__(self, mover: Mover, block_bytes: int, batch: int, count: int) -> None:
        self._mover, self._size, self._batch, self._count, self._at = mover, block_bytes, batch, count, 0
        memory = mmap.mmap(-1, (count + batch) * block_bytes)
        for at in range(0, len(memory), 1 << 20):
            piece = min(1 << 20, len(memory) - at)
            memory[at : at + piece] = os.urandom(piece)
        mover.prepare(memory)
        views = [memoryview(memory)[i * block_bytes : (i + 1) * block_bytes] for i in range(count + batch)]
        self._values, self._buffers = views[:count], views[count:]

    def load(self) -> None:
        for first in range(0, self._count, self._batch):
            self._mover.put(first, self._values[first : first + self._batch])
        for first in (self._count - self._batch, 0):
            self._mover.get(first, self._buffers)
            if self._buffers != self._values[first : first + self._batch]:
                raise ConnectionError("other bytes were read than were written")

    def slot(self, calls: int, *, reading: bool) -> int:
        for _ in range(calls):
            if reading:
                self._mover.get(self._at, self._buffers)
            else:
                self._mover.put(self._at, self._values[self._at : self._at + self._batch])
            self._at = (self._at + self._batch) % self._count
        return calls * self._batch * self._size


def serve(mover: Mover, replies: IO[str]) -> None:
    """Until standard input ends. ``replies`` is where the answers go, one a line."""
    work: _Work | None = None
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {"bytes": 0}
        try:
            if told["do"] == "work":
                mover.renew()
                work = _Work(mover, told["block_bytes"], told["batch"], told["count"])
            elif told["do"] == "renew":
                mover.renew()
            elif work is None:
                raise ConnectionError("no work was named")
            elif told["do"] == "load":
                work.load()
            else:
                answer = {"bytes": work.slot(told["calls"], reading=told["do"] == "get")}
        except Exception as error:  # whatever a foreign client raises is the other process's to judge
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=replies, flush=True)
