"""`forebay keyspaces` and `forebay why`: which engines share blocks, and why a block was a miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, connection_options, json_option, keyspace_options, pass_session
from forebay.cli.exits import ABSENT, OK, REFUSED, UNAVAILABLE, USAGE, WRONG_BYTES, worst
from forebay.cli.keys import hex_option, key_fields, parse_keys, show_key
from forebay.cli.teaching import Command
from forebay.cli.topics import MISSES

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.client import KeyspaceInfo

__all__ = ["elsewhere_fields", "keyspaces", "show_elsewhere", "why"]


def elsewhere_fields(elsewhere: tuple[bytes, int] | None) -> dict[str, Any] | None:
    """How ``--json`` says where a key is instead."""
    return None if elsewhere is None else {"keyspace": elsewhere[0].hex(), "generation": elsewhere[1]}


def show_elsewhere(elsewhere: tuple[bytes, int]) -> str:
    """The same for people."""
    return f"in keyspace {elsewhere[0].hex()[:16]} under generation {elsewhere[1]}"


def _fields(info: KeyspaceInfo) -> dict[str, Any]:
    schema = info.schema
    return {
        "keyspace": info.keyspace.hex(),
        "generation": info.generation,
        "engine": schema.engine,
        "model": schema.model.hex(),
        "block_tokens": schema.hash.block_tokens,
        "groups": [
            {"kind": group.kind, "layers": len(group.layers), "dtype": group.dtype, "format": group.format}
            for group in schema.groups
        ],
    }


@click.command(
    cls=Command,
    short_help="List keyspaces in use.",
    examples=["forebay keyspaces -n acme/chat", "forebay ls --keyspace 3fa9 -n acme/chat"],
    exits=(OK, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay why", "forebay sessions", "forebay help keys"),
)
@connection_options(data=True)
@json_option
@pass_session
def keyspaces(session: Session) -> int:
    """List what sessions of a namespace lately had, or its blocks are stored under, the last used first.

    The first is that of this command itself, `opaque`. Engines share blocks if they are in one keyspace and
    generation. `ls`, `match`, `stat` and `why` take one with --keyspace, of which the first digits are enough.
    """
    with session.client() as client:
        rows = [_fields(info) for info in client.keyspaces()]

    def human(out: Console) -> None:
        for row in rows:
            groups = ", ".join(f"{g['kind']} {g['layers']} x {g['dtype']} {g['format']}" for g in row["groups"])
            model = f", model {row['model'][:12]}" if row["model"] else ""
            out.print(f"{row['keyspace'][:16]}  generation {row['generation']}  {row['engine']}{model}, {groups}")

    session.emit({"keyspaces": rows}, human)
    return OK


@click.command(
    cls=Command,
    short_help="Say why keys are misses.",
    examples=["forebay why greeting", "forebay why --keyspace 3fa9 --hex 8c1f... -n acme/chat"],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE, WRONG_BYTES),
    see=("forebay match", "forebay keyspaces", "forebay help misses"),
)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@hex_option
@keyspace_options
@connection_options(data=True)
@json_option
@pass_session
def why(session: Session, keys: tuple[str, ...], as_hex: bool) -> int:
    """Say of each key whether it is stored, and if it is not, why, as far as the node knows, and what to do.

    A key that is in another keyspace of the namespace is shown with what differs between the two: here, there.
    Exits 1 when any key is absent.
    """
    names = parse_keys(keys, as_hex)
    documents, reasons = [], []
    with session.client() as client:
        schemas = {(info.keyspace, info.generation): info.schema for info in client.keyspaces()}
        for name, key in zip(names, session.named(client, names), strict=True):
            found = client.match([key])  # one by one: of a call only the first is looked for elsewhere
            (reason,) = found.reasons
            meaning, advice = MISSES.get(reason, ("it is stored" if reason == "ok" else "", ""))
            there = schemas.get(found.elsewhere) if found.elsewhere is not None else None
            documents.append(
                {
                    **key_fields(name),
                    "present": reason == "ok",
                    "reason": reason,
                    "meaning": meaning,
                    "advice": advice,
                    "elsewhere": elsewhere_fields(found.elsewhere),
                    "differences": [] if there is None else client.schema.differences(there),
                }
            )
            reasons.append(reason)

    def human(out: Console) -> None:
        for name, document in zip(names, documents, strict=True):
            out.print(f"{show_key(name)}\n  {document['reason']}: {document['meaning']}", soft_wrap=True)
            if document["advice"]:
                out.print(f"  -> {document['advice']}", soft_wrap=True)
            where = document["elsewhere"]
            if where is not None:
                out.print(f"  it is {show_elsewhere((bytes.fromhex(where['keyspace']), where['generation']))}")
            for line in document["differences"]:
                out.print(f"    {line}", soft_wrap=True)

    session.emit({"keys": documents}, human)
    return worst(reasons)
