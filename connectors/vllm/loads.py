"""Loads in parts: threads read the next part of a load while the one before it is put where it belongs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from forebay.client import Client, GetResult, Hints
from forebay.clock import Clock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Rows
from forebay.connectors.vllm.settings import Settings
from forebay.ids import MAX_BATCH_KEYS

__all__ = ["LOADERS", "PART_BYTES", "Loads", "PartedLoad", "lost_to", "part_blocks"]

_log = logging.getLogger("vllm.forebay")

LOADERS = 6
"""Threads, each with one part at a time."""
_AT_ONCE = 2
"""Parts of one load under way: one is read while the other is put where it belongs. So three loads are, as a rule."""
PART_BYTES = 16 << 20
_LOST = {"absent": "evicted", "deadline_exceeded": "late"}


def lost_to(reason: str) -> str:
    """What a block is lost to that was there when it was looked up, by the reason of its result."""
    return _LOST.get(reason, reason)


def part_blocks(value_bytes: int) -> int:
    """How many blocks of so many bytes a part has."""
    return min(MAX_BATCH_KEYS, max(1, PART_BYTES // value_bytes))


class Loads:
    """The threads that carry out loads. What they raise in a part ends its load, with blocks that are lost."""

    def __init__(self, settings: Settings, counters: Counters, clock: Clock) -> None:
        self._settings = settings
        self.counters = counters
        self.clock = clock
        self._threads = ThreadPoolExecutor(LOADERS, "forebay-load")
        self.link: Link | None = None
        """The way to the node, once there is one."""

    def replace_link(self, link: Link) -> None:
        """Go on by another link; the one before it is closed."""
        before, self.link = self.link, link
        if before is not None:
            self._threads.submit(before.close)

    def begin(self, load: PartedLoad) -> None:
        """Carry out a load; those that come first are begun first. Raises nothing."""
        try:
            for _ in range(max(1, min(_AT_ONCE, len(load.parts)))):
                self._threads.submit(load.run, self)
        except RuntimeError as e:  # no thread can be had; whoever waits for the load must hear of its end
            _log.warning("a load is given up: %s", e)
            load.give_up(self)

    def into(
        self,
        client: Client,
        rows: Rows,
        buffers: Sequence[object],
        left_ms: int,
        *,
        tiles: Sequence[int] | None = None,
        hints: Hints | None = None,
    ) -> list[GetResult]:
        """Read blocks into ``buffers``, as `Client.get_into` does."""
        named = self._settings.named(client, rows.keys, rows.group)
        return client.get_into(named, buffers, tiles=tiles, hints=hints, deadline_ms=left_ms)

    def close(self) -> None:
        """Wait for the end of all loads; those that are cancelled end where they are."""
        self._threads.shutdown(wait=True)


class PartedLoad:
    """One load, in parts that several threads take in their order.

    ``read(client, part, left_ms)`` reads a part and puts it where it belongs; it answers one result a block. Once it
    has returned, nothing is written there any more. ``ended(there, seconds)`` is called once, by one of the threads,
    when nothing is under way any more: whether each block, in order, is there. If the load is ``chained`` a block is
    of no use without those in the parts before it, and parts after one that lacks a block are lost with it, also where
    they have been read meanwhile.
    """

    def __init__(
        self,
        parts: Sequence[Rows],
        read: Callable[[Client, Rows, int], Sequence[GetResult]],
        began_ms: int,
        limit_ms: int,
        *,
        chained: bool,
        cancelled: Callable[[], bool],
        ended: Callable[[list[bool], float], None],
    ) -> None:
        self.parts = parts
        self._read = read
        self._began_ms, self._until_ms = began_ms, began_ms + limit_ms
        self._chained = chained
        self._cancelled = cancelled
        self._tell = ended
        self._lock = threading.Lock()
        self._next = self._running = 0
        self._stopped = self._over = False
        self._ends: list[Sequence[GetResult] | str | None] = [None] * len(parts)
        """How each part ended: its results, or the one reason why it has none; None if it was not begun."""

    def run(self, loads: Loads) -> None:
        """In a thread: take parts until there are none left, and end the load if this was the last. Raises nothing."""
        while (number := self._take()) is not None:
            part = self.parts[number]
            try:
                end = self._carry_out(loads, part)
            except Exception:  # the engine must live on; what is not there is computed
                _log.exception("a load failed")
                end = "error"
            with self._lock:
                self._ends[number] = end
                self._running -= 1
                gap = isinstance(end, str) or (self._chained and not all(result.hit for result in end))
                self._stopped = self._stopped or gap
        with self._lock:
            if self._running or self._over:
                return
            self._over = True
        there = list(self._counted(loads.counters))
        seconds = (loads.clock.monotonic_ms() - self._began_ms) / 1000
        loads.counters.add("load_seconds", seconds)
        self._tell(there, seconds)

    def give_up(self, loads: Loads) -> None:
        """Begin no further part; ends the load unless one is under way, whose thread does."""
        with self._lock:
            if not self._stopped and self._next < len(self.parts):
                self._ends[self._next] = "error"
            self._stopped = True
        self.run(loads)

    def _take(self) -> int | None:
        with self._lock:
            if self._stopped or self._next == len(self.parts):
                return None
            self._next += 1
            self._running += 1
            return self._next - 1

    def _carry_out(self, loads: Loads, part: Rows) -> Sequence[GetResult] | str:
        if self._cancelled():
            return "cancelled"
        link = loads.link  # which may be another one before the end: what this one's client meets says nothing of it
        assert link is not None, "there is a way to the node before the first load"
        client = link.wait(max(0, self._until_ms - loads.clock.monotonic_ms()))
        left_ms = self._until_ms - loads.clock.monotonic_ms()
        if client is None or left_ms <= 0:
            return "unavailable" if client is None else "late"
        results = self._read(client, part, left_ms)
        link.note([result.reason for result in results])
        return results

    def _counted(self, counters: Counters) -> Iterator[bool]:
        """Whether each block is there; counts it as loaded, or as lost to what it is lost to."""
        rest = ""
        """What is lost from here on is lost to this."""
        for part, end in zip(self.parts, self._ends, strict=True):
            if end is None or isinstance(end, str) or (rest and self._chained):
                rest = rest or (end if isinstance(end, str) else "behind_gap")
                counters.add("lost_blocks", len(part.keys), rest)
                yield from [False] * len(part.keys)
                continue
            hits = [result for result in end if result.hit]
            counters.add("loaded_blocks", len(hits))
            counters.add("loaded_bytes", sum(result.length_bytes for result in hits))
            for result in end:
                if not result.hit:
                    counters.add("lost_blocks", reason=lost_to(result.reason))
            if self._chained and len(hits) < len(end):
                rest = "behind_gap"
            yield from [result.hit for result in end]
