"""docs/cli.md names what the command line has."""

import dataclasses
import re
from pathlib import Path

import click

from forebay.cli.demo.report import Report
from forebay.cli.main import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()


def test_every_field_of_the_demo_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("## The demo") :]))
    assert {field.name for field in dataclasses.fields(Report)} <= named


def test_every_reporting_command_is_documented() -> None:
    table = PAGE[PAGE.index("## `--json`") : PAGE.index("## The demo")]
    for name, command in cli.commands.items():
        names = [f"{name} {sub}" for sub in command.commands] if isinstance(command, click.Group) else [name]
        for path in names:
            row = [line for line in table.splitlines() if line.startswith(f"| `{name}") or f"`{path}`" in line]
            assert path in ("serve", "get") or any(path.rsplit(" ", 1)[-1] in line for line in row), path
