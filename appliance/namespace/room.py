"""Making room: where the extents of an Allocate come from.

In order: free slots the namespace holds; a free region of the node; an empty region that somebody holds; free slots of
a size up to twice as large; for a namespace with less than an even share of the regions, the least recently used region
of the one that holds most, as long as that holds more than its share; then, within the namespace alone, eviction of
blocks of the same slot size, and last of a whole region of another slot size. Pinned, leased and pending blocks are
never evicted, and nobody evicts another namespace's blocks below its even share. A namespace with eviction ``none``
gives nothing up: bound it by a quota.

Above its high watermark a namespace is evicted ahead of its writers, down to the low one, so that at a steady 95 % full
an Allocate finds free slots and need not wait for a delete to become durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

import numpy as np

from forebay.appliance.namespace.desired_state import DesiredState, Eviction, Namespace
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.records import PINNED
from forebay.appliance.namespace.retirement import Retirement
from forebay.errors import OK, ForebayError, NoSpace, QuotaExceeded
from forebay.ids import LBA_BYTES, Extent
from forebay.index import Rows, findable

__all__ = ["Room", "Watermarks"]

_log = logging.getLogger(__name__)
_MIN_VICTIMS = 64
_EVICT_AHEAD = 16
_AHEAD_SHARE = 64
_AHEAD_BATCH = 256
_NO_QUOTA_BYTES = 1 << 62
_ANY = -1  # victims of every slot size (a quota is in bytes), or of every scope


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of what a namespace can have, between which eviction runs ahead of its writers."""

    high: float = 0.97
    low: float = 0.95


@dataclass(frozen=True, slots=True)
class _Need:
    """Who needs room, and whose blocks may go for it: of one slot size or any, of one scope or any."""

    namespace: Namespace
    slot_bytes: int
    scope: int = _ANY
    least_bytes: int = 0
    """What must come free for it to be of any use: less is not worth a block."""
    ahead: bool = False
    """Nobody waits for it yet."""

    @property
    def limit(self) -> str:
        """What is short, for the counters."""
        if self.ahead:
            return "watermark"
        return "scope_quota" if self.scope != _ANY else "quota" if self.slot_bytes == _ANY else "space"


