"""The outcome of a demo: figures, a table for people, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.cli.demo.replica import Outcome
from forebay.cli.demo.workload import Scale
from forebay.cli.exits import OK, WRONG_BYTES
from forebay.cli.sizes import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PREFILL_SOURCE", "PREFILL_TOKENS_PER_S", "Inputs", "Report", "TimeToFirstToken", "percentile"]

PREFILL_TOKENS_PER_S = 6531.0
PREFILL_SOURCE = (
    "Llama-3-8B F16 on one RTX 4090, prompts of 4,096 tokens, llama.cpp "
    "(github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, May 2024)"
)
_AWAY = ("connection_lost", "unavailable")
"""Reasons of misses while the node is dead."""
ASSUMED_LOAD_BYTES_PER_S = 10e9
"""What one 100 GbE link carries after protocol overhead: the speed of a node that is not two cores of one machine."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed (nearest rank); 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was run."""

    source: str
    seed: int
    model: str
    model_bytes_per_token: int
    bytes_per_token: int
    block_bytes: int
    conversations: int
    conversations_total: int
    requests: int
    input_tokens: int
    ceiling_tokens: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """An estimate, over all requests, at an assumed prefill speed and the load speed that was measured.

    Bytes count unscaled. A prefix is loaded only where that is faster than computing it, as connectors do.
    """

    prefill_tokens_per_s: float
    assumption: str
    load_bytes_per_s: float
    break_even_bytes_per_s: float
    mean_without_ms: float
    mean_with_ms: float
    p99_without_ms: float
    p99_with_ms: float
    assumed_load_bytes_per_s: float
    mean_assumed_ms: float
    p99_assumed_ms: float

    @classmethod
    def of(
        cls, outcomes: Sequence[Outcome], scale: Scale, prefill_tokens_per_s: float, assumption: str
    ) -> TimeToFirstToken:
        """The estimate for these requests."""
        read_bytes, read_ms = sum(o.read_bytes for o in outcomes), sum(o.read_ms for o in outcomes)
        measured = read_bytes / (read_ms / 1e3) if read_ms else 0.0
        full = scale.model.bytes_per_token

        def estimate(load_bytes_per_s: float) -> list[float]:
            times = []
            for o in outcomes:
                compute_ms = o.hit_tokens / prefill_tokens_per_s * 1e3
                load_ms = o.hit_tokens * full / load_bytes_per_s * 1e3 if load_bytes_per_s else compute_ms
                rest_ms = (o.input_tokens - o.hit_tokens) / prefill_tokens_per_s * 1e3
                times.append(o.match_ms + min(load_ms, compute_ms) + rest_ms)
            return times

        without = [o.input_tokens / prefill_tokens_per_s * 1e3 for o in outcomes]
        here, assumed = estimate(measured), estimate(ASSUMED_LOAD_BYTES_PER_S)
        count = max(1, len(outcomes))
        return cls(
            prefill_tokens_per_s=prefill_tokens_per_s,
            assumption=assumption,
            load_bytes_per_s=measured,
            break_even_bytes_per_s=prefill_tokens_per_s * full,
            mean_without_ms=sum(without) / count,
            mean_with_ms=sum(here) / count,
            p99_without_ms=percentile(without, 99),
            p99_with_ms=percentile(here, 99),
            assumed_load_bytes_per_s=ASSUMED_LOAD_BYTES_PER_S,
            mean_assumed_ms=sum(assumed) / count,
            p99_assumed_ms=percentile(assumed, 99),
        )


