"""The driver of SPDK's target against that target, on files and on stores of logical volumes."""

from __future__ import annotations

import asyncio
import signal
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.dataplane.interface import Barrier, VolumeErrors, VolumesFailed, WriteGrant
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import QosLimits, SpdkTarget
from forebay.appliance.dataplane.spdk_stores import StoreDrive
from forebay.appliance.dataplane.store_volumes import StoreVolumes
from forebay.appliance.dataplane.supervisor import AttachedTarget
from forebay.checksum import crc32c
from forebay.errors import NoSpace, NotFound, TargetFailed, Unavailable, VolumeMismatch
from forebay.ids import LBA_BYTES, Extent, GrantId, NamespaceId, VolumeId
from forebay.volume_label import VolumeLabel
from tests.client.conftest import new_host
from tests.spdk.rig import DEADLINE_S, NODE, REGION, SIZE, TIMES, Rig, program, rigged, write

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(180)]

either = pytest.mark.parametrize("kind", ["file", "aio"])
every = pytest.mark.parametrize("kind", ["file", "aio", "uring"])
PATTERN = b"\xaa" * LBA_BYTES


async def served(rig: Rig, *numbers: int) -> list[Any]:
    volumes = [await rig.volume(number) for number in numbers]
    for spec in volumes:
        await rig.target.add_volume(spec)
    return volumes


async def test_it_says_who_it_is(tmp_path: Path) -> None:
    async with rigged(tmp_path, "file") as rig:
        info = await rig.target.info()
        assert info.kind == "spdk" and info.version.startswith("SPDK v") and info.pid == rig.supervisor.pid
        able = info.capabilities
        assert able == await rig.target.able()
        assert able.per_host_visibility and able.qos and able.barrier and not able.fencing and not able.seal
        await rig.kill()
        assert (await rig.target.info()).boot_id != info.boot_id


@every
async def test_bytes(tmp_path: Path, kind: str) -> None:
    """What a host writes is what a checksum is of; a region is zero when it is prepared, whatever was there."""
    async with rigged(tmp_path, kind) as rig:
        (one,) = await served(rig, 1)
        host = new_host()
        await rig.target.add_host("acme", host, [one])
        await rig.target.prepare_region(one, REGION, REGION)
        transport = await rig.transport(host)
        assert await write(transport, 1, REGION + LBA_BYTES, PATTERN) is None
        ranges = [(REGION, LBA_BYTES, 7), (REGION + LBA_BYTES, LBA_BYTES, 7), (REGION + LBA_BYTES + 5, 100, 0)]
        expected = [crc32c(bytes(LBA_BYTES), 7), crc32c(PATTERN, 7), crc32c(PATTERN[:100], 0)]
        assert await rig.target.checksums(one, ranges) == expected
        assert await rig.target.barrier(one) is Barrier.FLUSHED
        assert await rig.target.seal([GrantId(1)], one) is Barrier.FLUSHED
        await rig.target.release_region(one, REGION, REGION)
        await rig.target.prepare_region(one, REGION, REGION)
        assert await rig.target.checksums(one, ranges[1:2]) == [crc32c(bytes(LBA_BYTES), 7)]
        assert await write(transport, 1, REGION + LBA_BYTES, PATTERN) is None
        await rig.target.prepare_region(one, REGION, REGION)
        assert await rig.target.checksums(one, ranges[1:2]) == [crc32c(bytes(LBA_BYTES), 7)], "no release before it"
        stats = await rig.target.io_stats()
        assert stats.write_bytes >= LBA_BYTES
        assert await rig.target.volume_errors() == {VolumeId(1): VolumeErrors(0)}
        transport.close()


