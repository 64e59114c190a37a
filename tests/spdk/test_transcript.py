"""What the driver asks of SPDK for hardware that few machines have: NVMe drives by PCI address, RDMA, uring.

A socket answers as SPDK v26.05 does (shapes of `nvmf_rpc.c`, `bdev_nvme_rpc.c`, `vbdev_lvol_rpc.c`), and the calls are
compared one by one.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from forebay.appliance.dataplane.interface import Barrier, VolumeSpec
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import SpdkTarget
from forebay.appliance.dataplane.spdk_program import SpdkProgram
from forebay.appliance.dataplane.spdk_stores import StoreDrive
from forebay.appliance.dataplane.subsystems import Listener
from forebay.errors import ProtocolError, TargetFailed, Unavailable
from forebay.ids import VolumeId

PCI = "0000:3b:00.0"
NODE = "0123456789abcdef"
DRIVE = UUID("6e8bc430-9c3a-11d9-9669-0800200c9a66")
STORE = f"forebay-{NODE}-{DRIVE}"
GONE = {"code": -19, "message": "No such device"}

Answer = Callable[[dict[str, Any]], Any]


class Refused(Exception):
    """What is answered as an error."""


@asynccontextmanager
async def scripted(path: Path, answers: dict[str, Answer]) -> AsyncIterator[list[tuple[str, dict[str, Any]]]]:
    """A target that knows these methods; what it was asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            call = json.loads(line)
            params = call.get("params", {})
            asked.append((call["method"], params))
            reply = {"jsonrpc": "2.0", "id": call["id"]}
            try:
                reply["result"] = answers[call["method"]](params)
            except Refused as error:
                reply["error"] = error.args[0]
            writer.write(json.dumps(reply).encode())
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield asked
    finally:
        server.close()


def refuse(error: dict[str, Any]) -> Answer:
    def answer(params: dict[str, Any]) -> Any:
        raise Refused(error)

    return answer


def identify(cache: bool) -> Answer:
    """Identify Controller of a drive with a volatile write cache, or without."""
    data = bytearray(4096)
    data[525] = int(cache)
    encoded = base64.urlsafe_b64encode(data).decode()
    return lambda params: {"cpl": base64.urlsafe_b64encode(bytes(16)).decode(), "data": encoded}


@pytest.mark.parametrize(("cache", "result"), [(True, Barrier.UNKNOWN), (False, Barrier.FLUSHED)])
async def test_an_nvme_drive_by_its_address(tmp_path: Path, cache: bool, result: Barrier) -> None:
    """Its flush is known only where it has no cache that a loss of power empties."""
    bdev = f"forebay-{NODE}-drive0n1"
    answers: dict[str, Answer] = {
        "bdev_get_bdevs": refuse(GONE),
        "bdev_nvme_attach_controller": lambda params: [bdev],
        "bdev_wait_for_examine": lambda params: True,
        "bdev_lvol_get_lvstores": lambda params: [
            {
                "uuid": "a9959197-b5e2-4f2d-8095-251ffb6985a5",
                "name": STORE,
                "base_bdev": bdev,
                "total_data_clusters": 1000,
                "free_clusters": 900,
                "block_size": 4096,
                "cluster_size": 4 << 20,
            }
        ],
        "bdev_nvme_send_cmd": identify(cache),
    }
    async with scripted(tmp_path / "s", answers) as asked:
        drive = StoreDrive("drive0", "nvme", PCI)
        target = SpdkTarget(JsonRpcClient(tmp_path / "s"), node=NODE, stores=[drive])
        await target.stores.open("drive0", DRIVE)
        assert asked == [
            ("bdev_get_bdevs", {"name": bdev}),
            ("bdev_nvme_attach_controller", {"name": bdev.removesuffix("n1"), "trtype": "PCIe", "traddr": PCI}),
            ("bdev_wait_for_examine", {}),
            ("bdev_lvol_get_lvstores", {}),
        ]
        space = await target.stores.space("drive0")
        assert (space.total_bytes, space.free_bytes, space.held_bytes) == (1000 << 22, 900 << 22, 100 << 22)
        asked.clear()
        spec = VolumeSpec(VolumeId(1), "acme", 1, "vol1", f"{STORE}/vol1", 1 << 30, "0" * 32)
        assert await target.barrier(spec) is result
        assert await target.barrier(spec) is result
        ((method, params),) = asked  # once
        command = base64.urlsafe_b64decode(params.pop("cmdbuf"))
        assert method == "bdev_nvme_send_cmd" and len(command) == 64
        assert (command[0], command[40:44]) == (0x06, b"\x01\0\0\0")  # Identify, CNS 01h
        name = f"forebay-{NODE}-drive0"
        assert params == {"name": name, "cmd_type": "admin", "data_direction": "c2h", "data_len": 4096}
        await target.close()


