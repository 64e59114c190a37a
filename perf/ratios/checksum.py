"""What verification costs a read: the initiator with checksums against the same one without (design §9: ≤ 10 %).

Both sides run the client's own transport on the same ranges of the same volume; only the seeds, which ask it for
checksums, are left out on one. That is the cost at its largest, since a whole `get` does other things besides.
"""

from __future__ import annotations

from collections.abc import Iterator

import forebay
from forebay.client.options import ClientOptions
from forebay.client.rpc import NodeAddress, Rpc
from forebay.client.session import Opening, Session
from forebay.client.transports.base import ReadOp, Segment
from forebay.clock import SystemClock
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, unpack
from forebay.schema import Schema
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave
from perf.node import BenchNode, start_node
from perf.workload import Bench, Workload, Wrong, fill

__all__ = ["run"]

_DEADLINE_MS = 60_000


def run(bench: Bench) -> Iterator[Row]:
    """One row for each size, in batches."""
    sizes = bench.sizes
    with start_node(bench.memory_dir, sizes.node_bytes) as node:
        for block_bytes in sizes.block_bytes:
            work = Workload(sizes, block_bytes, sizes.batch)
            with forebay.connect(node.url, token=node.token) as client:
                fill(client, work.keys_of(), work.values)
                yield _row(bench, work, node)
                client.delete(work.keys_of())


def _row(bench: Bench, work: Workload, node: BenchNode) -> Row:
    clock = SystemClock()
    opening = Opening("default/default", Schema.opaque(), 0)
    session = Session(Rpc(NodeAddress(node.url), node.token, clock), opening, ClientOptions(), clock)
    try:
        sides = [_side(name, session, work, node, seed) for name, seed in (("with", 1), ("without", None))]
        samples = interleave(sides, work.sizes.repeats)
    finally:
        session.close(quiesced=True)
    return gb_per_s_row(
        f"checksum.{work.name}/none",
        "reads by the initiator with checksums against without, tmpfs",
        samples["with"],
        samples["without"],
        aim=0.9,
        details={**work.details, "file_system": file_system(bench.memory_dir)},
    )


def _side(name: str, session: Session, work: Workload, node: BenchNode, seed: int | None) -> Side:
    clock = SystemClock()
    columns = keys_to_proto([BlockKey(key) for key in work.keys_of()])
    view, reply = session.call(
        session.rpc.blocks.Acquire,
        lambda _, context: pb.AcquireRequest(context=context, keys=columns),
        clock.monotonic_ms() + _DEADLINE_MS,
    )
    offsets = unpack("u64", reply.offsets, "offsets", work.count)
    volumes = unpack("u32", reply.volumes, "volumes", work.count)
    route = session.route(view, volumes[0], clock.monotonic_ms() + _DEADLINE_MS)
    if route is None or set(volumes) != {volumes[0]}:
        raise Wrong("the blocks do not lie on one volume that can be reached")

    def move(first: int, end: int) -> None:
        ops = [
            ReadOp(route.nsid, offset, (Segment(buffer, work.block_bytes, seed),))
            for offset, buffer in zip(offsets[first:end], work.buffers, strict=True)
        ]
        for outcome in route.transport.read(ops, clock.monotonic_ms() + _DEADLINE_MS):
            if outcome.error is not None:
                raise outcome.error

    return Side(name, work.slots(move), node.servers)