async def test_a_cluster_that_changes_hands_is_zero(tmp_path: Path) -> None:
    """Also for a host that writes where nothing was prepared: it allocates a cluster, and reads the rest of it."""
    async with rigged(tmp_path, "aio") as rig:
        assert rig.drive is not None
        one, two = await served(rig, 1, 2)
        host = new_host()
        await rig.target.add_host("acme", host, [one, two])
        transport = await rig.transport(host)
        store = await rig.target.stores.space("drive0")
        for region in (1, 2):
            await rig.target.prepare_region(one, region * REGION, REGION)
            for at in range(0, REGION, 4 << 20):
                assert await write(transport, 1, region * REGION + at, PATTERN) is None
        assert (await rig.target.stores.space("drive0")).free_bytes == store.free_bytes - 2 * REGION
        await rig.target.release_region(one, REGION, REGION)
        assert (await rig.target.stores.space("drive0")).free_bytes == store.free_bytes - REGION
        await rig.target.remove_volume(one)
        await rig.target.stores.delete("drive0", "vol1")
        assert (await rig.target.stores.space("drive0")).free_bytes == store.free_bytes
        for at in range(REGION, SIZE, 4 << 20):
            assert await write(transport, 2, at + (1 << 20), b"\xbb" * LBA_BYTES) is None
            assert await rig.target.checksums(two, [(at, 1 << 20, 0)]) == [crc32c(bytes(1 << 20), 0)]
        transport.close()


async def test_a_store_that_is_full(tmp_path: Path) -> None:
    """It is said as that; nothing stays reserved, and what is given back can be had again."""
    async with rigged(tmp_path, "aio", disk_bytes=256 << 20) as rig:
        one, two = await served(rig, 1, 2)
        places = [(spec, number * REGION) for spec in (one, two) for number in (1, 2)]
        for spec, at in places[:3]:
            await rig.target.prepare_region(spec, at, REGION)
        left = (await rig.target.stores.space("drive0")).free_bytes
        with pytest.raises(NoSpace):
            await rig.target.prepare_region(*places[3], REGION)
        assert (await rig.target.stores.space("drive0")).free_bytes == left < REGION
        await rig.target.release_region(*places[0], REGION)
        await rig.target.prepare_region(*places[3], REGION)


@either
async def test_a_host_is_torn_down_and_may_come_back(tmp_path: Path, kind: str) -> None:
    async with rigged(tmp_path, kind) as rig:
        (one,) = await served(rig, 1)
        host, other = new_host(), new_host()
        await rig.target.add_host("acme", host, [one])
        await rig.target.add_host("acme", other, [one])
        mine, theirs = await rig.transport(host), await rig.transport(other)
        for transport in (mine, theirs):
            assert await write(transport, 1, REGION, PATTERN) is None
        await rig.target.teardown_host(host)
        assert host.nqn not in await rig.controllers() and other.nqn in await rig.controllers()
        for _ in range(2):  # the first one finds that its connection is gone
            error = await write(mine, 1, REGION, PATTERN)
        assert error is None
        await rig.target.remove_host("acme", host, [one])
        assert host.nqn not in await rig.controllers()
        for _ in range(2):
            error = await write(mine, 1, REGION, PATTERN)
        assert error is not None
        await rig.target.teardown_all(2)
        assert await rig.controllers() == []
        mine.close()
        theirs.close()


async def test_a_host_sees_its_volumes_alone(tmp_path: Path) -> None:
    async with rigged(tmp_path, "file") as rig:
        one, two = await served(rig, 1, 2)
        host = new_host()
        await rig.target.add_host("acme", host, [two])
        transport = await rig.transport(host)
        assert await write(transport, 2, REGION, PATTERN) is None
        assert await write(transport, 1, REGION, PATTERN) is not None
        assert await rig.target.reconcile([one, two], [rig.view(host, two)]) == []
        found = await rig.target.reconcile([one, two], [rig.view(host, one)])
        assert found == [f"host {host.nqn} does not see what it should"]
        assert await rig.target.reconcile([one, two], [rig.view(host, one)]) == []
        transport.close()


@every
async def test_a_killed_target_comes_back_with_all_that_it_had(tmp_path: Path, kind: str) -> None:
    async with rigged(tmp_path, kind) as rig:
        volumes = await served(rig, 1, 2)
        host = new_host()
        await rig.target.add_host("acme", host, volumes)
        transport = await rig.transport(host)
        assert await write(transport, 1, REGION, PATTERN) is None
        views = [rig.view(host, *volumes)]
        rig.replays.append(lambda: rig.target.reconcile(volumes, views))
        await rig.kill()
        assert await rig.target.reconcile(volumes, views) == []
        assert await rig.target.checksums(volumes[0], [(REGION, LBA_BYTES, 0)]) == [crc32c(PATTERN, 0)]
        for _ in range(2):
            error = await write(transport, 2, REGION, PATTERN)
        assert error is None
        transport.close()


