"""A block device for tests: a loop device over a file, where root can make one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["loop_device"]


@contextmanager
def loop_device(backing: Path, size_bytes: int, *, read_only: bool = False) -> Iterator[Path]:
    """A device of that size, zero at first, or of what is there already; skips the test where there can be none."""
    if os.geteuid() or not os.path.exists("/dev/loop-control") or shutil.which("losetup") is None:
        pytest.skip("no loop devices here (root and losetup are needed)")
    with backing.open("ab") as file:
        os.truncate(file.fileno(), size_bytes)
    made = subprocess.run(
        ["losetup", "--find", "--show", *(["--read-only"] if read_only else []), backing],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no loop devices here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
