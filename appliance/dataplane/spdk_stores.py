"""Drives that SPDK's target drives itself: a bdev, a logical volume store on it, and in that a thin volume for each.

Whose a store is stands in its name, ``forebay-<half of the node's id>-<the drive's UUID>``, by which it is found again
wherever its bdev turns up. A drive is created with every cluster zeroed, volumes with clusters that are zeroed when
they are deleted, and regions are zeroed before they are given back: so that a cluster that nobody has is zero.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from forebay.appliance.dataplane.interface import Barrier
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.labels import DriveSpace, translated
from forebay.errors import ForebayError, NotFound, ProtocolError, TargetFailed, Unavailable, VolumeMismatch
from forebay.ids import LBA_BYTES

__all__ = ["CLUSTER_BYTES", "LvolStores", "StoreDrive"]

CLUSTER_BYTES = 4 << 20
"""Regions are multiples of it."""
_CREATE_S = 600.0
"""Zeroing a whole drive takes as long as the drive needs."""
_IDENTIFY_CONTROLLER = 1
_VWC_AT = 525
"""Volatile Write Cache of Identify Controller; bit 0: there is one. Base §5.17.2.1."""


@dataclass(slots=True)
class StoreDrive:
    """One drive: ``kind`` of bdev (``nvme``, ``aio``, ``uring``, ``malloc``) and ``where`` it is.

    ``where`` is a PCI address, a path, or for a ``malloc`` nothing but a name; only that needs ``size_bytes``.
    """

    name: str
    kind: str
    where: str
    size_bytes: int = 0
    lvs: str = ""
    """Name of its store, once that is known to be this drive's."""
    cached: bool | None = field(default=None, repr=False)
    """Whether the drive keeps writes in a cache that loses them with the power; None until it was asked."""


