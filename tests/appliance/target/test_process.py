"""The target as a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from tests.appliance.target.conftest import eventually
from tests.appliance.target.host import Association

NQN = "nqn.2026-01.io.forebay:node:process"
COMMAND = [sys.executable, "-m", "forebay.appliance.dataplane.target"]


class Process:
    """A running target."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        program: Sequence[str] = COMMAND,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.socket = directory / "t.sock"
        self.log = directory / "t.log"
        command = [*program, "--socket", str(self.socket), "--log", str(self.log), *options]
        self.process = subprocess.Popen(command, start_new_session=True, env={**os.environ, **(environment or {})})
        eventually(self._answers, "the target answers")

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        # Not by SPDK's client, which leaves its socket open when it cannot connect.
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def client(self) -> Any:
        return JSONRPCClient(str(self.socket))

    def serve(self, directory: Path) -> int:
        path = directory / "v.vol"
        with path.open("ab") as file:
            os.truncate(file.fileno(), 16 << 20)
        with self.client() as client:
            client.bdev_aio_create(name="v", filename=str(path), block_size=4096)
            client.nvmf_create_transport(trtype="TCP")
            client.nvmf_create_subsystem(nqn=NQN, allow_any_host=True)
            client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "v"})
            address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
            client.nvmf_subsystem_add_listener(nqn=NQN, listen_address=address)
            client.forebay_bdev_set_mode(name="v", mode="raw")
            return int(client.nvmf_subsystem_get_listeners(nqn=NQN)[0]["address"]["trsvcid"])


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path, "--max-connections", "8")
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait(60)
    print(made.log.read_text())  # shown if the test failed


def test_sigterm_is_a_clean_end(process: Process, tmp_path: Path) -> None:
    port = process.serve(tmp_path)
    with Association(port, NQN, queues=2) as host:
        assert host.io[0].write(3, b"k" * 4096).status == 0
        with process.client() as client:
            assert client.forebay_get_info()["pid"] == process.process.pid
            assert client.forebay_get_info()["limits"]["max_connections"] == 8
            assert "forebay_verify" in client.rpc_get_methods()
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(60) == 0
        assert host.io[0].gone() is None
    assert not process.socket.exists()
    assert "ending" in process.log.read_text()


def test_after_sigkill_what_was_written_is_there(process: Process, tmp_path: Path) -> None:
    port = process.serve(tmp_path)
    with Association(port, NQN) as host:
        assert host.io[0].write(3, b"k" * 4096).status == 0
        process.process.kill()
        process.process.wait(60)
    again = Process(tmp_path)  # its socket's path is taken by a dead one
    try:
        with Association(again.serve(tmp_path), NQN) as host:
            assert host.io[0].read(3, 1)[1] == b"k" * 4096
    finally:
        again.process.terminate()
        assert again.process.wait(60) == 0


def test_sighup_is_ignored(process: Process) -> None:
    process.process.send_signal(signal.SIGHUP)
    with process.client() as client:
        assert client.spdk_get_version()


def test_a_second_target_on_the_same_socket_refuses(process: Process) -> None:
    second = subprocess.run([*COMMAND, "--socket", str(process.socket)], capture_output=True, timeout=60, check=False)
    assert second.returncode == 1
    assert b"in use" in second.stderr
    assert process.process.poll() is None


def test_bad_limits_are_named(tmp_path: Path) -> None:
    command = [*COMMAND, "--socket", str(tmp_path / "x"), "--chunk-bytes", "100"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"chunk_bytes" in done.stderr
