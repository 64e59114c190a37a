"""File volumes of a drive: where they lie, the label that says which volume a file is, and the space they take.

A drive is a directory. ``<drive>/forebay.drive`` names the node and the drive; ``<drive>/volumes/<id>.vol`` is a sparse
file. Its address space is counted in regions: region 0 holds the label and is never allocated, regions 1 to n hold
extents. Whoever calls holds the lock of the data directory: nothing here guards against a second daemon.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.checksum import crc32c
from forebay.errors import (
    AlreadyExists,
    CapacityShort,
    InvalidArgument,
    NoSpace,
    TargetFailed,
    VolumeMismatch,
)
from forebay.ids import LBA_BYTES, NamespaceId, VolumeId

__all__ = [
    "LABEL_BYTES",
    "MIN_REGION_BYTES",
    "REGION_UNIT_BYTES",
    "DriveIdentity",
    "DriveSpace",
    "FileVolumes",
    "VolumeLabel",
    "claim_drive",
    "drive_space",
    "open_drive",
    "require_capacity",
    "volume_size_bytes",
]

LABEL_BYTES = LBA_BYTES
LABEL_MAGIC = b"FOREBAY\x00volume\r\n"
LABEL_VERSION = 1
LABEL = struct.Struct("<16s I 16s I I 16s Q Q Q")
"""Magic, version, node id, volume id, namespace id, volume uuid, epoch, region bytes, size bytes; a CRC-32C follows.
Everything lies in the first 512 bytes, which a drive writes whole or not at all; the rest of the block stays zero."""
LABEL_CRC = struct.Struct("<I")
assert LABEL.size == 84 and LABEL.size + LABEL_CRC.size <= 512

MIN_REGION_BYTES = 64 << 20
REGION_UNIT_BYTES = 4 << 20
"""A region is a power of two times this: the default cluster of an SPDK lvol store."""

DRIVE_FILE = "forebay.drive"
DRIVE_VERSION = 1


@dataclass(frozen=True, slots=True)
class VolumeLabel:
    """What LBA 0 of a volume says; metadata holds the same and the two are compared before the volume is served.

    ``node_id`` and ``volume_uuid`` have 16 bytes. ``epoch`` counts how often the volume was taken into service: it
    tells the file from an older copy of itself.
    """

    node_id: bytes
    volume: VolumeId
    namespace: NamespaceId
    volume_uuid: bytes
    epoch: int
    region_bytes: int
    size_bytes: int

    @property
    def regions(self) -> int:
        """Regions that hold extents: region 0, the label's, is not counted."""
        return self.size_bytes // self.region_bytes - 1

    def encode(self) -> bytes:
        """The label's block, `LABEL_BYTES` long."""
        assert len(self.node_id) == len(self.volume_uuid) == 16, (self.node_id, self.volume_uuid)
        body = LABEL.pack(
            LABEL_MAGIC,
            LABEL_VERSION,
            self.node_id,
            self.volume,
            self.namespace,
            self.volume_uuid,
            self.epoch,
            self.region_bytes,
            self.size_bytes,
        )
        return (body + LABEL_CRC.pack(crc32c(body))).ljust(LABEL_BYTES, b"\0")

    @classmethod
    def decode(cls, block: bytes, where: str = "the volume") -> VolumeLabel:
        """The label in ``block``. Raises `VolumeMismatch` if there is none that this version reads."""
        if len(block) < LABEL.size + LABEL_CRC.size or not block.startswith(LABEL_MAGIC):
            raise VolumeMismatch(f"{where} has no Forebay label: it is another file, or was overwritten", field="magic")
        _magic, version, *values = LABEL.unpack_from(block)
        if version != LABEL_VERSION:
            raise VolumeMismatch(
                f"the label of {where} has version {version}: start the version of Forebay that wrote it",
                field="version",
                limit=LABEL_VERSION,
            )
        if LABEL_CRC.unpack_from(block, LABEL.size)[0] != crc32c(block[: LABEL.size]):
            raise VolumeMismatch(f"the label of {where} is damaged: its checksum does not match", field="checksum")
        node_id, volume, namespace, volume_uuid, epoch, region_bytes, size_bytes = values
        return cls(node_id, VolumeId(volume), NamespaceId(namespace), volume_uuid, epoch, region_bytes, size_bytes)


@dataclass(frozen=True, slots=True)
class DriveIdentity:
    """What the drive's own file says: the node it belongs to (16 bytes) and which of its drives it is."""

    node_id: bytes
    drive_uuid: uuid.UUID


@dataclass(frozen=True, slots=True)
class DriveSpace:
    """Bytes of the file system that a drive lies on. ``held_bytes`` are those that our volumes take already."""

    total_bytes: int
    free_bytes: int
    held_bytes: int

    @property
    def usable_bytes(self) -> int:
        """What volumes could take in all."""
        return self.free_bytes + self.held_bytes


