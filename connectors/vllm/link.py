"""The way to the node: opened in the background, and left alone for a while when the node does not answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from forebay.client import Client
from forebay.clock import Clock
from forebay.errors import ForebayError

__all__ = ["Link"]

_log = logging.getLogger("vllm.forebay")  # below vLLM's own, whose handlers show it

_AWAY = frozenset({"unavailable", "deadline_exceeded", "connection_lost"})
_TOLERATED = 3
"""Calls in a row that may fail before the node is left alone."""
_FIRST_MS, _LONGEST_MS = 1_000, 30_000
"""How long it is left alone: twice as long each time."""


class Link:
    """A client that may not be there. Thread-safe.

    ``open_client`` is called in a thread until it succeeds. Whoever makes calls hands their reasons to `note`, so that
    a node that does not answer costs a few calls and not one for each request.
    """

    def __init__(self, open_client: Callable[[], Client], clock: Clock, what: str) -> None:
        self._open_client = open_client
        self._clock = clock
        self._what = what
        self._changed = threading.Condition()
        self._client: Client | None = None
        self._closed = self._tried = False
        self._failures = 0
        self._pause_ms = 0
        self._not_before_ms = 0
        self._thread = threading.Thread(target=self._connect, name="forebay-connect", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client | None:
        """The client, unless there is none yet or the node is being left alone."""
        with self._changed:
            return self._client if self._clock.monotonic_ms() >= self._not_before_ms else None

    def wait(self, timeout_ms: int) -> Client | None:
        """The client, as soon as there is one; waits for the first attempt at most, and at most this long."""
        with self._changed:
            self._changed.wait_for(lambda: self._tried or self._closed, timeout_ms / 1000)
        return self.client

    def note(self, reasons: Iterable[str]) -> None:
        """Learn from the reasons of one call's results whether the node answers."""
        away = _AWAY.intersection(reasons)
        with self._changed:
            if not away:
                if self._pause_ms:
                    _log.info("%s: the node answers again", self._what)
                self._failures = self._pause_ms = self._not_before_ms = 0
                return
            self._failures += 1
            if self._failures < _TOLERATED:
                return
            if not self._pause_ms:
                _log.warning(
                    "%s: the node does not answer (%s); the engine goes on without it and tries again now and then",
                    self._what,
                    ", ".join(sorted(away)),
                )
            self._wait_longer()

    def close(self) -> None:
        """End the session. Idempotent."""
        with self._changed:
            self._closed = True
            client, self._client = self._client, None
            self._changed.notify_all()
        if client is not None:
            client.close()

    def _wait_longer(self) -> int:
        self._pause_ms = min(2 * self._pause_ms, _LONGEST_MS) or _FIRST_MS
        self._not_before_ms = self._clock.monotonic_ms() + self._pause_ms
        return self._pause_ms

    def _connect(self) -> None:
        told: int | None = None
        while True:
            try:
                client = self._open_client()
            except ForebayError as e:
                if e.code != told:  # once, and again where it is something else now
                    _log.warning("%s: %s; the engine goes on without it and tries again now and then", self._what, e)
                    told = e.code
            except Exception:  # the engine must live on, without storage
                _log.exception("%s: no connection, and no further attempt", self._what)
                with self._changed:
                    self._tried = True
                    self._changed.notify_all()
                return
            else:
                with self._changed:
                    if not self._closed:
                        self._client = client
                        self._tried = True
                        self._changed.notify_all()
                        self._pause_ms = self._not_before_ms = 0
                        _log.info("%s: connected", self._what)
                        return
                client.close()
                return
            with self._changed:
                self._tried = True
                self._changed.notify_all()
                pause_ms = self._wait_longer()
                if self._changed.wait_for(lambda: self._closed, pause_ms / 1000):
                    return
