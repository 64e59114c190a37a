"""Visible blocks: found, leased, read, listed, pinned, deleted.

Between two awaits nothing else runs: what a method checks and then changes without awaiting is atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.misses import Place
from forebay.appliance.namespace.records import PINNED, Record
from forebay.appliance.namespace.retirement import Retirement
from forebay.appliance.namespace.sessions import Lease, Session, SessionState
from forebay.appliance.namespace.store import Op
from forebay.appliance.namespace.verification import Verification
from forebay.errors import (
    OK,
    Absent,
    Busy,
    Evicted,
    ForebayError,
    OtherGeneration,
    OtherKeyspace,
    SessionExpired,
    StaleGeneration,
    Unavailable,
    reason,
)
from forebay.ids import MAX_BATCH_KEYS, BlockKey, LeaseId, StoredKey, check_keys, stored_prefix
from forebay.index import ABSENT, Digests, Rows, RowState

__all__ = ["BlockStat", "Blocks", "ListedBlock", "Located", "Matched"]

_GROUP_OF = attrgetter("group")
_MAX_LEASES_PER_BLOCK = 65_000 - MAX_BATCH_KEYS
"""The count has 16 bits, and one batch may name a block as often as it has keys."""
_DOUBT_BATCH = 64

_SUSPECT = int(RowState.SUSPECT)
"""To compare columns with: looking up a member of an enumeration takes longer than that."""

Status = npt.NDArray[np.uint16]


def _presence(rows: Rows) -> Status:
    """The status of each of ``rows`` by whether there is one."""
    status = np.zeros(len(rows), np.uint16)
    status[rows < 0] = Absent.code
    return status


def _leading(present: npt.NDArray[np.bool_]) -> int:
    """How many are present before the first that is not."""
    return len(present) if present.all() else int(np.argmin(present))


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
class ListedBlock:
    """One line of a listing."""

    key: bytes
    value_bytes: int
    created_ms: int


class Blocks:
    """The engine's reading side."""

    def __init__(self, engine: Engine, retirement: Retirement, verification: Verification) -> None:
        self._e = engine
        self._retirement = retirement
        self._verification = verification
        self._next_lease = int.from_bytes(engine.random(4), "little") << 16

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
        away = self._e.away(rows)
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

    # ------------------------------------------------------------------------------------------------ leases

    def acquire_at_once(self, session: Session, keys: Sequence[BlockKey], ttl_ms: int) -> Located | None:
        """`acquire`, if none of the keys has to be verified first, as mostly; else None, and nothing was done."""
        self.require_open(session)
        self.admit(session)
        index = self._e.index
        rows = self._fresh(index.find(session.digests(index, keys)), session)
        return None if self._doubted(rows).size else self._lease(session, rows, _presence(rows), ttl_ms)

    async def acquire(self, session: Session, keys: Sequence[BlockKey], ttl_ms: int) -> Located:
        """Lease and locate the keys that are there."""
        index = self._e.index
        stored, digests, rows = self.find(session, keys)
        status, suspects = _presence(rows), self._doubted(rows)
        if suspects.size:
            verdict = await self._verification.verify(rows[suspects], [stored[i] for i in suspects.tolist()])
            self.require_open(session)  # time passed while the target read, and others moved
            self.admit(session)
            rows = self._fresh(index.find(digests), session)
            status = _presence(rows)
            still = (rows >= 0) & (index.state[rows] == _SUSPECT)
            status[still] = Absent.code if verdict.complete else Unavailable.code
        return self._lease(session, rows, status, ttl_ms)

    def _doubted(self, rows: Rows) -> Rows:
        """Which of ``rows``, by position, are to be verified before they are served, and can be."""
        suspects: Rows = (self._e.index.state.take(rows) == _SUSPECT).nonzero()[0]
        if suspects.size:
            found = rows[suspects]
            suspects = suspects[(found >= 0) & ~self._e.away(found)]
        return suspects

    def _lease(self, session: Session, rows: Rows, status: Status, ttl_ms: int) -> Located:
        """Lease and locate the ``rows`` whose status is 0."""
        e, index, count = self._e, self._e.index, len(rows)
        if e.space.away.size:
            status[self._e.away(rows)] = Unavailable.code
        status[(status == OK) & (index.leases.take(rows) >= _MAX_LEASES_PER_BLOCK)] = Busy.code
        hits = (status == OK).nonzero()[0]
        whole = hits.size == count
        mine = rows if whole else rows[hits]
        lease = LeaseId(0)
        if hits.size:
            np.add.at(index.leases, mine, 1)
            e.policy.used(index, mine)
            self._next_lease += 1
            lease = LeaseId(self._next_lease)
            session.leases[lease] = Lease(lease, mine, e.clock.monotonic_ms() + ttl_ms)
        e.counters["acquire_hits"] += hits.size
        e.counters["acquire_misses"] += count - hits.size
        if not whole:
            for code, missed in zip(*np.unique(status[status != OK], return_counts=True), strict=True):
                e.counters[f"acquire_misses_{reason(int(code))}"] += int(missed)

        def column(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
            found = values.take(mine, axis=0)
            if whole:
                return found.astype(dtype, copy=False)
            out = np.zeros((count, *values.shape[1:]), dtype)
            out[hits] = found
            return out

        return Located(
            status,
            lease,
            ttl_ms,
            column(index.volume, "<u4"),
            column(index.offset, "<u8"),
            column(index.length, "<u8"),
            column(index.value_length, "<u8"),
            column(index.write_id, "<u8"),
            column(index.tiles, "<u2"),
            index.checksums(mine) if hits.size else b"",
        )

    def release(self, session: Session, leases: Sequence[int]) -> int:
        """Give leases back; unknown ones (expired) are no error. How many were held."""
        held = [lease for i in leases if (lease := session.leases.pop(LeaseId(i), None)) is not None]
        if held:
            rows = np.concatenate([lease.rows for lease in held])
            np.subtract.at(self._e.index.leases, rows, 1)
            self._retirement.free_unleased(rows)
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
        rows[self._e.away(rows)] = ABSENT
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
            await self._retirement.retire(rows[there], [stored[i] for i in there.tolist()], "deleted")
        return np.where(rows >= 0, OK, Absent.code).astype(np.uint16), size

    # ------------------------------------------------------------------------------------------------ what ends some

    async def retire_expired(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """Make way for new blocks under keys whose old ones have outlived their time."""
        if not session.access.namespace.ttl_ms:
            return
        stored, digests, rows = self.find(session, keys)
        linked = self._e.index.find(digests)
        over = np.flatnonzero((rows < 0) & (linked >= 0))
        if over.size:
            await self._retirement.retire(linked[over], [stored[i] for i in over.tolist()], "expired")

    async def retire_lost(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """Make way for new blocks under keys whose old ones lie on a drive that is away."""
        if not self._e.space.away.size:
            return
        stored, _, rows = self.find(session, keys, expired=True)
        over = np.flatnonzero(self._e.away(rows))
        if over.size:
            await self._retirement.retire(rows[over], [stored[i] for i in over.tolist()], "lost")

    async def doubt(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """A reader says that these did not verify: they are not served again before the target has read them.

        The reader is not believed, only heard: what the node finds sound stays.
        """
        stored, _, rows = self.find(session, keys[:_DOUBT_BATCH])
        found = np.flatnonzero(rows >= 0)
        if found.size:
            self._verification.suspect(rows[found])
            self._e.counters["blocks_doubted"] += len(found)
            await self._verification.verify(rows[found], [stored[i] for i in found.tolist()])
