"""`forebay events`: what happens to the blocks of a namespace."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, connection_options, json_option, pass_session
from forebay.cli.exits import ABSENT, INTERRUPTED, OK, REFUSED, UNAVAILABLE, USAGE
from forebay.cli.keys import key_fields, show_key
from forebay.cli.sizes import format_size
from forebay.cli.teaching import Command

if TYPE_CHECKING:
    from forebay.client import WatchEvent

__all__ = ["events"]


class _Position(click.ParamType[Any]):
    """``LOG:SEQUENCE`` or ``SEQUENCE``: the log (None without) and the number."""

    name = "position"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int] | Any:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(?:(\d{1,19}):)?(\d{1,19})", str(value))
        if found is None:
            self.fail(f"{value!r} is not a position: SEQUENCE, or LOG:SEQUENCE as events show it", param, ctx)
        return (int(found[1]) if found[1] else None, int(found[2]))


def _fields(event: WatchEvent) -> dict[str, Any]:
    key = key_fields(event.key) if event.key else {"key": None, "key_hex": ""}
    return {
        "log": event.log,
        "sequence": event.sequence,
        "kind": event.kind,
        **key,
        "group": event.group,
        "scope": event.scope,
        "generation": event.generation,
        "keyspace": event.keyspace.hex(),
        "reason": event.reason,
        "length_bytes": event.length_bytes,
    }


def _line(event: WatchEvent) -> str:
    details = [show_key(event.key)] if event.key else []
    if event.kind == "stored":
        details.append(format_size(event.length_bytes))
    if event.reason:
        details.append(event.reason)
    if event.kind == "generation":
        details.append(f"{event.generation} at least")
    if event.kind == "resync":
        details.append("events were lost here (the node restarted, or too long ago): `forebay ls` shows the state now")
    return f"{event.log}:{event.sequence:<10} {event.kind:<10} {'  '.join(details)}"


@click.command(
    cls=Command,
    short_help="Follow what happens to blocks.",
    examples=[
        "forebay events -n acme/chat",
        "forebay events --since 0 --count 100",
        "forebay events --since 3:1042 --json | jq -r 'select(.kind == \"removed\") | .key_hex'",
    ],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE, INTERRUPTED),
    see=("forebay ls", "forebay top", "forebay help misses"),
)
@click.option(
    "--since",
    type=_Position(),
    metavar="POSITION",
    help="Begin after this event, LOG:SEQUENCE as shown; without LOG it is of the node's present start, and 0 begins "
    "with the oldest event kept (65,536 are). [default: from now on]",
)
@click.option("--count", type=click.IntRange(1), help="End after this many. [default: follow until Ctrl-C]")
@connection_options(data=True)
@json_option
@pass_session
def events(session: Session, since: tuple[int | None, int] | None, count: int | None) -> int:
    """Follow the events of a namespace: blocks stored and removed, and why.

    Kinds are stored, removed (deleted, evicted, expired, stale, bad), cleared (the whole namespace), generation (the
    minimum was raised) and resync (some were lost, so take the state from `forebay ls`). Goes on when the node
    restarts. With --json each event is one line.
    """
    with session.client() as client:
        log, sequence = since if since is not None else (0, 0)
        stream = client.watch(sequence, client.incarnation if log is None else log)
        for event in islice(stream, count):
            click.echo(json.dumps(_fields(event)) if session.json else _line(event))
    return OK
