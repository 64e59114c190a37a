"""`forebay principal`: who may do what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, complete_namespace, connection_options, json_option, pass_session
from forebay.cli.exits import ABSENT, OK, REFUSED, UNAVAILABLE, USAGE
from forebay.cli.sizes import format_time
from forebay.cli.teaching import Group
from forebay.errors import NotFound

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["principal"]

_NAMED = (OK, ABSENT, USAGE, REFUSED, UNAVAILABLE)
"""How a command on something that has a name can end."""


def _fields(info: Any) -> dict[str, Any]:
    """A principal as ``--json`` shows it."""
    return {
        "name": info.name,
        "admin": info.admin,
        "grants": [{"namespace": g.namespace, "rights": list(g.rights), "scopes": list(g.scopes)} for g in info.grants],
        "created_unix_ms": info.created_unix_ms,
    }


def _grants(info: dict[str, Any]) -> str:
    return "\n".join(
        f"{g['namespace']}: {','.join(g['rights'])}" + (f" (scopes {','.join(g['scopes'])})" if g["scopes"] else "")
        for g in info["grants"]
    )


def _emit_token(session: Session, created: Any) -> None:
    document = {"principal": _fields(created.principal), "token": created.token}

    def human(out: Console) -> None:
        name = created.principal.name
        click.echo(f"the token of {name} follows; the node keeps only its hash, so it is not shown again", err=True)
        out.print(created.token, soft_wrap=True)

    session.emit(document, human)


@click.group(cls=Group, short_help="Manage who may do what.", see=("forebay namespace", "forebay sessions"))
def principal() -> None:
    """Create, list and remove principals, their tokens and their rights.

    A principal is who a connection belongs to. Without a grant it may do nothing.
    """


@principal.command(
    examples=[
        "forebay principal create vllm > vllm.token",
        "forebay principal grant vllm acme/chat --rights read,write",
    ],
    see=("forebay principal grant", "forebay principal rotate"),
)
@click.argument("name")
@click.option("--admin", is_flag=True, help="May administer the node, and do everything in every namespace.")
@connection_options()
@json_option
@pass_session
def create(session: Session, name: str, admin: bool) -> int:
    """Create a principal and print its token, once."""
    with session.admin() as node:
        _emit_token(session, node.create_principal(name, admin=admin))
    return OK


@principal.command("ls", examples=["forebay principal ls"], see=("forebay principal grant", "forebay sessions"))
@connection_options()
@json_option
@pass_session
def list_(session: Session) -> int:
    """List principals and their rights. Tokens are never shown."""
    with session.admin() as node:
        rows = [_fields(info) for info in node.list_principals()]

    def human(out: Console) -> None:
        from rich import box
        from rich.table import Table

        table = Table("principal", "admin", "rights", "created", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(row["name"], "yes" if row["admin"] else "", _grants(row), format_time(row["created_unix_ms"]))
        out.print(table)

    session.emit({"principals": rows}, human)
    return OK


@principal.command(
    examples=["forebay principal rotate vllm > vllm.token"], exits=_NAMED, see=("forebay principal create",)
)
@click.argument("name")
@connection_options()
@json_option
@pass_session
def rotate(session: Session, name: str) -> int:
    """Give a principal a new token and print it; the old one stops working at once."""
    with session.admin() as node:
        _emit_token(session, node.rotate_token(name))
    return OK


@principal.command(examples=["forebay principal rm vllm"], exits=_NAMED, see=("forebay principal revoke",))
@click.argument("name")
@connection_options()
@json_option
@pass_session
def rm(session: Session, name: str) -> int:
    """Remove a principal; its token stops working at once."""
    with session.admin() as node:
        node.delete_principal(name)
    session.emit({"name": name, "removed": True}, lambda out: out.print(f"removed {name}"))
    return OK


def _emit_grants(session: Session, info: Any) -> None:
    document = _fields(info)
    session.emit(document, lambda out: out.print(f"{document['name']}\n{_grants(document) or 'no rights'}"))


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


@principal.command(
    examples=["forebay principal grant vllm acme/chat", "forebay principal grant dashboard acme/chat --rights read"],
    exits=_NAMED,
    see=("forebay principal revoke", "forebay namespace scope-quota", "forebay help namespaces"),
)
@click.argument("name")
@click.argument("namespace", metavar="TENANT/NAME", shell_complete=complete_namespace)
@click.option("--rights", default="read,write", show_default=True, help="Comma-separated: read, write, delete, pin.")
@click.option(
    "--scopes", default=None, help="Comma-separated end tenants that it may act for besides itself. [default: none]"
)
@connection_options()
@json_option
@pass_session
def grant(session: Session, name: str, namespace: str, rights: str, scopes: str | None) -> int:
    """Let a principal use a namespace; replaces the rights it had there."""
    with session.admin() as node:
        _emit_grants(session, node.set_grant(name, namespace, _split(rights), scopes=_split(scopes)))
    return OK


@principal.command(examples=["forebay principal revoke vllm acme/chat"], exits=_NAMED, see=("forebay principal grant",))
@click.argument("name")
@click.argument("namespace", metavar="TENANT/NAME", shell_complete=complete_namespace)
@connection_options()
@json_option
@pass_session
def revoke(session: Session, name: str, namespace: str) -> int:
    """Take all rights on a namespace back."""
    with session.admin() as node:
        held = {info.name: [grant.namespace for grant in info.grants] for info in node.list_principals()}
        if namespace not in held.get(name, [namespace]):
            raise NotFound(f"{name} has no rights in {namespace!r}: `forebay principal ls` shows what there are")
        _emit_grants(session, node.set_grant(name, namespace, []))
    return OK
