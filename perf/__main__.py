"""``python -m perf``: all comparisons, or those that are named; a table, and JSON rows when asked."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perf.harness import Row, Sizes, file_system, machine
from perf.ratios import BENCHMARKS, GROUPS, NOT_UNASKED
from perf.report import save, table
from perf.workload import Bench, Skipped

__all__ = ["FULL", "QUICK", "main"]

_KIB = 1 << 10
_MIB = 1 << 20
FULL = Sizes(
    name="full",
    repeats=9,
    slot_bytes=128 * _MIB,
    slot_calls=128,
    working_bytes=256 * _MIB,
    node_bytes=1024 * _MIB,
    batch=16,
    block_bytes=(64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB),
    match_blocks=1_000_000,
    match_calls=500,
    flushes=100,
    scale_blocks=1_000_000,
    engine_rounds=100,
    replay_s=30,
)
QUICK = Sizes(
    name="quick",
    repeats=3,
    slot_bytes=32 * _MIB,
    slot_calls=32,
    working_bytes=64 * _MIB,
    node_bytes=256 * _MIB,
    batch=16,
    block_bytes=(_MIB, 4 * _MIB),
    match_blocks=20_000,
    match_calls=50,
    flushes=20,
    scale_blocks=50_000,
    engine_rounds=12,
    replay_s=6,
)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    groups = "; ".join(f"{name} for {', '.join(of)}" for name, of in GROUPS.items())
    which = f"of {', '.join(BENCHMARKS)}; {groups}; all but {', '.join(sorted(NOT_UNASKED))} without"
    parser.add_argument("names", nargs="*", metavar="NAME", help=which)
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs, not how fast")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds of each comparison")
    parser.add_argument("--scale-blocks", type=int, metavar="N", help="blocks of `scale`, 1,000,000 without")
    parser.add_argument("--json", action="store_true", help="JSON rows instead of the table")
    parser.add_argument("--save", metavar="NAME", help="write the rows to perf/results/<date>-NAME.json")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), metavar="DIR", help="a directory on tmpfs")
    parser.add_argument(
        "--disk", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="a directory on a disk"
    )
    arguments = parser.parse_args(argv)
    arguments.names = [each for name in arguments.names for each in GROUPS.get(name, (name,))]
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no comparison is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if file_system(arguments.memory) != "tmpfs":
        parser.error(f"{arguments.memory} is not on tmpfs; name a directory that is with --memory")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 however the figures are, since a miss is a result."""
    arguments = _arguments(argv)
    sizes = QUICK if arguments.quick else FULL
    if arguments.repeats:
        sizes = sizes.with_repeats(arguments.repeats)
    if arguments.scale_blocks:
        sizes = replace(sizes, scale_blocks=arguments.scale_blocks)
    disk = None if file_system(arguments.disk) == "tmpfs" else arguments.disk
    bench = Bench(sizes, arguments.memory, disk)
    rows: list[Row] = []
    path: Path | None = None
    names = arguments.names or [name for name in BENCHMARKS if name not in NOT_UNASKED]
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            for row in BENCHMARKS[name](bench):
                rows.append(row)
                print(f"    {row.name}: {row.ratio.median:.2f}", file=sys.stderr, flush=True)
            print(f"    {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        except Skipped as reason:
            print(f"    skipped: {reason}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("    interrupted: these are the rows so far", file=sys.stderr, flush=True)
            break
        finally:  # after each, so that what took minutes is not lost to what fails later
            if arguments.save and rows:
                path = save(rows, arguments.save, sizes.name)
    if arguments.json:
        for row in rows:
            print(json.dumps(row.as_json(), ensure_ascii=False))
    else:
        print(table(rows))
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if path is not None:
        print(f"saved to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
