"""`forebay sessions`: who is at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, complete_namespace, connection_options, json_option, pass_session
from forebay.cli.exits import OK
from forebay.cli.sizes import format_duration
from forebay.cli.teaching import Command

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["sessions"]


def _fields(info: Any) -> dict[str, Any]:
    return {
        "session": info.session.hex(),
        "principal": info.principal,
        "namespace": info.namespace,
        "client": info.client,
        "generation": info.generation,
        "state": info.state,
        "age_ms": info.age_ms,
        "idle_ms": info.idle_ms,
        "hosts": info.hosts,
        "leases": info.leases,
        "pending_writes": info.pending_writes,
        "pins": info.pins,
        "transports": list(info.transports),
    }


@click.command(
    cls=Command,
    short_help="List engines at work.",
    examples=["forebay sessions", "forebay sessions acme/chat --principal vllm --json"],
    see=("forebay top", "forebay status", "forebay principal ls"),
)
@click.argument("namespace", required=False, metavar="[TENANT/NAME]", shell_complete=complete_namespace)
@click.option("--principal", metavar="NAME", help="Only those of this principal. [default: all]")
@connection_options()
@json_option
@pass_session
def sessions(session: Session, namespace: str | None, principal: str | None) -> int:
    """List sessions, oldest first: who they belong to, what they hold, and when the node last heard of them.

    A session is one engine; its processes are its hosts. What it holds (leases, pins, pending writes) ends with it.
    By which transport its hosts read is what they say themselves (docs/transports.md).
    """
    with session.admin() as admin:
        rows = [_fields(info) for info in admin.list_sessions(namespace=namespace or "", principal=principal or "")]

    def human(out: Console) -> None:
        from rich import box
        from rich.table import Table

        table = Table("principal", "namespace", "client", "state", box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("age", "heard of", "hosts", "leases", "writes", "pins"):
            table.add_column(title, justify="right")
        table.add_column("reads by")
        for row in rows:
            counts = [str(row[name]) for name in ("hosts", "leases", "pending_writes", "pins")]
            times = [format_duration(row["age_ms"]), format_duration(row["idle_ms"])]
            who = [row[name] for name in ("principal", "namespace", "client", "state")]
            table.add_row(*who, *times, *counts, ", ".join(row["transports"]))
        out.print(table if rows else "no sessions")

    session.emit({"sessions": rows}, human)
    return OK
