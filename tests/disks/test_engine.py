"""What the engine does when a drive or metadata fail, step by step, over a simulated target."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from forebay.appliance.dataplane.interface import Barrier, VolumeErrors, VolumeSpec
from forebay.appliance.dataplane.volumes import FileVolumes, claim_drive
from forebay.appliance.namespace import checkpoint, drive_looks, drives
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.space import Drive, DriveState
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.errors import OK, ForebayError, NoSpace, TargetFailed, Unavailable, WriteExpired
from forebay.ids import BlockKey, GrantId, VolumeId
from forebay.index import RowState
from tests.sim.rig import REGION, Rig
from tests.sim.running import on_loop, until
from tests.sim.target import SimTarget

VALUE = bytes(range(256)) * 64


class FailingTarget(SimTarget):
    """A drive that can fail to flush, or to write at some grants."""

    flush_fails = False
    bad_grants: frozenset[GrantId] = frozenset()
    errors = 0

    async def seal(self, grants: Sequence[GrantId], volume: VolumeSpec) -> Barrier:
        if self.flush_fails:
            await self.revoke(grants)
            raise TargetFailed("forebay_seal: Input/output error (EIO)")
        return await super().seal(grants, volume)

    async def failed_writes(self, grants: Sequence[GrantId]) -> set[GrantId]:
        told, self.bad_grants = set(grants) & self.bad_grants, frozenset()  # once
        return told

    async def volume_errors(self) -> dict[VolumeId, VolumeErrors]:
        return {volume: VolumeErrors(self.errors) for volume in self.media}


class FailingStore(MemoryStore):
    """Metadata whose drive fails when it is told to."""

    trouble: ForebayError | None = None
    meanwhile: Callable[[], Awaitable[object]] | None = None
    """Happens while the next region's record is written."""

    @property
    def problem(self) -> ForebayError | None:
        return self.trouble

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        if self.meanwhile is not None and any(family == "regions" for family, _, _ in ops):
            happens, self.meanwhile = self.meanwhile, None
            await happens()
        await super().write(ops, durable=durable)


@pytest.fixture
def target() -> FailingTarget:
    return FailingTarget()


@pytest.fixture
def rig(tmp_path: Path, target: FailingTarget) -> Rig:
    return Rig(tmp_path / "drive", target=target, store=FailingStore())


async def look(rig: Rig, state: DriveState) -> None:
    """Look at the drives until the only one is in a state."""
    drive = rig.node.engine.space.drives["drive0"]
    async with asyncio.timeout(20):
        while drive.state is not state or drive.doubted:
            if drive.state is not DriveState.SERVING:
                rig.clock.advance(2_000)
            await rig.node.drives.look()
            await asyncio.sleep(0.001)


@on_loop
async def test_a_commit_whose_flush_failed_is_never_acknowledged(rig: Rig, target: FailingTarget) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    assert await rig.put(m, b"before", VALUE) == OK
    (row,) = await rig.allocate(m, b"k", size=len(VALUE))
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    sums = [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))]
    target.flush_fails = True
    assert await rig.node.writes.commit(m.session, sums) == [TargetFailed.code]
    target.flush_fails = False
    # the drive forgot, as Linux does: a flush that works now says nothing of what was written before
    assert await rig.node.writes.commit(m.session, sums) == [WriteExpired.code]
    assert rig.present(m, b"k", b"before") == [False, True]
    assert await rig.put(m, b"k2", VALUE) == NoSpace.code, "no other drive takes it"
    await look(rig, DriveState.SERVING)
    rig.clock.advance(10_000)
    await rig.node.sweep()
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK and await rig.get(m, b"k") == VALUE
    rig.check()


@on_loop
async def test_blocks_that_were_not_flushed_are_doubted_when_a_drive_is_back(rig: Rig, target: FailingTarget) -> None:
    await rig.start()
    await rig.namespace(durability=1)  # verify
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK and await rig.put(m, b"lost", VALUE) == OK
    drive = rig.node.engine.space.drives["drive0"]
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"lost")], 1000)
    rig.node.blocks.release(m.session, [located.lease])
    drive.failed(TargetFailed("a flush failed"))
    target.corrupt(VolumeId(int(located.volumes[0])), int(located.offsets[0]))
    assert not await rig.node.background(), "there is nothing to verify yet"
    await look(rig, DriveState.SERVING)
    while await rig.node.background():
        pass
    index = rig.node.engine.index
    assert not (index.state[: index.high] == RowState.SUSPECT).any(), "nor when nobody asks for them"
    assert await rig.get(m, b"k") == VALUE
    assert await rig.get(m, b"lost") is None


