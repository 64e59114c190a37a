"""A histogram that costs a microsecond: latencies are counted on paths where a library's locks would be seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["LATENCY_BOUNDS_S", "Histogram"]

LATENCY_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper ends of the buckets in seconds: 0.1 ms to a minute."""


class Histogram:
    """Counts of values by bucket, and their sum. One thread adds; any may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value; one that equals a bound belongs to the bucket that ends there."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Bucket ends and how many values were not above them, as Prometheus has it; the last end is ``+Inf``."""
        ends = [*(str(bound) for bound in self.bounds), "+Inf"]
        running, rows = 0, []
        for end, count in zip(ends, list(self.counts), strict=True):
            running += count
            rows.append((end, float(running)))
        return rows
