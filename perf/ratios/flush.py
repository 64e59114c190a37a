"""How long `fdatasync` takes on the disk after a write of 1 MiB: what a durable figure stands on, not a ratio."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from perf.harness import Row, Sizes, file_system, latency_row
from perf.node import scratch
from perf.workload import Bench

__all__ = ["flush_latencies", "run"]

_WRITE_BYTES = 1 << 20


def run(bench: Bench) -> Iterator[Row]:
    """One row. Raises `Skipped` without a disk."""
    disk = bench.disk()
    yield latency_row(
        "fdatasync.disk",
        "fdatasync after an O_DIRECT write of 1 MiB",
        flush_latencies(disk, bench.sizes),
        quantile=0.5,
        aim_ms=None,
        details={"file_system": file_system(disk)},
    )


def flush_latencies(folder: Path, sizes: Sizes) -> list[float]:
    """Seconds of each flush, over a file that was allocated before."""
    latencies: list[float] = []
    with scratch(folder) as place, mmap.mmap(-1, _WRITE_BYTES) as block:
        block[:] = os.urandom(_WRITE_BYTES)
        handle = os.open(place / "flushed", os.O_RDWR | os.O_CREAT | _direct(folder), 0o600)
        try:
            for timed in (False, True):
                for i in range(sizes.flushes):
                    os.pwrite(handle, block, i * _WRITE_BYTES)
                    began = time.perf_counter()
                    os.fdatasync(handle)
                    if timed:
                        latencies.append(time.perf_counter() - began)
        finally:
            os.close(handle)
    return latencies


def _direct(folder: Path) -> int:
    """O_DIRECT where the file system has it; tmpfs got it late."""
    return 0 if file_system(folder) == "tmpfs" else os.O_DIRECT
