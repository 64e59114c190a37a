"""Checks of where a node keeps its data: permissions, file systems, O_DIRECT, hole punching, space."""

from __future__ import annotations

import errno
import os
import stat
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.appliance.dataplane.target.volume import Volume
from forebay.appliance.dataplane.volumes import drive_space
from forebay.cli.doctor.finding import Finding, fail, ok, warn
from forebay.cli.sizes import format_size
from forebay.errors import ForebayError
from forebay.measure.machine import file_system

__all__ = ["check_data", "check_drive"]

_PROBE_BYTES = 1 << 20
_FLUSHES = 5
_SLOW_FLUSH_MS = 20.0
_SPARE_SHARE = 0.02
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre"}
_COPIES = {"overlay", "aufs"}


def _there(path: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def check_data(data: Path) -> Iterator[Finding]:
    """The data directory and the secrets in it."""
    if not data.exists():
        above = _there(data)
        if os.access(above, os.W_OK | os.X_OK):
            yield ok("data directory", f"{data} will be made in {above}")
        else:
            yield fail(
                "data directory",
                f"{data} cannot be made: {above} is not writable by this user",
                f"another --data, or: sudo install -d -o {os.getuid()} -m 700 {data}",
            )
        return
    if not data.is_dir():
        yield fail("data directory", f"{data} is no directory", "choose another --data")
        return
    if not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        if os.statvfs(data).f_flag & os.ST_RDONLY:
            yield fail("data directory", f"the file system of {data} is read-only", "remount it, or another --data")
        else:
            yield fail(
                "data directory", f"{data} is not readable and writable by this user", "chown it, or run as its owner"
            )
    elif _mode(data) & 0o077:
        yield warn("data directory", f"{data} has mode {_mode(data):04o}: others can look in", f"chmod 700 {data}")
    else:
        yield ok("data directory", f"{data}, mode {_mode(data):04o}")
    for name, secret in (("admin.token", True), ("node.json", False)):
        path = data / name
        if not path.exists():
            continue
        mode = _mode(path)
        if secret and mode & 0o077:
            yield fail(
                name,
                f"{path} has mode {mode:04o}: others can administer the node",
                f"chmod 600 {path}; then `forebay principal rotate admin`",
            )
        else:
            yield ok(name, f"mode {mode:04o}")


def check_drive(name: str, path: Path, capacity_bytes: int | None) -> Iterator[Finding]:
    """File system, how volumes would be read there, hole punching, flushes, space."""
    here = _there(path)
    kind = file_system(here)
    if kind in ("tmpfs", "ramfs"):
        yield warn(
            name,
            f"{here} is {kind}: blocks are in memory and gone after a reboot",
            "put drives on flash, unless this is meant",
        )
    elif kind in _NETWORK or kind.startswith("fuse"):
        yield warn(name, f"{here} is {kind}: not a drive of this node", "drives are local: xfs or ext4 on NVMe")
    elif kind in _COPIES:
        yield warn(name, f"{here} is {kind}, a container's own layer: gone with the container", "mount a volume for it")
    else:
        yield ok(name, f"{here} is {kind}")
    try:
        yield from _probe(name, here)
    except OSError as e:
        yield fail(name, f"no file can be used in {here}: {e.strerror or e}", "check owner, mount options and quota")
    try:
        space = drive_space(here)
    except (ForebayError, OSError) as e:
        yield fail(name, f"the space of {here} is not known: {e}", "check the mount")
        return
    told = f"{format_size(space.usable_bytes)} usable ({format_size(space.held_bytes)} of it held by volumes)"
    if capacity_bytes is not None and space.usable_bytes < capacity_bytes:
        yield fail(
            name, f"{told}, and its capacity is {format_size(capacity_bytes)}", "a smaller capacity, or a larger drive"
        )
    elif space.usable_bytes < space.total_bytes * _SPARE_SHARE:
        yield warn(name, f"{told}: nearly full", "free space, or a larger drive")
    else:
        capacity = f" for a capacity of {format_size(capacity_bytes)}" if capacity_bytes is not None else ""
        yield ok(name, f"{told}{capacity}")


def _probe(name: str, here: Path) -> Iterator[Finding]:
    """Opens a small volume as the target does, prepares a region of it and gives it back."""
    with tempfile.NamedTemporaryFile(dir=here, prefix=".forebay-doctor-") as file:
        os.ftruncate(file.fileno(), _PROBE_BYTES)
        volume = Volume("doctor", Path(file.name))
        try:
            if volume.io == "buffered":
                yield warn(name, "O_DIRECT is refused: reads go through the page cache", "xfs or ext4 on a local drive")
            else:
                yield ok(name, "O_DIRECT works" if volume.io == "direct" else "read from a mapping of memory")
            yield from _regions(name, volume, file.fileno())
        finally:
            volume.close()


def _regions(name: str, volume: Volume, handle: int) -> Iterator[Finding]:
    try:
        volume.prepare_region(0, _PROBE_BYTES)
        taken = os.fstat(handle).st_blocks * 512
        volume.release_region(0, _PROBE_BYTES)
        left = os.fstat(handle).st_blocks * 512
    except OSError as e:
        fix = "free some there" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "xfs, ext4, btrfs or tmpfs"
        yield fail(name, f"space cannot be reserved and given back (fallocate): {e.strerror}", fix)
        return
    if taken < _PROBE_BYTES or left >= taken:
        yield warn(name, f"holes are punched and free nothing ({taken} bytes before, {left} after)", "xfs or ext4")
    else:
        yield ok(name, "space can be reserved, and holes punched")
    took = []
    for i in range(_FLUSHES):
        os.pwrite(handle, bytes([i + 1]) * 4096, 0)
        began = time.perf_counter()
        os.fdatasync(handle)
        took.append((time.perf_counter() - began) * 1e3)
    flush_ms = statistics.median(took)
    if flush_ms > _SLOW_FLUSH_MS:
        yield warn(
            name,
            f"a flush takes {flush_ms:.1f} ms: durability flush is bound by it",
            "a drive with power loss protection",
        )
    else:
        yield ok(name, f"a flush takes {flush_ms:.2f} ms")
