"""Whoever dies in the middle of whichever call: what the next one finds is put right, and nothing is left in the end.

The steps are the calls that the driver makes when a daemon starts, replays its state and leaves; they are counted, so
that a call more is a case more. Drives of SPDK's own take many, of which some are tried.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.appliance.dataplane.interface import HostView, VolumeSpec
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import SpdkTarget
from forebay.appliance.dataplane.spdk_stores import StoreDrive
from forebay.checksum import crc32c
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from tests.client.conftest import new_host
from tests.spdk.rig import DEADLINE_S, NODE, REGION, TIMES, Rig, rigged, write

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(900)]

NODE_NAME = NODE.hex()[:16]
PATTERN = b"\xaa" * LBA_BYTES
THEIRS = "nqn.2026-01.com.example:theirs"


class Died(BaseException):
    """What becomes of a daemon that is killed."""


class Watched(JsonRpcClient):
    """Counts calls; the one with number ``at`` meets ``fault``, before it is sent or after it was answered."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.made = 0
        self.at = -1
        self.after = False
        self.fault = self.die
        self.met = ""

    def die(self) -> None:
        raise Died

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        number, self.made = self.made, self.made + 1
        if number == self.at and not self.after:
            self.met = method
            self.fault()
        try:
            return await super().call(method, params, timeout_s=timeout_s)
        finally:
            if number == self.at and self.after:
                self.met = method
                self.fault()


class Daemon:
    """One life of a daemon, as far as a target sees it."""

    def __init__(self, rig: Rig, path: Path) -> None:
        self.rpc = Watched(rig.supervisor.socket)
        drives = [StoreDrive("drive0", "aio", rig.drive.where)] if rig.drive is not None else []
        keys = HostKeyFiles(path / "keys", NODE_NAME)
        port = rig.target._subsystems.port
        self.target = SpdkTarget(self.rpc, node=NODE_NAME, port=port, stores=drives, keys=keys)

    async def start(self, drive: uuid.UUID | None, volumes: list[VolumeSpec], views: list[HostView]) -> None:
        if drive is not None:
            await self.target.stores.open("drive0", drive)
        await self.target.teardown_all(2)
        for spec in volumes if drive is not None else ():
            async with self.target.io(spec.path) as host:  # a label is looked at
                await host.read(0, LBA_BYTES)
        await self.target.reconcile(volumes, views)


def proven(host: HostIdentity) -> HostIdentity:
    return replace(host, secrets=HostSecrets(Secret.generate(), Secret.generate()))


async def belongings(rig: Rig) -> dict[str, list[str]]:
    """What there is at the target, of whomever."""
    found = {
        "subsystems": [one["nqn"] for one in await rig.rpc.call("nvmf_get_subsystems") if "namespaces" in one],
        "bdevs": [one["name"] for one in await rig.rpc.call("bdev_get_bdevs")],
        "keys": [one["name"] for one in await rig.rpc.call("keyring_get_keys")],
        "stores": [one["name"] for one in await rig.rpc.call("bdev_lvol_get_lvstores")],
    }
    return {name: sorted(each) for name, each in found.items()}


async def with_things_of_others(rig: Rig, path: Path) -> dict[str, list[str]]:
    """Put a subsystem, a bdev and a key there which are nobody's business."""
    (path / "key").write_text(Secret.generate().text())
    (path / "key").chmod(0o600)
    await rig.rpc.call("nvmf_create_subsystem", {"nqn": THEIRS, "serial_number": "x", "max_namespaces": 8})
    await rig.rpc.call("bdev_malloc_create", {"name": "theirs", "block_size": LBA_BYTES, "num_blocks": 1024})
    await rig.rpc.call("nvmf_subsystem_add_ns", {"nqn": THEIRS, "namespace": {"bdev_name": "theirs"}})
    await rig.rpc.call("nvmf_subsystem_add_host", {"nqn": THEIRS, "host": "nqn.2026-01.com.example:host"})
    await rig.rpc.call("keyring_file_add_key", {"name": "theirs", "path": str(path / "key")})
    return await belongings(rig)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "stride"), [("file", 1), ("aio", 5)])
