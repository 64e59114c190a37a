"""A whole node on drives that SPDK's target drives itself, and on a target that somebody else runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client import Client, ClientOptions
from tests.client.conftest import NodeProcess, eventually

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(300)]

PATIENT = ClientOptions(deadline_ms=60_000, connect_ms=60_000, attempt_ms=30_000)
BLOCKS = 24
BLOCK_BYTES = 1 << 20


class StoreNode(NodeProcess):
    """A node with a configuration file of its own."""

    def __init__(self, directory: Path, drive: str, target: str) -> None:
        self.directory = directory
        (directory / "c.toml").write_text(
            f'[target]\nkind = "spdk"\nrpc_timeout = "30s"\n[nvmf_tgt]\n{target}\n[[drives]]\n{drive}\n'
        )
        super().__init__(directory / "data")

    def start(self) -> None:
        env = {**os.environ, "FOREBAY_GRPC_LISTEN": self.grpc, "FOREBAY_TARGET_LISTEN": self.nvme}
        env["FOREBAY_HTTP_LISTEN"] = "127.0.0.1:0"
        command = [*self.program, "serve", "--data", str(self.data), "--config", str(self.directory / "c.toml")]
        described = self.data / "node.json"
        described.unlink(missing_ok=True)
        with (self.directory / "node.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        eventually(lambda: described.exists() or self.process.poll() is not None, "node.json", 120)
        assert described.exists(), (self.directory / "node.log").read_text()
        self.info = json.loads(described.read_text())
        self.url = f"forebay://{self.grpc}"
        self.token = (self.data / "admin.token").read_text().strip()


def values(seed: int) -> dict[bytes, bytes]:
    rng = random.Random(seed)
    return {b"%d/%d" % (seed, n): rng.randbytes(BLOCK_BYTES) for n in range(BLOCKS)}


def binary() -> str:
    return f'binary = "{os.environ["FOREBAY_SPDK_TGT"]}"'


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk.img"
    path.touch()
    os.truncate(path, 512 << 20)
    yield path


def there(node: NodeProcess, wanted: dict[bytes, bytes]) -> bool:
    """Whether all blocks are hits; a hit is always right."""
    with node.connect(options=PATIENT) as client:
        return hits(client, wanted)


def hits(client: Client, wanted: dict[bytes, bytes]) -> bool:
    found = client.get(list(wanted))
    for (key, value), result in zip(wanted.items(), found, strict=True):
        assert not result.hit or bytes(result.value or b"") == value, key
    return all(result.hit for result in found)


def test_a_drive_of_spdks_own(tmp_path: Path, disk: Path) -> None:
    """Stored, target killed, scrubbed, both killed, verified, deleted, another namespace, stopped, started."""
    node = StoreNode(tmp_path, f'bdev = "aio:{disk}"\ncapacity = "320MiB"', binary())
    try:
        first = values(1)
        with node.connect(options=PATIENT) as client:
            assert all(result.stored for result in client.put(list(first), list(first.values())))
            assert hits(client, first)
            node.kill_target()
            eventually(lambda: hits(client, first), "the target is back with all that it had", 60)
        with node.admin() as admin:
            admin.start_scrub()
            eventually(lambda: admin.scrub_status().state == "done", "the scrub's end", 60)
            status = admin.scrub_status()
            assert (status.blocks, status.bad, status.unread) == (BLOCKS, 0, 0)
            (drive,) = admin.status().drives
            assert (drive.state, drive.io) == ("serving", "lvol on aio")
        node.kill()
        node.start()
        assert there(node, first)
        with node.connect(options=PATIENT) as client:
            client.delete(list(first))
        with node.admin() as admin:
            admin.create_namespace("other/kv")
        second = values(2)
        with node.connect(options=PATIENT, namespace="other/kv") as client:
            assert all(result.stored for result in client.put(list(second), list(second.values())))
        node.stop()
        node.start()
        with node.connect(options=PATIENT, namespace="other/kv") as client:
            assert [bytes(r.value or b"") for r in client.get(list(second))] == list(second.values())
        with node.admin() as admin:
            assert admin.delete_namespace("other/kv", force=True).blocks == BLOCKS
            assert [one.name for one in admin.list_namespaces()] == ["default/default"]
    finally:
        node.stop()


def test_a_block_that_rots_in_a_store(tmp_path: Path, disk: Path) -> None:
    """The scrub reads what lies on the drive."""
    node = StoreNode(tmp_path, f'bdev = "aio:{disk}"\ncapacity = "256MiB"', binary())
    try:
        wanted = values(3)
        with node.connect(options=PATIENT) as client:
            assert all(result.stored for result in client.put(list(wanted), list(wanted.values())))
        victim = list(wanted.values())[5]
        data = disk.read_bytes()
        at = data.find(victim[:4096])
        assert at > 0, "the block is on the drive as it is"
        with disk.open("r+b") as file:
            file.seek(at + 100)
            file.write(bytes([victim[100] ^ 1]))
        with node.admin() as admin:
            admin.start_scrub()
            eventually(lambda: admin.scrub_status().state == "done", "the scrub's end", 60)
            assert admin.scrub_status().bad == 1
        with node.connect(options=PATIENT) as client:
            assert [result.hit for result in client.get(list(wanted))].count(False) == 1
    finally:
        node.stop()


def test_memory_goes_with_the_target(tmp_path: Path) -> None:
    """And what was there is a miss; the drive is away, for it is not the one that it was."""
    node = StoreNode(tmp_path, 'bdev = "malloc:m"\ncapacity = "256MiB"', binary())
    try:
        wanted = values(4)
        with node.connect(options=PATIENT) as client:
            assert all(result.stored for result in client.put(list(wanted), list(wanted.values())))
        assert there(node, wanted)
        node.kill_target()
        with node.admin() as admin:
            eventually(lambda: admin.status().drives[0].state == "away", "the drive is away", 60)
            assert "no store" in admin.status().drives[0].reason
        assert not there(node, wanted)
    finally:
        node.stop()


def test_a_target_that_somebody_else_runs(tmp_path: Path) -> None:
    """Two nodes on it, on files; one that stops takes away what is its own, and the target goes on."""
    socket = tmp_path / "s.sock"
    command = [os.environ["FOREBAY_SPDK_TGT"], "-r", str(socket), "-m", "0x1", "-u", "--no-huge", "-s", "1024"]
    with (tmp_path / "spdk.log").open("wb") as log:
        tgt = subprocess.Popen([*command, "--interrupt-mode", "--disable-cpumask-locks"], stdout=log, stderr=log)
    nodes: list[StoreNode] = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            drive = f'path = "{tmp_path / name / "drive"}"\ncapacity = "256MiB"'
            nodes.append(StoreNode(tmp_path / name, drive, f'socket = "{socket}"'))
        wanted = values(5)
        for node in nodes:
            with node.connect(options=PATIENT) as client:
                assert all(result.stored for result in client.put(list(wanted), list(wanted.values())))
        nodes[0].stop()
        with JSONRPCClient(str(socket)) as rpc:
            left = [one["nqn"] for one in rpc.nvmf_get_subsystems() if "namespaces" in one]
            assert len(left) == 1 and len(rpc.bdev_get_bdevs()) == 1
        assert there(nodes[1], wanted)
        nodes[0].start()
        assert there(nodes[0], wanted)
        tgt.send_signal(signal.SIGSTOP)
        logs = [tmp_path / name / "node.log" for name in ("a", "b")]
        eventually(lambda: all("hangs" in log.read_text() for log in logs), "both notice that it hangs", 120)
        tgt.send_signal(signal.SIGCONT)
        for node in nodes:  # and leave it alone, for it is not theirs
            eventually(lambda node=node: there(node, wanted), "it goes on as it was", 120)  # type: ignore[misc]
        assert tgt.poll() is None
        tgt.kill()
        tgt.wait(30)
        nodes[0].process.terminate()
        assert nodes[0].process.wait(60) == 0, "that the target went first is no failure of the node"
    finally:
        tgt.send_signal(signal.SIGCONT)
        for node in nodes:
            node.stop()
        tgt.terminate()
        tgt.wait(30)
