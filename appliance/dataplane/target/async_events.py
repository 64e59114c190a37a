"""Asynchronous events of one controller: the requests that its host left here, and what there is to tell it."""

from __future__ import annotations

from threading import Lock
from typing import Final

from forebay.nvmetcp import spec
from forebay.nvmetcp.spec import AsyncEvent

__all__ = ["AERL", "AsyncEvents"]

AERL: Final = 3
"""Asynchronous event requests that are held, 0's based."""
_TOO_MANY: Final = 0xFFFFFFFF


class AsyncEvents:
    """Base §5.2. Any thread may use it.

    An event that was told is not told again until the host has read the log page that goes with it, without
    Retain Asynchronous Event (`read`).
    """

    def __init__(self, offered: int) -> None:
        self.offered = offered
        """OAES: bits of `AsyncEvent`."""
        self.enabled = 0
        """As the host configured by feature 0Bh."""
        self._lock = Lock()
        self._requests: list[int] = []
        self._due: list[AsyncEvent] = []
        self._told: set[AsyncEvent] = set()
        self._changed: set[int] = set()

    def hold(self, cid: int) -> bool:
        """Keep a request until there is something to tell; False if there are too many."""
        with self._lock:
            if len(self._requests) > AERL:
                return False
            self._requests.append(cid)
            return True

    def give_up(self, cid: int) -> bool:
        """Take a request back (Abort); False if there is none of that id."""
        with self._lock:
            if cid not in self._requests:
                return False
            self._requests.remove(cid)
            return True

    def notice(self, event: AsyncEvent) -> None:
        """Something happened."""
        with self._lock:
            if self.enabled & self.offered & event and event not in self._due and event not in self._told:
                self._due.append(event)

    def namespace_changed(self, nsid: int) -> None:
        """A namespace came, went, or came into or out of this host's sight."""
        with self._lock:
            self._changed.add(nsid)
        self.notice(AsyncEvent.NAMESPACE_ATTRIBUTE)

    def ready(self) -> bool:
        """Whether `take` would find something."""
        with self._lock:
            return bool(self._due and self._requests)

    def take(self) -> tuple[int, int] | None:
        """A request's cid and dword 0 of its completion, if there is a request and something to tell."""
        with self._lock:
            if not self._due or not self._requests:
                return None
            event = self._due.pop(0)
            self._told.add(event)
            return self._requests.pop(0), event.result

    def read(self, event: AsyncEvent) -> None:
        """The host has read the log page of an event: the next one may be told."""
        with self._lock:
            self._clear(event)

    def changed_namespaces(self, *, retain: bool) -> bytes:
        """The Changed Namespace List (Base §5.16.1.5); read without `retain` it is empty after."""
        with self._lock:
            listed = sorted(self._changed)
            if len(listed) > spec.ACTIVE_NS_LIST_ENTRIES:
                listed = [_TOO_MANY]
            if not retain:
                self._changed.clear()
                self._clear(AsyncEvent.NAMESPACE_ATTRIBUTE)
        return b"".join(nsid.to_bytes(4, "little") for nsid in listed).ljust(spec.IDENTIFY_BYTES, b"\0")

    def _clear(self, event: AsyncEvent) -> None:
        self._told.discard(event)
        if event in self._due:
            self._due.remove(event)

    def reset(self) -> None:
        """The controller was reset: requests are gone without an answer, and nothing is enabled."""
        with self._lock:
            self.enabled = 0
            self._requests.clear()
            self._due.clear()
            self._told.clear()
            self._changed.clear()
