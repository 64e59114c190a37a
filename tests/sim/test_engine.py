"""The engine on the simulated target: what each call promises, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from forebay.appliance.dataplane.interface import Barrier
from forebay.appliance.namespace.desired_state import Grant
from forebay.appliance.namespace.sessions import SessionState
from forebay.appliance.namespace.store import Op
from forebay.appliance.namespace.writes import TileSum
from forebay.errors import (
    OK,
    Absent,
    AlreadyExists,
    ConnectionLost,
    DuplicateKey,
    ForebayError,
    GridInvalid,
    NamespaceNotFound,
    NoSpace,
    Pending,
    PermissionDenied,
    QuotaExceeded,
    SessionExpired,
    StaleGeneration,
    TargetRefused,
    Unavailable,
    WriteExpired,
    WriteFenced,
)
from forebay.ids import LBA_BYTES, MAX_BATCH_KEYS, BlockKey, WriteId
from forebay.index import RowState
from forebay.schema import Schema
from tests.sim.rig import GRID, MIB, REGION, Rig, grid
from tests.sim.running import on_loop
from tests.sim.target import SimHost, SimTarget

OPAQUE = Schema.opaque()
VALUE = bytes(range(256)) * 64  # 16 KiB: the grid's four tiles
assert len(VALUE) == GRID.groups[0].layout().value_bytes


# ---------------------------------------------------------------------------------------------------- put and get


@on_loop
async def test_put_then_get(rig: Rig) -> None:
    m = await rig.begin()
    assert await rig.get(m, b"k") is None
    assert await rig.put(m, b"k", VALUE) == OK
    assert await rig.get(m, b"k") == VALUE
    assert rig.present(m, b"k", b"other") == [True, False]
    assert await rig.put(m, b"k", VALUE) == AlreadyExists.code
    rig.check()


@on_loop
async def test_keyspaces_generations_scopes_and_groups_never_meet(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    first = await rig.open(scopes=("default", "a"))
    a = first.session.scopes
    scope = next(i for i, name in a.items() if name == "a")
    assert await rig.put(first, BlockKey(b"k"), VALUE) == OK
    other_schema = await rig.open(schema=grid(2 * LBA_BYTES))
    other_generation = await rig.open(generation=1)
    assert rig.present(first, BlockKey(b"k"), BlockKey(b"k", 0, scope)) == [True, False]
    assert rig.present(other_schema, b"k") == [False]
    assert rig.present(other_generation, b"k") == [False]
    await rig.namespace("t/other")
    assert rig.present(await rig.open("t/other"), b"k") == [False]


@on_loop
async def test_nothing_is_visible_before_the_last_tile(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    sums = rig.sums(m, b"k", row.write_id, VALUE)
    for tile in sums[:-1]:
        assert await rig.node.writes.commit(m.session, [(row.write_id, [tile])]) == [Pending.code]
        assert rig.present(m, b"k") == [False]
        assert rig.store.get("blocks", m.session.stored_keys([BlockKey(b"k")])[0]) is None
    assert await rig.node.writes.commit(m.session, [(row.write_id, [sums[-1]])]) == [OK]
    assert await rig.get(m, b"k") == VALUE


@on_loop
async def test_commit_twice_gets_the_first_answer(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    sums = rig.sums(m, b"k", row.write_id, VALUE)
    assert await rig.node.writes.commit(m.session, [(row.write_id, sums)]) == [OK]
    assert await rig.node.writes.commit(m.session, [(row.write_id, sums)]) == [OK]
    assert await rig.node.writes.commit(m.session, [(WriteId(bytes(16)), sums)]) == [WriteExpired.code]
    rig.check()


@on_loop
async def test_commits_that_overlap_share_one_outcome(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    sums = rig.sums(m, b"k", row.write_id, VALUE)
    gate = rig.target.hold("barrier")
    first = asyncio.ensure_future(rig.node.writes.commit(m.session, [(row.write_id, sums)]))
    await gate.reached.wait()
    second = asyncio.ensure_future(rig.node.writes.commit(m.session, [(row.write_id, sums[:1])]))
    await asyncio.sleep(0)
    assert not second.done()
    gate.open.set()
    assert await first == await second == [OK]


@on_loop
@pytest.mark.parametrize("answered", [False, True], ids=["the flush was not answered", "no flush was under way"])
async def test_what_a_flush_was_for_is_in_doubt_when_its_target_ends_without_an_answer(
    rig: Rig, answered: bool
) -> None:
    """Linux tells of a failed write-back once: a target that ended knew, and the flush of the next hears nothing."""
    m = await rig.begin()
    mine, other = await rig.allocate(m, b"mine", b"other")
    rows = [rig.written(m, b"mine", mine, VALUE), rig.written(m, b"other", other, VALUE)]
    if not answered:
        rig.target.fail("seal")
        assert await rig.node.writes.commit(m.session, rows[:1]) == [Unavailable.code]
    rig.target.restart()
    await rig.node.replay()
    committed = await rig.node.writes.commit(m.session, rows)
    assert committed == ([OK, OK] if answered else [WriteExpired.code] * 2)
    assert rig.present(m, b"mine") == rig.present(m, b"other") == [answered]


@on_loop
async def test_a_flush_that_the_next_target_answers_vouches_for_nothing(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    rows = [rig.written(m, b"k", row, VALUE)]
    gate = rig.target.hold("seal")
    commit = asyncio.ensure_future(rig.node.writes.commit(m.session, rows))
    await gate.reached.wait()
    rig.target.restart()
    await rig.node.replay()
    gate.open.set()
    assert await commit == [Unavailable.code]
    assert rig.present(m, b"k") == [False]


@pytest.mark.parametrize(
    "tiles",
    [[], [TileSum(4, 1)], [TileSum(0, 1), TileSum(0, 2)]],
    ids=["none", "outside", "one tile twice with other sums"],
)
@on_loop
async def test_commit_outside_the_grid_is_refused_and_nothing_is_done(rig: Rig, tiles: list[TileSum]) -> None:
    m = await rig.begin()
    good, bad = await rig.allocate(m, b"good", b"bad")
    assert good.extent is not None
    rig.write(m, b"good", good.extent, VALUE)
    with pytest.raises(GridInvalid, match="row 1"):
        await rig.node.writes.commit(
            m.session, [(good.write_id, rig.sums(m, b"good", good.write_id, VALUE)), (bad.write_id, tiles)]
        )
    assert rig.present(m, b"good") == [False]
    assert await rig.node.writes.commit(m.session, [(good.write_id, rig.sums(m, b"good", good.write_id, VALUE))]) == [
        OK
    ]


@on_loop
async def test_a_tile_cannot_be_committed_with_another_checksum(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    await rig.node.writes.commit(m.session, [(row.write_id, [TileSum(0, 1)])])
    with pytest.raises(GridInvalid):
        await rig.node.writes.commit(m.session, [(row.write_id, [TileSum(0, 2)])])
    with pytest.raises(GridInvalid):
        # the same write twice in one call, contradicting itself
        await rig.node.writes.commit(m.session, [(row.write_id, [TileSum(1, 1)]), (row.write_id, [TileSum(1, 2)])])


@on_loop
async def test_one_writer_a_key(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    a, b = await rig.open(), await rig.open()
    (first,) = await rig.allocate(a, b"k")
    (second,) = await rig.allocate(b, b"k")
    assert (first.status, second.status) == (OK, Pending.code)
    assert await rig.node.writes.abort(b.session, [first.write_id], quiesced=[b.identity]) == 0  # not b's to abort
    assert await rig.node.writes.abort(a.session, [first.write_id], quiesced=[a.identity]) == 1
    (third,) = await rig.allocate(b, b"k")
    assert third.status == OK
    rig.check()


@on_loop
async def test_batches_lie_in_consecutive_extents(rig: Rig) -> None:
    m = await rig.begin()
    rows = await rig.allocate(m, *[b"%d" % i for i in range(100)])
    ends = [r.extent.end_bytes for r in rows if r.extent]
    starts = [r.extent.offset_bytes for r in rows if r.extent]
    assert starts[1:] == ends[:-1]


@on_loop
async def test_duplicates_are_refused_in_writes_and_allowed_in_reads(rig: Rig) -> None:
    m = await rig.begin()
    with pytest.raises(DuplicateKey) as caught:
        await rig.allocate(m, b"a", b"b", b"a")
    assert caught.value.field == "keys[2]"
    assert len(rig.node.writes) == 0
    await rig.put(m, b"a", VALUE)
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"a")] * 3, 1000)
    assert located.status.tolist() == [OK] * 3
    assert rig.node.blocks.release(m.session, [located.lease]) == 1
    assert rig.node.engine.index.leases[: rig.node.engine.index.high].sum() == 0


@on_loop
async def test_leases_of_a_block_cannot_overflow(rig: Rig) -> None:
    """A batch may name one key many times; the count of leases is 16 bits wide and must not wrap to zero."""
    m = await rig.begin()
    await rig.put(m, b"a", VALUE)
    held, statuses = 0, set()
    for _ in range(6):
        located = await rig.node.blocks.acquire(m.session, [BlockKey(b"a")] * MAX_BATCH_KEYS, 1000)
        held += int((located.status == OK).sum())
        statuses |= set(located.status.tolist())
        assert int(rig.node.engine.index.leases[0]) == held
    assert len(statuses) == 2  # at some point it is Busy


@pytest.mark.parametrize("quota_bytes", [MIB, 0], ids=["quota", "capacity"])
@on_loop
async def test_other_sizes_make_room_for_each_other(rig: Rig, quota_bytes: int) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=quota_bytes)
    big, small = await rig.open(schema=OPAQUE), await rig.open()
    size = quota_bytes or REGION
    for i in range(8):
        assert await rig.put(big, b"%d" % i, bytes(size)) == OK
        rig.check()
    assert await rig.put(small, b"k", VALUE) == OK
    assert await rig.get(small, b"k") == VALUE
    rig.check()


@on_loop
async def test_without_eviction_a_full_namespace_says_so(rig: Rig) -> None:
    await rig.start()
    await rig.namespace("t/q", eviction="none", quota_bytes=2 * len(VALUE))
    await rig.namespace("t/c", eviction="none")
    q, c = await rig.open("t/q"), await rig.open("t/c", OPAQUE)
    assert [await rig.put(q, b"%d" % i, VALUE) for i in range(3)] == [OK, OK, QuotaExceeded.code]
    statuses = [await rig.put(c, b"%d" % i, bytes(REGION)) for i in range(4)]
    assert statuses == [OK] * 3 + [NoSpace.code]
    assert all(rig.present(c, *[b"%d" % i for i in range(3)]))
    rig.check()


@on_loop
async def test_an_allocation_that_fails_half_way_gives_back_what_it_took(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(schema=OPAQUE)
    await rig.put(m, b"first", bytes(20 * MIB))  # leaves two slots of three
    rig.target.fail("prepare_region")
    with pytest.raises(Unavailable):
        await rig.allocate(m, *[b"%d" % i for i in range(5)], size=20 * MIB)
    await rig.node.sweep()
    assert len(rig.node.writes) == 0
    rig.check()
    rows = await rig.allocate(m, *[b"%d" % i for i in range(5)], size=20 * MIB)
    assert [r.status for r in rows] == [OK] * 5
    rig.check()


@on_loop
async def test_a_region_whose_release_fails_is_neither_lost_nor_used(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(schema=OPAQUE)
    for _ in range(3):
        await rig.put(m, b"k", bytes(20 * MIB))
        await rig.node.blocks.delete(m.session, [BlockKey(b"k")])
        rig.target.fail("release_region")
        with pytest.raises(Unavailable):
            await rig.node.release_empty_regions()
        rig.check()
    await rig.node.release_empty_regions()
    assert rig.node.engine.space.drives["drive0"].claimed_regions == 0
    rig.check()


@pytest.mark.parametrize("present", [(), (0,), (0, 1, 3), (1, 2), (0, 1, 2, 3)])
@on_loop
async def test_a_match_of_plain_keys_answers_as_one_with_columns(rig: Rig, present: tuple[int, ...]) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(schema=OPAQUE)
    for i in present:
        assert await rig.put(m, b"%d" % i, b"x" * (i + 1)) == OK
    raw = [b"%d" % i for i in range(4)]
    status, prefix, size, elsewhere = rig.node.blocks.match_plain(m.session, raw)
    assert status.dtype == np.uint16
    assert status.tolist() == [OK if i in present else Absent.code for i in range(4)]
    assert size == sum(i + 1 for i in present)
    assert prefix == {0: next((i for i in range(4) if i not in present), 4)}
    again = rig.node.blocks.match(m.session, [BlockKey(k) for k in raw])
    assert (again[0].tolist(), again[1:]) == (status.tolist(), (prefix, size, elsewhere))
    assert elsewhere is None
    assert rig.node.engine.counters["match_hits"] == 2 * len(present)
    await rig.node.end_session(m.session)
    with pytest.raises(SessionExpired):
        rig.node.blocks.match_plain(m.session, raw)


# ---------------------------------------------------------------------------------------------------- the target fails


@pytest.mark.parametrize("done", [False, True], ids=["not asked", "answer lost"])
@pytest.mark.parametrize(
    ("method", "seal"),
    [("grant", True), ("seal", True), ("revoke", True), ("barrier", True), ("revoke", False), ("barrier", False)],
)
@on_loop
async def test_a_target_that_does_not_answer_loses_nothing(rig: Rig, method: str, seal: bool, done: bool) -> None:
    """A target that seals may do half of it."""
    rig.target = SimTarget(seal=seal)
    m = await rig.begin()
    rig.target.fail(method, done=done)
    if method == "grant":
        with pytest.raises(Unavailable):
            await rig.put(m, b"k", VALUE)
    else:
        assert await rig.put(m, b"k", VALUE) == Unavailable.code
    assert rig.present(m, b"k") == [False]
    rig.clock.advance(60_000)
    m.session.seen_ms = rig.clock.monotonic_ms()
    await rig.node.sweep()
    assert len(rig.node.writes) == 0 and not rig.target.grants
    rig.check()
    m.host = SimHost(rig.target, "t", m.identity)
    assert await rig.put(m, b"k", VALUE) == OK
    assert await rig.get(m, b"k") == VALUE
    rig.check()


@pytest.mark.parametrize("seal", [True, False])
@on_loop
async def test_a_commit_may_be_tried_again_after_the_target_failed(rig: Rig, seal: bool) -> None:
    rig.target = SimTarget(seal=seal)
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    rows = [rig.written(m, b"k", row, VALUE)]
    rig.target.fail("barrier")
    assert await rig.node.writes.commit(m.session, rows) == [Unavailable.code]
    assert await rig.node.writes.commit(m.session, rows) == [OK]
    assert await rig.get(m, b"k") == VALUE


@pytest.mark.parametrize("seal", [True, False])
@on_loop
async def test_commits_that_come_while_one_is_sealed_share_the_next(rig: Rig, seal: bool) -> None:
    """Two seals for five commits, and in each all grants are revoked before the barrier begins."""
    rig.target = SimTarget(seal=seal)
    m = await rig.begin()
    rows = await rig.allocate(m, *[b"%d" % i for i in range(5)])
    for i, row in enumerate(rows):
        assert row.extent is not None
        rig.write(m, b"%d" % i, row.extent, VALUE)

    def commit(i: int) -> asyncio.Future[list[int]]:
        sums = rig.sums(m, b"%d" % i, rows[i].write_id, VALUE)
        return asyncio.ensure_future(rig.node.writes.commit(m.session, [(rows[i].write_id, sums)]))

    first, second = rig.target.hold("barrier"), rig.target.hold("barrier")
    commits = [commit(0)]
    await first.reached.wait()
    assert len(rig.target.grants) == 4
    commits += [commit(i) for i in range(1, 5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(rig.target.grants) == 4, "the next seal begins when the first has ended"
    first.open.set()
    await second.reached.wait()
    assert not rig.target.grants and rig.present(m, b"1", b"4") == [False, False]
    second.open.set()
    assert list(await asyncio.gather(*commits)) == [[OK]] * 5
    assert (rig.target.calls["barrier"], rig.target.calls["seal"]) == (2, 2 if seal else 0)
    for i in range(5):
        assert await rig.get(m, b"%d" % i) == VALUE
    rig.check()


@on_loop
async def test_a_seal_that_fails_is_the_outcome_of_all_who_shared_it_and_of_no_other(rig: Rig) -> None:
    m = await rig.begin()
    rows = await rig.allocate(m, b"0", b"1", b"2")
    for i, row in enumerate(rows):
        assert row.extent is not None
        rig.write(m, b"%d" % i, row.extent, VALUE)

    def commit(i: int) -> asyncio.Future[list[int]]:
        sums = rig.sums(m, b"%d" % i, rows[i].write_id, VALUE)
        return asyncio.ensure_future(rig.node.writes.commit(m.session, [(rows[i].write_id, sums)]))

    gate = rig.target.hold("barrier")
    alone = commit(0)
    await gate.reached.wait()
    rig.target.fail("seal")
    shared = [commit(1), commit(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    gate.open.set()
    assert await alone == [OK]
    assert list(await asyncio.gather(*shared)) == [[Unavailable.code]] * 2
    assert rig.present(m, b"0", b"1", b"2") == [True, False, False]
    assert list(await asyncio.gather(commit(1), commit(2))) == [[OK]] * 2
    rig.check()


@pytest.mark.parametrize("seal", [True, False])
@on_loop
async def test_a_block_whose_barrier_is_unknown_is_verified_after_an_unclean_stop(rig: Rig, seal: bool) -> None:
    rig.target = SimTarget(seal=seal, barrier=Barrier.UNKNOWN)
    m = await rig.begin()
    assert await rig.put(m, b"k", VALUE) == OK and not rig.target.grants
    await rig.restart()
    assert rig.node.recovered.suspects == 1
    assert await rig.get(await rig.open(), b"k") == VALUE
    assert rig.node.engine.counters["blocks_verified"] == 1


@on_loop
async def test_fences_go_on_when_the_target_comes_back(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    rig.target.fail("revoke", times=2)
    with pytest.raises(Unavailable):
        await rig.node.writes.abort(m.session, [row.write_id])
    await rig.node.sweep()
    assert len(rig.node.writes) == 1
    rig.check()
    await rig.node.sweep()
    assert len(rig.node.writes) == 0
    rig.check()


@on_loop
async def test_replay_restores_volumes_hosts_and_grants(rig: Rig) -> None:
    m = await rig.begin()
    await rig.put(m, b"old", VALUE)
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.target.restart()
    with pytest.raises(ConnectionLost):
        rig.write(m, b"k", row.extent, VALUE)
    await rig.node.replay()
    m.host = SimHost(rig.target, "t", m.identity)
    rig.write(m, b"k", row.extent, VALUE)
    assert await rig.node.writes.commit(m.session, [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))]) == [OK]
    assert await rig.get(m, b"old") == await rig.get(m, b"k") == VALUE
    assert not rig.target.grants


@on_loop
async def test_a_replay_opens_no_extent_that_was_committed_meanwhile(rig: Rig) -> None:
    """The replay reads which grants are live, then tells the target; what ends in between must stay ended."""
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    gate = rig.target.hold("grant")
    replay = asyncio.ensure_future(rig.node.replay())
    await gate.reached.wait()
    commit = asyncio.ensure_future(
        rig.node.writes.commit(m.session, [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))])
    )
    for _ in range(50):
        await asyncio.sleep(0)
    gate.open.set()
    await replay
    assert await commit == [OK]
    assert not rig.target.grants
    with pytest.raises(WriteFenced):
        rig.write(m, b"k", row.extent, bytes(len(VALUE)))


@on_loop
async def test_a_replay_brings_no_host_back_whose_session_ended_meanwhile(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    a, b = await rig.open(), await rig.open()
    rig.target.restart()
    gate = rig.target.hold("reconcile")
    replay = asyncio.ensure_future(rig.node.replay())
    await gate.reached.wait()
    end = asyncio.ensure_future(rig.node.end_session(b.session))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(replay, end)
    assert {nqn for _, nqn in rig.target.allowed} == {a.identity.nqn}


# ---------------------------------------------------------------------------------------------------- sessions


@on_loop
async def test_a_session_that_is_silent_ends_with_all_that_belongs_to_it(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    dead, alive = await rig.open(), await rig.open()
    await rig.put(dead, b"k", VALUE)
    await rig.node.blocks.acquire(dead.session, [BlockKey(b"k")], 10_000)
    await rig.node.blocks.pin(dead.session, [BlockKey(b"k")], True, False)
    await rig.allocate(dead, b"pending")
    index = rig.node.engine.index
    assert (index.leases[0], index.pins[0]) == (1, 1)
    rig.clock.advance(rig.limits.expiry_ms)
    rig.node.sessions.get(alive.session.id, "root")
    rig.clock.advance(1)
    await rig.node.sweep()
    assert [s.id for s in rig.node.sessions] == [alive.session.id]
    assert (index.leases[0], index.pins[0], len(rig.node.writes)) == (0, 0, 0)
    assert rig.target.controllers(dead.identity) == 0
    with pytest.raises(TargetRefused):
        SimHost(rig.target, "t", dead.identity)
    with pytest.raises(SessionExpired):
        rig.node.sessions.get(dead.session.id, "root")
    assert await rig.get(alive, b"k") == VALUE
    rig.check()


@on_loop
async def test_a_session_whose_hosts_cannot_be_removed_goes_on_ending(rig: Rig) -> None:
    m = await rig.begin()
    await rig.allocate(m, b"k")
    rig.target.fail("remove_host")
    with pytest.raises(Unavailable):
        await rig.node.end_session(m.session)
    assert [s.state for s in rig.node.sessions] == [SessionState.ENDING]
    assert len(rig.node.writes) == 1
    await rig.node.sweep()
    assert len(rig.node.sessions) == len(rig.node.writes) == 0
    rig.check()


@on_loop
async def test_a_lease_ends_at_its_deadline_and_not_before(rig: Rig) -> None:
    m = await rig.begin()
    await rig.put(m, b"k", VALUE)
    await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 500)
    rig.clock.advance(499)
    await rig.node.sweep()
    assert rig.node.engine.index.leases[0] == 1
    rig.clock.advance(1)
    await rig.node.sweep()
    assert rig.node.engine.index.leases[0] == 0 and not m.session.leases


@on_loop
async def test_no_host_joins_a_session_that_ended_while_it_waited_its_turn(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    a, b = await rig.open(), await rig.open()
    gate = rig.target.hold("add_host")
    first = asyncio.ensure_future(rig.join(a))
    await gate.reached.wait()
    end = asyncio.ensure_future(rig.node.end_session(b.session))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(rig.node._new_host(b.session))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(first, end)
    with pytest.raises(SessionExpired):
        await late
    assert b.session.hosts == {} and len(rig.target.allowed) == 2


@on_loop
async def test_no_lease_or_pin_for_a_session_that_ended(rig: Rig) -> None:
    """A call that passed the door before its session ended must not leave a lease that nobody will ever end."""
    m = await rig.begin()
    await rig.put(m, b"k", VALUE)
    await rig.node.end_session(m.session)
    with pytest.raises(SessionExpired):
        await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 500)
    with pytest.raises(SessionExpired):
        await rig.node.blocks.pin(m.session, [BlockKey(b"k")], True, False)
    with pytest.raises(SessionExpired):
        await rig.allocate(m, b"other")
    index = rig.node.engine.index
    assert (index.leases[0], index.pins[0], len(rig.node.writes)) == (0, 0, 0)


@on_loop
async def test_no_lease_for_a_session_that_ends_while_its_blocks_are_verified(rig: Rig) -> None:
    rig.target.barrier_result = Barrier.UNKNOWN
    await rig.start()
    await rig.namespace()
    await rig.put(await rig.open(), b"k", VALUE)
    await rig.restart()
    m = await rig.open()
    gate = rig.target.hold("checksums")
    acquire = asyncio.ensure_future(rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 500))
    await gate.reached.wait()
    await rig.node.end_session(m.session)
    gate.open.set()
    with pytest.raises(SessionExpired):
        await acquire
    assert rig.node.engine.index.leases[0] == 0


@pytest.mark.parametrize("join", [False, True], ids=["open", "join"])
@on_loop
async def test_no_host_stays_when_its_session_ends_while_it_is_added(rig: Rig, join: bool) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open() if join else None
    gate = rig.target.hold("add_host")
    if m is not None:
        call = asyncio.ensure_future(rig.join(m))
    else:
        call = asyncio.ensure_future(rig.open())
    await gate.reached.wait()
    ends = [asyncio.ensure_future(rig.node.end_session(session)) for session in rig.node.sessions]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*ends)
    late = await call
    assert not rig.target.allowed and not late.session.hosts and len(rig.node.sessions) == 0
    assert rig.target.controllers(late.identity) == 0


@on_loop
async def test_a_session_that_ends_while_it_allocates_leaves_nothing(rig: Rig) -> None:
    m = await rig.begin()
    gate = rig.target.hold("grant")
    call = asyncio.ensure_future(rig.allocate(m, b"k"))
    await gate.reached.wait()
    await rig.node.end_session(m.session)
    gate.open.set()
    with pytest.raises(SessionExpired):
        await call
    await rig.node.sweep()
    assert len(rig.node.writes) == 0 and not rig.target.grants
    rig.check()


@on_loop
async def test_a_namespace_deleted_while_one_allocates_leaves_nothing(rig: Rig) -> None:
    m = await rig.begin()
    gate = rig.target.hold("grant")
    call = asyncio.ensure_future(rig.allocate(m, b"k"))
    await gate.reached.wait()
    await rig.node.delete_namespace("t/n", force=True)
    gate.open.set()
    with pytest.raises(ForebayError):
        await call
    await rig.node.sweep()
    assert len(rig.node.writes) == 0
    rig.check()
    await rig.namespace()
    assert await rig.put(await rig.open(), b"k", VALUE) == OK


@on_loop
async def test_no_session_opens_in_a_namespace_that_goes_away_meanwhile(rig: Rig) -> None:
    """What it stored would belong to no namespace; so also a minimum that rises and rights that are taken away."""
    await rig.start()
    for i, how in enumerate(("deleted", "raised", "denied")):
        await rig.namespace()
        who = await rig.principal(how, Grant("t/n", ("read",)))
        store, gate = rig.store, asyncio.Event()
        write = store.write

        async def slowly(ops: Sequence[Op], *, durable: bool = True) -> None:
            if any(op.family == "keyspaces" for op in ops):
                await gate.wait()  # noqa: B023  one round after the other
            await write(ops, durable=durable)  # noqa: B023

        store.write = slowly  # type: ignore[method-assign]
        schema = grid(LBA_BYTES * (3 + i))
        call = asyncio.ensure_future(rig.open(schema=schema, principal=who))
        for _ in range(5):
            await asyncio.sleep(0)
        if how == "deleted":
            await rig.node.delete_namespace("t/n", force=True)
        elif how == "raised":
            await rig.node.update_namespace("t/n", min_generation=1)
        else:
            await rig.node.state.change_principal(how, grants=())
        gate.set()
        with pytest.raises((NamespaceNotFound, StaleGeneration)):
            await call
        assert len(rig.node.sessions) == 0 and not rig.target.allowed
        del store.write
        if how != "deleted":
            await rig.node.delete_namespace("t/n", force=True)


@on_loop
async def test_a_namespace_deleted_while_a_region_is_claimed_leaves_nothing(rig: Rig) -> None:
    m = await rig.begin()
    gate = rig.target.hold("prepare_region")
    call = asyncio.ensure_future(rig.allocate(m, b"k"))
    await gate.reached.wait()
    delete = asyncio.ensure_future(rig.node.delete_namespace("t/n", force=True))
    for _ in range(50):
        await asyncio.sleep(0)
    gate.open.set()
    with pytest.raises(ForebayError):
        await call
    await delete
    await rig.node.sweep()
    assert len(rig.node.writes) == 0
    rig.check()
    assert not list(rig.store.scan("regions"))


@on_loop
async def test_rights_that_are_taken_away_end_what_they_gave(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    who = await rig.principal("p", Grant("t/n", ("read", "write")))
    m = await rig.open(principal=who)
    assert await rig.put(m, b"k", VALUE) == OK
    await rig.node.state.change_principal("p", grants=(Grant("t/n", ("read",)),))
    await rig.node.refresh_access("p")
    with pytest.raises(PermissionDenied):
        m.session.access.need("write")
    await rig.node.state.change_principal("p", grants=())
    await rig.node.refresh_access("p")
    assert m.session.state is SessionState.ENDED
    assert not rig.target.allowed


# ---------------------------------------------------------------------------------------------------- the end of blocks


@on_loop
async def test_a_leased_block_that_is_deleted_can_be_read_until_the_lease_ends(rig: Rig) -> None:
    m = await rig.begin()
    await rig.put(m, b"k", VALUE)
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 1000)
    used = rig.node.engine.space.used_bytes(m.session.namespace)
    await rig.node.blocks.delete(m.session, [BlockKey(b"k")])
    assert rig.present(m, b"k") == [False]
    assert await rig.put(m, b"k", VALUE[::-1]) == OK
    assert rig.read(m, b"k", located) == VALUE
    assert rig.node.engine.space.used_bytes(m.session.namespace) == 2 * used
    rig.check()
    rig.node.blocks.release(m.session, [located.lease])
    assert rig.node.engine.space.used_bytes(m.session.namespace) == used
    assert await rig.get(m, b"k") == VALUE[::-1]
    rig.check()


@on_loop
async def test_leases_of_one_block_that_are_given_back_together_free_it_once(rig: Rig) -> None:
    m = await rig.begin()
    await rig.put(m, b"k", VALUE)
    await rig.put(m, b"other", VALUE)
    both = [BlockKey(b"k"), BlockKey(b"other")]
    leases = [(await rig.node.blocks.acquire(m.session, both, 1000)).lease for _ in range(3)]
    index, space = rig.node.engine.index, rig.node.engine.space
    used = space.used_bytes(m.session.namespace)
    await rig.node.blocks.delete(m.session, both[:1])
    assert rig.node.blocks.release(m.session, [leases[0], 12345]) == 1
    assert (space.used_bytes(m.session.namespace), index.leases[: index.high].tolist()) == (used, [2, 2])
    assert rig.node.blocks.release(m.session, leases) == 2
    assert (space.used_bytes(m.session.namespace), index.leases[: index.high].tolist()) == (used // 2, [0, 0])
    assert await rig.get(m, b"other") == VALUE
    rig.check()


@pytest.mark.parametrize("how", ["leased", "pinned", "pinned for good", "pending"])
@on_loop
async def test_what_is_in_use_is_never_evicted(rig: Rig, how: str) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(schema=OPAQUE)
    value = bytes(REGION)
    kept = [BlockKey(b"keep")]
    pending = None
    if how == "pending":
        (pending,) = await rig.allocate(m, b"keep", size=len(value))
    else:
        await rig.put(m, b"keep", value)
    if how == "leased":
        await rig.node.blocks.acquire(m.session, kept, 10_000)
    elif how.startswith("pinned"):
        await rig.node.blocks.pin(m.session, kept, True, how == "pinned for good")
    for i in range(8):
        assert await rig.put(m, b"%d" % i, value) == OK
        rig.check()
    if pending is not None:
        assert rig.node.writes.pending(rig.node.engine.index.digests(m.session.stored_keys(kept))[0].tobytes())
    else:
        assert rig.present(m, b"keep") == [True]
    if how == "pinned for good":
        await rig.node.end_session(m.session)
        await rig.restart()
        m = await rig.open(schema=OPAQUE)
        for i in range(8):
            await rig.put(m, b"again %d" % i, value)
        assert rig.present(m, b"keep") == [True]
        await rig.node.blocks.pin(m.session, kept, False, True)
    for i in range(8):
        if how == "leased":
            rig.node.blocks.release(m.session, list(m.session.leases))
        elif how == "pinned":
            await rig.node.blocks.pin(m.session, kept, False, False)
        await rig.put(m, b"later %d" % i, value)
    if pending is None:
        assert rig.present(m, b"keep") == [False]  # so that the test can fail
    rig.check()


@pytest.mark.parametrize("blocks", [8, 512])
@on_loop
async def test_making_room_takes_a_small_part_of_what_there_is(rig: Rig, blocks: int) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=blocks * len(VALUE))
    m = await rig.open()
    for i in range(blocks):
        await rig.put(m, b"%d" % i, VALUE)
    await rig.put(m, b"new", VALUE)
    assert rig.node.engine.counters["blocks_evicted"] == max(1, blocks // 64 + 1)


@on_loop
async def test_a_value_that_no_quota_admits_evicts_nothing(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=4 * len(VALUE))
    m, big = await rig.open(), await rig.open(schema=OPAQUE)
    await rig.put(m, b"k", VALUE)
    assert await rig.put(big, b"big", bytes(5 * len(VALUE))) == QuotaExceeded.code
    await rig.node.update_namespace("t/n", quota_bytes=0)
    await rig.node.set_scope_quota("t/n", "default", 4 * len(VALUE))
    assert await rig.put(big, b"big", bytes(5 * len(VALUE))) == QuotaExceeded.code
    assert rig.present(m, b"k") == [True]


@on_loop
async def test_storing_a_block_again_is_a_use_of_it(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=64 * len(VALUE))
    m = await rig.open()
    for i in range(64):
        await rig.put(m, b"%d" % i, VALUE)
    rows = await rig.allocate(m, b"0", b"new")
    assert [r.status for r in rows] == [AlreadyExists.code, OK]
    assert rig.present(m, b"0") == [True]


@on_loop
async def test_the_least_recently_used_goes_first(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=64 * len(VALUE))
    m = await rig.open()
    for i in range(64):
        await rig.put(m, b"%d" % i, VALUE)
    rig.node.blocks.touch(m.session, [BlockKey(b"0"), BlockKey(b"1")])
    rig.present(m, *[b"%d" % i for i in range(64)])  # asking moves nothing
    await rig.put(m, b"new", VALUE)
    gone = [i for i, there in enumerate(rig.present(m, *[b"%d" % i for i in range(64)])) if not there]
    assert gone == list(range(2, 2 + len(gone))) and gone


@on_loop
async def test_blocks_of_generations_below_the_minimum_go_first_and_are_never_found(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=64 * len(VALUE))
    old, new = await rig.open(generation=1), await rig.open(generation=2)
    for i in range(32):
        await rig.put(new, b"%d" % i, VALUE)
        await rig.put(old, b"%d" % i, VALUE)
    located = await rig.node.blocks.acquire(old.session, [BlockKey(b"0")], 10_000)
    await rig.node.update_namespace("t/n", min_generation=2)
    with pytest.raises(StaleGeneration):
        rig.present(old, b"0")
    with pytest.raises(StaleGeneration):
        await rig.node.blocks.acquire(old.session, [BlockKey(b"0")], 10_000)
    with pytest.raises(StaleGeneration):
        await rig.open(generation=1)
    assert rig.read(old, b"0", located) == VALUE  # a lease already given runs out
    for i in range(16):
        await rig.put(new, b"more %d" % i, VALUE)
    assert all(rig.present(new, *[b"%d" % i for i in range(32)]))
    with pytest.raises(StaleGeneration):
        await rig.node.update_namespace("t/n", min_generation=1)
    rig.check()


@on_loop
async def test_a_commit_below_the_minimum_is_refused_and_its_space_freed(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(generation=1)
    (row,) = await rig.allocate(m, b"k")
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    await rig.node.update_namespace("t/n", min_generation=2)
    rows = [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))]
    assert await rig.node.writes.commit(m.session, rows) == [StaleGeneration.code]
    assert await rig.node.writes.commit(m.session, rows) == [StaleGeneration.code]
    assert not list(rig.store.scan("blocks")) and len(rig.node.writes) == 0
    assert rig.node.engine.space.used_bytes(m.session.namespace) == 0
    rig.check()


# ---------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("clean", [False, True], ids=["killed", "stopped"])
@on_loop
async def test_committed_blocks_are_there_after_a_restart_and_pending_ones_gone(durable_rig: Rig, clean: bool) -> None:
    rig = durable_rig
    m = await rig.begin()
    for i in range(20):
        assert await rig.put(m, b"%d" % i, VALUE[i:] + VALUE[:i]) == OK
    await rig.node.blocks.delete(m.session, [BlockKey(b"3")])
    await rig.allocate(m, b"pending")
    used = 19 * len(VALUE)
    await rig.restart(clean=clean)
    with pytest.raises(ConnectionLost):
        m.host.write(next(iter(rig.target.volumes)), REGION, bytes(LBA_BYTES))
    m = await rig.open()
    for i in range(20):
        want = None if i == 3 else VALUE[i:] + VALUE[:i]
        assert await rig.get(m, b"%d" % i) == want
    assert rig.present(m, b"pending") == [False]
    assert rig.node.engine.space.used_bytes(m.session.namespace) == used
    assert rig.node.recovered.suspects == rig.node.recovered.dropped == 0
    rig.check()


@on_loop
async def test_hosts_of_an_earlier_incarnation_may_not_come_back(rig: Rig) -> None:
    """A target that outlived the daemon still allows the hosts of sessions that nobody knows any more."""
    m = await rig.begin()
    await rig.restart()
    with pytest.raises(TargetRefused):
        SimHost(rig.target, "t", m.identity)


@on_loop
async def test_a_block_whose_flush_is_not_known_is_verified_before_it_is_served(durable_rig: Rig) -> None:
    rig = durable_rig
    await rig.start()
    await rig.namespace(durability=1)
    m = await rig.open()
    for key in (b"sound", b"lost", b"listed"):
        assert await rig.put(m, key, VALUE) == OK
    lost = await rig.node.blocks.acquire(m.session, [BlockKey(b"lost")], 1000)
    await rig.restart()
    assert rig.node.recovered.suspects == 3
    rig.target.corrupt(next(iter(rig.target.volumes)), int(lost.offsets[0]) + 5)
    m = await rig.open()
    assert await rig.get(m, b"sound") == VALUE
    # asked for twice in one call: it is dropped once
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"lost"), BlockKey(b"lost"), BlockKey(b"sound")], 1000)
    assert located.status.tolist() == [Absent.code, Absent.code, OK]
    assert rig.present(m, b"lost") == [False]
    await rig.node.verification.verify_some()
    assert (rig.node.engine.index.state[: rig.node.engine.index.high] != RowState.SUSPECT).all()
    rig.check()
    await rig.restart()
    assert rig.node.recovered.blocks == 2


@on_loop
async def test_a_clean_stop_settles_no_doubt_that_was_there_before(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(durability=1)
    await rig.put(await rig.open(), b"k", VALUE)
    await rig.restart()
    assert rig.node.recovered.suspects == 1
    await rig.restart(clean=True)
    assert rig.node.recovered.suspects == 1
    await rig.node.verification.verify_some()
    await rig.restart(clean=True)
    assert rig.node.recovered.suspects == 0


@on_loop
async def test_a_suspect_is_not_served_while_the_target_cannot_verify_it(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(durability=1)
    m = await rig.open()
    await rig.put(m, b"k", VALUE)
    await rig.restart()
    m = await rig.open()
    rig.target.fail("checksums")
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"k")], 1000)
    assert located.status.tolist() == [Unavailable.code]
    assert await rig.get(m, b"k") == VALUE


@on_loop
async def test_a_suspect_deleted_while_it_is_verified_is_freed_once(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(durability=1)
    await rig.put(await rig.open(), b"k", VALUE)
    await rig.restart()
    m = await rig.open()
    rig.target.corrupt(next(iter(rig.target.volumes)), REGION)
    gate = rig.target.hold("checksums")
    verify = asyncio.ensure_future(rig.node.verification.verify_some())
    await gate.reached.wait()
    await rig.node.blocks.delete(m.session, [BlockKey(b"k")])
    assert await rig.put(m, b"k", VALUE[::-1]) == OK
    gate.open.set()
    await verify
    assert await rig.get(m, b"k") == VALUE[::-1]
    rig.check()


@on_loop
async def test_bytes_that_power_took_are_never_served(rig: Rig) -> None:
    """Policy verify: what was acknowledged and not flushed is found out by its checksum."""
    rig.target.journal = True
    await rig.start()
    await rig.namespace(durability=1)
    m = await rig.open()
    await rig.put(m, b"k", VALUE)
    rig.target.lose_power()
    await rig.restart()
    m = await rig.open()
    assert await rig.get(m, b"k") is None
    rig.check()


@on_loop
async def test_under_flush_power_takes_nothing_that_was_acknowledged(rig: Rig) -> None:
    rig.target.journal = True
    m = await rig.begin()
    await rig.put(m, b"k", VALUE)
    rig.target.lose_power()
    await rig.restart()
    m = await rig.open()
    assert rig.node.recovered.suspects == 0
    assert await rig.get(m, b"k") == VALUE


@on_loop
async def test_concurrent_first_uses_of_a_scope_get_one_id(durable_rig: Rig) -> None:
    rig = durable_rig
    await rig.start()
    ids = await asyncio.gather(*[rig.node.state.scope_id("tenant") for _ in range(4)])
    assert len(set(ids)) == 1


@on_loop
async def test_waiters_learn_of_commit_and_of_a_dead_producer(rig: Rig) -> None:
    m = await rig.begin()
    digest = rig.node.engine.index.digests(m.session.stored_keys([BlockKey(b"k")]))[0].tobytes()
    waiting = rig.node.engine.waiters.add(digest)
    (row,) = await rig.allocate(m, b"k")
    await rig.node.writes.abort(m.session, [row.write_id], quiesced=[m.identity])
    assert await waiting == Absent.code
    waiting = rig.node.engine.waiters.add(digest)
    await rig.put(m, b"k", VALUE)
    assert await waiting == OK
