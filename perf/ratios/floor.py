"""`get_into` against the least that a read over gRPC costs in Python, and that against bare TCP alone.

The least is one empty message over gRPC and its answer, then the bytes by bare TCP, each piece taken into a CRC-32C as
it comes. It knows no keys, no metadata, no leases and no NVMe. What is between it and us is ours to remove; what is
between bare TCP and it is not, as long as calls go by gRPC and bytes are checked. Design §9 asks nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.checksum import crc32c
from forebay.measure.tcp_peer import TcpPeer
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave
from perf.node import start_node
from perf.peers.empty_calls import EmptyCalls
from perf.workload import Bench, Workload, client_get, workloads

__all__ = ["run"]


def run(bench: Bench) -> Iterator[Row]:
    """Two rows for each size, single and batched."""
    sizes = bench.sizes
    with (
        start_node(bench.memory_dir, sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
        TcpPeer(sizes.working_bytes) as peer,
        EmptyCalls() as calls,
    ):
        for work in workloads(sizes):
            peer.put(0, work.values)
            yield from _rows(bench, work, client_get(node, client, work), peer, calls)


def _rows(bench: Bench, work: Workload, ours: Side, peer: TcpPeer, calls: EmptyCalls) -> Iterator[Row]:

    def least(first: int, end: int) -> None:
        calls.ask()
        peer.get(first, work.buffers, seen=crc32c)

    sides = [
        ours,
        work.reading("least", (peer.pid, calls.pid), least),
        work.reading("tcp", (peer.pid,), lambda first, end: peer.get(first, work.buffers)),
    ]
    samples = interleave(sides, bench.sizes.repeats)
    details = {**work.details, "file_system": file_system(bench.memory_dir)}
    yield gb_per_s_row(
        f"get.{work.name}/floor",
        "get_into, volume on tmpfs, against an empty gRPC message, then bare TCP with checksums",
        samples[ours.name],
        samples["least"],
        aim=None,
        details=details,
    )
    yield gb_per_s_row(
        f"floor.{work.name}/tcp",
        "an empty gRPC message, then bare TCP with checksums, against bare TCP alone",
        samples["least"],
        samples["tcp"],
        aim=None,
        details=details,
    )
