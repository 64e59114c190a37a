"""After a kill at each crash point: what was acknowledged is there, what was pending is not, all space is accounted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.crashpoints import POINTS
from forebay.errors import OK
from forebay.ids import LBA_BYTES
from tests.counting import Count
from tests.sim.crashing import BASE, GRID_BYTES, KEPT, OPAQUE, open_rig, value_of
from tests.sim.rig import REGION, Rig
from tests.sim.running import on_loop


@pytest.fixture(scope="module")
def wrecks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory a point, as the kill left it."""
    folder = tmp_path_factory.mktemp("crashes")
    command = [sys.executable, "-m", "tests.sim.crashing", str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("point", POINTS)
@on_loop
async def test_a_kill_at(wrecks: Path, point: str, count: Count) -> None:
    said = (wrecks / point / "said").read_text().splitlines()
    rig = open_rig(wrecks / point)
    try:
        await _check(rig, said)
        await _goes_on(rig, KEPT if said else [])
    finally:
        rig.store.close()
    count.add(crash_points_with_process_death=1)


async def _check(rig: Rig, said: list[str]) -> None:
    await rig.start()
    node = rig.node
    if node.state.namespace("t/n") is None:
        assert not said
        await rig.namespace()
    grid, opaque = await rig.open(), await rig.open(schema=OPAQUE)
    for line in said:
        kind, _, name = line.partition(" ")
        if kind != "put":
            continue
        key = name.encode()
        member = opaque if name == "opaque" else grid
        found = await rig.get(member, key)
        size = 3 * LBA_BYTES if name == "opaque" else GRID_BYTES
        assert found in (value_of(key, size), None)
        if f"deleted {name}" in said:
            assert found is None, f"{name} is back after its delete was acknowledged"
        elif f"deleting {name}" not in said and (key in KEPT or "evicting" not in said):
            assert found is not None, f"{name} was acknowledged and is gone"
    assert await rig.get(grid, b"pending") is None
    assert node.recovered.dropped == 0 and len(node.writes) == 0
    rig.check()
    index = node.engine.index
    live = index.state[: index.high] > 0
    for namespace in node.state.namespaces:
        mine = live & (index.namespace[: index.high] == namespace.id)
        assert node.engine.space.used_bytes(namespace.id) == int(index.length[: index.high][mine].sum())
    for extents in node.engine.space.maps.values():
        assert not list(extents.empty_regions()), "a region without blocks was not released"
    known = {v.id for v in node.state.volumes}
    assert set(node.drives.files("drive0").present()) == known == set(rig.target.volumes)
    assert {int.from_bytes(key[:4], "big") for key, _ in rig.store.scan("regions")} <= known
    records = [key for key, _ in rig.store.scan("blocks")]
    assert len(records) == len(list(rig.store.scan("owners"))) == index.count
    for name in ("t/other",):
        if f"namespace {name}" in said and f"dropping {name}" not in said:
            assert node.state.namespace(name) is not None
        if f"dropped {name}" in said:
            assert node.state.namespace(name) is None
    assert not [n for n in node.state.namespaces if n.deleting], "a namespace is still being deleted"


async def _goes_on(rig: Rig, kept: list[bytes]) -> None:
    """The node works as one that never crashed, and a start after that finds everything."""
    if rig.node.state.namespace("t/other") is None:
        await rig.namespace("t/other")
    m = await rig.open()
    for key in (b"pending", b"after"):
        assert await rig.put(m, key, value_of(key)) == OK
    rig.check()
    await rig.restart(clean=True)
    m = await rig.open()
    for key in (b"pending", b"after", *kept):
        assert await rig.get(m, key) == value_of(key)
    rig.check()
    held = sum(len(extents.claimed) for extents in rig.node.engine.space.maps.values())
    assert rig.node.engine.space.drives["drive0"].claimed_regions == held <= 4 and REGION and BASE
