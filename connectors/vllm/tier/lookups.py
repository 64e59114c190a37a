"""What of a request's blocks the node has: asked for all requests of a step at once, and never waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from forebay.clock import Clock
from forebay.connectors.vllm.counters import Counters
from forebay.ids import MAX_BATCH_KEYS

__all__ = ["Lookups"]

_log = logging.getLogger("vllm.forebay")

_THREADS = 2


class _Asked:
    """One key that somebody asks for. Threads write ``answer`` once; all else is written by the scheduler's thread."""

    __slots__ = ("answer", "asked_at_ms", "requests", "verdict")

    def __init__(self, now_ms: int) -> None:
        self.answer: str | None = None
        self.verdict: str | None = None
        self.asked_at_ms = now_ms
        self.requests: set[str] = set()


class Lookups:
    """Answers of the node, kept for as long as a request that asked for them lives.

    ``match`` is called in threads with at most `MAX_BATCH_KEYS` keys and returns a reason for each, ``ok`` for what is
    there. What has no answer ``patience_ms`` after it was asked for is given up. All methods are the scheduler's.
    """

    def __init__(
        self, match: Callable[[Sequence[bytes]], Sequence[str]], counters: Counters, clock: Clock, patience_ms: int
    ) -> None:
        self._match = match
        self._counters = counters
        self._clock = clock
        self._patience_ms = patience_ms
        self._known: dict[bytes, _Asked] = {}
        self._keys_of: dict[str, dict[bytes, None]] = {}  # in the order of a request's blocks
        self._batch: list[tuple[bytes, _Asked]] = []
        self._threads = ThreadPoolExecutor(_THREADS, "forebay-lookup")
        self._changed = threading.Condition()
        self._under_way = 0

    def ask(self, key: bytes, request: str) -> str | None:
        """What is known of a key: ``ok``, why it is not to be had, or None as long as nothing is known."""
        asked = self._known.get(key)
        if asked is None:
            asked = self._known[key] = _Asked(self._clock.monotonic_ms())
            self._batch.append((key, asked))
        asked.requests.add(request)
        self._keys_of.setdefault(request, {})[key] = None
        if asked.verdict is None:
            answer = asked.answer
            if answer is None and self._clock.monotonic_ms() - asked.asked_at_ms >= self._patience_ms:
                answer = "deadline_exceeded"
                self._counters.add("missed_blocks", reason=answer)
            asked.verdict = answer
        return asked.verdict

    def present(self, request: str) -> int:
        """How many of the keys that a request has asked for are there, up to the first that is not known to be."""
        run = 0
        for key in self._keys_of.get(request, ()):
            asked = self._known[key]
            if (asked.verdict or asked.answer) != "ok":
                break
            run += 1
        return run

    def flush(self) -> None:
        """Ask the node for everything that was asked for since the last call."""
        batch, self._batch = self._batch, []
        for start in range(0, len(batch), MAX_BATCH_KEYS):
            with self._changed:
                self._under_way += 1
            self._threads.submit(self._run, batch[start : start + MAX_BATCH_KEYS])

    def pause(self, seconds: float) -> None:
        """Let the threads go on until a call has been answered, for this long at most; at once if there is none."""
        with self._changed:
            before = self._under_way
            if before:
                self._changed.wait_for(lambda: self._under_way < before, seconds)

    def _run(self, batch: Sequence[tuple[bytes, _Asked]]) -> None:
        # What nobody waits for any more is not asked for: those that come after it would wait behind it.
        batch = [(key, asked) for key, asked in batch if asked.verdict is None and asked.requests]
        try:
            reasons = self._match([key for key, _ in batch]) if batch else []
        except Exception:  # the engine must live on; what was asked for is computed
            _log.exception("a lookup failed")
            reasons = ["error"] * len(batch)
        for (_, asked), reason in zip(batch, reasons, strict=True):
            asked.answer = reason
            if asked.verdict is not None:
                continue  # too late: it was counted as that
            if reason == "ok":
                self._counters.add("hit_blocks")
            else:
                self._counters.add("missed_blocks", reason=reason)
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def background(self, work: Callable[[], None]) -> None:
        """Do something else that nobody waits for, in the same threads."""

        def shielded() -> None:
            try:
                work()
            except Exception:  # the engine must live on
                _log.exception("a call that nobody waits for failed")

        self._threads.submit(shielded)

    def lost(self, keys: Collection[bytes]) -> None:
        """Keys that could not be loaded are misses for all who ask for them now: else they would load them for ever."""
        for key in keys:
            asked = self._known.get(key)
            if asked is not None:
                asked.verdict = "lost"

    def stored(self, keys: Collection[bytes]) -> None:
        """Keys that this engine has just written are there."""
        for key in keys:
            asked = self._known.get(key)
            if asked is not None and asked.verdict is not None:
                asked.verdict = "ok"

    def forget(self, request: str) -> None:
        """A request has ended: what only it has asked for is asked anew by the next."""
        for key in self._keys_of.pop(request, ()):
            asked = self._known[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._known[key]

    def close(self) -> None:
        """Ask for nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
