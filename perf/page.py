"""The tables of docs/performance.md, made from the rows that were measured: ``python -m perf.page FILE...``.

What stands between the two markers of the page is replaced; a line RESULTS becomes the markers. Files are named as
they lie in perf/results, without ``.json`` or with it; of rows of one name the last counts, in the place of the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from perf.report import RESULTS

__all__ = ["PAGE", "filled", "latest", "main", "tables"]

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_BEGIN, _END = "<!-- results: python -m perf.page -->", "<!-- end of results -->"
_PLACE = "\nRESULTS\n"
_SIGNS = {"at least": "≥", "at most": "≤"}
_MET = {True: "yes", False: "**no**", None: ""}

_Row = Mapping[str, Any]

_BESIDE = {
    "parameters": "{:,} parameters",
    "prompt_tokens": "prompts of {:,} tokens",
    "prompts_at_once": "{} at once",
    "engine_cpu_ms": "engine's CPU {:g} ms",
    "baseline_engine_cpu_ms": "theirs {:g} ms",
    "replicas": "{} replicas",
    "requests": "{:,} requests",
    "trace": "of {}",
    "speed": "{:.3g} times as fast",
    "bytes_scale": "1 in {:.3g} of the bytes",
    "ceiling_share": "{:.1%} of tokens could be reused",
    "loaded_share": "{:.1%} were loaded",
    "local_share": "{:.1%} were in the engine's cache",
    "load_gb_per_s_as_profile": "storage as one of {:.3g} GB/s",
    "break_even_gb_per_s": "break-even {:.3g} GB/s",
}
"""What stands beside a figure, where a row has it."""


def tables(rows: Sequence[_Row]) -> str:
    """Markdown: one table for rows of the same kind, in the order in which they were measured."""
    out = [_summary(rows), ""]
    for what, group in groupby(_in_kinds(rows), key=lambda row: row["what"]):
        out += [f"**{what}**", "", *_table(list(group)), ""]
    return "\n".join(out).rstrip() + "\n"


def _in_kinds(rows: Sequence[_Row]) -> list[_Row]:
    order = {what: i for i, what in enumerate(dict.fromkeys(row["what"] for row in rows))}
    return sorted(rows, key=lambda row: order[row["what"]])


def _summary(rows: Sequence[_Row]) -> str:
    aims = [row["met"] for row in rows if row["met"] is not None]
    aims += [row["cpu_met"] for row in rows if row.get("cpu_met") is not None]
    first, loads = rows[0], [row["load_1m"] for row in rows if "load_1m" in row]
    machine = ", ".join(f"{name} {value}" for name, value in first["machine"].items())
    days = sorted({row["date"] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    busy = f"; load of one minute {min(loads):g} to {max(loads):g}" if loads else ""
    return f"{sum(aims)} of {len(aims)} aims are met. Measured {when} on {machine}{busy}."


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    kind = next(kind for kind in _KINDS if kind.shown(rows[0]))
    head = kind.head(rows[0])
    yield _line(head)
    yield "|---" * len(head) + "|"
    for row in rows:
        yield _line(kind.cells(row))
    for source in dict.fromkeys(row["source"] for row in rows if "source" in row):
        of = dict.fromkeys(row["profile"] for row in rows if row.get("source") == source)
        yield ""
        yield f"Figures of {'; '.join(of)}: {source}."
    flushes = [row["fdatasync_ms"] for row in rows if "fdatasync_ms" in row]
    if flushes:
        yield ""
        yield "`fdatasync` beside, ms: " + "; ".join(
            f"{row['name']} p50 {row['fdatasync_ms']['p50']:g}, p99 {row['fdatasync_ms']['p99']:g}"
            for row in rows
            if "fdatasync_ms" in row
        )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _compared(row: _Row) -> Iterator[str]:
    yield f"`{row['name']}`"
    yield _number(row["ours"]["median"])
    yield _number(row["baseline"]["median"])
    yield _interval(row["ratio"])
    yield from _aim(row["comparison"], row["aim"], row["met"])
    for name in ("cpu_s_per_gb", "baseline_cpu_s_per_gb"):
        yield f"{_number(row[name]['client'])} + {_number(row[name]['server'])}"
    yield _number(row["cpu_ratio"])
    yield from _aim("at most", row["cpu_aim"], row["cpu_met"])


def _alone(row: _Row) -> Iterator[str]:
    yield f"`{row['name']}`"
    yield f"{_interval(row['ratio'])} {row['unit']}"
    yield from _aim(row["comparison"], row["aim"], row["met"])
    yield ", ".join(_beside(row))


def _latencies(row: _Row) -> Iterator[str]:
    yield f"`{row['name']}`"
    for side in ("ours", "baseline"):
        yield _number(row[side]["median"])
    yield _interval(row["added_ms"])
    yield _interval(row["ratio"])
    yield f"{_number(row['latency_ms']['p99'])}, {_number(row['baseline_latency_ms']['p99'])}"
    yield ", ".join(_beside(row))


def _break_even(row: _Row) -> Iterator[str]:
    yield row["profile"]
    yield f"{row['prefix_tokens']:,}"
    yield f"{row['prefix_tokens'] * row['kv_bytes_per_token'] / 1e9:.2f}"
    yield _seconds(row["recompute_s"])
    yield "never" if row["break_even_gb_per_s"] is None else _number(row["break_even_gb_per_s"])
    for load_s in row["load_s_at_gb_per_s"].values():
        faster = load_s < row["recompute_s"]
        yield f"**{_seconds(load_s)}**" if faster else _seconds(load_s)


def _beside(row: _Row) -> Iterator[str]:
    for name, what in _BESIDE.items():
        if name in row:
            yield what.format(row[name])
    if "decisions" in row:
        yield "decided " + ", ".join(f"{count} {reason}" for reason, count in row["decisions"].items())
    for name in ("latency_ms", "cpu_ms"):
        if name in row and "added_ms" not in row:
            yield f"{name.removesuffix('_ms')} p50 {row[name]['p50']:g} ms, p99 {row[name]['p99']:g} ms"
    if row.get("changes"):
        yield f"{row['changes']:,} changes"
    if "cpu_s" in row:
        yield "CPU " + ", ".join(f"{seconds:g}" for seconds in row["cpu_s"]) + " s"
    for name in ("rss_bytes", "checkpoint_bytes"):
        if name in row:
            yield f"{name.removesuffix('_bytes').upper() if name == 'rss_bytes' else 'file'} {row[name] / 1e9:.2f} GB"


def _aim(comparison: str, aim: float | None, met: bool | None) -> Iterator[str]:
    yield "" if aim is None else f"{_SIGNS[comparison]} {aim:g}"
    yield _MET[met]


def _interval(found: Mapping[str, float]) -> str:
    return f"{_number(found['median'])} [{_number(found['low'])}–{_number(found['high'])}]"


def _number(value: float) -> str:
    return f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A form of table: which rows it is for, by one of them, its head, and a row's cells."""

    shown: Callable[[_Row], bool]
    head: Callable[[_Row], Sequence[str]]
    cells: Callable[[_Row], Iterator[str]]