@on_loop
async def test_nothing_is_evicted_for_what_metadata_cannot_keep(rig: Rig) -> None:
    store = rig.store
    assert isinstance(store, FailingStore)
    await rig.start()
    await rig.namespace(quota_bytes=4 * len(VALUE))
    m = await rig.open()
    keys = [b"k%d" % i for i in range(4)]
    for key in keys:
        assert await rig.put(m, key, VALUE) == OK
    store.trouble = Unavailable("metadata cannot be written: the drive failed")
    for i in range(20):
        with pytest.raises(Unavailable, match="the drive failed"):
            await rig.put(m, b"new%d" % i, VALUE)
    with pytest.raises(Unavailable):
        await rig.node.blocks.delete(m.session, [BlockKey(keys[0])])
    assert rig.present(m, *keys) == [True] * 4
    rig.check()
    store.trouble = None
    assert await rig.put(m, b"new", VALUE) == OK


@on_loop
async def test_suspects_are_verified_while_what_expired_cannot_be_deleted(rig: Rig) -> None:
    store = rig.store
    assert isinstance(store, FailingStore)
    await rig.start()
    await rig.namespace(durability=1, ttl_ms=1_000)
    assert await rig.put(await rig.open(), b"k", VALUE) == OK
    await rig.restart()
    rig.clock.advance(2_000)
    store.trouble = Unavailable("metadata cannot be written: the drive failed")
    await rig.node.background()
    index = rig.node.engine.index
    assert index.state[: index.high].tolist() == [RowState.VISIBLE]
    store.trouble = None
    await rig.node.background()
    assert index.count == 0
    rig.check()


@on_loop
async def test_a_drive_that_is_lost_while_a_region_is_claimed_has_no_room(rig: Rig) -> None:
    store = rig.store
    assert isinstance(store, FailingStore)
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    drive = rig.node.engine.space.drives["drive0"]
    store.meanwhile = lambda: rig.node.drives.lose(drive, DriveState.AWAY, "it does not answer")
    assert await rig.put(m, b"k", VALUE) == NoSpace.code
    assert drive.claimed_regions == 0 and list(store.scan("regions")) == []
    await look(rig, DriveState.SERVING)
    assert await rig.put(m, b"k", VALUE) == OK
    rig.check()


