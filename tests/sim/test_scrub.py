"""Scrubbing on the simulated target: what it finds, what it leaves alone, and how fast it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.appliance.namespace.quarantine import SHARE
from forebay.appliance.namespace.records import owner_key
from forebay.appliance.namespace.scrub import ScrubLimits, ScrubReport
from forebay.appliance.namespace.store import Op
from forebay.errors import OK, Busy, NotFound, TargetFailed, Unavailable
from forebay.ids import BlockKey, VolumeId
from tests.sim.rig import REGION, Member, Rig, grid
from tests.sim.running import on_loop

VALUE = bytes(range(256)) * 64  # 16 KiB: the grid's four tiles
SECOND_MS = 1000


async def filled(rig: Rig, count: int = 8, *, durability: int = 0, quota_bytes: int = 0) -> Member:
    """A started node with blocks ``0``, ``1``, ...; no passes of its own unless the rig's limits say so."""
    await rig.start()
    await rig.namespace(durability=durability, quota_bytes=quota_bytes)
    m = await rig.open()
    for i in range(count):
        assert await rig.put(m, b"%d" % i, value(i)) == OK
    return m


def value(i: int) -> bytes:
    return VALUE[i:] + VALUE[:i]


def asked_only(rig: Rig, rate: int = 1 << 30) -> Rig:
    rig.limits = replace(rig.limits, scrub=ScrubLimits(rate, 0))
    return rig


async def place(rig: Rig, m: Member, key: bytes) -> tuple[VolumeId, int]:
    """Where a block lies."""
    located = await rig.node.blocks.acquire(m.session, [BlockKey(key)], 1000)
    rig.node.blocks.release(m.session, [located.lease])
    return VolumeId(int(located.volumes[0])), int(located.offsets[0])


async def spoil(rig: Rig, m: Member, keys: Sequence[bytes], byte: int = 0) -> None:
    for key in keys:
        volume, offset = await place(rig, m, key)
        rig.target.corrupt(volume, offset + byte)


async def to_the_end(rig: Rig) -> ScrubReport:
    """Drive the scrub that was asked for, time passing as it asks."""
    while rig.node.scrubber.report().state == "running":
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    return rig.node.scrubber.report()


def removed(rig: Rig, m: Member) -> list[tuple[bytes, str]]:
    events = rig.node.engine.events.since(0, m.session.namespace)[0]
    return [(e.stored_key[-1:], e.reason) for e in events if e.kind == "removed"]


@on_loop
async def test_a_scrub_finds_exactly_the_bad_blocks(durable_rig: Rig) -> None:
    rig = asked_only(durable_rig)
    m = await filled(rig)
    await spoil(rig, m, [b"2"])
    await spoil(rig, m, [b"5"], byte=len(VALUE) - 1)
    rig.node.scrubber.start()
    found = await to_the_end(rig)
    assert (found.state, found.blocks, found.blocks_total, found.bad, found.gone, found.unread) == (
        *("done", 8, 8, 2),
        *(0, 0),
    )
    assert found.bytes == found.bytes_total == 8 * len(VALUE)
    assert sorted(removed(rig, m)) == [(b"2", "bad"), (b"5", "bad")]
    for i in range(8):
        assert await rig.get(m, b"%d" % i) == (None if i in (2, 5) else value(i))
    rig.check()
    await rig.restart()  # what was dropped stays dropped
    m = await rig.open()
    assert rig.present(m, *[b"%d" % i for i in range(8)]) == [i not in (2, 5) for i in range(8)]
    rig.check()


@on_loop
async def test_a_scrub_of_one_namespace_leaves_the_others_alone(rig: Rig) -> None:
    m = await filled(asked_only(rig))
    await rig.namespace("t/other")
    other = await rig.open("t/other")
    assert await rig.put(other, b"x", VALUE) == OK
    await spoil(rig, other, [b"x"])
    rig.node.scrubber.start(m.session.namespace, "t/n")
    found = await to_the_end(rig)
    assert (found.namespace, found.blocks, found.bad) == ("t/n", 8, 0)
    rig.node.scrubber.start(other.session.namespace, "t/other")
    assert (await to_the_end(rig)).bad == 1
    rig.check()


