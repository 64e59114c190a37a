"""`put`, policy flush, with the volume on tmpfs against a bare TCP send of the same bytes into memory.

Design §9 asks nothing here; the row shows how far `put` is from the wire.
"""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.client import Client
from forebay.measure.tcp_peer import TcpPeer
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, start_node
from perf.workload import Bench, Workload, client_put, workloads

__all__ = ["run"]


def run(bench: Bench) -> Iterator[Row]:
    """Rows for each size, single and batched."""
    sizes = bench.sizes
    with (
        start_node(bench.memory_dir, sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
        TcpPeer(sizes.working_bytes) as peer,
    ):
        for work in workloads(sizes):
            yield _row(bench, work, node, client, peer)


def _row(bench: Bench, work: Workload, node: BenchNode, client: Client, peer: TcpPeer) -> Row:
    theirs = Side("tcp", work.slots(lambda first, end: peer.put(first, work.values[first:end])), (peer.pid,))
    samples = interleave([client_put(node, client, work), theirs], bench.sizes.repeats)
    return gb_per_s_row(
        f"put.{work.name}/tcp",
        "put, policy flush, volume on tmpfs, against bare TCP into memory",
        samples["forebay"],
        samples["tcp"],
        aim=None,
        details={**work.details, "file_system": file_system(bench.memory_dir)},
    )
