"""A volume: one file (or block device) that is served as an NVMe namespace, and how its bytes are moved.

Three ways, chosen when it is opened (`Volume.io`):

* `mmap`: the file system is memory itself (tmpfs, ramfs). Reads are sent straight from a mapping, one copy in all.
  Reading a hole through the mapping allocates its pages there, so only prepared regions should be read.
* `direct`: O_DIRECT, for disks. No page cache: what is acknowledged is with the drive, and reads of another host's
  writes are never stale.
* `buffered`: where O_DIRECT is refused; pages are given back after use.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock
from typing import Final, Literal
from uuid import UUID

from forebay.checksum import crc32c
from forebay.ids import LBA_BYTES

__all__ = ["IoTally", "Volume", "aligned_buffers"]

_MEMORY_FILE_SYSTEMS: Final = frozenset((0x01021994, 0x858458F6))
"""f_type of tmpfs and ramfs, statfs(2)."""
_FALLOC_KEEP_SIZE: Final = 0x01
_FALLOC_PUNCH_HOLE: Final = 0x02
_FALLOC_ZERO_RANGE: Final = 0x10
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_VERIFY_BYTES: Final = 2 << 20
_HUGE_PAGE_BYTES: Final = 2 << 20


class IoTally:
    """What one queue did on one volume. Only that queue's thread adds to it.

    ``read_ns`` is the time that reads took with their sending, ``write_ns`` that of writing to media, ``unmap_ns`` that
    of deallocating and of writing zeros. ``errors`` are what the drive refused or failed, ``no_space`` those of them
    that say it is full.
    """

    __slots__ = (
        "bytes_read",
        "bytes_unmapped",
        "bytes_written",
        "errors",
        "no_space",
        "read_ns",
        "reads",
        "unmap_ns",
        "unmaps",
        "write_ns",
        "writes",
    )

    def __init__(self) -> None:
        self.reads = self.bytes_read = self.read_ns = 0
        self.writes = self.bytes_written = self.write_ns = 0
        self.unmaps = self.bytes_unmapped = self.unmap_ns = 0
        self.errors = self.no_space = 0

    def add(self, other: IoTally) -> None:
        """Add another's counts to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def aligned_buffers(size_bytes: int) -> list[memoryview]:
    """One or more buffers of that size for O_DIRECT, as many as fit into a huge page, their pages already there.

    Huge pages where the kernel has them: a drive then gets a few long segments instead of hundreds of single pages,
    which doubles what one thread reads and takes half of its CPU time.
    """
    count = max(1, _HUGE_PAGE_BYTES // size_bytes)
    length_bytes = -(-size_bytes * count // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, length_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    whole = memoryview(memory)[skip : skip + size_bytes * count]
    whole[:: mmap.PAGESIZE] = bytes(-(-len(whole) // mmap.PAGESIZE))
    return [whole[at : at + size_bytes] for at in range(0, size_bytes * count, size_bytes)]


def _in_memory(fd: int) -> bool:
    found = (ctypes.c_long * 64)()  # struct statfs is 120 bytes on 64-bit Linux; f_type comes first
    if _LIBC.fstatfs(fd, ctypes.byref(found)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return (found[0] & 0xFFFFFFFF) in _MEMORY_FILE_SYSTEMS


def _fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
    """fallocate(2), which Python has only without its modes; restarts after signals."""
    while True:
        # A plain CDLL call gives up the GIL, and freeing a region takes as long as it takes.
        if not _LIBC.fallocate(fd, mode, ctypes.c_int64(offset_bytes), ctypes.c_int64(length_bytes)):
            return
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Volume:
    """An open volume.

    Reads and writes may run in any number of threads. `close` must not meet them: the server waits for its queues
    first, and control operations `hold` the volume.
    """

    def __init__(self, name: str, path: Path, *, readonly: bool = False, uuid: UUID | None = None) -> None:
        """Open `path`, whose size is the volume's for as long as it is open.

        Raises OSError: EINVAL for a size that is no multiple of 4,096, EBUSY if the file is open as a volume already
        (here or in another target process).
        """
        self.name = name
        self.path = path
        self.readonly = readonly
        self.uuid = uuid
        self.fenced = True
        self._flushing = Lock()
        self._flush_failed = False
        self._holders = 0
        self._closing = False
        self._held = Condition()
        self._tally = IoTally()
        self._tallies: set[IoTally] = set()
        self._tally_lock = Lock()
        flags = (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC
        self._fd = os.open(path, flags)
        self.read_view: memoryview | None = None
        """The whole volume, where reads can be sent from memory."""
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY)) from error
            mode = os.fstat(self._fd).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self.size_bytes = os.lseek(self._fd, 0, os.SEEK_END)
            if not self.size_bytes or self.size_bytes % LBA_BYTES:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self.lba_count = self.size_bytes // LBA_BYTES
            self.is_device = stat.S_ISBLK(mode)
            self.io = self._choose_io(stat.S_ISREG(mode))
        except BaseException:
            os.close(self._fd)
            raise

    def _choose_io(self, regular: bool) -> Literal["mmap", "direct", "buffered"]:
        if regular and _in_memory(self._fd):
            self.read_view = memoryview(
                mmap.mmap(self._fd, self.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            )
            return "mmap"
        try:
            # On the same open file description, so that the lock stays with it.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
            os.preadv(self._fd, [aligned_buffers(LBA_BYTES)[0]], 0)  # some file systems refuse only here
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return "buffered"
        return "direct"

    def was_replaced(self) -> bool:
        """Whether another file, or none, is under the path now."""
        try:
            return not os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return True

    @property
    def in_memory(self) -> bool:
        """Whether the file system is memory itself: a flush has nothing to do."""
        return self.io == "mmap"

    @property
    def deallocates(self) -> bool:
        """Whether hosts may have ranges deallocated or zeroed: on a fenced volume that is the daemon's part."""
        return not self.fenced and not self.readonly

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the file open for the time of a control operation. Raises OSError (ENODEV) once it is closing.

        Without this a descriptor could be closed, and used again for another file, under a hole punch.
        """
        with self._held:
            if self._closing:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            self._holders += 1
        try:
            yield
        finally:
            with self._held:
                self._holders -= 1
                self._held.notify_all()

    def close(self) -> None:
        """Let go of the file, after the last holder. No read or write of a queue may be under way."""
        with self._held:
            self._closing = True
            self._held.wait_for(lambda: not self._holders)
        # Not unmapped by hand: that fails as long as any view of it lives, wherever that may be.
        self.read_view = None
        os.close(self._fd)

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        """Fill `view` (4 KiB aligned in memory and length) from `offset_bytes`. Raises OSError."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:] if done else view], offset_bytes + done)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than its volume")
            done += count
        if self.io == "buffered":
            os.posix_fadvise(self._fd, offset_bytes, len(view), os.POSIX_FADV_DONTNEED)

    def write(self, view: memoryview, offset_bytes: int) -> None:
        """Write all of `view` (4 KiB aligned in memory and length). Raises OSError."""
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:] if done else view, offset_bytes + done)
        if self.io == "buffered":
            os.posix_fadvise(self._fd, offset_bytes, len(view), os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Put everything written so far on stable media. Raises OSError, and then for ever.

        Linux reports a failed write-back once and then forgets it; a later success would be a lie. So would one that
        runs beside the flush that is told: they go one after another.
        """
        with self._flushing:
            if self._flush_failed:
                raise OSError(errno.EIO, "an earlier flush failed")
            try:
                os.fdatasync(self._fd)
            except OSError:
                self._flush_failed = True
                raise

    def prepare_region(self, offset_bytes: int, length_bytes: int) -> None:
        """Reserve the range's space and make it read as zeros. Raises OSError (ENOSPC: nothing stays reserved)."""
        if self.is_device:  # its space is all there; on a thin one zeros keep what they are written to
            self.write_zeroes(offset_bytes, length_bytes)
            return
        _fallocate(self._fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset_bytes, length_bytes)
        try:
            _fallocate(self._fd, _FALLOC_KEEP_SIZE, offset_bytes, length_bytes)
        except OSError:
            _fallocate(self._fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset_bytes, length_bytes)
            raise

    def release_region(self, offset_bytes: int, length_bytes: int) -> None:
        """Give the range's space back to the file system or device; it reads as zeros after. Raises OSError.

        Stable when this returns: its record goes next, and nobody would know of space that came back with a power loss.
        Of a device the kernel makes a discard where that is known to zero, and else says EOPNOTSUPP.
        """
        try:
            _fallocate(self._fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset_bytes, length_bytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not self.is_device:
                raise
            self.write_zeroes(offset_bytes, length_bytes)
        self.flush()

    def write_zeroes(self, offset_bytes: int, length_bytes: int) -> None:
        """Make the range read as zeros and keep its space. Raises OSError."""
        try:
            _fallocate(self._fd, _FALLOC_ZERO_RANGE | _FALLOC_KEEP_SIZE, offset_bytes, length_bytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or self.is_device:
                raise
            self.prepare_region(offset_bytes, length_bytes)  # tmpfs, among others

    def checksums(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        """CRC-32C of `(offset_bytes, length_bytes, seed)` ranges. Raises OSError.

        By read and not through a mapping: a page that cannot be had must be an error, not a signal.
        """
        found: list[int] = []
        buffer = aligned_buffers(_VERIFY_BYTES)[0]
        for offset_bytes, length_bytes, seed in ranges:
            value, at, end = seed, offset_bytes, offset_bytes + length_bytes
            while at < end:
                base = at // LBA_BYTES * LBA_BYTES
                take = min(end, base + _VERIFY_BYTES) - at
                whole = -(-(at - base + take) // LBA_BYTES) * LBA_BYTES
                self.read_into(buffer[:whole], base)
                value = crc32c(buffer[at - base : at - base + take], value)
                at += take
            found.append(value)
        return found

    # --- accounting -------------------------------------------------------------------------------------------------

    def open_tally(self) -> IoTally:
        """A tally for one queue, counted in `tally` until and after `close_tally`."""
        tally = IoTally()
        with self._tally_lock:
            self._tallies.add(tally)
        return tally

    def close_tally(self, tally: IoTally) -> None:
        """The queue that had this tally is gone; its counts stay."""
        with self._tally_lock:
            self._tallies.discard(tally)
            self._tally.add(tally)

    def tally(self) -> IoTally:
        """Everything done on the volume since it was opened."""
        total = IoTally()
        with self._tally_lock:
            total.add(self._tally)
            for tally in self._tallies:
                total.add(tally)
        return total
