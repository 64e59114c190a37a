"""`get_into` with the volume on a disk against `preadv(O_DIRECT)` and `sendmsg` of the same bytes (design §9: 0.9).

The reference reads a plain file on the same file system, block by block, and sends each block as soon as it has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forebay
from forebay.client import Client
from forebay.measure.tcp_peer import TcpPeer
from perf.harness import Row, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, scratch, start_node
from perf.workload import Bench, Workload, client_get, workloads

__all__ = ["run"]


def run(bench: Bench) -> Iterator[Row]:
    """Rows for each size, single and batched. Raises `Skipped` without a disk."""
    sizes, disk = bench.sizes, bench.disk()
    with (
        scratch(disk) as folder,
        start_node(disk, sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
        TcpPeer(sizes.working_bytes, folder / "blocks") as peer,
    ):
        for work in workloads(sizes):
            yield _row(work, disk, node, client, peer)


def _row(work: Workload, disk: Path, node: BenchNode, client: Client, peer: TcpPeer) -> Row:
    peer.load(0, work.values)
    theirs = work.reading("pread", (peer.pid,), lambda first, end: peer.get(first, work.buffers))
    samples = interleave([client_get(node, client, work), theirs], work.sizes.repeats)
    return gb_per_s_row(
        f"get.{work.name}/pread",
        "get_into, volume on disk, against preadv(O_DIRECT) + sendmsg",
        samples["forebay"],
        samples["pread"],
        aim=work.aim(0.9),
        details={**work.details, "file_system": file_system(disk)},
    )
