"""What must hold of a node that starts after a power loss, whatever was lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.appliance.dataplane.volumes import FileVolumes
from forebay.appliance.namespace.fsck import Fsck, FsckReport
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import Store
from forebay.errors import OK
from forebay.index import RowState
from forebay.schema import Schema
from tests.power.history import History
from tests.power.target import VolumeTarget
from tests.sim.rig import REGION, Member, Rig

__all__ = ["Subject", "check", "data_ranges"]


@dataclass(frozen=True, slots=True)
class Subject:
    """Where a node keeps what (paths within its folder), and what its blocks are."""

    metadata: str
    drive: str
    checkpoint: str
    capacity_regions: int
    value_of: Callable[[str, str, int], bytes]
    """Bytes of a namespace's key in a version."""
    schema_of: Callable[[str], Schema]
    """The schema that a key is put under."""

    def open(self, folder: Path) -> Rig:
        """A node over what is in the folder, with the target's own volumes."""
        return Rig(
            folder / self.drive,
            capacity_regions=self.capacity_regions,
            store=RocksStore(folder / self.metadata),
            target=VolumeTarget(),
            checkpoint=folder / self.checkpoint,
        )

    async def fsck(self, store: Store, folder: Path, *, media: bool) -> FsckReport:
        """What is in the folder, without a start; everything in it must be consistent."""
        fsck = Fsck(store, {"drive0": FileVolumes(folder / self.drive)}, folder / self.checkpoint)
        report = await fsck.run(media=media, progress=lambda done, total: None)
        assert report.clean, [f for f in report.findings if f.wrong]
        return report

    async def member(self, rig: Rig, name: str, key: str) -> Member:
        """A session for a key."""
        return await rig.open(name, self.schema_of(key))


async def check(subject: Subject, folder: Path, history: History) -> int:
    """Start what is in the folder and hold it against the history; how many blocks were read and compared.

    Raises AssertionError, or what a start raises.
    """
    if history.made:  # else there may be no node yet
        store = RocksStore(folder / subject.metadata, read_only=True)
        try:
            await subject.fsck(store, folder, media=False)
        finally:
            store.close()
    rig = subject.open(folder)
    try:
        await rig.start()
        compared = await _check_blocks(subject, rig, history)
        while await rig.node.background():
            pass
        _check_space(rig, history)
        await _goes_on(subject, rig)
        compared += await _check_blocks(subject, rig, history)
        await rig.node.close()
        await rig.target.close()
        report = await subject.fsck(rig.store, folder, media=True)
        assert not [f for f in report.findings if f.part != "records"], report.findings
        return compared + report.checked.get("media_blocks", 0)
    finally:
        await rig.target.close()
        rig.store.close()


async def _check_blocks(subject: Subject, rig: Rig, history: History) -> int:
    """Every key is one of the versions that it may be, byte for byte."""
    for name, made in history.made.items():
        found = rig.node.state.namespace(name)
        assert made is None or made is (found is not None), f"namespace {name}: {found}"
    read = 0
    for name, key in history.keys:
        allowed = history.may_be(name, key)
        if rig.node.state.namespace(name) is None:
            assert not history.made[name]
            continue
        value = await rig.get(await subject.member(rig, name, key), key.encode())
        versions = [v for v in allowed if v is not None and subject.value_of(name, key, v) == value]
        assert versions or (value is None and None in allowed), (
            f"{name} {key}: may be {allowed}, is {value and value[:40]!r}"
        )
        read += value is not None
    for name in history.made:
        if rig.node.state.namespace(name) is not None:
            assert await rig.get(await rig.open(name), b"pending") is None
    return read


def _check_space(rig: Rig, history: History) -> None:
    """Owners, accounting, records, regions and files agree, and nothing is left over."""
    rig.check()
    node = rig.node
    index, space = node.engine.index, node.engine.space
    assert node.recovered.dropped == 0 and len(node.writes) == 0
    assert not [n for n in node.state.namespaces if n.deleting], "a namespace is still being deleted"
    live = index.state[: index.high] > RowState.FREE
    for namespace in node.state.namespaces:
        mine = live & (index.namespace[: index.high] == namespace.id)
        assert space.used_bytes(namespace.id) == int(index.length[: index.high][mine].sum())
    known = {v.id for v in node.state.volumes}
    assert {int.from_bytes(key[:4], "big") for key, _ in rig.store.scan("regions")} <= known
    records = [key for key, _ in rig.store.scan("blocks")]
    owners = [key for key, _ in rig.store.scan("owners")]
    assert len(records) == len(owners) == index.count, (records, owners, index.count)
    files = sorted(p.name for p in (rig.drive / "volumes").iterdir())
    assert files == sorted(f"{volume}.vol" for volume in known), files
    for volume, extents in space.maps.items():
        path = rig.drive / "volumes" / f"{volume}.vol"
        taken = {at // REGION for start, end in data_ranges(path) for at in range(start, end, 4096)}
        assert taken <= {0, *extents.claimed}, f"volume {volume} takes space outside of its regions: {taken}"


def data_ranges(path: Path) -> Iterator[tuple[int, int]]:
    """Ranges of a file that are no holes."""
    with path.open("rb") as file:
        size, end = path.stat().st_size, 0
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            yield start, end


async def _goes_on(subject: Subject, rig: Rig) -> None:
    """The node works as one that never lost anything."""
    for namespace in rig.node.state.namespaces:
        name = namespace.full_name
        for key in ("after0", "after1"):
            member, value = await subject.member(rig, name, key), subject.value_of(name, key, 1)
            assert await rig.put(member, key.encode(), value) == OK
            assert await rig.get(member, key.encode()) == value
    rig.check()
