"""Room that is kept free on the file system of metadata, so that a delete can always be written.

A full disk is got over by deleting, and RocksDB has to write for that. So no new block is taken while less than the
reserve is free, and no region is claimed on the same file system that would take it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from forebay.errors import NoSpace

__all__ = ["Reserve"]

_MOST_SHARE = 10

_log = logging.getLogger(__name__)


class Reserve:
    """``least_bytes`` of the file system of ``path``, never more than a tenth of it. Without a path there is none."""

    def __init__(self, path: Path | None = None, least_bytes: int = 0) -> None:
        self._path = path
        self._least_bytes = least_bytes
        self.free_bytes = 0
        """At the last look."""
        self._short_by: tuple[int, int] | None = None

    @property
    def problem(self) -> NoSpace | None:
        """Why no new block is taken, or None."""
        if self._short_by is None:
            return None
        free_bytes, least_bytes = self._short_by
        return NoSpace(
            f"{self._path} has {free_bytes >> 20} MiB free on its file system, less than the {least_bytes >> 20} MiB "
            "that are kept so that metadata can be written (space.metadata_reserve): free some; until then blocks are "
            "read and deleted, but not stored",
            field="metadata_dir",
            limit=least_bytes,
        )

    def look(self) -> None:
        """See what is free. Raises OSError."""
        if self._path is None:
            return
        free_bytes, least_bytes = self._measure(self._path)
        self.free_bytes = free_bytes
        was = self._short_by
        self._short_by = None if free_bytes >= least_bytes else (free_bytes, least_bytes)
        if self.problem is not None and was is None:
            _log.warning("%s", self.problem.message)
        elif self.problem is None and was is not None:
            _log.warning("%s has %d MiB free again: new blocks are stored", self._path, free_bytes >> 20)

    def allows(self, drive: Path, length_bytes: int) -> bool:
        """Whether so much more may be taken on a drive; always, where that is another file system."""
        if self._path is None or not self._least_bytes:
            return True
        try:
            if os.stat(drive).st_dev != os.stat(self._path).st_dev:
                return True
            free_bytes, least_bytes = self._measure(self._path)
        except OSError:
            return True  # whoever takes it finds out
        return free_bytes - length_bytes >= least_bytes

    def _measure(self, path: Path) -> tuple[int, int]:
        """Bytes that are free, and that must be."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, min(self._least_bytes, found.f_blocks * found.f_frsize // _MOST_SHARE)
