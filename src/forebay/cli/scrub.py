"""`forebay scrub`: have a node verify what it keeps."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, complete_namespace, connection_options, json_option, pass_session
from forebay.cli.exits import ABSENT, INTERRUPTED, OK, REFUSED, UNAVAILABLE, USAGE, WRONG_BYTES
from forebay.cli.progress import Bar
from forebay.cli.sizes import format_duration, format_size, size
from forebay.cli.teaching import Command

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.client import Admin, ScrubStatus

__all__ = ["scrub"]

_POLL_S = 0.1


def _fields(status: ScrubStatus) -> dict[str, Any]:
    """The report, and the bytes a second that it read."""
    rate = status.bytes * 1000 // status.elapsed_ms if status.elapsed_ms else 0
    return {**asdict(status), "read_bytes_per_s": rate}


def _follow(admin: Admin, status: ScrubStatus) -> ScrubStatus:
    """Wait for the end of a scrub, with a bar."""
    with Bar("scrub") as bar:
        while status.state == "running":
            bar.show(status.bytes, status.bytes_total, f"{status.bad} bad" if status.bad else "")
            time.sleep(_POLL_S)
            status = admin.scrub_status()
    return status


def _draw(out: Console, status: ScrubStatus) -> None:
    where = status.namespace or "all namespaces"
    if status.state == "none":
        out.print(f"nobody asked for a scrub since the node started; {status.suspects_left} blocks to verify")
        return
    share = f" of {status.blocks_total}" if status.state != "done" else ""
    rate, limit = format_size(_fields(status)["read_bytes_per_s"]), format_size(status.rate_bytes_per_s)
    out.print(
        f"scrub of {where}: {status.state}\n"
        f"  looked at  {status.blocks}{share} blocks, {format_size(status.bytes)} in "
        f"{format_duration(status.elapsed_ms)}, {rate}/s (limit {limit}/s)\n"
        f"  bad        {status.bad}{' (dropped: a get is a miss now)' if status.bad else ''}\n"
        f"  unread     {status.unread}{' (the drive did not give them)' if status.unread else ''}\n"
        f"  gone       {status.gone} (ended before their turn)\n"
        f"  suspects   {status.suspects_left} left on the node"
    )


@click.command(
    cls=Command,
    short_help="Verify the checksums of what a node keeps.",
    examples=[
        "forebay scrub",
        "forebay scrub acme/chat --rate 500MiB",
        "forebay scrub --background && forebay scrub --status",
    ],
    exits={
        OK: "every block that was looked at is what was stored",
        ABSENT: "there is no such namespace",
        USAGE: "the command line or an argument is wrong",
        REFUSED: "refused: token, permission",
        UNAVAILABLE: "the node does not answer, or a scrub is running",
        WRONG_BYTES: "blocks were bad or could not be read",
        INTERRUPTED: "interrupted with Ctrl-C; the scrub was stopped",
    },
    see=("forebay fsck", "forebay events", "docs/integrity.md"),
)
@click.argument("namespace", required=False, metavar="[TENANT/NAME]", shell_complete=complete_namespace)
@click.option("--rate", type=size, metavar="SIZE", help="Bytes a second at most. [default: the node's scrub.rate]")
@click.option("--background", is_flag=True, help="Begin, and do not wait for the end.")
@click.option("--status", "show", is_flag=True, help="Begin nothing: show how the last one stands.")
@click.option("--stop", is_flag=True, help="End the one that runs.")
@connection_options()
@json_option
@pass_session
def scrub(
    session: Session, namespace: str | None, rate: int | None, *, background: bool, show: bool, stop: bool
) -> int:
    """Read every block of a running node at its target and compare checksums, in one namespace or in all.

    A bad block is dropped for good, counted, and told as an event (removed, bad): a get of it is a miss from then on.
    Readers and writers go on meanwhile. The node also does this by itself, slowly, over scrub.interval.
    """
    if background + show + stop > 1:
        raise click.UsageError("give one of --background, --status and --stop")
    with session.admin() as admin:
        if show or stop:
            status = admin.stop_scrub() if stop else admin.scrub_status()
        else:
            status = admin.start_scrub(namespace=namespace or "", rate_bytes_per_s=rate or 0)
            if not background:
                try:
                    status = _follow(admin, status)
                except KeyboardInterrupt:
                    admin.stop_scrub()
                    raise
    session.emit(_fields(status), lambda out: _draw(out, status))
    return WRONG_BYTES if status.bad or status.unread else OK
