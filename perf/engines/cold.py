"""Files out of the page cache, so that they are read from the disk again. For files of one's own: nobody else's go."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cached_bytes", "drop"]


def _files(folder: Path) -> Iterator[int]:
    """Each regular file below that is not empty, open for reading."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            fd = os.open(path, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)


def drop(folder: Path) -> None:
    """Have the kernel forget every file's pages (``POSIX_FADV_DONTNEED``), once those that are dirty are written."""
    for fd in _files(folder):
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(folder: Path) -> int:
    """How much of all files is cached, by mincore(2), which reads nothing. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for fd in _files(folder):
        size = os.fstat(fd).st_size
        seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as mapped:
            start = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), seen)
            del start  # a mapping with a view of it cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        pages += sum(byte & 1 for byte in bytes(seen))
    return pages * mmap.PAGESIZE
