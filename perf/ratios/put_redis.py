"""`put`, policy flush, against Redis SET, which is not durable (design §9: 1.0): on tmpfs and on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forebay
from forebay.client import Client
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave, quantiles_ms
from perf.node import BenchNode, scratch, start_node
from perf.ratios.flush import flush_latencies
from perf.redis_peer import RedisPeer, missing_redis
from perf.workload import Bench, Skipped, Workload, client_put, workloads

__all__ = ["run"]


def run(bench: Bench) -> Iterator[Row]:
    """Rows for each place, size and Redis client, single and batched. Raises `Skipped` without Redis."""
    missing = missing_redis()
    if missing:
        raise Skipped(missing)
    yield from _at(bench, bench.memory_dir)
    yield from _at(bench, bench.disk())


def _at(bench: Bench, folder: Path) -> Iterator[Row]:
    with (
        scratch(bench.memory_dir) as redis_folder,
        start_node(folder, bench.sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
        RedisPeer(redis_folder) as peer,
    ):
        for work in workloads(bench.sizes):
            yield from _rows(work, folder, node, client, peer)


def _rows(work: Workload, folder: Path, node: BenchNode, client: Client, peer: RedisPeer) -> Iterator[Row]:
    place = "tmpfs" if file_system(folder) == "tmpfs" else "disk"
    keys = work.keys_of()
    sides = [
        client_put(node, client, work),
        Side("redis", work.slots(lambda a, b: peer.put(keys[a:b], work.values[a:b])), (peer.pid,)),
        Side("redis-bare", work.slots(lambda a, b: peer.bare_put(keys[a:b], work.values[a:b])), (peer.pid,)),
    ]
    samples = interleave(sides, work.sizes.repeats)
    peer.clear()
    flush = quantiles_ms(flush_latencies(folder, work.sizes))
    for name, how in (("redis", "redis-py with hiredis"), ("redis-bare", "Redis by bare sockets")):
        yield gb_per_s_row(
            f"put.{place}.{work.name}/{name}",
            f"put, policy flush, volume on {place}, against SET, {how}",
            samples["forebay"],
            samples[name],
            aim=work.aim(1.0),
            details={
                **work.details,
                "file_system": file_system(folder),
                "fdatasync_ms": flush,
                "peer": peer.versions,
            },
        )
