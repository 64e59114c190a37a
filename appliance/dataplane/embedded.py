"""Driver of the embedded target: SPDK's RPC methods, and the private ``forebay_*`` ones for what SPDK lacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar
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
from forebay.appliance.dataplane.nvmf_target import Bdev, NvmfTarget
from forebay.appliance.dataplane.subsystems import Subsystems, TransportLimits
from forebay.errors import (
    ForebayError,
    NotFound,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
    VolumeMismatch,
)
from forebay.ids import LBA_BYTES, GrantId, HostIdentity, VolumeId

__all__ = ["EmbeddedTarget"]

_T = TypeVar("_T")

BATCH = 4096
"""Grants, ids or ranges in one request at most, so that no message grows without bound."""


class EmbeddedTarget(NvmfTarget):
    """The embedded target behind a control socket."""

    def __init__(
        self,
        rpc: JsonRpcClient,
        *,
        node: str,
        address: str = "127.0.0.1",
        port: int = 0,
        limits: TransportLimits | None = None,
        keys: HostKeyFiles | None = None,
    ) -> None:
        subsystems = Subsystems(rpc, node, address=address, port=port, limits=limits)
        super().__init__(rpc, subsystems, HostKeys(rpc, node, keys))
        self._incarnation = 0
        self._number = 0
        self._capabilities: Capabilities | None = None  # of the process that answers now

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

    async def teardown_host(self, host: HostIdentity) -> None:
        await self._rpc.call("forebay_host_teardown", {"host_nqn": host.nqn, "host_id": host.host_id or None})

    async def teardown_all(self, incarnation: int) -> None:
        self._incarnation = incarnation
        ordered = (await self.able()).ordered
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
        if not (await self.able()).seal:  # a target that an older daemon started, and that goes on running
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

    async def _order(self) -> list[int] | None:
        """So that the target does not carry out late what we gave up, or what an earlier daemon asked for.

        None for a target that knows no order, and from a driver that never took the target over.
        """
        if not self._incarnation or not (await self.able()).ordered:
            return None
        self._number += 1
        return [self._incarnation, self._number]

    async def able(self) -> Capabilities:
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
        found = await Iostat.ask(self._rpc)
        return found.total(found.bdevs)

    async def volume_errors(self) -> dict[VolumeId, VolumeErrors]:
        found = await Iostat.ask(self._rpc)
        errors = {volume: found.errors(spec.bdev) for volume, spec in self._volumes.items() if spec.bdev in found.bdevs}
        return {volume: VolumeErrors(one.get("failed", 0), one.get("no_space", 0)) for volume, one in errors.items()}

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

    # --- of `NvmfTarget` ----------------------------------------------------------------------------------------------

    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        self._capabilities = None  # a target that has to be told everything may be another one
        return await super().reconcile(volumes, hosts)

    async def _bdevs(self) -> dict[str, Bdev]:
        found = await self._rpc.call("bdev_get_bdevs")
        return {one["name"]: _bdev(one) for one in found}

    async def _add_bdev(self, spec: VolumeSpec) -> None:
        try:
            known = _bdev((await self._rpc.call("bdev_get_bdevs", {"name": spec.bdev}))[0])
        except NotFound:
            uuid = str(UUID(spec.nguid))
            values = {"name": spec.bdev, "filename": spec.path, "block_size": LBA_BYTES, "uuid": uuid}
            await self._rpc.call("bdev_aio_create", values)
            known = Bdev(spec.path, "fenced")
        if known.path != spec.path:
            raise VolumeMismatch(f"the target serves {known.path} as {spec.bdev}, not {spec.path}", field="path")
        if known.mode != self._mode(spec):
            await self._rpc.call("forebay_bdev_set_mode", {"name": spec.bdev, "mode": self._mode(spec)})

    async def _delete_bdev(self, name: str) -> None:
        with suppress(NotFound):
            await self._rpc.call("bdev_aio_delete", {"name": name})

    async def _shut_out(self, nqn: str, name: str, *, allowed: bool) -> None:
        # First the right to come back, then the connections: in the other order it could return in between.
        if allowed:
            await self._rpc.call("nvmf_subsystem_remove_host", {"nqn": nqn, "host": name})
        await self._rpc.call("forebay_host_teardown", {"host_nqn": name})

    def _mode(self, spec: VolumeSpec) -> str:
        return "fenced" if spec.fenced else "raw"


def _bdev(found: dict[str, Any]) -> Bdev:
    aio = found["driver_specific"]["aio"]
    return Bdev(aio["filename"], aio["mode"])


def _parts(items: Sequence[_T]) -> list[list[_T]]:
    return [list(items[at : at + BATCH]) for at in range(0, len(items), BATCH)]
