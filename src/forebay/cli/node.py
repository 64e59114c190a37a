"""Commands on the node itself: serve and status."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, connection_options, json_option, pass_session
from forebay.cli.exits import OK, REFUSED, UNAVAILABLE, USAGE, WRONG_BYTES
from forebay.cli.sizes import format_duration, format_size, size
from forebay.cli.teaching import Command
from forebay.errors import ConfigInvalid, TargetRefused

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["serve", "status"]

_AFFECTED = {"all": "nothing is served", "writes": "nothing new is stored", "some": "some blocks"}


@click.command(
    cls=Command,
    short_help="Run a node in the foreground.",
    examples=[
        "forebay serve --data /tmp/node --capacity 1GiB",
        "forebay serve --config /etc/forebay.toml",
        "forebay serve --config /etc/forebay.toml --print-config",
    ],
    exits=(OK, USAGE, REFUSED, UNAVAILABLE, WRONG_BYTES),
    see=("forebay doctor", "forebay status", "docs/config.md", "forebay help durability"),
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file (docs/config.md). [default: built-in values]",
)
@click.option(
    "--data",
    metavar="DIR",
    help="Data directory: metadata, volumes, the admin token. Created if absent. [default: ~/.local/share/forebay]",
)
@click.option(
    "--capacity",
    type=size,
    metavar="SIZE",
    help="Space for blocks, for example 100GiB. [default: 80 % of what is free, at most 64GiB]",
)
@click.option("--listen", metavar="HOST:PORT", help="Address of the control protocol (gRPC). [default: 127.0.0.1:7470]")
@click.option(
    "--target-listen",
    metavar="HOST:PORT",
    help="Address of the data path (NVMe/TCP), one that clients can reach. [default: 127.0.0.1:4420]",
)
@click.option(
    "--start-empty",
    is_flag=True,
    help="For a node that lost its metadata: remove the volumes on its drives.",
)
@click.option(
    "--forget-drive",
    metavar="NAME",
    help="Give up a drive that is gone for good, such as drive1, with its blocks: what is at its path takes its place. "
    "[default: none]",
)
@click.option("--print-config", is_flag=True, help="Print the configuration in effect, and stop.")
@pass_session
def serve(
    session: Session,
    *,
    config: Path | None,
    data: str | None,
    capacity: int | None,
    listen: str | None,
    target_listen: str | None,
    start_empty: bool,
    forget_drive: str | None,
    print_config: bool,
) -> int:
    """Run a node in the foreground: metadata, control protocol and the NVMe-oF target.

    Prints one line for each endpoint when it is ready, and stops cleanly on SIGTERM or Ctrl-C. Flags win over
    environment variables, those over the file. A data directory that is in use, newer than this version or short of
    its capacity is refused.
    """
    from forebay.appliance.config import load, overruled, render_toml

    if data:
        session.data_source = ""  # typed here, whatever the environment says
    flags = {"data": data or session.data, "capacity": capacity, "grpc.listen": listen, "target.listen": target_listen}
    settings = load(config, flags=flags)
    if config is not None:
        for line in overruled(config, typed=_typed(session, flags)):
            click.echo(f"forebay: {line}", err=True)
    if print_config:
        click.echo(render_toml(settings), nl=False)
        return OK
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it finds is raised, and said once
    from forebay.appliance.daemon import run

    try:
        return run(settings, start_empty=start_empty, forget_drive=forget_drive)
    except TargetRefused as e:
        if e.field != "target.listen":
            raise
        raise ConfigInvalid(e.message, field=e.field) from None  # as of the other two addresses


def _typed(session: Session, flags: Mapping[str, Any]) -> set[str]:
    """Keys that were given on the command line, and not by the environment."""
    given = {name for name, value in flags.items() if value is not None}
    return given - {"data"} if session.data_source else given


@click.command(
    cls=Command,
    short_help="Show how a node is.",
    examples=["forebay status", "forebay status --url forebay://storage-1:7470 --json"],
    see=("forebay top", "forebay sessions", "forebay namespace ls", "forebay doctor"),
)
@connection_options()
@json_option
@pass_session
def status(session: Session) -> int:
    """Show how the node is: space, blocks, sessions, drives, target, counters.

    Exits 4 when it does not answer.
    """
    with session.admin() as admin:
        info = admin.status()
    document: dict[str, Any] = {
        "node": info.node,
        "version": info.version,
        "incarnation": f"{info.incarnation:016x}",
        "uptime_ms": info.uptime_ms,
        "blocks": info.blocks,
        "used_bytes": info.used_bytes,
        "capacity_bytes": info.capacity_bytes,
        "read_bytes": info.read_bytes,
        "written_bytes": info.written_bytes,
        "sessions": info.sessions,
        "leases": info.leases,
        "pending_writes": info.pending_writes,
        "index_bytes": info.index_bytes,
        "drives": [
            {
                "name": d.name,
                "path": d.path,
                "capacity_bytes": d.capacity_bytes,
                "free_bytes": d.free_bytes,
                "io": d.io,
                "quarantined_bytes": d.quarantined_bytes,
                "state": d.state,
                "reason": d.reason,
            }
            for d in info.drives
        ],
        "problems": [asdict(problem) for problem in info.problems],
        "target": {
            "kind": info.target_kind,
            "pid": info.target_pid,
            "restarts": info.target_restarts,
            "capabilities": sorted(info.target_capabilities),
        },
        "counters": dict(sorted(info.counters.items())),
    }

    def human(out: Console) -> None:
        share = info.used_bytes / info.capacity_bytes if info.capacity_bytes else 0.0
        out.print(
            f"{info.node}, forebay {info.version}, up {format_duration(info.uptime_ms)}\n"
            f"  holds     {info.blocks} blocks, {format_size(info.used_bytes)} of "
            f"{format_size(info.capacity_bytes)} ({share:.1%})\n"
            f"  at work   {info.sessions} sessions, {info.leases} leases, {info.pending_writes} pending writes\n"
            f"  moved     {format_size(info.read_bytes)} read, {format_size(info.written_bytes)} written by hosts\n"
            f"  index     {format_size(info.index_bytes)} of memory\n"
            f"  target    {info.target_kind}, pid {info.target_pid}: {', '.join(document['target']['capabilities'])}"
        )
        for problem in info.problems:
            out.print(
                f"  DEGRADED  {_AFFECTED.get(problem.affects, problem.affects)}: {problem.reason}",
                style="bold red",
                soft_wrap=True,
            )
        for drive in info.drives:
            free = f"{format_size(drive.free_bytes)} of {format_size(drive.capacity_bytes)} in free regions"
            lost = f", {format_size(drive.quarantined_bytes)} in quarantine" if drive.quarantined_bytes else ""
            lost += f", {drive.state.replace('_', ' ').upper()}" if drive.state != "serving" else ""
            out.print(
                f"  drive     {drive.name}: {drive.path}, {free}{f', {drive.io}' if drive.io else ''}{lost}",
                soft_wrap=True,
            )
        for name, value in document["counters"].items():
            out.print(f"  counter   {name} {value}")

    session.emit(document, human)
    return OK