class LvolStores:
    """The stores of one node's drives. Methods raise `Unavailable` when the target does not answer."""

    def __init__(self, rpc: JsonRpcClient, node: str, drives: list[StoreDrive]) -> None:
        self._rpc = rpc
        self._prefix = f"forebay-{node}-"
        self.drives = {drive.name: drive for drive in drives}
        self._attaching = asyncio.Lock()  # whoever came second would find that the bdev exists, and blame the drive

    def store_of(self, path: str) -> StoreDrive | None:
        """The drive on which a volume of that path lies, ``<store>/<volume>``; None if it is a file's."""
        lvs = path.partition("/")[0]
        return next((drive for drive in self.drives.values() if lvs and drive.lvs == lvs), None)

    # --- bdevs and stores ---------------------------------------------------------------------------------------------

    async def attach(self) -> dict[str, ForebayError]:
        """Have the target know the bdevs of all drives; what is wrong with those where it cannot."""
        wrong: dict[str, ForebayError] = {}
        async with self._attaching:
            for drive in self.drives.values():
                try:
                    await self._ensure_bdev(drive)
                except (TargetFailed, Unavailable) as error:
                    wrong[drive.name] = error
        await self._rpc.call("bdev_wait_for_examine")
        return wrong

    def _bdev(self, drive: StoreDrive) -> str:
        return f"{self._prefix}{drive.name}" + ("n1" if drive.kind == "nvme" else "")

    async def _ensure_bdev(self, drive: StoreDrive) -> None:
        with suppress(NotFound):
            await self._rpc.call("bdev_get_bdevs", {"name": self._bdev(drive)})
            return
        name = f"{self._prefix}{drive.name}"
        if drive.kind == "nvme":
            values: dict[str, Any] = {"name": name, "trtype": "PCIe", "traddr": drive.where}
            method = "bdev_nvme_attach_controller"
        elif drive.kind == "malloc":
            blocks = drive.size_bytes // LBA_BYTES
            method, values = "bdev_malloc_create", {"name": name, "block_size": LBA_BYTES, "num_blocks": blocks}
        else:
            method = f"bdev_{drive.kind}_create"
            values = {"name": name, "filename": drive.where, "block_size": LBA_BYTES}
        try:
            await self._rpc.call(method, values)
        except ForebayError as error:
            if isinstance(error, Unavailable):
                await self._rpc.call("spdk_get_version")  # or it is the target that does not answer
            raise TargetFailed(f"drive {drive.kind}:{drive.where}: {error.message}", field="drives") from error

    async def detach(self) -> None:
        """Have the target let go of all drives, which keep what is on them; a ``malloc`` stays, with its bytes."""
        for drive in self.drives.values():
            name = f"{self._prefix}{drive.name}"
            method = "bdev_nvme_detach_controller" if drive.kind == "nvme" else f"bdev_{drive.kind}_delete"
            if drive.kind != "malloc":
                with suppress(NotFound):
                    await self._rpc.call(method, {"name": name}, timeout_s=_CREATE_S)

    async def _stores(self) -> dict[str, dict[str, Any]]:
        """Stores by their bdevs."""
        return {one["base_bdev"]: one for one in await self._rpc.call("bdev_lvol_get_lvstores")}

    async def _store_of(self, name: str) -> dict[str, Any] | None:
        """The store on a drive, which is attached if need be. Raises what keeps the drive from that."""
        wrong = (await self.attach()).get(name)
        if wrong is not None:
            raise wrong
        return (await self._stores()).get(self._bdev(self.drives[name]))

    async def claim(self, name: str, fresh: UUID, start: Callable[[str], Awaitable[bytes]]) -> UUID:
        """Make a drive that metadata does not know this node's, or find that it is: a start cut short repeats this.

        ``start`` reads the first MiB of a bdev. Raises `VolumeMismatch` if the drive holds something already.
        """
        drive = self.drives[name]
        where, found = f"{drive.kind}:{drive.where}", await self._store_of(name)
        if found is not None:
            known = self._identity(found["name"])
            if known is None:
                raise VolumeMismatch(
                    f"{where} holds the store {found['name']}, which is not this node's", field="drive"
                )
            drive.lvs = found["name"]
            return known
        (bdev,) = await self._rpc.call("bdev_get_bdevs", {"name": self._bdev(drive)})
        if bdev.get("claimed"):
            raise VolumeMismatch(f"{where} is in use: it holds something that the target has found", field="drive")
        if (await start(self._bdev(drive))).strip(b"\0"):
            raise VolumeMismatch(f"{where} is not empty: if nothing on it is needed, zero its first MiB", field="drive")
        lvs = f"{self._prefix}{fresh}"
        values = {
            "bdev_name": self._bdev(drive),
            "lvs_name": lvs,
            "cluster_sz": CLUSTER_BYTES,
            "clear_method": "write_zeroes",
        }
        await self._rpc.call("bdev_lvol_create_lvstore", values, timeout_s=_CREATE_S)
        drive.lvs = lvs
        return fresh

    async def open(self, name: str, known: UUID) -> None:
        """Find the store of a drive that metadata knows. Raises `VolumeMismatch`, `TargetFailed` if it is not there."""
        drive = self.drives[name]
        where, found = f"{drive.kind}:{drive.where}", await self._store_of(name)
        if found is None:
            raise VolumeMismatch(f"{where} has no store: is it the drive that it was?", field="drive")
        if self._identity(found["name"]) != known:
            raise VolumeMismatch(
                f"{where} holds the store {found['name']}: it is another drive", field="drive", limit=str(known)
            )
        drive.lvs = found["name"]

    def _identity(self, lvs: str) -> UUID | None:
        with suppress(ValueError):
            if lvs.startswith(self._prefix):
                return UUID(lvs.removeprefix(self._prefix))
        return None

    async def space(self, name: str) -> DriveSpace:
        """What a drive's store has room for."""
        store = (await self._stores()).get(self._bdev(self.drives[name]))
        if store is None:
            raise TargetFailed(f"drive {name} has no store", field="drives")
        total, free, cluster = (int(store[key]) for key in ("total_data_clusters", "free_clusters", "cluster_size"))
        return DriveSpace(total * cluster, free * cluster, (total - free) * cluster)

    # --- volumes ------------------------------------------------------------------------------------------------------

    async def volumes(self, name: str) -> list[str]:
        """Names of the volumes in a drive's store. Raises `Unavailable` if there is none now, which `open` explains."""
        try:
            lvols = await self._rpc.call("bdev_lvol_get_lvols", {"lvs_name": self.drives[name].lvs})
        except NotFound as error:
            text = f"the target does not have the store of {name}: it was started anew, or the drive is gone"
            raise Unavailable(text, field="target") from error
        return [one["name"] for one in lvols]

    async def create(self, name: str, volume: str, size_bytes: int) -> None:
        """A thin volume of that size, or find that there is one."""
        if volume in await self.volumes(name):
            return
        values = {
            "lvol_name": volume,
            "size_in_mib": size_bytes >> 20,
            "thin_provision": True,
            "clear_method": "write_zeroes",
            "lvs_name": self.drives[name].lvs,
        }
        await self._rpc.call("bdev_lvol_create", values)

    async def delete(self, name: str, volume: str) -> None:
        """Take a volume away, its clusters zeroed; one that is gone is no error."""
        if volume in await self.volumes(name):
            path = f"{self.drives[name].lvs}/{volume}"
            await self._rpc.call("bdev_lvol_delete", {"name": path}, timeout_s=_CREATE_S)

    async def aliases(self) -> dict[str, str]:
        """Names that bdevs of the node's volumes have (they are UUIDs) to those that we give them."""
        found = await self._rpc.call("bdev_get_bdevs")
        return {
            one["name"]: alias
            for one in found
            if "lvol" in one["driver_specific"]
            for alias in one["aliases"]
            if self.store_of(alias) is not None
        }

    # --- flush --------------------------------------------------------------------------------------------------------

    def flush(self, drive: StoreDrive) -> Barrier:
        """Make stable what was written, data and the store's own tables, where that can be done at all.

        A file or block device is flushed by the kernel: the store has written what a write changed in its tables before
        it says that the write is done, so that one flush is for both. Blocks. Raises `TargetFailed`.
        """
        if drive.kind in ("aio", "uring"):
            with translated(f"drive {drive.where}"):
                handle = os.open(drive.where, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(handle)
                finally:
                    os.close(handle)
            return Barrier.FLUSHED
        return Barrier.FLUSHED if drive.cached is False else Barrier.UNKNOWN

    async def look_for_cache(self, drive: StoreDrive) -> None:
        """Ask an NVMe drive whether it has a volatile write cache: without one a write that is done is stable."""
        if drive.kind != "nvme" or drive.cached is not None:
            return
        command = bytearray(64)
        command[0], command[40] = 0x06, _IDENTIFY_CONTROLLER  # Identify; CNS in CDW10
        found = await self._rpc.call(
            "bdev_nvme_send_cmd",
            {
                "name": f"{self._prefix}{drive.name}",
                "cmd_type": "admin",
                "data_direction": "c2h",
                "cmdbuf": base64.urlsafe_b64encode(command).decode(),
                "data_len": 4096,
            },
        )
        try:
            data = base64.urlsafe_b64decode(found["data"])
            drive.cached = bool(data[_VWC_AT] & 1)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"bdev_nvme_send_cmd: {error!r} in the answer") from error
