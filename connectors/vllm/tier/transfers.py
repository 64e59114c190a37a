"""Jobs between rows of vLLM's host pool and the node, carried out by threads without a copy in between.

Loads are carried out in parts (`forebay.connectors.vllm.loads`), stores by threads of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from forebay.client import Client, GetResult, Hints, register
from forebay.clock import Clock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.loads import Loads, PartedLoad, part_blocks
from forebay.connectors.vllm.messages import Rows
from forebay.connectors.vllm.settings import Settings
from forebay.ids import MAX_BATCH_KEYS

__all__ = ["Job", "Outcome", "Pool", "Transfers"]

_log = logging.getLogger("vllm.forebay")

_STORERS = 2


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
    the pool's memory, which devices are let at for as long.
    """

    def __init__(
        self, pool: Pool, link: Link, settings: Settings, counters: Counters, clock: Clock, *, pending_bytes: int
    ) -> None:
        self._pool: Pool | None = pool
        self._registered = register(pool.memory)
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
        self._loads = Loads(settings, counters, clock)
        self._loads.link = link
        self._storing = ThreadPoolExecutor(_STORERS, "forebay-store")

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
        if job.kind == "store":
            self._storing.submit(self._store, job, now_ms)
        else:
            self._loads.begin(self._parted(job, now_ms))

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
        self._loads.close()
        self._storing.shutdown(wait=True)
        self._registered.close()
        self._pool = None

    # --- in threads -------------------------------------------------------------------------------------------------

    def _gives_up(self, kind: str) -> bool:
        with self._changed:
            return kind in self._giving_up

    def _done(self, outcome: Outcome) -> None:
        with self._changed:
            self._under_way -= 1
            self._pending -= len(outcome.job.keys) if outcome.job.kind == "store" else 0
            self._ended.append(outcome)
            self._changed.notify_all()

    def _values(self, part: Rows) -> list[memoryview]:
        assert self._pool is not None, "nothing is submitted any more"
        return self._pool.values(part.blocks)

    def _parted(self, job: Job, began_ms: int) -> PartedLoad:
        def read(client: Client, part: Rows, left_ms: int) -> Sequence[GetResult]:
            return self._loads.into(client, part, self._values(part), left_ms, hints=job.hints)

        def ended(there: list[bool], seconds: float) -> None:
            done = tuple([key for key, is_there in zip(job.keys, there, strict=True) if is_there])
            self._done(Outcome(job, done, done, seconds))

        return PartedLoad(
            Rows(0, job.keys, job.rows).cut(part_blocks(self.value_bytes)),
            read,
            began_ms,
            self._settings.load_timeout_ms,
            chained=False,
            cancelled=lambda: self._gives_up("load"),
            ended=ended,
        )

    def _store(self, job: Job, began_ms: int) -> None:
        until_ms = began_ms + self._settings.save_timeout_ms
        present: list[bytes] = []
        stored: list[bytes] = []
        left = len(job.keys)
        try:
            for part in Rows(0, job.keys, job.rows).cut(MAX_BATCH_KEYS):
                client, left_ms = self._link.client, until_ms - self._clock.monotonic_ms()
                given_up = self._gives_up("store")
                if client is None or left_ms <= 0 or given_up:
                    why = "cancelled" if given_up else "unavailable" if client is None else "late"
                    self._counters.add("unstored_blocks", left, why)
                    break
                there, over = self._put(client, part, job.hints, left_ms)
                present += there
                stored += over
                left -= len(part.keys)
        except Exception:  # the engine must live on; what is not stored is a miss later
            _log.exception("a store failed")
            self._counters.add("unstored_blocks", left, "error")
        self._done(Outcome(job, tuple(present), tuple(stored), (self._clock.monotonic_ms() - began_ms) / 1000))

    def _put(self, client: Client, part: Rows, hints: Hints | None, left_ms: int) -> tuple[list[bytes], list[bytes]]:
        """Write blocks: those that the node has now, and those of them that it did not have before."""
        named = self._settings.named(client, part.keys)
        results = client.put(named, self._values(part), hints=hints, deadline_ms=left_ms)
        self._link.note([result.reason for result in results])
        present = [key for key, result in zip(part.keys, results, strict=True) if result.present]
        stored = [key for key, result in zip(part.keys, results, strict=True) if result.stored]
        self._counters.add("stored_blocks", len(stored))
        self._counters.add("stored_bytes", len(stored) * self.value_bytes)
        self._counters.add("present_blocks", len(present) - len(stored))
        for result in results:
            if not result.present:
                self._counters.add("unstored_blocks", reason=result.reason)
        return present, stored
