"""Loads that several requests wait for: what one of them loads the others have from the engine's own cache."""

from __future__ import annotations

__all__ = ["SharedLoads"]


class SharedLoads:
    """Prefixes that are being loaded, each known by the hash of its first block, which holds all before it.

    A request waits for one load of another request at most: should that one fail, those that waited for it try by
    themselves, all at once and not one after the other. Belongs to the scheduler's thread.
    """

    def __init__(self) -> None:
        self._loading: dict[bytes, str] = {}
        self._first: dict[str, bytes] = {}
        self._waiting: dict[str, str] = {}

    def begin(self, request: str, first: bytes) -> None:
        """A request loads what begins with this hash."""
        self._first[request] = first
        self._loading.setdefault(first, request)

    def end(self, request: str) -> None:
        """Its load has ended, well or not."""
        first = self._first.pop(request, None)
        if first is not None and self._loading.get(first) == request:
            del self._loading[first]

    def waits(self, request: str, first: bytes) -> bool:
        """Whether a request, which would load what begins with this hash, waits for another one's load."""
        loader = self._loading.get(first)
        return loader is not None and self._waiting.setdefault(request, loader) == loader

    def forget(self, request: str) -> None:
        """A request is over."""
        self.end(request)
        self._waiting.pop(request, None)
