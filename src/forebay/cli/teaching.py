"""Commands whose help ends with examples that are never folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

__all__ = ["Command", "Group"]


class Command(click.Command):
    """A command with ``examples``, one line each."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        super().format_epilog(ctx, formatter)


class Group(Command, click.Group):
    """A group of such commands."""

    command_class = Command
