"""`forebay demo`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from forebay.cli.context import Session, json_option, pass_session
from forebay.cli.exits import INTERRUPTED, MEANINGS, OK, REFUSED, UNAVAILABLE, USAGE, WRONG_BYTES
from forebay.cli.sizes import size
from forebay.cli.teaching import Command
from forebay.errors import InvalidArgument

__all__ = ["demo"]


@contextmanager
def _place(data: Path | None) -> Iterator[Path]:
    """The directory to work in: the one asked for, or a temporary one that goes away at the end."""
    from forebay.cli.demo.signals import deferred, ignored

    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
        yield data
        return
    with deferred():
        place = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    try:
        yield place
    finally:
        with ignored():
            shutil.rmtree(place, ignore_errors=True)


@click.command(
    cls=Command,
    short_help="Run the main job, with a kill in the middle.",
    examples=[
        "forebay demo",
        "forebay demo --trace mooncake_conversation.jsonl --seed 7",
        "forebay demo --capacity 512MiB --json",
    ],
    exits={
        OK: "every byte was right and every acknowledged block is accounted for",
        USAGE: MEANINGS[USAGE],
        REFUSED: "the drive is too small",
        UNAVAILABLE: "the node or a replica failed, or nothing was stored",
        WRONG_BYTES: "a byte was wrong, or an acknowledged block was lost",
        INTERRUPTED: MEANINGS[INTERRUPTED],
    },
    see=("forebay serve", "forebay bench", "docs/cli.md"),
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="FOREBAY_TRACE",
    show_envvar=True,
    help="Requests in the Mooncake format. Default: generated multi-turn conversations.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Draws conversations, and makes blocks' bytes.")
@click.option(
    "--budget",
    type=size,
    metavar="SIZE",
    default="2GiB",
    show_default=True,
    help="Bytes to write and read at most.",
)
@click.option("--full", is_flag=True, help="Take every conversation, whatever that needs of time and space.")
@click.option(
    "--block-size",
    type=size,
    metavar="SIZE",
    default="512KiB",
    show_default=True,
    help="Bytes of 512 tokens; the model has 64 MiB.",
)
@click.option(
    "--capacity",
    type=size,
    metavar="SIZE",
    help="Capacity of the node. Default: all fits. With less it evicts.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=click.FloatRange(1.0),
    default=None,
    help="Prefill speed that the estimate assumes. Default: a published figure, named in the table.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the node here, in a directory that is absent or empty. Default: a temporary one, removed at the end.",
)
@json_option
@pass_session
def demo(
    session: Session,
    *,
    trace: Path | None,
    seed: int,
    budget: int,
    full: bool,
    block_size: int,
    capacity: int | None,
    prefill_tokens_per_s: float | None,
    data: Path | None,
) -> int:
    """Run the main job on real input: two engine replicas, a kill in the middle, every byte compared.

    Starts a node in a temporary directory and drives it as two replicas of an engine would, each a process: every
    request asks for its prefix, loads and compares what is there, and stores the rest. Half-way the daemon and the
    target are killed (SIGKILL) and started again, and everything acknowledged is read back, then and at the end.
    Exits 5 if a byte was wrong, or if an acknowledged block is missing that the node did not report evicted.
    """
    from forebay.cli.demo.display import Display
    from forebay.cli.demo.report import PREFILL_TOKENS_PER_S
    from forebay.cli.demo.run import DemoOptions, run_demo
    from forebay.cli.demo.signals import interrupting

    if data is not None and data.exists() and any(data.iterdir()):
        raise InvalidArgument(f"{data} is not empty: choose another directory", field="data")
    options = DemoOptions(
        trace=trace,
        seed=seed,
        budget_bytes=None if full else budget,
        block_bytes=block_size,
        capacity_bytes=capacity,
        prefill_tokens_per_s=prefill_tokens_per_s or PREFILL_TOKENS_PER_S,
    )
    with interrupting(), _place(data) as place, Display() as display:
        report = run_demo(options, place, display)
    session.emit(report.to_dict(), report.show)
    return report.exit_code
