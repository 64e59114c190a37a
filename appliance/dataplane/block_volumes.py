"""A block device as a drive: it belongs wholly to one KV namespace, whose one volume it is.

The device's first region holds the volume's label in LBA 0, as in a file, and the drive's identity in LBA 1; extents
start behind it. Nothing of a device is touched that is not empty at its start or labelled by Forebay.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.appliance.dataplane.labels import (
    MIN_REGION_BYTES,
    DriveIdentity,
    DriveSpace,
    LabelledVolumes,
    decode_identity,
    encode_identity,
    translated,
)
from forebay.errors import CapacityShort, InvalidArgument, VolumeMismatch
from forebay.ids import VolumeId
from forebay.volume_label import LABEL_BYTES, VolumeLabel

__all__ = ["BlockVolumes", "claim_device", "device_space", "discard_device", "is_device", "read_device_identity"]

_EMPTY_BYTES = 1 << 20
"""So much at the start of a device must be zero before it is taken: partition tables, file systems and volume managers
have something there."""
_IDENTITY_AT = LABEL_BYTES


def is_device(path: Path) -> bool:
    """Whether a drive is a block device, or a link to one."""
    try:
        return stat.S_ISBLK(path.stat().st_mode)
    except FileNotFoundError:
        return False


@contextmanager
def _opened(device: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    with translated(f"drive {device}"):
        handle = os.open(device, flags | os.O_CLOEXEC)
        try:
            yield handle
        finally:
            os.close(handle)


def _size_bytes(handle: int) -> int:
    return os.lseek(handle, 0, os.SEEK_END)


def _write(handle: int, block: bytes, offset_bytes: int) -> None:
    os.pwrite(handle, block, offset_bytes)
    os.fsync(handle)


def read_device_identity(device: Path) -> DriveIdentity | None:
    """The drive's identity on a device; None if it has none. Raises `VolumeMismatch` if it is damaged."""
    with _opened(device) as handle:
        block = os.pread(handle, LABEL_BYTES, _IDENTITY_AT)
    text = block.rstrip(b"\0").decode("utf-8", "replace")
    return decode_identity(text, f"LBA 1 of {device}") if text.startswith("{") else None


def claim_device(device: Path, node_id: bytes) -> DriveIdentity:
    """Make a device a drive of this node, or find that it is one.

    Raises `VolumeMismatch` when it is mounted, in use otherwise, or holds what Forebay did not write.
    """
    known = read_device_identity(device)
    if known is not None:
        return known
    try:
        with _opened(device, os.O_RDWR | os.O_EXCL) as handle:
            if os.pread(handle, _EMPTY_BYTES, 0).strip(b"\0"):
                raise VolumeMismatch(
                    f"{device} is not empty: if nothing on it is needed, `blkdiscard -z -l 1MiB {device}` makes it so",
                    field="drive",
                )
            identity = DriveIdentity(node_id, uuid.uuid4())
            _write(handle, encode_identity(identity).encode().ljust(LABEL_BYTES, b"\0"), _IDENTITY_AT)
            return identity
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EBUSY:
            raise VolumeMismatch(
                f"{device} is mounted, or another program has it: unmount it", field="drive"
            ) from error
        raise


def discard_device(device: Path) -> None:
    """Take label and identity off a device, stable when this returns."""
    with _opened(device, os.O_WRONLY) as handle:
        _write(handle, bytes(LABEL_BYTES), 0)
        _write(handle, bytes(LABEL_BYTES), _IDENTITY_AT)


def device_space(device: Path) -> DriveSpace:
    """Space of a device for extents: all but the first region, at its smallest."""
    with _opened(device) as handle:
        size_bytes = _size_bytes(handle)
    return DriveSpace(size_bytes, max(0, size_bytes - MIN_REGION_BYTES), 0)


class BlockVolumes(LabelledVolumes):
    """The volume of a device, checked by `claim_drive` or `open_drive`."""

    def __init__(self, device: Path) -> None:
        # The device itself, not a link to it: what a link names may be another one after the next start.
        super().__init__(device.resolve())

    def path(self, volume: VolumeId) -> Path:
        return self.drive

    def _label(self) -> VolumeLabel | None:
        with _opened(self.drive) as handle:
            block = os.pread(handle, LABEL_BYTES, 0)
        return VolumeLabel.decode(block, str(self.drive)) if block.strip(b"\0") else None

    def present(self) -> list[VolumeId]:
        label = self._label()
        return [] if label is None else [label.volume]

    def create(self, label: VolumeLabel) -> Path:
        """Label the device, stable when this returns; the same label there already is the same creation repeated.

        Raises `InvalidArgument` if it belongs to a KV namespace already, and `CapacityShort` if it is too small.
        """
        known = self._label()
        if known == label:
            return self.drive
        if known is not None:
            raise InvalidArgument(
                f"{self.drive} belongs to another KV namespace: a block device holds one, and a node that has such a "
                "drive has one namespace",
                field="drives",
            )
        with _opened(self.drive, os.O_WRONLY) as handle:
            size_bytes = _size_bytes(handle)
            if label.size_bytes > size_bytes:
                raise CapacityShort(
                    f"{self.drive} has {size_bytes} bytes, of which one region of {label.region_bytes} is the label's: "
                    "ask for less",
                    field="capacity",
                    limit=max(0, size_bytes // label.region_bytes - 1) * label.region_bytes,
                )
            _write(handle, label.encode(), 0)
        return self.drive

    def read_label(self, volume: VolumeId) -> VolumeLabel:
        """The label on the device, whichever volume that names. Raises `VolumeMismatch`."""
        label = self._label()
        if label is None:
            raise VolumeMismatch(f"{self.drive} has no label: it is another device, or was wiped", field="magic")
        with _opened(self.drive) as handle:
            size_bytes = _size_bytes(handle)
        if size_bytes < label.size_bytes:
            raise VolumeMismatch(
                f"{self.drive} has {size_bytes} bytes: it is smaller than it was", field="size", limit=label.size_bytes
            )
        return label

    def remove(self, volume: VolumeId) -> None:
        """Take the label of a volume away; the device then waits for its next KV namespace."""
        label = self._label()
        if label is not None and label.volume == volume:
            with _opened(self.drive, os.O_WRONLY) as handle:
                _write(handle, bytes(LABEL_BYTES), 0)
