"""Driver of the embedded target: SPDK's RPC methods, and the private ``forebay_*`` ones for what SPDK lacks.

Every call first asks what the target has and adds or takes away the difference, so that replaying desired state is the
same code whether the target knows all of it, part of it or (after its restart) nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from forebay.appliance.dataplane.interface import (
    Barrier,
    Capabilities,
    EndpointInfo,
    HostView,
    IoStats,
    Target,
    TargetInfo,
    VolumeErrors,
    VolumeSpec,
    WriteGrant,
)
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.errors import (
    AlreadyExists,
    ForebayError,
    NotFound,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
    VolumeMismatch,
)
from forebay.ids import LBA_BYTES, GrantId, HostIdentity, VolumeId

__all__ = ["NQN_PREFIX", "EmbeddedTarget", "TransportLimits"]

_T = TypeVar("_T")

NQN_PREFIX = "nqn.2026-11.io.forebay"
MODEL = "Forebay"
TRANSPORT = "TCP"
MAX_NAMESPACES = 16_384
"""Namespaces of one tenant's subsystem; fixed when it is created."""
BATCH = 4096
"""Grants, ids or ranges in one request at most, so that no message grows without bound."""
_REPLAY_MS = 100
"""When to ask again for what a target that was started anew does not know yet."""


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Limits of the NVMe/TCP transport, by SPDK's names; None leaves the target's own default."""

    max_io_bytes: int | None = None
    in_capsule_bytes: int | None = None
    queue_depth: int | None = None
    queues_per_controller: int | None = None


@dataclass(slots=True)
class _Look:
    """A subsystem as the target showed it, and as it was changed from here since."""

    endpoint: EndpointInfo
    hosts: set[str]
    seen_by: dict[int, set[str]]
    """NSID to the hosts that see it."""


class EmbeddedTarget(Target):
    """The embedded target behind a control socket.

    One subsystem per tenant, ``nqn.2026-11.io.forebay:<node>:<tenant>``, all on one listener. With ``port`` 0 the first
    listener takes a free port, which is kept for every later one, also after a restart of the target, as long as
    nobody else took it meanwhile.
    """

    def __init__(
        self,
        rpc: JsonRpcClient,
        *,
        node: str,
        address: str = "127.0.0.1",
        port: int = 0,
        limits: TransportLimits | None = None,
    ) -> None:
        self._rpc = rpc
        self._node = node
        self._address = address
        self._fixed_port = port
        self._port = port
        self._limits = limits or TransportLimits()
        self._volumes: dict[VolumeId, VolumeSpec] = {}
        self._incarnation = 0
        self._number = 0
        self._capabilities: Capabilities | None = None  # of the process that answers now
        self._looks: dict[str, _Look] = {}
        self._shape = asyncio.Lock()  # one change of subsystems at a time: each is a look followed by an act

    def subsystem_nqn(self, tenant: str) -> str:
        """The tenant's subsystem."""
        return f"{NQN_PREFIX}:{self._node}:{tenant}"

    async def info(self) -> TargetInfo:
        found = await self._rpc.call("forebay_get_info")
        try:
            flags = found["capabilities"]
            self._capabilities = Capabilities(
                fencing=bool(flags["fencing"]),
                barrier=bool(flags["barrier"]),
                per_host_visibility=bool(flags["per_host_visibility"]),
                qos=bool(flags.get("qos", False)),
                seal=bool(flags.get("seal", False)),
                ordered=bool(flags.get("ordered", False)),
            )
            return TargetInfo(
                kind="embedded",
                version=str(found["version"]),
                pid=int(found["pid"]),
                boot_id=str(found["boot_id"]),
                capabilities=self._capabilities,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"forebay_get_info: {error!r} in the answer") from error

    async def add_volume(self, spec: VolumeSpec) -> None:
        nqn = self.subsystem_nqn(spec.tenant)
        async with self._shape:
            await self._add_bdev(spec)
            subsystem = await self._ensure_subsystem(spec.tenant)
            namespace = _namespace(subsystem, spec.nsid)
            if namespace is None:
                wanted = {
                    "bdev_name": spec.bdev,
                    "nsid": spec.nsid,
                    "nguid": _nguid(spec),
                    "uuid": _uuid(spec),
                    "no_auto_visible": True,
                }
                await self._rpc.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": wanted})
            elif namespace["bdev_name"] != spec.bdev:
                raise AlreadyExists(
                    f"NSID {spec.nsid} of {nqn} is {namespace['bdev_name']}, not {spec.bdev}", field="nsid"
                )
            self._volumes[spec.volume] = spec
            self._looks.pop(nqn, None)

    async def remove_volume(self, spec: VolumeSpec) -> None:
        nqn = self.subsystem_nqn(spec.tenant)
        async with self._shape:
            subsystem = await self._subsystem(nqn)
            if subsystem is not None and _namespace(subsystem, spec.nsid) is not None:
                await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": spec.nsid})
            with suppress(NotFound):
                await self._rpc.call("bdev_aio_delete", {"name": spec.bdev})
            self._volumes.pop(spec.volume, None)
            self._looks.pop(nqn, None)
            await self._drop_if_empty(nqn)

    async def endpoint(self, tenant: str) -> EndpointInfo:
        nqn = self.subsystem_nqn(tenant)
        if (known := self._looks.get(nqn)) is not None:
            return known.endpoint
        subsystem = await self._subsystem(nqn)
        listener = _listener(subsystem, self._address) if subsystem is not None else None
        if listener is None:
            mine = [spec for spec in self._volumes.values() if spec.tenant == tenant]
            raise self._missing(NotFound(f"the target has no subsystem for tenant {tenant}", field="tenant"), mine)
        return EndpointInfo(TRANSPORT.lower(), listener["traddr"], int(listener["trsvcid"]), nqn)

    async def add_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        nqn = self.subsystem_nqn(tenant)
        visible = {spec.nsid for spec in volumes}

        async def admit() -> None:
            look = self._looks.get(nqn) or self._seen(nqn, await self._ensure_subsystem(tenant))
            if host.nqn not in look.hosts:
                await self._rpc.call("nvmf_subsystem_add_host", {"nqn": nqn, "host": host.nqn})
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

        async with self._shape:
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
            await self.teardown_host(host)
            if look is None or not (look.hosts or look.seen_by):
                self._looks.pop(nqn, None)
                await self._drop_if_empty(nqn)

        async with self._shape:
            await self._by_look(nqn, expel)

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
        look = _Look(EndpointInfo("", "", 0, nqn), _hosts(subsystem), {})
        look.seen_by = {one["nsid"]: _hosts(one) for one in subsystem["namespaces"]}
        listener = _listener(subsystem, self._address)
        if listener is not None:
            look.endpoint = EndpointInfo(TRANSPORT.lower(), listener["traddr"], int(listener["trsvcid"]), nqn)
            self._looks[nqn] = look
        return look

    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        self._capabilities = None  # a target that has to be told everything may be another one
        # One look at everything, then calls for the differences alone: thousands of hosts cost what few do.
        wanted = {(self.subsystem_nqn(spec.tenant), spec.nsid): spec for spec in volumes}
        views = {(self.subsystem_nqn(view.tenant), view.host.nqn): view for view in hosts}
        async with self._shape:
            self._looks.clear()
            reported = [one for one in await self._rpc.call("nvmf_get_subsystems") if "namespaces" in one]
            mine = f"{NQN_PREFIX}:{self._node}:"
            subsystems = {one["nqn"]: one for one in reported if one["nqn"].startswith(mine)}
            bdevs = {one["name"]: one["driver_specific"]["aio"] for one in await self._rpc.call("bdev_get_bdevs")}
            for nqn, subsystem in subsystems.items():
                for one in subsystem["namespaces"]:
                    spec = wanted.get((nqn, one["nsid"]))
                    file = bdevs.get(one["bdev_name"], {}).get("filename")
                    one["wanted"] = spec is not None and (one["bdev_name"], file) == (spec.bdev, spec.path)
            found = await self._take_away(subsystems, views)
            kept = {one["bdev_name"] for each in subsystems.values() for one in each["namespaces"] if one["wanted"]}
            others = {
                one["bdev_name"] for each in reported if each["nqn"] not in subsystems for one in each["namespaces"]
            }
            for name in sorted(bdevs.keys() - kept - others):
                found.append(f"{bdevs[name]['filename']} is open and is not served")
                with suppress(NotFound):
                    await self._rpc.call("bdev_aio_delete", {"name": name})
        for (nqn, _nsid), spec in wanted.items():
            self._volumes[spec.volume] = spec
            listens = _listener(subsystems.get(nqn, {}), self._address) is not None
            if spec.bdev not in kept or not listens or bdevs[spec.bdev]["mode"] != _mode(spec):
                found.append(f"volume {spec.volume} is not served as it should be")
                await self.add_volume(spec)
        allowed = {(nqn, name) for nqn, subsystem in subsystems.items() for name in _hosts(subsystem)}
        sees: dict[tuple[str, str], set[int]] = {}
        for nqn, subsystem in subsystems.items():
            for one in subsystem["namespaces"]:
                for name in _hosts(one) if one["wanted"] else ():
                    sees.setdefault((nqn, name), set()).add(one["nsid"])
        for key, view in views.items():
            if key not in allowed or sees.get(key, set()) != {spec.nsid for spec in view.volumes}:
                found.append(f"host {view.host.nqn} does not see what it should")
                await self.add_host(view.tenant, view.host, view.volumes)
        return found

    async def _take_away(
        self, subsystems: dict[str, dict[str, Any]], views: dict[tuple[str, str], HostView]
    ) -> list[str]:
        """Hosts without a view, then namespaces that are not ``wanted``; says which there were."""
        found: list[str] = []
        for nqn, subsystem in subsystems.items():
            names = _hosts(subsystem).union(*(_hosts(one) for one in subsystem["namespaces"]))
            for name in sorted(name for name in names if (nqn, name) not in views):
                found.append(f"host {name} is not of a live session")
                await self._remove_host(nqn, subsystem, name)
                await self._rpc.call("forebay_host_teardown", {"host_nqn": name})
            for one in subsystem["namespaces"]:
                if not one["wanted"]:
                    found.append(f"NSID {one['nsid']} of {nqn} is not a volume of this node")
                    await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": one["nsid"]})
            await self._drop_if_empty(nqn)
        return found

    async def teardown_host(self, host: HostIdentity) -> None:
        await self._rpc.call("forebay_host_teardown", {"host_nqn": host.nqn, "host_id": host.host_id or None})

    async def teardown_all(self, incarnation: int) -> None:
        self._incarnation = incarnation
        ordered = (await self._able()).ordered
        await self._rpc.call("forebay_teardown_all", {"incarnation": incarnation} if ordered else None)

    async def grant(self, grants: Sequence[WriteGrant]) -> None:
        """Open extents for writing; all or none.

        After `Unavailable` nobody knows: the caller revokes the ids before it gives the extents to another.
        """
        groups: dict[tuple[VolumeId, tuple[HostIdentity, ...]], list[list[int]]] = {}
        for grant in grants:
            spec = self._volumes.get(grant.extent.volume)
            if spec is None:
                raise NotFound(f"the target does not serve volume {grant.extent.volume}", field="volume")
            lbas = [grant.extent.offset_bytes // LBA_BYTES, grant.extent.length_bytes // LBA_BYTES]
            row = [grant.grant, *lbas, grant.tag]
            groups.setdefault((spec.volume, grant.hosts), []).append(row)
        asked: list[GrantId] = []
        try:
            for (volume, hosts), rows in groups.items():
                names = [[host.nqn, host.host_id] for host in hosts]
                for part in _parts(rows):
                    asked += [GrantId(row[0]) for row in part]
                    values = {"hosts": names, "grants": part, "order": await self._order()}
                    await self._call("forebay_grants_add", self._volumes[volume], values)
        except ForebayError:
            # All or none: also the part that failed, of which perhaps only the answer was lost.
            with suppress(Unavailable):
                await self.revoke(asked)
            raise

    async def revoke(self, grants: Sequence[GrantId]) -> None:
        for part in _parts(grants):
            await self._rpc.call("forebay_grants_revoke", {"ids": part, "order": await self._order()})

    async def barrier(self, volume: VolumeSpec) -> Barrier:
        return await self._barrier("forebay_barrier", volume, {})

    async def seal(self, grants: Sequence[GrantId], volume: VolumeSpec) -> Barrier:
        if not (await self._able()).seal:  # a target that an older daemon started, and that goes on running
            return await super().seal(grants, volume)
        await self.revoke(grants[BATCH:])
        return await self._barrier("forebay_seal", volume, {"ids": list(grants[:BATCH])})

    async def _barrier(self, method: str, volume: VolumeSpec, params: dict[str, Any]) -> Barrier:
        found = await self._call(method, volume, params)
        try:
            return Barrier(found["result"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{method}: {found!r} is not an answer") from error

    async def prepare_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        await self._region("forebay_region_prepare", volume, offset_bytes, length_bytes)

    async def release_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        await self._region("forebay_region_release", volume, offset_bytes, length_bytes)

    async def _region(self, method: str, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        values = {"offset_bytes": offset_bytes, "length_bytes": length_bytes, "order": await self._order()}
        await self._call(method, volume, values)

    async def _call(self, method: str, volume: VolumeSpec, params: dict[str, Any]) -> Any:
        """A method that is about one volume."""
        try:
            return await self._rpc.call(method, {"name": volume.bdev, **params})
        except NotFound as error:
            raise self._missing(error, [volume]) from error

    def _missing(self, error: NotFound, volumes: Sequence[VolumeSpec]) -> ForebayError:
        """What it means that volumes are not found: the target had those that it was given, and was started anew since.

        Then they are back as soon as the supervisor has replayed the state, and whoever asks again gets them.
        """
        if volumes and all(self._volumes.get(spec.volume) == spec for spec in volumes):
            text = f"the target was started anew and does not serve all of its volumes yet: {error.message}"
            return Unavailable(text, field="target", retry_after_ms=_REPLAY_MS)
        return error

    async def _order(self) -> list[int] | None:
        """So that the target does not carry out late what we gave up, or what an earlier daemon asked for.

        None for a target that knows no order, and from a driver that never took the target over.
        """
        if not self._incarnation or not (await self._able()).ordered:
            return None
        self._number += 1
        return [self._incarnation, self._number]

    async def _able(self) -> Capabilities:
        """What the process that answers now can do."""
        return self._capabilities or (await self.info()).capabilities

    async def checksums(self, volume: VolumeSpec, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        found: list[int] = []
        for part in _parts(ranges):
            answer = await self._call(
                "forebay_verify", volume, {"kind": "crc32c", "ranges": [list(one) for one in part]}
            )
            sums = answer.get("checksums") if isinstance(answer, dict) else None
            if not isinstance(sums, list) or len(sums) != len(part):
                raise ProtocolError("forebay_verify: not one checksum for each range")
            found += sums
        return found

    async def io_stats(self) -> IoStats:
        found = await self._rpc.call("bdev_get_iostat")
        try:
            ticks_per_us = found["tick_rate"] / 1e6
            bdevs = found["bdevs"]
            return IoStats(
                sum(one["bytes_read"] for one in bdevs),
                int(sum(one["read_latency_ticks"] for one in bdevs) / ticks_per_us),
                sum(one["bytes_written"] for one in bdevs),
                int(sum(one["write_latency_ticks"] for one in bdevs) / ticks_per_us),
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    async def volume_errors(self) -> dict[VolumeId, VolumeErrors]:
        found = await self._rpc.call("bdev_get_iostat")
        try:
            errors = {
                one["name"]: VolumeErrors(*(int(one["io_error"].get(kind, 0)) for kind in ("failed", "no_space")))
                for one in found["bdevs"]
            }
            return {volume: errors[spec.bdev] for volume, spec in self._volumes.items() if spec.bdev in errors}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    async def failed_writes(self, grants: Sequence[GrantId]) -> set[GrantId]:
        failed: set[GrantId] = set()
        for part in _parts(grants):
            try:
                answer = await self._rpc.call("forebay_grants_failed", {"ids": part})
                failed |= {GrantId(int(one)) for one in answer["failed"]}
            except (TargetFailed, TargetRefused):
                return failed  # a target that an older daemon started does not tell
            except (KeyError, TypeError, ValueError) as error:
                raise ProtocolError(f"forebay_grants_failed: {error!r} in the answer") from error
        return failed

    async def volume_io(self) -> dict[VolumeId, str]:
        found = await self._rpc.call("bdev_get_bdevs")
        try:
            io = {one["name"]: str(one["driver_specific"]["aio"]["io"]) for one in found}
            return {volume: io[spec.bdev] for volume, spec in self._volumes.items() if spec.bdev in io}
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"bdev_get_bdevs: {error!r} in the answer") from error

    async def close(self) -> None:
        await self._rpc.close()

    async def _subsystem(self, nqn: str) -> dict[str, Any] | None:
        """One subsystem as `nvmf_get_subsystems` shows it, or None."""
        try:
            found = await self._rpc.call("nvmf_get_subsystems", {"nqn": nqn})
        except NotFound:
            return None
        return dict(found[0])

    async def _add_bdev(self, spec: VolumeSpec) -> None:
        try:
            known = (await self._rpc.call("bdev_get_bdevs", {"name": spec.bdev}))[0]["driver_specific"]["aio"]
        except NotFound:
            values = {"name": spec.bdev, "filename": spec.path, "block_size": LBA_BYTES, "uuid": _uuid(spec)}
            await self._rpc.call("bdev_aio_create", values)
            known = {"filename": spec.path, "mode": "fenced"}
        if known["filename"] != spec.path:
            raise VolumeMismatch(f"the target serves {known['filename']} as {spec.bdev}, not {spec.path}", field="path")
        if known["mode"] != _mode(spec):
            await self._rpc.call("forebay_bdev_set_mode", {"name": spec.bdev, "mode": _mode(spec)})

    async def _ensure_subsystem(self, tenant: str) -> dict[str, Any]:
        nqn = self.subsystem_nqn(tenant)
        found = await self._subsystem(nqn)
        if found is None:
            await self._ensure_transport()
            values = {
                "nqn": nqn,
                "serial_number": self._node[:20],
                "model_number": MODEL,
                "max_namespaces": MAX_NAMESPACES,
            }
            await self._rpc.call("nvmf_create_subsystem", values)
        listener = None if found is None else _listener(found, self._address)
        if listener is None:
            await self._listen(nqn)
            found = await self._subsystem(nqn)
            listener = None if found is None else _listener(found, self._address)
        if found is None or listener is None:
            raise TargetFailed(f"{nqn} went away while it was made", field="tenant")
        self._port = int(listener["trsvcid"])
        return found

    async def _remove_host(self, nqn: str, subsystem: dict[str, Any], name: str) -> None:
        """Take a host's right to connect and its sight of namespaces away, as far as it has them."""
        if name in _hosts(subsystem):
            await self._rpc.call("nvmf_subsystem_remove_host", {"nqn": nqn, "host": name})
        for namespace in subsystem["namespaces"]:
            if name in _hosts(namespace):
                values = {"nqn": nqn, "nsid": namespace["nsid"], "host": name}
                await self._rpc.call("nvmf_ns_remove_host", values)

    async def _ensure_transport(self) -> None:
        known = await self._rpc.call("nvmf_get_transports")
        if any(one.get("trtype") == TRANSPORT for one in known):
            return
        values = {
            "trtype": TRANSPORT,
            "max_io_size": self._limits.max_io_bytes,
            "in_capsule_data_size": self._limits.in_capsule_bytes,
            "max_queue_depth": self._limits.queue_depth,
            "max_io_qpairs_per_ctrlr": self._limits.queues_per_controller,
        }
        await self._rpc.call("nvmf_create_transport", values)

    async def _listen(self, nqn: str) -> None:
        if not self._port:
            # A target that ran before us has the port already, under another tenant.
            for other in await self._rpc.call("nvmf_get_subsystems"):
                listener = _listener(other, self._address)
                if listener is not None:
                    self._port = int(listener["trsvcid"])
        try:
            await self._add_listener(nqn, self._port)
        except TargetRefused as error:
            if self._fixed_port or not self._port:
                raise TargetRefused(
                    f"the target cannot listen on {self._address} port {self._port}: another process has the port, or "
                    "this machine has not the address",
                    field="target.listen",
                ) from error
            await self._add_listener(nqn, 0)  # ours was taken meanwhile: hosts learn the new one from the daemon

    async def _add_listener(self, nqn: str, port: int) -> None:
        family = "IPv6" if ":" in self._address else "IPv4"
        address = {"trtype": TRANSPORT, "adrfam": family, "traddr": self._address, "trsvcid": str(port)}
        await self._rpc.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address})

    async def _drop_if_empty(self, nqn: str) -> None:
        subsystem = await self._subsystem(nqn)
        if subsystem is not None and not subsystem["namespaces"] and not subsystem["hosts"]:
            await self._rpc.call("nvmf_delete_subsystem", {"nqn": nqn})


def _mode(spec: VolumeSpec) -> str:
    return "fenced" if spec.fenced else "raw"


def _uuid(spec: VolumeSpec) -> str:
    return str(UUID(spec.nguid))


def _nguid(spec: VolumeSpec) -> str:
    return UUID(spec.nguid).hex.upper()  # SPDK takes and shows 32 hex digits


def _namespace(subsystem: dict[str, Any], nsid: int) -> dict[str, Any] | None:
    return next((one for one in subsystem["namespaces"] if one["nsid"] == nsid), None)


def _hosts(thing: dict[str, Any]) -> set[str]:
    """Host NQNs of a subsystem or of a namespace that is not visible to all."""
    return {one["nqn"] if isinstance(one, dict) else one for one in thing.get("hosts", ())}


def _listener(subsystem: dict[str, Any], address: str) -> dict[str, Any] | None:
    for one in subsystem.get("listen_addresses", ()):
        if one["trtype"] == TRANSPORT and one["traddr"] == address:
            return dict(one)
    return None


def _parts(items: Sequence[_T]) -> list[list[_T]]:
    return [list(items[at : at + BATCH]) for at in range(0, len(items), BATCH)]
