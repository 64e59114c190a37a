"""Hosts that belong to no session (`[target] attached_hosts`): they see a tenant's volumes, and never write."""

import os
from pathlib import Path

import pytest

from forebay.client import Client, ClientOptions
from forebay.client.transports.base import ReadOp, Segment, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.errors import ForebayError, TargetRefused, WriteFenced
from forebay.ids import HostIdentity
from tests.client.conftest import NodeProcess, eventually, new_host, now_ms

LONG_MS = 30_000
OPTIONS = ClientOptions(deadline_ms=LONG_MS, connect_ms=LONG_MS, attempt_ms=LONG_MS)


def attach(client: Client, host: HostIdentity) -> NvmeTcpTransport:
    """As the kernel of a machine would."""
    (endpoint,) = client._session.view.reply.endpoints
    return NvmeTcpTransport(SubsystemAddress(endpoint.address, endpoint.port, endpoint.subsystem_nqn), host)


def label_of(transport: NvmeTcpTransport, nsid: int) -> bytes | ForebayError:
    into = bytearray(4096)
    (outcome,) = transport.read([ReadOp(nsid, 0, (Segment(memoryview(into), 4096),))], now_ms() + LONG_MS)
    return outcome.error or bytes(into)


@pytest.mark.fencing
def test_an_attached_host_reads_volumes_of_its_tenant_and_writes_nothing(tmp_path: Path) -> None:
    host = new_host()
    node = NodeProcess(tmp_path / "data", FOREBAY_TARGET_ATTACHED_HOSTS=f"default/{host.nqn},acme/{host.nqn}")
    try:
        for restarted in (False, True):
            if restarted:
                node.kill()
                node.start()
            with node.connect(options=OPTIONS) as client:
                attached = attach(client, host)
                assert isinstance(label_of(attached, 1), bytes)
                assert client.put([b"k"], [os.urandom(4096)], deadline_ms=LONG_MS)[0].present
                op = WriteOp(1, 64 << 20, (Segment(memoryview(bytes(4096)), 4096),))
                (outcome,) = attached.write([op], now_ms() + LONG_MS)
                assert isinstance(outcome.error, WriteFenced)
                stranger = attach(client, new_host())
                with pytest.raises(TargetRefused):
                    stranger.connect(now_ms() + LONG_MS)
                attached.close()
        with node.admin() as admin:
            admin.create_namespace("acme/one")
            admin.create_namespace("acme/two")
        with node.connect(options=OPTIONS, namespace="acme/one") as client:
            attached = attach(client, host)
            assert all(isinstance(label_of(attached, nsid), bytes) for nsid in (1, 2)), "as soon as they are there"
            node.kill_target()
            eventually(lambda: isinstance(label_of(attached, 2), bytes), "the new target knows the host", 30)
            attached.close()
    finally:
        node.stop()
