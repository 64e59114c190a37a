"""Where extents come from: slot sizes when regions are few, quotas by scope, time to live, reclaim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import OK, NoSpace, QuotaExceeded
from forebay.ids import BlockKey
from forebay.schema import Schema
from tests.sim.rig import MIB, REGION, Member, Rig
from tests.sim.running import on_loop

OPAQUE = Schema.opaque()


async def _one_region(drive: Path, *, eviction: str, quota_bytes: int = 0) -> tuple[Rig, Member]:
    rig = Rig(drive, capacity_regions=1)
    await rig.start()
    await rig.namespace(eviction=eviction, quota_bytes=quota_bytes)
    return rig, await rig.open(schema=OPAQUE)


@on_loop
async def test_a_value_takes_a_roomier_slot_when_no_region_is_free(tmp_path: Path) -> None:
    rig, m = await _one_region(tmp_path / "d", eviction="none")
    assert await rig.put(m, b"large", b"x" * MIB) == OK
    assert await rig.put(m, b"smaller", b"y" * (MIB * 3 // 4)) == OK
    assert await rig.get(m, b"smaller") == b"y" * (MIB * 3 // 4)
    rig.check()
    # the slot is counted whole, and found again by a start
    (namespace,) = rig.node.state.namespaces
    assert rig.node.engine.space.used_bytes(namespace.id) == 2 * MIB
    await rig.restart()
    rig.check()
    m = await rig.open(schema=OPAQUE)
    assert await rig.get(m, b"smaller") == b"y" * (MIB * 3 // 4)


@on_loop
async def test_no_value_takes_a_slot_more_than_twice_its_size(tmp_path: Path) -> None:
    rig, m = await _one_region(tmp_path / "d", eviction="none")
    assert await rig.put(m, b"large", b"x" * MIB) == OK
    assert await rig.put(m, b"tiny", b"y" * 4096) == NoSpace.code
    rig.check()


@on_loop
async def test_a_roomier_slot_still_counts_against_the_quota(tmp_path: Path) -> None:
    rig, m = await _one_region(tmp_path / "d", eviction="none", quota_bytes=2 * MIB - 4096)
    assert await rig.put(m, b"large", b"x" * MIB) == OK
    assert await rig.put(m, b"smaller", b"y" * (MIB * 3 // 4)) == NoSpace.code
    rig.check()


@on_loop
async def test_a_scope_stays_within_its_quota_and_evicts_only_its_own(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(schema=OPAQUE, scopes=["red", "blue"])
    red, blue = m.session.scopes
    await rig.node.set_scope_quota("t/n", "red", 2 * MIB)
    for i in range(4):
        assert await rig.put(m, BlockKey(b"b%d" % i, 0, blue), b"b" * MIB) == OK
    for i in range(4):
        assert await rig.put(m, BlockKey(b"r%d" % i, 0, red), b"r" * MIB) == OK
        rig.check()
    (namespace,) = rig.node.state.namespaces
    assert rig.node.engine.space.scope_bytes(namespace.id, red) <= 2 * MIB
    assert all(rig.present(m, *(BlockKey(b"b%d" % i, 0, blue) for i in range(4))))
    assert rig.present(m, BlockKey(b"r3", 0, red)) == [True]
    usage = {name: (quota, used) for name, quota, used in rig.node.scope_usage(namespace.id)}
    assert usage["red"][0] == 2 * MIB and usage["blue"] == (0, 4 * MIB)


@on_loop
async def test_scope_accounting_survives_a_restart(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open(schema=OPAQUE, scopes=["red"])
    (red,) = m.session.scopes
    assert await rig.put(m, BlockKey(b"k", 0, red), b"r" * MIB) == OK
    await rig.node.set_scope_quota("t/n", "red", MIB)
    await rig.restart()
    (namespace,) = rig.node.state.namespaces
    assert rig.node.engine.space.scope_bytes(namespace.id, red) == MIB
    m = await rig.open(schema=OPAQUE, scopes=["red"])
    await rig.node.blocks.pin(m.session, [BlockKey(b"k", 0, red)], True, False)
    assert await rig.put(m, BlockKey(b"l", 0, red), b"r" * MIB) == QuotaExceeded.code


@on_loop
async def test_a_block_is_not_found_after_its_time_and_its_key_can_be_written_again(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(ttl_ms=60_000)
    m = await rig.open(schema=OPAQUE)
    assert await rig.put(m, b"k", b"old" * 1000) == OK
    rig.clock.advance(9_000)
    m.session.seen_ms = rig.clock.monotonic_ms()
    assert await rig.get(m, b"k") == b"old" * 1000
    rig.clock.advance(52_000)
    m.session.seen_ms = rig.clock.monotonic_ms()
    assert await rig.get(m, b"k") is None
    assert rig.present(m, b"k") == [False]
    listed, _ = rig.node.blocks.listing(m.session, group=0, scope=0, prefix=b"", after=b"", limit=10)
    assert listed == []
    assert await rig.put(m, b"k", b"new" * 1000) == OK
    assert await rig.get(m, b"k") == b"new" * 1000
    rig.check()


@on_loop
async def test_expired_and_outdated_blocks_are_reclaimed_in_the_background(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(ttl_ms=5_000)
    await rig.namespace("t/other")
    m, other = await rig.open(schema=OPAQUE), await rig.open("t/other", schema=OPAQUE, generation=3)
    assert await rig.put(m, b"k", b"x" * MIB) == OK
    assert await rig.put(other, b"k", b"x" * MIB) == OK
    await rig.node.update_namespace("t/other", min_generation=4)
    rig.clock.advance(6_000)
    await rig.node.background()
    assert rig.node.engine.counters["blocks_expired"] == 1
    assert rig.node.engine.counters["blocks_stale"] == 1
    assert all(rig.node.engine.space.used_bytes(n.id) == 0 for n in rig.node.state.namespaces)
    rig.check()


@pytest.mark.parametrize("rate", [REGION // 64, 1 << 40])
@on_loop
async def test_reclaim_keeps_to_its_rate(tmp_path: Path, rate: int) -> None:
    rig = Rig(tmp_path / "d", capacity_regions=1)
    rig.limits = replace(rig.limits, reclaim_bytes_per_s=rate)
    await rig.start()
    await rig.namespace(ttl_ms=1_000)
    m = await rig.open(schema=OPAQUE)
    for i in range(16):
        assert await rig.put(m, b"%d" % i, b"x" * MIB) == OK
    rig.clock.advance(2_000)
    await rig.node.background()
    assert rig.node.engine.counters["blocks_expired"] == min(16, rate // MIB)
    rig.check()


@on_loop
async def test_a_namespace_that_holds_all_gives_up_to_an_even_share(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "d", capacity_regions=4)
    await rig.start()
    await rig.namespace("t/first")
    await rig.namespace("t/second")
    first, second = await rig.open("t/first", schema=OPAQUE), await rig.open("t/second", schema=OPAQUE)
    for i in range(4 * 64):
        assert await rig.put(first, b"%d" % i, b"x" * MIB) == OK
    for i in range(3 * 64):
        assert await rig.put(second, b"%d" % i, b"y" * MIB) == OK
        rig.check()
    space = rig.node.engine.space
    assert [space.reserved_bytes(n.id) for n in rig.node.state.namespaces] == [2 * REGION, 2 * REGION]
    # what went is what was used least recently
    assert rig.present(first, *(b"%d" % i for i in range(256))) == [False] * 128 + [True] * 128


@on_loop
async def test_an_even_share_is_not_taken_from_pinned_blocks_or_where_nothing_is_evicted(tmp_path: Path) -> None:
    for options in ("none", "lru"):
        rig = Rig(tmp_path / options, capacity_regions=2)
        await rig.start()
        await rig.namespace("t/first", eviction=options)
        await rig.namespace("t/second")
        first, second = await rig.open("t/first", schema=OPAQUE), await rig.open("t/second", schema=OPAQUE)
        keys = [b"%d" % i for i in range(128)]
        for key in keys:
            assert await rig.put(first, key, b"x" * MIB) == OK
        if options == "lru":
            await rig.node.blocks.pin(first.session, [BlockKey(keys[0]), BlockKey(keys[64])], True, False)
        assert await rig.put(second, b"k", b"y" * MIB) == NoSpace.code
        assert all(rig.present(first, *keys))
        rig.check()


@pytest.mark.parametrize("of", ["namespace", "scope"])
@on_loop
async def test_a_quota_that_pins_hold_costs_nobody_a_block(rig: Rig, of: str) -> None:
    """What may go is too little for the value: it is refused, and what may go stays."""
    await rig.start()
    await rig.namespace(quota_bytes=4 * MIB if of == "namespace" else 0)
    m = await rig.open(schema=OPAQUE, scopes=["red"])
    (red,) = m.session.scopes
    if of == "scope":
        await rig.node.set_scope_quota("t/n", "red", 4 * MIB)
    held = BlockKey(b"held", 0, red)
    small = [BlockKey(b"s%d" % i, 0, red) for i in range(40)]
    assert await rig.put(m, held, b"h" * 2 * MIB) == OK
    for key in small:
        assert await rig.put(m, key, b"s" * 4096) == OK
    assert await rig.node.blocks.pin(m.session, [held], True, False) == [OK]
    for _ in range(3):
        assert await rig.put(m, BlockKey(b"large", 0, red), b"l" * 3 * MIB) == QuotaExceeded.code
        assert all(rig.present(m, held, *small))
    assert all(len(waiting) <= len(small) + 1 for waiting in rig.node.room._victims.values())
    await rig.node.blocks.pin(m.session, [held], False, False)
    assert await rig.put(m, BlockKey(b"large", 0, red), b"l" * 3 * MIB) == OK
    rig.check()


@on_loop
async def test_many_small_blocks_make_room_for_a_large_one(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(quota_bytes=4 * MIB)
    m = await rig.open(schema=OPAQUE)
    for i in range(1024):
        assert await rig.put(m, BlockKey(b"s%d" % i), b"s" * 4096) == OK
    assert await rig.put(m, BlockKey(b"large"), b"l" * 2 * MIB) == OK
    assert rig.present(m, BlockKey(b"large"), BlockKey(b"s1023")) == [True, True]
    rig.check()
