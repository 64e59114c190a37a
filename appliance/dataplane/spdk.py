"""Driver of SPDK's target: `NvmfTarget` without the private calls of ours, and what is done instead (ADR 12)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.appliance.dataplane.interface import (
    Barrier,
    Capabilities,
    EndpointInfo,
    HostView,
    IoStats,
    TargetInfo,
    VolumeErrors,
    VolumeSpec,
    WriteGrant,
)
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.node_host import NodeHost
from forebay.appliance.dataplane.spdk_stores import CLUSTER_BYTES, LvolStores, StoreDrive
from forebay.appliance.dataplane.subsystems import (
    TRANSPORT,
    Bdev,
    Listener,
    NvmfTarget,
    TransportLimits,
    hosts_of,
)
from forebay.appliance.dataplane.volume_files import VolumeFiles
from forebay.errors import (
    ForebayError,
    NoSpace,
    NotFound,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
    VolumeMismatch,
)
from forebay.ids import LBA_BYTES, GrantId, HostIdentity, VolumeId
from forebay.nvmetcp.secret import HostSecrets, Secret

__all__ = ["QosLimits", "SpdkTarget", "spdk_identity"]

CAPABILITIES = Capabilities(fencing=False, barrier=True, per_host_visibility=True, qos=True, ordered=True)
MAX_IO_BYTES = 128 << 10
"""Of one command. An initiator that has several commands of this size under way is faster here than one that sends
longer ones, each of which holds a buffer of its whole length."""
_DRAIN_S = 5.0
"""How long commands of a host that is torn down may take to end before the caller is told that they did not."""
_AGAIN_S = 0.02
_FREE_PORTS = 5
"""Ports tried, where any will do: somebody else may take one between the look and the use."""


@dataclass(frozen=True, slots=True)
class QosLimits:
    """Limits of each volume; 0 is none. SPDK counts bytes a second in MiB."""

    ios_per_s: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0

    def rates(self) -> dict[str, int]:
        """By the names of `bdev_set_qos_limit`."""
        return {
            "rw_ios_per_sec": self.ios_per_s,
            "rw_mbytes_per_sec": 0,
            "r_mbytes_per_sec": self.read_bytes_per_s >> 20,
            "w_mbytes_per_sec": self.write_bytes_per_s >> 20,
        }


async def spdk_identity(rpc: JsonRpcClient) -> tuple[str, int, str]:
    """Version, pid and boot id of the SPDK target behind a socket. Raises `ProtocolError` if it is another's.

    SPDK names no process, but the kernel does: the one that listens.
    """
    found = await rpc.call("spdk_get_version")
    try:
        version, major = str(found["version"]), int(found["fields"]["major"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"spdk_get_version: {error!r} in the answer") from error
    if not major:  # Forebay's own target, which answers most of what SPDK does
        raise ProtocolError(f"{rpc.path}: {version} is not SPDK's target")
    peer = rpc.peer
    if peer is None:
        raise Unavailable(f"{rpc.path}: which process answers is not known", field="target")
    return version, peer.pid, f"{peer.pid}/{peer.start_ticks}"


class SpdkTarget(NvmfTarget):
    """SPDK's ``nvmf_tgt`` behind its RPC socket.

    A volume on a file or kernel block device is a ``bdev_aio``, whose regions, flushes and checksums the daemon sees to
    itself. Bdevs are named ``forebay-<node>-<volume>``: a target may serve others as well, which are left alone.
    """

    max_namespaces = 1024

    def __init__(
        self,
        rpc: JsonRpcClient,
        *,
        node: str,
        address: str = "127.0.0.1",
        port: int = 0,
        limits: TransportLimits | None = None,
        listeners: Sequence[Listener] = (),
        qos: QosLimits | None = None,
        stores: Sequence[StoreDrive] = (),
        timeout_s: float = 10.0,
        keys: HostKeyFiles | None = None,
    ) -> None:
        super().__init__(rpc, node=node, address=address, port=port, limits=limits, listeners=listeners, keys=keys)
        self._qos = qos or QosLimits()
        self._timeout_s = timeout_s
        self._files = VolumeFiles(timeout_s)
        self.stores = LvolStores(rpc, node, list(stores))
        ident = str(uuid4())  # nobody else may know it: who does could connect as the node itself
        secrets = HostSecrets(Secret.generate(), Secret.generate()) if keys is not None else None
        self._self = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{ident}", ident, secrets)
        self._own_hosts = frozenset((self._self.nqn,))
        if secrets is not None:
            self._provers[self._self.nqn] = self._self
        self._unsettled: set[str] = set()
        self._private_use = asyncio.Lock()  # taken before `_shape`
        self._aliases: dict[str, str] = {}

    async def info(self) -> TargetInfo:
        version, pid, boot_id = await spdk_identity(self._rpc)
        return TargetInfo("spdk", version, pid, boot_id, CAPABILITIES)

    async def able(self) -> Capabilities:
        return CAPABILITIES

    # --- hosts: torn down where writes cannot be fenced ---------------------------------------------------------------

    async def teardown_host(self, host: HostIdentity) -> None:
        """See `Target.teardown_host`. The host may not connect while its commands end, and then may again."""
        async with self._shape:
            for nqn, subsystem in (await self._mine()).items():
                allowed = host.nqn in hosts_of(subsystem)
                try:
                    await self._expel(nqn, host.nqn, allowed=allowed)
                finally:
                    if allowed:
                        await self._allow(nqn, host.nqn)

    async def teardown_all(self, incarnation: int) -> None:
        """See `Target.teardown_all`. Nothing of an earlier daemon is under way: regions are cleared by it, not here."""
        async with self._shape:
            self._looks.clear()
            await self._clear_private()
            for nqn, subsystem in (await self._mine()).items():
                names = hosts_of(subsystem) | {one["hostnqn"] for one in await self._controllers(nqn)}
                for name in sorted(names):
                    for one in subsystem["namespaces"]:
                        values = {"nqn": nqn, "nsid": one["nsid"], "host": name}
                        await self._rpc.call("nvmf_ns_remove_host", values)
                    await self._expel(nqn, name, allowed=name in hosts_of(subsystem))

    async def _end_host(self, nqn: str, name: str) -> None:
        await self._expel(nqn, name, allowed=False)

    async def _mine(self) -> dict[str, dict[str, Any]]:
        """This node's subsystems by NQN."""
        prefix = self.subsystem_nqn("")
        found = await self._rpc.call("nvmf_get_subsystems")
        return {one["nqn"]: one for one in found if one["nqn"].startswith(prefix)}

    async def _controllers(self, nqn: str) -> list[dict[str, Any]]:
        try:
            return list(await self._rpc.call("nvmf_subsystem_get_controllers", {"nqn": nqn}))
        except TargetRefused:
            return []  # there is no such subsystem

    async def _expel(self, nqn: str, name: str, *, allowed: bool) -> None:
        """Take a host's right to connect, and have its controllers go: a controller goes when its commands have ended.

        Raises `Unavailable` if they do not, and then nobody knows what they still write.
        """
        end_s = asyncio.get_running_loop().time() + _DRAIN_S
        while True:
            if allowed:
                values = {"nqn": nqn, "host": name, "timeout_ms": int(_DRAIN_S * 1000)}
                with suppress(TargetFailed):  # they had no end in that time: the controllers say so
                    await self._rpc.call("nvmf_subsystem_remove_host", values)
            if not any(one["hostnqn"] == name for one in await self._controllers(nqn)):
                return
            if asyncio.get_running_loop().time() >= end_s:
                raise Unavailable(f"commands of host {name} do not end", field="target")
            await asyncio.sleep(_AGAIN_S)
            if not allowed:  # it was connecting meanwhile, or lost its right without its connections
                await self._allow(nqn, name, stranger=True)
            allowed = True

    async def grant(self, grants: Sequence[WriteGrant]) -> None:
        """SPDK has no grants: a host that sees a volume may write all of it."""
        for grant in grants:
            if grant.extent.volume not in self._volumes:
                raise NotFound(f"the target does not serve volume {grant.extent.volume}", field="volume")

    async def revoke(self, grants: Sequence[GrantId]) -> None:
        """Nothing to do: who must not write any more is torn down."""

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def barrier(self, volume: VolumeSpec) -> Barrier:
        """What the kernel says of the file, or the drive of its cache: what SPDK answers to a Flush is not asked."""
        drive = self.stores.store_of(volume.path)
        if drive is None:
            await self._files.flush(volume)
            return Barrier.FLUSHED
        await self.stores.look_for_cache(drive)
        return await asyncio.to_thread(self.stores.flush, drive)

    async def prepare_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        drive = self.stores.store_of(volume.path)
        if drive is None:
            return await self._files.prepare_region(volume, offset_bytes, length_bytes)
        async with self.io(volume.path) as host:
            try:
                return await host.write_zeroes(offset_bytes, length_bytes)
            except TargetFailed as error:
                # a store that is full is an error like any other to SPDK
                if (await self.stores.space(drive.name)).free_bytes >= CLUSTER_BYTES:
                    raise
                await host.deallocate(offset_bytes, length_bytes)
                raise NoSpace(f"drive {drive.kind}:{drive.where} has no space left", field="drives") from error

    async def release_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        if self.stores.store_of(volume.path) is None:
            return await self._files.release_region(volume, offset_bytes, length_bytes)
        async with self.io(volume.path) as host:
            # zeroed first: a store frees clusters as they are, and whoever gets them next could read them
            await host.write_zeroes(offset_bytes, length_bytes)
            return await host.deallocate(offset_bytes, length_bytes)

    async def checksums(self, volume: VolumeSpec, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        if self.stores.store_of(volume.path) is None:
            return await self._files.checksums(volume, ranges)
        async with self.io(volume.path) as host:
            return await host.checksums(ranges)

    @asynccontextmanager
    async def io(self, bdev: str) -> AsyncIterator[NodeHost]:
        """The node's own way to the bytes of a bdev: where it is served, or else in a subsystem of the node's own.

        Only for bdevs that no kernel can reach.
        """
        async with self._shape:
            found = await self._let_in(bdev)
        if found is not None:
            async with self._as_host(*found) as host:
                yield host
            return
        async with self._private_use:
            async with self._shape:
                found = await self._let_in(bdev) or await self._open_private(bdev)
            nqn, nsid = found
            try:
                async with self._as_host(nqn, nsid) as host:
                    yield host
            finally:
                if nqn == self._private:
                    with suppress(ForebayError):  # what stays there is cleared before anything needs its bdev
                        await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid})

    @asynccontextmanager
    async def _as_host(self, nqn: str, nsid: int) -> AsyncIterator[NodeHost]:
        where = EndpointInfo(TRANSPORT.lower(), self._address, self._port, nqn)
        try:
            async with NodeHost.connected(where, self._self, nsid, self._timeout_s) as host:
                yield host
        except BaseException:
            self._unsettled.add(nqn)  # a deallocate may still be under way: it has to end before anything else begins
            raise

    async def _let_in(self, bdev: str) -> tuple[str, int] | None:
        """Where a bdev is served, and the node itself may use it; None if it is not served."""
        found = await self._served_at(bdev)
        if found is None:
            return None
        nqn, nsid = found
        if nqn in self._unsettled:
            await self._expel(nqn, self._self.nqn, allowed=True)
            self._unsettled.discard(nqn)
        subsystem = await self._subsystem(nqn)
        if subsystem is None or self._self.nqn not in hosts_of(subsystem):
            await self._allow(nqn, self._self.nqn)
        await self._rpc.call("nvmf_ns_add_host", {"nqn": nqn, "nsid": nsid, "host": self._self.nqn})
        return found

    @property
    def _private(self) -> str:
        """The subsystem in which the node alone sees what is not served."""
        return self.subsystem_nqn("").rstrip(":")

    async def _open_private(self, bdev: str) -> tuple[str, int]:
        """Have a bdev in the node's own subsystem, as where it is served."""
        nqn = self._private
        await self._clear_private(bdev)
        if self._self.nqn not in hosts_of(await self._ensure(nqn)):
            await self._allow(nqn, self._self.nqn)
        wanted = {"bdev_name": bdev, "no_auto_visible": True}
        nsid = int(await self._rpc.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": wanted}))
        await self._rpc.call("nvmf_ns_add_host", {"nqn": nqn, "nsid": nsid, "host": self._self.nqn})
        return nqn, nsid

    async def _clear_private(self, bdev: str | None = None) -> None:
        """End what an earlier daemon, or a call that failed, left of a bdev, or at all, in the node's own subsystem.

        A bdev that is there cannot be served, and a command that is under way there would arrive late.
        """
        nqn = self._private
        subsystem = await self._subsystem(nqn)
        if subsystem is None:
            return
        left = [one["nsid"] for one in subsystem["namespaces"] if bdev in (None, one["bdev_name"])]
        if bdev is not None and not left:
            return  # another may be stuck there: its drive does not answer
        allowed = hosts_of(subsystem)
        for name in sorted(allowed | {one["hostnqn"] for one in await self._controllers(nqn)}):
            await self._expel(nqn, name, allowed=name in allowed)
        for nsid in left:
            await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid})

    async def _served_at(self, bdev: str) -> tuple[str, int] | None:
        """Subsystem and NSID of a bdev of this node's, if it is served."""
        self._aliases = await self.stores.aliases()
        for subsystem in (await self._mine()).values():
            for one in subsystem["namespaces"]:
                if self._aliases.get(one["bdev_name"], one["bdev_name"]) == bdev:
                    listener = next(iter(subsystem["listen_addresses"]), None)
                    if listener is not None:
                        self._port = int(listener["trsvcid"])
                    return subsystem["nqn"], int(one["nsid"])
        return None

    async def claim_store(self, name: str, fresh: UUID) -> UUID:
        """`LvolStores.claim`, of a drive whose first MiB is read as the node reads such drives."""

        async def start(bdev: str) -> bytes:
            async with self.io(bdev) as host:
                return bytes(await host.read(0, 1 << 20))

        return await self.stores.claim(name, fresh, start)

    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        if self.stores.drives:
            await self.stores.attach()  # what is wrong with one of them is learnt by whoever looks at it
        return await super().reconcile(volumes, hosts)

    # --- what it did --------------------------------------------------------------------------------------------------

    async def _iostat(self) -> tuple[float, dict[VolumeId, dict[str, Any]]]:
        """Ticks in a microsecond, and the counters of each volume."""
        names = {self._bdev_name(spec): volume for volume, spec in self._volumes.items()}
        names |= {real: names[alias] for real, alias in self._aliases.items() if alias in names}
        found = await self._rpc.call("bdev_get_iostat")
        try:
            mine = {names[one["name"]]: one for one in found["bdevs"] if one["name"] in names}
            return found["tick_rate"] / 1e6, mine
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    async def io_stats(self) -> IoStats:
        ticks_per_us, bdevs = await self._iostat()
        try:
            return IoStats(
                sum(one["bytes_read"] for one in bdevs.values()),
                int(sum(one["read_latency_ticks"] for one in bdevs.values()) / ticks_per_us),
                sum(one["bytes_written"] for one in bdevs.values()),
                int(sum(one["write_latency_ticks"] for one in bdevs.values()) / ticks_per_us),
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    async def volume_errors(self) -> dict[VolumeId, VolumeErrors]:
        _, bdevs = await self._iostat()
        try:
            return {volume: VolumeErrors(sum(one["io_error"].values())) for volume, one in bdevs.items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    async def volume_io(self) -> dict[VolumeId, str]:
        stores = {volume: self.stores.store_of(spec.path) for volume, spec in self._volumes.items()}
        return {volume: "aio" if drive is None else f"lvol on {drive.kind}" for volume, drive in stores.items()}

    async def close(self) -> None:
        self._files.close_all()
        await super().close()

    # --- of `NvmfTarget` ----------------------------------------------------------------------------------------------

    def _bdev_name(self, spec: VolumeSpec) -> str:
        return spec.path if self.stores.store_of(spec.path) is not None else f"{self._bdev_prefix}{spec.bdev}"

    @property
    def _bdev_prefix(self) -> str:
        """Of the bdevs of files."""
        return f"forebay-{self._node}-vol-"

    async def _look_at(self, params: dict[str, Any] | None) -> list[dict[str, Any]]:
        found = await super()._look_at(params)
        # Who sees a namespace stands only in the configuration, as the calls that would make it so.
        config = await self._rpc.call("framework_get_config", {"name": "nvmf"})
        if self.stores.drives:
            self._aliases = await self.stores.aliases()
        seen_by: dict[tuple[str, int], list[str]] = {}
        try:
            for call in config:
                if call["method"] == "nvmf_ns_add_host":
                    values = call["params"]
                    seen_by.setdefault((values["nqn"], values["nsid"]), []).append(values["host"])
            for subsystem in found:
                for one in subsystem.get("namespaces", ()):
                    one["bdev_name"] = self._aliases.get(one["bdev_name"], one["bdev_name"])
                    one["hosts"] = seen_by.get((subsystem["nqn"], one["nsid"]), [])
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"framework_get_config: {error!r} in the answer") from error
        return found

    async def _listen_tcp(self, nqn: str, port: int) -> None:
        """Listen; SPDK takes no port 0, so that a free one is looked for here."""
        for again in reversed(range(_FREE_PORTS)):
            try:
                await super()._listen_tcp(nqn, port or _free_port(self._address))
                return
            except TargetRefused:
                if port or not again:
                    raise

    async def _bdevs(self) -> dict[str, Bdev]:
        found = await self._rpc.call("bdev_get_bdevs")
        files = {one["name"]: _bdev(one) for one in found if one["name"].startswith(self._bdev_prefix)}
        return files | {alias: Bdev(alias, stays=True) for alias in (await self.stores.aliases()).values()}

    async def _add_bdev(self, spec: VolumeSpec) -> None:
        name = self._bdev_name(spec)
        if self.stores.store_of(spec.path) is not None:
            if not self._private_use.locked():
                await self._clear_private(name)
            (known,) = await self._rpc.call("bdev_get_bdevs", {"name": name})
            return await self._limit(name, known)
        try:
            known = (await self._rpc.call("bdev_get_bdevs", {"name": name}))[0]
        except NotFound:
            known = None
        if known is not None and _bdev(known).path != spec.path:
            raise VolumeMismatch(f"the target serves {_bdev(known).path} as {name}, not {spec.path}", field="path")
        self._files.open(spec)
        if known is None:
            values = {"name": name, "filename": spec.path, "block_size": LBA_BYTES, "uuid": str(UUID(spec.nguid))}
            await self._rpc.call("bdev_aio_create", values)
        return await self._limit(name, known or {})

    async def _limit(self, name: str, known: dict[str, Any]) -> None:
        limits = self._qos.rates()
        if known.get("assigned_rate_limits", dict.fromkeys(limits, 0)) != limits:
            await self._rpc.call("bdev_set_qos_limit", {"name": name, **limits})

    def _holds(self, spec: VolumeSpec) -> bool:
        return self.stores.store_of(spec.path) is not None or self._files.has(spec)

    async def _delete_bdev(self, name: str) -> None:
        if self.stores.store_of(name) is not None:
            return  # it goes when its volume does
        with suppress(NotFound):
            await self._rpc.call("bdev_aio_delete", {"name": name})
        for volume, spec in self._volumes.items():
            if self._bdev_name(spec) == name:
                self._files.close(volume)


def _free_port(address: str) -> int:
    """A port that nobody listens on now. Raises `TargetRefused` for an address that this machine has not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise TargetRefused(f"{address}: {error.strerror}", field="target.listen") from error
        return int(probe.getsockname()[1])


def _bdev(found: dict[str, Any]) -> Bdev:
    try:
        return Bdev(found["driver_specific"]["aio"]["filename"])
    except KeyError:
        return Bdev(str(found.get("product_name", "another bdev")))