class Room:
    """Extents for writers, by evicting if need be."""

    def __init__(self, engine: Engine, retirement: Retirement, state: DesiredState, watermarks: Watermarks) -> None:
        self._e = engine
        self._retirement = retirement
        self._state = state
        self._watermarks = watermarks
        self._ahead: dict[int, asyncio.Task[None]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        # victims found by one scan, oldest first, with the tick they had: checked again when their turn comes
        self._victims: dict[tuple[int, int, int], deque[tuple[int, int]]] = {}

    async def take(self, namespace: Namespace, scope: int, slot_bytes: int, want: int) -> tuple[list[Extent], int]:
        """Up to ``want`` extents of that slot size, and the error code that says why there are no more (0: all)."""
        lock = self._locks.setdefault(namespace.id, asyncio.Lock())
        taken: list[Extent] = []
        async with lock:
            try:
                why = await self._take(namespace, scope, slot_bytes, want, taken)
            except BaseException:
                for extent in taken:
                    self._e.space.give(extent, scope)
                raise
        if namespace.id not in self._ahead and self._excess_bytes(namespace, self._watermarks.high) > 0:
            task = self._ahead[namespace.id] = asyncio.create_task(self._evict_ahead(namespace))
            task.add_done_callback(lambda _: self._ahead.pop(namespace.id, None))
        return taken, why

    async def _take(self, namespace: Namespace, scope: int, slot_bytes: int, want: int, taken: list[Extent]) -> int:
        space = self._e.space
        quota = self._state.scope_quotas.get(f"{namespace.id}/{scope}")
        if slot_bytes > min([q for q in (namespace.quota_bytes, quota and quota.quota_bytes) if q], default=slot_bytes):
            return QuotaExceeded.code  # evicting all there is would not help
        while len(taken) < want:
            rest = want - len(taken)
            mine, all_ = self._allowed(namespace, scope, slot_bytes)
            # what one further slot lacks
            mine_bytes, all_bytes = (
                slot_bytes - (free_bytes % slot_bytes if free_bytes > 0 else free_bytes)
                for free_bytes in self._quota_free_bytes(namespace, scope)
            )
            if mine < rest and await self._evict(_Need(namespace, _ANY, scope, mine_bytes), rest - mine):
                continue
            if all_ < rest and await self._evict(_Need(namespace, _ANY, least_bytes=all_bytes), rest - all_):
                continue
            allowed = min(mine, all_, rest)
            if allowed <= 0:
                return QuotaExceeded.code
            got = space.take(namespace.id, scope, slot_bytes, allowed)
            if got:
                taken += got
            elif await space.claim(namespace.id, slot_bytes) or await self._reclaim_and_claim(namespace.id, slot_bytes):
                continue
            elif got := self._take_roomier(namespace, scope, slot_bytes, rest):
                taken += got
            elif not (
                await self._take_from_richest(namespace, slot_bytes)
                or await self._evict(_Need(namespace, slot_bytes), rest)
                or await self._clear_region(namespace, slot_bytes)
            ):
                return NoSpace.code
        return OK

    def _allowed(self, namespace: Namespace, scope: int, slot_bytes: int) -> tuple[int, int]:
        """Slots of a size that the scope's quota and the namespace's still admit."""
        mine, all_ = self._quota_free_bytes(namespace, scope)
        return max(0, mine) // slot_bytes, max(0, all_) // slot_bytes

    def _quota_free_bytes(self, namespace: Namespace, scope: int) -> tuple[int, int]:
        """What the scope's quota and the namespace's leave; less than nothing where one was lowered."""
        space = self._e.space
        quota = self._state.scope_quotas.get(f"{namespace.id}/{scope}")
        mine = quota.quota_bytes - space.scope_bytes(namespace.id, scope) if quota else _NO_QUOTA_BYTES
        all_ = namespace.quota_bytes - space.used_bytes(namespace.id) if namespace.quota_bytes else _NO_QUOTA_BYTES
        return mine, all_

    def _take_roomier(self, namespace: Namespace, scope: int, slot_bytes: int, want: int) -> list[Extent]:
        """Free slots of the next larger size, up to twice as large: a node with few regions has few sizes at once."""
        larger = self._e.space.roomier_slot(namespace.id, slot_bytes, 2 * slot_bytes)
        if larger is None:
            return []
        return self._e.space.take(namespace.id, scope, larger, min(want, *self._allowed(namespace, scope, larger)))

    async def _reclaim_and_claim(self, namespace: int, slot_bytes: int) -> bool:
        return await self._e.space.reclaim(namespace) and await self._e.space.claim(namespace, slot_bytes)

    # ------------------------------------------------------------------------------------------------ ahead of need

    def _excess_bytes(self, namespace: Namespace, watermark: float) -> int:
        """Bytes in use above a watermark of what the namespace can have; negative while it can still grow."""
        space = self._e.space
        limits = [namespace.quota_bytes] if namespace.quota_bytes else []
        if not any(space.drives[v.drive].free_regions for v in space.volumes_of(namespace.id)):
            limits.append(space.reserved_bytes(namespace.id))
        return space.used_bytes(namespace.id) - int(watermark * min(limits)) if limits else -1

    async def _evict_ahead(self, namespace: Namespace) -> None:
        """Evict down to the low watermark, slot sizes with the smallest free share first."""
        try:
            while (excess := self._excess_bytes(namespace, self._watermarks.low)) > 0:
                tightest = self._e.space.tightest_slot(namespace.id)
                if tightest is None:
                    return
                count = min(-(-excess // tightest), _AHEAD_BATCH)
                async with self._locks[namespace.id]:
                    if not await self._evict(_Need(namespace, tightest, ahead=True), count):
                        return
        except ForebayError as error:
            _log.warning("namespace %s: eviction ahead of need stopped: %s", namespace.full_name, error)

    # ------------------------------------------------------------------------------------------------ eviction

    def _evictable(self, rows: Rows) -> Rows:
        """Those of ``rows`` that may go: found, not leased, not pinned."""
        index = self._e.index
        state = index.state[rows]
        found = findable(state)
        free = (index.leases[rows] == 0) & (index.pins[rows] == 0) & (index.flags[rows] & PINNED == 0)
        if self._e.space.unwritable.size:  # that makes no room that anybody could have
            free &= ~np.isin(index.volume[rows], self._e.space.unwritable)
        evictable: Rows = rows[found & free]
        return evictable

    async def _evict(self, need: _Need, count: int) -> bool:
        """Evict ``count`` blocks, some more for the next writers to come; False if none could go."""
        if need.namespace.eviction == Eviction.NONE:
            return False
        victims = self._next_victims(need, count)
        if not victims.size:
            return False
        await self._retirement.retire(victims, self._e.keys_of(victims), "evicted")
        self._e.counters[f"evicted_for_{need.limit}"] += len(victims)
        return True

    def _next_victims(self, need: _Need, count: int) -> Rows:
        """``count`` blocks, and up to `_EVICT_AHEAD` while those beyond ``count`` are a small part of all there is.

        None if all that may go is less than the need's `least_bytes`: pinned and leased blocks hold the rest, and to
        evict what lies between them would help nobody.
        """
        spare_bytes = self._e.space.used_bytes(need.namespace.id) // _AHEAD_SHARE
        waiting = self._victims.setdefault((need.namespace.id, need.slot_bytes, need.scope), deque())
        chosen: dict[int, int] = {}  # row to tick, oldest first
        freed_bytes = 0
        enough = need.least_bytes // LBA_BYTES  # if all were of the smallest slots
        for scan in (0, max(count, _EVICT_AHEAD), enough)[: 3 if enough else 2]:
            if scan:
                waiting.extend(self._scan(need, scan))
            while waiting and (len(chosen) < max(count, _EVICT_AHEAD) or freed_bytes < need.least_bytes):
                row, tick = waiting.popleft()
                if self._e.index.tick[row] != tick or not self._candidates(need, np.array([row])).size:
                    continue
                if row in chosen:
                    continue
                size = int(self._e.index.length[row])
                if len(chosen) >= count and freed_bytes >= need.least_bytes:
                    spare_bytes -= size
                    if spare_bytes < 0:
                        waiting.appendleft((row, tick))
                        break
                chosen[row] = tick
                freed_bytes += size
            if chosen and freed_bytes >= need.least_bytes:
                return np.array(list(chosen), dtype=np.int64)
        waiting.extendleft(reversed(chosen.items()))
        return np.array([], dtype=np.int64)

    def _candidates(self, need: _Need, rows: Rows) -> Rows:
        """Those of ``rows`` that may go for this need."""
        index = self._e.index
        mine = index.namespace[rows] == need.namespace.id
        if need.slot_bytes != _ANY:
            mine &= index.length[rows] == need.slot_bytes
        if need.scope != _ANY:
            mine &= index.scope[rows] == need.scope
        return self._evictable(rows[mine])

    def _scan(self, need: _Need, count: int) -> list[tuple[int, int]]:
        """The next victims by the policy; blocks of generations below the minimum come first."""
        index, now_s = self._e.index, self._e.clock.wall_ms() // 1000
        rows = self._candidates(need, np.arange(index.high))
        stale = index.generation[rows] < need.namespace.min_generation
        # one scan serves many evictions, so that its cost is shared by a fixed part of the candidates
        count = max(count, _MIN_VICTIMS, len(rows) // 64)
        fresh = self._e.policy.victims(index, rows[~stale], count, now_s)
        chosen = np.concatenate([rows[stale], fresh])[:count]
        return list(zip(chosen.tolist(), index.tick[chosen].tolist(), strict=True))

    async def _clear_region(self, namespace: Namespace, slot_bytes: int) -> bool:
        """Evict all of the least recently used region of another slot size and claim it for this one."""
        if namespace.eviction == Eviction.NONE:
            return False
        rows = self._coldest_region(namespace, slot_bytes)
        if rows is None:
            return False
        _log.info("namespace %s: a region of another slot size is evicted for %d", namespace.full_name, slot_bytes)
        return await self._empty(rows) and await self._reclaim_and_claim(namespace.id, slot_bytes)

    async def _take_from_richest(self, namespace: Namespace, slot_bytes: int) -> bool:
        """Bring a namespace nearer to an even share of the regions, at the cost of the one that holds most."""
        space = self._e.space
        others = [n for n in self._state.namespaces if n.id != namespace.id and not n.deleting]
        share = sum(d.capacity_regions for d in space.drives.values()) // (1 + len(others)) * space.region_bytes
        if space.reserved_bytes(namespace.id) >= share:
            return False
        for other in sorted(others, key=lambda n: -space.reserved_bytes(n.id)):
            if space.reserved_bytes(other.id) <= share or other.eviction == Eviction.NONE:
                continue
            rows = self._coldest_region(other, _ANY)
            if rows is not None:
                _log.info("namespace %s: a region goes to %s", other.full_name, namespace.full_name)
                return await self._empty(rows) and await self._reclaim_and_claim(namespace.id, slot_bytes)
        return False

    async def _empty(self, rows: Rows) -> bool:
        if rows.size:
            await self._retirement.retire(rows, self._e.keys_of(rows), "evicted")
            self._e.counters["evicted_for_space"] += len(rows)
        return True

    def _coldest_region(self, namespace: Namespace, slot_bytes: int) -> Rows | None:
        """Blocks of the least recently used region whose blocks may all go, of any slot size but ``slot_bytes``."""
        e, index = self._e, self._e.index
        best: tuple[int, Rows] | None = None
        for volume in e.space.volumes_of(namespace.id):
            if volume.id in e.space.unwritable:
                continue
            rows = np.flatnonzero(index.volume[: index.high] == volume.id)
            rows = rows[index.namespace[rows] == namespace.id]
            evictable = self._evictable(rows)
            numbers = index.offset[evictable] // np.uint64(e.space.region_bytes)
            for region in e.space.maps[volume.id].claimed.values():
                here = evictable[numbers == region.number]
                if region.slot_bytes == slot_bytes or len(here) != region.slots - region.free_slots:
                    continue  # the right size already, or holding something that must stay
                last_use = int(index.tick[here].max()) if here.size else 0
                if best is None or last_use < best[0]:
                    best = (last_use, here)
        return None if best is None else best[1]
