"""Checking a node that is stopped: what its metadata, its index checkpoint, its space and its media say of each other.

Nothing is changed. Each inconsistency comes with what the next start would do about it. What a stop at any moment may
leave behind (a creation cut short, suspects, a checkpoint without its name) is a note and no inconsistency.
"""

from __future__ import annotations

import errno
import secrets
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from forebay.appliance.dataplane.extents import ExtentMap
from forebay.appliance.dataplane.labels import LabelledVolumes, volume_size_bytes
from forebay.appliance.dataplane.target.volume import Volume as OpenVolume
from forebay.appliance.dataplane.volumes import open_drive
from forebay.appliance.namespace.changes import ChangeLog
from forebay.appliance.namespace.desired_state import DesiredState, Volume
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import Lru
from forebay.appliance.namespace.meta import NodeMeta, region_bytes_of
from forebay.appliance.namespace.quarantine import Quarantine
from forebay.appliance.namespace.records import FLUSHED, Record, owner_key
from forebay.appliance.namespace.recovery import load_index, recover
from forebay.appliance.namespace.space import Drive, Space
from forebay.appliance.namespace.store import Store
from forebay.appliance.namespace.verification import tile_ranges
from forebay.clock import SystemClock
from forebay.errors import DataDirInUse, DataDirNewer, ForebayError, MetadataCorrupt
from forebay.ids import LBA_BYTES, Extent, NamespaceId, StoredKey, VolumeId, split_stored_key
from forebay.index import BlockIndex
from forebay.schema import Schema
from forebay.volume_label import VolumeLabel

if TYPE_CHECKING:
    from forebay.appliance.dataplane.interface import Target, VolumeSpec

__all__ = ["Finding", "Fsck", "FsckReport"]

