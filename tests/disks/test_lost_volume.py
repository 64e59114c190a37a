"""One volume of several cannot be served, though its drive is there: its blocks are misses, and all else goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.appliance.dataplane.interface import VolumesFailed
from forebay.appliance.namespace.problems import problems_of
from forebay.appliance.namespace.space import DriveState
from forebay.client import Client
from forebay.errors import OK, NoSpace, TargetFailed, WriteExpired
from forebay.ids import VolumeId
from tests.disks.node import FaultyNode, eventually
from tests.sim.rig import Member, Rig
from tests.sim.running import on_loop
from tests.sim.target import SimTarget

VALUE = bytes(range(256)) * 64
EIO = TargetFailed("bdev_aio_create: Input/output error (EIO)")

# ------------------------------------------------------------------------------------------------ the engine


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "drive", target=SimTarget())


async def two(rig: Rig) -> tuple[Member, Member, VolumeId, VolumeId]:
    """A session in each of two namespaces with a block, and their volumes."""
    await rig.start()
    members, volumes = [], []
    for name in ("t/a", "t/b"):
        await rig.namespace(name)
        members.append(await rig.open(name))
        assert await rig.put(members[-1], b"k", VALUE) == OK
        (volume,) = rig.node.engine.space.volumes_of(members[-1].session.namespace)
        volumes.append(volume.id)
    return members[0], members[1], volumes[0], volumes[1]


async def looked(rig: Rig, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            rig.clock.advance(2_000)
            await rig.node.drives.look()
            await asyncio.sleep(0.001)


async def anew(rig: Rig, member: Member) -> Member:
    """The same process, connected to the target that runs now."""
    return Member(member.session, type(member.host)(rig.target, member.host.tenant, member.identity))


@on_loop
async def test_what_a_new_target_cannot_open_keeps_nothing_else_from_it(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, lost, other = await two(rig)
    space = rig.node.engine.space
    (mine,) = await rig.allocate(a, b"new", size=len(VALUE))
    (theirs,) = await rig.allocate(b, b"new", size=len(VALUE))
    path = space.specs[lost].path
    rig.target.restart()
    rig.target.unopenable = {lost: EIO}
    await rig.node.replay()
    a, b = await anew(rig, a), await anew(rig, b)
    assert set(space.specs) == {other} and set(rig.target.volumes) == {other}
    # the other's grant is there again
    assert await rig.node.writes.commit(b.session, [rig.written(b, b"new", theirs, VALUE)]) == [OK]
    assert await rig.get(b, b"new") == VALUE and await rig.get(b, b"k") == VALUE
    assert await rig.get(a, b"k") is None and await rig.put(a, b"more", VALUE) == NoSpace.code
    (problem,) = problems_of(rig.node.engine)
    assert (problem.part, problem.affects) == ("drives", "some")
    assert all(text in problem.reason for text in (f"volume {lost}", path, "EIO"))
    assert space.drives["drive0"].state is DriveState.SERVING
    rig.check()
    # it is tried again, and said once
    tries = rig.target.calls["reconcile"]
    await looked(rig, lambda: rig.target.calls["reconcile"] > tries + 3)
    assert set(space.lost) == {lost}
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(said) == 1 and path in said[0] and "EIO" in said[0], said
    await rig.node.release_empty_regions()
    rig.target.unopenable.clear()
    await looked(rig, lambda: not space.lost)
    assert await rig.get(a, b"k") == VALUE, "what was flushed"
    sums = [(mine.write_id, rig.sums(a, b"new", mine.write_id, VALUE))]
    assert await rig.node.writes.commit(a.session, sums) == [WriteExpired.code], "never what was being written"
    assert await rig.put(a, b"more", VALUE) == OK and not problems_of(rig.node.engine)
    rig.check()


@on_loop
async def test_a_scrub_passes_what_it_cannot_read(rig: Rig) -> None:
    _, _, lost, _ = await two(rig)
    rig.target.restart()
    rig.target.unopenable = {lost: EIO}
    await rig.node.replay()
    rig.node.scrubber.start()
    async with asyncio.timeout(20):
        while rig.node.scrubber.report().state == "running":
            rig.clock.advance(await rig.node.scrubber.step())
    report = rig.node.scrubber.report()
    assert (report.state, report.blocks, report.unread, report.bad) == ("done", 2, 1, 0)


@on_loop
async def test_a_start_goes_on_without_it_while_another_is_served(rig: Rig) -> None:
    _, _, lost, other = await two(rig)
    await rig.node.close()
    rig.target.restart()
    rig.target.unopenable = {lost: EIO}
    await rig.start()
    a, b = await rig.open("t/a"), await rig.open("t/b")
    assert await rig.get(b, b"k") == VALUE and await rig.get(a, b"k") is None
    rig.target.unopenable.clear()
    await looked(rig, lambda: not rig.node.engine.space.lost)
    a = await rig.open("t/a")
    assert await rig.get(a, b"k") == VALUE
    rig.check()
    rig.target.restart()
    rig.target.unopenable = dict.fromkeys((lost, other), EIO)
    with pytest.raises(VolumesFailed, match=f"volume {lost}.*EIO.*volume {other}"):
        await rig.start()


@on_loop
async def test_another_volume_in_its_place_is_not_served_and_not_removed(rig: Rig) -> None:
    """Somebody swapped two files while no target had them open."""
    a, _, one, other = await two(rig)
    space = rig.node.engine.space
    paths = [Path(space.specs[volume].path) for volume in (one, other)]
    kept = paths[0].with_suffix(".kept")
    paths[0].rename(kept)
    os.link(paths[1], paths[0])
    rig.target.restart()
    await rig.node.replay()
    assert set(space.lost) == {one} and "files were swapped" in space.lost[one]
    await rig.node.delete_namespace("t/a", force=True)
    assert paths[0].exists() and len(rig.node.state.namespaces) == 2
    assert await rig.get(await rig.open("t/b"), b"k") == VALUE
    kept.replace(paths[0])

    async def gone() -> bool:
        await rig.node.background()
        return len(rig.node.state.namespaces) == 1

    await looked(rig, lambda: not space.lost)
    async with asyncio.timeout(20):
        while not await gone():
            rig.clock.advance(2_000)
            await rig.node.sweep()
    assert not paths[0].exists() and paths[1].exists()
    assert a.session.token
    rig.check()


@on_loop
async def test_a_file_that_is_gone_while_all_runs_takes_its_own_blocks(rig: Rig) -> None:
    a, b, one, other = await two(rig)
    space = rig.node.engine.space
    path = Path(space.specs[one].path)
    kept = path.rename(path.with_suffix(".kept"))
    await looked(rig, lambda: set(space.lost) == {one})
    assert set(rig.target.volumes) == {other} and space.drives["drive0"].state is DriveState.SERVING
    assert await rig.get(a, b"k") is None and await rig.get(b, b"k") == VALUE
    kept.rename(path)
    await looked(rig, lambda: not space.lost)
    assert await rig.get(a, b"k") == VALUE
    for volume in (one, other):
        Path(space.specs[volume].path).unlink()
    drive = space.drives["drive0"]
    await looked(rig, lambda: drive.state is DriveState.AWAY)
    rig.check()


@on_loop
@pytest.mark.parametrize("before", [True, False])
async def test_a_drive_that_takes_no_writes_for_a_moment_is_served_again_without_it(rig: Rig, before: bool) -> None:
    """Whether it was lost before that or is found to be lost by the closer look."""
    a, b, one, other = await two(rig)
    space = rig.node.engine.space
    drive, path = space.drives["drive0"], Path(space.specs[one].path)
    kept = path.rename(path.with_suffix(".kept"))
    if before:
        await looked(rig, lambda: set(space.lost) == {one})
    space.drive_failed(other, EIO)
    assert not space.is_writable(other)
    await looked(rig, lambda: drive.state is not DriveState.READ_ONLY)
    assert drive.state is DriveState.SERVING and set(space.lost) == {one}
    assert await rig.get(b, b"k") == VALUE and await rig.get(a, b"k") is None
    kept.rename(path)
    await looked(rig, lambda: not space.lost)
    assert await rig.get(a, b"k") == VALUE
    rig.check()


# ------------------------------------------------------------------------------------------------ a daemon

LONG = os.environ.get("FOREBAY_TEST_PROFILE") == "long"
SIZE = 1 << 20
BLOCKS = 80  # more than a region, so that both drives have some
_PATIENT_MS = 60_000


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyNode]:
    folder = tmp_path_factory.mktemp("node")
    served = FaultyNode(folder, None, [folder / "a", folder / "b"], capacity="512MiB")
    with served.admin() as admin:
        admin.create_namespace("acme/other")
    yield served
    served.stop()


class Stock:
    """Blocks of one namespace, whatever becomes of the node."""

    def __init__(self, client: Client, count: int) -> None:
        self.values = {os.urandom(8): os.urandom(SIZE) for _ in range(count)}
        stored = client.put(list(self.values), list(self.values.values()), deadline_ms=_PATIENT_MS)
        assert all(one.stored for one in stored)

    def get(self, client: Client) -> Counter[str]:
        """Read all of it; the reasons. A hit has the bytes that were stored."""
        results = client.get(list(self.values), deadline_ms=_PATIENT_MS)
        for (key, value), result in zip(self.values.items(), results, strict=True):
            if result.hit:
                assert result.value is not None and bytes(result.value) == value, key
        return Counter(result.reason for result in results)

    def is_whole(self, client: Client) -> bool:
        return self.get(client) == {"ok": len(self.values)}


def put_in_its_place(file: Path, what: str, neighbour: Path) -> Path:
    """Something else under a volume's path; where the volume's file is then."""
    kept = file.with_name("kept")
    size_bytes = file.stat().st_size
    file.rename(kept)
    if what == "directory":
        file.mkdir()
    elif what == "stranger":
        with neighbour.open("rb") as label:
            file.write_bytes(label.read(4096))
        os.truncate(file, size_bytes)
    return kept


def problems(node: FaultyNode) -> list[dict[str, str]]:
    found: list[dict[str, str]] = node.ready()[1]["problems"]
    return found


def put_back(kept: Path, file: Path) -> None:
    if file.is_dir():
        file.rmdir()
    kept.replace(file)


@pytest.fixture(scope="module")
def stocks(node: FaultyNode) -> tuple[Stock, Stock]:
    """Of two namespaces, each on both drives."""
    with node.client() as client, node.client(namespace="acme/other") as others:
        return Stock(client, BLOCKS), Stock(others, BLOCKS)


@pytest.mark.parametrize("what", ["directory", "stranger", "nothing"] if LONG else ["directory", "stranger"])
def test_a_volume_whose_file_is_another_when_the_target_is_started_anew(
    node: FaultyNode, stocks: tuple[Stock, Stock], what: str
) -> None:
    stock, other = stocks
    file, neighbour = sorted((node.drives[1] / "volumes").glob("*.vol"), key=lambda one: int(one.stem))
    with node.client() as client, node.client(namespace="acme/other") as others, node.admin() as admin:
        assert stock.is_whole(client) and other.is_whole(others)
        target = node.status().target_pid
        node.process.send_signal(signal.SIGSTOP)  # so that it all happens at once
        try:
            kept = put_in_its_place(file, what, neighbour)
            os.kill(target, signal.SIGKILL)
        finally:
            node.process.send_signal(signal.SIGCONT)
        eventually(lambda: str(file) in str(problems(node)), "it is told")
        eventually(lambda: [problem["part"] for problem in problems(node)] == ["drives"], "there is a target again")
        body = node.degraded()
        assert body["writes"] and str(file) in body["problems"][0]["reason"]
        eventually(lambda: other.is_whole(others), "the drive's other volume is served")
        eventually(lambda: set(stock.get(client)) == {"ok", "unavailable"}, "the rest is served")
        assert {drive.state for drive in node.status().drives} == {"serving"}
        assert [str(file) in drive.reason for drive in node.status().drives] == [False, True]
        assert Stock(client, 8).is_whole(client), "what is new goes to the other drive"
        admin.start_scrub()
        eventually(lambda: admin.scrub_status().state == "done", "a scrub passes it")
        report = admin.scrub_status()
        assert 0 < report.unread < report.blocks and not report.bad, report
        put_back(kept, file)
        eventually(lambda: not problems(node), "it is back")
        eventually(lambda: stock.is_whole(client), "with all its blocks")
        assert other.is_whole(others)


@pytest.mark.parametrize("what", ["directory", "stranger", "nothing"] if LONG else ["directory"])
def test_a_volume_whose_file_is_another_when_the_node_starts(
    node: FaultyNode, stocks: tuple[Stock, Stock], what: str
) -> None:
    """Labels are looked at then before anything is served: it is the drive that is away, and the node goes on."""
    stock, _ = stocks
    file, neighbour = sorted((node.drives[1] / "volumes").glob("*.vol"), key=lambda one: int(one.stem))
    node.stop()
    kept = put_in_its_place(file, what, neighbour)
    node.start()
    assert str(file) in str(node.degraded()["problems"])
    with node.client() as client:
        assert set(stock.get(client)) == {"ok", "unavailable"}
        put_back(kept, file)
        eventually(lambda: not problems(node), "it is back")
        eventually(lambda: stock.is_whole(client), "with all its blocks")
