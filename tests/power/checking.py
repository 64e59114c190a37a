"""What must hold of a node that starts after a power loss, whatever was lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from forebay.appliance.dataplane.volumes import FileVolumes
from forebay.appliance.namespace.fsck import Fsck, FsckReport
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import Store
from forebay.errors import OK
from forebay.index import RowState
from tests.power.history import History
from tests.power.scenario import OPAQUE, OPAQUE_KEY, open_rig, value_of
from tests.sim.rig import REGION, Member, Rig

__all__ = ["check", "data_ranges"]


async def check(folder: Path, history: History) -> int:
    """Start what is in the folder and hold it against the history; how many blocks were read and compared.

    Raises AssertionError, or what a start raises.
    """
    if history.made:  # else there may be no node yet
        store = RocksStore(folder / "metadata", read_only=True)
        try:
            _require_clean(await _fsck(store, folder, media=False))
        finally:
            store.close()
    rig = open_rig(folder)
    try:
        await rig.start()
        compared = await _check_blocks(rig, history)
        while await rig.node.background():
            pass
        _check_space(rig, history)
        await _goes_on(rig)
        compared += await _check_blocks(rig, history)
        await rig.node.close()
        await rig.target.close()
        report = await _fsck(rig.store, folder, media=True)
        _require_clean(report)
        assert not [f for f in report.findings if f.part != "records"], report.findings
        return compared + report.checked.get("media_blocks", 0)
    finally:
        await rig.target.close()
        rig.store.close()


async def _fsck(store: Store, folder: Path, *, media: bool) -> FsckReport:
    fsck = Fsck(store, {"drive0": FileVolumes(folder / "drive")}, folder / "checkpoint")
    return await fsck.run(media=media, progress=lambda done, total: None)


def _require_clean(report: FsckReport) -> None:
    assert report.clean, [f for f in report.findings if f.wrong]


async def _member(rig: Rig, name: str, key: str) -> Member:
    return await (rig.open(name, OPAQUE) if key == OPAQUE_KEY else rig.open(name))


async def _check_blocks(rig: Rig, history: History) -> int:
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
        value = await rig.get(await _member(rig, name, key), key.encode())
        versions = [v for v in allowed if v is not None and value_of(name, key, v) == value]
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


async def _goes_on(rig: Rig) -> None:
    """The node works as one that never lost anything."""
    for namespace in rig.node.state.namespaces:
        name = namespace.full_name
        member = await rig.open(name)
        for key in ("after0", "after1"):
            assert await rig.put(member, key.encode(), value_of(name, key, 1)) == OK
            assert await rig.get(member, key.encode()) == value_of(name, key, 1)
    rig.check()
