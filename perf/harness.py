"""Two or more ways to do the same work, measured in turns in one run, and the row that comes of a pair of them.

A *side* does a slot of work when asked. Slots of the sides alternate, the order turning with every round, so that
whatever else the machine does meets all of them. A ratio is taken per round; the row has the median of the ratios and
a bootstrap interval of that median. Beside wall speed stand CPU seconds per GB (10^9 bytes) of the client, which is
this process, and of the servers, read from their process clocks.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "Interval",
    "Row",
    "Sample",
    "Side",
    "Sizes",
    "file_system",
    "gb_per_s_row",
    "interleave",
    "interval",
    "latency_row",
    "machine",
    "quantiles_ms",
]

_SETTLE_S = 0.05
"""A side that leaves work for later (leases given back in the background) pays for it in its own slot."""
_BOOTSTRAP = 2_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Bytes are of user data."""

    name: str
    repeats: int
    slot_bytes: int
    working_bytes: int
    node_bytes: int
    batch: int
    block_bytes: tuple[int, ...]
    match_blocks: int
    match_calls: int
    flushes: int

    def with_repeats(self, repeats: int) -> Sizes:
        """The same with another number of rounds."""
        return replace(self, repeats=repeats)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do the work. ``work`` does a slot of it and returns the bytes moved.

    ``before`` runs ahead of each slot, ``after`` when all are done, neither timed. ``servers`` are the processes whose
    CPU time counts as the servers'.
    """

    name: str
    work: Callable[[], int]
    servers: tuple[int, ...] = ()
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Sample:
    """One slot of one side."""

    bytes: int
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.wall_s / 1e9


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {name: float(f"{getattr(self, name):.4g}") for name in ("median", "low", "high")}


@dataclass(frozen=True, slots=True)
class Row:
    """One ratio, as printed and stored. ``aim`` is what design §9 asks for; ``met`` is None where it asks nothing.

    ``comparison`` says on which side of the aim the figure has to be: ``at least`` or ``at most``.
    """

    name: str
    what: str
    unit: str
    ours: Interval
    baseline: Interval | None
    ratio: Interval
    comparison: str
    aim: float | None
    repeats: int
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.ratio.median >= self.aim if self.comparison == "at least" else self.ratio.median <= self.aim

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours.as_json(),
            "baseline": self.baseline.as_json() if self.baseline else None,
            "ratio": self.ratio.as_json(),
            "comparison": self.comparison,
            "aim": self.aim,
            "met": self.met,
            "repeats": self.repeats,
            **self.details,
        }


def _process_cpu_s(pid: int) -> float:
    """User and system time of another process, all of its threads, those that ended too: Linux's process clock."""
    return time.clock_gettime((~pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers.h


def _sample(side: Side) -> Sample:
    side.before()
    server = sum(map(_process_cpu_s, side.servers))
    client, wall = time.process_time(), time.perf_counter()
    done = side.work()
    wall = time.perf_counter() - wall
    time.sleep(_SETTLE_S)
    client = time.process_time() - client
    server = sum(map(_process_cpu_s, side.servers)) - server
    return Sample(done, wall, client, server)


def interleave(sides: Sequence[Side], repeats: int) -> dict[str, list[Sample]]:
    """Samples by the sides' names, one a round; a first round warms up and is not counted."""
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for turn in range(repeats + 1):
        first = turn % len(sides)
        for side in (*sides[first:], *sides[:first]):
            sample = _sample(side)
            if turn:
                samples[side.name].append(sample)
    for side in sides:
        side.after()
    return samples


def interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % bootstrap interval, by a fixed seed."""
    rng = random.Random(len(values))
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(_BOOTSTRAP))
    return Interval(statistics.median(values), medians[int(_BOOTSTRAP * 0.025)], medians[int(_BOOTSTRAP * 0.975) - 1])


def _cpu(samples: Sequence[Sample]) -> dict[str, float]:
    """CPU seconds per GB over all rounds: sums, so that the clocks' steps do not matter."""
    gigabytes = sum(s.bytes for s in samples) / 1e9
    client, server = sum(s.client_cpu_s for s in samples), sum(s.server_cpu_s for s in samples)
    figures = {"client": client / gigabytes, "server": server / gigabytes, "both": (client + server) / gigabytes}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def gb_per_s_row(
    name: str,
    what: str,
    ours: Sequence[Sample],
    baseline: Sequence[Sample],
    *,
    aim: float | None,
    cpu_aim: float | None = None,
    details: Mapping[str, Any],
) -> Row:
    """A row of speeds, the ratio being ours / baseline, at least ``aim``; CPU (ours / baseline) at most ``cpu_aim``."""
    ratios = [a.gb_per_s / b.gb_per_s for a, b in zip(ours, baseline, strict=True)]
    cpu, cpu_baseline = _cpu(ours), _cpu(baseline)
    cpu_ratio = float(f"{cpu['both'] / cpu_baseline['both']:.4g}")
    costs = {
        "cpu_s_per_gb": cpu,
        "baseline_cpu_s_per_gb": cpu_baseline,
        "cpu_ratio": cpu_ratio,
        "cpu_aim": cpu_aim,
        "cpu_met": None if cpu_aim is None else cpu_ratio <= cpu_aim,
        "slot_bytes": ours[0].bytes,
    }
    return Row(
        name,
        what,
        "GB/s",
        interval([s.gb_per_s for s in ours]),
        interval([s.gb_per_s for s in baseline]),
        interval(ratios),
        "at least",
        aim,
        len(ours),
        {**costs, **details},
    )


def latency_row(
    name: str,
    what: str,
    latencies_s: Sequence[float],
    *,
    quantile: float,
    aim_ms: float | None,
    details: Mapping[str, Any],
) -> Row:
    """A row of one quantile of latencies in milliseconds, at most ``aim_ms``; the figure stands as the ratio, too."""
    count = len(latencies_s)
    # Order statistics around the quantile: the binomial interval, which needs no resampling.
    spread = 1.96 * (quantile * (1 - quantile) / count) ** 0.5
    found = Interval(*[_at(latencies_s, q) * 1e3 for q in (quantile, quantile - spread, quantile + spread)])
    details = {"latency_ms": quantiles_ms(latencies_s), **details}
    return Row(name, what, "ms", found, None, found, "at most", aim_ms, count, details)


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    return {"p50": float(f"{_at(seconds, 0.5) * 1e3:.4g}"), "p99": float(f"{_at(seconds, 0.99) * 1e3:.4g}")}


def _at(values: Sequence[float], quantile: float) -> float:
    return sorted(values)[min(len(values) - 1, max(0, int(len(values) * quantile)))]


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
