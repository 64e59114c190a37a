"""Commands whose help ends, as a manual page does, with examples, exit codes and what to read next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from forebay.cli.exits import MEANINGS, OK, REFUSED, UNAVAILABLE, USAGE

__all__ = ["Command", "Group"]

_ANY_NODE = (OK, USAGE, REFUSED, UNAVAILABLE)


class Command(click.Command):
    """A command with ``examples``, one line each, the ``exits`` that it can end with, and ``see``: what to read next.

    ``exits`` maps a code to what it means here, or lists codes that mean what they always do.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        exits: Sequence[int] | dict[int, str] = _ANY_NODE,
        see: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.examples = tuple(examples)
        self.exits = exits if isinstance(exits, dict) else {code: MEANINGS[code] for code in exits}
        self.see = tuple(see)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        if self.exits:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(code), meaning) for code, meaning in self.exits.items()])
        if self.see:
            with formatter.section("See also"):
                formatter.write_text(", ".join(self.see))
        super().format_epilog(ctx, formatter)


class Group(Command, click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, *args: Any, exits: Sequence[int] | dict[int, str] = (), **settings: Any) -> None:
        super().__init__(*args, exits=exits, **settings)
