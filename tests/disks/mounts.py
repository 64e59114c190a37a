"""Small file systems of a test's own, in a mount namespace that ends with the process, where root may have one."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["ext4", "fill", "tmpfs", "unmount"]

_CLONE_NEWNS = 0x00020000


@functools.cache
def _private() -> str | None:
    """Give this process mounts of its own; why not, or None."""
    if os.geteuid() or shutil.which("mount") is None:
        return "no mounts here (root and mount are needed)"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        return f"no mount namespace here: {os.strerror(ctypes.get_errno())}"
    done = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True, check=False)
    return done.stderr.strip() or None if done.returncode else None


def _mount(*arguments: str | Path) -> None:
    if reason := _private():
        pytest.skip(reason)
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no such mount here: {done.stderr.strip()}")


def tmpfs(where: Path, size_bytes: int) -> Path:
    """An empty file system in memory; skips the test where there can be none."""
    where.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "none", where)
    return where


def ext4(where: Path, image: Path, size_bytes: int) -> Path:
    """A file system in a file, which is made if it is not there; skips the test where there can be none."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 here")
    where.mkdir(parents=True, exist_ok=True)
    if not image.exists():
        image.touch()
        os.truncate(image, size_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    _mount("-o", "loop", image, where)
    return where


def unmount(where: Path) -> None:
    """Take a file system away, though files of it are open."""
    subprocess.run(["umount", "--lazy", where], check=True)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """Take what is free on a file system, but for so much; remove the file to give it back."""
    file = folder / "filler"
    with file.open("wb") as out:
        free = os.statvfs(folder)
        left = free.f_bavail * free.f_frsize - leave_bytes
        while left > 0:
            try:
                left -= out.write(bytes(min(left, 1 << 20)))
                out.flush()
            except OSError:
                break
    return file
