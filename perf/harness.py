"""The row that comes of two sides measured in turns (`forebay.measure`).

A ratio is taken per round; the row has the median of the ratios and a bootstrap interval of that median. Beside wall
speed stand CPU seconds per GB (10^9 bytes) of the client, which is this process, and of the servers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forebay.measure.machine import file_system, machine
from forebay.measure.samples import Interval, Sample, Side, cpu_s_per_gb, interleave, interval, value_at

__all__ = [
    "Interval",
    "Row",
    "Sample",
    "Side",
    "Sizes",
    "compared_latency_row",
    "file_system",
    "gb_per_s_row",
    "interleave",
    "interval",
    "latency_row",
    "machine",
    "quantiles_ms",
]


_RESAMPLES = 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Bytes are of user data."""

    name: str
    repeats: int
    slot_bytes: int
    slot_calls: int
    working_bytes: int
    node_bytes: int
    batch: int
    block_bytes: tuple[int, ...]
    match_blocks: int
    match_calls: int
    flushes: int
    scale_blocks: int
    engine_rounds: int = 1
    """Of requests to engines, which are measured one by one."""
    replay_s: float = 2
    """How long a replay of a trace takes, about."""

    def with_repeats(self, repeats: int) -> Sizes:
        """The same with another number of rounds."""
        return replace(self, repeats=repeats)


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
    load_1m: float = field(default_factory=lambda: round(os.getloadavg()[0], 1))
    """Load average when it was measured, our own two or three processes included: whether others were at work."""

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
            "load_1m": self.load_1m,
            **self.details,
        }


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
    cpu, cpu_baseline = cpu_s_per_gb(ours), cpu_s_per_gb(baseline)
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
    found = Interval(*[value_at(latencies_s, q) * 1e3 for q in (quantile, quantile - spread, quantile + spread)])
    details = {"latency_ms": quantiles_ms(latencies_s), **details}
    return Row(name, what, "ms", found, None, found, "at most", aim_ms, count, details)


def compared_latency_row(
    name: str,
    what: str,
    ours_s: Sequence[float],
    baseline_s: Sequence[float],
    *,
    quantile: float | None = 0.5,
    paired: bool = False,
    details: Mapping[str, Any],
) -> Row:
    """A row of one quantile of latencies, or of their mean (None), beside the baseline's, in milliseconds.

    ``added_ms`` is their difference. Intervals are bootstrap ones: each side is drawn by itself, or ``paired``, the two
    latencies of the same request together.
    """
    rng = random.Random(len(ours_s))
    drawn = []
    for _ in range(_RESAMPLES):
        mine = rng.choices(range(len(ours_s)), k=len(ours_s))
        theirs = mine if paired else rng.choices(range(len(baseline_s)), k=len(baseline_s))
        drawn.append((_figure([ours_s[i] for i in mine], quantile), _figure([baseline_s[i] for i in theirs], quantile)))
    ours, baseline = _figure(ours_s, quantile), _figure(baseline_s, quantile)
    added = _around(ours - baseline, [a - b for a, b in drawn])
    more = {
        "added_ms": added.as_json(),
        "latency_ms": quantiles_ms(ours_s),
        "baseline_latency_ms": quantiles_ms(baseline_s),
        "figure": "mean" if quantile is None else f"p{quantile * 100:g}",
    }
    return Row(
        name,
        what,
        "ms",
        _around(ours, [a for a, _ in drawn]),
        _around(baseline, [b for _, b in drawn]),
        _around(ours / baseline, [a / b for a, b in drawn]),
        "at most",
        None,
        len(ours_s),
        {**more, **details},
    )


def _figure(seconds: Sequence[float], quantile: float | None) -> float:
    """In milliseconds."""
    return 1e3 * (sum(seconds) / len(seconds) if quantile is None else value_at(seconds, quantile))


def _around(figure: float, drawn: Sequence[float]) -> Interval:
    return Interval(figure, value_at(drawn, 0.025), value_at(drawn, 0.975))


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    return {"p50": float(f"{value_at(seconds, 0.5) * 1e3:.4g}"), "p99": float(f"{value_at(seconds, 0.99) * 1e3:.4g}")}
