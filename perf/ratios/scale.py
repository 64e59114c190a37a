"""Blocks of eight tiles by the million: memory of the index, and how long a start takes (design §9: 200 B, 10 s).

The metadata lies on the disk, and the system has it cached. Every start is a process of its own. What is timed is from
opened metadata to an index that can serve: with a checkpoint of the index, with one after 100,000 changes since, and
without one, when every record is read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forebay.appliance.namespace.checkpoint import FILE_NAME
from perf.harness import Row, file_system, interval
from perf.node import scratch
from perf.workload import Bench

__all__ = ["run"]

_TILES = 8
_CHANGES = 100_000
_STARTS = 3


def run(bench: Bench) -> Iterator[Row]:
    """Four rows. Raises `Skipped` without a disk."""
    disk, blocks = bench.disk(), bench.sizes.scale_blocks
    changes = min(_CHANGES, blocks // 2)
    name = f"{blocks // 1_000_000}M" if blocks >= 1_000_000 else str(blocks)
    details = {"blocks": blocks, "tiles": _TILES, "file_system": file_system(disk)}
    with scratch(disk) as folder:
        _process("make", folder, blocks)
        loaded = [_start(folder, blocks) for _ in range(_STARTS)]
        memory = [start["index_bytes"] / blocks for start in loaded]
        facts = {name: loaded[-1][name] for name in ("rss_bytes", "index_bytes", "checkpoint_bytes")}
        yield _row(f"index.{name}", "index memory for each block", "B", memory, aim=200, details=details | facts)
        what = "from opened metadata to serving"
        yield _start_row(f"start.{name}.checkpoint", f"{what}, with a checkpoint", loaded, 10, details)
        _process("change", folder, blocks, changes)
        changed = [_start(folder, blocks) for _ in range(_STARTS)]
        details |= {"changes": changes}
        told = f"{what}, with a checkpoint and {changes:,} changes since"
        yield _start_row(f"start.{name}.changed", told, changed, 10, details)
        (folder / FILE_NAME).unlink()
        rebuilt = [_start(folder, blocks)]
        yield _start_row(f"start.{name}.records", f"{what}, without a checkpoint", rebuilt, None, details)


def _process(what: str, folder: Path, *numbers: int) -> str:
    command = [sys.executable, "-m", "perf.scale_node", what, str(folder), *map(str, numbers)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def _start(folder: Path, blocks: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(_process("start", folder, blocks))
    return told


def _start_row(
    name: str, what: str, starts: Sequence[dict[str, Any]], aim_s: float | None, details: dict[str, Any]
) -> Row:
    cpu = [float(f"{start['cpu_s']:.4g}") for start in starts]
    facts = {"cpu_s": cpu, "rss_bytes": starts[-1]["rss_bytes"]}
    return _row(name, what, "s", [start["start_s"] for start in starts], aim=aim_s, details=details | facts)


def _row(
    name: str, what: str, unit: str, values: Sequence[float], *, aim: float | None, details: dict[str, Any]
) -> Row:
    """A figure of its own; it stands as the ratio, too."""
    found = interval(values)
    return Row(name, what, unit, found, None, found, "at most", aim, len(values), details)
