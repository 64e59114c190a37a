"""What `Fsck` says of a node that stopped, whole and damaged; and that the next start does what it said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.appliance.dataplane.volumes import FileVolumes
from forebay.appliance.namespace.fsck import Fsck, FsckReport
from forebay.appliance.namespace.records import Record, owner_key
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.errors import OK, MetadataCorrupt, VolumeMismatch
from forebay.ids import Extent, VolumeId
from tests.sim.rig import REGION, Member, Rig
from tests.sim.running import on_loop

VALUE = bytes(range(256)) * 64  # 16 KiB: the grid's four tiles
BLOCKS = 6


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A node whose media are files, as a check reads them."""
    made = Rig(tmp_path / "drive", checkpoint=tmp_path / "index.checkpoint")
    made.target.on_files = True
    return made


async def filled(rig: Rig) -> Member:
    m = await rig.begin()
    for i in range(BLOCKS):
        assert await rig.put(m, b"%d" % i, VALUE[i:] + VALUE[:i]) == OK
    return m


def checker(rig: Rig) -> Fsck:
    for media in rig.target.media.values():
        media.flush()
    assert rig.checkpoint is not None
    return Fsck(rig.store, {"drive0": FileVolumes(rig.drive)}, rig.checkpoint)


async def check(rig: Rig, *, media: bool = False) -> FsckReport:
    return await checker(rig).run(media=media, progress=lambda done, total: None)


async def only(rig: Rig, part: str, word: str, *, media: bool = False) -> FsckReport:
    """Check, and expect that just this is wrong."""
    report = await check(rig, media=media)
    wrong = [f for f in report.findings if f.wrong]
    assert {f.part for f in wrong} == {part}, wrong
    assert all(word in f.what for f in wrong), wrong
    assert not report.clean
    return report


def records(rig: Rig) -> list[tuple[bytes, Record]]:
    return [(key, Record.decode(value)) for key, value in rig.store.scan("blocks")]


@on_loop
async def test_a_node_is_clean_after_a_stop_and_after_a_kill(rig: Rig) -> None:
    m = await filled(rig)
    (row,) = await rig.allocate(m, b"pending")
    assert row.extent is not None
    rig.write(m, b"pending", row.extent, VALUE)
    await rig.node.checkpoint()
    killed = await check(rig, media=True)
    assert killed.findings == ()
    assert killed.checked["records"] == killed.checked["owners"] == killed.checked["media_blocks"] == BLOCKS
    assert killed.checked["checkpoint_blocks"] == BLOCKS
    await rig.restart(clean=True)
    used_bytes = sum(extents.used_bytes for extents in rig.node.engine.space.maps.values())
    await rig.node.close()
    stopped = await check(rig, media=True)
    assert stopped.findings == ()
    assert stopped.checked["extent_bytes"] == used_bytes == BLOCKS * len(VALUE)


@on_loop
async def test_changes_after_the_checkpoint_belong_to_it(rig: Rig) -> None:
    m = await filled(rig)
    await rig.node.checkpoint()
    assert await rig.put(m, b"later", VALUE) == OK
    report = await check(rig)
    assert report.clean and report.checked["checkpoint_blocks"] == BLOCKS + 1


@on_loop
async def test_a_record_with_a_wrong_crc(rig: Rig) -> None:
    await filled(rig)
    key, value = next(rig.store.scan("blocks"))
    await rig.store.write([Op("blocks", key, value[:60] + bytes([value[60] ^ 1]) + value[61:])])
    report = await only(rig, "records", "CRC")
    assert "drops" in report.findings[0].then
    await rig.restart()
    assert rig.node.recovered.dropped == 1
    assert (await check(rig)).clean


@on_loop
async def test_an_owner_without_a_block(rig: Rig) -> None:
    await filled(rig)
    key, record = records(rig)[0]
    lost = owner_key(record.extent.volume, record.extent.offset_bytes + 100 * record.extent.length_bytes)
    await rig.store.write([Op("owners", lost, key)])
    await only(rig, "owners", "which is not there")
    await rig.restart()
    assert (await check(rig)).clean


@on_loop
async def test_a_block_without_an_owner(rig: Rig) -> None:
    await filled(rig)
    _, record = records(rig)[0]
    await rig.store.write([Op("owners", owner_key(record.extent.volume, record.extent.offset_bytes), None)])
    await only(rig, "owners", "has no owner")


@on_loop
async def test_two_records_with_one_extent(rig: Rig) -> None:
    await filled(rig)
    (first, one), (second, other) = records(rig)[:2]
    place = owner_key(other.extent.volume, other.extent.offset_bytes)
    await rig.store.write([Op("blocks", second, replace(other, extent=one.extent).encode()), Op("owners", place, None)])
    await only(rig, "allocator", "another owner")
    await rig.restart()
    assert rig.node.recovered.dropped == 1
    assert (await check(rig)).clean
    assert first != second


