"""What the drivers of both targets have in common: subsystems, the hosts that they let in, and who sees which volume.

Every call first asks what the target has and adds or takes away the difference, so that replaying desired state is the
same code whether the target knows all of it, part of it or (after its restart) nothing.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.appliance.dataplane.interface import EndpointInfo, HostView, Target, VolumeSpec
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.errors import AlreadyExists, ForebayError, NotFound, TargetFailed, TargetRefused, Unavailable
from forebay.ids import HostIdentity, VolumeId
from forebay.nvmetcp.secret import HostSecrets, Secret

__all__ = ["NQN_PREFIX", "TRANSPORT", "Bdev", "Listener", "NvmfTarget", "TransportLimits", "hosts_of"]

NQN_PREFIX = "nqn.2026-11.io.forebay"
MODEL = "Forebay"
TRANSPORT = "TCP"
_REPLAY_MS = 100
"""When to ask again for what a target that was started anew does not know yet."""


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


@dataclass(frozen=True, slots=True)
class Bdev:
    """What a target has open for a volume: ``path`` as in the volume's spec, ``mode`` as the driver wants it."""

    path: str
    mode: str = ""
    stays: bool = False
    """It is there whether it is served or not."""


@dataclass(slots=True)
class _Look:
    """A subsystem as the target showed it, and as it was changed from here since."""

    endpoint: EndpointInfo
    hosts: set[str]
    seen_by: dict[int, set[str]]
    """NSID to the hosts that see it."""