@on_loop
async def test_the_rate_is_a_limit(rig: Rig) -> None:
    """By the clock of the node: never more than the rate and one batch."""
    rate = 32 * 1024
    await filled(asked_only(rig, rate), count=32)
    began_ms = rig.clock.monotonic_ms()
    rig.node.scrubber.start()
    while (found := rig.node.scrubber.report()).state == "running":
        elapsed_ms = rig.clock.monotonic_ms() - began_ms
        assert found.bytes <= rate * elapsed_ms // 1000 + len(VALUE)
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    assert found.blocks == 32
    assert found.elapsed_ms >= (found.bytes - len(VALUE)) * 1000 // rate
    assert found.elapsed_ms <= found.bytes * 1000 // rate + SECOND_MS


@on_loop
async def test_time_without_a_step_saves_up_no_more_than_a_second(rig: Rig) -> None:
    await filled(asked_only(rig, len(VALUE)), count=8)
    rig.node.scrubber.start()
    await rig.node.scrubber.step()
    rig.clock.advance(3600 * SECOND_MS)
    while not await rig.node.scrubber.step():
        pass
    assert rig.node.scrubber.report().blocks == 1


@on_loop
async def test_the_nodes_own_pass_takes_the_interval(rig: Rig) -> None:
    rig.limits = replace(rig.limits, scrub=ScrubLimits(1 << 30, 60 * SECOND_MS))
    m = await filled(rig)
    await rig.node.background()  # no suspects
    await spoil(rig, m, [b"7"])
    counters, began_ms = rig.node.engine.counters, rig.clock.monotonic_ms()
    while not counters["scrub_passes"]:
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    assert 50 * SECOND_MS <= rig.clock.monotonic_ms() - began_ms <= 61 * SECOND_MS
    assert (counters["scrubbed_blocks"], counters["scrubbed_bytes"]) == (8, 8 * len(VALUE))
    assert removed(rig, m) == [(b"7", "bad")]
    assert rig.node.scrubber.report().state == "none"  # nobody asked
    while counters["scrub_passes"] < 2:  # and it begins again
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    rig.check()


@on_loop
async def test_without_an_interval_the_node_reads_nothing_by_itself(rig: Rig) -> None:
    await filled(asked_only(rig))
    for _ in range(20):
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    assert rig.target.calls["checksums"] == 0


@on_loop
async def test_one_scrub_at_a_time_and_it_can_be_stopped(rig: Rig) -> None:
    await filled(asked_only(rig, len(VALUE)))
    rig.node.scrubber.start()
    with pytest.raises(Busy):
        rig.node.scrubber.start()
    rig.clock.advance(SECOND_MS)
    await rig.node.scrubber.step()
    stopped = rig.node.scrubber.stop()
    assert stopped.state == "stopped" and stopped.blocks < stopped.blocks_total
    calls = rig.target.calls["checksums"]
    rig.clock.advance(10 * SECOND_MS)
    await rig.node.scrubber.step()
    assert rig.target.calls["checksums"] == calls
    assert rig.node.scrubber.start().blocks == 0


