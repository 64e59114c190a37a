"""The shipped conformance suite, against the embedded target and against the scripted peer."""

from collections.abc import Iterator

import pytest

from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.testing.faults import FaultRates, Faulty
from forebay.testing.transport_suite import Area, TransportSuite
from tests.client.conftest import VOLUME_BYTES, TargetProcess, new_host
from tests.client.peer import NQN, Peer


class TestEmbeddedTarget(TransportSuite):
    @pytest.fixture
    def transport(self, shared_target: TargetProcess) -> Iterator[Transport]:
        transport = shared_target.transport()
        yield transport
        transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, 1 << 20, 32 << 20, VOLUME_BYTES)


class TestOneConnection(TestEmbeddedTarget):
    """All threads share one queue, and each command is small."""

    @pytest.fixture
    def transport(self, shared_target: TargetProcess) -> Iterator[Transport]:
        transport = shared_target.transport(NvmeTcpOptions(connections=1, max_command_bytes=64 << 10))
        yield transport
        transport.close()


class TestFaultyWithoutFaults(TestEmbeddedTarget):
    @pytest.fixture
    def transport(self, shared_target: TargetProcess) -> Iterator[Transport]:
        transport = Faulty(shared_target.transport(), 7, FaultRates())
        yield transport
        transport.close()


class TestPeer(TransportSuite):
    """A target with small limits: MDTS 64 KiB, no in-capsule data, several R2Ts a write, several PDUs an R2T."""

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        with Peer(32 << 20) as peer:
            peer.mdts = 4
            peer.in_capsule_bytes = 0
            peer.r2t_bytes = 24 << 10
            peer.max_h2c_data_bytes = 8 << 10
            transport = NvmeTcpTransport(SubsystemAddress("127.0.0.1", peer.port, NQN), new_host())
            yield transport
            transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, 0, 16 << 20, 32 << 20)
