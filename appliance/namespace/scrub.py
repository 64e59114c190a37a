"""Scrubbing: every visible block is read at the target from time to time, and a bad one is dropped.

A pass walks the blocks that were visible when it began, suspects first, then by volume and offset. It works in short
batches under a rate, and holds only the blocks of the batch: writers, readers and eviction go on. `Verification` is
the one judge. The node's own pass is spread over an interval; an administrator can ask for one more, which goes first.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.verification import Verification
from forebay.errors import Busy
from forebay.index import BlockIndex, Rows, RowState, findable

__all__ = ["ScrubLimits", "ScrubReport", "Scrubber"]

_log = logging.getLogger(__name__)
_BATCH_BLOCKS = 64
_BATCH_BYTES = 8 << 20
_IDLE_MS = 250
_REST_MS = 60_000
"""Between two passes of the node's own, so that an empty node does not walk all the time."""


@dataclass(frozen=True, slots=True)
class ScrubLimits:
    """Bytes a second at most, and what a pass of the node's own takes at least (0: there is none)."""

    rate_bytes_per_s: int = 64 << 20
    interval_ms: int = 7 * 86_400_000


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """How far a pass that was asked for has come. ``namespace`` is empty for all.

    ``blocks`` and ``bytes`` were looked at; ``gone`` ones had ended before their turn. ``bad`` did not match their
    checksums and were dropped; ``unread`` the drive did not give. ``rate_bytes_per_s`` is the limit it runs under.
    """

    state: str = "none"
    """``none`` (nobody asked since the start), ``running``, ``done`` or ``stopped``."""
    namespace: str = ""
    blocks: int = 0
    blocks_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    gone: int = 0
    bad: int = 0
    unread: int = 0
    suspects_left: int = 0
    rate_bytes_per_s: int = 0
    started_unix_ms: int = 0
    elapsed_ms: int = 0


@dataclass(slots=True)
class _Pass:
    """One walk. ``credit`` is in thousandths of a byte and may fall below 0 by one batch."""

    rate_bytes_per_s: int
    began_ms: int
    namespace: int | None = None
    name: str = ""
    began_unix_ms: int = 0
    rows: npt.NDArray[np.uint32] | None = None
    writes: npt.NDArray[np.uint64] | None = None
    blocks_total: int = 0
    bytes_total: int = 0
    at: int = 0
    state: str = "running"
    ended_ms: int = 0
    credit: int = 0
    credited_ms: int = 0
    blocks: int = 0
    bytes: int = 0
    gone: int = 0
    bad: int = 0
    unread: int = 0

    def earn(self, now_ms: int) -> None:
        """Credit for the time since the last call, a second's at most."""
        elapsed_ms, self.credited_ms = now_ms - self.credited_ms, now_ms
        self.credit = min(self.credit + self.rate_bytes_per_s * elapsed_ms, self.rate_bytes_per_s * 1000)

    def wait_ms(self) -> int:
        """Until there is credit again; 0 when there is some."""
        return 0 if self.credit > 0 else -self.credit // self.rate_bytes_per_s + 1


def _order(
    index: BlockIndex, high: int, namespace: int | None
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], int]:
    """Rows to visit, half of the write id that each had then, and their bytes: 12 bytes of memory a block.

    Runs beside the event loop. What changes meanwhile is seen when a row's turn comes.
    """
    state = index.state[:high].copy()
    chosen = findable(state)
    if namespace is not None:
        chosen &= index.namespace[:high] == namespace
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((index.offset[rows], index.volume[rows], state[rows] != RowState.SUSPECT))]
    return rows.astype(np.uint32), index.write_id[rows, 0], int(index.length[rows].sum(dtype=np.uint64))