_KINDS = (
    _Kind(
        lambda row: "load_s_at_gb_per_s" in row,
        lambda row: (
            *("model and GPUs", "prefix, tokens", "KV, GB", "to compute, s", "loading wins from, GB/s"),
            *(f"to load at {rate} GB/s, s" for rate in row["load_s_at_gb_per_s"]),
        ),
        _break_even,
    ),
    _Kind(
        lambda row: "added_ms" in row,
        lambda row: ("row", "ours, ms", "theirs", "added, ms [95 %]", "ratio [95 %]", "p99: ours, theirs", "beside"),
        _latencies,
    ),
    _Kind(
        lambda row: row["baseline"] is not None,
        lambda row: (
            *("row", "ours, GB/s", "theirs", "ratio [95 %]", "aim", "met"),
            *("CPU s/GB ours", "theirs", "ratio", "aim", "met"),
        ),
        _compared,
    ),
    _Kind(lambda row: True, lambda row: ("row", "measured [95 %]", "aim", "met", "beside"), _alone),
)


def latest(lines: Sequence[str]) -> list[_Row]:
    """Rows as they stand in files, the last of each name."""
    rows: dict[str, _Row] = {}
    for line in lines:
        row = json.loads(line)
        rows[row["name"]] = row
    return list(rows.values())


def filled(page: str, rows: Sequence[_Row]) -> str:
    """The page with the tables of ``rows``. Raises `ValueError` if it has no place for them."""
    if _BEGIN not in page:
        page = page.replace(_PLACE, f"\n{_BEGIN}\n{_END}\n")
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has neither the marker {_BEGIN} nor a line RESULTS")
    return f"{before}{begin}\n\n{tables(rows)}\n{end}{after}"


def main(names: Sequence[str]) -> int:
    """Rewrite the page from the files named."""
    lines = [
        line for name in names for line in (RESULTS / f"{name.removesuffix('.json')}.json").read_text().splitlines()
    ]
    PAGE.write_text(filled(PAGE.read_text(), latest(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
