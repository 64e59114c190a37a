"""Load and faults for hours: `python -m tests.soak --hours 8`, or `make soak HOURS=8`.

Ends at the first thing that is wrong with exit code 1, the seed that repeats the run, and the folder of what the node
and its clients left; else with a summary.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.soak.run import CYCLE, Plan, Soak

__all__: list[str] = []

_LINE_S = 60.0
_ERA_S = 60.0
_FAULT_S = 4.0
_FAULTS = 10
"""So many an era at least, about."""


class _Told:
    """A bar on a terminal, else a line a minute."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._said_s = time.monotonic()
        columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.percentage:.0f}%  {task.fields[text]}"))
        self._bar = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, disable=not sys.stderr.isatty()
        )
        self._task = self._bar.add_task("soak", total=1.0, text="")

    def __enter__(self) -> _Told:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, share: float, text: str) -> None:
        self._bar.update(self._task, completed=share, text=text)
        if not sys.stderr.isatty() and time.monotonic() - self._said_s >= _LINE_S:
            self._said_s = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')}  {share:4.0%}  {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Soak; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=0.25, help="fractions are fine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="to repeat a run's faults; 0: one of its own")
    parser.add_argument("--workers", type=int, default=3, help="client processes (default: %(default)s)")
    parser.add_argument("--capacity-mib", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the node lies; it is kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary to this file, too")
    options = parser.parse_args(argv)
    seed = options.seed or random.SystemRandom().getrandbits(32)
    seconds = options.hours * 3600
    era_s = min(_ERA_S, seconds / CYCLE)  # each kind of era comes at least once, also in a short run
    capacity_bytes = options.capacity_mib << 20
    plan = Plan(seconds, options.workers, capacity_bytes, era_s=era_s, fault_s=min(_FAULT_S, era_s / _FAULTS))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="forebay-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, in {folder}", file=sys.stderr, flush=True)
    try:
        with _Told() as told:
            summary = Soak(folder, plan, seed, told).run()
    except AssertionError as error:
        print(f"WRONG, with seed {seed}; {folder} is kept\n{error}", file=sys.stderr)
        print("\n".join(getattr(error, "__notes__", [])), file=sys.stderr)
        return 1
    text = json.dumps(summary, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