class NvmfTarget(Target):
    """A target behind a control socket that speaks SPDK's RPC.

    One subsystem per tenant, ``nqn.2026-11.io.forebay:<node>:<tenant>``, all on one listener. With ``port`` 0 the first
    listener takes a free port, which is kept for every later one, also after a restart of the target, as long as
    nobody else took it meanwhile.
    """

    max_namespaces = 16_384
    """Namespaces of one tenant's subsystem; fixed when it is created."""

    def __init__(
        self,
        rpc: JsonRpcClient,
        *,
        node: str,
        address: str = "127.0.0.1",
        port: int = 0,
        limits: TransportLimits | None = None,
        listeners: Sequence[Listener] = (),
        keys: HostKeyFiles | None = None,
    ) -> None:
        self._keys = keys
        self._provers: dict[str, HostIdentity] = {}  # hosts that have to prove who they are, by NQN
        self._rpc = rpc
        self._node = node
        self._address = address
        self._fixed_port = port
        self._port = port
        self._limits = limits or TransportLimits()
        self._listeners = tuple(listeners)
        self._volumes: dict[VolumeId, VolumeSpec] = {}
        self._own_hosts: frozenset[str] = frozenset()  # hosts that are of the driver itself
        self._looks: dict[str, _Look] = {}
        self._shape = asyncio.Lock()  # one change of subsystems at a time: each is a look followed by an act

    # --- what differs between targets ---------------------------------------------------------------------------------

    @abstractmethod
    async def _bdevs(self) -> dict[str, Bdev]:
        """All that the target has open for this node's volumes, by name."""

    @abstractmethod
    async def _add_bdev(self, spec: VolumeSpec) -> None:
        """Open a volume, or find that it is open. Raises `VolumeMismatch` if another is under its name."""

    @abstractmethod
    async def _delete_bdev(self, name: str) -> None:
        """Close a volume; one that is not open is no error."""

    @abstractmethod
    async def _end_host(self, nqn: str, name: str) -> None:
        """Tear down a host's controllers in a subsystem to which it may not connect: none of its commands runs after.

        The only one: a host is of one tenant.
        """

    def _bdev_name(self, spec: VolumeSpec) -> str:
        return spec.bdev

    def _mode(self, spec: VolumeSpec) -> str:
        return ""

    def _holds(self, spec: VolumeSpec) -> bool:
        """Whether the driver itself has what it needs of a volume that the target serves."""
        return True

    async def _look_at(self, params: dict[str, Any] | None) -> list[dict[str, Any]]:
        """`nvmf_get_subsystems`; each namespace with the ``hosts`` that see it."""
        return list(await self._rpc.call("nvmf_get_subsystems", params))

    # --- volumes ------------------------------------------------------------------------------------------------------

    def subsystem_nqn(self, tenant: str) -> str:
        """The tenant's subsystem."""
        return f"{NQN_PREFIX}:{self._node}:{tenant}"

    async def add_volume(self, spec: VolumeSpec) -> None:
        async with self._shape:
            await self._add_volume(spec)

    async def _add_volume(self, spec: VolumeSpec) -> None:
        nqn, bdev = self.subsystem_nqn(spec.tenant), self._bdev_name(spec)
        await self._add_bdev(spec)
        subsystem = await self._ensure_subsystem(spec.tenant)
        namespace = _namespace(subsystem, spec.nsid)
        if namespace is None:
            wanted = {
                "bdev_name": bdev,
                "nsid": spec.nsid,
                "nguid": UUID(spec.nguid).hex.upper(),  # SPDK takes and shows 32 hex digits
                "uuid": str(UUID(spec.nguid)),
                "no_auto_visible": True,
            }
            await self._rpc.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": wanted})
        elif namespace["bdev_name"] != bdev:
            raise AlreadyExists(f"NSID {spec.nsid} of {nqn} is {namespace['bdev_name']}, not {bdev}", field="nsid")
        self._volumes[spec.volume] = spec
        self._looks.pop(nqn, None)

    async def remove_volume(self, spec: VolumeSpec) -> None:
        nqn = self.subsystem_nqn(spec.tenant)
        async with self._shape:
            subsystem = await self._subsystem(nqn)
            if subsystem is not None and _namespace(subsystem, spec.nsid) is not None:
                await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": spec.nsid})
            await self._delete_bdev(self._bdev_name(spec))
            self._volumes.pop(spec.volume, None)
            self._looks.pop(nqn, None)
            await self._drop_if_empty(nqn)

    async def endpoint(self, tenant: str) -> EndpointInfo:
        nqn = self.subsystem_nqn(tenant)
        if (known := self._looks.get(nqn)) is not None:
            return known.endpoint
        subsystem = await self._subsystem(nqn)
        listener = _listener(subsystem, TRANSPORT, self._address) if subsystem is not None else None
        if listener is None:
            mine = [spec for spec in self._volumes.values() if spec.tenant == tenant]
            raise self._missing(NotFound(f"the target has no subsystem for tenant {tenant}", field="tenant"), mine)
        return EndpointInfo(TRANSPORT.lower(), listener["traddr"], int(listener["trsvcid"]), nqn)

    async def endpoints(self, tenant: str) -> list[EndpointInfo]:
        first = await self.endpoint(tenant)
        nqn = first.subsystem_nqn
        return [first, *(EndpointInfo(o.transport.lower(), o.address, o.port, nqn) for o in self._listeners)]

    def _missing(self, error: NotFound, volumes: Sequence[VolumeSpec]) -> ForebayError:
        """What it means that volumes are not found: the target had those that it was given, and was started anew since.

        Then they are back as soon as the supervisor has replayed the state, and whoever asks again gets them.
        """
        if volumes and all(self._volumes.get(spec.volume) == spec for spec in volumes):
            text = f"the target was started anew and does not serve all of its volumes yet: {error.message}"
            return Unavailable(text, field="target", retry_after_ms=_REPLAY_MS)
        return error

    # --- hosts --------------------------------------------------------------------------------------------------------

    async def add_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        async with self._shape:
            known = host.nqn in self._provers
            try:
                await self._add_host(tenant, host, volumes)
            except BaseException:
                if not known and self._provers.pop(host.nqn, None) is not None and self._keys is not None:
                    self._keys.forget(host.nqn)  # nobody was told; what the target has goes with the next `reconcile`
                raise

    async def _add_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        nqn = self.subsystem_nqn(tenant)
        visible = {spec.nsid for spec in volumes}
        if host.secrets is not None:
            self._provers[host.nqn] = host

        async def admit() -> None:
            look = self._looks.get(nqn) or self._seen(nqn, await self._ensure_subsystem(tenant))
            if host.nqn not in look.hosts:
                await self._allow(nqn, host.nqn)
                look.hosts.add(host.nqn)
            for nsid, seen_by in look.seen_by.items():
                values = {"nqn": nqn, "nsid": nsid, "host": host.nqn}
                if nsid in visible and host.nqn not in seen_by:
                    await self._rpc.call("nvmf_ns_add_host", values)
                    seen_by.add(host.nqn)
                elif nsid not in visible and host.nqn in seen_by:
                    await self._rpc.call("nvmf_ns_remove_host", values)
                    seen_by.discard(host.nqn)
            if missing := visible - look.seen_by.keys():
                error = NotFound(f"{nqn} has no NSID {min(missing)}: add its volume first", field="volumes")
                raise self._missing(error, volumes)

        await self._by_look(nqn, admit)

    async def remove_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        nqn = self.subsystem_nqn(tenant)

        async def expel() -> None:
            look = self._looks.get(nqn)
            if look is None and (subsystem := await self._subsystem(nqn)) is not None:
                look = self._seen(nqn, subsystem)
            # First the right to come back, then the connections: in the other order it could return in between.
            if look is not None:
                if host.nqn in look.hosts:
                    await self._rpc.call("nvmf_subsystem_remove_host", {"nqn": nqn, "host": host.nqn})
                    look.hosts.discard(host.nqn)
                for nsid, seen_by in look.seen_by.items():
                    if host.nqn in seen_by:
                        await self._rpc.call("nvmf_ns_remove_host", {"nqn": nqn, "nsid": nsid, "host": host.nqn})
                        seen_by.discard(host.nqn)
            await self._end_host(nqn, host.nqn)
            if look is None or not (look.hosts or look.seen_by):
                self._looks.pop(nqn, None)
                await self._drop_if_empty(nqn)

        async with self._shape:
            await self._by_look(nqn, expel)
            await self._forget_keys(host.nqn)

    async def _allow(self, nqn: str, name: str, *, stranger: bool = False) -> None:
        """Let a host connect to a subsystem: one with secrets by these alone, a ``stranger`` by none there is."""
        values = {"nqn": nqn, "host": name}
        host = self._provers.get(name)
        if host is None and stranger and self._keys is not None:
            host = HostIdentity(name, "", HostSecrets(Secret.generate()))
        if host is not None:
            if self._keys is None:
                raise TargetRefused(f"host {name} has secrets, which this driver does not pass on", field="host")
            try:
                written = await asyncio.to_thread(self._keys.write, host)
            except OSError as error:
                raise Unavailable(f"the secrets of a host cannot be written: {error.strerror}", field="host") from error
            for parameter, (key, path) in written.items():
                with suppress(AlreadyExists):
                    await self._rpc.call("keyring_file_add_key", {"name": key, "path": str(path)})
                values[parameter] = key
        await self._rpc.call("nvmf_subsystem_add_host", values)

    async def _forget_keys(self, name: str) -> None:
        """A host has no right to connect any more: nobody needs its secrets."""
        self._provers.pop(name, None)
        if self._keys is None:
            return
        await asyncio.to_thread(self._keys.forget, name)
        for key in self._keys.names(name):
            with suppress(NotFound):
                await self._rpc.call("keyring_file_remove_key", {"name": key})

    async def _forget_strangers(self, hosts: Sequence[HostView]) -> None:
        """Remove the keys that an earlier daemon gave the target for hosts that are no more."""
        if self._keys is None:
            return
        names = {view.host.nqn for view in hosts} | self._own_hosts
        wanted = {key for name in names for key in self._keys.names(name)}
        for one in await self._rpc.call("keyring_get_keys"):
            if str(one["name"]).startswith(self._keys.prefix) and one["name"] not in wanted:
                with suppress(NotFound):
                    await self._rpc.call("keyring_file_remove_key", {"name": one["name"]})

    async def _by_look(self, nqn: str, act: Callable[[], Awaitable[None]]) -> None:
        """Act by what is known of a subsystem, and once more by a fresh look if that fails: it may be another target's.

        Nobody else changes subsystems, and a look costs by the number of hosts: with one for each host that comes and
        each heartbeat, thousands of sessions would do nothing else.
        """
        if nqn in self._looks:
            try:
                await act()
                return
            except Unavailable:  # whether it was done, nobody knows
                self._looks.pop(nqn, None)
                raise
            except ForebayError:
                self._looks.pop(nqn, None)
        try:
            await act()
        except ForebayError:
            self._looks.pop(nqn, None)
            raise

    def _seen(self, nqn: str, subsystem: dict[str, Any]) -> _Look:
        """Keep what the target showed; not if it does not listen where it should."""
        look = _Look(EndpointInfo("", "", 0, nqn), hosts_of(subsystem), {})
        look.seen_by = {one["nsid"]: hosts_of(one) for one in subsystem["namespaces"]}
        listener = _listener(subsystem, TRANSPORT, self._address)
        if listener is not None:
            look.endpoint = EndpointInfo(TRANSPORT.lower(), listener["traddr"], int(listener["trsvcid"]), nqn)
            self._looks[nqn] = look
        return look

    # --- all of it ----------------------------------------------------------------------------------------------------

    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        """See `Target.reconcile`. A volume that cannot be served keeps no other from being: its error comes last."""
        # One look at everything, then calls for the differences alone: thousands of hosts cost what few do.
        wanted = {(self.subsystem_nqn(spec.tenant), spec.nsid): spec for spec in volumes}
        views = {(self.subsystem_nqn(view.tenant), view.host.nqn): view for view in hosts}
        async with self._shape:
            self._looks.clear()
            reported = [one for one in await self._look_at(None) if "namespaces" in one]
            mine = f"{NQN_PREFIX}:{self._node}:"
            subsystems = {one["nqn"]: one for one in reported if one["nqn"].startswith(mine)}
            bdevs = await self._bdevs()
            for nqn, subsystem in subsystems.items():
                for one in subsystem["namespaces"]:
                    spec, there = wanted.get((nqn, one["nsid"])), bdevs.get(one["bdev_name"])
                    one["wanted"] = (
                        spec is not None
                        and there is not None
                        and (one["bdev_name"], there.path) == (self._bdev_name(spec), spec.path)
                    )
            found = await self._take_away(subsystems, views)
            await self._forget_strangers(hosts)
            kept = {one["bdev_name"] for each in subsystems.values() for one in each["namespaces"] if one["wanted"]}
            others = {
                one["bdev_name"] for each in reported if each["nqn"] not in subsystems for one in each["namespaces"]
            }
            for name in sorted(name for name in bdevs.keys() - kept - others if not bdevs[name].stays):
                found.append(f"{bdevs[name].path} is open and is not served")
                await self._delete_bdev(name)
            failed: dict[VolumeId, ForebayError] = {}
            for (nqn, _nsid), spec in wanted.items():
                self._volumes[spec.volume] = spec
                listens = self._listens(subsystems.get(nqn, {}))
                name = self._bdev_name(spec)
                served = name in kept and listens and bdevs[name].mode == self._mode(spec)
                if not served or not self._holds(spec):
                    found.append(f"volume {spec.volume} is not served as it should be")
                    try:
                        await self._add_volume(spec)
                    except Unavailable:
                        raise
                    except ForebayError as error:
                        failed[spec.volume] = error
            await self._admit(subsystems, views, failed.keys(), found)
        if failed:
            raise next(iter(failed.values()))
        return found

    async def _admit(
        self,
        subsystems: dict[str, dict[str, Any]],
        views: dict[tuple[str, str], HostView],
        failed: Collection[VolumeId],
        found: list[str],
    ) -> None:
        """Hosts that do not see what they should, of the volumes that are served."""
        allowed = {(nqn, name) for nqn, subsystem in subsystems.items() for name in hosts_of(subsystem)}
        sees: dict[tuple[str, str], set[int]] = {}
        for nqn, subsystem in subsystems.items():
            for one in subsystem["namespaces"]:
                for name in hosts_of(one) if one["wanted"] else ():
                    sees.setdefault((nqn, name), set()).add(one["nsid"])
        for key, view in views.items():
            served = tuple(spec for spec in view.volumes if spec.volume not in failed)
            if key not in allowed or sees.get(key, set()) != {spec.nsid for spec in served}:
                found.append(f"host {view.host.nqn} does not see what it should")
                await self._add_host(view.tenant, view.host, served)

    async def _take_away(
        self, subsystems: dict[str, dict[str, Any]], views: dict[tuple[str, str], HostView]
    ) -> list[str]:
        """Hosts without a view, then namespaces that are not ``wanted``; says which there were."""
        found: list[str] = []
        for nqn, subsystem in subsystems.items():
            names = hosts_of(subsystem).union(*(hosts_of(one) for one in subsystem["namespaces"]))
            for name in sorted(name for name in names - self._own_hosts if (nqn, name) not in views):
                found.append(f"host {name} is not of a live session")
                await self._remove_host(nqn, subsystem, name)
                await self._end_host(nqn, name)
                await self._forget_keys(name)
            for one in subsystem["namespaces"]:
                if not one["wanted"]:
                    found.append(f"NSID {one['nsid']} of {nqn} is not a volume of this node")
                    await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": one["nsid"]})
            await self._drop_if_empty(nqn)
        return found

    async def _remove_host(self, nqn: str, subsystem: dict[str, Any], name: str) -> None:
        """Take a host's right to connect and its sight of namespaces away, as far as it has them."""
        if name in hosts_of(subsystem):
            await self._rpc.call("nvmf_subsystem_remove_host", {"nqn": nqn, "host": name})
        for namespace in subsystem["namespaces"]:
            if name in hosts_of(namespace):
                values = {"nqn": nqn, "nsid": namespace["nsid"], "host": name}
                await self._rpc.call("nvmf_ns_remove_host", values)

    async def close(self) -> None:
        await self._rpc.close()

    # --- subsystems and where they listen -----------------------------------------------------------------------------

    async def _subsystem(self, nqn: str) -> dict[str, Any] | None:
        """One subsystem as `_look_at` shows it, or None."""
        try:
            found = await self._look_at({"nqn": nqn})
        except NotFound:
            return None
        return dict(found[0])

    async def _ensure_subsystem(self, tenant: str) -> dict[str, Any]:
        return await self._ensure(self.subsystem_nqn(tenant))

    async def _ensure(self, nqn: str) -> dict[str, Any]:
        found = await self._subsystem(nqn)
        if found is None:
            await self._ensure_transports()
            values = {
                "nqn": nqn,
                "serial_number": self._node[:20],
                "model_number": MODEL,
                "max_namespaces": self.max_namespaces,
            }
            await self._rpc.call("nvmf_create_subsystem", values)
        if found is None or not self._listens(found):
            await self._listen(nqn, found or {})
            found = await self._subsystem(nqn)
        listener = None if found is None else _listener(found, TRANSPORT, self._address)
        if found is None or listener is None:
            raise TargetFailed(f"{nqn} went away while it was made", field="tenant")
        self._port = int(listener["trsvcid"])
        return found

    def _listens(self, subsystem: dict[str, Any]) -> bool:
        """Whether a subsystem listens everywhere that it should."""
        wanted = [(TRANSPORT, self._address), *((one.transport, one.address) for one in self._listeners)]
        return all(_listener(subsystem, transport, address) is not None for transport, address in wanted)

    async def _ensure_transports(self) -> None:
        known = await self._transports()
        for transport in dict.fromkeys([TRANSPORT, *(one.transport for one in self._listeners)]):
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
        for one in self._listeners:
            if _listener(subsystem, one.transport, one.address) is None:
                await self._add_listener(nqn, one.transport, one.address, one.port)
        if _listener(subsystem, TRANSPORT, self._address) is not None:
            return
        if not self._port:
            # A target that ran before us has the port already, under another tenant.
            for other in await self._rpc.call("nvmf_get_subsystems"):
                listener = _listener(other, TRANSPORT, self._address)
                if listener is not None and other["nqn"].startswith(f"{NQN_PREFIX}:{self._node}:"):
                    self._port = int(listener["trsvcid"])
        try:
            await self._listen_tcp(nqn, self._port)
        except TargetRefused as error:
            if self._fixed_port or not self._port:
                raise TargetRefused(
                    f"the target cannot listen on {self._address} port {self._port}: another process has the port, or "
                    "this machine has not the address",
                    field="target.listen",
                ) from error
            await self._listen_tcp(nqn, 0)  # ours was taken meanwhile: hosts learn the new one from the daemon

    async def _listen_tcp(self, nqn: str, port: int) -> None:
        await self._add_listener(nqn, TRANSPORT, self._address, port)

    async def _add_listener(self, nqn: str, transport: str, host: str, port: int) -> None:
        family = "IPv6" if ":" in host else "IPv4"
        address = {"trtype": transport, "adrfam": family, "traddr": host, "trsvcid": str(port)}
        await self._rpc.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address})

    async def _drop_if_empty(self, nqn: str) -> None:
        subsystem = await self._subsystem(nqn)
        if subsystem is not None and not subsystem["namespaces"] and not hosts_of(subsystem) - self._own_hosts:
            await self._rpc.call("nvmf_delete_subsystem", {"nqn": nqn})


def _namespace(subsystem: dict[str, Any], nsid: int) -> dict[str, Any] | None:
    return next((one for one in subsystem["namespaces"] if one["nsid"] == nsid), None)


def hosts_of(thing: dict[str, Any]) -> set[str]:
    """Host NQNs of a subsystem, or of a namespace that is not visible to all."""
    return {one["nqn"] if isinstance(one, dict) else one for one in thing.get("hosts", ())}


def _listener(subsystem: dict[str, Any], transport: str, address: str) -> dict[str, Any] | None:
    for one in subsystem.get("listen_addresses", ()):
        if one["trtype"] == transport and one["traddr"] == address:
            return dict(one)
    return None
