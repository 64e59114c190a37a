"""Figures of a benchmark, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.cli.sizes import format_size
from forebay.measure.machine import machine
from forebay.measure.samples import Interval, Sample, cpu_s_per_gb, interval, value_at

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Comparison", "Result"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One operation at one size: samples and seconds of every call, by side. ``remote``: no CPU time of the node."""

    operation: str
    block_bytes: int
    batch: int
    samples: Mapping[str, Sequence[Sample]]
    calls_s: Mapping[str, Sequence[float]]
    remote: bool

    def figures(self, side: str) -> dict[str, Any]:
        """What is told of a side."""
        samples, calls = self.samples[side], self.calls_s[side]
        latency = {
            "calls": len(calls),
            "p50_ms": _rounded(value_at(calls, 0.5) * 1e3),
            "p99_ms": _rounded(value_at(calls, 0.99) * 1e3),
        }
        if self.operation == "match":
            keys = len(calls) * self.batch
            cpu_s = sum(s.client_cpu_s + s.server_cpu_s for s in samples)
            return {
                "keys_per_s": interval([len(calls) / len(samples) * self.batch / s.wall_s for s in samples]).as_json(),
                **latency,
                "cpu_us_per_key": None if self.remote and side == "forebay" else _rounded(cpu_s / keys * 1e6),
            }
        cpu: dict[str, float | None] = {**cpu_s_per_gb(samples)}
        if self.remote and side == "forebay":
            cpu |= {"server": None, "both": None}
        return {"gb_per_s": self._speed(side).as_json(), **latency, "cpu_s_per_gb": cpu}

    def _speed(self, side: str) -> Interval:
        return interval([s.gb_per_s for s in self.samples[side]])

    def ratio(self, side: str) -> Interval:
        """Ours over theirs, taken in each round."""
        pairs = zip(self.samples["forebay"], self.samples[side], strict=True)
        return interval([ours.gb_per_s / theirs.gb_per_s for ours, theirs in pairs])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "rounds": len(self.samples["forebay"]),
            "sides": {side: self.figures(side) for side in self.samples},
            "ratios": {side: self.ratio(side).as_json() for side in self.samples if side != "forebay"},
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(slots=True)
class Result:
    """All comparisons of a run. ``local``: the node runs on this machine. ``drives``: how it reads them.

    ``redis_missing`` says why there is no comparison with Redis.
    """

    processes: int
    threads: int
    local: bool
    durability: str
    drives: str
    redis_missing: str | None
    redis_version: str | None = None
    comparisons: list[Comparison] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "processes": self.processes,
            "threads": self.threads,
            "local": self.local,
            "durability": self.durability,
            "drives": self.drives,
            "redis": self.redis_version,
            "machine": machine(),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }

    def show(self, out: Console) -> None:
        """Draw the table."""
        from rich import box
        from rich.table import Table

        table = Table("", "side", box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("median [95 %]", "p50 ms", "p99 ms", "CPU client + server", "ours / theirs"):
            table.add_column(title, justify="right", no_wrap=True)
        for comparison in self.comparisons:
            for number, side in enumerate(comparison.samples):
                table.add_row(*self._row(comparison, side, number == 0))
        out.print(table)
        where = "with the node on this machine" if self.local else "the node's CPU time is not known from here"
        facts = ", ".join(f"{name} {value}" for name, value in machine().items())
        out.print(
            f"{self.processes} process(es) of {self.threads} thread(s), {where}. GB are 10^9 bytes; CPU in seconds "
            "per GB, for match in µs per key.",
            soft_wrap=True,
        )
        out.print(f"forebay: durability {self.durability}, drives {self.drives or 'not known'}.", soft_wrap=True)
        out.print(
            "tcp: the same bytes over bare TCP, from and into memory. redis: GET, SET and EXISTS by bare sockets, in "
            "memory, not durable.",
            soft_wrap=True,
        )
        out.print(facts, soft_wrap=True)
        if self.redis_missing:
            out.print(f"no comparison with Redis: {self.redis_missing}")

    @staticmethod
    def _row(comparison: Comparison, side: str, first: bool) -> tuple[str, ...]:
        figures = comparison.figures(side)
        if comparison.operation == "match":
            what, speed, unit = f"match {comparison.batch} keys", figures["keys_per_s"], "keys/s"
            cpu = figures["cpu_us_per_key"]
            cost = "" if cpu is None else f"{cpu:.2f}"
            told = f"{speed['median']:,.0f} {unit} [{speed['low']:,.0f}–{speed['high']:,.0f}]"
        else:
            size = format_size(comparison.block_bytes)
            what, speed = f"{comparison.operation} {size} x {comparison.batch}", figures["gb_per_s"]
            cpu = figures["cpu_s_per_gb"]
            cost = f"{cpu['client']:.2f} + " + ("?" if cpu["server"] is None else f"{cpu['server']:.2f}")
            told = f"{speed['median']:.2f} GB/s [{speed['low']:.2f}–{speed['high']:.2f}]"
        ratio = comparison.ratio(side) if side != "forebay" else None
        against = "" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}–{ratio.high:.2f}]"
        latency = (f"{figures['p50_ms']:.2f}", f"{figures['p99_ms']:.2f}")
        return (what if first else "", side, told, *latency, cost, against)
