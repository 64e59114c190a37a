"""What could not be written to metadata, and what becomes of it when it can be again, over a simulated target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.appliance.namespace.checkpoint import FILE_NAME
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.errors import OK, Absent, ForebayError, NoSpace
from forebay.ids import BlockKey, VolumeId
from tests.sim.rig import Rig
from tests.sim.running import on_loop
from tests.sim.target import SimTarget

VALUE = bytes(range(256)) * 64


class FullStore(MemoryStore):
    """Metadata whose drive can be full. ``noticed``: a write has found out already."""

    full = False
    full_for = ""
    """Only batches with a record of this family do not fit."""
    noticed = False

    @property
    def problem(self) -> ForebayError | None:
        return NoSpace("metadata: no space left") if self.full and self.noticed else None

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        if self.full and (not self.full_for or any(family == self.full_for for family, _, _ in ops)):
            self.noticed = not self.full_for
            raise NoSpace("metadata: no space left")
        await super().write(ops, durable=durable)

    def free(self) -> None:
        """Writes fit again."""
        self.full = self.noticed = False
        self.full_for = ""


@pytest.fixture
def store() -> FullStore:
    return FullStore()


@pytest.fixture
def rig(tmp_path: Path, store: FullStore) -> Rig:
    return Rig(tmp_path / "drive", store=store, checkpoint=tmp_path / FILE_NAME)


@on_loop
async def test_a_delete_that_is_written_late_takes_no_later_block_with_it(rig: Rig, store: FullStore) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK
    store.full = True
    with pytest.raises(NoSpace):
        await rig.node.blocks.delete(m.session, [BlockKey(b"k")])
    store.free()
    later = VALUE[::-1]
    assert await rig.put(m, b"k", later) == OK, "before the sweep comes by"
    await rig.node.sweep()
    rig.check()
    assert await rig.get(m, b"k") == later
    await rig.restart()
    m = await rig.open()
    assert await rig.get(m, b"k") == later, "it was acknowledged"


@on_loop
async def test_what_could_not_be_written_holds_up_no_checkpoint_for_ever(rig: Rig, store: FullStore) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    rows = await rig.allocate(m, b"again", b"given up", b"given up too", size=len(VALUE))
    commits = []
    for key, row in zip((b"again", b"given up", b"given up too"), rows, strict=True):
        assert row.extent is not None
        rig.write(m, key, row.extent, VALUE)
        commits.append((row.write_id, rig.sums(m, key, row.write_id, VALUE)))
    store.full = True
    for _ in range(3):
        assert await rig.node.writes.commit(m.session, commits) == [NoSpace.code] * 3
    store.free()
    assert await rig.put(m, b"k", VALUE) == OK
    store.full = True
    for _ in range(2):
        with pytest.raises(NoSpace):
            await rig.node.blocks.pin(m.session, [BlockKey(b"k")], True, True)
    store.free()
    assert await rig.node.writes.commit(m.session, commits[:1]) == [OK]
    await rig.node.writes.abort(m.session, [write_id for write_id, _ in commits[1:]])
    changes = rig.node.engine.changes
    assert changes.settled == changes.last
    assert await rig.node.checkpoint()
    assert list(store.scan("changes")) == []
    await rig.restart()
    m = await rig.open()
    assert rig.present(m, b"again", b"given up", b"given up too", b"k") == [True, False, False, True]
    rig.check()


@on_loop
async def test_full_metadata_are_not_taken_for_a_full_drive(rig: Rig, store: FullStore) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    store.full, store.full_for = True, "regions"
    with pytest.raises(NoSpace, match="metadata"):
        await rig.put(m, b"k", VALUE)
    drive = rig.node.engine.space.drives["drive0"]
    assert not drive.full and not drive.claimed_regions
    store.free()
    await rig.node.sweep()
    assert await rig.put(m, b"k", VALUE) == OK
    rig.check()


@on_loop
async def test_regions_of_a_volume_whose_end_could_not_be_written_come_free_later(rig: Rig, store: FullStore) -> None:
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK
    drive = rig.node.engine.space.drives["drive0"]
    assert drive.claimed_regions == 1
    store.full, store.full_for = True, "regions"
    with pytest.raises(NoSpace):
        await rig.node.delete_namespace("t/n", force=True)
    store.free()
    await rig.node.background()
    assert not len(rig.node.state.namespaces)
    assert drive.claimed_regions == 0 and list(store.scan("regions")) == []
    rig.check()


@pytest.mark.parametrize("durability", [0, 1])
@on_loop
async def test_a_bad_block_that_cannot_be_deleted_keeps_nobody_from_the_others(
    tmp_path: Path, store: FullStore, durability: int
) -> None:
    target = SimTarget()
    rig = Rig(tmp_path / "drive", target=target, store=store)
    await rig.start()
    await rig.namespace(durability=durability)
    m = await rig.open()
    for key in (b"bad", b"good"):
        assert await rig.put(m, key, VALUE) == OK
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"bad")], 1000)
    rig.node.blocks.release(m.session, [located.lease])
    target.corrupt(VolumeId(int(located.volumes[0])), int(located.offsets[0]))
    store.full = store.noticed = True
    await rig.node.blocks.doubt(m.session, [BlockKey(b"bad"), BlockKey(b"good")])
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"bad"), BlockKey(b"good")], 1000)
    assert located.status[0] != OK and located.status[1] == OK
    rig.node.blocks.release(m.session, [located.lease])
    store.free()
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"bad")], 1000)
    assert located.status.tolist() == [Absent.code]
    assert rig.present(m, b"bad", b"good") == [False, True]
    assert len(rig.node.engine.space.quarantine) == 1, "it was served: it is the drive that has lost it"
    rig.check()
