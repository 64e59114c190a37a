"""What a process holds, for tests that nothing leaks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Footprint", "footprint"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Open descriptors, threads, and bytes of memory that no file is behind."""

    fds: int
    threads: int
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.fds} descriptors, {self.threads} threads, {self.memory_bytes >> 20} MiB"


def footprint(pid: int) -> Footprint:
    """Of a process, now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return Footprint(
        len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["RssAnon"].split()[0]) << 10
    )
