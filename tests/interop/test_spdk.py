"""SPDK's target judges our initiator: the shipped transport suite, plain and with digests."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.testing.transport_suite import Area, TransportSuite
from tests.appliance.target.conftest import eventually
from tests.client.conftest import new_host

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(300)]

NQN = "nqn.2026-01.io.forebay:interop:spdk"
VOLUME_MIB = 64


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where SPDK's target serves a volume in memory."""
    directory = tmp_path_factory.mktemp("spdk")
    path = directory / "spdk.sock"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [os.environ["FOREBAY_SPDK_TGT"], "-m", "0x1", "-r", str(path), "-u", "--no-huge", "-s", "1024"]
    with (directory / "spdk.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            eventually(lambda: _answers(path, process, directory / "spdk.log"), "SPDK's target answers", 30)
            _set_up(path, port)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def _answers(path: Path, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _set_up(path: Path, port: int) -> None:
    with JSONRPCClient(str(path)) as client:
        client.bdev_malloc_create(name="m", block_size=4096, num_blocks=VOLUME_MIB << 8)
        client.nvmf_create_transport(trtype="TCP")
        client.nvmf_create_subsystem(nqn=NQN, allow_any_host=True)
        client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "m"})
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
        client.nvmf_subsystem_add_listener(nqn=NQN, listen_address=address)


class TestPlain(TransportSuite):
    options = NvmeTcpOptions()

    @pytest.fixture
    def transport(self, port: int) -> Iterator[Transport]:
        address = SubsystemAddress("127.0.0.1", port, NQN)
        transport = NvmeTcpTransport(address, new_host(), options=self.options)
        yield transport
        transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, 0, 32 << 20, VOLUME_MIB << 20)


class TestDigests(TestPlain):
    options = NvmeTcpOptions(header_digest=True, data_digest=True)
