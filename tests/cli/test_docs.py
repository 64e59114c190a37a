"""docs/cli.md names what the command line has."""

import dataclasses
import re
from pathlib import Path

import click

from forebay.cli import events, namespaces, scrub, sessions
from forebay.cli.bench.report import Comparison, Result
from forebay.cli.demo.report import Report
from forebay.cli.doctor.finding import Finding
from forebay.cli.main import cli
from forebay.cli.top.sample import Rates
from forebay.client import NamespaceInfo, ScopeInfo, ScrubStatus, SessionInfo, WatchEvent
from forebay.measure.samples import Sample

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
TABLE = PAGE[PAGE.index("## `--json`") : PAGE.index("A `reason` is")]
WITHOUT = {"serve", "get", "help", "completion"}


def test_every_field_of_the_demo_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("## The demo") :]))
    assert {field.name for field in dataclasses.fields(Report)} <= named


def test_every_reporting_command_is_documented() -> None:
    table = TABLE
    for name, command in cli.commands.items():
        names = [f"{name} {sub}" for sub in command.commands] if isinstance(command, click.Group) else [name]
        for path in names:
            row = [line for line in table.splitlines() if line.startswith(f"| `{name}") or f"`{path}`" in line]
            assert path in WITHOUT or any(path.rsplit(" ", 1)[-1] in line for line in row), path


def row_of(command: str) -> set[str]:
    """Fields that the table names for a command."""
    (line,) = [line for line in TABLE.splitlines() if line.startswith(f"| `{command}`")]
    return set(re.findall(r"`(\w+)(?:\[\])?`", line))


def test_fields_are_those_that_are_printed() -> None:
    info = SessionInfo(bytes(16), "p", "a/b", "", 0, "open", 1, 1, 1, 0, 0, 0)
    assert set(sessions._fields(info)) == row_of("sessions") - {"sessions"}
    assert set(events._fields(WatchEvent(1, 2, "stored"))) == row_of("events") - {"events"}
    space = NamespaceInfo("a/b", 1, 0, "flush", "lru", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, (ScopeInfo("s", 1, 1),))
    fields = namespaces._fields(space)
    assert set(fields) | set(fields["scopes"][0]) <= row_of("namespace create")
    assert {field.name for field in dataclasses.fields(Finding)} <= row_of("doctor")
    assert set(scrub._fields(ScrubStatus("done", "", *[0] * 11))) == row_of("scrub") - {
        *("scrub", "none", "running", "done", "stopped")
    }
    rates = Rates(0, 0, 0, None, 0, None, 0, 0, 0).to_dict()
    assert set(rates) <= row_of("top")
    assert set(Result(1, 1, True, "flush", "direct", None).to_dict()) <= row_of("bench")
    comparison = PAGE[PAGE.index("`comparisons[]` of") : PAGE.index("## The demo")]
    sample = Sample(10, 1.0, 1.0, 1.0)
    for operation in ("get", "match"):
        found = Comparison(operation, 1, 1, {"forebay": [sample]}, {"forebay": [0.1]}, remote=False).to_dict()
        for name in (*found, *found["sides"]["forebay"]):
            assert f"`{name}`" in comparison, name
