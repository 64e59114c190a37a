"""Groups of ranks on the simulated target: several hosts write one block, and what remains when one of them fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from forebay.appliance.dataplane.interface import Barrier
from forebay.appliance.namespace.sessions import SessionState
from forebay.appliance.namespace.writes import Allocation, TileSum
from forebay.errors import (
    OK,
    Absent,
    AlreadyExists,
    ConnectionLost,
    GridInvalid,
    Pending,
    TargetRefused,
    WriteExpired,
    WriteFenced,
)
from forebay.ids import LBA_BYTES, BlockKey, WriteId
from tests.conftest import LONG
from tests.sim.rig import GRID, Member, Rig
from tests.sim.running import on_loop
from tests.sim.target import SimHost, SimWrite

VALUE = bytes(range(256)) * 64  # 16 KiB: four tiles of 4 KiB, [head group][layer group]
OTHER = VALUE[::-1]
HALVES = ((0, 1), (2, 3))
assert len(VALUE) == GRID.groups[0].layout().value_bytes


class Group:
    """Ranks of one session that write the tiles of a block between them."""

    def __init__(self, rig: Rig, ranks: Sequence[Member]) -> None:
        self.rig = rig
        self.ranks = ranks

    @classmethod
    async def start(cls, rig: Rig, ranks: int = 2) -> Group:
        leader = await rig.open()
        return cls(rig, [leader, *[await rig.join(leader) for _ in range(ranks - 1)]])

    @property
    def leader(self) -> Member:
        return self.ranks[0]

    async def allocate(self, *keys: bytes, ttl_ms: int = 30_000) -> list[Allocation]:
        return await self.rig.allocate(self.leader, *keys, hosts=self.ranks, ttl_ms=ttl_ms)

    def write(self, rank: int, row: Allocation, tiles: Sequence[int], value: bytes = VALUE) -> None:
        assert row.extent is not None
        for tile in tiles:
            at = tile * LBA_BYTES
            data = value[at : at + LBA_BYTES]
            self.ranks[rank].host.write(row.extent.volume, row.extent.offset_bytes + at, data, row.tag)

    def sums(self, row: Allocation, key: bytes, tiles: Sequence[int], value: bytes = VALUE) -> list[TileSum]:
        every = self.rig.sums(self.leader, key, row.write_id, value)
        return [every[tile] for tile in tiles]

    async def commit(self, rank: int, rows: Sequence[tuple[WriteId, Sequence[TileSum]]]) -> list[int]:
        member = self.ranks[rank]
        return await self.rig.node.writes.commit(member.session, rows, host=member.identity)

    async def put(self, rank: int, row: Allocation, key: bytes, tiles: Sequence[int], value: bytes = VALUE) -> int:
        """A rank's part of a block."""
        self.write(rank, row, tiles, value)
        (status,) = await self.commit(rank, [(row.write_id, self.sums(row, key, tiles, value))])
        return status

    async def outlive(self, duration_ms: int) -> None:
        """Let time pass while the session's heartbeats go on, and sweep."""
        self.rig.clock.advance(duration_ms)
        self.leader.session.seen_ms = self.rig.clock.monotonic_ms()
        await self.rig.node.sweep()

    def nothing_left(self) -> None:
        node = self.rig.node
        assert len(node.writes) == 0 and not self.rig.target.grants
        assert node.engine.space.used_bytes(self.leader.session.namespace) == 0
        assert not list(self.rig.store.scan("blocks"))
        self.rig.check()


@on_loop
async def test_ranks_write_their_tiles_under_one_write_id(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig)
    rows = await group.allocate(b"a", b"b")
    for key, row in zip((b"a", b"b"), rows, strict=True):
        assert await group.put(1, row, key, HALVES[1]) == Pending.code
        assert rig.present(group.leader, key) == [False]
        assert await group.put(0, row, key, HALVES[0]) == OK
    assert len({row.write_id for row in rows}) == 2
    for member in (*group.ranks, await rig.open()):
        assert await rig.get(member, b"a") == await rig.get(member, b"b") == VALUE
    assert not rig.target.grants
    rig.check()


@on_loop
async def test_hosts_of_a_group_write_at_once_and_are_shut_out_at_once(rig: Rig) -> None:
    """Writes that are in flight when the block becomes visible never reach it."""
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig, 3)
    (row,) = await group.allocate(b"k")
    assert row.extent is not None
    late = [rank.host.submit(row.extent.volume, row.extent.offset_bytes, bytes(LBA_BYTES)) for rank in group.ranks]
    for rank, tiles in enumerate(((0,), (1,), (2, 3))):
        assert await group.put(rank, row, b"k", tiles) == (OK if rank == 2 else Pending.code)
    for write in late:
        with pytest.raises(WriteFenced):
            rig.target.land(write)
    assert await rig.get(group.leader, b"k") == VALUE


