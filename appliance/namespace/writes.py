"""Writing blocks: Allocate, Commit, Abort, and taking back what was never committed.

=========== ================================================= =========================================================
write       moved by                                          next
=========== ================================================= =========================================================
allocating  Allocate reserved the key and looks for room      writing (extent and grants there), or gone (no room)
writing     ranks on the grant's hosts write, commit tiles    committing (last tile committed); fencing (abort,
                                                              deadline, session's end)
committing  grant sealed (revoked, barrier), record durable;  visible; writing again if the target or metadata failed
fencing     grant revoked; every host of it torn down that    free
            has not reported all its commands complete
=========== ================================================= =========================================================

The order inside a commit is what makes a visible block safe: no grant is left that could change its bytes, its bytes
are stable (as its policy says) before its record is, and only then can it be found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from forebay.appliance.dataplane.extents import slot_class_bytes
from forebay.appliance.dataplane.interface import Barrier, WriteGrant
from forebay.appliance.namespace.blocks import Blocks
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.records import FLUSHED, Durability, Record, owner_key
from forebay.appliance.namespace.retirement import Retirement
from forebay.appliance.namespace.room import Room
from forebay.appliance.namespace.seals import SharedSeal
from forebay.appliance.namespace.sessions import PendingWrite, Session, SessionState, WriteState
from forebay.appliance.namespace.store import Op
from forebay.crashpoints import crash_point
from forebay.errors import (
    OK,
    Absent,
    AlreadyExists,
    ForebayError,
    GridInvalid,
    InvalidArgument,
    NoSpace,
    Pending,
    SessionExpired,
    StaleGeneration,
    TargetFailed,
    Unavailable,
    ValueSize,
    WriteExpired,
    WriteFenced,
)
from forebay.ids import BlockKey, Extent, GrantId, HostIdentity, StoredKey, VolumeId, WriteId, check_keys
from forebay.index import RowState
from forebay.schema import TileLayout

__all__ = ["Allocation", "TileSum", "Writes"]

_log = logging.getLogger(__name__)
_GIVE_UP_MS = 5_000
_MAX_TICKED_MS = ((1 << 32) - 1) * 1000  # the index keeps seconds in 32 bits


@dataclass(frozen=True, slots=True)
class Allocation:
    """One row of Allocate's answer; ``extent`` is None unless ``status`` is 0. Write commands must carry ``tag``."""

    status: int
    write_id: WriteId
    extent: Extent | None
    tag: int = 0


@dataclass(frozen=True, slots=True)
class TileSum:
    """One committed tile: its number and the checksum of its exact bytes."""

    tile: int
    checksum: int


