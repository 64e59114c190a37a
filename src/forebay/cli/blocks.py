"""Commands on blocks: put, get, match, ls, stat, rm, pin, unpin."""

from __future__ import annotations

import os
import stat as stat_module
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import (
    Session,
    connection_options,
    console,
    json_option,
    keyspace_options,
    pass_session,
)
from forebay.cli.exits import (
    ABSENT,
    OK,
    REFUSED,
    UNAVAILABLE,
    USAGE,
    WRONG_BYTES,
    error_of,
    worst,
)
from forebay.cli.keys import hex_option, key_fields, parse_key, parse_keys, said, show_key
from forebay.cli.keyspaces import elsewhere_fields, show_elsewhere
from forebay.cli.sizes import format_duration, format_size, format_time
from forebay.cli.teaching import Command
from forebay.errors import ForebayError, InvalidArgument, Unavailable, ValueSize
from forebay.ids import MAX_VALUE_BYTES, BlockKey

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.client import Client, VolumeTransport

__all__ = ["COMMANDS", "print_value"]

_KEYED = (OK, ABSENT, USAGE, REFUSED, UNAVAILABLE, WRONG_BYTES)
"""How a command on keys can end."""
_LOOK_MS = 1_000
"""How long a look at the ways to volumes may take, which is a matter of interest only."""
_LONG_BYTES = 8 << 20
"""Values from here on show that something is going on."""


def _busy(what: str, size_bytes: int) -> AbstractContextManager[Any]:
    """A spinner on a terminal while a value moves that is, or may be, large."""
    shown = console(stderr=True)
    if size_bytes < _LONG_BYTES or not shown.is_terminal:
        return nullcontext()
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=shown, transient=True
    )
    progress.add_task(what, total=None)
    return progress


def _meant_hex(texts: Sequence[str], as_hex: bool) -> str:
    """A hint for keys copied as they are shown, in hexadecimal, and given as text."""
    if as_hex or not any(text.startswith("0x") for text in texts):
        return ""
    return "as text; a key that is shown as 0x... is given with --hex"


def _hint(texts: Sequence[str], as_hex: bool, reasons: Sequence[str]) -> None:
    """Say on standard error what may be meant by absent keys."""
    meant = _meant_hex([text for text, why in zip(texts, reasons, strict=True) if why == "absent"], as_hex)
    if meant:
        click.echo(f"forebay: keys that begin with 0x were looked for {meant}", err=True)


def _too_large(size_bytes: int, source: str) -> ValueSize:
    limit = format_size(MAX_VALUE_BYTES)
    has = f"more than {limit}" if format_size(size_bytes) == limit else format_size(size_bytes)
    message = f"{source} has {has}, and one value at most {limit}: split it"
    return ValueSize(message, field="value", limit=MAX_VALUE_BYTES)