async def test_a_target_that_hangs_is_replaced(tmp_path: Path) -> None:
    async with rigged(tmp_path, "file", replace(TIMES, probe_timeout_s=0.5)) as rig:
        volumes = await served(rig, 1)
        rig.replays.append(lambda: rig.target.reconcile(volumes, []))
        before = rig.supervisor.pid
        await rig.kill(signal.SIGSTOP)
        assert rig.supervisor.pid != before
        assert await rig.target.reconcile(volumes, []) == []


@either
async def test_a_driver_that_finds_it_running(tmp_path: Path, kind: str) -> None:
    """As the next daemon does: hosts of the earlier one go, volumes stay, and so do things of others."""
    async with rigged(tmp_path, kind) as rig:
        (one,) = await served(rig, 1)
        host = new_host()
        await rig.target.add_host("acme", host, [one])
        foreign = {"nqn": "nqn.2026-01.com.example:theirs", "serial_number": "x", "max_namespaces": 8}
        await rig.rpc.call("nvmf_create_subsystem", foreign)
        await rig.rpc.call("bdev_malloc_create", {"name": "theirs", "block_size": LBA_BYTES, "num_blocks": 1024})
        stores = [rig.drive] if rig.drive is not None else []
        await rig.target.close()
        again = SpdkTarget(
            JsonRpcClient(rig.supervisor.socket), node=NODE.hex()[:16], port=rig.target._subsystems.port, stores=stores
        )
        await again.teardown_all(2)
        assert await again.reconcile([one], []) in ([], ["volume 1 is not served as it should be"])
        assert await again.barrier(one) is Barrier.FLUSHED
        assert await again.reconcile([], []) == [
            f"NSID 1 of {again.subsystem_nqn('acme')} is not a volume of this node"
        ] + ([] if stores else [f"{one.path} is open and is not served"])
        left = [one["nqn"] for one in await rig.rpc.call("nvmf_get_subsystems")]
        assert foreign["nqn"] in left and again.subsystem_nqn("acme") not in left
        assert [one["name"] for one in await rig.rpc.call("bdev_get_bdevs", {"name": "theirs"})] == ["theirs"]
        await again.close()


async def test_what_a_killed_daemon_left_in_the_nodes_own_subsystem(tmp_path: Path) -> None:
    """A command of it would arrive late, and a volume that is there could not be served."""
    async with rigged(tmp_path, "aio") as rig:
        assert rig.drive is not None
        one, two = await rig.volume(1), await rig.volume(2)
        again = SpdkTarget(
            JsonRpcClient(rig.supervisor.socket),
            node=NODE.hex()[:16],
            port=rig.target._subsystems.port,
            stores=[rig.drive],
        )
        private = {"nqn": again.subsystem_nqn("").rstrip(":")}
        async with rig.target.io(one.path) as host:
            assert len(await rig.rpc.call("nvmf_subsystem_get_controllers", private)) == 1
            await again.teardown_all(2)
            assert await rig.rpc.call("nvmf_subsystem_get_controllers", private) == []
            with pytest.raises((Unavailable, ConnectionError)):
                await host.read(0, LBA_BYTES)
        # and one that could not take its way back, in the same daemon
        await rig.rpc.call("nvmf_subsystem_add_ns", private | {"namespace": {"bdev_name": one.path}})
        for spec in (two, one):
            async with again.io(spec.path) as host:
                assert len(await host.read(0, LBA_BYTES)) == LBA_BYTES
        await rig.rpc.call("nvmf_subsystem_add_ns", private | {"namespace": {"bdev_name": one.path}})
        assert await again.reconcile([one, two], []) == [
            f"volume {number} is not served as it should be" for number in (1, 2)
        ]
        await again.close()