@on_loop
async def test_a_rank_that_joined_after_the_allocation_is_refused(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig)
    (row,) = await group.allocate(b"k")
    group.ranks = [*group.ranks, await rig.join(group.leader)]
    with pytest.raises(WriteFenced):
        group.write(2, row, HALVES[1])
    sums = group.sums(row, b"k", HALVES[1])
    assert await group.commit(2, [(row.write_id, sums)]) == [WriteFenced.code]
    assert await group.put(0, row, b"k", HALVES[0]) == Pending.code
    assert await group.put(1, row, b"k", HALVES[1]) == OK
    assert await rig.get(group.ranks[2], b"k") == VALUE


@on_loop
async def test_commits_repeated_by_a_rank_get_the_same_answer(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig)
    (row,) = await group.allocate(b"k")
    mine = [(row.write_id, group.sums(row, b"k", HALVES[0]))]
    group.write(0, row, HALVES[0])
    assert await group.commit(0, mine) == await group.commit(0, mine) == [Pending.code]
    assert await group.put(1, row, b"k", HALVES[1]) == OK
    assert await group.commit(0, mine) == [OK]  # now it is visible, and a repetition learns that
    assert rig.node.engine.counters["committed_blocks"] == 1
    rig.check()


@on_loop
async def test_a_replicated_tile_committed_by_two_ranks_must_be_the_same(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig)
    (row,) = await group.allocate(b"k")
    assert await group.put(0, row, b"k", (0, 1)) == Pending.code
    assert await group.put(1, row, b"k", (1, 2)) == Pending.code
    with pytest.raises(GridInvalid, match="tile 1"):
        await group.put(1, row, b"k", (1, 3), OTHER)
    with pytest.raises(GridInvalid, match="tile 4"):
        await group.commit(1, [(row.write_id, [TileSum(4, 0)])])
    assert rig.present(group.leader, b"k") == [False]
    await rig.node.writes.abort(group.leader.session, [row.write_id])
    group.nothing_left()


