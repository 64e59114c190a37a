"""The `forebay` command: parses, runs one command, and turns every error into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

import forebay
from forebay.cli import (
    blocks,
    events,
    fsck,
    keyspaces,
    manual,
    namespaces,
    node,
    principals,
    quarantine,
    scrub,
    sessions,
)
from forebay.cli.bench.command import bench
from forebay.cli.context import Session, connection_options, pass_session
from forebay.cli.demo.command import demo
from forebay.cli.doctor.command import doctor
from forebay.cli.exits import INTERRUPTED, MEANINGS, OK, UNAVAILABLE, USAGE, advice, exit_code
from forebay.cli.sizes import format_size
from forebay.cli.teaching import Group
from forebay.cli.top.command import top
from forebay.errors import CapacityShort, ForebayError, VolumeMismatch

__all__ = ["cli", "main", "run"]


@click.group(
    examples=[
        "forebay serve --data /tmp/node --capacity 1GiB &",
        "export FOREBAY_DATA=/tmp/node",
        "echo hello | forebay put greeting -",
        "forebay get greeting -",
        "forebay demo",
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    cls=Group,
    see=("forebay help TOPIC", "docs/cli.md"),
    exits=MEANINGS,
)
@connection_options(data=True, environment=True)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(forebay.__version__, prog_name="forebay")
@pass_session
def cli(session: Session, debug: bool) -> None:
    """Keep KV cache blocks of LLM inference on flash, and read them back faster than a GPU recomputes them.

    On the host of a node every command finds it, and the right to use it, by the node's data directory; from
    elsewhere give --url and --token. Options may stand before or after the command's name.
    """
    session.debug = debug


for _command in (
    node.serve,
    node.status,
    top,
    *blocks.COMMANDS,
    keyspaces.why,
    keyspaces.keyspaces,
    events.events,
    sessions.sessions,
    namespaces.namespace,
    principals.principal,
    scrub.scrub,
    quarantine.quarantine,
    fsck.fsck,
    bench,
    doctor,
    demo,
    manual.help_,
    manual.completion,
):
    cli.add_command(_command)


def _one_line(error: ForebayError, session: Session) -> str:
    """What happened, which field, its limit, the stable code, and what to do."""
    said = error.message
    if session.data_source:  # where nobody typed the directory, say who named it
        folder = re.escape(str(session.data_dir))
        said = re.sub(rf"{folder}[^\s:,]*", rf"\g<0> (from {session.data_source})", said, count=1)
    details = [error.field] if error.field and error.field not in said else []
    limit = error.limit
    if isinstance(error, VolumeMismatch) and isinstance(limit, str):
        limit = None  # an identity: nothing that a person could compare
    if isinstance(error, CapacityShort) and isinstance(limit, int):
        limit = format_size(limit)
    if limit is not None and str(limit) not in said:
        details.append(f"limit: {limit}")
    text = said + (f" ({', '.join(details)})" if details else "") + f" [{type(error).__name__} {error.code}]"
    hint = advice(error)
    return f"forebay: {text}" + (f": {hint}" if hint else "")


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _printing(error: OSError) -> bool:
    """Whether it was raised where something is printed, and not by a file that a command works with."""
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    module = str(frame.f_globals.get("__name__", ""))
    return module.split(".", maxsplit=1)[0] in ("click", "rich") or frame.f_code in (
        _flush.__code__,
        blocks.print_value.__code__,
    )


def _give_up_output() -> None:
    """Let Python not try again at exit to write what standard output did not take."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    session = Session()
    try:
        result = cli.main(
            args=list(argv) if argv is not None else None, prog_name="forebay", obj=session, standalone_mode=False
        )
        _flush()
        return result if isinstance(result, int) else OK
    except click.UsageError as e:
        if isinstance(e, click.NoSuchOption):  # a guess that is far off is worse than none
            near = difflib.get_close_matches(e.option_name, e.possibilities or (), cutoff=0.75)
            e = click.NoSuchOption(e.option_name, possibilities=near, ctx=e.ctx)
        e.show()
        return USAGE
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("forebay: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does. Python would complain again while it flushes at exit.
        sys.stderr.close()
        return OK
    except ForebayError as e:
        if session.debug:
            raise
        click.echo(_one_line(e, session), err=True)
        return exit_code(e)
    except OSError as e:  # of this machine: a file or a directory that cannot be used
        if session.debug:
            raise
        if not _printing(e):
            click.echo(f"forebay: {e}", err=True)
            return UNAVAILABLE
        _give_up_output()
        click.echo(f"forebay: cannot write to standard output: {e.strerror}", err=True)
        return USAGE


def main() -> NoReturn:
    """The entry point of the `forebay` script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
