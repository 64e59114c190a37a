"""Space of a node: drives, the volumes on them, the regions those claimed, and the extents inside.

========= ============================================== ===========================================================
region    moved by                                        on disk
========= ============================================== ===========================================================
free      —                                               no record, a hole
claiming  `Space.claim`                                   record durable, then prepared: reserved and reading zeros
claimed   `Space.claim`                                   record, space reserved
releasing `Space.release`, only of an empty region        deallocated, then the record deleted
========= ============================================== ===========================================================

A stop in between leaves a record without blocks, and a region without blocks is released at the next start. Capacity
is counted in regions: what is claimed is never more than a drive's capacity.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.appliance.dataplane.extents import ExtentMap, Region
from forebay.appliance.dataplane.interface import Target, VolumeSpec
from forebay.appliance.namespace.desired_state import Volume
from forebay.appliance.namespace.quarantine import SHARE, Quarantine, Quarantined
from forebay.appliance.namespace.reserve import Reserve
from forebay.appliance.namespace.store import Op, Store
from forebay.crashpoints import crash_point
from forebay.errors import ForebayError, MetadataCorrupt, NoSpace, TargetFailed
from forebay.ids import LBA_BYTES, Extent, VolumeId

__all__ = ["Drive", "DriveState", "Space"]

_log = logging.getLogger(__name__)

_REGION_KEY = struct.Struct(">II")
_REGION_VALUE = struct.Struct(">I")


class DriveState(StrEnum):
    """What can be done on a drive; see `drives`."""

    SERVING = "serving"
    READ_ONLY = "read_only"
    AWAY = "away"


@dataclass(slots=True)
class Drive:
    """A drive's share of the node. ``full`` is set when its file system had less room than its capacity says.

    ``reason`` says why it does not serve. One that is ``doubted`` gets a closer look.
    """

    name: str
    path: str
    capacity_regions: int
    claimed_regions: int = 0
    full: bool = False
    state: DriveState = DriveState.SERVING
    reason: str = ""
    doubted: bool = False

    @property
    def writable(self) -> bool:
        return self.state is DriveState.SERVING

    @property
    def free_regions(self) -> int:
        return 0 if self.full or not self.writable else max(0, self.capacity_regions - self.claimed_regions)

    def failed(self, error: ForebayError) -> None:
        """Something could not be done there: nothing new is written until a closer look says that it can be."""
        if self.writable:
            self.state, self.reason = DriveState.READ_ONLY, error.message
            _log.error("drive %s takes no more writes: %s", self.name, error)


class Space:
    """The node's space. One event loop owns it; claims and releases are serialised."""

    def __init__(
        self,
        store: Store,
        target: Target,
        drives: Iterable[Drive],
        region_bytes: int,
        reserve: Reserve | None = None,
    ) -> None:
        self._store = store
        self._target = target
        self._reserve = reserve or Reserve()
        self.drives = {drive.name: drive for drive in drives}
        self.region_bytes = region_bytes
        self.volumes: dict[VolumeId, Volume] = {}
        self.specs: dict[VolumeId, VolumeSpec] = {}
        """Of the volumes that the target should serve: not of those on a drive that is away, nor of lost ones."""
        self.lost: dict[VolumeId, str] = {}
        """Volumes that cannot be served though their drives are there, and why; see `NodeDrives.give_up`."""
        self.away: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """Volumes that nobody can read, and"""
        self.unwritable: npt.NDArray[np.uint32] = self.away
        """those where nothing new can be written."""
        self.maps: dict[VolumeId, ExtentMap] = {}
        self.quarantine = Quarantine(store)
        self._changing = asyncio.Lock()
        self._scoped: Counter[tuple[int, int]] = Counter()

    # ------------------------------------------------------------------------------------------------ volumes

    def add_volume(self, volume: Volume, spec: VolumeSpec | None) -> None:
        """Take a volume into account, with the regions that metadata says it claimed; None if its drive is away.

        Raises `MetadataCorrupt`.
        """
        self.volumes[volume.id] = volume
        if spec is not None:
            self.specs[volume.id] = spec
        extents = self.maps[volume.id] = ExtentMap(volume.id, self.region_bytes, volume.regions)
        numbers, sizes = self._claimed(volume)
        extents.claim_many(numbers, sizes)
        self.drives[volume.drive].claimed_regions += len(numbers)
        self._adopt_quarantined(extents)

    def _claimed(self, volume: Volume) -> tuple[list[int], list[int]]:
        """Numbers and slot sizes of the regions that metadata says a volume claimed; looked at together, being many."""
        claimed = list(self._store.scan("regions", prefix=volume.id.to_bytes(4, "big")))
        if {(len(key), len(value)) for key, value in claimed} - {(_REGION_KEY.size, _REGION_VALUE.size)}:
            raise MetadataCorrupt(f"a region of volume {volume.id} does not decode", field="regions")
        numbers = np.frombuffer(b"".join([key for key, _ in claimed]), ">u4")[1::2]
        sizes = np.frombuffer(b"".join([value for _, value in claimed]), ">u4")
        wrong = (numbers < 1) | (numbers > volume.regions)
        wrong |= (sizes < 1) | (sizes > self.region_bytes) | (sizes % LBA_BYTES != 0)
        if wrong.any():
            raise MetadataCorrupt(f"region {numbers[wrong][0]} of volume {volume.id} is out of range", field="regions")
        return numbers.tolist(), sizes.tolist()

    def _adopt_quarantined(self, extents: ExtentMap) -> None:
        for entry in self.quarantine.of(extents.volume):
            if not extents.adopt(entry.extent):
                raise MetadataCorrupt(f"{entry.extent} is in quarantine and is no free slot", field="quarantine")

    async def drop_volume(self, volume: VolumeId) -> None:
        """Forget a volume whose file is gone, and its regions."""
        async with self._changing:  # a claim under way ends first, and its record is seen here
            ops = self._store.deletes("regions", volume.to_bytes(4, "big"))
            await self._store.write(ops + self.quarantine.drop(volume))
            extents, gone = self.maps.pop(volume), self.volumes.pop(volume)
            self.specs.pop(volume, None)
            self.lost.pop(volume, None)
            for owner in [o for o in self._scoped if o[0] == gone.namespace and not self.volumes_of(o[0])]:
                del self._scoped[owner]
            drive = self.drives[gone.drive]
            drive.claimed_regions -= len(extents.claimed)
            drive.full = False

    def note_away(self) -> None:
        """A drive's state has changed, or `lost`: which volumes can be read and written follows."""
        drives, volumes = self.drives, self.volumes.values()
        away = [v.id for v in volumes if drives[v.drive].state is DriveState.AWAY or v.id in self.lost]
        self.away = np.array(sorted(away), np.uint32)
        self.unwritable = np.array(sorted(v.id for v in volumes if not self._takes(v)), np.uint32)

    def _takes(self, volume: Volume) -> bool:
        return self.drives[volume.drive].writable and volume.id not in self.lost

    def lost_on(self, drive: str) -> str:
        """The volumes of a drive that cannot be served though it is there, and why; empty without any."""
        lost = (f"volume {v}: {reason}" for v, reason in self.lost.items() if self.volumes[v].drive == drive)
        return "; ".join(lost)

    def drive_failed(self, volume: VolumeId, error: ForebayError) -> None:
        """`Drive.failed` for the drive of a volume, if that is still there."""
        if (found := self.volumes.get(volume)) is not None:
            self.drives[found.drive].failed(error)
            self.note_away()

    def in_doubt(self, volume: VolumeId) -> bool:
        """Whether it takes a closer look to know if the drive of a volume can be written."""
        found = self.volumes.get(volume)
        return found is not None and self.drives[found.drive].doubted and self.drives[found.drive].writable

    def doubt(self, volume: VolumeId) -> None:
        """Have a closer look at the drive of a volume."""
        if (found := self.volumes.get(volume)) is not None:
            self.drives[found.drive].doubted = True

    def is_writable(self, volume: VolumeId) -> bool:
        """Whether new blocks can be written to a volume."""
        found = self.volumes.get(volume)
        return found is not None and self._takes(found)

    def is_away(self, volumes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Which of these volumes nobody can read."""
        return np.isin(volumes, self.away)

    def _writable(self, namespace: int) -> list[Volume]:
        """A namespace's volumes that take writes."""
        return [v for v in self.volumes_of(namespace) if self._takes(v)]

    def volumes_of(self, namespace: int) -> list[Volume]:
        """A namespace's volumes."""
        return [v for v in self.volumes.values() if v.namespace == namespace]

    # ------------------------------------------------------------------------------------------------ extents

    def used_bytes(self, namespace: int) -> int:
        """Bytes of extents that have an owner: pending, visible or waiting for leases to end."""
        return sum(self.maps[v.id].used_bytes for v in self.volumes_of(namespace))

    def reserved_bytes(self, namespace: int) -> int:
        """Bytes of regions that a namespace holds."""
        return sum(len(self.maps[v.id].claimed) for v in self.volumes_of(namespace)) * self.region_bytes

    def tightest_slot(self, namespace: int) -> int | None:
        """The slot size of a namespace's regions with the smallest share of free slots, or None if it has none."""
        totals: dict[int, list[int]] = {}
        for volume in self._writable(namespace):
            for region in self.maps[volume.id].claimed.values():
                total = totals.setdefault(region.slot_bytes, [0, 0])
                total[0] += region.free_slots
                total[1] += region.slots
        return min(totals, key=lambda s: totals[s][0] / totals[s][1], default=None)

    def scope_bytes(self, namespace: int, scope: int) -> int:
        """Bytes of extents that blocks of one scope own, counted as in `used_bytes`."""
        return self._scoped[namespace, scope]

    def roomier_slot(self, namespace: int, slot_bytes: int, most_bytes: int) -> int | None:
        """The smallest slot size above ``slot_bytes``, up to ``most_bytes``, that has free slots."""
        sizes = (s for v in self._writable(namespace) for s in self.maps[v.id].slot_sizes())
        return min((s for s in sizes if slot_bytes < s <= most_bytes), default=None)

    def scopes_of(self, namespace: int) -> dict[int, int]:
        """Bytes in use by each scope of a namespace that uses any."""
        return {scope: used for (owner, scope), used in self._scoped.items() if owner == namespace and used}

    def take(self, namespace: int, scope: int, slot_bytes: int, want: int) -> list[Extent]:
        """Up to ``want`` free extents of claimed regions, consecutive where possible, now owned by the scope."""
        taken: list[Extent] = []
        maps = [self.maps[v.id] for v in self._writable(namespace)]
        while len(taken) < want:
            extents = max(maps, key=lambda m: m.free_slots(slot_bytes), default=None)
            if extents is None or not extents.free_slots(slot_bytes):
                break
            taken += extents.take(slot_bytes, want - len(taken))
        self._scoped[namespace, scope] += slot_bytes * len(taken)
        return taken

    def give(self, extent: Extent, scope: int) -> None:
        """Take an extent back from its scope; all that design §6.4 asks has happened.

        An extent of a volume that is gone went with it, and one in quarantine stays taken.
        """
        if extent.volume not in self.maps:
            return
        if not self.quarantine.settle(extent):
            self.maps[extent.volume].give(extent)
        self._scoped[self.volumes[extent.volume].namespace, scope] -= extent.length_bytes

    def to_quarantine(self, extents: Iterable[Extent], reason: str, since_ms: int) -> list[Quarantined]:
        """Entries for extents that nobody should get any more, as many as their volumes may lose."""
        entries: list[Quarantined] = []
        left_bytes: dict[VolumeId, int] = {}
        for extent in extents:
            left = left_bytes.setdefault(extent.volume, self._quarantine_left_bytes(extent.volume))
            if extent.length_bytes <= left:
                left_bytes[extent.volume] = left - extent.length_bytes
                entries.append(Quarantined(extent, reason, since_ms))
        return entries

    def _quarantine_left_bytes(self, volume: VolumeId) -> int:
        """How much more of a volume may be kept from use; 0 for one that is gone."""
        found = self.volumes.get(volume)
        return found.regions * self.region_bytes // SHARE - self.quarantine.bytes_of(volume) if found else 0

    def quarantined_bytes(self, drive: str) -> int:
        """Bytes of a drive's extents that nobody gets."""
        return sum(self.quarantine.bytes_of(v.id) for v in self.volumes.values() if v.drive == drive)

    async def release_quarantined(self, volume: int, offset_bytes: int) -> Quarantined:
        """Let an extent be used again. Raises `NotFound`, or `Busy` while it is leased."""
        entry = self.quarantine.take(volume, offset_bytes)
        try:
            await self._store.write([self.quarantine.remove(entry)])
        except BaseException:
            self.quarantine.restore(entry)
            raise
        if entry.extent.volume in self.maps:
            self.maps[entry.extent.volume].give(entry.extent)
        return entry

    def disown_all(self) -> None:
        """Mark every extent of every claimed region as free, but those in quarantine."""
        self._scoped.clear()
        for extents in self.maps.values():
            extents.disown_all()
            self._adopt_quarantined(extents)

    def add_scoped(self, used_bytes: Mapping[tuple[int, int], int]) -> None:
        """Bytes of extents that blocks of a namespace's scope were found to own."""
        self._scoped.update(used_bytes)

    # ------------------------------------------------------------------------------------------------ regions

    async def claim(self, namespace: int, slot_bytes: int) -> bool:
        """Claim one more region for a namespace, on its drive with most room; False if no drive has any."""
        async with self._changing:
            mine = [v for v in self._writable(namespace) if self.drives[v.drive].free_regions]
            for volume in sorted(mine, key=lambda v: -self.drives[v.drive].free_regions):
                extents, drive = self.maps[volume.id], self.drives[volume.drive]
                number = extents.unclaimed()
                if number is None or not self._reserve.allows(Path(drive.path), self.region_bytes):
                    continue
                key = _REGION_KEY.pack(volume.id, number)
                drive.claimed_regions += 1
                try:
                    await self._store.write([Op("regions", key, _REGION_VALUE.pack(slot_bytes))])
                    crash_point("region.after_record_before_prepare")
                    prepared = await self._prepare(volume, number)
                    if not prepared:
                        await self._store.write([Op("regions", key, None)])
                except BaseException:
                    # the record may be there: a claimed region without blocks is released at the next start
                    drive.claimed_regions -= 1
                    raise
                if prepared:
                    crash_point("region.after_prepare")
                    extents.claim(number, slot_bytes)
                    return True
                drive.claimed_regions -= 1
            return False

    async def _prepare(self, volume: Volume, number: int) -> bool:
        """Have the target prepare a region; False if the drive is full or failed, or was lost meanwhile."""
        spec = self.specs.get(volume.id)
        if spec is None:
            return False
        try:
            await self._target.prepare_region(spec, number * self.region_bytes, self.region_bytes)
        except NoSpace:
            self.drives[volume.drive].full = True
            return False
        except TargetFailed as error:
            self.drive_failed(volume.id, error)
            return False
        return True

    async def reclaim(self, namespace: int) -> bool:
        """Release one empty region of any volume that shares a drive with the namespace; False if there is none."""
        drives = {v.drive for v in self._writable(namespace)}
        for volume in list(self.volumes.values()):
            if volume.drive in drives:
                region = next(self.maps[volume.id].empty_regions(), None)
                if region is not None and await self.release(region):
                    return True
        return False

    async def release(self, region: Region) -> bool:
        """Give an empty region back to its drive; False if that failed, or cannot be done at present."""
        async with self._changing:
            extents = self.maps.get(region.volume)
            if extents is None or extents.claimed.get(region.number) is not region or not region.empty:
                return True  # somebody was faster
            drive, spec = self.drives[self.volumes[region.volume].drive], self.specs.get(region.volume)
            if spec is None or not self.is_writable(region.volume):
                return False
            # should the target not answer, the region stays claimed and closed, and a later call releases it
            extents.close(region.number)
            crash_point("region.before_release")
            try:
                await self._target.release_region(spec, region.offset_bytes, self.region_bytes)
            except TargetFailed as error:
                self.drive_failed(region.volume, error)
                return False
            crash_point("region.after_release_before_record")
            await self._store.write([Op("regions", _REGION_KEY.pack(region.volume, region.number), None)])
            extents.unclaim(region.number)
            drive.claimed_regions -= 1
            drive.full = False
            return True