@pytest.mark.parametrize("way", ["delete", "evict", "namespace"])
@on_loop
async def test_a_block_that_ends_while_it_is_read_is_freed_once(rig: Rig, way: str) -> None:
    """Its extent gets a new owner only after the read; the new block is not judged by the old one's bytes."""
    m = await filled(asked_only(rig), 1, quota_bytes=2 * len(VALUE))
    await spoil(rig, m, [b"0"])
    rig.node.scrubber.start()
    await rig.node.scrubber.step()
    rig.clock.advance(SECOND_MS)
    gate = rig.target.hold("checksums")
    step = asyncio.ensure_future(rig.node.scrubber.step())
    await gate.reached.wait()
    if way == "namespace":
        await rig.node.delete_namespace("t/n", force=True)
    elif way == "delete":
        await rig.node.blocks.delete(m.session, [BlockKey(b"0")])
        assert await rig.put(m, b"0", VALUE[::-1]) == OK
    else:  # what is being read is not evicted; others are
        for key in (b"x", b"y", b"z"):
            assert await rig.put(m, key, VALUE) == OK
        assert rig.present(m, b"0", b"x", b"y", b"z") == [True, False, False, True]
    gate.open.set()
    await step
    found = await to_the_end(rig)
    assert found.bad == (way == "evict")
    if way == "delete":
        assert await rig.get(m, b"0") == VALUE[::-1]
    rig.check()


@on_loop
async def test_a_leased_block_that_is_bad_goes_when_its_lease_ends(rig: Rig) -> None:
    m = await filled(asked_only(rig), 2)
    await spoil(rig, m, [b"0"])
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"0")], 1000)
    used = rig.node.engine.space.used_bytes(m.session.namespace)
    rig.node.scrubber.start()
    assert (await to_the_end(rig)).bad == 1
    assert rig.present(m, b"0", b"1") == [False, True]
    assert rig.node.engine.space.used_bytes(m.session.namespace) == used
    rig.node.blocks.release(m.session, [located.lease])
    rig.check()


@on_loop
async def test_a_target_that_is_away_only_delays(rig: Rig) -> None:
    m = await filled(asked_only(rig))
    await spoil(rig, m, [b"3"])
    rig.target.fail("checksums", Unavailable("away"), times=3)
    rig.node.scrubber.start()
    assert await rig.node.scrubber.step() and not rig.node.scrubber.report().blocks
    await rig.node.blocks.delete(m.session, [BlockKey(b"5")])
    found = await to_the_end(rig)
    assert (found.blocks, found.gone, found.bad, found.unread) == (7, 1, 1, 0)
    assert removed(rig, m) == [(b"5", "deleted"), (b"3", "bad")]


@on_loop
async def test_blocks_that_the_drive_does_not_give_are_told_and_kept(rig: Rig) -> None:
    m = await filled(asked_only(rig), 3)
    rig.target.fail("checksums", TargetFailed("EIO"), times=7)  # all at once, each by itself, and the label
    rig.node.scrubber.start()
    found = await to_the_end(rig)
    assert (found.blocks, found.bad, found.unread) == (3, 0, 3)
    assert rig.present(m, b"0", b"1", b"2") == [True] * 3
    rig.check()


@on_loop
async def test_after_an_unclean_stop_suspects_come_first(rig: Rig) -> None:
    m = await filled(asked_only(rig), 4, durability=1)
    where = await place(rig, m, b"3")
    await rig.restart()
    rig.target.corrupt(*where)
    assert rig.node.scrubber.report().suspects_left == 4
    rig.node.scrubber.start()
    found = await to_the_end(rig)
    assert (found.blocks, found.bad, found.suspects_left) == (4, 1, 0)
    m = await rig.open()
    assert rig.present(m, b"0", b"1", b"2", b"3") == [True, True, True, False]
    rig.check()


@on_loop
async def test_a_restart_in_the_middle_leaves_what_was_not_reached_for_the_next(rig: Rig) -> None:
    m = await filled(asked_only(rig, len(VALUE)))
    await spoil(rig, m, [b"0", b"7"])
    rig.node.scrubber.start()
    while not rig.node.scrubber.report().blocks:
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    await rig.restart()
    assert rig.node.scrubber.report() == ScrubReport()
    m = await rig.open()
    assert rig.present(m, b"0", b"7") == [False, True]
    rig.node.scrubber.start(rate_bytes_per_s=1 << 30)
    found = await to_the_end(rig)
    assert (found.blocks, found.bad) == (7, 1)
    rig.check()


