"""`get_into` with the volume on tmpfs against a bare TCP receive of the same bytes from memory (design §9: 0.9)."""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.client import Client
from forebay.measure.tcp_peer import TcpPeer
from perf.harness import Row, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, start_node
from perf.workload import Bench, Workload, client_get, workloads

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
    peer.put(0, work.values)
    theirs = work.reading("tcp", (peer.pid,), lambda first, end: peer.get(first, work.buffers))
    samples = interleave([client_get(node, client, work), theirs], bench.sizes.repeats)
    return gb_per_s_row(
        f"get.{work.name}/tcp",
        "get_into, volume on tmpfs, against bare TCP from memory",
        samples["forebay"],
        samples["tcp"],
        aim=work.aim(0.9),
        cpu_aim=work.aim(1.2),
        details={**work.details, "file_system": file_system(bench.memory_dir)},
    )