async def test_a_volume_that_is_taken_away_in_between_says_nothing_of_the_drive(tmp_path: Path) -> None:
    """Or the block that was read then would be taken for a bad one."""
    async with rigged(tmp_path, "aio") as rig:
        (one,) = await served(rig, 1)
        async with rig.target.io(one.path) as host:
            await host.read(0, LBA_BYTES)
            where = {"nqn": rig.target.subsystem_nqn("acme"), "nsid": one.nsid}
            await rig.rpc.call("nvmf_subsystem_remove_ns", where)
            with pytest.raises(Unavailable):
                await host.read(0, LBA_BYTES)


async def test_the_node_uses_one_volume_that_is_not_served_at_a_time(tmp_path: Path) -> None:
    async with rigged(tmp_path, "aio") as rig:
        paths = [(await rig.volume(number)).path for number in (1, 1, 2)]

        async def use(path: str) -> int:
            async with rig.target.io(path) as host:
                for _ in range(20):
                    await host.read(0, LBA_BYTES)
                return len(await host.read(0, LBA_BYTES))

        assert await asyncio.gather(*map(use, paths)) == [LBA_BYTES] * 3


async def test_limits_of_a_volume(tmp_path: Path) -> None:
    async with rigged(tmp_path, "file", qos=QosLimits(5000, 8 << 20, 16 << 20)) as rig:
        (one,) = await served(rig, 1)
        found = await rig.rpc.call("bdev_get_bdevs")
        limits = {"rw_ios_per_sec": 5000, "rw_mbytes_per_sec": 0, "r_mbytes_per_sec": 8, "w_mbytes_per_sec": 16}
        assert [bdev["assigned_rate_limits"] for bdev in found] == [limits]
        assert await rig.target.reconcile([one], []) == []


async def test_errors(tmp_path: Path) -> None:
    async with rigged(tmp_path, "file") as rig:
        one, two = await served(rig, 1, 2)
        missing = replace(one, volume=VolumeId(3), nsid=3, bdev="vol3", path=str(tmp_path / "gone"))
        with pytest.raises(TargetFailed):
            await rig.target.add_volume(missing)
        with pytest.raises(VolumesFailed, match="volume 3: ") as caught:  # and the others are served nevertheless
            await rig.target.reconcile([missing, one, two], [rig.view(new_host(), one)])
        assert set(caught.value.failed) == {missing.volume}
        assert await rig.target.barrier(two) is Barrier.FLUSHED
        with pytest.raises(VolumeMismatch):
            await rig.target.add_volume(replace(one, path=two.path))
        with pytest.raises(NotFound):
            await rig.target.grant([WriteGrant(GrantId(1), (new_host(),), Extent(VolumeId(9), 0, LBA_BYTES))])
        await rig.target.revoke([GrantId(1)])
        with pytest.raises(NotFound):
            await rig.target.endpoint("nobody")


async def test_an_lvol_that_is_gone_keeps_no_other_from_being_served(tmp_path: Path) -> None:
    async with rigged(tmp_path, "aio") as rig:
        one, two = await served(rig, 1, 2)
        await rig.target.remove_volume(one)
        await rig.rpc.call("bdev_lvol_delete", {"name": one.path})
        host = new_host()
        await rig.kill()
        with pytest.raises(VolumesFailed) as caught:
            await rig.target.reconcile([one, two], [rig.view(host, one, two)])
        assert set(caught.value.failed) == {one.volume}
        assert await rig.target.barrier(two) is not None
        assert await rig.target.reconcile([two], [rig.view(host, two)]) == []


async def test_a_new_target_and_the_node_have_the_same_file(tmp_path: Path) -> None:
    """One that was replaced while the target was away is the one that the node clears regions of, too."""
    async with rigged(tmp_path, "file") as rig:
        (one,) = await served(rig, 1)
        path, kept = Path(one.path), tmp_path / "kept"
        path.rename(kept)
        with path.open("wb") as file:
            file.write(bytes([7]) * LBA_BYTES)
            file.truncate(one.size_bytes)
        before = await rig.target.checksums(one, [(0, LBA_BYTES, 0)])
        await rig.kill()
        await rig.target.reconcile([one], [])
        assert await rig.target.checksums(one, [(0, LBA_BYTES, 0)]) != before
        await rig.kill()
        kept.replace(path)
        await rig.target.reconcile([one], [])
        assert await rig.target.checksums(one, [(0, LBA_BYTES, 0)]) == before