_BATCH = 1024
_REFUSES = "the next start refuses to serve"
_UNSEEN = "nothing while the index comes from its checkpoint; a start without one drops the record"
_DROPPED = "a start that rebuilds the index drops the record"
_READ = "a reader gets a miss, a scrub drops it; an unclean start verifies it first unless it was flushed"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be, or (not ``wrong``) worth a line; ``then`` is what the next start does."""

    part: str
    what: str
    then: str
    wrong: bool = True


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What was looked at, a count of each, and what was found."""

    checked: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing is inconsistent."""
        return not any(finding.wrong for finding in self.findings)


class Fsck:
    """One check of a store, the volumes of its drives (by name) and the index checkpoint at ``checkpoint``.

    ``elsewhere`` are drives that only a running target reaches: of those metadata alone are checked. Whoever calls
    holds the data directory.
    """

    def __init__(
        self,
        store: Store,
        files: Mapping[str, LabelledVolumes],
        checkpoint: Path,
        *,
        elsewhere: Collection[str] = (),
    ) -> None:
        self._store = store
        self._files = files
        self._elsewhere = frozenset(elsewhere)
        self._checkpoint = checkpoint
        self._findings: list[Finding] = []
        self._checked: Counter[str] = Counter()
        self._maps: dict[VolumeId, ExtentMap] = {}
        self._volumes: dict[VolumeId, Volume] = {}
        self._schemas: dict[bytes, Schema | None] = {}
        self._indexed = 0

    async def run(self, *, media: bool, progress: Callable[[int, int], None]) -> FsckReport:
        """Check everything; ``media``: read every tile as well, ``progress`` is told bytes read and bytes in all.

        Raises `DataDirNewer` when a newer version wrote the directory, `DataDirInUse` when a target has a volume open.
        """
        try:
            meta, state = await self._load()
        except MetadataCorrupt as error:
            self._wrong("metadata", error.message, _REFUSES)
            return self._report()
        index = _index(meta, state)
        known = {n.id for n in state.namespaces if not n.deleting}
        unfinished = [n for n in state.namespaces if n.deleting]
        for namespace in unfinished:
            self._note("metadata", f"namespace {namespace.full_name} is half created or deleted", "it is cleared away")
        self._check_volumes(meta, state, known)
        self._check_regions(meta, state)
        self._check_quarantine()
        changes = self._check_changes()
        loaded = self._load_checkpoint(meta, index, known, changes)
        sound_bytes = self._check_records(index if loaded else None, known, changes)
        if loaded and index.count != self._indexed:
            extra = index.count - self._indexed
            self._wrong(
                "checkpoint", f"{extra} blocks of the index have no record", "served until evicted or restarted"
            )
        self._check_owners({n.id for n in unfinished})
        if media:
            self._check_media(known, sound_bytes, progress)
        return self._report()

    async def repair(self) -> int:
        """Do what a start does that finds no checkpoint: records and owners that cannot stand go. How many records.

        Volumes are never touched. Raises what such a start raises.
        """
        meta, state = await self._load()
        space = self._space(meta, state)
        for volume in state.volumes:
            if volume.namespace in {n.id for n in state.namespaces if not n.deleting}:
                space.add_volume(volume, cast("VolumeSpec", None))
        self._checkpoint.unlink(missing_ok=True)
        index = _index(meta, state)
        return (await recover(self._engine(space, index, ChangeLog(self._store)), state, was_clean=True)).dropped

    # ------------------------------------------------------------------------------------------------ parts

    async def _load(self) -> tuple[NodeMeta, DesiredState]:
        # the region size is the directory's own; NodeMeta compares it with the configuration's
        meta = await NodeMeta.load(self._store, secrets.token_bytes, region_bytes_of(self._store))
        state = DesiredState(self._store)
        self._checked["namespaces"] = len(state.namespaces)
        self._checked["principals"] = len(state.principals)
        return meta, state

    def _check_volumes(self, meta: NodeMeta, state: DesiredState, known: set[int]) -> None:
        named: dict[str, set[VolumeId]] = {name: set() for name in self._files}
        for volume in state.volumes:
            self._checked["volumes"] += 1
            files = self._files.get(volume.drive)
            if files is None and volume.drive not in self._elsewhere:
                self._wrong(
                    "volumes", f"volume {volume.id} lies on {volume.drive!r}, which is not configured", _REFUSES
                )
                continue
            if files is not None:
                named[volume.drive].add(volume.id)
            if volume.namespace not in known:
                if state.namespaces.get(str(volume.namespace)) is None:
                    self._wrong("volumes", f"volume {volume.id} has no namespace", _REFUSES)
                continue
            self._volumes[volume.id] = volume
            self._maps[volume.id] = ExtentMap(volume.id, meta.region_bytes, volume.regions)
            if files is None:
                what = f"volume {volume.id} lies on {volume.drive!r}, which only a running target reaches"
                self._note("volumes", what, "`forebay scrub` reads it")
                continue
            expected = VolumeLabel(
                meta.node_id,
                volume.id,
                NamespaceId(volume.namespace),
                uuid.UUID(volume.uuid).bytes,
                meta.confirmed_epoch,
                meta.region_bytes,
                volume_size_bytes(volume.regions, meta.region_bytes),
            )
            try:
                files.check(expected, meta.confirmed_epoch + 1, also=meta.absent.get(volume.drive, ()))
            except ForebayError as error:
                self._wrong("volumes", error.message, _REFUSES)
        for name, files in self._files.items():
            if name in meta.drives:
                try:
                    open_drive(files.drive, meta.node_id, uuid.UUID(meta.drives[name]))
                except ForebayError as error:
                    self._wrong("volumes", error.message, _REFUSES)
            for left in files.present():
                if left not in named[name]:
                    self._note("volumes", f"{files.path(left)} is of no volume: a creation cut short", "it is removed")

    def _check_regions(self, meta: NodeMeta, state: DesiredState) -> None:
        taken: Counter[str] = Counter()
        for key, value in self._store.scan("regions"):
            self._checked["regions"] += 1
            try:
                (number_of, number), (slot_bytes,) = struct.unpack(">II", key), struct.unpack(">I", value)
            except struct.error:
                self._wrong("regions", f"the record {key.hex()} does not decode", _REFUSES)
                continue
            volume = self._volumes.get(VolumeId(number_of))
            if volume is None:
                if state.volumes.get(str(number_of)) is None:
                    self._wrong("regions", f"region {number} is of volume {number_of}, which is not there", "nothing")
                continue
            whole = 0 < slot_bytes <= meta.region_bytes and not slot_bytes % LBA_BYTES
            if not 1 <= number <= volume.regions or not whole:
                self._wrong("regions", f"region {number} of volume {volume.id} is out of range", _REFUSES)
                continue
            self._maps[volume.id].claim(number, slot_bytes)
            taken[volume.drive] += 1

    def _check_quarantine(self) -> None:
        for entry in Quarantine(self._store):
            self._checked["quarantined"] += 1
            self._checked["quarantined_bytes"] += entry.extent.length_bytes
            extents = self._maps.get(entry.extent.volume)
            if extents is not None and not extents.adopt(entry.extent):
                self._wrong("allocator", f"{_place(entry.extent)} is in quarantine and is no free slot", _REFUSES)

    def _check_changes(self) -> ChangeLog | None:
        for key, stored in self._store.scan("changes"):
            self._checked["changes"] += 1
            if len(key) != 8 or not _splits(stored):
                self._wrong("changes", f"the entry {key.hex()} does not decode", _REFUSES)
                return None
        return ChangeLog(self._store)

    def _load_checkpoint(self, meta: NodeMeta, index: BlockIndex, known: set[int], changes: ChangeLog | None) -> bool:
        """Fill the index as a start would; False when a start would rebuild it."""
        if changes is None or not self._checkpoint.exists():
            return False
        state = DesiredState(self._store)
        space = self._space(meta, state)
        try:
            for volume in self._volumes.values():
                space.add_volume(volume, cast("VolumeSpec", None))
            loaded = load_index(self._engine(space, index, changes), known, self._checkpoint, meta.node_id)
        except MetadataCorrupt as error:
            self._wrong("checkpoint", error.message, "the index is rebuilt from the records")
            return False
        if not loaded:
            self._note("checkpoint", "it is of no use (another version, node or time)", "the index is rebuilt")
        self._checked["checkpoint_blocks"] = index.count if loaded else 0
        return loaded

    def _check_records(self, index: BlockIndex | None, known: set[int], changes: ChangeLog | None) -> int:
        """Records against owners, regions, each other and the index; bytes of values of sound ones."""
        doubt, size = 0, 0
        scan = self._store.scan("blocks")
        while batch := list(islice(scan, _BATCH)):
            sound: list[tuple[StoredKey, Record]] = []
            for stored, value in batch:
                self._checked["records"] += 1
                record = self._check_record(stored, value, known, changes, indexed=index is not None)
                if record is not None:
                    sound.append((StoredKey(stored), record))
            places = [owner_key(r.extent.volume, r.extent.offset_bytes) for _, r in sound]
            for (stored, record), owner in zip(sound, self._store.multi_get("owners", places), strict=True):
                if owner != stored:
                    what = "has no owner" if owner is None else "is owned by another block"
                    self._wrong("owners", f"{_place(record.extent)}, of {_show(stored)}, {what}", "nothing")
                doubt += not record.flags & FLUSHED
                size += record.value_bytes
            if index is not None and sound:
                self._compare(index, sound)
        if doubt:
            self._note("records", f"the flush of {doubt} blocks is not known", "verified if the stop was not clean")
        return size

    def _check_record(
        self, stored: bytes, value: bytes, known: set[int], changes: ChangeLog | None, *, indexed: bool
    ) -> Record | None:
        try:
            record = Record.decode(value)
            namespace, keyspace, _, _ = split_stored_key(stored)
        except DataDirNewer:
            raise
        except (MetadataCorrupt, struct.error) as error:
            self._wrong("records", f"{_show(stored)}: {error}", _UNSEEN if indexed else _DROPPED)
            return None
        extent = record.extent
        volume = self._volumes.get(extent.volume)
        if namespace not in known or volume is None or volume.namespace != namespace:
            if namespace in known:
                what = f"{_show(stored)} lies on volume {extent.volume}, which its namespace has not"
                self._wrong("records", what, _DROPPED)
            return None
        extents = self._maps[extent.volume]
        if not extents.adopt(extent):
            region = extents.claimed.get(extent.offset_bytes // extents.region_bytes)
            why = "lies in no claimed region" if region is None else "has another owner, or is no slot of its region"
            self._wrong("allocator", f"{_place(extent)}, of {_show(stored)}, {why}", _DROPPED)
            return None
        self._checked["extent_bytes"] += extent.length_bytes
        if self._schema(keyspace) is None:
            self._wrong("records", f"the schema of {_show(stored)} is not there or does not decode", "nothing")
        if changes is not None and record.sequence > changes.last:
            self._wrong("changes", f"{_show(stored)} has a later number than the log", "numbers go on from there")
        return record

    def _compare(self, index: BlockIndex, sound: list[tuple[StoredKey, Record]]) -> None:
        """Rows of the index with the records that they stand for."""
        rows = index.find(index.digests([stored for stored, _ in sound]))
        for row, (stored, record) in zip(rows.tolist(), sound, strict=True):
            if row < 0:
                self._wrong("checkpoint", f"{_show(stored)} is not in the index", "a miss until the index is rebuilt")
                continue
            self._indexed += 1
            extent = record.extent
            found = (
                (int(index.volume[row]), int(index.offset[row]), int(index.length[row])),
                (int(index.value_length[row]), index.write_id[row].tobytes()),
                index.checksums(np.array([row])),
            )
            want = (
                (int(extent.volume), extent.offset_bytes, extent.length_bytes),
                (record.value_bytes, record.write_id),
                struct.pack(f"<{len(record.checksums)}I", *record.checksums),
            )
            if found != want:
                self._wrong("checkpoint", f"{_show(stored)} is another block there", "a miss, or refused as bad")

    def _check_owners(self, unfinished: set[int]) -> None:
        scan = self._store.scan("owners")
        while batch := list(islice(scan, _BATCH)):
            self._checked["owners"] += len(batch)
            values = self._store.multi_get("blocks", [stored for _, stored in batch])
            for (place, stored), value in zip(batch, values, strict=True):
                try:
                    extent = None if value is None else Record.decode(value).extent
                except MetadataCorrupt:
                    continue  # said already, of the record
                if extent is not None and owner_key(extent.volume, extent.offset_bytes) == place:
                    continue
                if _splits(stored) and split_stored_key(stored)[0] in unfinished:
                    continue
                text = f"the entry {place.hex()} names {_show(stored)}, which is not there"
                self._wrong("owners", text, "a start that rebuilds the index removes the entry")

    def _check_media(self, known: set[int], total_bytes: int, progress: Callable[[int, int], None]) -> None:
        opened: dict[VolumeId, OpenVolume | None] = {}
        done = 0
        try:
            for stored, value in self._store.scan("blocks"):
                try:
                    record = Record.decode(value)
                except MetadataCorrupt:
                    continue  # said already
                namespace, keyspace, _, block = split_stored_key(stored)
                schema, volume = self._schema(keyspace), record.extent.volume
                if namespace not in known or schema is None or volume not in self._volumes:
                    continue
                if volume not in opened:
                    opened[volume] = self._open(volume)
                if (media := opened[volume]) is not None:
                    layout = schema.groups[block.group].layout(record.value_bytes)
                    ranges = tile_ranges(StoredKey(stored), record.write_id, layout, record.extent.offset_bytes)
                    self._check_block(media, StoredKey(stored), record, ranges)
                done += record.value_bytes
                progress(done, total_bytes)
        finally:
            for one in opened.values():
                if one is not None:
                    one.close()

    def _check_block(
        self, media: OpenVolume, stored: StoredKey, record: Record, ranges: list[tuple[int, int, int]]
    ) -> None:
        self._checked["media_blocks"] += 1
        self._checked["media_bytes"] += record.value_bytes
        try:
            found = media.checksums(ranges)
        except OSError as error:
            what = f"{_place(record.extent)}, of {_show(stored)}, cannot be read: {error.strerror}"
            self._wrong("media", what, _READ)
            return
        bad = [t for t, (sum_, want) in enumerate(zip(found, record.checksums, strict=True)) if sum_ != want]
        if bad:
            what = (
                f"{_place(record.extent)}, of {_show(stored)}: {len(bad)} of {len(found)} tiles are not what was stored"
            )
            self._wrong("media", what, _READ)

    # ------------------------------------------------------------------------------------------------ inside

    def _open(self, volume: VolumeId) -> OpenVolume | None:
        files = self._files.get(self._volumes[volume].drive)
        if files is None:
            return None
        path = files.path(volume)
        try:
            return OpenVolume(f"vol{volume}", path, readonly=True)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise DataDirInUse(
                    f"{path} is open in a target that outlived its daemon: start the node and stop it", field="data"
                ) from error
            self._wrong("media", f"{path}: {error.strerror}", _REFUSES)
            return None

    def _schema(self, keyspace: bytes) -> Schema | None:
        if keyspace not in self._schemas:
            data = self._store.get("keyspaces", keyspace)
            try:
                self._schemas[keyspace] = Schema.from_cbor(data) if data is not None else None
            except ForebayError:
                self._schemas[keyspace] = None
            self._checked["schemas"] += 1
        return self._schemas[keyspace]

    def _space(self, meta: NodeMeta, state: DesiredState) -> Space:
        drives = [Drive(name, "", 0) for name in sorted({v.drive for v in state.volumes})]
        return Space(self._store, cast("Target", None), drives, meta.region_bytes)

    def _engine(self, space: Space, index: BlockIndex, changes: ChangeLog) -> Engine:
        """As much of an engine as loading the index takes: there is no target."""
        return Engine(
            store=self._store,
            target=cast("Target", None),
            space=space,
            index=index,
            changes=changes,
            clock=SystemClock(),
            random=secrets.token_bytes,
            policy=Lru(),
            events=EventLog(0),
            waiters=Waiters(),
            counters=Counter(),
        )

    def _wrong(self, part: str, what: str, then: str) -> None:
        self._findings.append(Finding(part, what, then))

    def _note(self, part: str, what: str, then: str) -> None:
        self._findings.append(Finding(part, what, then, wrong=False))

    def _report(self) -> FsckReport:
        return FsckReport(dict(self._checked), tuple(self._findings))


def _index(meta: NodeMeta, state: DesiredState) -> BlockIndex:
    """An empty index with room for all that the volumes can hold."""
    return BlockIndex(meta.secret, max(1, sum(v.regions for v in state.volumes) * meta.region_bytes // LBA_BYTES))


def _splits(stored: bytes) -> bool:
    try:
        split_stored_key(stored)
    except struct.error:
        return False
    return True


def _show(stored: bytes) -> str:
    """A block in a person's words."""
    if not _splits(stored):
        return f"the stored key {stored.hex()}"
    namespace, _, generation, block = split_stored_key(stored)
    name = block.key.decode(errors="replace")
    text = name if name.isprintable() else block.key.hex()
    return f"block {text!r} (namespace {namespace}, generation {generation}, group {block.group})"


def _place(extent: Extent) -> str:
    return f"volume {extent.volume} at {extent.offset_bytes}"
