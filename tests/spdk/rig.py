"""SPDK's target under its supervisor, with the driver: a volume on a file, or in a store that SPDK drives itself."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.dataplane.interface import HostView, VolumeSpec
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import SpdkTarget
from forebay.appliance.dataplane.spdk_program import SpdkProgram
from forebay.appliance.dataplane.spdk_stores import StoreDrive
from forebay.appliance.dataplane.supervisor import Supervisor, SupervisorTimes
from forebay.client.transports.base import Segment, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.ids import HostIdentity, VolumeId
from tests.client.conftest import lasting_port, now_ms

NODE = bytes(range(16))
REGION = 64 << 20
SIZE = 3 * REGION
TIMES = SupervisorTimes(probe_interval_s=0.05, probe_timeout_s=5.0, backoff_min_s=0.01, backoff_max_s=0.1)
DEADLINE_S = 40.0


@dataclass
class Rig:
    """A target of its own, its driver, and a plain connection to look at it."""

    supervisor: Supervisor
    target: SpdkTarget
    rpc: JsonRpcClient
    path: Path
    drive: StoreDrive | None
    replays: list[Callable[[], Awaitable[object]]] = field(default_factory=list)

    async def volume(self, number: int = 1, tenant: str = "acme") -> VolumeSpec:
        """A volume that is there; not served yet."""
        nguid = uuid.uuid5(uuid.NAMESPACE_OID, str(number)).hex
        if self.drive is None:
            path = self.path / f"{number}.vol"
            path.touch()
            os.truncate(path, SIZE)
        else:
            await self.target.stores.create(self.drive.name, f"vol{number}", SIZE)
            path = Path(self.drive.lvs) / f"vol{number}"
        return VolumeSpec(VolumeId(number), tenant, number, f"vol{number}", str(path), SIZE, nguid)

    def view(self, host: HostIdentity, *volumes: VolumeSpec) -> HostView:
        return HostView(volumes[0].tenant, host, volumes)

    async def controllers(self, tenant: str = "acme") -> list[str]:
        found = await self.rpc.call("nvmf_subsystem_get_controllers", {"nqn": self.target.subsystem_nqn(tenant)})
        return [one["hostnqn"] for one in found]

    async def transport(self, host: HostIdentity, tenant: str = "acme") -> NvmeTcpTransport:
        end = await self.target.endpoint(tenant)
        return NvmeTcpTransport(SubsystemAddress(end.address, end.port, end.subsystem_nqn), host)

    async def restarted(self, before: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.supervisor.restarts == before or not self.supervisor.serving:
                await asyncio.sleep(0.01)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the target a signal and wait for its successor."""
        assert self.supervisor.pid is not None
        before = self.supervisor.restarts
        os.kill(self.supervisor.pid, number)
        await self.restarted(before)


async def write(transport: NvmeTcpTransport, nsid: int, offset_bytes: int, data: bytes) -> Exception | None:
    """Write through the client's transport, in a thread."""
    segments = (Segment(memoryview(bytearray(data)), len(data)),)
    operation = WriteOp(nsid, offset_bytes, segments)
    (outcome,) = await asyncio.to_thread(transport.write, [operation], now_ms() + 20_000)
    return outcome.error


def program() -> SpdkProgram:
    return SpdkProgram(Path(os.environ["FOREBAY_SPDK_TGT"]))


@asynccontextmanager
async def rigged(
    path: Path, kind: str, times: SupervisorTimes = TIMES, *, disk_bytes: int = 1 << 30, **options: Any
) -> AsyncIterator[Rig]:
    """``kind`` is ``file``, or that of a bdev."""
    rigs: list[Rig] = []

    async def replay() -> None:
        for one in rigs:
            for each in one.replays:
                await each()

    supervisor = Supervisor(path / "run", NODE, replay, times=times, program=program())
    await supervisor.start()
    stores: Sequence[StoreDrive] = ()
    if kind != "file":
        where = path / "disk"
        where.touch()
        os.truncate(where, disk_bytes)
        stores = [StoreDrive("drive0", kind, str(where), disk_bytes)]
    rpc = JsonRpcClient(supervisor.socket)
    target = SpdkTarget(
        JsonRpcClient(supervisor.socket), node=NODE.hex()[:16], port=lasting_port(), stores=stores, **options
    )
    try:
        if kind == "uring" and "bdev_uring_create" not in await rpc.call("rpc_get_methods"):
            pytest.skip("SPDK's target here was built without uring")
        if stores:
            await target.claim_store("drive0", uuid.uuid4())
        rigs.append(Rig(supervisor, target, rpc, path, stores[0] if stores else None))
        yield rigs[0]
    finally:
        await target.close()
        await rpc.close()
        await supervisor.stop()
