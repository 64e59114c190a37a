"""Fills the metadata of a stopped node with blocks that are there: ``python -m perf.filled_node DATA BLOCKS CHANGES``.

Blocks are values of 4 KiB of zeros in the default namespace, in regions of their own that nothing was written to, and
read as what they are. Records, owners, regions and a checkpoint of the index are as commits and a clean stop would have
left them; ``CHANGES`` blocks more came after that checkpoint and stand in the log of changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from forebay.appliance.daemon import DEFAULT_NAMESPACE
from forebay.appliance.dataplane.interface import Target
from forebay.appliance.namespace.changes import ChangeLog
from forebay.appliance.namespace.checkpoint import FILE_NAME, save_checkpoint
from forebay.appliance.namespace.desired_state import DesiredState, Volume
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import Lru
from forebay.appliance.namespace.meta import NodeMeta, region_bytes_of
from forebay.appliance.namespace.records import FLUSHED, Durability, Record, owner_key
from forebay.appliance.namespace.recovery import recover
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.space import Drive, Space
from forebay.appliance.namespace.store import Op, Store
from forebay.checksum import crc32c, tile_seed
from forebay.clock import SystemClock
from forebay.ids import BlockKey, Extent, StoredKey, WriteId, stored_key
from forebay.index import BlockIndex
from forebay.schema import Schema

__all__ = ["BLOCK_BYTES", "filled_bytes", "main"]

BLOCK_BYTES = 4096
_ZEROS = bytes(BLOCK_BYTES)
_BATCH = 10_000


def filled_bytes(blocks: int, region_bytes: int) -> int:
    """Capacity that so many blocks take, in whole regions."""
    return -(-blocks * BLOCK_BYTES // region_bytes) * region_bytes


class _Filling:
    """The blocks of one volume, by number: in the order of their places."""

    def __init__(self, store: Store, volume: Volume, region_bytes: int) -> None:
        self._store = store
        self._volume = volume
        self._keyspace = Schema.opaque().keyspace
        self._region_bytes = region_bytes
        taken = [int.from_bytes(key[4:], "big") for key, _ in store.scan("regions", prefix=self._prefix)]
        self._first_bytes = (max(taken, default=0) + 1) * region_bytes

    @property
    def _prefix(self) -> bytes:
        return self._volume.id.to_bytes(4, "big")

    async def claim(self, blocks: int) -> None:
        """Regions for that many."""
        first = self._first_bytes // self._region_bytes
        count, size = filled_bytes(blocks, self._region_bytes) // self._region_bytes, BLOCK_BYTES.to_bytes(4, "big")
        numbers = range(first, first + count)
        await self._store.write([Op("regions", self._prefix + n.to_bytes(4, "big"), size) for n in numbers])

    def key(self, number: int) -> StoredKey:
        """Keys in no order, as hashes are."""
        return stored_key(
            self._volume.namespace, self._keyspace, 0, BlockKey(hashlib.sha512(b"%d" % number).digest()[:36])
        )

    def ops(self, number: int, sequence: int) -> Iterator[Op]:
        """What the commit of a block writes."""
        key, write_id = self.key(number), WriteId(hashlib.blake2b(b"%d" % number, digest_size=16).digest())
        extent = Extent(self._volume.id, self._first_bytes + number * BLOCK_BYTES, BLOCK_BYTES)
        sums = (crc32c(_ZEROS, tile_seed(key, 0, write_id)),)
        record = Record(write_id, extent, BLOCK_BYTES, sums, Durability.FLUSH, sequence, 0, flags=FLUSHED)
        yield Op("blocks", key, record.encode())
        yield Op("owners", owner_key(extent.volume, extent.offset_bytes), key)


async def _fill(data: Path, store: Store, blocks: int, changes: int) -> None:
    region_bytes = region_bytes_of(store)
    meta, state, log = (
        await NodeMeta.load(store, secrets.token_bytes, region_bytes),
        DesiredState(store),
        ChangeLog(store),
    )
    namespace = state.namespace(DEFAULT_NAMESPACE)
    if namespace is None:
        raise RuntimeError(f"{data} has no namespace {DEFAULT_NAMESPACE}")
    (volume,) = state.volumes_of(namespace.id)
    filling = _Filling(store, volume, region_bytes)
    await filling.claim(blocks + changes)
    for first in range(0, blocks, _BATCH):
        batch = range(first, min(blocks, first + _BATCH))
        await store.write([op for n in batch for op in filling.ops(n, log.last + 1 + n)], durable=False)
    await store.write([])
    engine = Engine(
        store,
        cast("Target", None),  # nothing but metadata is looked at
        Space(store, cast("Target", None), [Drive(volume.drive, "", volume.regions)], region_bytes),
        BlockIndex(meta.secret, blocks + _BATCH),
        log,
        SystemClock(),
        secrets.token_bytes,
        Lru(),
        EventLog(1),
        Waiters(),
        Counter(),
    )
    engine.space.add_volume(volume, None)
    found = await recover(engine, state, was_clean=True)
    if found.dropped or not await save_checkpoint(engine, data / "metadata" / FILE_NAME, meta.node_id, lambda: False):
        raise RuntimeError(f"no checkpoint was written of {found}")
    for first in range(blocks, blocks + changes, _BATCH):
        batch = range(first, min(blocks + changes, first + _BATCH))
        numbers, entries = log.enter([filling.key(n) for n in batch])
        new = [op for n, s in zip(batch, numbers, strict=True) for op in filling.ops(n, s)]
        await store.write([*new, *entries], durable=False)
    await store.write([])


def main(argv: Sequence[str]) -> int:
    """See the module; the node's data directory is held by nobody."""
    data, blocks, changes = Path(argv[0]), int(argv[1]), int(argv[2])
    store = RocksStore(data / "metadata" / "rocksdb")
    try:
        asyncio.run(_fill(data, store, blocks, changes))
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
