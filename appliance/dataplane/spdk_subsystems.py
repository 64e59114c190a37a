"""Subsystems as SPDK's target shows and makes them."""

from __future__ import annotations

import socket
from typing import Any

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk_stores import LvolStores
from forebay.appliance.dataplane.subsystems import Subsystems
from forebay.errors import ProtocolError, TargetRefused

__all__ = ["SpdkSubsystems"]

_FREE_PORTS = 5
"""Ports tried, where any will do: somebody else may take one between the look and the use."""


class SpdkSubsystems(Subsystems):
    """Of SPDK's target, which has ``stores`` of logical volumes beside files. Arguments as `Subsystems`."""

    max_namespaces = 1024

    def __init__(self, rpc: JsonRpcClient, node: str, stores: LvolStores, **options: Any) -> None:
        super().__init__(rpc, node, **options)
        self._stores = stores
        self.aliases: dict[str, str] = {}
        """The target's names of bdevs in stores, which are UUIDs, to ours, as they were at the last look."""

    @property
    def private(self) -> str:
        """NQN of the subsystem in which the node alone sees what is not served."""
        return self.nqn("").rstrip(":")

    async def look_at(self, nqn: str | None = None) -> list[dict[str, Any]]:
        found = await super().look_at(nqn)
        # Who sees a namespace stands only in the configuration, as the calls that would make it so.
        config = await self._rpc.call("framework_get_config", {"name": "nvmf"})
        if self._stores.drives:
            self.aliases = await self._stores.aliases()
        seen_by: dict[tuple[str, int], list[str]] = {}
        try:
            for call in config:
                if call["method"] == "nvmf_ns_add_host":
                    values = call["params"]
                    seen_by.setdefault((values["nqn"], values["nsid"]), []).append(values["host"])
            for subsystem in found:
                for one in subsystem.get("namespaces", ()):
                    one["bdev_name"] = self.aliases.get(one["bdev_name"], one["bdev_name"])
                    one["hosts"] = seen_by.get((subsystem["nqn"], one["nsid"]), [])
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"framework_get_config: {error!r} in the answer") from error
        return found

    async def served_at(self, bdev: str) -> tuple[str, int] | None:
        """Subsystem and NSID of a bdev in a store, if it is served."""
        self.aliases = await self._stores.aliases()
        for nqn, subsystem in (await self.mine()).items():
            for one in subsystem["namespaces"]:
                if self.aliases.get(one["bdev_name"], one["bdev_name"]) == bdev:
                    if (endpoint := self.endpoint_of(subsystem)) is not None:
                        self.port = endpoint.port
                    return nqn, int(one["nsid"])
        return None

    async def _listen_tcp(self, nqn: str, port: int) -> None:
        """Listen; SPDK takes no port 0, so that a free one is looked for here."""
        for again in reversed(range(_FREE_PORTS)):
            try:
                await super()._listen_tcp(nqn, port or _free_port(self.address))
                return
            except TargetRefused:
                if port or not again:
                    raise


def _free_port(address: str) -> int:
    """A port that nobody listens on now. Raises `TargetRefused` for an address that this machine has not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise TargetRefused(f"{address}: {error.strerror}", field="target.listen") from error
        return int(probe.getsockname()[1])
