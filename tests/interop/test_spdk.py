"""SPDK's target judges our initiator: the shipped transport suite, plain, with digests and authenticated."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.clock import SystemClock
from forebay.errors import TargetRefused
from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhchapHash, DhGroup
from forebay.testing.transport_suite import Area, TransportSuite
from tests.appliance.target.conftest import eventually
from tests.client.conftest import new_host

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(300)]

NQN = "nqn.2026-01.io.forebay:interop:spdk"
SECURE = "nqn.2026-01.io.forebay:interop:spdk-secure"
VOLUME_MIB = 64
HOST = new_host()
SECRETS = HostSecrets(Secret(bytes(range(48)), DhchapHash.SHA384), Secret(bytes(range(32, 64))))


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
        for name, secret in (("host", SECRETS.host), ("controller", SECRETS.controller)):
            assert secret is not None
            file = path.with_name(name)
            file.touch(mode=0o600)
            file.write_text(secret.text())
            client.keyring_file_add_key(name=name, path=str(file))
        client.bdev_malloc_create(name="m", block_size=4096, num_blocks=VOLUME_MIB << 8)
        client.nvmf_create_transport(trtype="TCP")
        client.nvmf_create_subsystem(nqn=NQN, allow_any_host=True)
        client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "m"})
        client.bdev_malloc_create(name="s", block_size=4096, num_blocks=VOLUME_MIB << 8)
        client.nvmf_create_subsystem(nqn=SECURE)
        client.nvmf_subsystem_add_ns(nqn=SECURE, namespace={"bdev_name": "s"})
        client.nvmf_subsystem_add_host(nqn=SECURE, host=HOST.nqn, dhchap_key="host", dhchap_ctrlr_key="controller")
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
        for nqn in (NQN, SECURE):
            client.nvmf_subsystem_add_listener(nqn=nqn, listen_address=address)


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


class TestAuthenticated(TestPlain):
    @pytest.fixture
    def transport(self, port: int) -> Iterator[Transport]:
        transport = secure(port, SECRETS)
        yield transport
        transport.close()


def secure(port: int, secrets: HostSecrets | None, groups: tuple[DhGroup, ...] = (DhGroup.NULL,)) -> NvmeTcpTransport:
    host = HostIdentity(HOST.nqn, HOST.host_id, replace(secrets, groups=groups) if secrets is not None else None)
    return NvmeTcpTransport(SubsystemAddress("127.0.0.1", port, SECURE), host)


@pytest.mark.parametrize("group", DhGroup)
def test_every_group(port: int, group: DhGroup) -> None:
    transport = secure(port, SECRETS, (group,))
    transport.connect(SystemClock().monotonic_ms() + 30_000)
    transport.close()


@pytest.mark.parametrize(
    ("secrets", "why"),
    [
        (None, "this host has no secret"),
        (HostSecrets(Secret(bytes(32)), SECRETS.controller), "does not take this host's secret"),
        (HostSecrets(SECRETS.host, Secret(bytes(32))), "does not prove who it is"),
    ],
    ids=["none", "another", "another of the target"],
)
def test_who_has_no_secret_is_refused(port: int, secrets: HostSecrets | None, why: str) -> None:
    transport = secure(port, secrets)
    with pytest.raises(TargetRefused, match=why):
        transport.connect(SystemClock().monotonic_ms() + 30_000)
    transport.close()
