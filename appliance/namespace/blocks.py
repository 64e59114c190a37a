"""Visible blocks: found, leased, read, listed, pinned, deleted.

======== ===================================================== ======================================================
extent   moved by                                              what ends it
======== ===================================================== ======================================================
free     `Space.give`                                          `Space.take`
granted  Allocate                                              Commit, or an abort that was fenced
visible  Commit, after the record is durable                   Delete, eviction, a bad checksum, the namespace's end
retired  `Blocks.retire`: not found any more                   the deleting record is durable **and** no lease is left
======== ===================================================== ======================================================

Between two awaits nothing else runs: what a method checks and then changes without awaiting is atomic.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.appliance.dataplane.interface import Target, VolumeSpec
from forebay.appliance.namespace.changes import ChangeLog
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import EvictionPolicy
from forebay.appliance.namespace.misses import Evictions, Place, Places
from forebay.appliance.namespace.quarantine import Quarantined
from forebay.appliance.namespace.records import FLUSHED, PINNED, Record
from forebay.appliance.namespace.reserve import Reserve
from forebay.appliance.namespace.sessions import Lease, Session, SessionState
from forebay.appliance.namespace.space import Space
from forebay.appliance.namespace.store import Op, Store
from forebay.checksum import tile_seeds
from forebay.clock import Clock
from forebay.crashpoints import crash_point
from forebay.errors import (
    OK,
    Absent,
    Busy,
    Evicted,
    ForebayError,
    MetadataCorrupt,
    OtherGeneration,
    OtherKeyspace,
    SessionExpired,
    StaleGeneration,
    TargetFailed,
    Unavailable,
    reason,
)
from forebay.ids import (
    LBA_BYTES,
    MAX_BATCH_KEYS,
    BlockKey,
    Extent,
    LeaseId,
    StoredKey,
    VolumeId,
    check_keys,
    split_stored_key,
    stored_prefix,
)
from forebay.index import ABSENT, BlockIndex, Digests, Rows, RowState, findable
from forebay.schema import Schema, TileLayout

__all__ = [
    "BlockStat",
    "Blocks",
    "Engine",
    "ListedBlock",
    "Located",
    "Matched",
    "Verdict",
    "owner_key",
    "tile_ranges",
]

_log = logging.getLogger(__name__)
_GROUP_OF = attrgetter("group")
_OWNER_KEY = struct.Struct(">IQ")
_MAX_LEASES_PER_BLOCK = 65_000 - MAX_BATCH_KEYS
"""The count has 16 bits, and one batch may name a block as often as it has keys."""
_VERIFY_BATCH = 64
_RETIRE_BATCH = 1024

Status = npt.NDArray[np.uint16]


def owner_key(volume: int, offset_bytes: int) -> bytes:
    """Key of the owners family: who has the extent at that place."""
    return _OWNER_KEY.pack(volume, offset_bytes)


def tile_ranges(
    stored_key: StoredKey, write_id: bytes, layout: TileLayout, offset_bytes: int
) -> list[tuple[int, int, int]]:
    """Where on the volume each tile of a block lies, its length, and the seed that its checksum starts from."""
    seeds = tile_seeds(stored_key, range(layout.tiles), write_id)
    return [(offset_bytes + o, n, s) for o, n, s in zip(layout.offsets, layout.lengths, seeds, strict=True)]


def _leading(present: npt.NDArray[np.bool_]) -> int:
    """How many are present before the first that is not."""
    return len(present) if present.all() else int(np.argmin(present))


@dataclass(slots=True)
class Engine:
    """What every part of the namespace engine works with; passed in, so that all of it can be simulated."""

    store: Store
    target: Target
    space: Space
    index: BlockIndex
    changes: ChangeLog
    clock: Clock
    random: Callable[[int], bytes]
    policy: EvictionPolicy
    events: EventLog
    waiters: Waiters
    counters: Counter[str]
    reserve: Reserve = field(default_factory=Reserve)
    evictions: Evictions = field(default_factory=Evictions)
    places: Places = field(default_factory=Places)


class Matched(NamedTuple):
    """Answer of Match: 0 or an error code a key, and the length of each group's present prefix.

    ``present_bytes`` are of all that is present; ``elsewhere`` is where the first absent key is instead, if known.
    """

    status: Status
    prefix: dict[int, int]
    present_bytes: int
    elsewhere: Place | None


@dataclass(frozen=True, slots=True)
class Located:
    """Answer of Acquire: columns over the keys asked for; rows whose status is not 0 hold zeros."""

    status: Status
    lease: LeaseId
    lease_ttl_ms: int
    volumes: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    value_lengths: npt.NDArray[np.uint64]
    write_ids: npt.NDArray[np.uint64]
    tiles: npt.NDArray[np.uint16]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class BlockStat:
    """What is known of one block; sizes in bytes."""

    record: Record
    pins: int
    leases: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `Blocks.verify` found, in blocks; those that ended meanwhile are in none of the counts.

    ``unread``: the drive did not give the bytes. ``unknown``: the target did not answer, or they are bad and cannot be
    deleted before metadata can be written again.
    """

    good: int = 0
    bad: int = 0
    unread: int = 0
    unknown: int = 0

    @property
    def complete(self) -> bool:
        """Whether all are either served or gone."""
        return not self.unread + self.unknown


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """One line of a listing."""

    key: bytes
    value_bytes: int
    created_ms: int


