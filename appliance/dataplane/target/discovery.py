"""The discovery subsystem: which subsystems a host may connect to, and where they listen. Base §3.1.2.3, §5.16.1.23."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final

from forebay.appliance.dataplane.target.subsystems import ListenAddress, Subsystem
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import DYNAMIC_CONTROLLER

__all__ = ["DiscoveryLog"]

_TRTYPE_TCP: Final = 3
_ADRFAM: Final = {"IPv4": 1, "IPv6": 2}
_SUBTYPE_NVM: Final = 2
_TREQ: Final = 0x4
"""Nothing is said of a secure channel; SQ flow control may be given up."""


class DiscoveryLog:
    """Makes Discovery Log Pages of the subsystems that there are. `generation` counts their changes (GENCTR)."""

    def __init__(self, subsystems: Mapping[str, Subsystem]) -> None:
        self._subsystems = subsystems
        self.generation = 0

    def page(self, host_nqn: str, reached_at: str, admin_entries: int) -> bytes:
        """What a host may see that reached this target at an address; `admin_entries` is ASQSZ."""
        entries = [
            spec.DISCOVERY_ENTRY.pack(
                trtype=_TRTYPE_TCP,
                adrfam=_ADRFAM[listener.family],
                subtype=_SUBTYPE_NVM,
                treq=_TREQ,
                cntlid=DYNAMIC_CONTROLLER,
                asqsz=admin_entries,
                trsvcid=str(listener.port).encode().ljust(32),
                subnqn=subsystem.nqn.encode(),
                traddr=address.encode().ljust(256),
            )
            for subsystem in list(self._subsystems.values())
            if subsystem.allows(host_nqn)
            for listener in subsystem.sorted_listeners()
            if (address := _address(listener, reached_at)) is not None
        ]
        return spec.DISCOVERY_HEADER.pack(genctr=self.generation, numrec=len(entries)) + b"".join(entries)


def _address(listener: ListenAddress, reached_at: str) -> str | None:
    """Where a host finds a listener: what it was told to listen at, or for all addresses the one that the host used."""
    if not ip_address(listener.address).is_unspecified:
        return listener.address
    here = ip_address(reached_at)
    return reached_at if f"IPv{here.version}" == listener.family and not here.is_unspecified else None
