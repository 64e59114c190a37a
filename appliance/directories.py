"""Directories that outlive a power loss: a file is there after one only if every directory above it is, too.

Fsync of a file makes its bytes stable and says nothing of its name; that takes an fsync of the directory it is in.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["make_directory", "probe_directory", "sync_directory"]

_PROBE_FILE = "forebay.probe"


def sync_directory(path: Path) -> None:
    """Make the names in a directory stable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Make a directory for us alone (0700), and those above it, stable when this returns. Raises OSError.

    One that is there is made stable all the same: whoever made it may have been stopped before doing so.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for parent in path.absolute().parents:
        try:
            sync_directory(parent)
        except OSError as error:
            # what we may not read we did not make; and not every file system syncs directories
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS):
                raise


def probe_directory(path: Path, length_bytes: int) -> None:
    """See whether its file system takes writes: a file of so many bytes is made stable and removed. Raises OSError."""
    probe = path / _PROBE_FILE
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(bytes(length_bytes))
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    finally:
        with suppress(OSError):
            os.unlink(probe)