class Scrubber:
    """Walks; `step` is called over and over by whoever drives it."""

    def __init__(self, engine: Engine, verification: Verification, limits: ScrubLimits) -> None:
        self._e = engine
        self._verification = verification
        self._limits = limits
        self._own: _Pass | None = None
        self._asked: _Pass | None = None

    def start(self, namespace: int | None = None, name: str = "", rate_bytes_per_s: int = 0) -> ScrubReport:
        """Begin a pass over one namespace or all, under a rate of its own or (0) the configured one.

        Raises `Busy` while another that was asked for runs.
        """
        if self._asked is not None and self._asked.state == "running":
            raise Busy("a scrub is running: wait for it, or stop it")  # for days maybe: nobody asks again by itself
        now_ms = self._e.clock.monotonic_ms()
        self._asked = _Pass(
            rate_bytes_per_s or self._limits.rate_bytes_per_s, now_ms, namespace, name, self._e.clock.wall_ms()
        )
        self._asked.credited_ms = now_ms
        return self.report()

    def stop(self) -> ScrubReport:
        """End the pass that was asked for, if one runs."""
        if self._asked is not None and self._asked.state == "running":
            self._finish(self._asked, "stopped")
        return self.report()

    def report(self) -> ScrubReport:
        """How the last pass that was asked for stands."""
        index, one = self._e.index, self._asked
        suspects = int(np.count_nonzero(index.state[: index.high] == RowState.SUSPECT))
        if one is None:
            return ScrubReport(suspects_left=suspects)
        until_ms = self._e.clock.monotonic_ms() if one.state == "running" else one.ended_ms
        return ScrubReport(
            one.state,
            one.name,
            one.blocks,
            one.blocks_total,
            one.bytes,
            one.bytes_total,
            one.gone,
            one.bad,
            one.unread,
            suspects,
            one.rate_bytes_per_s,
            one.began_unix_ms,
            until_ms - one.began_ms,
        )

    async def step(self) -> int:
        """Verify one batch if it is time; how many ms to wait before the next call."""
        one = self._turn()
        if one is None:
            return _IDLE_MS
        if one.rows is None:
            await self._begin(one)
            if one.state != "running":
                return 0  # stopped meanwhile
        one.earn(self._e.clock.monotonic_ms())
        if wait_ms := one.wait_ms():
            return min(wait_ms, _IDLE_MS)
        rows, taken = self._next_batch(one)
        if rows.size:
            size = int(self._e.index.length[rows].sum(dtype=np.uint64))
            verdict = await self._verification.verify_rows(rows)
            if verdict.unknown:
                return 4 * _IDLE_MS  # the target is away: the same again when it is back
            one.credit -= size * 1000
            one.blocks += len(rows)
            one.bytes += size
            one.bad += verdict.bad
            one.unread += verdict.unread
            self._e.counters["scrubbed_blocks"] += len(rows)
            self._e.counters["scrubbed_bytes"] += size
        one.at += taken
        one.gone += taken - len(rows)
        if one.at == one.blocks_total and one.state == "running":
            self._finish(one, "done")
        return min(one.wait_ms(), _IDLE_MS)

    def _turn(self) -> _Pass | None:
        """The pass to go on with: one that was asked for, else the node's own, begun anew when it is time."""
        if self._asked is not None and self._asked.state == "running":
            return self._asked
        if not self._limits.interval_ms or self._verification.sweeping:
            return None  # after an unclean stop the sweep verifies suspects first
        now_ms = self._e.clock.monotonic_ms()
        if self._own is None or (self._own.state == "done" and now_ms - self._own.ended_ms >= _REST_MS):
            self._own = _Pass(self._limits.rate_bytes_per_s, now_ms)
        return self._own if self._own.state == "running" else None

    async def _begin(self, one: _Pass) -> None:
        """Put the walk in order, beside the event loop: there may be millions of blocks."""
        index = self._e.index
        rows, one.writes, one.bytes_total = await asyncio.to_thread(_order, index, index.high, one.namespace)
        one.rows, one.blocks_total = rows, len(rows)
        if one is self._own:
            spread = one.bytes_total * 1000 // self._limits.interval_ms
            one.rate_bytes_per_s = min(self._limits.rate_bytes_per_s, max(1, spread))
        one.credited_ms = self._e.clock.monotonic_ms()

    def _next_batch(self, one: _Pass) -> tuple[Rows, int]:
        """Rows whose turn it is and that still are what they were, and how many are passed: by credit, one at least."""
        index = self._e.index
        if one.rows is None or one.writes is None:
            return np.empty(0, np.int64), 0
        turn = slice(one.at, one.at + _BATCH_BLOCKS)
        rows = one.rows[turn].astype(np.int64)
        there = findable(index.state[rows])
        there &= index.write_id[rows, 0] == one.writes[turn]
        lengths = np.where(there, index.length[rows], 0).astype(np.int64)
        before = np.cumsum(lengths) - lengths
        taken = int(np.count_nonzero(before < max(1, min(one.credit // 1000, _BATCH_BYTES))))
        return rows[:taken][there[:taken]], taken

    def _finish(self, one: _Pass, state: str) -> None:
        one.state, one.ended_ms = state, self._e.clock.monotonic_ms()
        one.rows = one.writes = None
        self._e.counters["scrub_passes"] += state == "done"
        _log.info("scrub %s: %d blocks, %d bytes, %d bad, %d unread", state, one.blocks, one.bytes, one.bad, one.unread)
