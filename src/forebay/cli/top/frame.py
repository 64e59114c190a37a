"""One frame of `forebay top`: lines that fit 80 columns, as many as the terminal is high."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from forebay.cli.sizes import format_duration, format_size
from forebay.cli.top.sample import Look, Rates

if TYPE_CHECKING:
    from forebay.client import NamespaceInfo

__all__ = ["frame"]

_BAR = 16
_NAME = 24
_FULL, _WARNING = 0.97, 0.85
_WIDTH = 80


def _bar(share: float, width: int = _BAR) -> Text:
    filled = round(min(1.0, max(0.0, share)) * width)
    style = "red" if share >= _FULL else "yellow" if share >= _WARNING else "green"
    return Text.assemble(("█" * filled, style), ("·" * (width - filled), "dim"))


def _rate(count_per_s: float) -> str:
    for limit, factor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if count_per_s >= limit:
            return f"{count_per_s / factor:.1f}{unit}/s"
    return f"{count_per_s:.0f}/s" if count_per_s >= 10 or not count_per_s else f"{count_per_s:.1f}/s"


def _share(value: float | None) -> str:
    return "   -  " if value is None else f"{value:6.1%}"


def _name(text: str) -> str:
    return text if len(text) <= _NAME else text[: _NAME - 1] + "…"


def _namespace(info: NamespaceInfo, capacity_bytes: int) -> Text:
    bound = info.quota_bytes or capacity_bytes
    share = info.used_bytes / bound if bound else 0.0
    used = format_size(info.used_bytes)
    quota = format_size(info.quota_bytes) if info.quota_bytes else "-"
    line = Text.assemble(f"{_name(info.name):<{_NAME}} ", _bar(share))
    line.append(f" {used:>9} {quota:>9} {info.blocks:>9} {info.sessions:>5}")
    return line


def _state(now: Look) -> Text:
    """What is degraded, or an empty line."""
    problems = now.status.problems
    if not problems:
        return Text()
    more = f" (and {len(problems) - 1} more: forebay status)" if len(problems) > 1 else ""
    told, room = f"degraded: {problems[0].reason}", _WIDTH - len(more)
    return Text((told if len(told) <= room else told[: room - 1] + "…") + more, style="bold red")


def frame(now: Look, rates: Rates, *, height: int, foot: str, trouble: str = "") -> Text:
    """What is drawn; ``trouble`` says why the figures are old. Never more than ``height`` lines."""
    status = now.status
    share = status.used_bytes / status.capacity_bytes if status.capacity_bytes else 0.0
    title = f"{status.node}  forebay {status.version}  up {format_duration(status.uptime_ms)}"
    lines = [
        Text(title[:_WIDTH], style="bold"),
        Text(
            f"target {status.target_kind}, pid {status.target_pid}, replaced {status.target_restarts} times  "
            f"drives {', '.join(sorted({d.io for d in status.drives if d.io})) or '-'}"[:_WIDTH]
        ),
        _state(now),
        Text.assemble(
            "read  ",
            (f"{rates.read_bytes / 1e9:7.2f} GB/s", "bold cyan"),
            f"   stored  {_rate(rates.stored):>9}   sessions {status.sessions:>6}",
        ),
        Text.assemble(
            "write ",
            (f"{rates.written_bytes / 1e9:7.2f} GB/s", "bold magenta"),
            f"   evicted {_rate(rates.evicted):>9}   leases   {status.leases:>6}",
        ),
        Text(
            f"match {_share(rates.match_hit_rate)} hit of {_rate(rates.match_keys):>8}"
            f"  removed {_rate(rates.removed):>7}   pending  {status.pending_writes:>6}"
        ),
        Text(f"load  {_share(rates.load_hit_rate)} hit of {_rate(rates.load_keys):>8}"),
        Text(),
        Text.assemble(
            "capacity ",
            _bar(share, 30),
            f" {format_size(status.used_bytes)} of {format_size(status.capacity_bytes)} ({share:.1%})",
        ),
        Text(f"         {status.blocks} blocks, index {format_size(status.index_bytes)}", style="dim"),
        Text(),
        Text(
            f"{'namespace':<{_NAME}} {'used of quota':<{_BAR}} {'used':>9} {'quota':>9} {'blocks':>9} {'sess.':>5}",
            style="bold",
        ),
    ]
    last = Text(trouble, style="bold red") if trouble else Text(foot, style="dim")
    room = max(0, height - len(lines) - 1)
    ordered = sorted(now.namespaces, key=lambda n: (-n.used_bytes, n.name))
    shown = ordered if len(ordered) <= room else ordered[: max(0, room - 1)]
    lines += [_namespace(info, status.capacity_bytes) for info in shown]
    if len(shown) < len(ordered) and room:
        lines.append(Text(f"and {len(ordered) - len(shown)} more", style="dim"))
    drawn = Text("\n").join([*lines[: max(1, height - 1)], last])
    drawn.no_wrap, drawn.overflow = True, "ellipsis"
    return drawn
