"""`put` into a node that is full, so that every put evicts, against `put` into an empty one (design §9: 0.8)."""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.client import Admin, Client
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, start_node
from perf.workload import Bench, Workload, Wrong, client_put, fill

__all__ = ["run"]


def run(bench: Bench) -> Iterator[Row]:
    """One row for each size, in batches."""
    sizes = bench.sizes
    for block_bytes in sizes.block_bytes:
        with (
            start_node(bench.memory_dir, sizes.node_bytes) as full,
            start_node(bench.memory_dir, sizes.node_bytes) as empty,
            forebay.connect(full.url, token=full.token) as full_client,
            forebay.connect(empty.url, token=empty.token) as empty_client,
        ):
            yield _row(bench, Workload(sizes, block_bytes, sizes.batch), (full, full_client), (empty, empty_client))


def _row(bench: Bench, work: Workload, full: tuple[BenchNode, Client], empty: tuple[BenchNode, Client]) -> Row:
    turn = 0
    with Admin(full[0].url, token=full[0].token) as admin:
        while not admin.status().counters.get("blocks_evicted", 0):
            turn += 1
            if turn * work.count * work.block_bytes > 2 * work.sizes.node_bytes:
                raise Wrong("the node took twice its capacity and evicted nothing")
            fill(full[1], work.keys_of(-turn), work.values)
        before = admin.status()
        at_capacity, keys = 0, work.keys_of()

        def renew() -> None:
            nonlocal at_capacity, keys
            at_capacity += 1
            keys = work.keys_of(at_capacity)

        theirs = client_put(*empty, work)
        ours = Side(
            "full",
            work.slots(lambda first, end: fill(full[1], keys[first:end], work.values[first:end])),
            full[0].servers,
            renew,
        )
        samples = interleave([ours, theirs], work.sizes.repeats)
        after = admin.status()
    return gb_per_s_row(
        f"put.full.{work.name}/empty",
        "put into a full node, evicting, against put into an empty one, tmpfs",
        samples["full"],
        samples["forebay"],
        aim=0.8,
        details={
            **work.details,
            "file_system": file_system(bench.memory_dir),
            "used_share": round(before.used_bytes / before.capacity_bytes, 3),
            "blocks_evicted": after.counters["blocks_evicted"] - before.counters["blocks_evicted"],
        },
    )
