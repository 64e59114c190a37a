"""Runs a command with the recorder of `tests/shims/recorder.c` in it and in all that it starts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from tests.shims import building

__all__ = ["environment", "mark"]

_SOURCE = Path(building.__file__).with_name("recorder.c")


def environment(log: Path, root: Path) -> dict[str, str]:
    """Variables for a process whose changes under ``root`` go to ``log``."""
    recorder = str(building.build(_SOURCE))
    return {
        **os.environ,
        "LD_PRELOAD": recorder,
        "FOREBAY_POWER_LOG": str(log),
        "FOREBAY_POWER_ROOTS": str(root),
    }


def mark(text: str) -> None:
    """A line of one's own in the log, behind everything that has happened; in a process with the recorder."""
    ctypes.CDLL(None).forebay_power_mark(text.encode())