async def test_whose_a_store_is(tmp_path: Path) -> None:
    async with rigged(tmp_path, "aio") as rig:
        assert rig.drive is not None
        known = rig.target.stores._identity(rig.drive.lvs)
        assert known is not None
        await rig.target.stores.open("drive0", known)
        with pytest.raises(VolumeMismatch, match="another drive"):
            await rig.target.stores.open("drive0", uuid.uuid4())
        other = SpdkTarget(JsonRpcClient(rig.supervisor.socket), node="f" * 16, stores=[rig.drive])
        other.stores.drives["drive0"] = replace(rig.drive, lvs="")
        with pytest.raises((VolumeMismatch, TargetFailed)):  # it is open as another node's
            await other.claim_store("drive0", uuid.uuid4())
        await other.close()


async def test_a_store_that_a_new_target_does_not_have_yet_is_not_missing(tmp_path: Path) -> None:
    async with rigged(tmp_path, "aio") as rig:
        assert rig.drive is not None
        known = rig.target.stores._identity(rig.drive.lvs)
        assert known is not None
        volumes = StoreVolumes(rig.target, "drive0", asyncio.get_running_loop())
        label = VolumeLabel(NODE, VolumeId(1), NamespaceId(1), bytes(16), 1, REGION, SIZE)
        await asyncio.to_thread(volumes.create, label)
        await rig.kill()
        for act in (volumes.present, partial(volumes.read_label, VolumeId(1)), partial(volumes.create, label)):
            with pytest.raises(Unavailable, match="started anew"):
                await asyncio.to_thread(act)
        await asyncio.to_thread(volumes.prove, known)
        assert await asyncio.to_thread(volumes.read_label, VolumeId(1)) == label
        with pytest.raises(VolumeMismatch, match="missing"):
            await asyncio.to_thread(volumes.read_label, VolumeId(2))


async def test_a_look_at_a_drive_while_it_is_attached_again(tmp_path: Path) -> None:
    """Finds nothing wrong with it, though only one of them can attach it."""
    async with rigged(tmp_path, "aio") as rig:
        await rig.kill()
        assert await asyncio.gather(*(rig.target.stores.attach() for _ in range(4))) == [{}] * 4


async def test_a_drive_that_is_not_empty_is_not_taken(tmp_path: Path) -> None:
    async with rigged(tmp_path, "file") as rig:
        disk = tmp_path / "full"
        disk.write_bytes(b"\0" * 4096 + b"x" + b"\0" * ((256 << 20) - 4097))
        other = SpdkTarget(
            JsonRpcClient(rig.supervisor.socket), node="e" * 16, stores=[StoreDrive("drive0", "aio", str(disk))]
        )
        with pytest.raises(VolumeMismatch, match="not empty"):
            await other.claim_store("drive0", uuid.uuid4())
        assert disk.read_bytes()[4096:4097] == b"x"
        await other.close()


async def test_a_target_that_somebody_else_runs(tmp_path: Path) -> None:
    """It is found, watched and left; when another answers in its place the state is replayed."""
    async with rigged(tmp_path, "file") as rig:
        told: list[int] = []

        async def replay() -> None:
            told.append(1)

        attached = AttachedTarget(
            tmp_path / "other", NODE, replay, socket=rig.supervisor.socket, program=program(), times=TIMES
        )
        await attached.start()
        assert attached.serving and attached.pid == rig.supervisor.pid
        await rig.kill()
        async with asyncio.timeout(DEADLINE_S):
            while not told:
                await asyncio.sleep(0.05)
        assert attached.pid == rig.supervisor.pid
        await attached.stop()
        assert rig.supervisor.serving
    nobody = AttachedTarget(
        tmp_path / "other",
        NODE,
        replay,
        socket=tmp_path / "none.sock",
        program=program(),
        times=replace(TIMES, start_s=0.2),
    )
    with pytest.raises(Unavailable, match=r"none\.sock"):
        await nobody.start()