class _Asked(NamedTuple):
    """A block to be verified: its key, and offset, length and seed of each of its tiles."""

    stored_key: StoredKey
    ranges: Sequence[tuple[int, int, int]]


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


class Blocks:
    """The engine's reading side."""

    def __init__(self, engine: Engine) -> None:
        self._e = engine
        self._next_lease = int.from_bytes(engine.random(4), "little") << 16
        self._undurable: set[int] = set()  # retired rows whose delete is not in the log yet
        self._served: set[int] = set()  # suspects that were served until somebody doubted them
        self._next_suspect = 0
        self._went_round = False
        self._unwritten: deque[_Retired] = deque()
        self._finishing = asyncio.Lock()
        self._schemas: dict[bytes, Schema] = {}

    # ------------------------------------------------------------------------------------------------ finding

    @staticmethod
    def admit(session: Session) -> None:
        """Refuse a session below its namespace's minimum generation."""
        namespace = session.access.namespace
        if session.generation < namespace.min_generation:
            raise StaleGeneration(
                f"generation {session.generation} is below the minimum of {namespace.full_name}",
                field="context.generation",
                limit=namespace.min_generation,
            )

    @staticmethod
    def require_open(session: Session) -> None:
        """Refuse a session that ended since its call was let in: what it got now nobody would take back."""
        if session.state is not SessionState.OPEN:
            raise SessionExpired("the session ended while the call ran", field="context.session")

    def find(
        self, session: Session, keys: Sequence[BlockKey], *, expired: bool = False
    ) -> tuple[list[StoredKey], npt.NDArray[np.uint64], Rows]:
        """Stored keys, digests and rows of a batch; a block whose time to live is over only by ``expired``."""
        self.require_open(session)
        self.admit(session)
        stored = session.stored_keys(keys)
        digests = session.digests(self._e.index, keys)
        rows = self._e.index.find(digests)
        return stored, digests, rows if expired else self._fresh(rows, session)

    def _fresh(self, rows: Rows, session: Session) -> Rows:
        """``rows`` with `ABSENT` in place of expired ones; free of cost where no block expires."""
        if session.access.namespace.ttl_ms:
            expires_s = self._e.index.expires_s[rows]
            rows[(rows >= 0) & (expires_s > 0) & (expires_s <= self._e.clock.wall_ms() // 1000)] = ABSENT
        return rows

    def match(self, session: Session, keys: Sequence[BlockKey]) -> Matched:
        """Presence of each key. Takes no lease and moves nothing in the eviction order: asking blocks no eviction."""
        status, size, elsewhere = self._matched(session, session.digests(self._e.index, keys), keys.__getitem__)
        present = status == OK
        if not any(map(_GROUP_OF, keys)):
            return Matched(status, {0: _leading(present)}, size, elsewhere)
        prefix: dict[int, int] = {}
        broken: set[int] = set()
        for key, there in zip(keys, present.tolist(), strict=True):
            prefix.setdefault(key.group, 0)
            if not there:
                broken.add(key.group)
            elif key.group not in broken:
                prefix[key.group] += 1
        return Matched(status, prefix, size, elsewhere)

    def match_plain(self, session: Session, keys: Sequence[bytes]) -> Matched:
        """`match` of keys in group 0 of the default scope, of which no objects have to be made."""
        digests = session.plain_digests(self._e.index, keys)
        status, size, elsewhere = self._matched(session, digests, lambda i: BlockKey(keys[i]))
        return Matched(status, {0: _leading(status == OK)}, size, elsewhere)

    def _matched(
        self, session: Session, digests: Digests, key_at: Callable[[int], BlockKey]
    ) -> tuple[Status, int, Place | None]:
        self.require_open(session)
        self.admit(session)
        index, counters = self._e.index, self._e.counters
        rows = self._fresh(index.find(digests), session)
        away = self._away(rows)
        present = (rows >= 0) & ~away
        mine = rows[present]
        counters["match_keys"] += len(rows)
        counters["match_hits"] += len(mine)
        status = np.where(present, np.uint16(OK), np.uint16(Absent.code))
        status[away] = Unavailable.code
        elsewhere = None if len(mine) == len(rows) else self._explain(session, digests, status, key_at)
        return status, int(index.value_length.take(mine).sum(dtype=np.uint64)), elsewhere

    def _explain(
        self, session: Session, digests: Digests, status: Status, key_at: Callable[[int], BlockKey]
    ) -> Place | None:
        """Say in ``status`` why keys are absent as far as is known, and where the first of them is instead."""
        e, absent = self._e, np.flatnonzero(status == Absent.code)
        counts: dict[type[ForebayError], int] = {
            Absent: absent.size,
            Unavailable: int(np.count_nonzero(status == Unavailable.code)),
        }
        if e.evictions:
            evicted = absent[e.evictions.has(digests.take(absent, axis=0))]
            if evicted.size:
                status[evicted] = Evicted.code
                counts[Evicted] = evicted.size
                counts[Absent] -= evicted.size
        elsewhere = None
        if absent.size and status[first := int(absent[0])] == Absent.code and (places := e.places.others(session)):
            rows = e.index.find(e.places.digests(e.index, session.namespace, places, key_at(first)))
            found = np.flatnonzero(self._fresh(rows, session) >= 0)
            if found.size:
                elsewhere = places[int(found[0])]
                why = self._other(session, elsewhere)
                status[first] = why.code
                counts[why] = 1
                counts[Absent] -= 1
        for error, missed in counts.items():
            if missed:
                e.counters[f"match_misses_{reason(error.code)}"] += missed
        return elsewhere

    @staticmethod
    def _other(session: Session, place: Place) -> type[ForebayError]:
        """What being there makes of a key that is absent here."""
        if place.keyspace != session.schema.keyspace:
            return OtherKeyspace
        return StaleGeneration if place.generation < session.access.namespace.min_generation else OtherGeneration

    def _away(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of ``rows``, some of them perhaps `ABSENT`, lie on a drive that is away."""
        if not self._e.space.away.size:
            return np.zeros(len(rows), bool)
        return (rows >= 0) & self._e.space.is_away(self._e.index.volume[rows])

    # ------------------------------------------------------------------------------------------------ leases

    async def acquire(self, session: Session, keys: Sequence[BlockKey], ttl_ms: int) -> Located:
        """Lease and locate the keys that are there."""
        e, index = self._e, self._e.index
        stored, digests, rows = self.find(session, keys)
        status = np.where(rows >= 0, OK, Absent.code).astype(np.uint16)
        suspects = np.flatnonzero((rows >= 0) & (index.state[rows] == RowState.SUSPECT) & ~self._away(rows))
        if suspects.size:
            verdict = await self.verify(rows[suspects], [stored[i] for i in suspects.tolist()])
            self.require_open(session)  # time passed while the target read, and others moved
            self.admit(session)
            rows = self._fresh(index.find(digests), session)
            status = np.where(rows >= 0, OK, Absent.code).astype(np.uint16)
            still = (rows >= 0) & (index.state[rows] == RowState.SUSPECT)
            status[still] = Absent.code if verdict.complete else Unavailable.code
        status[self._away(rows)] = Unavailable.code
        crowded = (status == OK) & (index.leases[rows] >= _MAX_LEASES_PER_BLOCK)
        status[crowded] = Busy.code
        hits = np.flatnonzero(status == OK)
        mine = rows[hits]
        count = len(keys)
        lease = LeaseId(0)
        if hits.size:
            np.add.at(index.leases, mine, 1)
            e.policy.used(index, mine)
            self._next_lease += 1
            lease = LeaseId(self._next_lease)
            session.leases[lease] = Lease(lease, mine, e.clock.monotonic_ms() + ttl_ms)
        e.counters["acquire_hits"] += len(hits)
        e.counters["acquire_misses"] += count - len(hits)
        if len(hits) < count:
            for code, missed in zip(*np.unique(status[status != OK], return_counts=True), strict=True):
                e.counters[f"acquire_misses_{reason(int(code))}"] += int(missed)

        def column(values: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.generic]:
            out = np.zeros((count, *values.shape[1:]), dtype)
            out[hits] = values[mine]
            return out

        return Located(
            status,
            lease,
            ttl_ms,
            column(index.volume, "<u4"),  # type: ignore[arg-type]
            column(index.offset, "<u8"),  # type: ignore[arg-type]
            column(index.length, "<u8"),  # type: ignore[arg-type]
            column(index.value_length, "<u8"),  # type: ignore[arg-type]
            column(index.write_id, "<u8"),  # type: ignore[arg-type]
            column(index.tiles, "<u2"),  # type: ignore[arg-type]
            index.checksums(mine) if hits.size else b"",
        )

    def release(self, session: Session, leases: Sequence[int]) -> int:
        """Give leases back; unknown ones (expired) are no error. How many were held."""
        held = [lease for i in leases if (lease := session.leases.pop(LeaseId(i), None)) is not None]
        for lease in held:
            np.subtract.at(self._e.index.leases, lease.rows, 1)
            self._free_retired(lease.rows)
        return len(held)

    def expire_leases(self, session: Session) -> int:
        """End the leases whose deadline passed."""
        now_ms = self._e.clock.monotonic_ms()
        over = [lease.id for lease in session.leases.values() if lease.deadline_ms <= now_ms]
        return self.release(session, over)

    # ------------------------------------------------------------------------------------------------ small calls

    def touch(self, session: Session, keys: Sequence[BlockKey]) -> Status:
        """Count the keys as used."""
        rows = self.find(session, keys)[2]
        self._e.policy.used(self._e.index, rows[rows >= 0])
        return np.where(rows >= 0, OK, Absent.code).astype(np.uint16)

    async def pin(self, session: Session, keys: Sequence[BlockKey], pinned: bool, persistent: bool) -> Status:
        """Keep blocks from eviction, until the session ends or, ``persistent``, until they are unpinned."""
        check_keys(keys, unique=True)
        stored, _, rows = self.find(session, keys)
        index = self._e.index
        if persistent:
            await self._pin_records(stored, rows, pinned)
        else:
            for row in rows[rows >= 0].tolist():
                token = int(index.write_id[row, 0])
                held = session.pins.get(row) == token
                if pinned and not held:
                    session.pins[row] = token
                    index.pins[row] += 1
                elif not pinned and held:
                    del session.pins[row]
                    index.pins[row] -= 1
        return np.where(rows >= 0, OK, Absent.code).astype(np.uint16)

    async def _pin_records(self, stored: Sequence[StoredKey], rows: Rows, pinned: bool) -> None:
        e = self._e
        if e.store.problem is not None:
            raise e.store.problem
        ops: list[Op] = []
        changed: list[StoredKey] = []
        for key, row in zip(stored, rows.tolist(), strict=True):
            value = e.store.get("blocks", key) if row >= 0 else None
            if value is None:
                continue
            record = Record.decode(value)
            flags = record.flags | PINNED if pinned else record.flags & ~PINNED
            e.index.flags[row] = flags
            changed.append(key)
            ops.append(Op("blocks", key, record.with_flags(flags).encode()))
        if ops:
            numbers, logged = e.changes.enter(changed)
            try:
                await e.store.write(ops + logged)
            finally:
                # of one that failed nobody is told, so it may be in the record, in a checkpoint, in both or neither
                e.changes.settle(numbers)

    def unpin_all(self, session: Session) -> None:
        """End a session's pins."""
        index = self._e.index
        for row, token in session.pins.items():
            if index.state[row] in (RowState.VISIBLE, RowState.SUSPECT) and int(index.write_id[row, 0]) == token:
                index.pins[row] -= 1
        session.pins.clear()

    def stat(self, session: Session, keys: Sequence[BlockKey]) -> list[BlockStat | None]:
        """What is known of each key, None where there is no block."""
        stored, _, rows = self.find(session, keys)
        index, values = self._e.index, self._e.store.multi_get("blocks", stored)
        found: list[BlockStat | None] = []
        for value, row in zip(values, rows.tolist(), strict=True):
            if value is None or row < 0:
                found.append(None)
                continue
            record = Record.decode(value)
            # the operator's pin, which is in the record, counts as one more
            pins = int(index.pins[row]) + bool(record.flags & PINNED)
            found.append(BlockStat(record, pins, int(index.leases[row])))
        return found

    def listing(
        self, session: Session, *, group: int, scope: int, prefix: bytes, after: bytes, limit: int
    ) -> tuple[list[ListedBlock], bytes]:
        """A page of keys in byte order, and the cursor of the next one (empty: no more). Listed means readable."""
        self.admit(session)
        head = stored_prefix(session.namespace, session.schema.keyspace, session.generation, scope, group)
        page: list[tuple[StoredKey, Record]] = []
        cursor = b""
        for key, value in self._e.store.scan("blocks", head + after + b"\0" if after else head + prefix, head + prefix):
            if len(page) == limit:
                cursor = page[-1][0][len(head) :]
                break
            page.append((StoredKey(key), Record.decode(value)))
        rows = self._fresh(self._e.index.find(self._e.index.digests([key for key, _ in page])), session)
        rows[self._away(rows)] = ABSENT
        listed = [
            ListedBlock(key[len(head) :], record.value_bytes, record.created_ms)
            for (key, record), row in zip(page, rows.tolist(), strict=True)
            if row >= 0
        ]
        return listed, cursor

    async def delete(self, session: Session, keys: Sequence[BlockKey]) -> tuple[Status, int]:
        """Delete blocks, pinned ones too; durable when this returns. Status of each and bytes that become free."""
        check_keys(keys, unique=True)
        stored, _, rows = self.find(session, keys)
        there = np.flatnonzero(rows >= 0)
        size = int(self._e.index.length[rows[there]].sum(dtype=np.uint64))
        if there.size:
            await self.retire(rows[there], [stored[i] for i in there.tolist()], "deleted")
        return np.where(rows >= 0, OK, Absent.code).astype(np.uint16), size

    # ------------------------------------------------------------------------------------------------ the end of blocks

    def keys_of(self, rows: Rows) -> list[StoredKey]:
        """Stored keys of visible rows, from the owners family. Raises `MetadataCorrupt`."""
        keys = [key for key in self._owners(rows) if key is not None]
        if len(keys) != len(rows):
            raise MetadataCorrupt("an extent of the index has no owner in metadata", field="owners")
        return keys

    def _owners(self, rows: Rows) -> list[StoredKey | None]:
        index = self._e.index
        places = zip(index.volume[rows].tolist(), index.offset[rows].tolist(), strict=True)
        found = self._e.store.multi_get("owners", [owner_key(v, o) for v, o in places])
        return [None if key is None else StoredKey(key) for key in found]

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
        self._served.difference_update(rows.tolist())
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
        self._free_retired(rows)

    def _free_retired(self, rows: Rows) -> None:
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

    async def retire_expired(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """Make way for new blocks under keys whose old ones have outlived their time."""
        if not session.access.namespace.ttl_ms:
            return
        stored, digests, rows = self.find(session, keys)
        linked = self._e.index.find(digests)
        over = np.flatnonzero((rows < 0) & (linked >= 0))
        if over.size:
            await self.retire(linked[over], [stored[i] for i in over.tolist()], "expired")

    async def retire_lost(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """Make way for new blocks under keys whose old ones lie on a drive that is away."""
        if not self._e.space.away.size:
            return
        stored, _, rows = self.find(session, keys, expired=True)
        over = np.flatnonzero(self._away(rows))
        if over.size:
            await self.retire(rows[over], [stored[i] for i in over.tolist()], "lost")

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
        rows = rows[np.argsort(index.tick[rows], kind="stable")][:_RETIRE_BATCH]
        rows = rows[np.cumsum(index.length[rows], dtype=np.uint64) <= budget_bytes]
        if rows.size:
            size = int(index.length[rows].sum(dtype=np.uint64))
            await self.retire(rows, self.keys_of(rows), why)
            return size
        return 0

    # ------------------------------------------------------------------------------------------------ verification

    async def verify(self, rows: Rows, stored_keys: Sequence[StoredKey]) -> Verdict:
        """Read blocks at the target and compare their checksums: bad ones are dropped, good suspects are served again.

        What the target could not say of stays as it was.
        """
        e, index = self._e, self._e.index
        by_volume: dict[VolumeId, dict[int, _Asked]] = {}
        away = self._away(rows)
        if away.any():
            there = np.flatnonzero(~away)
            rest = await self.verify(rows[there], [stored_keys[i] for i in there.tolist()])
            return replace(rest, unread=rest.unread + int(away.sum()))
        if not rows.size:
            return Verdict()
        corrupt: list[MetadataCorrupt] = []
        for row, key in zip(rows.tolist(), stored_keys, strict=True):
            try:
                ranges = self._ranges(row, key)
            except MetadataCorrupt as error:
                corrupt.append(error)
                continue
            asked = by_volume.setdefault(VolumeId(int(index.volume[row])), {})
            asked[row] = _Asked(key, ranges)  # once, however often it was asked for
        if corrupt:
            _log.error("%d blocks cannot be verified: %s", len(corrupt), corrupt[0])
        specs = {volume: e.space.specs[volume] for volume in by_volume}
        held = np.unique(rows)
        index.leases[held] += 1  # so that nobody reuses rows or extents meanwhile
        try:
            parts = [await self._verify(specs[volume], asked) for volume, asked in by_volume.items()]
        finally:
            index.leases[held] -= 1
            self._free_retired(held)
        good, bad, unread, unknown = (sum(part) for part in zip((0, 0, len(corrupt), 0), *parts, strict=True))
        return Verdict(good, bad, unread, unknown)

    async def _verify(self, spec: VolumeSpec, asked: dict[int, _Asked]) -> tuple[int, int, int, int]:
        """`verify` within one volume, all rows held: good, bad, unread, unknown."""
        e = self._e
        try:
            found = await e.target.checksums(spec, [one for block in asked.values() for one in block.ranges])
        except TargetFailed as error:
            if len(asked) > 1:  # one of them cannot be read; which, or is it the drive?
                if (drive := await self._drive_reads(spec)) is not True:
                    return (0, 0, len(asked), 0) if drive is False else (0, 0, 0, len(asked))
                parts = [await self._verify(spec, {row: block}) for row, block in asked.items()]
                good, bad, unread, unknown = (sum(part) for part in zip(*parts, strict=True))
                return good, bad, unread, unknown
            _log.warning("volume %d: a block cannot be read: %s", spec.volume, error)
            return await self._unread(spec, asked)
        except ForebayError as error:
            _log.warning("volume %d: blocks cannot be verified: %s", spec.volume, error)
            return 0, 0, 0, len(asked)
        rows = np.array(list(asked), dtype=np.int64)
        standing = int(findable(e.index.state[rows]).sum())
        wrong = self._judge(rows, found)
        e.counters["blocks_verified"] += len(asked)
        if wrong.size and e.store.problem is not None:
            # they cannot be deleted at present: nobody gets them before they can be
            self._suspect(wrong)
            return standing - len(wrong), 0, 0, len(wrong)
        if wrong.size:
            # a suspect may have been lost with the power, which says nothing of the medium, unless it was flushed or
            # served
            settled = (e.index.state[wrong] == RowState.VISIBLE) | (e.index.flags[wrong] & FLUSHED != 0)
            settled |= np.isin(wrong, list(self._served))
            keep = self._to_quarantine(wrong[settled], "checksum")
            _log.warning(
                "volume %d: bytes of blocks at %s are not those that were stored: dropped, %d of %d to quarantine",
                *(spec.volume, ", ".join(map(str, e.index.offset[wrong].tolist())), len(keep), len(wrong)),
            )
            await self.retire(wrong, [asked[row].stored_key for row in wrong.tolist()], "bad", keep)
        return standing - len(wrong), len(wrong), 0, 0

    async def _unread(self, spec: VolumeSpec, asked: dict[int, _Asked]) -> tuple[int, int, int, int]:
        """One block, held, that the drive did not give: it is bad if the drive gives others, such as the label."""
        e = self._e
        if (drive := await self._drive_reads(spec)) is not True:
            return (0, 0, 1, 0) if drive is False else (0, 0, 0, 1)
        rows = np.array(list(asked), dtype=np.int64)
        rows = rows[findable(e.index.state[rows])]
        if rows.size and e.store.problem is not None:
            return 0, 0, 0, 1
        if rows.size:
            keys = [asked[row].stored_key for row in rows.tolist()]
            await self.retire(rows, keys, "bad", self._to_quarantine(rows, "read_error"))
        return 0, len(rows), 0, 0

    async def _drive_reads(self, spec: VolumeSpec) -> bool | None:
        """Whether the drive gives at least the volume's label; None when the target does not say."""
        try:
            await self._e.target.checksums(spec, [(0, LBA_BYTES, 0)])
        except TargetFailed:
            return False
        except ForebayError:
            return None
        return True

    def _to_quarantine(self, rows: Rows, reason: str) -> list[Quarantined]:
        """Entries for the extents of bad blocks, as long as the volume may lose them."""
        e, index, entries = self._e, self._e.index, []
        spare: dict[int, int] = {}
        for row in rows.tolist():
            extent = Extent(VolumeId(int(index.volume[row])), int(index.offset[row]), int(index.length[row]))
            left = spare.setdefault(extent.volume, e.space.quarantine_left_bytes(extent.volume))
            if extent.length_bytes <= left:
                spare[extent.volume] = left - extent.length_bytes
                entries.append(Quarantined(extent, reason, e.clock.wall_ms()))
        return entries

    def _judge(self, rows: Rows, found: Sequence[int]) -> Rows:
        """Let suspects whose checksums are as ``found`` be visible; the blocks that are not, of those still there."""
        index = self._e.index
        at, wrong = 0, []
        for row, tiles in zip(rows.tolist(), index.tiles[rows].tolist(), strict=True):
            if index.state[row] in (RowState.VISIBLE, RowState.SUSPECT):
                want = np.frombuffer(index.checksums(np.array([row])), "<u4").tolist()
                if found[at : at + tiles] == want:
                    index.state[row] = RowState.VISIBLE
                    self._served.discard(row)
                else:
                    wrong.append(row)
            at += tiles
        return np.array(wrong, dtype=np.int64)

    def _suspect(self, rows: Rows) -> None:
        self._served.update(rows[self._e.index.state[rows] == RowState.VISIBLE].tolist())
        self._e.index.suspect(rows)

    async def doubt(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """A reader says that these did not verify: they are not served again before the target has read them.

        The reader is not believed, only heard: what the node finds sound stays.
        """
        stored, _, rows = self.find(session, keys[:_VERIFY_BATCH])
        found = np.flatnonzero(rows >= 0)
        if found.size:
            self._suspect(rows[found])
            self._e.counters["blocks_doubted"] += len(found)
            await self.verify(rows[found], [stored[i] for i in found.tolist()])

    async def verify_rows(self, rows: Rows) -> Verdict:
        """`verify` of blocks by their rows alone; those that metadata do not name are ``unread``."""
        try:
            keys = self._owners(rows)
        except MetadataCorrupt as error:
            _log.error("%d blocks cannot be verified: %s", len(rows), error)
            return Verdict(unread=len(rows))
        named = [i for i, key in enumerate(keys) if key is not None]
        if len(named) < len(rows):
            _log.error("%d blocks have no owner in metadata and cannot be verified", len(rows) - len(named))
        verdict = await self.verify(rows[named], [key for key in keys if key is not None])
        return replace(verdict, unread=verdict.unread + len(rows) - len(named))

    async def verify_some(self) -> int:
        """Verify a few suspects in the background, others each time; how many were looked at."""
        index = self._e.index
        if not index.suspects_left:
            return 0
        suspects = np.flatnonzero(index.state[: index.high] == RowState.SUSPECT)
        suspects = suspects[~self._away(suspects)]
        index.suspects_left = bool(suspects.size)  # what is on a drive that is away is doubted anew when that is back
        if not suspects.size:
            self._next_suspect, self._went_round = 0, False
            return 0
        # on from the last one: those that cannot be verified at present keep no others waiting
        turn = suspects[suspects >= self._next_suspect][:_VERIFY_BATCH]
        if not turn.size:
            turn, self._went_round = suspects[:_VERIFY_BATCH], True
        self._next_suspect = int(turn[-1]) + 1
        await self.verify_rows(turn)
        return len(turn)

    @property
    def sweeping(self) -> bool:
        """Whether there are suspects that `verify_some` has not come to yet."""
        return self._e.index.suspects_left and not self._went_round

    def _ranges(self, row: int, stored: StoredKey) -> Sequence[tuple[int, int, int]]:
        index = self._e.index
        _, keyspace, _, block = split_stored_key(stored)
        layout = self.schema(keyspace).groups[block.group].layout(int(index.value_length[row]))
        return tile_ranges(stored, index.write_id[row].tobytes(), layout, int(index.offset[row]))

    def schema(self, keyspace: bytes) -> Schema:
        """The schema of a keyspace that blocks were stored under. Raises `MetadataCorrupt`."""
        schema = self._schemas.get(keyspace)
        if schema is None:
            data = self._e.store.get("keyspaces", keyspace)
            if data is None:
                raise MetadataCorrupt(f"keyspace {keyspace.hex()} has no schema", field="keyspaces")
            schema = self._schemas[keyspace] = Schema.from_cbor(data)
        return schema
