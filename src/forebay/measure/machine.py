"""What figures were measured on."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["file_system", "machine"]


@cache
def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def file_system(path: Path) -> str:
    """Kind of the file system that ``path`` lies on, from the longest mount point above it."""
    here, kind, longest = str(path.resolve()), "unknown", -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, of_kind, *_ = line.split()
        if (here == mount or here.startswith(mount.rstrip("/") + "/")) and len(mount) > longest:
            kind, longest = of_kind, len(mount)
    return kind
