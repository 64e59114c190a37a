"""Design §6, the engine's part: for each defence a test that holds with it, and the same test seen to fail without.

Each test runs twice. ``intact`` is the product; ``removed`` takes out one defence, and then the violation that it
guards against must be seen: a test that passed either way would prove nothing. Items 1 and 5 are also the client's,
fencing also the target's, each with tests of their own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from forebay.appliance.control import calls
from forebay.appliance.control.admission import Place
from forebay.appliance.control.calls import Calls, finish
from forebay.appliance.namespace.acl import Acl
from forebay.appliance.namespace.blocks import Blocks
from forebay.appliance.namespace.desired_state import DesiredState
from forebay.appliance.namespace.retirement import Retirement
from forebay.appliance.namespace.room import Room
from forebay.appliance.namespace.sessions import PendingWrite, SessionTable
from forebay.appliance.namespace.space import Drive, Space
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.appliance.namespace.verification import Verification
from forebay.errors import OK, Busy, ConnectionLost, DeadlineExceeded, ForebayError, StaleGeneration, WriteFenced
from forebay.ids import LBA_BYTES, BlockKey, Extent, VolumeId
from forebay.index import Rows, RowState
from forebay.schema import Schema
from tests.sim import rig as rig_module
from tests.sim.rig import REGION, Member, Rig
from tests.sim.running import on_loop, until
from tests.sim.target import SimHost, SimTarget, SimWrite

VALUE = bytes(range(256)) * 64
OTHER = VALUE[::-1]
OPAQUE = Schema.opaque()

both = pytest.mark.parametrize("removed", [False, True], ids=["intact", "removed"])
Patch = pytest.MonkeyPatch


async def opened(rig: Rig, **options: Any) -> Member:
    await rig.start()
    await rig.namespace(**options)
    return await rig.open()


async def wrong(read: Coroutine[Any, Any, bytes | None], right: bytes | None) -> bool:
    """Whether a read gave other bytes than it should, be it noticed by the reader's checksum or not."""
    try:
        return await read != right
    except AssertionError:
        return True


# ------------------------------------------------------------------------------- 1. never a wrong byte


