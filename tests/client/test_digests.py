"""The initiator with header and data digests (NVMe/TCP Transport Spec 1.1 §3.3.1.1)."""

from collections.abc import Iterator
from typing import Any

import pytest

from forebay.client.transports.base import Transport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.errors import ProtocolError, TargetRefused, Unavailable
from forebay.nvmetcp.command import Command
from forebay.testing.transport_suite import Area, TransportSuite
from tests.client.conftest import VOLUME_BYTES, TargetProcess
from tests.client.peer import Link, Peer, truth
from tests.client.test_lying_peers import SIZE, read, transport_to, works, write

BOTH: dict[str, Any] = {"header_digest": True, "data_digest": True}


class TestEmbeddedTarget(TransportSuite):
    """The shipped suite: nothing is different with digests."""

    @pytest.fixture
    def transport(self, shared_target: TargetProcess) -> Iterator[Transport]:
        transport = shared_target.transport(NvmeTcpOptions(**BOTH))
        yield transport
        transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, 1 << 20, 32 << 20, VOLUME_BYTES)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(2 * SIZE) as peer:
        peer.volume[:] = bytes(i * 11 & 0xFF for i in range(251)) * (2 * SIZE // 251) + bytes(2 * SIZE % 251)
        yield peer


def damaged(link: Link, command: Command, at: int) -> None:
    data = bytearray(link.peer.volume[:SIZE])
    header = link.codec.send_c2h_data(command.cid, SIZE, success=True)
    digest = link.codec.data_digest_of(data)
    data[at] ^= 1
    link.send(header, data, *digest)


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_damaged_data_is_an_error_of_its_command(peer: Peer, at: int) -> None:
    transport = transport_to(peer, **BOTH)
    into = bytearray(SIZE)
    assert read(transport, into).error is None
    peer.lie = lambda link, command: damaged(link, command, at)
    outcome = read(transport, into)
    assert isinstance(outcome.error, Unavailable)
    assert "transient transport error" in str(outcome.error)
    assert outcome.quiesced
    peer.lie = truth
    assert read(transport, into).error is None
    assert transport.state().reconnects == 0
    transport.close()


def test_damage_before_a_response_is_not_forgotten(peer: Peer) -> None:
    def lie(link: Link, command: Command) -> None:
        data = bytes(link.peer.volume[:SIZE])
        header = link.codec.send_c2h_data(command.cid, SIZE)
        link.send(header, data[:-1] + b"\xee", *link.codec.data_digest_of(data))
        link.respond(command.cid)

    transport = transport_to(peer, **BOTH)
    peer.lie = lie
    assert isinstance(read(transport, bytearray(SIZE)).error, Unavailable)
    works(peer, transport)
    transport.close()


def test_a_damaged_header_ends_the_connection(peer: Peer) -> None:
    def lie(link: Link, command: Command) -> None:
        header = bytearray(link.codec.send_c2h_data(command.cid, SIZE, success=True))
        header[25] ^= 1
        link.send(header)

    transport = transport_to(peer, **BOTH)
    peer.lie = lie
    outcome = read(transport, bytearray(SIZE))
    assert isinstance(outcome.error, ProtocolError)
    assert not outcome.quiesced
    works(peer, transport)
    transport.close()


@pytest.mark.parametrize("digests", [{"header_digest": True}, {"data_digest": True}, BOTH])
def test_writes_and_reads(peer: Peer, digests: dict[str, Any]) -> None:
    transport = transport_to(peer, **digests)
    data = bytes(i * 7 & 0xFF for i in range(SIZE))
    assert write(transport, data).error is None
    assert write(transport, data[:4096]).error is None
    assert peer.volume[:SIZE] == data
    into = bytearray(SIZE)
    assert read(transport, into).error is None
    assert into == data
    transport.close()


def test_a_target_without_digests_is_refused(peer: Peer) -> None:
    peer.digests = False
    transport = transport_to(peer, **BOTH)
    assert isinstance(read(transport, bytearray(SIZE)).error, TargetRefused)
    transport.close()
    plain = transport_to(peer)
    assert read(plain, bytearray(SIZE)).error is None
    plain.close()
