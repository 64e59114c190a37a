"""`forebay bench`."""

from __future__ import annotations

from typing import Any

import click

from forebay.cli.context import Session, connection_options, console, json_option, pass_session
from forebay.cli.exits import INTERRUPTED, OK, REFUSED, UNAVAILABLE, USAGE
from forebay.cli.sizes import size
from forebay.cli.teaching import Command

__all__ = ["bench"]


@click.command(
    cls=Command,
    short_help="Measure the node, with references beside.",
    examples=[
        "forebay bench",
        "forebay bench --op get --size 1MiB --size 4MiB --batch 1 --batch 16 --seconds 20",
        "forebay bench --processes 4 --threads 2 --no-references --json",
    ],
    exits=(OK, USAGE, REFUSED, UNAVAILABLE, INTERRUPTED),
    see=("forebay top", "forebay doctor", "forebay demo", "make bench (the ratios that the project holds itself to)"),
)
@click.option(
    "--op",
    "operations",
    type=click.Choice(["get", "put", "match"]),
    multiple=True,
    help="What to measure; may be repeated. [default: all]",
)
@click.option(
    "--size", "sizes", type=size, metavar="SIZE", multiple=True, help="Of a block; repeatable. [default: 1MiB, 4MiB]"
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 1024),
    metavar="N",
    multiple=True,
    help="Blocks of one call; repeatable. [default: 16]",
)
@click.option(
    "--keys",
    type=click.IntRange(1, 16_384),
    metavar="N",
    default=1_000,
    show_default=True,
    help="Keys of one match; three of four are stored.",
)
@click.option(
    "--working-set",
    type=size,
    metavar="SIZE",
    default="128MiB",
    show_default=True,
    help="Bytes that get reads over and over, of all threads together.",
)
@click.option(
    "--slot",
    type=size,
    metavar="SIZE",
    default="64MiB",
    show_default=True,
    help="Bytes that a side moves before the next side's turn, of all threads together.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Turns of each side.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    metavar="S",
    help="As many turns as fit into this time, for each comparison. [default: --rounds]",
)
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Client processes.")
@click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="Threads in each of them.")
@click.option(
    "--references/--no-references",
    default=True,
    show_default=True,
    help="Measure bare TCP, and Redis if redis-server is installed, in turns with the node.",
)
@click.option(
    "--durability",
    type=click.Choice(["flush", "verify", "volatile"]),
    default="flush",
    show_default=True,
    help="Policy of the namespace that it creates.",
)
@connection_options(data=True)
@json_option
@pass_session
def bench(session: Session, /, **given: Any) -> int:
    """Measure get, put and match of the running node, in turns with references that move the same bytes.

    Works in a namespace of its own (forebay-bench/...) with a quota, which is removed at the end, however that comes:
    nothing of others is evicted, and a node without room is refused. A token that may create none works with keys of
    its own in --namespace, removed as well; there that namespace's eviction holds. Every side proves once that it
    reads what was written, and a miss ends the run.

    Sides take turns, so that whatever else the machine does meets all of them. Figures are medians of the turns with
    a 95 % interval, and latencies of single calls. The references: `tcp`, the same bytes between two processes over
    one bare TCP connection a thread, without keys, checksums or metadata; `redis`, a server of its own without
    durability. For match they move the keys' bytes, and ask EXISTS.
    """
    from forebay.cli.bench.run import BenchOptions, run_bench
    from forebay.cli.demo.signals import interrupting

    options = BenchOptions(
        operations=given["operations"] or ("get", "put", "match"),
        block_bytes=given["sizes"] or (1 << 20, 4 << 20),
        batches=given["batches"] or (16,),
        match_keys=given["keys"],
        working_bytes=given["working_set"],
        slot_bytes=given["slot"],
        rounds=1000 if given["seconds"] is not None else given["rounds"],
        seconds=given["seconds"],
        processes=given["processes"],
        threads=given["threads"],
        references=given["references"],
        durability=given["durability"],
    )
    progress = console(stderr=True)
    with interrupting():
        result = run_bench(session, options, lambda line: progress.print(line, soft_wrap=True))
    session.emit(result.to_dict(), result.show)
    return OK
