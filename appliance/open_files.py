"""The limit of open files of this process, of which every connection takes one."""

from __future__ import annotations

import resource
from contextlib import suppress

__all__ = ["raise_open_files"]


def raise_open_files() -> int:
    """Take as many as the administrator allows (the hard limit) instead of what shells start with; how many they are.

    Children that are started later have them too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a kernel that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft
