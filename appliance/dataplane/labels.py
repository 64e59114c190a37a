"""What a volume and a drive say of themselves, and how that is compared with metadata."""

from __future__ import annotations

import errno
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.errors import CapacityShort, InvalidArgument, NoSpace, TargetFailed, VolumeMismatch
from forebay.ids import VolumeId
from forebay.volume_label import VolumeLabel

__all__ = [
    "MIN_REGION_BYTES",
    "REGION_UNIT_BYTES",
    "DriveIdentity",
    "DriveSpace",
    "LabelledVolumes",
    "decode_identity",
    "encode_identity",
    "translated",
    "volume_size_bytes",
]

MIN_REGION_BYTES = 64 << 20
REGION_UNIT_BYTES = 4 << 20
"""A region is a power of two times this: the default cluster of an SPDK lvol store."""

DRIVE_VERSION = 1


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


def encode_identity(identity: DriveIdentity) -> str:
    """What a drive says of itself, a line of JSON."""
    values = {"version": DRIVE_VERSION, "node": identity.node_id.hex(), "drive": str(identity.drive_uuid)}
    return json.dumps(values) + "\n"


def decode_identity(text: str, where: str) -> DriveIdentity:
    """What `encode_identity` wrote. Raises `VolumeMismatch`."""
    try:
        values = json.loads(text)
        if values["version"] != DRIVE_VERSION:
            raise VolumeMismatch(
                f"{where} has version {values['version']}: start the version of Forebay that wrote it",
                field="version",
                limit=DRIVE_VERSION,
            )
        return DriveIdentity(bytes.fromhex(values["node"]), uuid.UUID(values["drive"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VolumeMismatch(f"{where} does not name a node and a drive", field="drive") from error


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
def translated(what: str) -> Iterator[None]:
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


class LabelledVolumes(ABC):
    """The volumes of one drive."""

    by_target = False
    """Whether its methods ask the target, and wait for it: then they are only for threads without an event loop."""

    def __init__(self, drive: Path) -> None:
        self.drive = drive

    @abstractmethod
    def path(self, volume: VolumeId) -> Path:
        """The file or device of a volume, there or not."""

    @abstractmethod
    def present(self) -> list[VolumeId]:
        """Ids of volumes that are there: what metadata does not name is left from a creation that was cut short."""

    @abstractmethod
    def create(self, label: VolumeLabel) -> Path:
        """Make a new volume, with its label stable; the same label there already is the same creation repeated.

        Raises `AlreadyExists` or `InvalidArgument` for another one, `NoSpace`, `CapacityShort`.
        """

    @abstractmethod
    def read_label(self, volume: VolumeId) -> VolumeLabel:
        """The label where ``volume`` should be, whichever volume that names. Raises `VolumeMismatch`."""

    @abstractmethod
    def remove(self, volume: VolumeId) -> None:
        """Take a volume away, stable when this returns; one that is gone is no error."""

    def check(self, expected: VolumeLabel, intended_epoch: int, *, also: Collection[int] = ()) -> VolumeLabel:
        """Compare a file's label with metadata's, which has ``expected.epoch`` confirmed and may have begun another.

        Metadata records ``intended_epoch``, the label is stamped with it, and only then is it confirmed: a start that
        was cut short leaves either of the two in the label, and nothing else does; but for a drive that was away, whose
        labels have what they were left with: ``also``. Raises `VolumeMismatch` naming the first field that differs and
        what to do.
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
        if found.epoch not in (expected.epoch, intended_epoch, *also):
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
        with translated(f"volume {self.path(volume)}"):
            handle = os.open(self.path(volume), os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(handle, label.encode(), 0)
                os.fsync(handle)
            finally:
                os.close(handle)
        return label


def _show(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
