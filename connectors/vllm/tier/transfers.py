"""Jobs between rows of vLLM's host pool and the node, carried out by threads without a copy in between."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from forebay.client import Client, Hints
from forebay.clock import Clock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.settings import Settings
from forebay.ids import MAX_BATCH_KEYS

__all__ = ["Job", "Outcome", "Pool", "Transfers"]

_log = logging.getLogger("vllm.forebay")

_LOADERS = 4
_STORERS = 2
_LOST = {"absent": "evicted", "deadline_exceeded": "late"}
"""What a block is lost to that was there when it was looked up."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The host pool: ``memory`` is all of its rows, ``row_bytes`` apart; a block's value is at the start of its row."""

    memory: memoryview
    row_bytes: int
    value_bytes: int

    def values(self, rows: Sequence[int]) -> list[memoryview]:
        """The values of some rows."""
        return [self.memory[row * self.row_bytes : row * self.row_bytes + self.value_bytes] for row in rows]


@dataclass(frozen=True, slots=True)
class Job:
    """``keys[i]`` between the node and row ``rows[i]``; keys are unique."""

    ident: int
    kind: Literal["load", "store"]
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    hints: Hints | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: ``done`` are the keys that were read, or that the node has now; ``moved`` of them were moved.

    ``spared``: there was nothing to be done, since nothing is to be stored at the moment.
    """

    job: Job
    done: tuple[bytes, ...]
    moved: tuple[bytes, ...]
    seconds: float
    spared: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is left of it."""
        return self.spared or len(self.done) == len(self.job.keys)


class Transfers:
    """Carries out jobs. `finished` and `submit` are the scheduler's; nothing in them waits.

    Each job ends by its deadline, counted from when it was submitted. Until `close` has returned a thread may be in
    the pool's memory.
    """

    def __init__(
        self, pool: Pool, link: Link, settings: Settings, counters: Counters, clock: Clock, *, pending_bytes: int
    ) -> None:
        self._pool: Pool | None = pool
        self.value_bytes = pool.value_bytes
        self._link = link
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._most_pending = max(1, pending_bytes // pool.value_bytes)
        self._changed = threading.Condition()
        self._under_way = 0
        self._pending = 0
        self._giving_up: frozenset[str] = frozenset()
        self._ended: list[Outcome] = []
        self._threads = {
            "load": ThreadPoolExecutor(_LOADERS, "forebay-load"),
            "store": ThreadPoolExecutor(_STORERS, "forebay-store"),
        }

    def submit(self, job: Job) -> None:
        """Begin a job."""
        now_ms = self._clock.monotonic_ms()
        if job.kind == "store":
            away = self._link.client is None
            with self._changed:
                refused = "unavailable" if away else "busy" if self._pending >= self._most_pending else ""
                if not refused:
                    self._pending += len(job.keys)
            if refused:
                self._counters.add("unstored_blocks", len(job.keys), refused)
                self._end(Outcome(job, (), (), 0.0))
                return
        with self._changed:
            self._under_way += 1
        self._threads[job.kind].submit(self._run, job, now_ms)

    def spare(self, job: Job) -> None:
        """End a job without having done anything."""
        self._end(Outcome(job, (), (), 0.0, spared=True))

    def _end(self, outcome: Outcome) -> None:
        with self._changed:
            self._ended.append(outcome)

    def finished(self) -> list[Outcome]:
        """Jobs that have ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def pause(self, seconds: float) -> None:
        """Let the threads go on until a job has ended, for this long at most; at once if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._under_way, seconds)

    def drain(self) -> None:
        """Wait until no thread is in the pool's memory: what has not begun is given up, what has keeps its deadline."""
        with self._changed:
            self._giving_up = frozenset({"load", "store"})
            self._changed.wait_for(lambda: not self._under_way)
            self._giving_up = frozenset()

    def close(self) -> None:
        """Finish what is to be stored, give up loads that have not begun, and let go of the pool's memory."""
        with self._changed:
            self._giving_up = frozenset({"load"})
        for threads in self._threads.values():
            threads.shutdown(wait=True)
        self._pool = None

    # --- in threads -------------------------------------------------------------------------------------------------

    def _run(self, job: Job, began_ms: int) -> None:
        load = job.kind == "load"
        until_ms = began_ms + (self._settings.load_timeout_ms if load else self._settings.save_timeout_ms)
        done: list[bytes] = []
        moved: list[bytes] = []
        left = len(job.keys)
        try:
            for keys, values in self._parts(job):
                client, left_ms = self._link.client, until_ms - self._clock.monotonic_ms()
                with self._changed:
                    given_up = job.kind in self._giving_up
                if client is None or left_ms <= 0 or given_up:
                    why = "cancelled" if given_up else "unavailable" if client is None else "late"
                    self._failed(job, [why] * left)
                    break
                move = self._load if load else self._store
                there, over = move(client, keys, values, job.hints, left_ms)
                done += there
                moved += over
                left -= len(keys)
        except Exception:  # the engine must live on; what is not there is computed
            _log.exception("a %s failed", job.kind)
            self._failed(job, ["error"] * left)
        seconds = (self._clock.monotonic_ms() - began_ms) / 1000
        if load:
            self._counters.add("load_seconds", seconds)
        with self._changed:
            self._under_way -= 1
            self._pending -= 0 if load else len(job.keys)
            self._ended.append(Outcome(job, tuple(done), tuple(moved), seconds))
            self._changed.notify_all()

    def _parts(self, job: Job) -> Iterator[tuple[Sequence[bytes], list[memoryview]]]:
        assert self._pool is not None, "nothing is submitted any more"
        for start in range(0, len(job.keys), MAX_BATCH_KEYS):
            part = slice(start, start + MAX_BATCH_KEYS)
            yield job.keys[part], self._pool.values(job.rows[part])

    def _load(
        self, client: Client, keys: Sequence[bytes], values: list[memoryview], hints: Hints | None, left_ms: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Read blocks into ``values``: those that are there now, twice."""
        results = client.get_into(self._settings.named(client, keys), values, hints=hints, deadline_ms=left_ms)
        self._link.note([result.reason for result in results])
        hits = [key for key, result in zip(keys, results, strict=True) if result.hit]
        self._counters.add("loaded_blocks", len(hits))
        self._counters.add("loaded_bytes", len(hits) * self.value_bytes)
        for result in results:
            if not result.hit:
                self._counters.add("lost_blocks", reason=_LOST.get(result.reason, result.reason))
        return hits, hits

    def _store(
        self, client: Client, keys: Sequence[bytes], values: list[memoryview], hints: Hints | None, left_ms: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Write blocks: those that the node has now, and those of them that it did not have before."""
        results = client.put(self._settings.named(client, keys), values, hints=hints, deadline_ms=left_ms)
        self._link.note([result.reason for result in results])
        present = [key for key, result in zip(keys, results, strict=True) if result.present]
        stored = [key for key, result in zip(keys, results, strict=True) if result.stored]
        self._counters.add("stored_blocks", len(stored))
        self._counters.add("stored_bytes", len(stored) * self.value_bytes)
        self._counters.add("present_blocks", len(present) - len(stored))
        for result in results:
            if not result.present:
                self._counters.add("unstored_blocks", reason=result.reason)
        return present, stored

    def _failed(self, job: Job, reasons: Sequence[str]) -> None:
        for reason in reasons:
            self._counters.add("lost_blocks" if job.kind == "load" else "unstored_blocks", reason=reason)
