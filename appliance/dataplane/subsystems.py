"""The subsystems of one node at a target, one for each tenant: made, looked at, listening, dropped when empty."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.appliance.dataplane.interface import EndpointInfo
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.errors import NotFound, TargetFailed, TargetRefused

__all__ = ["NQN_PREFIX", "TRANSPORT", "Listener", "Subsystems", "TransportLimits", "hosts_of", "namespace_of"]

NQN_PREFIX = "nqn.2026-11.io.forebay"
MODEL = "Forebay"
TRANSPORT = "TCP"


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Limits of the NVMe/TCP transport, by SPDK's names; None leaves the target's own default."""

    max_io_bytes: int | None = None
    in_capsule_bytes: int | None = None
    queue_depth: int | None = None
    queues_per_controller: int | None = None


@dataclass(frozen=True, slots=True)
class Listener:
    """Where every subsystem listens besides NVMe/TCP; ``transport`` by NVMe's name, such as ``RDMA``."""

    transport: str
    address: str
    port: int


class Subsystems:
    """``nqn.2026-11.io.forebay:<node>:<tenant>``, all on one listener, and on those of ``listeners``.

    With ``port`` 0 the first listener takes a free port, which is kept for every later one, also after a restart of the
    target, as long as nobody else took it meanwhile.
    """

    max_namespaces = 16_384
    """Namespaces of one subsystem; fixed when it is created."""

    def __init__(
        self,
        rpc: JsonRpcClient,
        node: str,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        limits: TransportLimits | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._rpc = rpc
        self._node = node
        self.address = address
        self._fixed_port = port
        self.port = port
        self._limits = limits or TransportLimits()
        self.listeners = tuple(listeners)

    def nqn(self, tenant: str) -> str:
        """The tenant's subsystem."""
        return f"{NQN_PREFIX}:{self._node}:{tenant}"

    def is_mine(self, nqn: str) -> bool:
        """Whether a subsystem is that of a tenant of this node."""
        return nqn.startswith(self.nqn(""))

    # --- looking ------------------------------------------------------------------------------------------------------

    async def look_at(self, nqn: str | None = None) -> list[dict[str, Any]]:
        """What the target shows, of one or of all there are; each namespace with the ``hosts`` that see it."""
        return list(await self._rpc.call("nvmf_get_subsystems", None if nqn is None else {"nqn": nqn}))

    async def one(self, nqn: str) -> dict[str, Any] | None:
        """One subsystem as `look_at` shows it, or None."""
        try:
            found = await self.look_at(nqn)
        except NotFound:
            return None
        return dict(found[0])

    async def mine(self) -> dict[str, dict[str, Any]]:
        """Those of this node's tenants by NQN, without who sees which namespace."""
        found = await self._rpc.call("nvmf_get_subsystems")
        return {one["nqn"]: one for one in found if self.is_mine(one["nqn"])}

    def endpoint_of(self, subsystem: dict[str, Any] | None) -> EndpointInfo | None:
        """Where a subsystem listens for NVMe/TCP; None if it does not where it should."""
        listener = None if subsystem is None else _listener(subsystem, TRANSPORT, self.address)
        if subsystem is None or listener is None:
            return None
        return EndpointInfo(TRANSPORT.lower(), listener["traddr"], int(listener["trsvcid"]), subsystem["nqn"])

    def listens(self, subsystem: dict[str, Any]) -> bool:
        """Whether a subsystem listens everywhere that it should."""
        wanted = [(TRANSPORT, self.address), *((one.transport, one.address) for one in self.listeners)]
        return all(_listener(subsystem, transport, address) is not None for transport, address in wanted)

    # --- making and taking away ---------------------------------------------------------------------------------------

    async def ensure(self, nqn: str) -> dict[str, Any]:
        """Have a subsystem that listens where it should, as `look_at` shows it."""
        found = await self.one(nqn)
        if found is None:
            await self._ensure_transports()
            values = {
                "nqn": nqn,
                "serial_number": self._node[:20],
                "model_number": MODEL,
                "max_namespaces": self.max_namespaces,
            }
            await self._rpc.call("nvmf_create_subsystem", values)
        if found is None or not self.listens(found):
            await self._listen(nqn, found or {})
            found = await self.one(nqn)
        endpoint = self.endpoint_of(found)
        if found is None or endpoint is None:
            raise TargetFailed(f"{nqn} went away while it was made", field="tenant")
        self.port = endpoint.port
        return found

    async def drop_if_empty(self, nqn: str, own_hosts: Collection[str] = ()) -> None:
        """Delete a subsystem in which there is nothing any more, hosts of the driver itself left aside."""
        subsystem = await self.one(nqn)
        if subsystem is not None and not subsystem["namespaces"] and not hosts_of(subsystem).difference(own_hosts):
            await self._rpc.call("nvmf_delete_subsystem", {"nqn": nqn})

    # --- transports and listeners -------------------------------------------------------------------------------------

    async def _ensure_transports(self) -> None:
        known = await self._transports()
        for transport in dict.fromkeys([TRANSPORT, *(one.transport for one in self.listeners)]):
            if transport in known:
                continue
            values = {
                "trtype": transport,
                "max_io_size": self._limits.max_io_bytes,
                "in_capsule_data_size": self._limits.in_capsule_bytes,
                "max_queue_depth": self._limits.queue_depth,
                "max_io_qpairs_per_ctrlr": self._limits.queues_per_controller,
            }
            try:
                await self._rpc.call("nvmf_create_transport", values)
            except TargetRefused as e:
                if transport == TRANSPORT:
                    raise
                lacks = f"the target has no NVMe/{transport}: was it built with it, and is there a device for it?"
                raise TargetRefused(f"{lacks} ({e.message})", field="nvmf_tgt.rdma_listen") from e
            except TargetFailed:  # another node on the same target was faster
                if transport not in await self._transports():
                    raise

    async def _transports(self) -> set[str]:
        return {one["trtype"] for one in await self._rpc.call("nvmf_get_transports")}

    async def _listen(self, nqn: str, subsystem: dict[str, Any]) -> None:
        for one in self.listeners:
            if _listener(subsystem, one.transport, one.address) is None:
                await self._add_listener(nqn, one.transport, one.address, one.port)
        if _listener(subsystem, TRANSPORT, self.address) is not None:
            return
        if not self.port:
            # A target that ran before us has the port already, under another tenant.
            for other in (await self.mine()).values():
                if (endpoint := self.endpoint_of(other)) is not None:
                    self.port = endpoint.port
        try:
            await self._listen_tcp(nqn, self.port)
        except TargetRefused as error:
            if self._fixed_port or not self.port:
                raise TargetRefused(
                    f"the target cannot listen on {self.address} port {self.port}: another process has the port, or "
                    "this machine has not the address",
                    field="target.listen",
                ) from error
            await self._listen_tcp(nqn, 0)  # ours was taken meanwhile: hosts learn the new one from the daemon

    async def _listen_tcp(self, nqn: str, port: int) -> None:
        await self._add_listener(nqn, TRANSPORT, self.address, port)

    async def _add_listener(self, nqn: str, transport: str, host: str, port: int) -> None:
        family = "IPv6" if ":" in host else "IPv4"
        address = {"trtype": transport, "adrfam": family, "traddr": host, "trsvcid": str(port)}
        await self._rpc.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address})


def namespace_of(subsystem: dict[str, Any], nsid: int) -> dict[str, Any] | None:
    """The namespace of that NSID, if there is one."""
    return next((one for one in subsystem["namespaces"] if one["nsid"] == nsid), None)


def hosts_of(thing: dict[str, Any]) -> set[str]:
    """Host NQNs of a subsystem, or of a namespace that is not visible to all."""
    return {one["nqn"] if isinstance(one, dict) else one for one in thing.get("hosts", ())}


def _listener(subsystem: dict[str, Any], transport: str, address: str) -> dict[str, Any] | None:
    for one in subsystem.get("listen_addresses", ()):
        if one["trtype"] == transport and one["traddr"] == address:
            return dict(one)
    return None
