"""Host memory that blocks pass through, kept for as long as its owner lives and lent out in spaces.

Memory that is new for each transfer is paid for page by page, and a device that reaches it (`forebay.client.register`)
would have to be let at it each time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.client import register

__all__ = ["HostMemory", "Space", "room"]

_STEP_BYTES = 4096


def room(size_bytes: int) -> int:
    """The bytes of a space that holds so many: spaces begin at multiples of 4 KiB."""
    return -(-size_bytes // _STEP_BYTES) * _STEP_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Some of the memory: ``memory`` is an array of its bytes, from ``start`` up to ``end``."""

    start: int
    end: int
    memory: Any

    def rows(self, count: int, row_bytes: int, first: int = 0) -> Any:
        """``count`` rows from byte ``first`` on, ``[count, row_bytes]``."""
        return self.memory[first : first + count * row_bytes].reshape(count, row_bytes)


class HostMemory:
    """``size_bytes`` of host memory at most, registered. Thread-safe.

    A space comes from as far ahead as there is room, so that only as much is ever touched as was in use at once. Who
    gives one back says that nothing reads or writes it any more: no transport does once a call of the client has
    returned (docs/design.md §6.5).
    """

    def __init__(self, size_bytes: int) -> None:
        self._memory = np.empty(size_bytes, np.uint8)
        self._registered = register(self._memory)
        self._lock = threading.Lock()
        self._lent: list[Space] = []

    @property
    def lent_bytes(self) -> int:
        """How much is lent now."""
        with self._lock:
            return sum(space.end - space.start for space in self._lent)

    def take(self, size_bytes: int) -> Space | None:
        """A space of at least so many bytes; None if there is no room for it."""
        size_bytes = room(size_bytes)
        with self._lock:
            at = start = 0
            while at < len(self._lent) and self._lent[at].start - start < size_bytes:
                start = self._lent[at].end
                at += 1
            if start + size_bytes > len(self._memory):
                return None
            taken = Space(start, start + size_bytes, self._memory[start : start + size_bytes])
            self._lent.insert(at, taken)
        return taken

    def give(self, space: Space) -> None:
        """Give a space back, once."""
        with self._lock:
            self._lent.remove(space)

    @contextmanager
    def lent(self, size_bytes: int) -> Iterator[Space]:
        """A space for as long as a block of code. Only for memory that has room for all who ask at once."""
        space = self.take(size_bytes)
        assert space is not None, f"no room for {size_bytes} bytes beside {self.lent_bytes}"
        try:
            yield space
        finally:
            self.give(space)

    def close(self) -> None:
        """Take it from the devices that were let at it; nothing is under way any more."""
        self._registered.close()
