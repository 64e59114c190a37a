"""`forebay fsck`: check a node that is stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.context import Session, connection_options, json_option, pass_session
from forebay.cli.exits import ABSENT, INTERRUPTED, OK, REFUSED, USAGE, WRONG_BYTES
from forebay.cli.progress import Bar
from forebay.cli.sizes import format_size
from forebay.cli.teaching import Command
from forebay.errors import DataDirInUse, NotFound

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.appliance.config import Config
    from forebay.appliance.namespace.fsck import Fsck, FsckReport

__all__ = ["fsck"]

_SHOWN = 100
"""Findings that people are shown of each part; --json has them all."""
_WORDS = {
    "namespaces": "namespaces",
    "principals": "principals",
    "volumes": "labels of volumes",
    "regions": "claimed regions",
    "quarantined": "extents in quarantine",
    "changes": "entries of the change log",
    "checkpoint_blocks": "blocks of the index checkpoint",
    "records": "records of blocks",
    "schemas": "schemas",
    "owners": "owners of extents",
    "media_blocks": "blocks read from media",
}
_BYTES = {"records": "extent_bytes", "quarantined": "quarantined_bytes", "media_blocks": "media_bytes"}
"""What some of them take."""


@contextmanager
def _opened(config: Config, *, read_only: bool) -> Iterator[Fsck]:
    """The check of a stopped node. Raises `NotFound` where there is none, `DataDirInUse` while it runs."""
    from forebay.appliance.daemon import hold
    from forebay.appliance.dataplane.volumes import volumes_on
    from forebay.appliance.namespace.checkpoint import FILE_NAME
    from forebay.appliance.namespace.fsck import Fsck
    from forebay.appliance.namespace.rocks import RocksStore

    path = config.metadata_dir / "rocksdb"
    if not (path / "CURRENT").exists():
        raise NotFound(f"{config.data} holds no node: there is no {path}", field="data")
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(config.data))
        except DataDirInUse as e:
            raise DataDirInUse(
                f"the node of {config.data} runs: stop it to check it whole, or `forebay scrub` its blocks as it is",
                field="data",
            ) from e
        store = RocksStore(path, read_only=read_only)
        stack.callback(store.close)
        drives = {f"drive{i}": drive for i, drive in enumerate(config.drives)}
        files = {name: volumes_on(drive.path) for name, drive in drives.items() if drive.bdev is None}
        yield Fsck(store, files, config.metadata_dir / FILE_NAME, elsewhere=drives.keys() - files.keys())


def _check(config: Config, *, media: bool) -> FsckReport:
    with _opened(config, read_only=True) as check, Bar("media") as bar:
        return asyncio.run(check.run(media=media, progress=bar.show))


def _repair(config: Config) -> int:
    with _opened(config, read_only=False) as check:
        return asyncio.run(check.repair())


def _draw(out: Console, report: FsckReport, dropped: int | None) -> None:
    for name, text in _WORDS.items():
        if name in report.checked:
            size = f", {format_size(report.checked[_BYTES[name]])}" if name in _BYTES else ""
            out.print(f"checked  {report.checked[name]} {text}{size}")
    shown: dict[tuple[str, bool], int] = {}
    for found in report.findings:
        seen = shown[found.part, found.wrong] = shown.get((found.part, found.wrong), 0) + 1
        if seen <= _SHOWN:
            out.print(
                f"{'WRONG ' if found.wrong else 'note  '}   {found.part}: {found.what} -> {found.then}", soft_wrap=True
            )
    for (part, wrong), count in shown.items():
        if count > _SHOWN:
            out.print(
                f"{'WRONG ' if wrong else 'note  '}   {part}: {count - _SHOWN} more of its kind (--json has them all)"
            )
    if dropped is not None:
        out.print(f"repaired {dropped} records dropped; the next start builds the index from the records")
    out.print("clean" if report.clean else f"{sum(found.wrong for found in report.findings)} inconsistencies")


@click.command(
    cls=Command,
    short_help="Check a node that is stopped.",
    examples=[
        "forebay fsck --data /tmp/node",
        "forebay fsck --config /etc/forebay.toml --media",
        "forebay fsck --data /tmp/node --json | jq '.findings[] | select(.wrong)'",
    ],
    exits={
        OK: "nothing is inconsistent",
        ABSENT: "there is no node in that directory",
        USAGE: "the command line or the configuration is wrong",
        REFUSED: "the node runs, or its directory is of a newer version",
        WRONG_BYTES: "something is inconsistent",
        INTERRUPTED: "interrupted with Ctrl-C",
    },
    see=("forebay scrub", "forebay doctor", "docs/integrity.md"),
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The node's TOML file, for drives or metadata that lie outside --data. [default: built-in values]",
)
@click.option("--media", is_flag=True, help="Also read every block and compare its checksums.")
@click.option("--repair", is_flag=True, help="Then do what a start without a checkpoint would: drop what cannot stand.")
@connection_options()
@json_option
@pass_session
def fsck(session: Session, config: Path | None, *, media: bool, repair: bool) -> int:
    """Compare metadata, owners, regions, the change log, the index checkpoint, the allocator and the volumes of a node.

    Reads only, unless --repair is given, and says of each inconsistency what the next start would do about it. What a
    kill at any moment leaves behind is no inconsistency: it is a note. With --repair the exit code is still that of
    what was found.
    """
    from forebay.appliance.config import load

    logging.getLogger("forebay").addHandler(logging.NullHandler())  # what the parts log is among the findings
    settings = load(config, flags={"data": session.data})
    report = _check(settings, media=media)
    dropped = _repair(settings) if repair and not report.clean else None
    document: dict[str, Any] = {
        "clean": report.clean,
        "checked": report.checked,
        "findings": [asdict(found) for found in report.findings],
        "dropped": dropped,
    }
    session.emit(document, lambda out: _draw(out, report, dropped))
    if config is None and any(found.wrong and found.part == "volumes" for found in report.findings):
        click.echo(
            "no --config was given, so drives were looked for in the data directory alone: a node that was started "
            "with one is checked with the same one",
            err=True,
        )
    return OK if report.clean else WRONG_BYTES