@on_loop
async def test_a_write_of_another_session_is_nobodys(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group, thief = await Group.start(rig), await Group.start(rig)
    (row,) = await group.allocate(b"k")
    with pytest.raises(WriteFenced):
        thief.write(1, row, HALVES[1], OTHER)
    sums = thief.sums(row, b"k", range(4), OTHER)
    assert await thief.commit(0, [(row.write_id, sums)]) == [WriteExpired.code]
    assert await group.put(0, row, b"k", HALVES[0]) == Pending.code
    assert await group.put(1, row, b"k", HALVES[1]) == OK
    assert await rig.get(thief.leader, b"k") == VALUE


@pytest.mark.parametrize("barrier", [Barrier.FLUSHED, Barrier.UNKNOWN])
@on_loop
async def test_two_groups_and_one_key(rig: Rig, barrier: Barrier) -> None:
    """One block becomes visible, whole; the other group is told, and its bytes are nowhere in it."""
    rig.target.barrier_result = barrier
    await rig.start()
    await rig.namespace()
    first, second = await Group.start(rig), await Group.start(rig)
    (mine,), (theirs,) = await asyncio.gather(first.allocate(b"k"), second.allocate(b"k"))
    assert sorted((mine.status, theirs.status)) == [OK, Pending.code]
    winner, loser, row = (first, second, mine) if mine.status == OK else (second, first, theirs)
    assert await winner.put(0, row, b"k", HALVES[0]) == Pending.code
    assert [r.status for r in await loser.allocate(b"k")] == [Pending.code]
    with pytest.raises(WriteFenced):
        loser.write(0, row, HALVES[1], OTHER)
    assert await winner.put(1, row, b"k", HALVES[1]) == OK
    assert [r.status for r in await loser.allocate(b"k")] == [AlreadyExists.code]
    assert await rig.get(loser.leader, b"k") == VALUE
    rig.check()


@on_loop
async def test_the_other_group_goes_on_when_the_first_is_given_up(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    first, second = await Group.start(rig), await Group.start(rig)
    (row,) = await first.allocate(b"k", ttl_ms=1_000)
    assert await first.put(0, row, b"k", HALVES[0]) == Pending.code
    await second.outlive(500)
    assert [r.status for r in await second.allocate(b"k")] == [Pending.code]
    first.leader.session.seen_ms = rig.clock.monotonic_ms()
    await second.outlive(500)
    (mine,) = await second.allocate(b"k")
    assert mine.extent == row.extent  # the same place, which nobody of the first group reaches any more
    for rank in (0, 1):
        with pytest.raises(ConnectionLost):
            first.write(rank, row, HALVES[rank], OTHER)
        first.ranks[rank].host = SimHost(rig.target, "t", first.ranks[rank].identity)
        with pytest.raises(WriteFenced):
            first.write(rank, row, HALVES[rank], OTHER)
    assert await first.commit(1, [(row.write_id, first.sums(row, b"k", HALVES[1]))]) == [WriteExpired.code]
    assert await second.put(1, mine, b"k", HALVES[1], OTHER) == Pending.code
    assert await second.put(0, mine, b"k", HALVES[0], OTHER) == OK
    assert await rig.get(first.leader, b"k") == OTHER
    rig.check()


@on_loop
async def test_a_rank_that_goes_on_by_an_old_plan_is_refused_in_the_same_place(rig: Rig) -> None:
    """Its host may write there again, under the grant of another write: what it sends is not of that write."""
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig)
    (old,) = await group.allocate(b"k")
    await rig.node.writes.abort(group.leader.session, [old.write_id])
    (new,) = await group.allocate(b"k")
    assert new.extent == old.extent and new.tag != old.tag
    for rank in group.ranks:
        rank.host = SimHost(rig.target, "t", rank.identity)
    assert await group.put(0, new, b"k", HALVES[0]) == Pending.code
    for tiles in HALVES:
        with pytest.raises(WriteFenced):
            group.write(1, old, tiles, OTHER)
    assert await group.put(1, new, b"k", HALVES[1]) == OK
    assert await rig.get(group.leader, b"k") == VALUE


@pytest.mark.parametrize("dead", [0, 1], ids=["the leader", "a follower"])
@pytest.mark.parametrize("wrote", [False, True], ids=["before its commit", "before its write"])
@on_loop
async def test_a_rank_that_dies_leaves_nothing(rig: Rig, dead: int, wrote: bool) -> None:
    """At the write's deadline; the session lives on through the other rank."""
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig)
    rows = await group.allocate(b"a", b"b", ttl_ms=5_000)
    waiting = rig.node.engine.waiters.add(
        rig.node.engine.index.digests(group.leader.session.stored_keys([BlockKey(b"a")]))[0].tobytes()
    )
    left = 1 - dead
    for key, row in zip((b"a", b"b"), rows, strict=True):
        assert await group.put(left, row, key, HALVES[left]) == Pending.code
        if wrote:
            group.write(dead, row, HALVES[dead])
    assert rows[0].extent is not None
    stuck = group.ranks[dead].host.submit(rows[0].extent.volume, rows[0].extent.offset_bytes, bytes(LBA_BYTES))
    await group.outlive(4_999)
    assert len(rig.node.writes) == 2
    await group.outlive(1)
    assert await waiting == Absent.code
    with pytest.raises(ConnectionLost):  # its host was fenced before the extents were free
        rig.target.land(stuck)
    assert all(rig.target.controllers(rank.identity) == 0 for rank in group.ranks)
    assert await group.commit(left, [(rows[0].write_id, group.sums(rows[0], b"a", HALVES[left]))]) == [
        WriteExpired.code
    ]
    group.nothing_left()
    group.ranks = [group.ranks[left]]
    group.ranks[0].host = SimHost(rig.target, "t", group.ranks[0].identity)
    (again,) = await group.allocate(b"a")
    assert await group.put(0, again, b"a", range(4)) == OK
    assert await rig.get(group.ranks[0], b"a") == VALUE
    rig.check()