async def test_an_nvme_drive_that_cannot_be_had(tmp_path: Path) -> None:
    answers: dict[str, Answer] = {
        "bdev_get_bdevs": refuse(GONE),
        "bdev_nvme_attach_controller": refuse({"code": -5, "message": "Input/output error"}),
        "bdev_wait_for_examine": lambda params: True,
    }
    async with scripted(tmp_path / "s", answers):
        target = SpdkTarget(JsonRpcClient(tmp_path / "s"), node=NODE, stores=[StoreDrive("drive0", "nvme", PCI)])
        with pytest.raises(TargetFailed, match=rf"nvme:{PCI}.*Input/output error"):
            await target.stores.open("drive0", DRIVE)
        await target.close()


@pytest.mark.parametrize("target_answers", [True, False])
async def test_a_drive_that_does_not_answer_or_a_target(tmp_path: Path, target_answers: bool) -> None:
    late = refuse({"code": -110, "message": "Connection timed out"})
    answers: dict[str, Answer] = {
        "bdev_get_bdevs": refuse(GONE),
        "bdev_nvme_attach_controller": late,
        "bdev_wait_for_examine": lambda params: True,
        "spdk_get_version": (lambda params: {}) if target_answers else late,
    }
    async with scripted(tmp_path / "s", answers):
        target = SpdkTarget(JsonRpcClient(tmp_path / "s"), node=NODE, stores=[StoreDrive("drive0", "nvme", PCI)])
        with pytest.raises(TargetFailed if target_answers else Unavailable, match="timed out"):
            await target.stores.open("drive0", DRIVE)
        await target.close()


async def test_a_file_by_uring(tmp_path: Path) -> None:
    """And a new store: every cluster of it zeroed."""
    bdev = f"forebay-{NODE}-drive0"
    bdevs: list[dict[str, Any]] = []

    def get(params: dict[str, Any]) -> Any:
        if not bdevs:
            raise Refused(GONE)
        return bdevs

    answers: dict[str, Answer] = {
        "bdev_get_bdevs": get,
        "bdev_uring_create": lambda params: bdevs.append({"name": bdev, "claimed": False}) or bdev,  # type: ignore[func-returns-value]
        "bdev_wait_for_examine": lambda params: True,
        "bdev_lvol_get_lvstores": lambda params: [],
        "bdev_lvol_create_lvstore": lambda params: "a9959197-b5e2-4f2d-8095-251ffb6985a5",
    }

    async def start(name: str) -> bytes:
        assert name == bdev
        return bytes(1 << 20)

    async with scripted(tmp_path / "s", answers) as asked:
        rpc = JsonRpcClient(tmp_path / "s")
        target = SpdkTarget(rpc, node=NODE, stores=[StoreDrive("drive0", "uring", "/srv/kv.img")])
        assert await target.stores.claim("drive0", DRIVE, start) == DRIVE
        assert asked[1] == ("bdev_uring_create", {"name": bdev, "filename": "/srv/kv.img", "block_size": 4096})
        made = {"bdev_name": bdev, "lvs_name": STORE, "cluster_sz": 4 << 20, "clear_method": "write_zeroes"}
        assert asked[-1] == ("bdev_lvol_create_lvstore", made)
        assert len(STORE) < 64  # SPDK_LVS_NAME_MAX
        await target.close()


