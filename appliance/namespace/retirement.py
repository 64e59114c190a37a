"""The end of blocks: not found any more, deleted durably, their extents free when nobody reads them.

======== ===================================================== ======================================================
extent   moved by                                              what ends it
======== ===================================================== ======================================================
free     `Space.give`                                          `Space.take`
granted  Allocate                                              Commit, or an abort that was fenced
visible  Commit, after the record is durable                   Delete, eviction, a bad checksum, the namespace's end
retired  `Retirement.retire`: not found any more               the deleting record is durable **and** no lease is left
======== ===================================================== ======================================================

Between two awaits nothing else runs: what a method checks and then changes without awaiting is atomic.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.quarantine import Quarantined
from forebay.appliance.namespace.records import owner_key
from forebay.appliance.namespace.store import Op
from forebay.crashpoints import crash_point
from forebay.ids import Extent, StoredKey, VolumeId
from forebay.index import Rows, RowState, findable

__all__ = ["Retirement"]

_BATCH = 1024


class _Retired(NamedTuple):
    """Blocks that ended, and what has to be written for it."""

    rows: Rows
    stored_keys: Sequence[StoredKey]
    why: str
    quarantine: Sequence[Quarantined]
    ops: list[Op]
    numbers: range

    @property
    def keys(self) -> frozenset[StoredKey]:
        return frozenset(self.stored_keys)


class Retirement:
    """Ends blocks."""

    def __init__(self, engine: Engine) -> None:
        self._e = engine
        self._undurable: set[int] = set()  # retired rows whose delete is not in the log yet
        self._unwritten: deque[_Retired] = deque()
        self._finishing = asyncio.Lock()

    async def retire(
        self, rows: Rows, stored_keys: Sequence[StoredKey], why: str, quarantine: Sequence[Quarantined] = ()
    ) -> None:
        """End blocks: not found from now on, deleted durably, their extents free once leases have ended too.

        ``why`` is one of ``deleted | evicted | bad | stale | expired | cleared | lost``. Extents in ``quarantine`` are
        kept from all who come later. When metadata cannot be written the blocks stay unfindable and their extents stay
        taken until `finish_deletes` could write what is missing. While that is known beforehand, it raises why, and
        nothing has changed.
        """
        e, index = self._e, self._e.index
        if e.store.problem is not None:
            raise e.store.problem
        ops = []
        for row, key in zip(rows.tolist(), stored_keys, strict=True):
            ops.append(Op("blocks", key, None))
            ops.append(Op("owners", owner_key(int(index.volume[row]), int(index.offset[row])), None))
        ops += [e.space.quarantine.put(entry) for entry in quarantine]
        index.unlink(rows)
        self._undurable.update(rows.tolist())
        numbers, logged = e.changes.enter(stored_keys)
        step = "evict" if why == "evicted" else "delete"
        crash_point(f"{step}.before_metadata")
        retired = _Retired(rows, stored_keys, why, quarantine, ops + logged, numbers)
        try:
            await e.store.write(retired.ops)
        except BaseException:
            self._unwritten.append(retired)
            raise
        self._retired(retired)

    async def finish_deletes(self) -> None:
        """Write the deletes that could not be written, if metadata can be again. Raises what keeps it from that."""
        async with self._finishing:
            while self._unwritten and self._e.store.problem is None:
                retired = self._unwritten[0]
                await self._e.store.write(retired.ops)
                self._unwritten.popleft()
                self._retired(retired)

    async def let_deletes_pass(self, stored_keys: Collection[StoredKey]) -> None:
        """Write the deletes of these keys that could not be written: later they would take new records with them.

        One that is being written needs no wait: a record comes behind it, or fails as it did.
        """
        while any(not retired.keys.isdisjoint(stored_keys) for retired in self._unwritten):
            if self._e.store.problem is not None:
                raise self._e.store.problem
            await self.finish_deletes()

    @property
    def delete_failed(self) -> bool:
        """Whether a delete could not be written: a row is retired whose record is perhaps still there."""
        return bool(self._unwritten)

    def _retired(self, retired: _Retired) -> None:
        """What follows when the delete is durable."""
        e, index = self._e, self._e.index
        rows, stored_keys, why, quarantine = retired.rows, retired.stored_keys, retired.why, retired.quarantine
        step = "evict" if why == "evicted" else "delete"
        e.changes.settle(retired.numbers)
        for entry in quarantine:
            if entry.extent.volume in e.space.maps:  # else its volume went with it meanwhile
                e.space.quarantine.hold(entry)
        e.counters["quarantined_extents"] += len(quarantine)
        crash_point(f"{step}.after_metadata_before_free")
        for row, key in zip(rows.tolist(), stored_keys, strict=True):
            namespace = int(index.namespace[row])
            e.events.add("removed", namespace, key, reason=why)
        e.counters[f"blocks_{why}"] += len(rows)
        (e.evictions.add if why == "evicted" else e.evictions.drop)(index.digest[rows])
        self._undurable.difference_update(rows.tolist())
        self.free_unleased(rows)

    def free_unleased(self, rows: Rows) -> None:
        """Free those of ``rows`` that are retired, durably deleted and not leased."""
        index = self._e.index
        over = rows[(index.state[rows] == RowState.RETIRED) & (index.leases[rows] == 0)]
        if not over.size:  # as mostly
            return
        over = np.array([r for r in np.unique(over).tolist() if r not in self._undurable], dtype=np.int64)
        if not over.size:
            return
        columns = (index.volume[over], index.offset[over], index.length[over], index.scope[over])
        for volume, offset, length, scope in zip(*(c.tolist() for c in columns), strict=True):
            self._e.space.give(Extent(VolumeId(volume), offset, length), scope)
        index.free(over)

    async def reclaim(self, minimum: dict[int, int], budget_bytes: int) -> int:
        """Retire blocks that expired or whose generation is below the ``minimum`` of their namespace, oldest first.

        One batch, of no more than ``budget_bytes``; how many bytes it took. A pin does not keep a block from its end.
        """
        index, high = self._e.index, self._e.index.high
        now_s = self._e.clock.wall_ms() // 1000
        state = index.state[:high]
        found = findable(state)
        expires_s = index.expires_s[:high]
        expired = found & (expires_s > 0) & (expires_s <= now_s)
        stale = np.zeros(high, bool)
        for namespace, generation in minimum.items():
            stale |= (index.namespace[:high] == namespace) & (index.generation[:high] < generation)
        why, rows = "expired", np.flatnonzero(expired)
        if not rows.size:
            why, rows = "stale", np.flatnonzero(found & stale)
        rows = rows[np.argsort(index.tick[rows], kind="stable")][:_BATCH]
        rows = rows[np.cumsum(index.length[rows], dtype=np.uint64) <= budget_bytes]
        if rows.size:
            size = int(index.length[rows].sum(dtype=np.uint64))
            await self.retire(rows, self._e.keys_of(rows), why)
            return size
        return 0
