"""The metadata of a node of any number of blocks, and its start: what `perf.ratios.scale` runs as processes.

``make`` writes the records of blocks of eight tiles as commits would have, and a checkpoint of their index; ``change``
deletes some and adds as many others through the change log; ``start`` does what a start does between opening the
metadata and serving. No volume is there and none is read: a start reads metadata only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.appliance.dataplane.embedded import EmbeddedTarget
from forebay.appliance.dataplane.interface import VolumeSpec
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.namespace.changes import ChangeLog
from forebay.appliance.namespace.checkpoint import FILE_NAME, save_checkpoint
from forebay.appliance.namespace.desired_state import DesiredState, Namespace, Volume
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import Lru
from forebay.appliance.namespace.records import FLUSHED, Durability, Record, owner_key
from forebay.appliance.namespace.recovery import recover
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.space import Drive, Space
from forebay.appliance.namespace.store import Op, Store
from forebay.clock import SystemClock
from forebay.ids import BlockKey, Extent, StoredKey, VolumeId, WriteId, stored_key
from forebay.index import BlockIndex, RowState

__all__ = ["main"]

_REGION_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_PER_REGION = _REGION_BYTES // _BLOCK_BYTES
_TILES = 8
_BATCH = 10_000
_VOLUME = VolumeId(2)
_KEYSPACE = hashlib.sha256(b"scale").digest()
_NODE = b"scale"


def _key(number: int) -> StoredKey:
    """Keys in no order, as hashes are."""
    return stored_key(1, _KEYSPACE, 0, BlockKey(hashlib.sha512(b"%d" % number).digest()[:36]))


def _extent(place: int) -> Extent:
    region, slot = divmod(place, _PER_REGION)
    return Extent(_VOLUME, (region + 1) * _REGION_BYTES + slot * _BLOCK_BYTES, _BLOCK_BYTES)


def _block(number: int, place: int, sequence: int) -> Iterator[Op]:
    """What the commit of block ``number`` in slot ``place`` writes."""
    digest = hashlib.blake2b(b"%d" % number).digest()
    sums = tuple(int.from_bytes(digest[16 + 4 * i : 20 + 4 * i], "little") for i in range(_TILES))
    record = Record(
        WriteId(digest[:16]), _extent(place), _BLOCK_BYTES, sums, Durability.FLUSH, sequence, 0, flags=FLUSHED
    )
    key = _key(number)
    yield Op("blocks", key, record.encode())
    yield Op("owners", owner_key(_VOLUME, record.extent.offset_bytes), key)


async def _make(store: Store, folder: Path, blocks: int) -> None:
    """Records, and a checkpoint of the index that a node with these blocks would have."""
    state, regions = DesiredState(store), -(-blocks // _PER_REGION)
    await state.namespaces.put(Namespace(await state.new_id(), "scale", "scale", 0))
    volume = Volume(VolumeId(await state.new_id()), 1, "drive0", 1, "0" * 32, "0" * 32, regions)
    if volume.id != _VOLUME:
        raise RuntimeError(f"volume {volume.id} of a store that was empty")
    await state.volumes.put(volume)
    size = _BLOCK_BYTES.to_bytes(4, "big")
    await store.write(
        [Op("regions", _VOLUME.to_bytes(4, "big") + (i + 1).to_bytes(4, "big"), size) for i in range(regions)]
    )
    for first in range(0, blocks, _BATCH):
        batch = range(first, min(blocks, first + _BATCH))
        await store.write([op for n in batch for op in _block(n, n, n + 1)], durable=False)
    await store.write([])
    engine = _engine(store, folder, blocks)
    for first in range(0, blocks, _BATCH):
        batch = range(first, min(blocks, first + _BATCH))
        _index(engine.index, batch)
    engine.changes.skip_to(blocks)
    if not await save_checkpoint(engine, folder / FILE_NAME, _NODE, lambda: False):
        raise RuntimeError("no checkpoint was written")


def _index(index: BlockIndex, batch: range) -> None:
    """The rows of some blocks, each in the slot of its number."""
    digests = [hashlib.blake2b(b"%d" % number).digest() for number in batch]
    sums = np.frombuffer(b"".join([d[16 : 16 + 4 * _TILES] for d in digests]), "<u4").reshape(-1, _TILES)
    index.insert(
        index.digests([_key(number) for number in batch]),
        sums.tolist(),
        write_id=np.frombuffer(b"".join([d[:16] for d in digests]), "<u8").reshape(-1, 2),
        offset=np.arange(batch.start, batch.stop, dtype=np.uint64) * np.uint64(_BLOCK_BYTES) + np.uint64(_REGION_BYTES),
        volume=_VOLUME,
        namespace=1,
        length=_BLOCK_BYTES,
        value_length=_BLOCK_BYTES,
        state=RowState.VISIBLE,
        flags=FLUSHED,
    )


async def _change(store: Store, blocks: int, changes: int) -> None:
    """Delete ``changes / 2`` blocks and add as many in their places."""
    log = ChangeLog(store)
    log.skip_to(blocks)
    for first in range(0, changes // 2, _BATCH):
        batch = range(first, min(changes // 2, first + _BATCH))
        gone, old = [_key(n) for n in batch], [Op("blocks", _key(n), None) for n in batch]
        await store.write([*old, *log.enter(gone)[1]], durable=False)
        numbers, entries = log.enter([_key(blocks + n) for n in batch])
        new = [op for n, s in zip(batch, numbers, strict=True) for op in _block(blocks + n, n, s)]
        await store.write([*new, *entries], durable=False)
    await store.write([])


async def _start(store: Store, folder: Path, blocks: int) -> dict[str, Any]:
    began, began_cpu = time.perf_counter(), time.process_time()
    engine, path = _engine(store, folder, blocks), folder / FILE_NAME
    found = await recover(engine, DesiredState(store), was_clean=True, checkpoint=path, node_id=_NODE)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    if found.blocks != blocks or found.dropped:
        raise RuntimeError(f"{found} of {blocks} blocks")
    return {
        "start_s": seconds,
        "cpu_s": cpu,
        "index_bytes": engine.index.memory_bytes(),
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "checkpoint_bytes": path.stat().st_size if path.exists() else 0,
    }


def _engine(store: Store, folder: Path, blocks: int) -> Engine:
    """What a node makes of its metadata before it recovers."""
    target = EmbeddedTarget(JsonRpcClient(folder / "none"), node="scale")
    space = Space(store, target, [Drive("drive0", "none", -(-blocks // _PER_REGION))], _REGION_BYTES)
    for volume in DesiredState(store).volumes:
        spec = VolumeSpec(volume.id, "scale", volume.nsid, volume.uuid, "none", 0, volume.nguid)
        space.add_volume(volume, spec)
    return Engine(
        store,
        target,
        space,
        BlockIndex(b"k" * 32, blocks + _BATCH),
        ChangeLog(store),
        SystemClock(),
        secrets.token_bytes,
        Lru(),
        EventLog(1),
        Waiters(),
        Counter(),
    )


def main(argv: Sequence[str]) -> int:
    """``make|change|start FOLDER BLOCKS [CHANGES]``; a start prints what it took, in JSON."""
    what, folder, blocks = argv[0], Path(argv[1]), int(argv[2])
    store = RocksStore(folder / "metadata")
    try:
        if what == "make":
            asyncio.run(_make(store, folder, blocks))
        elif what == "change":
            asyncio.run(_change(store, blocks, int(argv[3])))
        else:
            print(json.dumps(asyncio.run(_start(store, folder, blocks))))
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
