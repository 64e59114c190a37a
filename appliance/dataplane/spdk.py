"""Driver of SPDK's target: `NvmfTarget` without the private calls of ours, and what is done instead (ADR 12)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from forebay.appliance.dataplane.host_keys import HostKeyFiles, HostKeys
from forebay.appliance.dataplane.interface import (
    Barrier,
    Capabilities,
    HostView,
    IoStats,
    TargetInfo,
    VolumeErrors,
    VolumeSpec,
    WriteGrant,
)
from forebay.appliance.dataplane.iostat import Iostat
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.node_host import NodeHost
from forebay.appliance.dataplane.nvmf_target import Bdev, NvmfTarget
from forebay.appliance.dataplane.own_host import OwnHost
from forebay.appliance.dataplane.spdk_stores import CLUSTER_BYTES, LvolStores, StoreDrive
from forebay.appliance.dataplane.spdk_subsystems import SpdkSubsystems
from forebay.appliance.dataplane.subsystems import Listener, TransportLimits, hosts_of
from forebay.appliance.dataplane.teardown import Teardown
from forebay.appliance.dataplane.volume_files import VolumeFiles
from forebay.errors import NoSpace, NotFound, ProtocolError, TargetFailed, Unavailable, VolumeMismatch
from forebay.ids import LBA_BYTES, GrantId, HostIdentity, VolumeId

__all__ = ["QosLimits", "SpdkTarget", "spdk_identity"]

CAPABILITIES = Capabilities(fencing=False, barrier=True, per_host_visibility=True, qos=True, ordered=True)
MAX_IO_BYTES = 128 << 10
"""Of one command. An initiator that has several commands of this size under way is faster here than one that sends
longer ones, each of which holds a buffer of its whole length."""


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
        self.stores = LvolStores(rpc, node, list(stores))
        self._spdk = SpdkSubsystems(
            rpc, node, self.stores, address=address, port=port, limits=limits, listeners=listeners
        )
        super().__init__(rpc, self._spdk, HostKeys(rpc, node, keys))
        self._bdev_prefix = f"forebay-{node}-vol-"  # of bdevs of files
        self._qos = qos or QosLimits()
        self._files = VolumeFiles(timeout_s)
        self._teardown = Teardown(rpc, self._keys)
        self._own = OwnHost(
            *(rpc, self._spdk, self._keys, self._teardown),
            shape=self._shape,
            timeout_s=timeout_s,
            proven=keys is not None,
        )
        self._own_hosts = frozenset((self._own.identity.nqn,))

    async def info(self) -> TargetInfo:
        version, pid, boot_id = await spdk_identity(self._rpc)
        return TargetInfo("spdk", version, pid, boot_id, CAPABILITIES)

    async def able(self) -> Capabilities:
        return CAPABILITIES

    # --- hosts: torn down where writes cannot be fenced ---------------------------------------------------------------

    async def teardown_host(self, host: HostIdentity) -> None:
        """See `Target.teardown_host`. The host may not connect while its commands end, and then may again."""
        async with self._turn(host.nqn), self._shape.together():
            for nqn, subsystem in (await self._subsystems.mine()).items():
                allowed = host.nqn in hosts_of(subsystem)
                try:
                    await self._teardown.expel(nqn, host.nqn, allowed=allowed)
                finally:
                    if allowed:
                        await self._keys.allow(nqn, host.nqn)

    async def teardown_all(self, incarnation: int) -> None:
        """See `Target.teardown_all`. Nothing of an earlier daemon is under way: regions are cleared by it, not here."""
        async with self._shape.alone():
            self._looks.clear()
            await self._own.clear()
            for subsystem in await self._subsystems.look_at():
                if self._subsystems.is_mine(subsystem["nqn"]):
                    await self._dismiss_all(subsystem, beside=await self._teardown.connected(subsystem["nqn"]))

    async def _shut_out(self, nqn: str, name: str, *, allowed: bool) -> None:
        await self._teardown.expel(nqn, name, allowed=allowed)

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

    def io(self, bdev: str) -> AbstractAsyncContextManager[NodeHost]:
        """The node's own way to the bytes of a bdev that no kernel can reach."""
        return self._own.io(bdev)

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

    async def leave(self) -> None:
        await super().leave()
        async with self._shape.alone():
            await self._own.leave()
            await self._keys.forget_all_but(())
        await self.stores.detach()

    # --- what it did --------------------------------------------------------------------------------------------------

    def _counted(self, found: Iostat) -> dict[VolumeId, str]:
        """The name by which each volume's bdev is counted."""
        names = {self._bdev_name(spec): volume for volume, spec in self._volumes.items()}
        names |= {real: names[alias] for real, alias in self._spdk.aliases.items() if alias in names}
        return {volume: name for name, volume in names.items() if name in found.bdevs}

    async def io_stats(self) -> IoStats:
        found = await Iostat.ask(self._rpc)
        return found.total(self._counted(found).values())

    async def volume_errors(self) -> dict[VolumeId, VolumeErrors]:
        found = await Iostat.ask(self._rpc)
        return {volume: VolumeErrors(sum(found.errors(name).values())) for volume, name in self._counted(found).items()}

    async def volume_io(self) -> dict[VolumeId, str]:
        stores = {volume: self.stores.store_of(spec.path) for volume, spec in self._volumes.items()}
        return {volume: "aio" if drive is None else f"lvol on {drive.kind}" for volume, drive in stores.items()}

    async def close(self) -> None:
        self._files.close_all()
        await super().close()

    # --- of `NvmfTarget` ----------------------------------------------------------------------------------------------

    def _bdev_name(self, spec: VolumeSpec) -> str:
        return spec.path if self.stores.store_of(spec.path) is not None else f"{self._bdev_prefix}{spec.bdev}"

    async def _bdevs(self) -> dict[str, Bdev]:
        found = await self._rpc.call("bdev_get_bdevs")
        files = {one["name"]: _bdev(one) for one in found if one["name"].startswith(self._bdev_prefix)}
        return files | {alias: Bdev(alias, stays=True) for alias in (await self.stores.aliases()).values()}

    async def _add_bdev(self, spec: VolumeSpec) -> None:
        name = self._bdev_name(spec)
        if self.stores.store_of(spec.path) is not None:
            await self._own.leave_alone(name)
            (known,) = await self._rpc.call("bdev_get_bdevs", {"name": name})
            return await self._limit(name, known)
        try:
            known = (await self._rpc.call("bdev_get_bdevs", {"name": name}))[0]
        except NotFound:
            known = None
        if known is not None and _bdev(known).path != spec.path:
            raise VolumeMismatch(f"the target serves {_bdev(known).path} as {name}, not {spec.path}", field="path")
        self._files.open(spec, anew=known is None)  # as the target will
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


def _bdev(found: dict[str, Any]) -> Bdev:
    try:
        return Bdev(found["driver_specific"]["aio"]["filename"])
    except KeyError:
        return Bdev(str(found.get("product_name", "another bdev")))
