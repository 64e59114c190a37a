"""Drives and the file volumes on them: where they lie, and the space they take. Devices are in `block_volumes`.

A drive is a directory, or a block device. In a directory ``<drive>/forebay.drive`` names the node and the drive;
``<drive>/volumes/<id>.vol`` is a sparse file. Its address space is counted in regions: region 0 holds the label and is
never allocated, regions 1 to n hold extents. Whoever calls holds the lock of the data directory: nothing here guards
against a second daemon.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

from forebay.appliance.dataplane.block_volumes import (
    BlockVolumes,
    claim_device,
    device_space,
    discard_device,
    is_device,
    read_device_identity,
)
from forebay.appliance.dataplane.labels import (
    DriveIdentity,
    DriveSpace,
    LabelledVolumes,
    decode_identity,
    encode_identity,
    translated,
    volume_size_bytes,
)
from forebay.appliance.directories import make_directory, sync_directory
from forebay.crashpoints import crash_point
from forebay.errors import (
    AlreadyExists,
    CapacityShort,
    DataDirInUse,
    TargetFailed,
    Unavailable,
    VolumeMismatch,
)
from forebay.ids import VolumeId
from forebay.volume_label import LABEL_BYTES, VolumeLabel

__all__ = [
    "FileVolumes",
    "claim_drive",
    "discard_drive",
    "drive_space",
    "open_drive",
    "require_capacity",
    "volumes_on",
]

DRIVE_FILE = "forebay.drive"
_UNFINISHED = ".new"
"""What a file's name ends with until it is whole."""


def _write_new(path: Path, data: bytes, size_bytes: int | None = None) -> None:
    """A file that is there whole, under its name and stable, or not at all."""
    unfinished = path.with_name(path.name + _UNFINISHED)
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
    crash_point("file.before_rename")
    os.rename(unfinished, path)
    sync_directory(path.parent)


def _read_identity(drive: Path) -> DriveIdentity | None:
    if is_device(drive):
        return read_device_identity(drive)
    file = drive / DRIVE_FILE
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    return decode_identity(text, str(file))


def claim_drive(drive: Path, node_id: bytes) -> DriveIdentity:
    """Make a directory or a device a drive of this node, or find that it is one: a start cut short repeats this.

    For a drive that metadata does not know yet; the caller records the uuid. Raises `VolumeMismatch` when it belongs to
    another node or holds volumes that nobody claims, and `Unavailable` for a device that is not there.
    """
    if not drive.exists() and drive.is_relative_to("/dev") and not drive.is_relative_to("/dev/shm"):
        # A directory of that name would keep blocks in memory, and be found in the place of the device later.
        raise Unavailable(f"drive {drive}: there is no such device", field="drive")
    if is_device(drive):
        claimed = claim_device(drive, node_id)
        _require_node(drive, claimed, node_id)
        return claimed
    with translated(f"drive {drive}"):
        volumes = drive / "volumes"
        identity = _read_identity(drive)
        if identity is None:
            if volumes.is_dir() and any(volumes.glob("*.vol")):
                raise VolumeMismatch(
                    f"{volumes} holds volumes but {drive / DRIVE_FILE} is gone: restore it, or move the volumes away",
                    field="drive",
                )
            make_directory(drive)
            identity = DriveIdentity(node_id, uuid.uuid4())
            _write_new(drive / DRIVE_FILE, encode_identity(identity).encode())
        _require_node(drive, identity, node_id)
        volumes.mkdir(exist_ok=True, mode=0o700)
        sync_directory(drive)
    return identity


def discard_drive(drive: Path, node_id: bytes) -> list[Path]:
    """Take everything off a drive of a node whose metadata are lost; the volumes that were there.

    Nothing happens to one that is this node's. Raises `DataDirInUse` while a target has a volume open.
    """
    with translated(f"drive {drive}"):
        identity = _read_identity(drive)
        if identity is not None and identity.node_id == node_id:
            return []
        if is_device(drive):
            if identity is None:
                return []  # whatever is on it is not ours
            _require_closed(drive)
            discard_device(drive)
            return [drive]
        volumes = sorted((drive / "volumes").glob("*.vol"))
        for volume in volumes:
            _require_closed(volume)
        for file in (*volumes, drive / DRIVE_FILE):
            file.unlink(missing_ok=True)
        if drive.is_dir():
            sync_directory(drive)
    return volumes


