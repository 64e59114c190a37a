"""Two or more ways to do the same work, measured in turns in one run.

A *side* does a slot of work when asked. Slots of the sides alternate, the order turning with every round, so that
whatever else the machine does meets all of them. Beside wall speed stand CPU seconds of the client, which is this
process and those that a side names, and of the servers, read from their process clocks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Interval", "Sample", "Side", "cpu_s_per_gb", "interleave", "interval", "process_cpu_s", "value_at"]

_SETTLE_S = 0.05
"""A side that leaves work for later (leases given back in the background) pays for it in its own slot."""
_BOOTSTRAP = 2_000


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do the work. ``work`` does a slot of it and returns the bytes moved.

    ``before`` runs ahead of each slot, ``after`` when all are done, neither timed. ``servers`` are the processes whose
    CPU time counts as the servers', ``clients`` those that work for this one.
    """

    name: str
    work: Callable[[], int]
    servers: tuple[int, ...] = ()
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    clients: tuple[int, ...] = ()


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


def process_cpu_s(pid: int) -> float:
    """User and system time of another process, all of its threads, those that ended too: Linux's process clock."""
    return time.clock_gettime((~pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers.h


def _client_cpu_s(side: Side) -> float:
    return time.process_time() + sum(map(process_cpu_s, side.clients))


def _sample(side: Side) -> Sample:
    side.before()
    server = sum(map(process_cpu_s, side.servers))
    client, wall = _client_cpu_s(side), time.perf_counter()
    done = side.work()
    wall = time.perf_counter() - wall
    time.sleep(_SETTLE_S)
    client = _client_cpu_s(side) - client
    server = sum(map(process_cpu_s, side.servers)) - server
    return Sample(done, wall, client, server)


def interleave(sides: Sequence[Side], repeats: int, *, limit_s: float | None = None) -> dict[str, list[Sample]]:
    """Samples by the sides' names, one a round; a first round warms up and is not counted.

    With ``limit_s`` no round begins after so many seconds of counted ones, but one is always made.
    """
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    counted_from = time.monotonic()
    for turn in range(repeats + 1):
        if turn == 1:
            counted_from = time.monotonic()
        elif turn > 1 and limit_s is not None and time.monotonic() - counted_from >= limit_s:
            break
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


def cpu_s_per_gb(samples: Sequence[Sample]) -> dict[str, float]:
    """CPU seconds per GB (10^9 bytes) over all rounds: sums, so that the clocks' steps do not matter."""
    gigabytes = sum(s.bytes for s in samples) / 1e9
    client, server = sum(s.client_cpu_s for s in samples), sum(s.server_cpu_s for s in samples)
    figures = {"client": client / gigabytes, "server": server / gigabytes, "both": (client + server) / gigabytes}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def value_at(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(values)[min(len(values) - 1, max(0, int(len(values) * share)))]
