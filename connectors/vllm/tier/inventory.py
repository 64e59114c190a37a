"""What the tier tells of: blocks that it has stored, and that the node has removed since."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from forebay.client import WatchEvent
from forebay.ids import MAX_BATCH_KEYS

__all__ = ["Inventory"]

_log = logging.getLogger("vllm.forebay")

_MOST = 1 << 18
"""Blocks whose removal will be told; of more, the oldest go untold."""


class Inventory:
    """Changes to tell, each ``(stored, keys)``, in their order. Thread-safe.

    ``events`` gives an iterator of the node's events, or None while there is none; it is asked again once one ends.
    ``ours`` says whether an event is of this engine's blocks, ``match`` why each of at most `MAX_BATCH_KEYS` keys is
    not at the node, ``ok`` for those that are. All are called in a thread.
    """

    def __init__(
        self,
        events: Callable[[], Iterator[WatchEvent] | None],
        ours: Callable[[WatchEvent], bool],
        match: Callable[[Sequence[bytes]], Sequence[str]],
    ) -> None:
        self._events = events
        self._ours = ours
        self._match = match
        self._lock = threading.Lock()
        self._told: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[tuple[bool, list[bytes]]] = []
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="forebay-watch", daemon=True).start()

    def stored(self, keys: Iterable[bytes]) -> None:
        """Blocks are at the node."""
        with self._lock:
            new = [key for key in keys if key not in self._told]
            for key in new:
                self._told[key] = None
            while len(self._told) > _MOST:
                self._told.popitem(last=False)
            if new:
                self._changes.append((True, new))

    def take(self) -> list[tuple[bool, list[bytes]]]:
        """What has changed since the last call."""
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Listen no longer."""
        self._closed.set()

    def _listen(self) -> None:
        while not self._closed.wait(0.2):
            try:
                events = self._events()
                for event in events or ():
                    self._heard(event)
                    if self._closed.is_set():
                        return
            except Exception as e:
                if not self._closed.is_set():
                    _log.debug("the node's events: %s", e)

    def _heard(self, event: WatchEvent) -> None:
        if event.kind == "removed" and self._ours(event):
            self._gone([event.key])
        elif event.kind in ("cleared", "generation", "resync"):  # of many blocks at once, or of nobody knows which
            with self._lock:
                told = list(self._told)
            for start in range(0, len(told), MAX_BATCH_KEYS):
                keys = told[start : start + MAX_BATCH_KEYS]
                reasons = self._match(keys)
                self._gone([key for key, reason in zip(keys, reasons, strict=True) if reason != "ok"])

    def _gone(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            told = [key for key in keys if key in self._told]
            for key in told:
                del self._told[key]
            if told:
                self._changes.append((False, told))