class Writes:
    """The engine's writing side. One event loop owns it."""

    def __init__(self, engine: Engine, blocks: Blocks, retirement: Retirement, room: Room) -> None:
        self._e = engine
        self._blocks = blocks
        self._retirement = retirement
        self._room = room
        self._by_digest: dict[bytes, PendingWrite] = {}
        self._next_grant = 1
        self._last_tag = 0
        self._seals: dict[VolumeId, SharedSeal] = {}
        self._replaying = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._by_digest)

    def pending(self, digest: bytes) -> PendingWrite | None:
        """Who writes this key."""
        return self._by_digest.get(digest)

    def pending_bytes(self, namespace: int) -> int:
        """Bytes of extents of a namespace that are not visible yet."""
        mine = (w for w in self._by_digest.values() if w.session.namespace == namespace)
        return sum(w.extent.length_bytes for w in mine if w.extent is not None)

    async def replay_grants(self) -> None:
        """Tell a target that restarted what is being written."""
        async with self._replaying:
            grants = self._live_grants()
            await self._e.target.revoke([g.grant for g in grants])
            await self._e.target.grant(grants)

    async def _close_grants(self, writes: Sequence[PendingWrite]) -> None:
        """Revoke the grants of writes that have left the state in which a replay takes them for live."""
        await self._replayed()
        await self._e.target.revoke(_grants(writes))

    async def _replayed(self) -> None:
        """Let a replay end that saw writes as live: it would open their grants after they were revoked, for ever."""
        async with self._replaying:
            pass

    def _live_grants(self) -> list[WriteGrant]:
        return [
            WriteGrant(w.grant, w.hosts, w.extent, w.tag)
            for w in self._by_digest.values()
            if w.state is WriteState.WRITING
            and w.extent is not None
            and w.grant is not None
            # not of sessions that end, nor what nobody was told of: the next sweep fences those
            and w.session.state is SessionState.OPEN
            and w.deadline_ms
            and w.extent.volume in self._e.space.specs
        ]

    # ------------------------------------------------------------------------------------------------ Allocate

    async def allocate(
        self,
        session: Session,
        keys: Sequence[BlockKey],
        value_bytes: Sequence[int] | None,
        *,
        hosts: Sequence[HostIdentity],
        ttl_ms: int,
        tails: Sequence[bytes],
        retain_until_ms: int,
    ) -> list[Allocation]:
        """Give each key an extent that ``hosts`` may write, or say that it is present or pending, or there is no room.

        One of the session's processes calls this, the leader of a group; the others learn write ids and extents from
        it. A host that joins later may not write.
        """
        check_keys(keys, unique=True)
        trouble = self._e.store.problem or self._e.reserve.problem
        if trouble is not None:
            raise trouble  # or blocks would be evicted for what cannot be committed
        layouts = [self._layout(session, key, value_bytes[i] if value_bytes else None) for i, key in enumerate(keys)]
        await self._blocks.retire_expired(session, keys)
        await self._blocks.retire_lost(session, keys)
        stored, digests, rows = self._blocks.find(session, keys, expired=True)
        self._e.policy.used(self._e.index, rows[rows >= 0])  # who stores a block again will want it
        status = [OK if row < 0 else AlreadyExists.code for row in rows.tolist()]
        deadline_ms = self._e.clock.monotonic_ms() + ttl_ms
        writes: dict[int, PendingWrite] = {}
        for i, row in enumerate(rows.tolist()):
            digest = digests[i].tobytes()
            if row >= 0:
                continue
            if digest in self._by_digest:
                status[i] = Pending.code
                continue
            write = self._new_write(session, stored[i], digest, layouts[i], deadline_ms)
            write.scope, write.tail = keys[i].scope, tails[i]
            write.retain_until_ms = max(write.retain_until_ms, min(retain_until_ms, _MAX_TICKED_MS))
            writes[i] = self._by_digest[digest] = write
        try:
            await self._find_room(session, keys, writes, status)
            await self._grant(session, writes, hosts)
        except BaseException:
            self._doom(writes.values())
            raise
        none = WriteId(bytes(16))
        return [
            Allocation(code, writes[i].write_id, writes[i].extent, writes[i].tag)
            if code == OK
            else Allocation(code, none, None)
            for i, code in enumerate(status)
        ]

    @staticmethod
    def _layout(session: Session, key: BlockKey, value_bytes: int | None) -> TileLayout:
        groups = session.schema.groups
        if key.group >= len(groups):
            raise InvalidArgument(f"group {key.group} is not in the schema", field="keys.groups", limit=len(groups) - 1)
        return groups[key.group].layout(value_bytes)

    def _new_write(
        self, session: Session, stored: StoredKey, digest: bytes, layout: TileLayout, deadline_ms: int
    ) -> PendingWrite:
        namespace, now_ms = session.access.namespace, self._e.clock.wall_ms()
        return PendingWrite(
            WriteId(self._e.random(16)),
            stored,
            digest,
            session,
            layout,
            Durability(namespace.durability),
            deadline_ms,
            retain_until_ms=min(now_ms + namespace.retention_ms, _MAX_TICKED_MS) if namespace.retention_ms else 0,
            expires_ms=min(now_ms + namespace.ttl_ms, _MAX_TICKED_MS) if namespace.ttl_ms else 0,
        )

    async def _find_room(
        self, session: Session, keys: Sequence[BlockKey], writes: dict[int, PendingWrite], status: list[int]
    ) -> None:
        by_slot: dict[tuple[int, int], list[int]] = {}
        for i, write in writes.items():
            size = write.layout.extent_bytes
            if session.schema.groups[keys[i].group].kind == "opaque":
                size = slot_class_bytes(size)  # values of any size: a region for each would take the whole drive
            by_slot.setdefault((write.scope, size), []).append(i)
        for (scope, slot_bytes), indices in by_slot.items():
            if slot_bytes > self._e.space.region_bytes:
                raise ValueSize(
                    f"a block takes {slot_bytes} bytes", field="length_bytes", limit=self._e.space.region_bytes
                )
            extents, why = await self._room.take(session.access.namespace, scope, slot_bytes, len(indices))
            for i, extent in zip(indices, extents, strict=False):
                writes[i].extent = extent
            for i in indices[len(extents) :]:
                status[i] = why
                self._forget(writes.pop(i))

    async def _grant(self, session: Session, writes: dict[int, PendingWrite], hosts: Sequence[HostIdentity]) -> None:
        crash_point("allocate.before_grant")
        self._last_tag = self._last_tag % 0xFFFFFFFF + 1
        grants = []
        for write in writes.values():
            write.hosts, write.tag = tuple(hosts), self._last_tag
            write.grant = GrantId(self._next_grant)
            self._next_grant += 1
            grants.append(WriteGrant(write.grant, write.hosts, cast(Extent, write.extent), write.tag))
        if grants:
            await self._e.target.grant(grants)
        crash_point("allocate.after_grant")
        if session.state is not SessionState.OPEN:
            raise SessionExpired("the session ended while the call ran", field="context.session")
        for write in writes.values():
            write.state = WriteState.WRITING
            session.writes[write.write_id] = write
        self._e.counters["allocated_blocks"] += len(writes)

    def _doom(self, writes: Iterable[PendingWrite]) -> None:
        """Allocate failed half-way: the next sweep fences and frees what it had taken."""
        for write in writes:
            if write.extent is None:
                self._forget(write)
            else:
                write.state = WriteState.WRITING
                write.deadline_ms = 0
                write.session.writes[write.write_id] = write

    def _forget(self, write: PendingWrite) -> None:
        self._by_digest.pop(write.digest, None)
        write.session.writes.pop(write.write_id, None)
        # Who waits learns at once that this producer is gone; those of a commit that succeeded were told before.
        self._e.waiters.wake([write.digest], Absent.code)

    # ------------------------------------------------------------------------------------------------ Commit

    async def commit(
        self,
        session: Session,
        rows: Sequence[tuple[WriteId, Sequence[TileSum]]],
        *,
        host: HostIdentity | None = None,
    ) -> list[int]:
        """Record tiles as written; blocks whose grid is covered become durable and visible.

        Status of each: 0 visible, `Pending` when tiles of other ranks are missing, `WriteFenced` when ``host``, the
        one that says it wrote, has no grant. Repeating a commit gets the first one's answer. Raises `GridInvalid`, and
        then nothing of the call was done.
        """
        found = [session.writes.get(write_id) for write_id, _ in rows]
        said: dict[WriteId, dict[int, int]] = {}
        for i, (write, (write_id, sums)) in enumerate(zip(found, rows, strict=True)):
            if write is not None:
                _check_tiles(write, said.setdefault(write_id, {}), sums, i)
        recent = dict(session.recent) if None in found else {}
        status: list[int] = []
        ready: list[PendingWrite] = []
        waiting: dict[int, asyncio.Future[int]] = {}
        for i, (write, (write_id, sums)) in enumerate(zip(found, rows, strict=True)):
            if write is None or write.doomed or write.state in (WriteState.ALLOCATING, WriteState.FENCING):
                status.append(recent.get(write_id, WriteExpired.code))
                continue
            if host is not None and host not in write.hosts:
                status.append(WriteFenced.code)
                continue
            if write.state is WriteState.WRITING:
                write.checksums.update((s.tile, s.checksum) for s in sums)
                if host is not None:
                    write.told.add(host)
                if write.complete:
                    write.state = WriteState.COMMITTING
                    write.done = asyncio.get_running_loop().create_future()
                    ready.append(write)
            if write.done is not None:
                waiting[i] = write.done
            status.append(Pending.code)
        if ready:
            await asyncio.shield(asyncio.ensure_future(self._make_visible(ready)))
        for i, done in waiting.items():
            status[i] = await asyncio.shield(done)
        return status

    async def _make_visible(self, writes: list[PendingWrite]) -> None:
        """Runs to its end whatever happens to the call that began it; every write gets an outcome."""
        groups: dict[tuple[Durability, VolumeId], list[PendingWrite]] = {}
        for write in writes:
            groups.setdefault((write.policy, cast(Extent, write.extent).volume), []).append(write)
        # a volume that fails takes only its own blocks
        commits = [self._finish_commit(policy, group) for (policy, _), group in groups.items()]
        if len(commits) == 1:  # nearly always, and then no task is needed
            await commits[0]
        else:
            await asyncio.gather(*commits)

    async def _finish_commit(self, policy: Durability, group: list[PendingWrite]) -> None:
        try:
            code = await self._commit_group(policy, group)
        except ForebayError as error:
            _log.warning("commit of %d blocks failed: %s", len(group), error)
            code = error.code
        except Exception:  # outcomes must be set, or callers wait for ever
            _log.exception("commit of %d blocks failed", len(group))
            code = Unavailable.code
        for write in group:
            done = cast("asyncio.Future[int]", write.done)
            if code == OK:
                self._forget(write)
                write.session.recent.append((write.write_id, OK))
            elif code == StaleGeneration.code:
                # grants are gone: nothing can write here any more
                self._free(write)
                write.session.recent.append((write.write_id, code))
            else:
                # may be tried again until its deadline, which fences and frees it
                write.state, write.done = WriteState.WRITING, None
            if not done.done():
                done.set_result(code)

    async def _commit_group(self, policy: Durability, group: list[PendingWrite]) -> int:
        e = self._e
        crash_point("commit.before_revoke")
        extents = {w.write_id: cast(Extent, w.extent) for w in group}
        await self._silence(group)
        flushed: set[VolumeId] = set()
        if policy is Durability.FLUSH:
            flushed = await self._seal(group)
        else:
            await self._close_grants(group)
        crash_point("commit.after_data_before_metadata")
        await self._retirement.let_deletes_pass([w.stored_key for w in group])
        try:
            self._blocks.admit(group[0].session)
        except StaleGeneration as error:
            await self._unrecord([w for w in group if w.recorded])
            return error.code
        ops, records = [], []
        numbers, logged = e.changes.enter([w.stored_key for w in group])
        for write, number in zip(group, numbers, strict=True):
            write.recorded = True
            extent = extents[write.write_id]
            record = Record(
                write.write_id,
                extent,
                write.layout.value_bytes,
                tuple(write.checksums[t] for t in range(write.layout.tiles)),
                policy,
                number,
                e.clock.wall_ms(),
                write.retain_until_ms,
                write.expires_ms,
                FLUSHED if extent.volume in flushed else 0,
                tail=write.tail,
            )
            records.append(record)
            ops.append(Op("blocks", write.stored_key, record.encode()))
            ops.append(Op("owners", owner_key(extent.volume, extent.offset_bytes), write.stored_key))
        try:
            await e.store.write(ops + logged, durable=policy is not Durability.VOLATILE)
        except BaseException:
            e.changes.fail(numbers)
            raise
        crash_point("commit.after_metadata_before_visible")
        self._link(group, records)
        e.changes.settle(numbers)
        return OK

    async def _silence(self, group: Sequence[PendingWrite]) -> None:
        """Tear down hosts that could write to these blocks and did not say that they are done.

        Not where the target fences: their grants are revoked there. Elsewhere what they write late would change a
        block that is visible.
        """
        silent = dict.fromkeys(h for w in group for h in w.hosts if h not in w.told)
        if silent and not (await self._e.target.able()).fencing:
            for host in silent:
                await self._e.target.teardown_host(host)

    def _link(self, group: list[PendingWrite], records: list[Record]) -> None:
        e = self._e
        digests = np.frombuffer(b"".join(w.digest for w in group), "<u8").reshape(-1, 2)
        rows = e.index.insert(
            digests,
            [r.checksums for r in records],
            write_id=np.frombuffer(b"".join(r.write_id for r in records), "<u8").reshape(-1, 2),
            offset=[r.extent.offset_bytes for r in records],
            generation=[w.session.generation for w in group],
            volume=[r.extent.volume for r in records],
            namespace=[w.session.namespace for w in group],
            length=[r.extent.length_bytes for r in records],
            value_length=[r.value_bytes for r in records],
            retain_until_s=[r.retain_until_ms // 1000 for r in records],
            expires_s=[r.expires_ms // 1000 for r in records],
            scope=[w.scope for w in group],
            state=RowState.VISIBLE,
            flags=[r.flags for r in records],
        )
        for i, write in enumerate(group):
            tail = records[i].described() if records[i].tail else {}
            e.policy.committed(e.index, rows[i : i + 1], tail)
            e.events.add(
                "stored",
                write.session.namespace,
                write.stored_key,
                tail=write.tail,
                value_bytes=write.layout.value_bytes,
                generation=write.session.generation,
            )
        e.counters["committed_blocks"] += len(group)
        e.counters["committed_bytes"] += sum(r.value_bytes for r in records)
        e.waiters.wake([w.digest for w in group], OK)

    async def _seal(self, group: Sequence[PendingWrite]) -> set[VolumeId]:
        """Revoke the grants of writes and make what was written stable; the volumes of which that is known."""
        await self._replayed()
        by_volume: dict[VolumeId, list[PendingWrite]] = {}
        for write in group:
            by_volume.setdefault(cast(Extent, write.extent).volume, []).append(write)
        flushed = set()
        for volume, writes in sorted(by_volume.items()):
            spec = self._e.space.specs.get(volume)
            if spec is None:
                self.doom(writes)
                raise Unavailable(f"volume {volume} lies on a drive that is away", field="drives")
            shared = self._seals.get(volume)
            if shared is None or shared.volume is not spec:
                shared = self._seals[volume] = SharedSeal(self._e.target, spec)
            try:
                if await shared.wait(_grants(writes)) is Barrier.FLUSHED:
                    flushed.add(volume)
            except (NoSpace, TargetFailed) as error:
                # what was written before is lost perhaps, and no later flush would say so
                self.doom(writes)
                self._e.space.drive_failed(volume, error)
                raise
            if any(w.doomed for w in writes):  # by what happened meanwhile: this flush vouches for nothing
                raise Unavailable(f"volume {volume}: its drive failed, or its target ended, in the middle of a flush")
        return flushed

    def doom(self, writes: Iterable[PendingWrite]) -> None:
        """Nothing of these is ever committed: their bytes are in doubt.

        Their writers learn it and give them up; who does not is torn down, and what it reads with it.
        """
        until_ms = self._e.clock.monotonic_ms() + _GIVE_UP_MS
        for write in writes:
            write.doomed, write.deadline_ms = True, min(write.deadline_ms, until_ms)

    def doom_volumes(self, volumes: Collection[VolumeId]) -> None:
        """`doom` for what is being written to volumes whose drive failed."""
        self.doom(w for w in self._by_digest.values() if w.extent is not None and w.extent.volume in volumes)

    def target_ended(self) -> None:
        """The target's process is gone, and with it what it knew of flushes that failed.

        One that it began and did not answer for may have: the system says so once, and no flush of another process
        hears of it. What was being written to such volumes is in doubt.
        """
        self.doom_volumes({volume for volume, seal in self._seals.items() if seal.take_unanswered()})

    # ------------------------------------------------------------------------------------------------ taking back

    async def abort(
        self, session: Session, write_ids: Sequence[WriteId], *, quiesced: Collection[HostIdentity] = ()
    ) -> int:
        """Take writes back; ``quiesced`` are the hosts that gave their word that all their commands have completed."""
        writes = [w for i in write_ids if (w := session.writes.get(i)) is not None and w.state is WriteState.WRITING]
        await self.fence(writes, quiesced=quiesced)
        return len(writes)

    async def fence(self, writes: Sequence[PendingWrite], *, quiesced: Collection[HostIdentity] = ()) -> None:
        """Free the extents of writes once nothing can write to them any more (design §6.4).

        A host speaks only for itself: all others that had the grant are torn down. If the target does not answer the
        extents stay taken, and the next sweep tries again.
        """
        if not writes:
            return
        for write in writes:
            write.state = WriteState.FENCING
        try:
            await self._close_grants(writes)
            for host in dict.fromkeys(h for w in writes if not w.fenced for h in w.hosts if h not in quiesced):
                await self._e.target.teardown_host(host)
            for write in writes:
                write.fenced = True
            await self._note_failed(writes)
            held = [w for w in writes if w.failed and self._e.space.in_doubt(cast(Extent, w.extent).volume)]
            for write in held:  # is it the place or the drive? the next sweep knows
                write.state, write.deadline_ms = WriteState.WRITING, 0
            writes = [w for w in writes if w not in held]
            await self._unrecord([w for w in writes if w.recorded])
            await self._keep_bad_places(writes)
        except BaseException:
            for write in writes:
                write.state, write.deadline_ms = WriteState.WRITING, 0
            raise
        for write in writes:
            self._free(write)
        self._e.counters["aborted_blocks"] += len(writes)

    async def _note_failed(self, writes: Sequence[PendingWrite]) -> None:
        """Ask the target where the drive failed to write."""
        failed = await self._e.target.failed_writes(_grants(writes))
        for write in writes:
            if write.grant in failed and write.extent is not None:
                write.failed = True
                self._e.space.doubt(write.extent.volume)

    async def _keep_bad_places(self, writes: Sequence[PendingWrite]) -> None:
        """Put extents into quarantine that a drive could not write, though it can write elsewhere."""
        space = self._e.space
        failed = [cast(Extent, write.extent) for write in writes if write.failed]
        bad = [extent for extent in failed if space.is_writable(extent.volume)]
        entries = space.to_quarantine(bad, "write_error", self._e.clock.wall_ms())
        if entries:
            await self._e.store.write([space.quarantine.put(entry) for entry in entries])
            for entry in entries:
                space.quarantine.hold(entry)
            self._e.counters["quarantined_extents"] += len(entries)

    async def _unrecord(self, writes: Sequence[PendingWrite]) -> None:
        """Delete records that a failed commit may have left, before their extents can have another owner."""
        ops = []
        for write in writes:
            extent = cast(Extent, write.extent)
            ops.append(Op("blocks", write.stored_key, None))
            ops.append(Op("owners", owner_key(extent.volume, extent.offset_bytes), None))
        if ops:
            numbers, logged = self._e.changes.enter([w.stored_key for w in writes])
            try:
                await self._e.store.write(ops + logged)
            except BaseException:
                self._e.changes.fail(numbers)
                raise
            self._e.changes.settle(numbers)

    def _free(self, write: PendingWrite) -> None:
        self._e.space.give(cast(Extent, write.extent), write.scope)
        self._forget(write)

    async def sweep(self) -> int:
        """Take back writes whose deadline passed. How many; raises `Unavailable` when the target does not answer."""
        now_ms = self._e.clock.monotonic_ms()
        late = [w for w in self._by_digest.values() if w.state is WriteState.WRITING and w.deadline_ms <= now_ms]
        if self._e.store.problem is not None:
            late = [w for w in late if not w.fenced]  # of the others only a record is left to be deleted
        await self.fence(late)
        return len(late)

    async def drop_session(self, session: Session) -> None:
        """Free a session's writes after its hosts were removed at the target: nothing of theirs can run any more."""
        mine = [w for w in self._by_digest.values() if w.session is session]
        for done in [w.done for w in mine if w.done is not None]:
            await asyncio.shield(done)
        left = [w for w in mine if w.state is WriteState.WRITING]
        await self.fence(left, quiesced={h for w in left for h in w.hosts})


def _check_tiles(write: PendingWrite, said: dict[int, int], sums: Sequence[TileSum], row: int) -> None:
    """Refuse tiles outside the grid, and a second checksum of one, be it in this call (``said``) or an earlier one."""
    if not sums:
        raise GridInvalid(f"row {row} commits no tile", field="tiles")
    for tile in sums:
        if tile.tile >= write.layout.tiles:
            raise GridInvalid(
                f"row {row} commits tile {tile.tile}", field="tiles", limit=f"0 to {write.layout.tiles - 1}"
            )
        if said.setdefault(tile.tile, write.checksums.get(tile.tile, tile.checksum)) != tile.checksum:
            raise GridInvalid(f"row {row}: tile {tile.tile} was committed with another checksum", field="tiles")


def _grants(writes: Sequence[PendingWrite]) -> list[GrantId]:
    return [w.grant for w in writes if w.grant is not None]