@on_loop
async def test_a_region_record_out_of_range(rig: Rig) -> None:
    await filled(rig)
    volume = next(iter(rig.node.engine.space.volumes))
    await rig.store.write([Op("regions", volume.to_bytes(4, "big") + (999).to_bytes(4, "big"), bytes([0, 0, 16, 0]))])
    report = await only(rig, "regions", "out of range")
    assert "refuses" in report.findings[0].then
    with pytest.raises(MetadataCorrupt):
        await rig.start()


@on_loop
async def test_blocks_outside_any_claimed_region(rig: Rig) -> None:
    await filled(rig)
    key, _ = next(rig.store.scan("regions"))
    await rig.store.write([Op("regions", key, None)])
    report = await only(rig, "allocator", "no claimed region")
    assert len(report.findings) == BLOCKS
    await rig.restart()
    assert rig.node.recovered.dropped == BLOCKS
    assert (await check(rig)).clean


def _other_bytes(rig: Rig) -> list[Op]:
    key, record = records(rig)[0]
    return [Op("blocks", key, replace(record, checksums=tuple(c ^ 1 for c in record.checksums)).encode())]


def _gone(rig: Rig) -> list[Op]:
    key, record = records(rig)[0]
    place = owner_key(record.extent.volume, record.extent.offset_bytes)
    return [Op("blocks", key, None), Op("owners", place, None)]


@pytest.mark.parametrize(("damage", "word"), [(_other_bytes, "another block"), (_gone, "no record")])
@on_loop
async def test_a_checkpoint_that_disagrees_with_the_records(
    rig: Rig, damage: Callable[[Rig], list[Op]], word: str
) -> None:
    await filled(rig)
    await rig.node.checkpoint()
    await rig.store.write(damage(rig))  # and no word of it in the change log
    await only(rig, "checkpoint", word)
    fsck = checker(rig)
    await fsck.run(media=False, progress=lambda done, total: None)
    await fsck.repair()
    assert (await check(rig)).clean


@on_loop
async def test_a_damaged_checkpoint(rig: Rig) -> None:
    await filled(rig)
    await rig.node.checkpoint()
    assert rig.checkpoint is not None
    data = bytearray(rig.checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    rig.checkpoint.write_bytes(data)
    report = await only(rig, "checkpoint", "CRC")
    assert "rebuilt" in report.findings[0].then
    await rig.restart()
    assert rig.node.recovered.blocks == BLOCKS


@on_loop
async def test_swapped_volumes(rig: Rig) -> None:
    await filled(rig)
    await rig.namespace("t/other")
    one, other = sorted((rig.drive / "volumes").glob("*.vol"))
    aside = one.rename(one.with_suffix(".aside"))
    other.rename(one)
    aside.rename(other)
    report = await only(rig, "volumes", "swapped")
    assert len(report.findings) == 2
    with pytest.raises(VolumeMismatch):
        await rig.start()


@on_loop
async def test_a_flipped_bit_is_seen_on_media_only(rig: Rig) -> None:
    await filled(rig)
    _, record = records(rig)[2]
    rig.target.corrupt(record.extent.volume, record.extent.offset_bytes + 5000)
    assert (await check(rig)).clean
    report = await only(rig, "media", "1 of 4 tiles", media=True)
    assert report.checked["media_blocks"] == BLOCKS
    assert report.checked["media_bytes"] == BLOCKS * len(VALUE)


@on_loop
async def test_a_creation_cut_short_is_a_note(rig: Rig) -> None:
    await filled(rig)
    namespace = rig.node.state.namespace("t/n")
    assert namespace is not None
    await rig.node.state.namespaces.put(replace(namespace, id=77, name="half", deleting=True))
    (rig.drive / "volumes" / "99.vol").write_bytes(b"")
    report = await check(rig)
    assert report.clean
    assert [f.part for f in report.findings] == ["metadata", "volumes"]
    await rig.restart()
    assert (await check(rig)).findings == ()


@on_loop
async def test_a_repair_does_what_a_start_does_and_no_more(rig: Rig) -> None:
    await filled(rig)
    (first, one), (second, other), (third, _) = records(rig)[:3]
    away = Extent(VolumeId(one.extent.volume), 3 * REGION, one.extent.length_bytes)
    value = rig.store.get("blocks", third)
    assert value is not None
    ops = [Op("blocks", first, replace(one, extent=away).encode()), Op("blocks", third, value[:-1])]
    await rig.store.write([*ops, Op("owners", owner_key(99, 0), second)])
    report = await check(rig)
    assert sum(f.wrong for f in report.findings) >= 3
    assert await checker(rig).repair() == 2
    assert (await check(rig)).clean
    assert isinstance(rig.store, MemoryStore)
    before = {family: dict(table) for family, table in rig.store.families.items()}
    assert await checker(rig).repair() == 0
    assert rig.store.families == before
    assert other.extent in [r.extent for _, r in records(rig)]
    await rig.restart()
    rig.check()
    assert rig.node.recovered.blocks == BLOCKS - 2
