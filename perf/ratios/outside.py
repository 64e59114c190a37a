"""`get_into` and `put` with the volume on tmpfs against stores in memory whose clients are processes of their own.

nbdkit's memory plugin through libnbd (design §9: reads 1.0 at 4 MiB) and Mooncake Store over TCP (reads 1.2; half of
its CPU). What they store is gone after a crash, which is why design §9 asks no speed of ``put`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import forebay
from forebay.client import Client
from perf.harness import Row, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, start_node
from perf.outside import OutsidePeer, mooncake, nbdkit
from perf.workload import Bench, Workload, client_get, client_put, workloads

__all__ = ["run_mooncake", "run_nbdkit"]

_AT_4_MIB = 4 << 20
_Start = Callable[[int], AbstractContextManager[OutsidePeer]]


def run_nbdkit(bench: Bench) -> Iterator[Row]:
    """Rows for each size, single and batched, reads and writes. Raises `Skipped` without nbdkit or libnbd."""
    yield from _run(bench, nbdkit, 1, lambda work: 1.0 if work.block_bytes == _AT_4_MIB else None, None)


def run_mooncake(bench: Bench) -> Iterator[Row]:
    """Rows for each size, single and batched, reads and writes. Raises `Skipped` without its environment."""
    yield from _run(bench, mooncake, 4, lambda work: 1.2, 0.5)


def _run(
    bench: Bench, start: _Start, times: int, aim: Callable[[Workload], float | None], cpu_aim: float | None
) -> Iterator[Row]:
    sizes = bench.sizes
    with (
        start(times * sizes.working_bytes) as peer,
        start_node(bench.memory_dir, sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
    ):
        for work in workloads(sizes):
            for operation in ("get", "put"):
                aimed = aim(work) if operation == "get" else None
                yield _row(bench, operation, work, node, client, peer=peer, aim=aimed, cpu_aim=cpu_aim)


def _row(
    bench: Bench,
    operation: str,
    work: Workload,
    node: BenchNode,
    client: Client,
    *,
    peer: OutsidePeer,
    aim: float | None,
    cpu_aim: float | None,
) -> Row:
    reading = operation == "get"
    ours = (client_get if reading else client_put)(node, client, work)
    theirs = peer.reading(work) if reading else peer.writing(work)
    samples = interleave([ours, theirs], bench.sizes.repeats)
    return gb_per_s_row(
        f"{operation}.{work.name}/{peer.name}",
        f"{'get_into' if reading else 'put, policy flush'}, volume on tmpfs, against {peer.name} in memory",
        samples["forebay"],
        samples[peer.name],
        aim=aim,
        cpu_aim=cpu_aim,
        details={**work.details, "file_system": file_system(bench.memory_dir), "peer": peer.versions},
    )
