"""`get_into` with the volume on tmpfs against Redis GET ending in the same buffers (design §9: 1.2)."""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.client import Client
from perf.harness import Row, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, scratch, start_node
from perf.redis_peer import RedisPeer, missing_redis
from perf.workload import Bench, Skipped, Workload, client_get, workloads

__all__ = ["run"]


def run(bench: Bench) -> Iterator[Row]:
    """Rows for each size, single and batched, against both Redis clients. Raises `Skipped` without Redis."""
    missing = missing_redis()
    if missing:
        raise Skipped(missing)
    sizes = bench.sizes
    with (
        scratch(bench.memory_dir) as folder,
        start_node(bench.memory_dir, sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
        RedisPeer(folder) as peer,
    ):
        for work in workloads(sizes):
            yield from _rows(bench, work, node, client, peer)


def _rows(bench: Bench, work: Workload, node: BenchNode, client: Client, peer: RedisPeer) -> Iterator[Row]:
    keys = work.keys_of()
    peer.bare_put(keys, work.values)
    sides = [
        client_get(node, client, work),
        work.reading("redis", (peer.pid,), lambda first, end: peer.get(keys[first:end], work.buffers)),
        work.reading("redis-bare", (peer.pid,), lambda first, end: peer.bare_get(keys[first:end], work.buffers)),
    ]
    samples = interleave(sides, bench.sizes.repeats)
    peer.clear()
    for name, how in (("redis", "redis-py with hiredis"), ("redis-bare", "Redis by bare sockets")):
        yield gb_per_s_row(
            f"get.{work.name}/{name}",
            f"get_into, volume on tmpfs, against GET, {how}",
            samples["forebay"],
            samples[name],
            aim=work.aim(1.2),
            details={**work.details, "file_system": file_system(bench.memory_dir), "peer": peer.versions},
        )
