"""What is served: subsystems, their namespaces, hosts and listen addresses. Plain state; `server` guards changes.

Queues read it without a lock: every field that they read is replaced or changed in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from forebay.appliance.dataplane.target.keyring import HostKeys
from forebay.appliance.dataplane.target.volume import Volume

__all__ = ["MAX_CNTLID", "ListenAddress", "Namespace", "Subsystem"]

MAX_CNTLID: Final = 0xFFEF
"""CNTLID FFF0h to FFFFh are reserved. Base §6.3."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a subsystem can be reached over TCP."""

    family: str
    """`IPv4` or `IPv6`."""
    address: str
    port: int

    def to_dict(self) -> dict[str, str]:
        """As SPDK shows a transport id."""
        return {"trtype": "TCP", "adrfam": self.family, "traddr": self.address, "trsvcid": str(self.port)}


class Namespace:
    """A volume under an NSID of one subsystem."""

    def __init__(self, nsid: int, volume: Volume, *, nguid: bytes, uuid: UUID | None, auto_visible: bool) -> None:
        self.nsid = nsid
        self.volume = volume
        self.nguid = nguid
        self.uuid = uuid
        self.auto_visible = auto_visible
        self.hosts: set[str] = set()
        """Host NQNs that see it, if not all do."""
        self.live = True
        """Cleared before it is taken away; see `Server.remove_namespace`."""

    def visible_to(self, host_nqn: str) -> bool:
        """Whether this host's controllers have the namespace."""
        return self.live and (self.auto_visible or host_nqn in self.hosts)


class Subsystem:
    """One NVM subsystem, or the discovery subsystem."""

    def __init__(
        self,
        nqn: str,
        *,
        serial: str,
        model: str,
        max_namespaces: int,
        allow_any_host: bool,
        cntlids: tuple[int, int] = (1, MAX_CNTLID),
        discovery: bool = False,
    ) -> None:
        self.nqn = nqn
        self.serial = serial
        self.model = model
        self.max_namespaces = max_namespaces
        self.allow_any_host = allow_any_host
        self.cntlids = cntlids
        """First and last controller id."""
        self.discovery = discovery
        """This is the discovery subsystem: it has no namespaces, and is reached wherever any other one is."""
        self.hosts: dict[str, HostKeys | None] = {}
        """Host NQNs that may connect, each with the keys by which it has to prove that it is that host."""
        self.namespaces: dict[int, Namespace] = {}
        self.listeners: set[ListenAddress] = set()

    def allows(self, host_nqn: str) -> bool:
        """Whether the host may connect."""
        return self.allow_any_host or host_nqn in self.hosts

    def sorted_listeners(self) -> list[ListenAddress]:
        """Where it listens, in an order that stays."""
        return sorted(self.listeners, key=lambda one: (one.family, one.address, one.port))

    def namespace(self, nsid: int, host_nqn: str) -> Namespace | None:
        """The namespace of that id, if this host sees it."""
        found = self.namespaces.get(nsid)
        return found if found is not None and found.visible_to(host_nqn) else None

    def visible(self, host_nqn: str) -> list[Namespace]:
        """All namespaces that this host sees, by NSID."""
        return sorted(
            (one for one in list(self.namespaces.values()) if one.visible_to(host_nqn)), key=lambda one: one.nsid
        )
