"""The kinds of transport there are: what each needs of a node and of this machine, and how it is made (ADR 15)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.client.options import ClientOptions
from forebay.client.transports.base import Transport
from forebay.client.transports.block_device import BlockDeviceTransport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_rdma import NvmeRdmaTransport, usable
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.clock import Clock
from forebay.ids import HostIdentity

__all__ = ["KINDS", "Kind", "Offer", "TransportFactory", "nvme_rdma", "nvme_tcp", "tcp_kind"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a node says that a subsystem is to be had, by the protocol's words for transports, and as which host."""

    subsystem_nqn: str
    addresses: tuple[tuple[str, SubsystemAddress], ...]
    host: HostIdentity

    def address(self, transport: str) -> SubsystemAddress | None:
        """The first address of a transport."""
        return next((address for name, address in self.addresses if name == transport), None)


TransportFactory = Callable[[SubsystemAddress, HostIdentity, Mapping[int, str], ClientOptions, Clock], Transport]
Maker = Callable[[Offer, Mapping[int, str], ClientOptions, Clock], Transport]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of transport. ``lacking`` says why an offer cannot be taken up by it here, None if it can.

    ``by_target``: the target sees each command, and can refuse it.
    """

    name: str
    lacking: Callable[[Offer], str | None]
    make: Maker
    by_target: bool = True


def nvme_tcp(
    subsystem: SubsystemAddress, host: HostIdentity, nguids: Mapping[int, str], options: ClientOptions, clock: Clock
) -> Transport:
    """The user-space initiator."""
    return NvmeTcpTransport(subsystem, host, nguids=nguids, options=options.nvme_tcp, clock=clock)


def nvme_rdma(
    subsystem: SubsystemAddress, host: HostIdentity, nguids: Mapping[int, str], options: ClientOptions, clock: Clock
) -> Transport:
    """The user-space initiator over RDMA."""
    return NvmeRdmaTransport(subsystem, host, nguids=nguids, options=options.nvme_rdma, clock=clock)


def _rdma_lacks(offer: Offer) -> str | None:
    return _offered("rdma")(offer) or usable()


def _by_factory(factory: TransportFactory, transport: str) -> Maker:
    def make(offer: Offer, nguids: Mapping[int, str], options: ClientOptions, clock: Clock) -> Transport:
        address = offer.address(transport)
        assert address is not None, "the kind was lacking"
        return factory(address, offer.host, nguids, options, clock)

    return make


def _offered(transport: str) -> Callable[[Offer], str | None]:
    def lacking(offer: Offer) -> str | None:
        return None if offer.address(transport) is not None else f"the node offers no NVMe/{transport.upper()}"

    return lacking


def _block(offer: Offer, nguids: Mapping[int, str], options: ClientOptions, clock: Clock) -> Transport:
    local = any(_is_here(address.address) for _, address in offer.addresses)
    return BlockDeviceTransport.of_machine(
        offer.subsystem_nqn, nguids=nguids, local=local, options=options.block, clock=clock
    )


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
        return True
    except OSError:
        return False


def tcp_kind(factory: TransportFactory = nvme_tcp) -> Kind:
    """NVMe/TCP as ``factory`` makes it."""
    return Kind("tcp", _offered("tcp"), _by_factory(factory, "tcp"))


KINDS: tuple[Kind, ...] = (
    Kind("block", lambda _offer: None, _block, by_target=False),
    Kind("rdma", _rdma_lacks, _by_factory(nvme_rdma, "rdma")),
    tcp_kind(),
)
"""All kinds, the preferred ones first. The last one's own breaker says when it is down."""
