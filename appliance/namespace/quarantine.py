"""Extents that nobody gets any more, because a drive did not give back what was written there.

========= ================================================ =========================================================
extent    moved by                                          what ends it
========= ================================================ =========================================================
visible   `Retirement.retire` with a reason to keep it      the batch that deletes its record also quarantines it
held      the last lease on it has ended (`settle`)         an administrator's release, or the end of its volume
========= ================================================ =========================================================

Each has a record ``quarantine/<volume>/<offset>`` in the ``state`` family, so it survives restarts; the free map takes
them as owned. A volume holds no more than a small share of itself: a drive with more bad places is to be replaced, and
a writer who commits checksums that are not those of its bytes must not be able to use up a node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import cbor2

from forebay.appliance.namespace.cbor_map import load_map
from forebay.appliance.namespace.store import Op, Store
from forebay.errors import Busy, MetadataCorrupt, NotFound
from forebay.ids import Extent, VolumeId

__all__ = ["SHARE", "Quarantine", "Quarantined"]

_PREFIX = b"quarantine/"
SHARE = 64
"""At most one part in so many of a volume."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One extent. ``reason``: ``checksum`` (other bytes than were stored), ``read_error`` or ``write_error``."""

    extent: Extent
    reason: str
    since_ms: int

    @property
    def place(self) -> tuple[int, int]:
        return self.extent.volume, self.extent.offset_bytes


class Quarantine:
    """All of a node's. Raises `MetadataCorrupt` for a record that does not decode."""

    def __init__(self, store: Store) -> None:
        self._entries: dict[tuple[int, int], Quarantined] = {}
        self._leased: set[tuple[int, int]] = set()
        for key, value in store.scan("state", prefix=_PREFIX):
            raw = load_map(value, f"state record {key!r}")
            try:
                volume, offset, length = int(raw["volume"]), int(raw["offset"]), int(raw["length"])
                entry = Quarantined(Extent(VolumeId(volume), offset, length), str(raw["reason"]), int(raw["since"]))
            except (KeyError, TypeError, ValueError) as e:
                raise MetadataCorrupt(f"state record {key!r} does not decode: {e!r}", field="state") from e
            self._entries[entry.place] = entry

    def __iter__(self) -> Iterator[Quarantined]:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.place))

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, volume: int) -> list[Quarantined]:
        """Those of one volume."""
        return [entry for entry in self._entries.values() if entry.extent.volume == volume]

    def strays(self, volumes: Collection[int]) -> list[Op]:
        """Forget those of volumes that are not among these; what to write."""
        gone = {entry.extent.volume for entry in self._entries.values()} - set(volumes)
        return [op for volume in gone for op in self.drop(volume)]

    def bytes_of(self, volume: int) -> int:
        """Bytes that one volume holds."""
        return sum(entry.extent.length_bytes for entry in self.of(volume))

    def put(self, entry: Quarantined) -> Op:
        """What to write in the batch that takes the extent from its block."""
        extent = entry.extent
        value = {
            "v": 1,
            "volume": int(extent.volume),
            "offset": extent.offset_bytes,
            "length": extent.length_bytes,
            "reason": entry.reason,
            "since": entry.since_ms,
        }
        return Op("state", _key(entry.place), cbor2.dumps(value, canonical=True))

    def hold(self, entry: Quarantined) -> None:
        """That batch is durable; the extent may still be leased until `settle`."""
        self._entries[entry.place] = entry
        self._leased.add(entry.place)

    def settle(self, extent: Extent) -> bool:
        """Whether an extent whose last lease ended stays here instead of being free."""
        place = (extent.volume, extent.offset_bytes)
        self._leased.discard(place)
        return place in self._entries

    def leased(self, entry: Quarantined) -> bool:
        """Whether readers may still be at it."""
        return entry.place in self._leased

    def take(self, volume: int, offset_bytes: int) -> Quarantined:
        """Take one out, to be released. Raises `NotFound`, or `Busy` while readers may be at it."""
        entry = self._entries.get((volume, offset_bytes))
        if entry is None:
            raise NotFound(f"no extent of volume {volume} at {offset_bytes} is in quarantine", field="offset_bytes")
        if self.leased(entry):
            raise Busy("it is still being read: its leases have to end first", retry_after_ms=1000)
        return self._entries.pop(entry.place)

    def restore(self, entry: Quarantined) -> None:
        """Put one back whose release could not be written."""
        self._entries[entry.place] = entry

    def drop(self, volume: int) -> list[Op]:
        """Forget those of a volume that goes away; what to write."""
        gone = self.of(volume)
        for entry in gone:
            del self._entries[entry.place]
            self._leased.discard(entry.place)
        return [Op("state", _key(entry.place), None) for entry in gone]

    @staticmethod
    def remove(entry: Quarantined) -> Op:
        """What to write for a release."""
        return Op("state", _key(entry.place), None)


def _key(place: tuple[int, int]) -> bytes:
    return _PREFIX + b"%d/%d" % place