@dataclass(slots=True)
class Report:
    """Everything that ``--json`` prints (`to_dict`)."""

    inputs: Inputs
    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    blocks_written: int = 0
    blocks_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_audited: int = 0
    read_gb_per_s: float = 0.0
    write_gb_per_s: float = 0.0
    match_p50_ms: float = 0.0
    match_p99_ms: float = 0.0
    read_p50_ms: float = 0.0
    read_p99_ms: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    node_start_s: float = 0.0
    node_restart_s: float = 0.0
    acknowledged_at_kill: int = 0
    found_after_kill: int = 0
    acknowledged: int = 0
    found_at_end: int = 0
    evicted: int = 0
    lost_blocks: int = 0
    """Acknowledged, missing, and not reported evicted."""
    wrong_blocks: int = 0
    ttft: TimeToFirstToken | None = None
    wall_s: float = 0.0

    def add(self, outcomes: Sequence[Outcome], scale: Scale) -> None:
        """Take over what the replicas measured."""
        self.requests = len(outcomes)
        self.input_tokens = sum(o.input_tokens for o in outcomes)
        self.hit_tokens = sum(o.hit_tokens for o in outcomes)
        self.bytes_written = sum(o.written_bytes for o in outcomes)
        self.bytes_read = sum(o.read_bytes for o in outcomes)
        self.blocks_written = self.bytes_written // scale.block_bytes
        self.blocks_read = self.bytes_read // scale.block_bytes
        read_ms, write_ms = sum(o.read_ms for o in outcomes), sum(o.write_ms for o in outcomes)
        self.read_gb_per_s = self.bytes_read / read_ms / 1e6 if read_ms else 0.0
        self.write_gb_per_s = self.bytes_written / write_ms / 1e6 if write_ms else 0.0
        matches, reads = [o.match_ms for o in outcomes if o.match_ms], [o.read_ms for o in outcomes if o.read_bytes]
        self.match_p50_ms, self.match_p99_ms = percentile(matches, 50), percentile(matches, 99)
        self.read_p50_ms, self.read_p99_ms = percentile(reads, 50), percentile(reads, 99)
        misses: Counter[str] = Counter()
        for o in outcomes:
            misses.update(o.misses)
        self.misses = dict(misses)

    @property
    def exit_code(self) -> int:
        """0, or 5 if a byte was wrong or an acknowledged block is lost."""
        return WRONG_BYTES if self.wrong_blocks or self.lost_blocks else OK

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ok": self.exit_code == OK}

    def _rows(self) -> list[tuple[str, str]]:
        i, t = self.inputs, self.ttft
        hit = self.hit_tokens / max(1, self.input_tokens)
        ceiling = i.ceiling_tokens / max(1, i.input_tokens)
        rows = [
            ("input", f"{i.source}, seed {i.seed}"),
            (
                "sample",
                f"{i.conversations} of {i.conversations_total} conversations "
                f"(1 in {i.conversations_total / max(1, i.conversations):.3g}), {i.requests} requests, "
                f"{i.input_tokens:,} tokens",
            ),
            (
                "block",
                f"{format_size(i.block_bytes)} for 512 tokens: {format_size(i.bytes_per_token)} a token where "
                f"{i.model} has {format_size(i.model_bytes_per_token)} "
                f"(1 in {i.model_bytes_per_token / i.bytes_per_token:.3g})",
            ),
            ("requests served", f"{self.requests}"),
            (
                "hit rate by tokens",
                f"{hit:.1%}, where a cache of infinite size would reach {ceiling:.1%} ({hit / ceiling:.0%} of it)"
                if ceiling
                else f"{hit:.1%}",
            ),
            (
                "written",
                f"{self.blocks_written} blocks, {format_size(self.bytes_written)}, durable before acknowledged",
            ),
            ("read and compared", f"{self.blocks_read} blocks, {format_size(self.bytes_read)}"),
            ("speed of one replica", f"read {self.read_gb_per_s:.2f} GB/s, write {self.write_gb_per_s:.2f} GB/s"),
            ("match of one request", f"p50 {self.match_p50_ms:.1f} ms, p99 {self.match_p99_ms:.1f} ms"),
            ("read of one request", f"p50 {self.read_p50_ms:.1f} ms, p99 {self.read_p99_ms:.1f} ms"),
            (
                "after SIGKILL",
                f"{self.found_after_kill} of {self.acknowledged_at_kill} acknowledged blocks found and equal; "
                f"node back in {self.node_restart_s:.1f} s",
            ),
            ("at the end", f"{self.found_at_end} of {self.acknowledged} acknowledged blocks found and equal"),
        ]
        if self.evicted:
            rows.append(("evicted", f"{self.evicted} blocks, as the node reported"))
        if self.misses:
            told = (f"{n} {why}{' during the kill' if why in _AWAY else ''}" for why, n in sorted(self.misses.items()))
            rows.append(("not loaded or stored", ", ".join(told)))
        if t is not None:
            pays = t.load_bytes_per_s >= t.break_even_bytes_per_s
            rows += [
                (
                    "time to first token",
                    f"estimated mean {format_duration(t.mean_without_ms)} without Forebay, "
                    f"{format_duration(t.mean_with_ms)} with; p99 {format_duration(t.p99_without_ms)} and "
                    f"{format_duration(t.p99_with_ms)}",
                ),
                (
                    "  assumes",
                    f"prefill at {t.prefill_tokens_per_s:,.0f} tokens/s ({t.assumption}); {i.model} unscaled, loaded "
                    f"at the {t.load_bytes_per_s / 1e9:.2f} GB/s that one replica got here, or computed where that is "
                    f"faster: loading is from {t.break_even_bytes_per_s / 1e9:.2f} GB/s on"
                    + ("" if pays else ", so at the speed measured here it never pays, and every prefix is computed"),
                ),
                (
                    f"  loaded at {t.assumed_load_bytes_per_s / 1e9:.0f} GB/s",
                    f"mean {format_duration(t.mean_assumed_ms)}, p99 {format_duration(t.p99_assumed_ms)} "
                    f"(what a link of 100 GbE carries; not measured here)",
                ),
            ]
        rows.append(("took", f"{self.wall_s:.1f} s, of it {self.node_start_s:.1f} s until the node served"))
        return rows

    def show(self, out: Console) -> None:
        """Draw the table and the verdict."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, value)
        out.print(table, width=min(out.width, 120))
        if self.exit_code == OK:
            out.print("Every byte read was right, and every acknowledged block is accounted for.", style="green")
        else:
            out.print(
                f"FAILED: {self.wrong_blocks} blocks had wrong bytes, {self.lost_blocks} acknowledged blocks are lost.",
                style="bold red",
            )
