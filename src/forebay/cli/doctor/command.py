"""`forebay doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay.cli.context import Session, connection_options, json_option, pass_session
from forebay.cli.exits import OK, USAGE
from forebay.cli.teaching import Command

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.appliance.config import Config
    from forebay.cli.doctor.finding import Finding

__all__ = ["doctor"]

UNWELL = 1
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _overruled(config: Path, session: Session) -> Iterator[Finding]:
    from forebay.appliance.config import overruled
    from forebay.cli.doctor.finding import warn

    for line in overruled(config, typed={"data"} if session.data and not session.data_source else ()):
        yield warn("config", line, "unset it, or leave the key out of the file")


def _findings(session: Session, config: Config, schema: Path | None) -> Iterator[Finding]:
    from forebay.cli.doctor import hashes, machine, network, spdk, storage

    rdma = list(machine.check_rdma())
    yield from machine.check_libraries()
    yield from machine.check_limits(config.target.max_connections, any("no devices" not in f.what for f in rdma))
    yield from machine.check_clock()
    yield from storage.check_data(config.data)
    about = network.running_node(session)
    drives = network.drives_in_use(session) if about is not None else None
    if drives is None:
        drives = [(f"drive{number}", drive.path, drive.capacity_bytes) for number, drive in enumerate(config.drives)]
    of_target = {Path(drive.bdev) for drive in config.drives if drive.bdev is not None}
    for name, path, capacity_bytes in drives:
        if path not in of_target:
            yield from storage.check_drive(name, path, capacity_bytes)
    yield from spdk.check_spdk(config)
    yield from network.check_ports(config, about)
    yield from machine.check_nvme()
    yield from rdma
    yield from machine.check_gpu()
    yield from network.check_node(session)
    if schema is not None:
        yield from hashes.check_schema(schema)


@click.command(
    cls=Command,
    short_help="Check machine and node; say what to fix.",
    examples=[
        "forebay doctor",
        "forebay doctor --config /etc/forebay.toml",
        "forebay doctor --url forebay://storage-1:7470 --token $TOKEN",
        "forebay doctor --schema engine.json --json",
    ],
    exits={OK: "nothing failed; there may be warnings", UNWELL: "a check failed", USAGE: "the command line is wrong"},
    see=("forebay status", "forebay help misses", "docs/config.md"),
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The node's TOML file. [default: built-in values and the environment]",
)
@click.option(
    "--schema",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also check a schema (CBOR, or JSON with digests in hexadecimal) or an engine's settings (JSON): would two "
    "replicas get the same keys? [default: none]",
)
@connection_options(data=True)
@json_option
@pass_session
def doctor(session: Session, config: Path | None, schema: Path | None) -> int:
    """Check this machine, and the node if one runs: one line for each finding, with what to do.

    Looks at Python and libraries, limits, the clock, the data directory and its secrets, drives (a file is really
    opened with O_DIRECT, holes are really punched, flushes are timed), addresses, kernel NVMe, RDMA, GPU direct
    storage, and at a running node: its version, and one block of 4 KiB that is written, read and removed. Works without
    a node, too.
    """
    from forebay.appliance.config import load

    settings = load(config, flags={"data": session.data})
    found = [] if config is None else list(_overruled(config, session))
    if session.data is None:
        session.data = str(settings.data)
    found += _findings(session, settings, schema)
    well = all(finding.level != "fail" for finding in found)

    def human(out: Console) -> None:
        from rich.text import Text

        for finding in found:
            line = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
            line.append(f"{finding.check:<16} {finding.what}", style="default")
            if finding.fix:
                line.append(f" -> {finding.fix}", style="bold")
            out.print(line, soft_wrap=True)
        counts = {level: sum(f.level == level for f in found) for level in _STYLES}
        out.print(", ".join(f"{number} {level}" for level, number in counts.items()))

    session.emit({"ok": well, "checks": [asdict(finding) for finding in found]}, human)
    return OK if well else UNWELL
