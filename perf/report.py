"""Rows for people, and rows for a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from perf.harness import Interval, Row, machine

__all__ = ["RESULTS", "save", "table"]

RESULTS = Path(__file__).parent / "results"
_HEAD = ("ratio", "ours", "baseline", "unit", "ratio [95 %]", "aim", "met", "CPU s/GB ours", "baseline")


def table(rows: Sequence[Row]) -> str:
    """A table of all rows. CPU is client + server."""
    lines = [_HEAD, *(_line(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([out[0], "-" * len(out[0]), *out[1:]])


def _line(row: Row) -> tuple[str, ...]:
    sign = "≥" if row.comparison == "at least" else "≤"
    met = {True: "yes", False: "NO", None: ""}[row.met]
    cpu = [_cpu(row, "cpu_s_per_gb"), _cpu(row, "baseline_cpu_s_per_gb")]
    aim = f"{sign} {row.aim:g}" if row.aim is not None else ""
    ratio = f"{row.ratio.median:.2f} [{row.ratio.low:.2f}–{row.ratio.high:.2f}]"
    return (row.name, _figure(row.ours), _figure(row.baseline), row.unit, ratio, aim, met, *cpu)


def _figure(figure: Interval | None) -> str:
    return "" if figure is None else f"{figure.median:.2f}"


def _cpu(row: Row, name: str) -> str:
    cost = row.details.get(name)
    return f"{cost['client']:.2f} + {cost['server']:.2f}" if cost else ""


def save(rows: Sequence[Row], name: str, sizes: str) -> Path:
    """Write ``results/<date>-<name>.json``: one JSON object a line and ratio."""
    path = RESULTS / f"{date.today().isoformat()}-{name}.json"
    facts = {"date": date.today().isoformat(), "sizes": sizes, "machine": machine()}
    lines = [json.dumps({**row.as_json(), **facts}, ensure_ascii=False) for row in rows]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
