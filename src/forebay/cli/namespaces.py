"""`forebay namespace`: KV namespaces and their policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from forebay.cli.context import Session, complete_namespace, connection_options, json_option, pass_session
from forebay.cli.exits import ABSENT, OK, REFUSED, UNAVAILABLE, USAGE
from forebay.cli.sizes import duration, format_duration, format_size, format_time, size
from forebay.cli.teaching import Group
from forebay.errors import InvalidArgument, NamespaceNotFound

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["namespace"]

_F = TypeVar("_F", bound=Callable[..., Any])


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
        "ttl_ms": info.ttl_ms,
        "used_bytes": info.used_bytes,
        "pending_bytes": info.pending_bytes,
        "pinned_bytes": info.pinned_bytes,
        "reserved_bytes": info.reserved_bytes,
        "blocks": info.blocks,
        "sessions": info.sessions,
        "created_unix_ms": info.created_unix_ms,
        "scopes": [{"scope": s.scope, "quota_bytes": s.quota_bytes, "used_bytes": s.used_bytes} for s in info.scopes],
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
        f"  retention   {_duration(info['retention_ms'], 'no promise')}\n"
        f"  ttl         {_duration(info['ttl_ms'], 'none: blocks stay until they are evicted or removed')}\n"
        f"  sessions    {info['sessions']}\n"
        f"  created     {format_time(info['created_unix_ms'])}"
    )
    for scope in info["scopes"]:
        bound = f" of {format_size(scope['quota_bytes'])}" if scope["quota_bytes"] else ""
        out.print(f"  scope       {scope['scope']}: {format_size(scope['used_bytes'])}{bound}", soft_wrap=True)


def _duration(count_ms: int, none: str) -> str:
    return format_duration(count_ms) if count_ms else none


# Option, its type, how its value is written, what it says, and what `create` takes without it.
_POLICY: list[tuple[tuple[str, ...], Any, str | None, str, str]] = [
    (("--quota", "quota_bytes"), size, "SIZE", "Bytes it may hold at most; 0: only the node's capacity.", "0"),
    (
        ("--durability",),
        click.Choice(["flush", "verify", "volatile"]),
        None,
        "flush: acknowledged is on stable media. verify: faster; checked before use after an unclean stop. "
        "volatile: may vanish.",
        "flush",
    ),
    (
        ("--eviction",),
        click.Choice(["lru", "none"]),
        None,
        "lru: old blocks make room for new ones. none: a full namespace refuses.",
        "lru",
    ),
    (("--min-generation",), click.IntRange(0), None, "Blocks of older weights are no longer served.", "0"),
    (
        ("--retention", "retention_ms"),
        duration,
        "TIME",
        "Keep blocks at least this long where room allows, for example 10m; 0: no promise.",
        "0",
    ),
    (
        ("--ttl", "ttl_ms"),
        duration,
        "TIME",
        "Blocks are not found any more this long after they were stored, for example 1h; 0: for ever.",
        "0",
    ),
]


def _policy_options(*, creating: bool) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for names, kind, metavar, text, default in reversed(_POLICY):
            told = f"{text} [default: {default if creating else 'as it is'}]"
            function = click.option(*names, type=kind, metavar=metavar, help=told)(function)
        return function

    return decorate


_name_argument = click.argument("name", metavar="TENANT/NAME", shell_complete=complete_namespace)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@click.group(cls=Group, short_help="Manage KV namespaces.", see=("forebay help namespaces", "forebay principal"))
def namespace() -> None:
    """Create, list, change and remove KV namespaces (TENANT/NAME).

    A namespace has its own access rights, quota and policy. Blocks of different namespaces never meet.
    """


@namespace.command(
    examples=[
        "forebay namespace create acme/chat",
        "forebay namespace create acme/chat --quota 200GiB --durability verify",
        "forebay namespace create acme/scratch --ttl 1h --eviction lru",
    ],
    see=("forebay help namespaces", "forebay help durability", "forebay principal grant"),
)
@click.argument("name", metavar="TENANT/NAME")
@_policy_options(creating=True)
@connection_options()
@json_option
@pass_session
def create(session: Session, /, name: str, **policy: Any) -> int:
    """Create a namespace."""
    if name.count("/") != 1:
        example = f", such as default/{name}" if "/" not in name else ""
        raise InvalidArgument(f"{name!r} names no namespace: write TENANT/NAME{example}", field="name")
    with session.admin() as admin:
        info = _fields(admin.create_namespace(name, **_given(**policy)))
    session.emit(info, lambda out: _show(info, out))
    return OK


@namespace.command(
    "ls",
    examples=["forebay namespace ls", "forebay namespace ls --json"],
    see=("forebay namespace show", "forebay top"),
)
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


@namespace.command(
    examples=["forebay namespace show default/default"],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay namespace set", "forebay namespace scope-quota", "forebay help namespaces"),
)
@_name_argument
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
    examples=[
        "forebay namespace set acme/chat --quota 400GiB --ttl 7d",
        "forebay namespace set acme/chat --min-generation 7",
    ],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay namespace show", "forebay help namespaces"),
)
@_name_argument
@_policy_options(creating=False)
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


@namespace.command(
    "scope-quota",
    examples=[
        "forebay namespace scope-quota acme/chat user-42 10GiB",
        "forebay namespace scope-quota acme/chat user-42 0",
    ],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay namespace show", "forebay principal grant"),
)
@_name_argument
@click.argument("scope")
@click.argument("quota", type=size, metavar="SIZE")
@connection_options()
@json_option
@pass_session
def scope_quota(session: Session, name: str, scope: str, quota: int) -> int:
    """Bound what the blocks of one SCOPE, an end tenant of an engine, may take in a namespace. SIZE 0 lifts the bound.

    A scope that is over its bound makes room among its own blocks, by the namespace's eviction; where it cannot,
    writes of that scope are refused (quota_exceeded). `forebay namespace show` lists scopes with what they use.
    """
    with session.admin() as admin:
        info = _fields(admin.set_scope_quota(name, scope, quota))
    session.emit(info, lambda out: _show(info, out))
    return OK


@namespace.command(
    examples=["forebay namespace rm acme/old --force"],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay namespace ls", "forebay rm"),
)
@_name_argument
@click.option("--force", is_flag=True, help="Also when it holds blocks.")
@connection_options()
@json_option
@pass_session
def rm(session: Session, name: str, force: bool) -> int:
    """Remove a namespace. One that holds blocks is refused without --force."""
    with session.admin() as admin:
        try:
            gone = admin.delete_namespace(name, force=force)
        except InvalidArgument as e:
            if e.field != "force":
                raise
            raise InvalidArgument(f"{name} holds blocks: --force removes it with them", field="force") from None
    document = {"name": name, "blocks": gone.blocks, "freed_bytes": gone.bytes}
    session.emit(
        document,
        lambda out: out.print(f"removed {name}: {gone.blocks} blocks, {format_size(gone.bytes)}"),
    )
    return OK
