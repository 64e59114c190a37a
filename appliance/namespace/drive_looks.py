"""One look at a drive: whether it is there, is its own, and takes what is written to it."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.appliance.dataplane.block_volumes import is_device
from forebay.appliance.dataplane.labels import translated
from forebay.appliance.dataplane.volumes import open_drive
from forebay.appliance.directories import probe_directory
from forebay.appliance.namespace.space import DriveState
from forebay.errors import ForebayError, NoSpace, Unavailable

if TYPE_CHECKING:
    from forebay.appliance.dataplane.store_volumes import StoreVolumes

__all__ = ["Look", "look_at", "look_at_store", "says_nothing"]

_PROBE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a drive found."""

    state: DriveState
    reason: str = ""
    free_bytes: int | None = None
    """Of its file system; None where that says nothing."""
    lost: Mapping[Path, ForebayError] = field(default_factory=dict)
    """Volumes that are not there or cannot be read, though others are."""


def look_at(drive: Path, node_id: bytes, identity: uuid.UUID, volumes: list[Path], closely: bool) -> Look | None:
    """One look, in a thread of its own: it may wait for the drive."""
    lost: dict[Path, ForebayError] = {}
    try:
        open_drive(drive, node_id, identity)
        for volume in volumes:
            try:
                with translated(f"volume {volume}"):
                    os.stat(volume)
                    if closely:
                        _read_first(volume)
            except ForebayError as error:
                lost[volume] = error
                if says_nothing(error) or len(lost) == len(volumes):
                    raise
    except ForebayError as error:
        return None if says_nothing(error) else Look(DriveState.AWAY, error.message)
    try:
        with translated(f"drive {drive}"):
            for volume in volumes if closely else ():
                if volume not in lost:
                    _flush(volume)
            if is_device(drive):
                return Look(DriveState.SERVING)
            space = os.statvfs(drive)
            if space.f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if closely:
                probe_directory(drive, _PROBE_BYTES)
        return Look(DriveState.SERVING, free_bytes=space.f_bavail * space.f_frsize, lost=lost)
    except NoSpace:
        return Look(DriveState.SERVING, free_bytes=0, lost=lost)  # full is not failed: the allocator knows what to do
    except ForebayError as error:
        return None if says_nothing(error) else Look(DriveState.READ_ONLY, error.message)


def look_at_store(store: StoreVolumes, identity: uuid.UUID, volumes: list[Path], closely: bool) -> Look | None:
    """`look_at` of a drive that only the target can reach: in a thread, too."""
    try:
        store.look(identity, volumes, closely=closely)
    except Unavailable:
        return None  # the supervisor's concern
    except ForebayError as error:
        return Look(DriveState.AWAY, error.message)
    return Look(DriveState.SERVING)


def says_nothing(error: ForebayError) -> bool:
    """Whether it was this process that lacked a descriptor or memory: the drive was not asked."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _read_first(path: Path) -> None:
    """Read a volume's first block from the drive and not from memory. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(handle, 0, _PROBE_BYTES, os.POSIX_FADV_DONTNEED)
        os.pread(handle, 4096, 0)
    finally:
        os.close(handle)


def _flush(path: Path) -> None:
    """Make what was written to a volume stable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)