@on_loop
async def test_suspects_that_cannot_be_read_keep_no_others_waiting(rig: Rig) -> None:
    """Neither others of them, though a round of the sweep takes 64, nor the node's own pass."""
    rig.limits = replace(rig.limits, scrub=ScrubLimits(1 << 30, 60_000))
    m = await filled(rig, 64, durability=1)
    volume, _ = await place(rig, m, b"0")
    places = [await place(rig, m, b"%d" % i) for i in range(64)]
    await rig.namespace("t/other", durability=1)
    other = await rig.open("t/other")
    for i in range(3):
        assert await rig.put(other, b"%d" % i, VALUE) == OK
    await rig.restart()
    assert rig.node.scrubber.report().suspects_left == 67
    rig.target.unreadable.update([(volume, 0), *places])  # nor the label: nothing says that it is the blocks
    while rig.node.verification.sweeping:
        await rig.node.background()
    assert rig.node.scrubber.report().suspects_left == 64
    while rig.node.engine.counters["scrubbed_blocks"] < 67:
        rig.clock.advance(max(1, await rig.node.scrubber.step()))
    rig.target.unreadable.clear()
    while await rig.node.background():
        pass
    assert rig.node.scrubber.report().suspects_left == 0
    rig.check()


@on_loop
async def test_a_suspect_without_an_owner_keeps_no_others_waiting(rig: Rig) -> None:
    m = await filled(asked_only(rig), 3, durability=1)
    where = await place(rig, m, b"0")
    await rig.restart()
    await rig.store.write([Op("owners", owner_key(*where), None)])
    await rig.node.background()
    assert rig.node.scrubber.report().suspects_left == 1
    found = await scrubbed(rig)
    assert (found.blocks, found.bad, found.unread) == (3, 0, 1)


# ---------------------------------------------------------------------------------------------------- quarantine


async def scrubbed(rig: Rig) -> ScrubReport:
    rig.node.scrubber.start()
    return await to_the_end(rig)


def held(rig: Rig) -> list[tuple[int, int, str]]:
    return [(*entry.place, entry.reason) for entry in rig.node.engine.space.quarantine]


@pytest.mark.parametrize("checkpoint", [False, True])
@on_loop
async def test_a_bad_extent_has_no_further_owner_until_it_is_released(
    durable_rig: Rig, tmp_path: Path, checkpoint: bool
) -> None:
    rig = asked_only(durable_rig)
    rig.checkpoint = tmp_path / "index.checkpoint" if checkpoint else None
    m = await filled(rig, 3)
    where = await place(rig, m, b"1")
    await spoil(rig, m, [b"1"])
    assert (await scrubbed(rig)).bad == 1
    assert held(rig) == [(*where, "checksum")]
    rig.check()
    for clean in (False, True):
        await rig.restart(clean=clean)
        assert held(rig) == [(*where, "checksum")]
        rig.check()
    m = await rig.open()
    used = rig.node.engine.space.used_bytes(m.session.namespace)
    assert used == 3 * len(VALUE)  # it counts
    for i in range(10, 20):
        assert await rig.put(m, b"%d" % i, VALUE) == OK
        assert await place(rig, m, b"%d" % i) != where
    released = await rig.node.engine.space.release_quarantined(*where)
    assert released.place == where and held(rig) == []
    rig.check()
    assert await rig.put(m, b"again", VALUE) == OK
    assert await place(rig, m, b"again") == where
    with pytest.raises(NotFound):
        await rig.node.engine.space.release_quarantined(*where)
    await rig.restart()
    assert held(rig) == []
    rig.check()