def volume_size_bytes(regions: int, region_bytes: int) -> int:
    """Size of a volume of that many regions, the label's included. Raises `InvalidArgument` for a bad region size."""
    units, rest = divmod(region_bytes, REGION_UNIT_BYTES)
    if region_bytes < MIN_REGION_BYTES or rest or units & (units - 1):
        raise InvalidArgument(
            f"a region of {region_bytes} bytes is not a power of two times 4 MiB",
            field="region_bytes",
            limit=f"at least {MIN_REGION_BYTES}",
        )
    if regions < 1:
        raise InvalidArgument(f"a volume of {regions} regions", field="regions", limit="at least 1")
    return (regions + 1) * region_bytes


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """System errors of a drive as ours, in one place."""
    try:
        yield
    except OSError as error:
        text = f"{what}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(text) from error
        if error.errno == errno.EFBIG:
            raise CapacityShort(f"{text}: the file system allows no file of this size") from error
        if error.errno == errno.ELOOP:
            raise VolumeMismatch(f"{what}: a symbolic link stands where the file belongs") from error
        raise TargetFailed(text) from error


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_new(path: Path, data: bytes, size_bytes: int | None = None) -> None:
    """A file that is there whole, under its name and stable, or not at all."""
    unfinished = path.with_name(path.name + ".new")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        if size_bytes is not None:
            os.ftruncate(handle, size_bytes)
        os.pwrite(handle, data, 0)
        os.fsync(handle)
    except OSError:
        os.unlink(unfinished)
        raise
    finally:
        os.close(handle)
    os.rename(unfinished, path)
    _sync_directory(path.parent)


