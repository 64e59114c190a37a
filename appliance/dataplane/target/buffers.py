"""Memory that data passes through on its way between socket and drive: one pool for all queues of the process."""

from __future__ import annotations

from threading import Lock

from forebay.appliance.dataplane.target.volume import aligned_buffers

__all__ = ["BufferPool"]


class BufferPool:
    """Buffers of one size, lent for as long as a command needs them; any thread may use it.

    A queue that does nothing has none, so that memory goes by the commands under way and not by the connections. What a
    queue needs to get on (one buffer for what it does now, one for its oldest write) is always there; more only while
    fewer than ``soft_bytes`` are lent, and no more than that is kept for the next one.
    """

    def __init__(self, size_bytes: int, soft_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._most = max(1, soft_bytes // size_bytes)
        self._lock = Lock()
        self._spare: list[memoryview] = []
        self._lent = 0

    @property
    def lent_bytes(self) -> int:
        """What is lent now."""
        return self._lent * self._size_bytes

    def take(self) -> memoryview:
        """A buffer; its contents are anything."""
        with self._lock:
            return self._take()

    def take_more(self) -> memoryview | None:
        """A buffer for what can wait, if there is one to spare."""
        with self._lock:
            return self._take() if self._lent < self._most else None

    def _take(self) -> memoryview:
        if not self._spare:
            self._spare = aligned_buffers(self._size_bytes)
        self._lent += 1
        return self._spare.pop()

    def give(self, buffer: memoryview) -> None:
        """Give a buffer back: nothing touches it any more."""
        with self._lock:
            self._lent -= 1
            if self._lent + len(self._spare) < self._most:
                self._spare.append(buffer)