@on_loop
async def test_a_session_that_dies_with_all_its_ranks_leaves_nothing(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group, other = await Group.start(rig, 3), await rig.open()
    (row,) = await group.allocate(b"k", ttl_ms=600_000)
    assert await group.put(1, row, b"k", HALVES[0]) == Pending.code
    assert row.extent is not None
    stuck = group.ranks[2].host.submit(row.extent.volume, row.extent.offset_bytes, bytes(LBA_BYTES))
    rig.clock.advance(rig.limits.expiry_ms)
    rig.node.sessions.get(other.session.id, "root")
    rig.clock.advance(1)
    await rig.node.sweep()
    group.nothing_left()
    with pytest.raises(ConnectionLost):
        rig.target.land(stuck)
    for rank in group.ranks:
        with pytest.raises(TargetRefused):
            SimHost(rig.target, "t", rank.identity)
    assert await rig.put(other, b"k", OTHER) == OK
    assert await rig.get(other, b"k") == OTHER


@on_loop
async def test_a_rank_that_gives_up_speaks_for_itself_alone(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig, 3)
    (row,) = await group.allocate(b"k")
    assert row.extent is not None
    stuck = group.ranks[2].host.submit(row.extent.volume, row.extent.offset_bytes, bytes(LBA_BYTES))
    quiesced = [group.leader.identity]
    assert await rig.node.writes.abort(group.leader.session, [row.write_id], quiesced=quiesced) == 1
    assert [rig.target.controllers(rank.identity) for rank in group.ranks] == [1, 0, 0]
    (mine,) = await group.allocate(b"k")
    assert mine.extent == row.extent
    with pytest.raises(ConnectionLost):
        rig.target.land(stuck)
    await rig.node.writes.abort(group.leader.session, [mine.write_id], quiesced=[r.identity for r in group.ranks])
    assert rig.target.calls["teardown_host"] == 2
    group.nothing_left()


@on_loop
async def test_extents_stay_taken_until_every_host_of_the_group_is_torn_down(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig, 3)
    await group.allocate(b"k", ttl_ms=1_000)
    gate = rig.target.hold("teardown_host")
    rig.target.fail("teardown_host")
    sweep = asyncio.ensure_future(group.outlive(1_000))
    await gate.reached.wait()
    assert not rig.target.grants and len(rig.node.writes) == 1
    gate.open.set()
    await sweep
    assert len(rig.node.writes) == 1
    assert rig.node.engine.space.used_bytes(group.leader.session.namespace) == len(VALUE)
    rig.check()
    await group.outlive(1)
    group.nothing_left()


@on_loop
async def test_a_replay_gives_the_grant_back_to_every_host(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig, 3)
    (row,) = await group.allocate(b"k")
    before = dict(rig.target.grants)
    rig.target.restart()
    await rig.node.replay()
    assert rig.target.grants == before
    for rank, tiles in enumerate(((0,), (1,), (2, 3))):
        group.ranks[rank].host = SimHost(rig.target, "t", group.ranks[rank].identity)
        assert await group.put(rank, row, b"k", tiles) == (OK if rank == 2 else Pending.code)
    assert await rig.get(group.leader, b"k") == VALUE


@on_loop
async def test_the_last_tiles_of_two_ranks_race(rig: Rig) -> None:
    """Commits that run into each other: both ranks learn that the block is visible, which it becomes once."""
    await rig.start()
    await rig.namespace()
    group = await Group.start(rig, 3)
    (row,) = await group.allocate(b"k")
    assert await group.put(0, row, b"k", (0, 1)) == Pending.code
    group.write(1, row, (2,))
    group.write(2, row, (3,))
    gate = rig.target.hold("barrier")
    codes = [
        asyncio.ensure_future(group.commit(rank, [(row.write_id, group.sums(row, b"k", (rank + 1,)))]))
        for rank in (1, 2)
    ]
    await gate.reached.wait()
    repeated = asyncio.ensure_future(group.commit(0, [(row.write_id, group.sums(row, b"k", (0, 1)))]))
    await asyncio.sleep(0)
    gate.open.set()
    assert await codes[0] == [Pending.code]
    assert await codes[1] == await repeated == [OK]
    assert rig.node.engine.counters["committed_blocks"] == 1
    rig.check()


# ---------------------------------------------------------------------------------------------------- any order


class Walk:
    """Groups of ranks that do whatever comes to mind, each tile by the rank that owns it; and what must always hold."""

    KEYS = (b"a", b"b")

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.pick = random.Random(seed).randrange
        self.groups: list[Group] = []
        self.writes: list[tuple[Group, bytes, Allocation]] = []
        self.landed: dict[WriteId, set[int]] = {}
        self.in_flight: list[tuple[Group, int, WriteId, int, SimWrite]] = []

    @staticmethod
    def value(row: Allocation) -> bytes:
        """What a write writes: no two write the same."""
        return (row.write_id * (len(VALUE) // 16))[: len(VALUE)]

    async def run(self, steps: int) -> None:
        await self.rig.start()
        await self.rig.namespace()
        self.groups = [await Group.start(self.rig) for _ in range(2)]
        usual = [self.allocate, self.submit, self.submit, self.land, self.commit] * 2
        actions = [*usual, self.abort, self.later, self.delete, self.reconnect, self.end_session]
        for _ in range(steps):
            await actions[self.pick(len(actions))]()
            self.rig.check()
            await self.look()
        for group in self.groups:
            await self.rig.node.end_session(group.leader.session)
        for _, _, _, _, write in self.in_flight:
            with pytest.raises((ConnectionLost, WriteFenced)):
                self.rig.target.land(write)
        assert len(self.rig.node.writes) == 0 and not self.rig.target.grants
        self.rig.check()

    async def look(self) -> None:
        """What is visible is whole and of one write id."""
        reader = await self.rig.open()
        for key in self.KEYS:
            value = await self.rig.get(reader, key)
            assert value is None or value in {self.value(row) for _, k, row in self.writes if k == key}
        await self.rig.node.end_session(reader.session)

    # --- actions ---

    async def allocate(self) -> None:
        group, key = self.groups[self.pick(2)], self.KEYS[self.pick(2)]
        (row,) = await group.allocate(key, ttl_ms=1_000)
        if row.extent is not None:
            self.writes.append((group, key, row))
            self.landed[row.write_id] = set()

    def latest(self) -> tuple[Group, bytes, Allocation] | None:
        """One of the last writes, so that some get somewhere."""
        return self.writes[-1 - self.pick(min(3, len(self.writes)))] if self.writes else None

    async def submit(self) -> None:
        """A rank sends its tiles."""
        chosen = self.latest()
        if chosen is None:
            return
        group, _, row = chosen
        rank = self.pick(2)
        assert row.extent is not None
        for tile in HALVES[rank]:
            if all(one[2:4] != (row.write_id, tile) for one in self.in_flight):
                at = tile * LBA_BYTES
                data = self.value(row)[at : at + LBA_BYTES]
                write = group.ranks[rank].host.submit(row.extent.volume, row.extent.offset_bytes + at, data, row.tag)
                self.in_flight.append((group, rank, row.write_id, tile, write))

    async def land(self) -> None:
        """Commands arrive, the newest first, but for some that take their time."""
        for _ in range(self.pick(5)):
            if self.in_flight:
                _, _, write_id, tile, write = self.in_flight.pop(-1 - self.pick(min(2, len(self.in_flight))))
                with suppress(ConnectionLost, WriteFenced):
                    self.rig.target.land(write)
                    self.landed[write_id].add(tile)

    async def commit(self) -> None:
        """Each rank commits what it wrote, and nothing whose command is still under way."""
        chosen = self.latest()
        if chosen is None:
            return
        group, key, row = chosen
        stuck = {tile for _, _, write_id, tile, _ in self.in_flight if write_id == row.write_id}
        for rank in (0, 1):
            tiles = [tile for tile in HALVES[rank] if tile in self.landed[row.write_id] - stuck]
            if tiles and group.leader.session.state is SessionState.OPEN:
                (status,) = await group.commit(rank, [(row.write_id, group.sums(row, key, tiles, self.value(row)))])
                assert status in (OK, Pending.code, WriteExpired.code)

    async def abort(self) -> None:
        """A rank gives up, and says that its commands have completed only if they have."""
        chosen = self.latest()
        if chosen is None:
            return
        group, _, row = chosen
        rank = self.pick(2)
        busy = any(one[0] is group and one[1] == rank for one in self.in_flight)
        quiesced = [] if busy else [group.ranks[rank].identity]
        await self.rig.node.writes.abort(group.leader.session, [row.write_id], quiesced=quiesced)

    async def later(self) -> None:
        await self.groups[0].outlive(0)
        await self.groups[1].outlive(400)

    async def delete(self) -> None:
        group = self.groups[self.pick(2)]
        await self.rig.node.blocks.delete(group.leader.session, [BlockKey(self.KEYS[self.pick(2)])])

    async def reconnect(self) -> None:
        """A rank comes back after it was torn down; commands of its old controller are still on their way."""
        group = self.groups[self.pick(2)]
        for rank in group.ranks:
            if not self.rig.target.controllers(rank.identity):
                rank.host = SimHost(self.rig.target, "t", rank.identity)

    async def end_session(self) -> None:
        number = self.pick(2)
        await self.rig.node.end_session(self.groups[number].leader.session)
        self.groups[number] = await Group.start(self.rig)


# The last one finds what is wrong when commands carry no tag.
@pytest.mark.parametrize("seed", range(3_000) if LONG else (*range(40), 359))
@on_loop
async def test_groups_in_any_order_show_whole_blocks_and_leak_nothing(rig: Rig, seed: int) -> None:
    await Walk(rig, seed).run(100)
