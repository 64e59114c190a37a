"""Directories that outlive a power loss: a file is there after one only if every directory above it is, too.

Fsync of a file makes its bytes stable and says nothing of its name; that takes an fsync of the directory it is in.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["make_directory", "sync_directory"]


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