@on_loop
async def test_suspects_whose_owners_cannot_be_looked_up_end_no_round_of_the_sweep(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after them there, such as the comparison with the target, has its turn."""
    await rig.start()
    await rig.namespace(durability=1)
    assert await rig.put(await rig.open(), b"k", VALUE) == OK
    await rig.restart()
    asked = []

    def multi_get(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        asked.append(family)
        raise Unavailable("metadata cannot be read: a table of it")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "multi_get", multi_get)
        assert not await rig.node.background()
    assert asked == ["owners"] and rig.node.scrubber.report().suspects_left == 1
    assert await rig.node.background()
    assert not rig.node.scrubber.report().suspects_left
    rig.check()


@on_loop
async def test_a_full_drive_that_does_not_tell_its_room_is_asked_again_after_a_while(
    rig: Rig, target: FailingTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device of a thin pool, to which room was added."""
    for module in (drives, drive_looks):
        monkeypatch.setattr(module, "is_device", lambda path: True)
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    drive = rig.node.engine.space.drives["drive0"]
    target.fail("prepare_region", NoSpace("the pool has no space left"))
    for _ in range(2):
        assert await rig.put(m, b"k", VALUE) == NoSpace.code
    assert drive.full and target.calls["prepare_region"] == 1, "not by each writer"
    full_ms = rig.clock.monotonic_ms()
    async with asyncio.timeout(20):
        while drive.full:
            rig.clock.advance(1_000)
            await rig.node.drives.look()
            await asyncio.sleep(0.001)
    assert rig.clock.monotonic_ms() - full_ms >= 30_000
    assert await rig.put(m, b"k", VALUE) == OK
    rig.check()


@on_loop
async def test_a_deletion_left_on_a_drive_that_fails_is_left_again(
    tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await rig.start()
    other = claim_drive(tmp_path / "other", node.meta.node_id)
    await node.meta.name_drive("drive1", str(other.drive_uuid))

    async def start() -> Node:
        meta = await NodeMeta.load(rig.store, os.urandom, REGION)
        mine = [Drive("drive0", str(rig.drive), 4), Drive("drive1", str(tmp_path / "other"), 4)]
        return await Node.open(
            *(rig.store, meta, rig.target), drives=mine, limits=rig.limits, clock=rig.clock, random=os.urandom
        )

    node = await start()
    namespace = await node.create_namespace("t/n")
    await node.state.namespaces.put(replace(namespace, deleting=True))
    remove = FileVolumes.remove

    def fail(volumes: FileVolumes, volume: VolumeId) -> None:
        if volumes.drive == tmp_path / "other":
            raise TargetFailed(f"drive {volumes.drive}: Input/output error")
        remove(volumes, volume)

    with monkeypatch.context() as patch:
        patch.setattr(FileVolumes, "remove", fail)
        node = await start()
        states = {drive.name: drive.state for drive in node.engine.space.drives.values()}
        assert states == {"drive0": DriveState.SERVING, "drive1": DriveState.AWAY}
        assert len(node.state.namespaces) == 1
    node = await start()
    assert not len(node.state.namespaces) and not len(node.state.volumes)


@on_loop
async def test_a_drive_that_was_never_claimed_keeps_no_other_from_being_looked_at(rig: Rig, tmp_path: Path) -> None:
    """As a new one that only the target can reach, and that it could not open: metadata know nothing of it."""
    await rig.start()
    meta = await NodeMeta.load(rig.store, os.urandom, REGION)
    unclaimed = Drive("drive1", str(tmp_path / "none"), 4, state=DriveState.AWAY, reason="it is not empty")
    mine = [unclaimed, Drive("drive0", str(rig.drive), 4)]
    node = await Node.open(
        *(rig.store, meta, rig.target), drives=mine, limits=rig.limits, clock=rig.clock, random=os.urandom
    )
    (rig.drive / "forebay.drive").unlink()
    drive = node.engine.space.drives["drive0"]
    async with asyncio.timeout(20):
        while drive.state is not DriveState.AWAY:
            rig.clock.advance(2_000)
            await node.drives.look()
            await asyncio.sleep(0.001)
    assert (unclaimed.state, unclaimed.reason) == (DriveState.AWAY, "it is not empty")


@on_loop
async def test_a_bad_place_is_kept_and_a_bad_drive_is_not_cut_to_pieces(rig: Rig, target: FailingTarget) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    space, drive = rig.node.engine.space, rig.node.engine.space.drives["drive0"]

    async def failed_write(key: bytes) -> None:
        (row,) = await rig.allocate(m, key, size=len(VALUE))
        write = m.session.writes[row.write_id]
        assert write.grant is not None
        target.bad_grants = frozenset({write.grant})
        target.errors += 1
        await rig.node.writes.abort(m.session, [row.write_id], quiesced=[m.identity])
        assert drive.doubted and len(rig.node.writes) == 1, "is it the place or the drive?"

    await failed_write(b"place")
    await look(rig, DriveState.SERVING)
    await rig.node.sweep()
    assert [entry.reason for entry in space.quarantine] == ["write_error"] and not len(rig.node.writes)
    rig.check()
    await failed_write(b"drive")
    (rig.drive / "volumes").rename(rig.drive / "hidden")
    await look(rig, DriveState.AWAY)
    await rig.node.sweep()
    await until(lambda: not len(rig.node.writes), "the write is taken back")
    assert len(space.quarantine) == 1
    (rig.drive / "hidden").rename(rig.drive / "volumes")
    await look(rig, DriveState.SERVING)
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK
    assert len(space.quarantine) == 1
    rig.check()


@on_loop
async def test_a_checkpoint_that_failed_does_not_fill_the_drive(
    tmp_path: Path, target: FailingTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / checkpoint.FILE_NAME
    rig = Rig(tmp_path / "drive", target=target, checkpoint=file)
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK

    def full(file: IO[bytes]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sync", full)
        with pytest.raises(NoSpace, match=str(file)):
            await rig.node.checkpoint()
        assert list(tmp_path.glob("*checkpoint*")) == []
        await rig.node.close()  # a stop gets over it, and is not a clean one
    await rig.start()
    m = await rig.open()
    assert await rig.get(m, b"k") == VALUE
    assert await rig.node.checkpoint()
