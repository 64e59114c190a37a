"""`forebay top`."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, connection_options, console, json_option, pass_session
from forebay.cli.exits import OK
from forebay.cli.teaching import Command
from forebay.errors import ForebayError, PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.cli.top.sample import Look, Rates
    from forebay.client import Admin

__all__ = ["top"]

_HEIGHT = 24
_ANSWER_MS = 2_000
"""How long a node may take to answer: meanwhile no key is heard."""


@contextmanager
def _keys() -> Iterator[bool]:
    """Single keys instead of lines from the terminal; whether there is one."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_within(seconds: float, keys: bool) -> bool:
    """Wait; whether the person asked to end."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if not keys:
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False


def _once(admin: Admin, interval_s: float) -> tuple[Look, Rates]:
    from forebay.cli.top.sample import Look, Rates

    before = Look.take(admin, time.monotonic())
    time.sleep(interval_s)
    now = Look.take(admin, time.monotonic())
    return now, Rates.between(before, now)


def _document(now: Look, rates: Rates) -> dict[str, Any]:
    status = now.status
    return {
        "node": status.node,
        "version": status.version,
        "uptime_ms": status.uptime_ms,
        **rates.to_dict(),
        "blocks": status.blocks,
        "used_bytes": status.used_bytes,
        "capacity_bytes": status.capacity_bytes,
        "sessions": status.sessions,
        "leases": status.leases,
        "pending_writes": status.pending_writes,
        "target_restarts": status.target_restarts,
        "problems": [asdict(problem) for problem in status.problems],
        "namespaces": [
            {
                "name": n.name,
                "used_bytes": n.used_bytes,
                "quota_bytes": n.quota_bytes,
                "blocks": n.blocks,
                "sessions": n.sessions,
            }
            for n in now.namespaces
        ],
    }


def _follow(admin: Admin, interval_s: float, shown: Console) -> None:
    """Frames until q or Ctrl-C. A node that goes away is said, and looked for until it is back."""
    from rich.live import Live

    from forebay.cli.top.frame import frame
    from forebay.cli.top.sample import Look, Rates

    before = now = Look.take(admin, time.monotonic())
    trouble = ""
    with _keys() as keys, Live(console=shown, screen=True, auto_refresh=False) as live:
        while True:
            rates = Rates.between(before, now)
            foot = f"every {interval_s:g} s; q ends"
            live.update(frame(now, rates, height=shown.size.height, foot=foot, trouble=trouble), refresh=True)
            if _quit_within(interval_s, keys):
                return
            try:
                before, now, trouble = now, Look.take(admin, time.monotonic()), ""
            except (PermissionDenied, Unauthenticated):
                raise
            except ForebayError as e:
                trouble = f"no answer ({e.message or type(e).__name__}); figures are old"[:78]


@click.command(
    cls=Command,
    short_help="Watch a node at work.",
    examples=["forebay top", "forebay top --interval 0.5", "forebay top --once", "forebay top --json"],
    see=("forebay status", "forebay sessions", "forebay events", "docs/metrics.md (for dashboards)"),
)
@click.option(
    "--interval",
    type=click.FloatRange(0.05, 3600),
    metavar="S",
    default=2.0,
    show_default=True,
    help="Seconds between two frames, over which rates are taken.",
)
@click.option("--once", is_flag=True, help="Print one frame, after one interval, and end.")
@connection_options()
@json_option
@pass_session
def top(session: Session, interval: float, once: bool) -> int:
    """Show throughput, hit rates, evictions, sessions, and what each namespace uses; live, on 80 columns.

    Read and write are bytes that hosts moved at the target. `match` is how many of the keys that engines asked for are
    stored, `load` how many of those they went on to load were still there. Ends with q or Ctrl-C. Without a terminal,
    or with --json, it prints one frame as --once does.
    """
    shown = console()
    with session.admin(_ANSWER_MS) as admin:
        if not (once or session.json) and shown.is_terminal:
            with suppress(KeyboardInterrupt):
                _follow(admin, interval, shown)
            return OK
        now, rates = _once(admin, interval)

    def human(out: Console) -> None:
        from forebay.cli.top.frame import frame

        height = max(_HEIGHT, 16 + len(now.namespaces))
        out.print(frame(now, rates, height=height, foot=f"rates over {interval:g} s"), soft_wrap=True)

    session.emit(_document(now, rates), human)
    return OK
