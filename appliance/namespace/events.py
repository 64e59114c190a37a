"""The event log of a node and those who wait for a key.

Sequenced and bounded: a watcher that fell behind the oldest event kept, or that comes from another log (the node
restarted), gets one ``resync`` event and takes a snapshot by List.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

__all__ = ["BlockEvent", "EventLog", "Waiters"]

_KEPT_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change: ``stored | removed | cleared | generation | resync``."""

    sequence: int
    kind: str
    namespace: int
    stored_key: bytes = b""
    reason: str = ""
    tail: bytes = b""
    value_bytes: int = 0
    generation: int = 0


class EventLog:
    """Events of all namespaces, in order. ``log`` is the id that sequences belong to."""

    def __init__(self, log: int) -> None:
        self.log = log
        self.sequence = 0
        self._events: deque[BlockEvent] = deque(maxlen=_KEPT_EVENTS)
        self._grown = asyncio.Event()

    def add(self, kind: str, namespace: int, stored_key: bytes = b"", **rest: str | int | bytes) -> None:
        """Append one."""
        self.sequence += 1
        self._events.append(BlockEvent(self.sequence, kind, namespace, stored_key, **rest))  # type: ignore[arg-type]
        self._grown.set()

    def since(self, after: int, namespace: int, most: int = 1000) -> tuple[list[BlockEvent], int]:
        """Events of a namespace after a sequence, and the sequence looked through up to.

        A gap before the oldest kept event yields a ``resync``.
        """
        oldest = self._events[0].sequence if self._events else self.sequence + 1
        if after + 1 < oldest or after > self.sequence:
            return [BlockEvent(self.sequence, "resync", namespace)], self.sequence
        looked = list(islice(self._events, after + 1 - oldest, after + 1 - oldest + most))
        if not looked:
            return [], after
        return [e for e in looked if e.namespace == namespace], looked[-1].sequence

    async def grown(self, after: int) -> None:
        """Wait until there is an event after that sequence."""
        while self.sequence <= after:
            self._grown.clear()
            await self._grown.wait()


class Waiters:
    """Futures of those who wait for a key to become visible, by digest."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[asyncio.Future[int]]] = {}

    def add(self, digest: bytes) -> asyncio.Future[int]:
        """A future that gets 0 when the block is visible, else an error code."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(digest, []).append(future)
        return future

    def drop(self, digest: bytes, future: asyncio.Future[int]) -> None:
        """Nobody listens to this one any more."""
        waiting = self._waiting.get(digest, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._waiting.pop(digest, None)

    def wake(self, digests: Sequence[bytes], code: int) -> None:
        """Tell all who wait for these."""
        if not self._waiting:
            return
        for digest in digests:
            for future in self._waiting.pop(digest, ()):
                if not future.done():
                    future.set_result(code)
