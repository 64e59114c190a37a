"""`forebay namespace`: KV namespaces and their policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, connection_options, json_option, pass_session
from forebay.cli.exits import OK
from forebay.cli.sizes import format_size, format_time, size
from forebay.cli.teaching import Group
from forebay.errors import InvalidArgument, NamespaceNotFound

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["namespace"]


def _fields(info: Any) -> dict[str, Any]:
    """A namespace as ``--json`` shows it."""
    return {
        "name": info.name,
        "id": info.id,
        "quota_bytes": info.quota_bytes,
        "durability": info.durability,
        "eviction": info.eviction,
        "min_generation": info.min_generation,
        "retention_ms": info.retention_ms,
        "used_bytes": info.used_bytes,
        "pending_bytes": info.pending_bytes,
        "pinned_bytes": info.pinned_bytes,
        "reserved_bytes": info.reserved_bytes,
        "blocks": info.blocks,
        "sessions": info.sessions,
        "created_unix_ms": info.created_unix_ms,
    }


def _show(info: dict[str, Any], out: Console) -> None:
    quota = format_size(info["quota_bytes"]) if info["quota_bytes"] else "none (the node's capacity)"
    out.print(
        f"{info['name']}\n"
        f"  holds       {info['blocks']} blocks, {format_size(info['used_bytes'])}"
        f" ({format_size(info['pinned_bytes'])} pinned, {format_size(info['pending_bytes'])} being written)\n"
        f"  quota       {quota}\n"
        f"  reserved    {format_size(info['reserved_bytes'])} in regions\n"
        f"  durability  {info['durability']}\n"
        f"  eviction    {info['eviction']}\n"
        f"  generation  {info['min_generation']} at least\n"
        f"  sessions    {info['sessions']}\n"
        f"  created     {format_time(info['created_unix_ms'])}"
    )


_POLICY = [
    click.option(
        "--quota",
        "quota_bytes",
        type=size,
        metavar="SIZE",
        help="Bytes it may hold at most; 0: only the node's capacity.",
    ),
    click.option(
        "--durability",
        type=click.Choice(["flush", "verify", "volatile"]),
        help="flush: acknowledged is on stable media. verify: faster; checked before use after an unclean stop. "
        "volatile: may vanish.",
    ),
    click.option(
        "--eviction",
        type=click.Choice(["lru", "none"]),
        help="lru: old blocks make room for new ones. none: a full namespace refuses.",
    ),
    click.option("--min-generation", type=click.IntRange(0), help="Blocks of older weights are no longer served."),
    click.option("--retention-ms", type=click.IntRange(0), help="Keep blocks at least this long where room allows."),
]


def _policy_options(function: Any) -> Any:
    for option in reversed(_POLICY):
        function = option(function)
    return function


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@click.group(cls=Group, short_help="Manage KV namespaces.")
def namespace() -> None:
    """Create, list, change and remove KV namespaces (TENANT/NAME).

    A namespace has its own access rights, quota and policy. Blocks of different namespaces never meet.
    """


@namespace.command(
    examples=[
        "forebay namespace create acme/chat",
        "forebay namespace create acme/chat --quota 200GiB --durability verify",
    ]
)
@click.argument("name", metavar="TENANT/NAME")
@_policy_options
@connection_options()
@json_option
@pass_session
def create(session: Session, /, name: str, **policy: Any) -> int:
    """Create a namespace."""
    with session.admin() as admin:
        info = _fields(admin.create_namespace(name, **_given(**policy)))
    session.emit(info, lambda out: _show(info, out))
    return OK


@namespace.command("ls", examples=["forebay namespace ls"])
@connection_options()
@json_option
@pass_session
def list_(session: Session) -> int:
    """List the namespaces of the node."""
    with session.admin() as admin:
        rows = [_fields(info) for info in admin.list_namespaces()]

    def human(out: Console) -> None:
        from rich import box
        from rich.table import Table

        table = Table("namespace", box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("blocks", "used", "quota"):
            table.add_column(title, justify="right")
        for title in ("durability", "eviction"):
            table.add_column(title)
        for row in rows:
            quota = format_size(row["quota_bytes"]) if row["quota_bytes"] else "-"
            used = format_size(row["used_bytes"])
            table.add_row(row["name"], str(row["blocks"]), used, quota, row["durability"], row["eviction"])
        out.print(table)

    session.emit({"namespaces": rows}, human)
    return OK


@namespace.command(examples=["forebay namespace show default/default"])
@click.argument("name", metavar="TENANT/NAME")
@connection_options()
@json_option
@pass_session
def show(session: Session, name: str) -> int:
    """Show one namespace: policy, quota and what it holds. Exits 1 when there is none of that name."""
    with session.admin() as admin:
        rows = [_fields(info) for info in admin.list_namespaces()]
    found = next((row for row in rows if row["name"] == name), None)
    if found is None:
        raise NamespaceNotFound(f"there is no namespace {name!r}", field="namespace")
    session.emit(found, lambda out: _show(found, out))
    return OK


@namespace.command(
    "set",
    examples=["forebay namespace set acme/chat --quota 400GiB", "forebay namespace set acme/chat --min-generation 7"],
)
@click.argument("name", metavar="TENANT/NAME")
@_policy_options
@connection_options()
@json_option
@pass_session
def set_(session: Session, /, name: str, **policy: Any) -> int:
    """Change a namespace's policy. What is not named stays as it is; --min-generation can only be raised."""
    changes = _given(**policy)
    if not changes:
        raise InvalidArgument("nothing to change: name at least one policy option", field="policy")
    with session.admin() as admin:
        info = _fields(admin.update_namespace(name, **changes))
    session.emit(info, lambda out: _show(info, out))
    return OK


@namespace.command(examples=["forebay namespace rm acme/old --force"])
@click.argument("name", metavar="TENANT/NAME")
@click.option("--force", is_flag=True, help="Also when it holds blocks.")
@connection_options()
@json_option
@pass_session
def rm(session: Session, name: str, force: bool) -> int:
    """Remove a namespace. One that holds blocks is refused without --force."""
    with session.admin() as admin:
        gone = admin.delete_namespace(name, force=force)
    document = {"name": name, "blocks": gone.blocks, "freed_bytes": gone.bytes}
    session.emit(
        document,
        lambda out: out.print(f"removed {name}: {gone.blocks} blocks, {format_size(gone.bytes)}"),
    )
    return OK