@on_loop
async def test_a_block_that_alone_cannot_be_read_is_bad(rig: Rig) -> None:
    m = await filled(asked_only(rig), 4)
    where = await place(rig, m, b"2")
    rig.target.unreadable.add(where)
    found = await scrubbed(rig)
    assert (found.bad, found.unread) == (1, 0)
    assert held(rig) == [(*where, "read_error")]
    assert rig.present(m, b"0", b"1", b"2", b"3") == [True, True, False, True]
    rig.check()


@pytest.mark.parametrize("durability", [0, 1, 2])
@pytest.mark.parametrize("answers", [True, False])
@on_loop
async def test_what_a_reader_found_bad_goes_to_quarantine_as_what_a_scrub_finds(
    rig: Rig, durability: int, answers: bool
) -> None:
    """Also where the target answers only later, and the sweep asks it."""
    m = await filled(asked_only(rig), 2, durability=durability)
    where = await place(rig, m, b"0")
    await spoil(rig, m, [b"0"])
    if not answers:
        rig.target.fail("checksums", Unavailable("away"))
    await rig.node.blocks.doubt(m.session, [BlockKey(b"0"), BlockKey(b"1")])
    assert rig.present(m, b"0", b"1") == [not answers, True]
    await rig.node.background()
    assert rig.present(m, b"0", b"1") == [False, True]
    assert held(rig) == [(*where, "checksum")]
    rig.check()


@on_loop
async def test_what_power_took_is_no_fault_of_the_drive(rig: Rig) -> None:
    m = await filled(asked_only(rig), 2, durability=1)
    where = await place(rig, m, b"0")
    await rig.restart()
    rig.target.corrupt(*where)
    assert (await scrubbed(rig)).bad == 1
    assert held(rig) == []
    rig.check()


@on_loop
async def test_a_leased_extent_is_not_released(rig: Rig) -> None:
    m = await filled(asked_only(rig), 2)
    where = await place(rig, m, b"0")
    await spoil(rig, m, [b"0"])
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"0")], 1000)
    await scrubbed(rig)
    with pytest.raises(Busy):
        await rig.node.engine.space.release_quarantined(*where)
    rig.check()
    rig.node.blocks.release(m.session, [located.lease])
    rig.check()
    await rig.node.engine.space.release_quarantined(*where)
    rig.check()


@on_loop
async def test_a_release_that_cannot_be_written_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    m = await filled(asked_only(rig), 2)
    where = await place(rig, m, b"0")
    await spoil(rig, m, [b"0"])
    await scrubbed(rig)

    async def refuse(ops: Sequence[Op], *, durable: bool = True) -> None:
        raise Unavailable("full")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "write", refuse)
        with pytest.raises(Unavailable):
            await rig.node.engine.space.release_quarantined(*where)
    assert held(rig) == [(*where, "checksum")]
    rig.check()


@on_loop
async def test_a_volume_loses_a_small_share_at_most(rig: Rig) -> None:
    """A writer that commits wrong checksums uses up no node: beyond the share, bad extents are free again."""
    m = await filled(asked_only(rig), 0)
    size = 1 << 20
    count = rig.capacity_regions * REGION // SHARE // size + 3
    big = await rig.open(schema=grid(size // 4))
    for i in range(count):
        assert await rig.put(big, b"%d" % i, bytes(size)) == OK
    await spoil(rig, big, [b"%d" % i for i in range(count)])
    assert (await scrubbed(rig)).bad == count
    assert len(held(rig)) == count - 3
    assert rig.node.engine.space.used_bytes(m.session.namespace) == (count - 3) * size
    rig.check()


@on_loop
async def test_quarantine_ends_with_its_namespace(rig: Rig) -> None:
    m = await filled(asked_only(rig), 2)
    await spoil(rig, m, [b"0"])
    await scrubbed(rig)
    await rig.node.delete_namespace("t/n", force=True)
    assert held(rig) == []
    rig.check()
    await rig.restart()
    assert held(rig) == []
    assert not list(rig.store.scan("state", prefix=b"quarantine/"))