async def test_the_daemon_dies_in_between(tmp_path: Path, kind: str, stride: int, after: bool) -> None:
    """While it starts and while it leaves; the next one finds bytes as they were, and leaves nothing behind."""
    async with rigged(tmp_path, kind) as rig:
        drive = uuid.UUID(rig.drive.lvs[-36:]) if rig.drive is not None else None
        volumes = [await rig.volume(number) for number in (1, 2)]
        first = Daemon(rig, tmp_path)
        await first.start(drive, volumes, [])
        await first.target.prepare_region(volumes[0], REGION, REGION)
        await first.target.leave()
        await first.target.close()
        of_others = await with_things_of_others(rig, tmp_path)
        at, ended = int(after), False
        while not ended:
            host = proven(new_host())
            views = [HostView("acme", host, tuple(volumes))]
            dying = Daemon(rig, tmp_path)
            dying.rpc.at, dying.rpc.after = at, after
            try:
                await dying.start(drive, volumes, [HostView("acme", proven(new_host()), tuple(volumes))])
                await dying.target.leave()
                ended = True
            except Died:
                at += stride
            await dying.target.close()
            daemon = Daemon(rig, tmp_path)
            await daemon.start(drive, volumes, views)
            said = f"the daemon died at call {at}, {dying.rpc.met}"
            assert await daemon.target.reconcile(volumes, views) == [], said
            if at % 8 == 0 or ended:  # a host finds all as it was
                end = await daemon.target.endpoint("acme")
                assert end.port == rig.target._subsystems.port, said
                transport = await rig.transport(host)
                assert await write(transport, 1, REGION, PATTERN) is None, said
                transport.close()
                assert await daemon.target.checksums(volumes[0], [(REGION, LBA_BYTES, 0)]) == [crc32c(PATTERN, 0)], said
            await daemon.target.leave()
            assert await belongings(rig) == of_others, said
            assert not list((tmp_path / "keys").iterdir()), said
            await daemon.target.close()
        assert at > 25, "it makes more calls than that"


@pytest.mark.parametrize(("kind", "stride"), [("file", 2), ("aio", 5)])
async def test_the_target_ends_in_a_replay(tmp_path: Path, kind: str, stride: int) -> None:
    """Killed or, now and then, hung: the one after it has all that the first one had."""
    async with rigged(tmp_path, kind, replace(TIMES, probe_timeout_s=0.5)) as rig:
        volumes = [await rig.volume(number) for number in (1, 2)]
        host = proven(new_host())
        views = [HostView("acme", host, tuple(volumes))]
        daemon = Daemon(rig, tmp_path)
        await daemon.start(uuid.UUID(rig.drive.lvs[-36:]) if rig.drive is not None else None, volumes, views)
        await daemon.target.prepare_region(volumes[0], REGION, REGION)
        transport = await rig.transport(host)
        assert await write(transport, 1, REGION, PATTERN) is None

        async def replay() -> None:
            daemon.rpc.made = 0
            await daemon.target.reconcile(volumes, views)

        def end() -> None:
            daemon.rpc.at = -1
            os.kill(rig.supervisor.pid or 0, signal.SIGSTOP if step % 3 == 2 else signal.SIGKILL)

        rig.replays.append(replay)
        daemon.rpc.fault = end
        step, ended = 0, False
        while not ended:
            daemon.rpc.at = step
            await rig.kill()
            ended, daemon.rpc.at = daemon.rpc.at == step, -1
            said = f"the target ended at call {step}, {daemon.rpc.met}"
            assert await daemon.target.reconcile(volumes, views) == [], said
            assert await daemon.target.checksums(volumes[0], [(REGION, LBA_BYTES, 0)]) == [crc32c(PATTERN, 0)], said
            step += stride
        assert step > 15, "it makes more calls than that"
        async with asyncio.timeout(DEADLINE_S):  # the host finds that its connection is gone, and makes another
            while await write(transport, 2, REGION, PATTERN) is not None:
                await asyncio.sleep(0.05)
        transport.close()
        await daemon.target.close()