def _read_identity(drive: Path) -> DriveIdentity | None:
    file = drive / DRIVE_FILE
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        if values["version"] != DRIVE_VERSION:
            raise VolumeMismatch(
                f"{file} has version {values['version']}: start the version of Forebay that wrote it",
                field="version",
                limit=DRIVE_VERSION,
            )
        node_id = bytes.fromhex(values["node"])
        return DriveIdentity(node_id, uuid.UUID(values["drive"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VolumeMismatch(f"{file} does not name a node and a drive", field="drive") from error


def claim_drive(drive: Path, node_id: bytes) -> DriveIdentity:
    """Make a directory a drive of this node, or find that it is one (a start that was cut short repeats this).

    For a drive that metadata does not know yet; the caller records the uuid. Raises `VolumeMismatch` when it belongs to
    another node or holds volumes that nobody claims.
    """
    with _translated(f"drive {drive}"):
        volumes = drive / "volumes"
        identity = _read_identity(drive)
        if identity is None:
            if volumes.is_dir() and any(volumes.glob("*.vol")):
                raise VolumeMismatch(
                    f"{volumes} holds volumes but {drive / DRIVE_FILE} is gone: restore it, or move the volumes away",
                    field="drive",
                )
            drive.mkdir(parents=True, exist_ok=True, mode=0o700)
            identity = DriveIdentity(node_id, uuid.uuid4())
            values = {"version": DRIVE_VERSION, "node": node_id.hex(), "drive": str(identity.drive_uuid)}
            _write_new(drive / DRIVE_FILE, (json.dumps(values) + "\n").encode())
        _require_node(drive, identity, node_id)
        volumes.mkdir(exist_ok=True, mode=0o700)
        _sync_directory(drive)
    return identity


def open_drive(drive: Path, node_id: bytes, drive_uuid: uuid.UUID) -> DriveIdentity:
    """Check that a directory is the drive that metadata names. Raises `VolumeMismatch` saying what it is instead."""
    with _translated(f"drive {drive}"):
        identity = _read_identity(drive)
    if identity is None:
        raise VolumeMismatch(f"{drive} has no {DRIVE_FILE}: is the drive mounted?", field="drive")
    _require_node(drive, identity, node_id)
    if identity.drive_uuid != drive_uuid:
        raise VolumeMismatch(
            f"{drive} is drive {identity.drive_uuid} of this node: mount each drive where it was",
            field="drive",
            limit=str(drive_uuid),
        )
    return identity


def _require_node(drive: Path, identity: DriveIdentity, node_id: bytes) -> None:
    if identity.node_id != node_id:
        raise VolumeMismatch(
            f"{drive} belongs to node {identity.node_id.hex()}: give this node a drive of its own, or start that node",
            field="node",
            limit=node_id.hex(),
        )


def drive_space(drive: Path) -> DriveSpace:
    """Space of the drive's file system. ``drive`` need not exist yet: its nearest parent is asked then."""
    held_bytes = sum(file.stat().st_blocks * 512 for file in (drive / "volumes").glob("*.vol"))
    there = drive
    while not there.exists():
        there = there.parent
    with _translated(f"drive {drive}"):
        found = os.statvfs(there)
    return DriveSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, held_bytes)


def require_capacity(drive: Path, capacity_bytes: int) -> DriveSpace:
    """The drive's space, if it can hold ``capacity_bytes`` of volumes. Raises `CapacityShort` otherwise."""
    space = drive_space(drive)
    if capacity_bytes > space.usable_bytes:
        raise CapacityShort(
            f"{drive} can hold {space.usable_bytes} bytes ({space.free_bytes} free, {space.held_bytes} in volumes), "
            f"not {capacity_bytes}: ask for less, or free space",
            field="capacity",
            limit=space.usable_bytes,
        )
    return space


class FileVolumes:
    """The volumes of one drive, checked by `claim_drive` or `open_drive`."""

    def __init__(self, drive: Path) -> None:
        self.drive = drive
        self._directory = drive / "volumes"

    def path(self, volume: VolumeId) -> Path:
        """The file of a volume, there or not."""
        return self._directory / f"{volume}.vol"

    def present(self) -> list[VolumeId]:
        """Ids of the files that are there: what metadata does not name is left from a creation that was cut short."""
        return sorted(VolumeId(int(file.stem)) for file in self._directory.glob("*.vol") if file.stem.isdecimal())

    def create(self, label: VolumeLabel) -> Path:
        """Make the file of a new volume, sparse, with its label stable.

        The same label there already is the same creation repeated. Raises `AlreadyExists` for another one, `NoSpace`,
        or `CapacityShort` when the file system allows no file of that size.
        """
        volume_size_bytes(label.regions, label.region_bytes)
        path = self.path(label.volume)
        with _translated(f"volume {path}"):
            if path.exists():
                if self.read_label(label.volume) != label:
                    raise AlreadyExists(f"{path} is another volume: move it away", field="volume")
                return path
            _write_new(path, label.encode(), label.size_bytes)
        return path

    def read_label(self, volume: VolumeId) -> VolumeLabel:
        """The label in the file of ``volume``, whichever volume that names. Raises `VolumeMismatch`."""
        path = self.path(volume)
        try:
            with _translated(f"volume {path}"):
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    block, size_bytes = os.pread(handle, LABEL_BYTES, 0), os.fstat(handle).st_size
                finally:
                    os.close(handle)
        except TargetFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise VolumeMismatch(f"{path} is missing: restore it, or delete its namespace", field="path") from error
            raise
        label = VolumeLabel.decode(block, str(path))
        if size_bytes != label.size_bytes:
            raise VolumeMismatch(
                f"{path} has {size_bytes} bytes: it was cut or grown from outside", field="size", limit=label.size_bytes
            )
        return label

    def check(self, expected: VolumeLabel, intended_epoch: int) -> VolumeLabel:
        """Compare a file's label with metadata's, which has ``expected.epoch`` confirmed and may have begun another.

        Metadata records ``intended_epoch``, the label is stamped with it, and only then is it confirmed: a start that
        was cut short leaves either of the two in the label, and nothing else does. Raises `VolumeMismatch` naming the
        first field that differs and what to do.
        """
        path = self.path(expected.volume)
        found = self.read_label(expected.volume)
        advice = {
            "node_id": "it belongs to another node",
            "volume": f"it is volume {found.volume}: files were swapped, put each back under its own name",
            "namespace": "it belongs to another KV namespace",
            "volume_uuid": "it is another volume that had the same number once",
            "region_bytes": "it was made with regions of another size",
            "size_bytes": "it has another size than metadata says",
        }
        for field, text in advice.items():
            if (theirs := getattr(found, field)) != (ours := getattr(expected, field)):
                raise VolumeMismatch(
                    f"{path} is refused: {text} ({field} {_show(theirs)}, not {_show(ours)})", field=field
                )
        if found.epoch not in (expected.epoch, intended_epoch):
            older = found.epoch < expected.epoch
            text = (
                "it is an older copy: restore metadata of the same moment, or delete its namespace"
                if older
                else "metadata is older than it: restore metadata of the same moment, or delete its namespace"
            )
            raise VolumeMismatch(
                f"{path} is refused: {text} (epoch {found.epoch}, not {expected.epoch})",
                field="epoch",
                limit=expected.epoch,
            )
        return found

    def stamp(self, volume: VolumeId, epoch: int) -> VolumeLabel:
        """Write ``epoch`` into the label; stable when this returns. Call `check` first."""
        label = replace(self.read_label(volume), epoch=epoch)
        with _translated(f"volume {self.path(volume)}"):
            handle = os.open(self.path(volume), os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(handle, label.encode(), 0)
                os.fsync(handle)
            finally:
                os.close(handle)
        return label

    def remove(self, volume: VolumeId) -> None:
        """Delete a volume's file, stable when this returns; one that is gone is no error."""
        with _translated(f"volume {self.path(volume)}"):
            self.path(volume).unlink(missing_ok=True)
            _sync_directory(self._directory)


def _show(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