async def test_listeners_for_rdma(tmp_path: Path) -> None:
    """Beside NVMe/TCP, for every subsystem."""
    nqn = f"nqn.2026-11.io.forebay:{NODE}:acme"
    there: list[dict[str, Any]] = []
    addresses: list[dict[str, Any]] = []

    def get(params: dict[str, Any]) -> Any:
        if not there and params:
            raise Refused(GONE)
        return there

    def create(params: dict[str, Any]) -> bool:
        there.append({"nqn": nqn, "namespaces": [], "hosts": [], "listen_addresses": addresses})
        return True

    answers: dict[str, Answer] = {
        "nvmf_get_subsystems": get,
        "framework_get_config": lambda params: [],
        "nvmf_get_transports": lambda params: [],
        "nvmf_create_transport": lambda params: True,
        "nvmf_create_subsystem": create,
        "nvmf_subsystem_add_listener": lambda params: addresses.append(params["listen_address"]) or True,  # type: ignore[func-returns-value]
    }
    async with scripted(tmp_path / "s", answers) as asked:
        listeners = [Listener("RDMA", "192.0.2.10", 4421)]
        target = SpdkTarget(JsonRpcClient(tmp_path / "s"), node=NODE, port=4420, listeners=listeners)
        await target._subsystems.ensure(target.subsystem_nqn("acme"))
        transports = [params["trtype"] for method, params in asked if method == "nvmf_create_transport"]
        assert transports == ["TCP", "RDMA"]
        assert addresses == [
            {"trtype": "RDMA", "adrfam": "IPv4", "traddr": "192.0.2.10", "trsvcid": "4421"},
            {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4420"},
        ]
        found = [(one.transport, one.address, one.port) for one in await target.endpoints("acme")]
        assert found == [("tcp", "127.0.0.1", 4420), ("rdma", "192.0.2.10", 4421)]
        asked.clear()
        await target._subsystems.ensure(target.subsystem_nqn("acme"))
        assert {method for method, _ in asked} == {"nvmf_get_subsystems", "framework_get_config"}
        await target.close()


async def test_the_node_reaches_its_stores_by_tcp(tmp_path: Path) -> None:
    """Whichever listener is named first."""
    nqn, volume = f"nqn.2026-11.io.forebay:{NODE}:acme", f"{STORE}/vol1"
    listeners = [
        {"trtype": kind, "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port}
        for kind, port in (("RDMA", "4421"), ("TCP", "4420"))
    ]
    answers: dict[str, Answer] = {
        "nvmf_get_subsystems": lambda params: [
            {"nqn": nqn, "namespaces": [{"nsid": 3, "bdev_name": "u"}], "hosts": [], "listen_addresses": listeners}
        ],
        "bdev_get_bdevs": lambda params: [{"name": "u", "aliases": [volume], "driver_specific": {"lvol": {}}}],
    }
    async with scripted(tmp_path / "s", answers):
        drive = StoreDrive("drive0", "nvme", PCI, lvs=STORE)
        target = SpdkTarget(JsonRpcClient(tmp_path / "s"), node=NODE, stores=[drive])
        assert await target._spdk.served_at(volume) == (nqn, 3)
        assert target._spdk.port == 4420
        await target.close()


async def test_another_target_on_the_socket(tmp_path: Path) -> None:
    """Forebay's own answers SPDK's calls, too: it is not taken for SPDK's."""
    answers: dict[str, Answer] = {
        "spdk_get_version": lambda params: {"version": "Forebay 0.1", "fields": {"major": 0, "minor": 1}}
    }
    async with scripted(tmp_path / "s", answers):
        target = SpdkTarget(JsonRpcClient(tmp_path / "s"), node=NODE)
        with pytest.raises(ProtocolError, match="not SPDK's"):
            await target.info()
        await target.close()


def test_the_command_line() -> None:
    quiet = SpdkProgram(Path("/opt/nvmf_tgt")).command(Path("/run/t.sock"), Path("/log"))
    assert quiet == [
        *("/opt/nvmf_tgt", "-r", "/run/t.sock", "-m", "0x1", "-s", "1024"),
        *("-u", "--no-huge", "--interrupt-mode", "--disable-cpumask-locks"),
    ]
    fast = SpdkProgram(Path("nvmf_tgt"), "[2-5]", 8 << 30, interrupt_mode=False, hugepages=True, pci=True)
    assert fast.command(Path("s"), Path("l")) == ["nvmf_tgt", "-r", "s", "-m", "[2-5]", "-s", "8192"]