@both
@on_loop
async def test_1_bytes_that_were_lost_are_not_served(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: after an unclean stop the target's checksums are compared before a block is served."""

    def believe(self: Verification, rows: Rows, found: Sequence[int]) -> Rows:
        self._e.index.state[rows] = RowState.VISIBLE
        return rows[:0]

    if removed:
        monkeypatch.setattr(Verification, "_judge", believe)
    rig.target.journal = True
    m = await opened(rig, durability=1)
    await rig.put(m, b"k", VALUE)
    rig.target.lose_power()
    await rig.restart()
    m = await rig.open()
    assert await wrong(rig.get(m, b"k"), None) == removed


@both
@on_loop
async def test_1_a_location_of_another_key_does_not_verify(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: a tile's checksum starts from a seed of its key, its number and its write."""
    if removed:
        monkeypatch.setattr(rig_module, "tile_seed", lambda key, tile, write: 0)
    m = await opened(rig)
    await rig.put(m, b"a", VALUE)
    await rig.put(m, b"b", OTHER)
    of_b = await rig.node.blocks.acquire(m.session, [BlockKey(b"b")], 1000)
    taken_for_a = False
    with suppress(AssertionError):
        taken_for_a = rig.read(m, b"a", of_b) == OTHER
    assert taken_for_a == removed


# ------------------------------------------------------------------------------- 3. visible means whole


@both
@on_loop
async def test_3_nothing_is_visible_until_every_tile_is_committed(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: a write is complete when its tiles cover the grid."""

    def hasty(self: PendingWrite) -> bool:
        for tile in range(self.layout.tiles):
            self.checksums.setdefault(tile, 0)
        return True

    if removed:
        monkeypatch.setattr(PendingWrite, "complete", property(hasty))
    m = await opened(rig)
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    sums = rig.sums(m, b"k", row.write_id, VALUE)
    await rig.node.writes.commit(m.session, [(row.write_id, sums[:1])])
    assert rig.present(m, b"k") == [removed]


@both
@on_loop
async def test_3_no_block_of_an_old_generation_becomes_visible(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: Commit checks the generation once more, right before the record is written."""
    await rig.start()
    await rig.namespace()
    m = await rig.open(generation=1)
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    await rig.node.update_namespace("t/n", min_generation=2)
    if removed:
        monkeypatch.setattr(Blocks, "admit", staticmethod(lambda session: None))
    (status,) = await rig.node.writes.commit(m.session, [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))])
    assert (status, rig.node.engine.index.count) == ((OK, 1) if removed else (StaleGeneration.code, 0))


@both
@on_loop
async def test_3_a_raised_minimum_hides_older_blocks_at_once(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: every look-up refuses a session below the minimum."""
    if removed:
        monkeypatch.setattr(Blocks, "admit", staticmethod(lambda session: None))
    m = await opened(rig)
    await rig.put(m, b"k", VALUE)
    await rig.node.update_namespace("t/n", min_generation=1)
    seen = False
    with suppress(StaleGeneration):
        seen = rig.present(m, b"k") == [True]
    assert seen == removed


class SlowStore(MemoryStore):
    """Writes are accepted in order and applied, as by a log, when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        await super().write(ops, durable=durable)


@both
@on_loop
async def test_3_a_block_is_durable_before_it_is_visible(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: Commit waits for its record."""
    rig.store = store = SlowStore()
    m = await opened(rig)
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    store.gate.clear()
    if removed:

        async def accept(ops: Sequence[Op], *, durable: bool = True) -> None:
            asyncio.ensure_future(SlowStore.write(store, ops, durable=durable)).add_done_callback(lambda f: f.cancel())

        monkeypatch.setattr(store, "write", accept)
    commit = asyncio.ensure_future(
        rig.node.writes.commit(m.session, [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))])
    )
    await until(lambda: store.waiting > 0, "the record is on its way")
    for _ in range(20):
        await asyncio.sleep(0)
    seen_before_durable = rig.present(m, b"k") == [True] and not list(store.scan("blocks"))
    assert seen_before_durable == removed
    store.gate.set()
    assert await commit == [OK]


# ------------------------------------------------------------------------------- 4. one owner


def careless_free(self: Retirement, rows: Rows) -> None:
    """`Retirement.free_unleased` without a look at leases."""
    index = self._e.index
    over = np.unique(rows)[index.state[np.unique(rows)] == RowState.RETIRED]
    for row in over.tolist():
        extent = Extent(VolumeId(index.volume[row]), int(index.offset[row]), int(index.length[row]))
        self._e.space.give(extent, int(index.scope[row]))
    index.free(over)


@both
@on_loop
async def test_4_leased_bytes_stay_until_the_lease_ends(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence (ii): an extent is free only when leases on it have ended."""
    if removed:
        monkeypatch.setattr(Retirement, "free_unleased", careless_free)
    m = await opened(rig)
    await rig.put(m, b"k", VALUE)
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 10_000)
    await rig.node.blocks.delete(m.session, [BlockKey(b"k")])
    await rig.put(m, b"next", OTHER)
    changed = False
    try:
        changed = rig.read(m, b"k", located) != VALUE
    except AssertionError:
        changed = True
    assert changed == removed


class Forgetful(set[int]):
    """A set of rows that never has any."""

    def update(self, *others: Any) -> None:
        pass


@both
@on_loop
async def test_4_an_extent_is_not_given_again_before_its_delete_is_durable(rig: Rig, removed: bool) -> None:
    """Defence (i): rows whose delete is not in the log are not freed, whatever ends meanwhile."""
    rig.store = store = SlowStore()
    m = await opened(rig)
    await rig.put(m, b"k", VALUE)
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 10_000)
    if removed:
        rig.node.retirement._undurable = Forgetful()
    store.gate.clear()
    delete = asyncio.ensure_future(rig.node.blocks.delete(m.session, [BlockKey(b"k")]))
    await until(lambda: store.waiting > 0, "the delete is on its way")
    rig.node.blocks.release(m.session, [located.lease])
    (row,) = await rig.allocate(m, b"next")
    assert row.extent is not None
    recorded = bool(list(store.scan("blocks")))  # a stop now finds the old record, and the extent has a new owner
    assert (recorded and row.extent.offset_bytes == int(located.offsets[0])) == removed
    store.gate.set()
    await asyncio.gather(delete, return_exceptions=True)


async def _late_write(rig: Rig, m: Member, ended: Callable[[], Coroutine[Any, Any, object]]) -> tuple[SimWrite, Member]:
    """A write that is still in flight when its attempt is taken back and the extent given to another's block."""
    (row,) = await rig.allocate(m, b"slow", ttl_ms=1)
    assert row.extent is not None
    late = m.host.submit(row.extent.volume, row.extent.offset_bytes, b"\xff" * LBA_BYTES)
    await ended()
    other = await rig.open()
    await rig.put(other, b"k", VALUE)
    located = await rig.node.blocks.acquire(other.session, [BlockKey(b"k")], 1000)
    assert int(located.offsets[0]) == row.extent.offset_bytes, "the extent was not given to another: nothing is tested"
    return late, other


async def _lands(rig: Rig, late: SimWrite, other: Member) -> bool:
    """Whether the late write changed the other's block."""
    with suppress(ConnectionLost, WriteFenced):
        rig.target.land(late)
    return await wrong(rig.get(other, b"k"), VALUE)


async def nothing(*args: Any, **kwargs: Any) -> None:
    """A defence taken out."""


@both
@pytest.mark.parametrize("how", ["abort", "deadline"])
@on_loop
async def test_4_a_late_write_is_fenced_by_teardown(rig: Rig, monkeypatch: Patch, how: str, removed: bool) -> None:
    """Defence (iii), at a target that fences nothing itself: the hosts' controllers are torn down."""
    rig.target = SimTarget(fencing=False)
    m = await opened(rig)
    if removed:
        monkeypatch.setattr(rig.target, "teardown_host", nothing)

    async def ended() -> None:
        (write_id,) = m.session.writes
        if how == "abort":
            await rig.node.writes.abort(m.session, [write_id])
        else:
            rig.clock.advance(2)
            await rig.node.sweep()

    assert await _lands(rig, *await _late_write(rig, m, ended)) == removed


@both
@on_loop
async def test_4_a_late_write_is_fenced_by_its_grant(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence (iii), at a target with grants: they are revoked, even if the holder wrongly says that it is done."""
    m = await opened(rig)
    if removed:
        monkeypatch.setattr(rig.target, "revoke", nothing)
        rig.target.strict = False

    async def ended() -> None:
        (write_id,) = m.session.writes
        await rig.node.writes.abort(m.session, [write_id], quiesced=[m.identity])

    assert await _lands(rig, *await _late_write(rig, m, ended)) == removed


@both
@on_loop
async def test_4_a_visible_block_can_be_written_by_nobody(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: grants are revoked before a block becomes visible."""
    m = await opened(rig)
    if removed:
        monkeypatch.setattr(rig.target, "revoke", nothing)
    await rig.put(m, b"k", VALUE)
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 1000)
    late = m.host.submit(VolumeId(located.volumes[0]), int(located.offsets[0]), b"\xff" * LBA_BYTES)
    assert await _lands(rig, late, m) == removed


@both
@on_loop
async def test_4_who_has_not_said_that_it_is_done_cannot_write_a_visible_block(
    rig: Rig, monkeypatch: Patch, removed: bool
) -> None:
    """Defence (iii), at a target that fences nothing itself: a commit tears down the hosts that committed nothing."""
    rig.target = SimTarget(fencing=False)
    m = await opened(rig)
    silent = await rig.join(m)
    if removed:
        monkeypatch.setattr(rig.node.writes, "_silence", nothing)
    (row,) = await rig.allocate(m, b"k", size=len(VALUE), hosts=[m, silent])
    assert row.extent is not None
    late = silent.host.submit(row.extent.volume, row.extent.offset_bytes, b"\xff" * LBA_BYTES)
    written = [rig.written(m, b"k", row, VALUE)]
    assert await rig.node.writes.commit(m.session, written, host=m.identity) == [OK]
    assert await _lands(rig, late, m) == removed
    assert removed or await rig.get(m, b"k") == VALUE, "who said that it is done keeps its connection"


@both
@on_loop
async def test_4_hosts_of_an_earlier_incarnation_are_fenced_at_start(
    rig: Rig, monkeypatch: Patch, removed: bool
) -> None:
    """Defence: a starting node tears down every controller before it allocates anything."""
    rig.target = SimTarget(fencing=False)
    m = await opened(rig)
    if removed:
        monkeypatch.setattr(rig.target, "teardown_all", nothing)

        async def serve(volumes: Sequence[Any], hosts: Sequence[Any]) -> list[str]:
            return []

        monkeypatch.setattr(rig.target, "reconcile", serve)
    late, other = await _late_write(rig, m, rig.restart)
    assert await _lands(rig, late, other) == removed


@both
@on_loop
async def test_4_a_region_changes_hands_only_when_its_deallocate_is_done(
    rig: Rig, monkeypatch: Patch, removed: bool
) -> None:
    """Defence (iv): a release is waited for."""
    rig.capacity_regions = 1
    m = await opened(rig)
    deallocate = Space.release
    begun: list[asyncio.Task[None]] = []

    async def hasty(self: Space, region: Any) -> bool:
        self.maps[region.volume].unclaim(region.number)
        self.drives[self.volumes[region.volume].drive].claimed_regions -= 1
        specs = self.specs[region.volume]
        begun.append(asyncio.ensure_future(self._target.release_region(specs, region.offset_bytes, REGION)))
        return True

    if removed:
        monkeypatch.setattr(Space, "release", hasty)
    await rig.put(m, b"old", VALUE)
    await rig.node.blocks.delete(m.session, [BlockKey(b"old")])
    gate = rig.target.hold("release_region")
    o = await rig.open(schema=OPAQUE)
    put = asyncio.ensure_future(rig.put(o, b"k", OTHER[:LBA_BYTES]))  # another slot size: needs the region
    await gate.reached.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    gate.open.set()
    assert await put == OK
    await asyncio.gather(*begun)
    assert await wrong(rig.get(o, b"k"), OTHER[:LBA_BYTES]) == removed
    assert deallocate is not None


# ------------------------------------------------------------------------------- 6. capacity is a hard limit


@both
@pytest.mark.parametrize("whose", ["namespace", "scope"])
@on_loop
async def test_6_quotas(rig: Rig, monkeypatch: Patch, whose: str, removed: bool) -> None:
    """Defence: what a quota admits is asked before extents are taken."""
    if removed:
        monkeypatch.setattr(Room, "_allowed", lambda self, namespace, scope, slot_bytes: (1 << 40, 1 << 40))
    quota = 4 * len(VALUE)
    m = await opened(rig, eviction="none", quota_bytes=quota if whose == "namespace" else 0)
    if whose == "scope":
        await rig.node.set_scope_quota("t/n", "default", quota)
    await rig.allocate(m, *[b"%d" % i for i in range(9)])
    assert (rig.node.engine.space.used_bytes(m.session.namespace) > quota) == removed


@both
@on_loop
async def test_6_the_nodes_capacity(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: a region is claimed only while the drive has one free."""
    await rig.start()
    await rig.namespace("t/one")
    await rig.namespace("t/two")
    if removed:
        monkeypatch.setattr(Drive, "free_regions", property(lambda self: 99))
    for name in ("t/one", "t/two"):
        m = await rig.open(name, OPAQUE)
        await rig.allocate(m, *[b"%d" % i for i in range(rig.capacity_regions)], size=REGION)
    claimed = rig.node.engine.space.drives["drive0"].claimed_regions
    assert (claimed > rig.capacity_regions) == removed


@both
@pytest.mark.parametrize("how", ["leased", "pinned"])
@on_loop
async def test_6_eviction_spares_what_is_in_use(rig: Rig, monkeypatch: Patch, how: str, removed: bool) -> None:
    """Defence: only rows without leases and pins may go."""
    if removed:

        def any_row(self: Room, rows: Rows) -> Rows:
            found: Rows = rows[self._e.index.state[rows] == RowState.VISIBLE]
            return found

        monkeypatch.setattr(Room, "_evictable", any_row)
    m = await opened(rig, quota_bytes=4 * len(VALUE))
    await rig.put(m, b"keep", VALUE)
    if how == "leased":
        await rig.node.blocks.acquire(m.session, [BlockKey(b"keep")], 10_000)
    else:
        await rig.node.blocks.pin(m.session, [BlockKey(b"keep")], True, False)
    for i in range(12):
        await rig.put(m, b"%d" % i, VALUE)
    assert (rig.present(m, b"keep") == [False]) == removed


@both
@on_loop
async def test_6_probes_pin_nothing(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: Match changes nothing that eviction looks at."""
    m = await opened(rig, quota_bytes=4 * len(VALUE))
    if removed:
        plain = Blocks.match

        def stamping(self: Blocks, session: Any, keys: Any) -> Any:
            self._e.policy.used(self._e.index, self.find(session, keys)[2])
            return plain(self, session, keys)

        monkeypatch.setattr(Blocks, "match", stamping)
    for i in range(4):
        await rig.put(m, b"%d" % i, VALUE)
    rig.present(m, b"0")
    await rig.put(m, b"new", VALUE)
    monkeypatch.undo()
    assert (rig.present(m, b"0") == [True]) == removed


# ------------------------------------------------------------------------------- 7. deadlines, back-pressure


@both
@on_loop
async def test_7_a_call_ends_at_its_deadline_whatever_its_work_waits_for(monkeypatch: Patch, removed: bool) -> None:
    """Defence: the edge waits for work no longer than the deadline."""
    if removed:
        wait = asyncio.wait
        monkeypatch.setattr(asyncio, "wait", lambda tasks, timeout=None: wait(tasks))
    forever = asyncio.Event()
    call = asyncio.ensure_future(finish(_until(forever), 20))
    assert await _ended(call) != removed
    forever.set()
    await asyncio.gather(call, return_exceptions=True)
    assert removed or isinstance(call.exception(), DeadlineExceeded)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _ended(call: asyncio.Future[None], seconds: float = 1.0) -> bool:
    """Whether it ended well after its deadline."""
    end = asyncio.get_running_loop().time() + seconds
    while not call.done() and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.005)
    return call.done()


@both
@on_loop
async def test_7_what_comes_too_late_is_undone(rig: Rig, removed: bool) -> None:
    """Defence: a lease whose caller was told of a deadline is given back when the work ends."""
    rig.target.barrier_result = type(rig.target.barrier_result).UNKNOWN
    m = await opened(rig)
    await rig.put(m, b"k", VALUE)
    await rig.restart()
    m = await rig.open()
    gate = rig.target.hold("checksums")
    blocks = rig.node.blocks

    async def give_back(late: Any) -> None:
        blocks.release(m.session, [late.lease])

    work = blocks.acquire(m.session, [BlockKey(b"k")], 60_000)
    with pytest.raises(DeadlineExceeded):
        await finish(work, 10, None if removed else give_back)
    gate.open.set()
    await until(lambda: rig.node.engine.counters["acquire_hits"] == 1, "the work ended")
    for _ in range(20):
        await asyncio.sleep(0)
    assert bool(rig.node.engine.index.leases.any()) == removed


@both
@on_loop
async def test_7_a_dead_peer_is_noticed_by_time(rig: Rig, monkeypatch: Patch, removed: bool) -> None:
    """Defence: sessions that were silent too long end, with all that they hold."""
    m = await opened(rig)
    await rig.allocate(m, b"k", ttl_ms=10**9)
    if removed:
        monkeypatch.setattr(SessionTable, "expired", lambda self: [])
    rig.clock.advance(rig.limits.expiry_ms + 1)
    await rig.node.sweep()
    assert bool(len(rig.node.sessions) and len(rig.node.writes)) == removed


@both
def test_7_too_many_calls_at_once_are_told_to_come_back(monkeypatch: Patch, removed: bool) -> None:
    """Defence: calls in flight are counted; the next one gets Busy, with a time."""
    if removed:
        monkeypatch.setattr(calls, "_MAX_IN_FLIGHT", 1 << 60)
    places: list[Place] = []
    edge = Calls(Acl(DesiredState(MemoryStore())), Counter())
    refused: ForebayError | None = None
    for _ in range(1024):
        places.append(edge.calls.enter("one"))
    try:
        edge.calls.enter("one")
    except Busy as busy:
        refused = busy
    assert (refused is None) == removed
    if refused is not None:
        assert refused.retry_after_ms > 0 and refused.limit == 2048
        edge.calls.enter("another"), "what one does not get is there for others"
        places.pop().leave()
        places.pop().leave()
        edge.calls.enter("one")


@on_loop
async def test_7_too_many_sessions_are_told_to_come_back(rig: Rig) -> None:
    rig.limits = type(rig.limits)(REGION, max_blocks=1 << 16, max_sessions=2)
    await opened(rig)
    m = await rig.open()
    with pytest.raises(Busy) as caught:
        await rig.open()
    assert caught.value.retry_after_ms > 0 and len(rig.target.allowed) == 2
    await rig.node.end_session(m.session)
    assert isinstance((await rig.open()).host, SimHost)
