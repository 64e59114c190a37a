"""Match of 1,000 keys of 36 bytes among many blocks: 99th percentile in the daemon and over gRPC (design §9).

In the daemon means from a request's bytes to its answer's bytes, on a node with RocksDB and a target of its own, in
this process, with the collector of cycles set as in the daemon: all that a call costs but gRPC itself. Its index holds
``match_blocks`` blocks, put there directly, since Match reads nothing else. Over gRPC is the client's `match` as a
caller sees it, against a daemon of its own. In both, three of four keys asked for are there, drawn at random each time.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import forebay
from forebay.appliance.control.data_calls import DataCalls
from forebay.appliance.control.load import LoadEstimate
from forebay.appliance.daemon import settle_memory
from forebay.appliance.dataplane.embedded import EmbeddedTarget
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.supervisor import Supervisor
from forebay.appliance.dataplane.volumes import claim_drive
from forebay.appliance.namespace.desired_state import Principal
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.node import Node, NodeLimits
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.space import Drive
from forebay.clock import SystemClock
from forebay.ids import BlockKey
from forebay.index import RowState
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto
from forebay.schema import Schema
from perf.harness import Row, file_system, latency_row, quantiles_ms
from perf.node import scratch, start_node
from perf.workload import Bench, Wrong, fill

__all__ = ["run"]

_KEYS = 1_000
_PRESENT = 750
_NAMESPACE = "default/default"
_REGION_BYTES = 64 << 20
_GRPC_BLOCKS = 16_000
_WARM_UP = 5


def run(bench: Bench) -> Iterator[Row]:
    """Two rows."""
    details = {"keys": _KEYS, "present": _PRESENT, "file_system": file_system(bench.memory_dir)}
    blocks = bench.sizes.match_blocks
    with scratch(bench.memory_dir) as folder:
        latencies, cpu = asyncio.run(_in_daemon(bench, folder))
    yield latency_row(
        "match.daemon",
        "Match of 1,000 keys, from request bytes to answer bytes",
        latencies,
        quantile=0.99,
        aim_ms=1.0,
        details={**details, "blocks": blocks, "cpu_ms": quantiles_ms(cpu)},
    )
    blocks = min(blocks, _GRPC_BLOCKS)
    yield latency_row(
        "match.grpc",
        "Match of 1,000 keys, client over gRPC on loopback",
        _over_grpc(bench, blocks),
        quantile=0.99,
        aim_ms=3.0,
        details={**details, "blocks": blocks},
    )


def _key(number: int) -> bytes:
    return (b"%012d" % number).ljust(36, b".")


def _questions(bench: Bench, blocks: int) -> Iterator[list[bytes]]:
    """Keys to ask for, present ones first drawn from all ``blocks``; some are asked before anything is timed."""
    rng = random.Random(blocks)
    for _ in range(bench.sizes.match_calls + _WARM_UP):
        there = rng.sample(range(blocks), _PRESENT)
        yield [_key(n) for n in there] + [_key(blocks + n) for n in range(_KEYS - _PRESENT)]


def _over_grpc(bench: Bench, blocks: int) -> list[float]:
    value = memoryview(bytes(4096))
    latencies: list[float] = []
    with (
        start_node(bench.memory_dir, bench.sizes.node_bytes) as node,
        forebay.connect(node.url, token=node.token) as client,
    ):
        for first in range(0, blocks, _KEYS):
            keys = [_key(n) for n in range(first, min(first + _KEYS, blocks))]
            fill(client, keys, [value] * len(keys))
        for keys in _questions(bench, blocks):
            began = time.perf_counter()
            answer = client.match(keys)
            latencies.append(time.perf_counter() - began)
            if sum(answer.present) != _PRESENT:
                raise Wrong(f"match found {sum(answer.present)} blocks of {_PRESENT}")
    return latencies[_WARM_UP:]


async def _in_daemon(bench: Bench, folder: Path) -> tuple[list[float], list[float]]:
    store = RocksStore(folder / "metadata")
    meta = await NodeMeta.load(store, secrets.token_bytes, _REGION_BYTES)
    drive = Drive("drive0", str(folder / "drive"), 1)
    await meta.name_drive(drive.name, str(claim_drive(Path(drive.path), meta.node_id).drive_uuid))

    async def replay() -> None:
        return

    supervisor = Supervisor(folder / "run", meta.node_id, replay)
    await supervisor.start()
    target = EmbeddedTarget(JsonRpcClient(supervisor.socket), node="perf")
    try:
        node = await Node.open(
            store,
            meta,
            target,
            drives=[drive],
            limits=NodeLimits(_REGION_BYTES, expiry_ms=600_000),  # nobody is heard of while the index is filled
            clock=SystemClock(),
            random=secrets.token_bytes,
        )
        measured = await _ask(bench, node)
        await node.close()
    finally:
        await supervisor.stop()
        await target.close()
        store.close()
    return measured


async def _ask(bench: Bench, node: Node) -> tuple[list[float], list[float]]:
    await node.create_namespace(_NAMESPACE)
    principal = Principal("perf", b"", 0, admin=True)
    session, _, _ = await node.open_session(
        principal, _NAMESPACE, schema_cbor=Schema.opaque().cbor, generation=0, scopes=(), client="perf"
    )
    blocks = bench.sizes.match_blocks
    stored = session.stored_keys([BlockKey(_key(n)) for n in range(blocks)])
    _insert(node, stored, session.namespace)
    settle_memory()
    calls = DataCalls(node, "perf", LoadEstimate().load_us)
    latencies: list[float] = []
    cpu: list[float] = []
    for keys in _questions(bench, blocks):
        context = pb.Context(
            session=session.id, incarnation=node.meta.incarnation, generation=0, deadline_ms=1_000, map_version=0
        )
        request = pb.MatchRequest(
            context=context, keys=keys_to_proto([BlockKey(key) for key in keys])
        ).SerializeToString()
        began, began_cpu = time.perf_counter(), time.thread_time()
        answer = (await calls.match(principal, pb.MatchRequest.FromString(request))).SerializeToString()
        cpu.append(time.thread_time() - began_cpu)
        latencies.append(time.perf_counter() - began)
        status = np.frombuffer(pb.MatchReply.FromString(answer).status, "<u2")
        if int((status == 0).sum()) != _PRESENT:
            raise Wrong(f"match found {int((status == 0).sum())} blocks of {_PRESENT}")
    return latencies[_WARM_UP:], cpu[_WARM_UP:]


def _insert(node: Node, stored: Sequence[bytes], namespace: int) -> None:
    index = node.engine.index
    count = len(stored)
    index.insert(
        index.digests(stored),
        [(0,)] * count,
        namespace=namespace,
        state=RowState.VISIBLE,
        length=4096,
        value_length=4096,
        offset=np.arange(count, dtype=np.uint64) * np.uint64(4096),
    )