def _require_closed(volume: Path) -> None:
    handle = os.open(volume, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataDirInUse(
            f"{volume} is served by a target: end it first (its pid is in run/target.pid of its data directory)",
            field="drive",
        ) from None
    finally:
        os.close(handle)


def open_drive(drive: Path, node_id: bytes, drive_uuid: uuid.UUID) -> DriveIdentity:
    """Check that a directory or device is the drive that metadata names.

    Raises `VolumeMismatch` saying what it is instead.
    """
    with translated(f"drive {drive}"):
        identity = _read_identity(drive)
    if identity is None:
        what = "identity: is it the device that it was?" if is_device(drive) else f"{DRIVE_FILE}: is the drive mounted?"
        raise VolumeMismatch(f"{drive} has no {what}", field="drive")
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
    if is_device(drive):
        return device_space(drive)
    held_bytes = sum(file.stat().st_blocks * 512 for file in (drive / "volumes").glob("*.vol"))
    there = drive
    while not there.exists():
        there = there.parent
    with translated(f"drive {drive}"):
        found = os.statvfs(there)
    return DriveSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, held_bytes)


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.1f} GiB"


def require_capacity(drive: Path, capacity_bytes: int) -> DriveSpace:
    """The drive's space, if it can hold ``capacity_bytes`` of volumes. Raises `CapacityShort` otherwise."""
    space = drive_space(drive)
    if capacity_bytes > space.usable_bytes:
        raise CapacityShort(
            f"{drive} has room for {_gib(space.usable_bytes)} ({_gib(space.free_bytes)} free, "
            f"{_gib(space.held_bytes)} in volumes), not {_gib(capacity_bytes)}: choose a smaller capacity, or free "
            "space",
            field="capacity",
            limit=space.usable_bytes,
        )
    return space


class FileVolumes(LabelledVolumes):
    """The volumes of a directory, checked by `claim_drive` or `open_drive`."""

    def __init__(self, drive: Path) -> None:
        self.drive = drive
        self._directory = drive / "volumes"

    def path(self, volume: VolumeId) -> Path:
        """The file of a volume, there or not."""
        return self._directory / f"{volume}.vol"

    def present(self) -> list[VolumeId]:
        """Ids of the files that are there: what metadata does not name is left from a creation that was cut short."""
        files = [*self._directory.glob("*.vol"), *self._directory.glob(f"*.vol{_UNFINISHED}")]
        names = {file.name.partition(".")[0] for file in files}
        return sorted(VolumeId(int(name)) for name in names if name.isdecimal())

    def create(self, label: VolumeLabel) -> Path:
        """Make the file of a new volume, sparse, with its label stable.

        The same label there already is the same creation repeated. Raises `AlreadyExists` for another one, `NoSpace`,
        or `CapacityShort` when the file system allows no file of that size.
        """
        volume_size_bytes(label.regions, label.region_bytes)
        path = self.path(label.volume)
        with translated(f"volume {path}"):
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
            with translated(f"volume {path}"):
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

    def remove(self, volume: VolumeId) -> None:
        """Delete a volume's file, stable when this returns; one that is gone is no error."""
        with translated(f"volume {self.path(volume)}"):
            path = self.path(volume)
            path.unlink(missing_ok=True)
            path.with_name(path.name + _UNFINISHED).unlink(missing_ok=True)
            sync_directory(self._directory)


def volumes_on(drive: Path) -> LabelledVolumes:
    """The volumes of a drive that `claim_drive` or `open_drive` has checked."""
    return BlockVolumes(drive) if is_device(drive) else FileVolumes(drive)
