"""Start: the index and the free map from metadata.

Every record is decoded and its CRC checked; its extent is marked as owned. A record that cannot stand (another owner
of its extent, an unknown namespace or volume) is deleted and counted, never guessed at. After an unclean stop blocks
whose flush is not known become suspects, verified before they are served.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

import numpy as np

from forebay.appliance.namespace.blocks import Engine, owner_key
from forebay.appliance.namespace.desired_state import DesiredState
from forebay.appliance.namespace.records import FLUSHED, Record
from forebay.appliance.namespace.store import Op
from forebay.errors import MetadataCorrupt
from forebay.ids import StoredKey, split_stored_key
from forebay.index import RowState

__all__ = ["Recovered", "recover"]

_log = logging.getLogger(__name__)
_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start found. ``sequence`` is the highest commit sequence seen."""

    blocks: int
    suspects: int
    dropped: int
    sequence: int


async def recover(engine: Engine, state: DesiredState, *, was_clean: bool) -> Recovered:
    """Fill the index and the free map; volumes have been added to the space. Raises `Unavailable`, `DataDirNewer`."""
    known = {n.id for n in state.namespaces if not n.deleting}
    batch: list[tuple[StoredKey, Record]] = []
    drop: list[Op] = []
    sequences: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
    rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    suspects = dropped = 0

    def insert() -> None:
        nonlocal suspects
        doubtful = np.array([not was_clean and not record.flags & FLUSHED for _, record in batch])
        suspects += int(doubtful.sum())
        rows.append(_insert(engine, batch, doubtful))
        sequences.append(np.array([record.sequence for _, record in batch], dtype=np.uint64))
        batch.clear()

    for stored, value in engine.store.scan("blocks"):
        record = _sound(engine, known, stored, value)
        if record is None:
            dropped += 1
            drop.append(Op("blocks", stored, None))
            continue
        batch.append((StoredKey(stored), record))
        if len(batch) == _BATCH:
            insert()
    if batch:
        insert()
    if drop:
        await engine.store.write(drop)
    highest = 0
    if rows:
        order = np.argsort(np.concatenate(sequences), kind="stable")
        engine.policy.used(engine.index, np.concatenate(rows)[order])  # the order of commits is all that is known
        highest = int(max(s.max() for s in sequences))
    await _drop_stale_owners(engine)
    engine.counters["records_dropped"] += dropped
    return Recovered(engine.index.count, suspects, dropped, highest)


def _sound(engine: Engine, known: set[int], stored: bytes, value: bytes) -> Record | None:
    """The record, its extent now owned; None if it cannot stand."""
    try:
        record = Record.decode(value)
        namespace, _, _, block = split_stored_key(stored)
    except (MetadataCorrupt, struct.error) as error:
        _log.error("a block record is dropped: %s", error)
        return None
    if namespace not in known:
        return None
    volume = engine.space.volumes.get(record.extent.volume)
    if volume is None or volume.namespace != namespace or not engine.space.adopt(record.extent, block.scope):
        _log.error("a block record is dropped: %s cannot be its extent", record.extent)
        return None
    return record


def _insert(
    engine: Engine, batch: list[tuple[StoredKey, Record]], doubtful: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    parts = [split_stored_key(stored) for stored, _ in batch]
    records = [record for _, record in batch]
    return engine.index.insert(
        engine.index.digests([stored for stored, _ in batch]),
        [r.checksums for r in records],
        write_id=np.frombuffer(b"".join(r.write_id for r in records), "<u8").reshape(-1, 2),
        offset=[r.extent.offset_bytes for r in records],
        generation=[part[2] for part in parts],
        volume=[r.extent.volume for r in records],
        namespace=[part[0] for part in parts],
        length=[r.extent.length_bytes for r in records],
        value_length=[r.value_bytes for r in records],
        retain_until_s=[r.retain_until_ms // 1000 for r in records],
        expires_s=[r.expires_ms // 1000 for r in records],
        scope=[part[3].scope for part in parts],
        state=np.where(doubtful, RowState.SUSPECT, RowState.VISIBLE),
        flags=[r.flags for r in records],
    )


async def _drop_stale_owners(engine: Engine) -> None:
    """Make the owners family say what the blocks family says: one entry an extent."""
    index = engine.index
    rows = np.flatnonzero(
        (index.state[: index.high] == RowState.VISIBLE) | (index.state[: index.high] == RowState.SUSPECT)
    )
    owned = {owner_key(v, o) for v, o in zip(index.volume[rows].tolist(), index.offset[rows].tolist(), strict=True)}
    stale = [Op("owners", key, None) for key, _ in engine.store.scan("owners") if key not in owned]
    if stale:
        _log.warning("%d entries of the owners family had no block and are gone", len(stale))
        await engine.store.write(stale)
