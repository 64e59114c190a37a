"""Calls as messages of one stream against each as a unary gRPC call of its own (docs/adr/0008-call-stream.md).

Both sides are our client, on one node with the volume on tmpfs; beside that they do the same. Design §9 asks nothing
here; the rows keep what the stream is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.client import Client, ClientOptions
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, start_node
from perf.workload import Bench, Workload, Wrong, client_put, fill, workloads

__all__ = ["run"]

_LARGEST_BYTES = 1 << 20
"""Beyond, calls are a small part of a transfer."""


def run(bench: Bench) -> Iterator[Row]:
    """Rows for reads and for writes, single and batched."""
    sizes = bench.sizes
    with (
        start_node(bench.memory_dir, sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as ours,
        forebay.connect(node.url, token=node.token, options=ClientOptions(call_stream=False)) as unary,
    ):
        for work in workloads(sizes):
            if work.block_bytes <= _LARGEST_BYTES:
                yield _reads(bench, work, node, ours, unary)
                yield _writes(bench, work, node, ours, unary)


def _reads(bench: Bench, work: Workload, node: BenchNode, ours: Client, unary: Client) -> Row:
    keys = work.keys_of()
    fill(ours, keys, work.values)

    def side(name: str, client: Client) -> Side:
        def move(first: int, end: int) -> None:
            for result in client.get_into(keys[first:end], work.buffers):
                if not result.hit:
                    raise Wrong(f"get_into answered {result.reason}")

        return work.reading(name, node.servers, move)

    row = _row(bench, work, "get", [side("stream", ours), side("unary", unary)])
    ours.delete(keys)
    return row


def _writes(bench: Bench, work: Workload, node: BenchNode, ours: Client, unary: Client) -> Row:
    sides = [
        client_put(node, ours, work, "stream", range(1, 1 << 20, 2)),
        client_put(node, unary, work, "unary", range(2, 1 << 20, 2)),
    ]
    return _row(bench, work, "put", sides)


def _row(bench: Bench, work: Workload, verb: str, sides: list[Side]) -> Row:
    samples = interleave(sides, bench.sizes.repeats)
    return gb_per_s_row(
        f"{verb}.{work.name}/unary",
        "get_into and put, volume on tmpfs, calls by one stream against unary calls",
        samples["stream"],
        samples["unary"],
        aim=None,
        details={**work.details, "file_system": file_system(bench.memory_dir)},
    )