def _read_value(source: str) -> bytes:
    """The bytes of a file or of standard input.

    Raises `ValueSize` (before a large file is read) or `InvalidArgument`.
    """
    if source == "-":
        if sys.stdin is None:
            raise InvalidArgument("standard input is closed: give a file, or `< FILE`", field="file")
        value = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1)
        if len(value) > MAX_VALUE_BYTES:
            raise ValueSize(
                f"standard input has more than {format_size(MAX_VALUE_BYTES)}: split it",
                field="value",
                limit=MAX_VALUE_BYTES,
            )
    else:
        try:
            with open(source, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_VALUE_BYTES:
                    raise _too_large(size, source)
                value = file.read(MAX_VALUE_BYTES + 1)
        except OSError as e:
            raise InvalidArgument(f"cannot read {source}: {e.strerror}", field="file") from e
        if len(value) > MAX_VALUE_BYTES:  # it grew, or is no plain file
            raise _too_large(len(value), source)
    if not value:
        raise ValueSize("an empty value", field="value", limit=f"1 to {MAX_VALUE_BYTES}")
    return value


def _write_value(value: Any, target: str) -> None:
    """Write to standard output or a file. Raises `InvalidArgument`.

    A file gets its value whole: a temporary file beside it, or beside what a symbolic link leads to, takes its name,
    with the mode of the one that was there. What is no file (a device, a pipe) is written to as it is.
    """
    try:
        if target == "-":
            return print_value(value)
        path = Path(os.path.realpath(target))
        try:
            kept = path.stat().st_mode
        except FileNotFoundError:
            kept = None
        if kept is None or stat_module.S_ISREG(kept):
            _replace(path, value, None if kept is None else stat_module.S_IMODE(kept))
        else:
            with open(path, "wb") as there:
                there.write(value)
    except OSError as e:
        if target == "-":  # the command line's to say, as of all that is printed
            raise
        raise InvalidArgument(f"cannot write {target}: {e.strerror}", field="file") from e


def print_value(value: Any) -> None:
    """Write to standard output."""
    if sys.stdout is None:
        raise InvalidArgument("standard output is closed: give a file", field="file")
    sys.stdout.buffer.write(value)
    sys.stdout.buffer.flush()


def _replace(path: Path, value: Any, mode: int | None) -> None:
    """Give a file new contents at once; without a ``mode`` it gets that of any new file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:100]}.", delete=False) as file:
        try:
            file.write(value)
            file.flush()
            if mode is None:
                umask = os.umask(0)
                os.umask(umask)
                mode = 0o666 & ~umask
            os.fchmod(file.fileno(), mode)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@click.command(
    cls=Command,
    short_help="Store a file.",
    examples=["forebay put weights/readme README.md", "tar c logs | forebay put logs.tar -"],
    see=("forebay get", "forebay ls", "forebay help keys", "forebay help durability"),
)
@click.argument("key")
@click.argument("file", metavar="FILE|-")
@hex_option
@connection_options(data=True)
@json_option
@pass_session
def put(session: Session, key: str, file: str, as_hex: bool) -> int:
    """Store a file, or standard input with -, under KEY.

    When this returns 0 the bytes are durable as the namespace's policy says. A block never changes: if KEY is stored
    already nothing is written, which is said and is no failure; `forebay rm KEY` first to store another value.
    A value has at most 64 MiB.
    """
    name, value = parse_key(key, as_hex), _read_value(file)
    with session.client() as client, _busy(f"storing {format_size(len(value))}", len(value)):
        result = client.put([name], [value])[0]
        if not result.stored and not result.present:
            raise _failed(client, result.reason, f"{show_key(name)} was not stored: {result.reason}")
    document = {**key_fields(name), "stored": result.stored, "present": result.present, "length_bytes": len(value)}

    def human(out: Console) -> None:
        if result.stored:
            out.print(f"stored {show_key(name)} ({format_size(len(value))})", soft_wrap=True)
        else:
            out.print(f"{show_key(name)} is stored already: nothing was written", soft_wrap=True)

    session.emit(document, human)
    return OK


@click.command(
    cls=Command,
    short_help="Read a value into a file.",
    examples=["forebay get weights/readme copy.md", "forebay get logs.tar - | tar t"],
    exits=_KEYED,
    see=("forebay put", "forebay match", "forebay help misses"),
)
@click.argument("key")
@click.argument("file", metavar="FILE|-")
@hex_option
@connection_options(data=True)
@pass_session
def get(session: Session, key: str, file: str, as_hex: bool) -> int:
    """Read the value of KEY into a file, or to standard output with -.

    Every byte is checked against the block's checksum first. The file appears whole, under its name, or not at all;
    a device or a pipe is written to once all is checked.
    Exits 1 when KEY is not stored, 5 when its bytes are damaged.
    """
    name = parse_key(key, as_hex)
    with session.client() as client, _busy(f"reading {show_key(name)}", MAX_VALUE_BYTES):
        result = client.get([name])[0]
        if not result.hit or result.value is None:
            meant = _meant_hex([key], as_hex) if result.reason == "absent" else ""
            message = f"no value of {show_key(name)}: {result.reason}{meant and f' ({meant})'}"
            raise _failed(client, result.reason, message)
    _write_value(result.value, file)
    return OK


@click.command(
    cls=Command,
    short_help="Ask which keys are stored.",
    examples=["forebay match block-0 block-1 block-2"],
    exits=_KEYED,
    see=("forebay why", "forebay get", "forebay stat", "forebay help misses"),
)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@hex_option
@keyspace_options
@connection_options(data=True)
@json_option
@pass_session
def match(session: Session, keys: tuple[str, ...], as_hex: bool) -> int:
    """Ask which keys are stored, and how long the leading run of stored ones is.

    This is what an engine asks before it decides between loading and computing. It reads no block and keeps none from
    being evicted. Exits 1 when any key is absent.
    """
    names = parse_keys(keys, as_hex)
    with session.client() as client:
        found = client.match(session.named(client, names))
    rows = list(zip(names, found.present, found.reasons, strict=True))
    document = {
        "keys": [{**key_fields(k), "present": present, "reason": reason} for k, present, reason in rows],
        "prefix": found.prefix.get(session.group, 0),
        "present_bytes": found.present_bytes,
        "load_ms": found.load_ms,
        "elsewhere": elsewhere_fields(found.elsewhere),
    }

    def human(out: Console) -> None:
        for name, present, reason in rows:
            out.print(f"{'present' if present else reason:<20} {show_key(name)}", soft_wrap=True)
        out.print(
            f"the first {document['prefix']} of {len(names)} are stored; {format_size(found.present_bytes)}, "
            f"about {format_duration(found.load_ms)} to load"
        )
        if found.elsewhere is not None:
            out.print(f"the first that is absent is {show_elsewhere(found.elsewhere)}", soft_wrap=True)

    session.emit(document, human)
    _hint(keys, as_hex, found.reasons)
    return worst(found.reasons)


@click.command(
    cls=Command,
    short_help="List stored keys.",
    examples=["forebay ls", "forebay ls logs/ --json"],
    exits=(OK, ABSENT, USAGE, REFUSED, UNAVAILABLE),
    see=("forebay stat", "forebay keyspaces", "forebay events", "forebay help keys"),
)
@click.argument("prefix", default="")
@hex_option
@click.option("--limit", type=click.IntRange(1), default=None, help="Stop after this many keys. [default: all]")
@keyspace_options
@connection_options(data=True)
@json_option
@pass_session
def ls(session: Session, prefix: str, as_hex: bool, limit: int | None) -> int:
    """List the stored keys that begin with PREFIX, in order, with length and time.

    Lists values stored by `forebay put`, or with --keyspace the blocks of engines.
    """
    start = parse_key(prefix, as_hex) if prefix else b""
    with session.client() as client:
        blocks = list(islice(client.list(start, group=session.group, scope=session.scope_id(client)), limit))
    document = {
        "keys": [
            {**key_fields(b.key), "length_bytes": b.length_bytes, "created_unix_ms": b.created_unix_ms} for b in blocks
        ]
    }

    def human(out: Console) -> None:
        for block in blocks:
            size, stored = format_size(block.length_bytes), format_time(block.created_unix_ms)
            out.print(f"{size:>10}  {stored:<20}  {show_key(block.key)}", soft_wrap=True)

    session.emit(document, human)
    return OK


def _way(way: VolumeTransport | None) -> str:
    if way is None or way.transport == "none":
        return f"no transport{'' if way is None else _not_by(way)}"
    return f"{way.transport} ({way.place})"


def _not_by(way: VolumeTransport) -> str:
    return "".join(f"; not by {name}: {why}" for name, why in way.instead_of.items())


def _failed(client: Client, reason: str, message: str) -> ForebayError:
    """The error of a value that was not moved: it says so where no way that is allowed here leads to a volume."""
    if reason == "unavailable":
        for way in client.transports():
            if way.transport == "none":
                where = f"no transport that is allowed here reaches volume {way.volume}{_not_by(way)}"
                return Unavailable(f"{message}: {where}", field="transport")
    return error_of(reason, message)


@click.command(
    cls=Command,
    short_help="Show what is known of keys.",
    examples=["forebay stat weights/readme --json"],
    exits=_KEYED,
    see=("forebay match", "forebay ls", "forebay help durability"),
)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@hex_option
@keyspace_options
@connection_options(data=True)
@json_option
@pass_session
def stat(session: Session, keys: tuple[str, ...], as_hex: bool) -> int:
    """Show what the node knows of each key: length, place, age, policy, pins, leases, and what its writer said of it.

    Exits 1 when any key is absent.
    """
    names = parse_keys(keys, as_hex)
    with session.client() as client:
        found = client.stat(session.named(client, names))
        ways = {way.volume: way for way in client.transports()}
    rows = [(name, one.block, one.reason) for name, one in zip(names, found, strict=True)]

    def fields(stat: Any) -> dict[str, Any]:
        return {
            "length_bytes": stat.length_bytes,
            "extent_bytes": stat.extent_bytes,
            "tiles": stat.tiles,
            "created_unix_ms": stat.created_unix_ms,
            "durability": stat.durability,
            "pins": stat.pins,
            "leases": stat.leases,
            "write_id": stat.write_id.hex(),
            "volume": stat.volume,
            "offset_bytes": stat.offset_bytes,
            "transport": ways[stat.volume].transport if stat.volume in ways else "none",
            "describe": said(stat.describe),
            "hints": said(stat.hints),
        }

    document = {
        "keys": [
            {**key_fields(k), "present": s is not None, "reason": reason, **(fields(s) if s is not None else {})}
            for k, s, reason in rows
        ]
    }

    def human(out: Console) -> None:
        for name, stat, reason in rows:
            if stat is None:
                out.print(f"{show_key(name)}\n  {reason}", soft_wrap=True)
                continue
            out.print(
                f"{show_key(name)}\n"
                f"  length   {format_size(stat.length_bytes)} ({stat.length_bytes} bytes) in {stat.tiles} tile(s)\n"
                f"  place    volume {stat.volume}, offset {stat.offset_bytes}, {format_size(stat.extent_bytes)}\n"
                f"  read by  {_way(ways.get(stat.volume))}\n"
                f"  stored   {format_time(stat.created_unix_ms)}, {stat.durability}, write {stat.write_id.hex()}\n"
                f"  held by  {stat.pins} pin(s), {stat.leases} lease(s)",
                soft_wrap=True,
            )
            for title, about in (("described", stat.describe), ("hints", stat.hints)):
                if text := ", ".join(f"{name} {value}" for name, value in said(about).items() if value):
                    out.print(f"  {title:<8} {text}", soft_wrap=True)

    session.emit(document, human)
    _hint(keys, as_hex, [reason for _, _, reason in rows])
    return worst(reason for _, _, reason in rows)


def _each(session: Session, names: list[bytes], reasons: Sequence[str], done: str) -> int:
    """Report a per-key outcome."""
    rows = list(zip(names, reasons, strict=True))
    document = {"keys": [{**key_fields(name), "ok": reason == "ok", "reason": reason} for name, reason in rows]}

    def human(out: Console) -> None:
        for name, reason in rows:
            out.print(f"{done if reason == 'ok' else reason:<20} {show_key(name)}", soft_wrap=True)

    session.emit(document, human)
    return worst(reasons)


def _batch(
    name: str,
    done: str,
    act: Callable[[Any, list[BlockKey]], Sequence[str]],
    *,
    text: str,
    example: str,
    see: Sequence[str],
) -> Command:
    """A command that does one thing to each key."""

    @click.command(name, cls=Command, help=text, examples=[example], exits=_KEYED, see=see)
    @click.argument("keys", nargs=-1, required=True, metavar="KEY...")
    @hex_option
    @keyspace_options
    @connection_options(data=True)
    @json_option
    @pass_session
    def command(session: Session, keys: tuple[str, ...], as_hex: bool) -> int:
        names = parse_keys(keys, as_hex)
        with session.client() as client:
            reasons = act(client, session.named(client, names))
        found = _each(session, names, reasons, done)
        _hint(keys, as_hex, reasons)
        return found

    return command


rm = _batch(
    "rm",
    "removed",
    lambda client, names: client.delete(names),
    text="Remove blocks. Reads under way finish first; the space is used again after that.",
    example="forebay rm logs.tar weights/readme",
    see=("forebay ls", "forebay namespace rm", "forebay help misses"),
)
pin = _batch(
    "pin",
    "pinned",
    lambda client, names: client.pin(names, persistent=True),
    text="Keep blocks from being evicted, until `forebay unpin`. They count against quota and capacity as before. "
    "`forebay rm` removes a pinned block as any other.",
    example="forebay pin system-prompt",
    see=("forebay unpin", "forebay stat", "forebay help namespaces"),
)
unpin = _batch(
    "unpin",
    "unpinned",
    lambda client, names: client.pin(names, pinned=False, persistent=True),
    text="Let pinned blocks be evicted again.",
    example="forebay unpin system-prompt",
    see=("forebay pin", "forebay stat"),
)

COMMANDS: tuple[click.Command, ...] = (put, get, match, ls, stat, rm, pin, unpin)
