"""Block devices that are volumes: found by what they are, never by a name, and looked at again and again (ADR 15)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay.client.threads import begin
from forebay.client.transports.drive_labels import DriveLabels
from forebay.errors import DeadlineExceeded, ForebayError, Unavailable, VolumeMismatch
from forebay.ids import LBA_BYTES
from forebay.volume_label import LABEL_BYTES, VolumeLabel

__all__ = ["Disk", "Look", "Machine", "VolumeIdentity"]

_BLKGETDISKSEQ = 0x80081280
"""_IOR(0x12, 128, __u64), linux/fs.h: a number that no other disk since boot has had, or has."""
_SEQUENCE = struct.Struct("=Q")
_NOT_DRIVES = re.compile(r"ram|zram|fd|sr|nbd|md|dm-")
"""Disks that are no drive of their own, or may answer only after a long time."""


@dataclass(frozen=True, slots=True)
class VolumeIdentity:
    """What a volume is known by: its subsystem, its NSID there, and its NGUID (32 hexadecimal digits; "" if untold)."""

    subsystem_nqn: str
    nsid: int
    nguid: str = ""


class Disk:
    """An open device. Closed once `close` was called and nobody is `using` it: a number never serves two files.

    ``sequence`` is the kernel's number of the disk as it was when it was opened, 0 where it tells none.
    """

    def __init__(self, path: Path | str, *, writable: bool = False) -> None:
        flags = os.O_RDWR if writable else os.O_RDONLY
        self.path = Path(path)
        self.fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        try:
            self.device = os.fstat(self.fd).st_rdev
            self.size_bytes = os.lseek(self.fd, 0, os.SEEK_END) // LBA_BYTES * LBA_BYTES
            self.sequence = _sequence(self.fd)
        except BaseException:
            self.close()
            raise

    @property
    def unchanged(self) -> bool:
        """Whether it is the disk still that was opened, as far as the kernel knows now."""
        try:
            return _sequence(self.fd) == self.sequence
        except OSError:
            return False

    def same(self, other: Disk) -> bool:
        """Whether another open device is this one, with the same content."""
        mine, its = (self.device, self.sequence, self.size_bytes), (other.device, other.sequence, other.size_bytes)
        return mine == its and self.unchanged

    @contextmanager
    def using(self) -> Iterator[int]:
        """The file's number, which stays what it is until the end. Raises `OSError` (EBADF) once it is closed."""
        with self._lock:
            if self._closing:
                raise OSError(errno.EBADF, "the device was closed")
            self._users += 1
        try:
            yield self.fd
        finally:
            self._left()

    def read(self, into: memoryview, offset_bytes: int) -> None:
        """Fill aligned memory. Raises `OSError`, and `Unavailable` where it ended or was taken away meanwhile."""
        done = 0
        with self.using() as fd:
            while done < len(into):
                try:
                    got = os.preadv(fd, [into[done:]], offset_bytes + done)
                except OSError as e:
                    # Commands under way in a device that goes end as on a bad medium; what is gone has no size.
                    if e.errno == errno.EIO and not os.lseek(fd, 0, os.SEEK_END):
                        raise Unavailable(f"{self.path} was taken away") from e
                    raise
                if not got:
                    raise Unavailable(f"{self.path} ended at {offset_bytes + done}")
                done += got

    def _left(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            os.close(self.fd)

    def close(self) -> None:
        """Close it as soon as nobody uses it. Idempotent."""
        with self._lock:
            idle = not self._closing and not self._users
            self._closing = True
        if idle:
            os.close(self.fd)


def _sequence(fd: int) -> int:
    try:
        return int(_SEQUENCE.unpack(fcntl.ioctl(fd, _BLKGETDISKSEQ, bytes(_SEQUENCE.size)))[0])
    except OSError as e:
        if e.errno in (errno.ENOTTY, errno.EINVAL):  # before Linux 5.15
            return 0
        raise


@dataclass(frozen=True, slots=True)
class Machine:
    """Where this machine tells of its disks."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    def attached(self, volume: VolumeIdentity) -> list[str]:
        """The names of the NVMe disks that have the volume's subsystem and NSID now."""
        found = []
        for entry in sorted((self.sys / "class/block").glob("nvme*")):
            if (entry / "partition").exists() or _read(entry / "hidden") == "1":
                continue  # paths of a multipath disk are hidden
            if _read(entry / "nsid") != str(volume.nsid):
                continue
            if _read(entry / "device/subsysnqn") == volume.subsystem_nqn:
                found.append(entry.name)
        return found

    def drives(self) -> list[str]:
        """The names of whole disks that have a size."""
        names = []
        for entry in sorted((self.sys / "class/block").iterdir()):
            whole = not (entry / "partition").exists() and _read(entry / "hidden") != "1"
            if whole and not _NOT_DRIVES.match(entry.name) and _read(entry / "size") not in ("", "0"):
                names.append(entry.name)
        return names

    def find(
        self,
        volume: VolumeIdentity,
        block: memoryview,
        *,
        labels: DriveLabels | None = None,
        writable: bool = False,
    ) -> Disk:
        """The disk that is ``volume``, open; with ``labels``, which may be old, a drive of this machine by its label.

        ``block`` is aligned memory of `LABEL_BYTES` to read a label into. Raises `Unavailable` when there is none or it
        cannot be opened, and `VolumeMismatch` when what stands there is another volume. May wait for the device for as
        long as the kernel does.
        """
        problem: Unavailable | VolumeMismatch | None = None
        for name in self.attached(volume):
            try:
                return self._opened(name, volume, block, writable=writable)
            except (Unavailable, VolumeMismatch) as e:
                problem = problem or e
        if problem is None and labels is not None and volume.nguid:
            drives = self._labelled(volume, block, labels, writable=writable)
            if len(drives) == 1:
                return drives[0]
            for disk in drives:
                disk.close()
            if drives:  # one of them is a copy, and older than the other
                names = ", ".join(str(disk.path) for disk in drives)
                problem = VolumeMismatch(f"{names} are all labelled {_digits(volume.nguid)}: none of them is read")
        where = " or drive" if labels is not None else ""
        raise problem or Unavailable(
            f"no block device{where} here is NSID {volume.nsid} of {volume.subsystem_nqn}: is it connected?"
        )

    def _labelled(
        self, volume: VolumeIdentity, block: memoryview, labels: DriveLabels, *, writable: bool
    ) -> list[Disk]:
        """The drives of this machine that have the volume's label, open."""
        found = []
        expected = _digits(volume.nguid)
        for name in self.drives():
            entry = self.sys / "class/block" / name
            disk = " ".join(_read(entry / file) for file in ("dev", "diskseq", "size"))
            known = labels.of(name, disk)
            if known is not None and known != expected:
                continue  # somebody else's drive, which may be asleep
            try:
                found.append(self._opened(name, volume, block, writable=writable, labelled=True))
                label = expected
            except VolumeMismatch:
                label = _label(block)
            except Unavailable:
                label = known or ""  # what was ours is asked for again, and nobody waits for others that are broken
            labels.note(name, disk, label)
        return found

    def _opened(
        self, name: str, volume: VolumeIdentity, block: memoryview, *, writable: bool, labelled: bool = False
    ) -> Disk:
        entry = self.sys / "class/block" / name
        size = _read(entry / "queue/logical_block_size")
        if not size.isdigit() or LBA_BYTES % int(size):
            raise Unavailable(f"{name} has blocks of {size or 'unknown'} bytes")
        path = self.dev / (re.findall(r"^DEVNAME=(\S+)$", _read(entry / "uevent"), re.MULTILINE) or [name])[0]
        try:
            disk = Disk(path, writable=writable)
        except OSError as e:
            advice = ": this process may not open it" if e.errno in (errno.EACCES, errno.EPERM) else ""
            raise Unavailable(f"{path} cannot be opened ({e.strerror}){advice}") from e
        try:
            self._identify(disk, entry, volume, block, labelled=labelled)
        except BaseException:
            disk.close()
            raise
        return disk

    def _identify(self, disk: Disk, entry: Path, volume: VolumeIdentity, block: memoryview, *, labelled: bool) -> None:
        """Raises `VolumeMismatch` unless the open device is the volume, by NGUID, by label, or by both."""
        mode = os.fstat(disk.fd).st_mode
        number = f"{os.major(disk.device)}:{os.minor(disk.device)}"
        if not stat.S_ISBLK(mode) or number != _read(entry / "dev"):
            raise Unavailable(f"{disk.path} is not {entry.name} any more")
        expected = _digits(volume.nguid)
        told = _digits(_read(entry / "nguid"))
        if not labelled and expected and told.strip("0") and told != expected:
            raise VolumeMismatch(f"{disk.path} has NGUID {told} where {expected} is expected")
        try:
            got = os.preadv(disk.fd, [block[:LABEL_BYTES]], 0)
        except OSError as e:
            raise Unavailable(f"the label of {disk.path} cannot be read: {e.strerror}") from e
        raw = bytes(block[:LABEL_BYTES])
        if got != LABEL_BYTES:
            raise Unavailable(f"{disk.path} ended within its label")
        if not (labelled or VolumeLabel.present(raw)):
            if expected and told != expected:
                raise VolumeMismatch(f"{disk.path} has neither the NGUID {expected} nor a label")
            return
        label = VolumeLabel.decode(raw, str(disk.path))
        if expected and label.volume_uuid.hex() != expected:
            raise VolumeMismatch(f"{disk.path} is labelled {label.volume_uuid.hex()} where {expected} is expected")
        if not disk.unchanged:
            raise Unavailable(f"{disk.path} changed while it was looked at")


class Look:
    """One look for a volume, in a thread that ends with it: most machines have no such device, and need none for long.

    It has memory of its own, so that nobody has to wait for one that a device holds up. Raises `Unavailable`.
    """

    def __init__(self, machine: Machine, volume: VolumeIdentity, *, labels: DriveLabels | None, writable: bool) -> None:
        self._machine = machine
        self._volume = volume
        self._labels = labels
        self._writable = writable
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._left = False
        self._found: Disk | ForebayError = DeadlineExceeded("the device was not looked at before the deadline")
        self._thread = begin(self._run, "forebay-look")

    @property
    def ended(self) -> bool:
        """Whether it has come back."""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait a while for it; whether it has come back."""
        return self._over.wait(max(0.0, timeout_s))

    def join(self, timeout_s: float) -> None:
        """Wait a while for its thread to be gone."""
        self._thread.join(timeout_s)

    def taken(self) -> Disk | ForebayError:
        """What it found, or that it is late; a disk that is found after this is closed."""
        with self._lock:
            self._left = True
            return self._found

    def _run(self) -> None:
        found: Disk | ForebayError = Unavailable("the look at the devices here failed")
        try:
            page = memoryview(mmap.mmap(-1, LABEL_BYTES))
            found = self._machine.find(self._volume, page, labels=self._labels, writable=self._writable)
        except ForebayError as e:
            found = e
        except OSError as e:
            found = Unavailable(f"the devices here cannot be looked at: {e}")
        finally:  # one that never ends would keep others from looking
            with self._lock:
                if not self._left:
                    self._found = found
                elif isinstance(found, Disk):
                    found.close()
                self._over.set()


def _label(block: memoryview) -> str:
    """The UUID in a label that was read, "" where it is none."""
    try:
        return VolumeLabel.decode(bytes(block[:LABEL_BYTES])).volume_uuid.hex()
    except VolumeMismatch:
        return ""


def _digits(identifier: str) -> str:
    return identifier.replace("-", "").lower()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()  # the names that a drive gives itself may be any bytes
    except OSError:
        return ""
