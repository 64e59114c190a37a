"""`forebay quarantine`: places of drives that are not used any more."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from forebay.cli.context import Session, connection_options, json_option, pass_session
from forebay.cli.exits import ABSENT, OK, REFUSED, UNAVAILABLE, USAGE
from forebay.cli.sizes import format_size, format_time
from forebay.cli.teaching import Group

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["quarantine"]


@click.group(cls=Group, short_help="List and release places of drives that are not used any more.")
def quarantine() -> None:
    """List and release extents that nobody gets, because the drive did not give back what was written there.

    A scrub puts them there. They stay through restarts and count as used until they are released.
    """


@quarantine.command(
    "ls",
    short_help="List them.",
    examples=["forebay quarantine ls", "forebay quarantine ls --json | jq '.extents | length'"],
    see=("forebay scrub", "forebay quarantine release", "docs/integrity.md"),
)
@connection_options()
@json_option
@pass_session
def ls(session: Session) -> int:
    """List extents in quarantine, by volume and offset."""
    with session.admin() as admin:
        extents = admin.list_quarantine()

    def human(out: Console) -> None:
        for e in extents:
            out.print(
                f"volume {e.volume} at {e.offset_bytes}  {format_size(e.length_bytes)}  {e.drive}  {e.namespace}  "
                f"{e.reason}  {format_time(e.since_unix_ms)}"
            )
        if not extents:
            out.print("nothing is in quarantine")

    session.emit({"extents": [asdict(e) for e in extents]}, human)
    return OK


@quarantine.command(
    "release",
    short_help="Let one be used again.",
    examples=["forebay quarantine release 4 76111872"],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay quarantine ls",),
)
@click.argument("volume", type=click.IntRange(1, (1 << 32) - 1))
@click.argument("offset_bytes", type=click.IntRange(0, (1 << 63) - 1), metavar="OFFSET")
@connection_options()
@json_option
@pass_session
def release(session: Session, volume: int, offset_bytes: int) -> int:
    """Let an extent be used again, once the drive is known to be good. OFFSET is in bytes, as `ls` shows it."""
    with session.admin() as admin:
        e = admin.release_quarantine(volume, offset_bytes)
    session.emit(asdict(e), lambda out: out.print(f"volume {e.volume} at {e.offset_bytes} may be used again"))
    return OK
