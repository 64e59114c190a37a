"""The extent allocator: slots of one size inside regions, so that nothing ever fragments.

A volume's address space is cut into regions; a claimed region is a slab of equal slots. Blocks of a grid schema get
slots of exactly their size, opaque values one of 16 classes a doubling (at most 6 % lost). A batch is given consecutive
slots where a run exists, so that consecutive keys can be read by one command. The map is derived: `ExtentMap.adopt`
marks what metadata says is in use, `Adoption` for millions of extents at once. Two owners of one slot is a programming
error and asserts with both sides named.

Nothing here waits or writes: claiming and releasing regions (durable record, zeroing) is the namespace engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forebay.ids import LBA_BYTES, Extent, VolumeId

__all__ = ["Adoption", "ExtentMap", "Region", "slot_class_bytes"]

_STEPS_LOG2 = 4  # classes a doubling: 16


def slot_class_bytes(length_bytes: int) -> int:
    """Slot size for a value of any size: whole LBAs, rounded up to one of 16 sizes a doubling."""
    blocks = -(-length_bytes // LBA_BYTES)
    shift = max(0, blocks.bit_length() - _STEPS_LOG2 - 1)
    return (-(-blocks >> shift) << shift) * LBA_BYTES


@dataclass(slots=True)
class Region:
    """A claimed region: ``slots`` of ``slot_bytes`` from ``offset_bytes`` of its volume."""

    volume: VolumeId
    number: int
    offset_bytes: int
    slot_bytes: int
    slots: int
    free: npt.NDArray[np.bool_] = field(repr=False)
    free_slots: int

    @property
    def empty(self) -> bool:
        return self.free_slots == self.slots

    def take(self, want: int) -> list[int]:
        """Up to ``want`` slots: the first run that holds them all, else the longest runs."""
        if want == 1 and self.free_slots:
            only = int(self.free.argmax())  # the first run, without looking for its end
            self.free[only] = False
            self.free_slots -= 1
            return [only]
        edges = np.flatnonzero(np.diff(self.free.view(np.int8), prepend=0, append=0))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        fits = np.flatnonzero(lengths >= want)
        order = fits[:1] if fits.size else np.argsort(-lengths, kind="stable")
        taken: list[int] = []
        for run in order.tolist():
            count = min(want - len(taken), int(lengths[run]))
            taken += range(int(starts[run]), int(starts[run]) + count)
            if len(taken) == want:
                break
        self.free[taken] = False
        self.free_slots -= len(taken)
        return taken

    def extent(self, slot: int) -> Extent:
        return Extent(self.volume, self.offset_bytes + slot * self.slot_bytes, self.slot_bytes)


class ExtentMap:
    """Regions and free slots of one volume.

    ``regions`` is how many the volume's address space has, numbered from 1 (region 0 holds the label).
    """

    def __init__(self, volume: VolumeId, region_bytes: int, regions: int) -> None:
        self.volume = volume
        self.region_bytes = region_bytes
        self.regions = regions
        self.claimed: dict[int, Region] = {}
        self.used_bytes = 0
        self._open: dict[int, dict[int, Region]] = {}  # slot size -> regions with free slots, by number

    def unclaimed(self) -> int | None:
        """The lowest region number that is not claimed, or None."""
        return next((n for n in range(1, self.regions + 1) if n not in self.claimed), None)

    def claim(self, number: int, slot_bytes: int) -> Region:
        """Turn a region into a slab of free slots."""
        self.claim_many([number], [slot_bytes])
        return self.claimed[number]

    def claim_many(self, numbers: Sequence[int], slot_bytes: Sequence[int]) -> None:
        """`claim` for many regions, each with its slot size."""
        counts = [self.region_bytes // size for size in slot_bytes]
        free, at = np.ones(sum(counts), np.bool_), 0
        for number, size, slots in zip(numbers, slot_bytes, counts, strict=True):
            assert number not in self.claimed, f"volume {self.volume} region {number} is claimed already"
            mine = free[at : at + slots]
            region = Region(self.volume, number, number * self.region_bytes, size, slots, mine, slots)
            self.claimed[number] = self._open.setdefault(size, {})[number] = region
            at += slots

    def close(self, number: int) -> None:
        """Give out nothing more of an empty region, which is about to be released."""
        region = self.claimed[number]
        assert region.empty, f"volume {self.volume} region {number} still has {region.slots - region.free_slots} owners"
        self._open[region.slot_bytes].pop(number, None)

    def unclaim(self, number: int) -> None:
        """Forget an empty region."""
        self.close(number)
        del self.claimed[number]

    def free_slots(self, slot_bytes: int) -> int:
        """Free slots of that size."""
        return sum(region.free_slots for region in self._open.get(slot_bytes, {}).values())

    def slot_sizes(self) -> list[int]:
        """Slot sizes that have free slots."""
        return [slot_bytes for slot_bytes, regions in self._open.items() if regions]

    def take(self, slot_bytes: int, want: int) -> list[Extent]:
        """Up to ``want`` extents, consecutive where possible."""
        taken: list[Extent] = []
        regions = self._open.get(slot_bytes, {})
        while len(taken) < want and regions:
            # the fullest region that still holds the whole rest keeps runs together and other regions empty
            rest = want - len(taken)
            whole = [r for r in regions.values() if r.free_slots >= rest]
            region = min(whole, key=lambda r: r.free_slots) if whole else max(regions.values(), key=_free_slots)
            taken += [region.extent(slot) for slot in region.take(rest)]
            if not region.free_slots:
                del regions[region.number]
        self.used_bytes += len(taken) * slot_bytes
        return taken

    def give(self, extent: Extent) -> None:
        """Take an extent back; all of design §6.4 has been met."""
        region, slot = self._locate(extent)
        assert not region.free[slot], f"{extent} is given back but has no owner"
        region.free[slot] = True
        region.free_slots += 1
        self._open[region.slot_bytes][region.number] = region
        self.used_bytes -= region.slot_bytes

    def adopt(self, extent: Extent) -> bool:
        """Mark an extent that metadata owns as used; False if it cannot be: no such slot, or owned already."""
        region = self.claimed.get(extent.offset_bytes // self.region_bytes)
        if region is None or extent.length_bytes != region.slot_bytes:
            return False
        slot, odd = divmod(extent.offset_bytes - region.offset_bytes, region.slot_bytes)
        if odd or slot >= region.slots or not region.free[slot]:
            return False
        region.free[slot] = False
        region.free_slots -= 1
        if not region.free_slots:
            del self._open[region.slot_bytes][region.number]
        self.used_bytes += region.slot_bytes
        return True

    def settle(self, free: npt.NDArray[np.bool_], counts: Sequence[int]) -> None:
        """Take over which slots are free, of all claimed regions one after another, and how many of each are."""
        at = 0
        self.used_bytes = 0
        for region, count in zip(self.claimed.values(), counts, strict=True):
            region.free = free[at : at + region.slots]
            region.free_slots = count
            at += region.slots
            self.used_bytes += (region.slots - count) * region.slot_bytes
            if not count:
                self._open[region.slot_bytes].pop(region.number, None)

    def disown_all(self) -> None:
        """Mark every slot as free."""
        for region in self.claimed.values():
            region.free[:] = True
            region.free_slots = region.slots
            self._open[region.slot_bytes][region.number] = region
        self.used_bytes = 0

    def empty_regions(self) -> Iterator[Region]:
        """Claimed regions without owners."""
        return (region for region in self.claimed.values() if region.empty)

    def _locate(self, extent: Extent) -> tuple[Region, int]:
        region = self.claimed[extent.offset_bytes // self.region_bytes]
        slot, odd = divmod(extent.offset_bytes - region.offset_bytes, region.slot_bytes)
        assert not odd, f"{extent} is not a slot of {region}"
        return region, slot


class Adoption:
    """`ExtentMap.adopt` for as many extents as a node has, of several maps in which nothing has changed meanwhile.

    The maps learn of it by `finish`.
    """

    def __init__(self, maps: Sequence[ExtentMap], region_bytes: int) -> None:
        self._maps = sorted(maps, key=lambda m: m.volume)
        self._region_bytes = np.uint64(region_bytes)
        self._volumes = np.array([m.volume for m in self._maps], np.uint32)
        # regions are claimed from the lowest number on: tables up to the highest are hardly longer than what is there
        self._limits = np.array([max(m.claimed, default=0) + 1 for m in self._maps], np.uint64)
        self._bases = np.concatenate([np.zeros(1, np.uint64), self._limits.cumsum()[:-1]]) if maps else self._limits
        regions = [region for m in self._maps for region in m.claimed.values()]
        self._places = np.array([i for i, m in enumerate(self._maps) for _ in m.claimed], np.int64)
        at = self._bases[self._places] + np.array([region.number for region in regions], np.uint64)
        size = int(self._limits.sum())
        self._slot_bytes = np.zeros(size, np.uint64)
        self._slot_bytes[at] = [region.slot_bytes for region in regions]
        slots = np.array([region.slots for region in regions], np.int64)
        self._slots = np.zeros(size, np.uint64)
        self._slots[at] = slots
        self._starts = slots.cumsum() - slots
        self._firsts = np.zeros(size, np.uint64)
        self._firsts[at] = self._starts
        self._free = np.concatenate([region.free for region in regions]) if regions else np.empty(0, np.bool_)
        self._left = int(np.count_nonzero(self._free))

    def maps_of(self, volumes: npt.NDArray[np.unsignedinteger]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Which map, in the order of their volumes, each extent is of; and whether it is of one at all."""
        if not self._volumes.size:
            return np.zeros(len(volumes), np.int64), np.zeros(len(volumes), bool)
        found = np.minimum(np.searchsorted(self._volumes, volumes), len(self._volumes) - 1)
        return found, self._volumes.take(found) == volumes

    def take(
        self,
        maps: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.unsignedinteger],
        lengths: npt.NDArray[np.unsignedinteger],
        wanted: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Give slots to the extents that are ``wanted``, of ``maps`` as `maps_of` says; which of them got one.

        None is given to an extent that is no slot, nor to one that another has: the first of them keeps it.
        """
        if not wanted.any():
            return np.zeros(len(offsets), bool)
        numbers = offsets // self._region_bytes
        fits = wanted & (numbers < self._limits.take(maps))
        regions = np.where(fits, self._bases.take(maps) + numbers, 0).astype(np.int64)
        sizes = self._slot_bytes.take(regions)
        fits &= (sizes == lengths) & (sizes > 0)
        slots, odd = np.divmod(offsets - numbers * self._region_bytes, np.maximum(sizes, 1))
        fits &= (odd == 0) & (slots < self._slots.take(regions))
        places = np.where(fits, self._firsts.take(regions) + slots, 0).astype(np.int64)
        if fits.any():
            fits &= self._free.take(places)
        taken = places[fits]
        self._free[taken] = False
        left = int(np.count_nonzero(self._free))
        if self._left - left != len(taken):  # two of them have one slot
            first = np.zeros(len(taken), bool)
            first[np.unique(taken, return_index=True)[1]] = True
            fits[np.flatnonzero(fits)[~first]] = False
        self._left = left
        return fits

    def finish(self) -> None:
        """Let the maps know."""
        if not self._free.size:
            return
        counts = np.add.reduceat(self._free.view(np.uint8), self._starts, dtype=np.int64)
        at, slot = 0, 0
        for extents in self._maps:
            stop = at + len(extents.claimed)
            end = slot + sum(region.slots for region in extents.claimed.values())
            extents.settle(self._free[slot:end], counts[at:stop].tolist())
            at, slot = stop, end


def _free_slots(region: Region) -> int:
    return region.free_slots
