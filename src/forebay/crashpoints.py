"""Named places where a stop could hurt.

``crash_point("commit.before_metadata")`` does nothing unless that name is armed, by ``FOREBAY_CRASH_AT=name`` (the
process kills itself there, as SIGKILL would) or by `arm` in a test. `POINTS` lists them all so that a test can visit
each one; a name that is not listed is a programming error.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

__all__ = ["POINTS", "arm", "crash_point", "disarm", "watch"]

POINTS = (
    "allocate.before_grant",
    "allocate.after_grant",
    "commit.before_revoke",
    "commit.after_data_before_metadata",
    "commit.after_metadata_before_visible",
    "delete.before_metadata",
    "delete.after_metadata_before_free",
    "evict.before_metadata",
    "evict.after_metadata_before_free",
    "region.after_record_before_prepare",
    "region.after_prepare",
    "region.before_release",
    "region.after_release_before_record",
    "namespace.after_mark_before_volumes",
    "namespace.after_volumes_before_live",
    "drive.after_identity_before_record",
    "file.before_rename",
    "volume.after_file_before_record",
    "volume.after_regions_before_file_removed",
    "volume.after_file_removed_before_record",
    "checkpoint.before_rename",
    "checkpoint.after_rename_before_forget",
    "checkpoint.after_base_before_delete",
    "start.after_incarnation",
    "start.between_labels",
    "start.after_labels_before_confirm",
    "start.after_unfinished_file_before_record",
    "stop.before_clean",
    "stop.after_clean",
    "store.after_write_before_flush",
)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_armed: str | None = os.environ.get("FOREBAY_CRASH_AT")
_action: Callable[[], None] = _die
_watcher: Callable[[str], None] | None = None


def arm(name: str, action: Callable[[], None] = _die) -> None:
    """Run ``action`` (default: SIGKILL to this process) the next time ``name`` is reached."""
    global _armed, _action
    if name not in POINTS:
        raise KeyError(name)
    _armed, _action = name, action


def disarm() -> None:
    """Let every point pass."""
    global _armed  # noqa: PLW0603
    _armed = None


def watch(watcher: Callable[[str], None] | None) -> None:
    """Tell ``watcher`` of every point that is reached, or nobody; nothing stops there."""
    global _watcher  # noqa: PLW0603
    _watcher = watcher


def crash_point(name: str) -> None:
    """A place with a name; see the module."""
    if _watcher is not None:
        assert name in POINTS, name
        _watcher(name)
    if _armed is not None and _armed == name:
        assert name in POINTS, name
        disarm()
        _action()
