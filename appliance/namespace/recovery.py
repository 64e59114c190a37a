"""Start: the index and the free map from metadata.

With a checkpoint of the index only what changed since is read; without one every record is decoded and its CRC checked.
A record that cannot stand (another owner of its extent, an unknown namespace or volume) is deleted and counted, never
guessed at. After an unclean stop blocks whose flush is not known become suspects, verified before they are served.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.appliance.namespace.blocks import Engine, owner_key
from forebay.appliance.namespace.checkpoint import load_checkpoint
from forebay.appliance.namespace.desired_state import DesiredState
from forebay.appliance.namespace.records import FLUSHED, Record
from forebay.appliance.namespace.store import Op
from forebay.errors import MetadataCorrupt
from forebay.ids import StoredKey, split_stored_key
from forebay.index import BlockIndex, Rows, RowState, findable

__all__ = ["Recovered", "load_index", "recover"]

_log = logging.getLogger(__name__)
_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start found: blocks that can be served, of them suspects, and records that could not stand."""

    blocks: int
    suspects: int
    dropped: int


async def recover(
    engine: Engine, state: DesiredState, *, was_clean: bool, checkpoint: Path | None = None, node_id: bytes = b""
) -> Recovered:
    """Fill the index and the free map; volumes have been added to the space.

    From the checkpoint and what changed since where there is one, else from all records. Raises `Unavailable`,
    `DataDirNewer`.
    """
    known = {n.id for n in state.namespaces if not n.deleting}
    found = None
    if checkpoint is not None:
        try:
            found = Recovered(0, 0, 0) if load_index(engine, known, checkpoint, node_id) else None
        except MetadataCorrupt as error:
            _log.warning("the index is rebuilt from the records: %s", error)
    if found is None:
        engine.index = engine.index.fresh()
        engine.space.disown_all()
        found = await _from_records(engine, known)
    suspects = _doubt(engine.index) if not was_clean else 0
    engine.counters["records_dropped"] += found.dropped
    return replace(found, blocks=engine.index.count, suspects=suspects)


async def _from_records(engine: Engine, known: set[int]) -> Recovered:
    batch: list[tuple[StoredKey, Record]] = []
    drop: list[Op] = []
    sequences: list[npt.NDArray[np.uint64]] = []
    rows: list[Rows] = []

    def insert() -> None:
        rows.append(_insert(engine, batch))
        sequences.append(np.array([record.sequence for _, record in batch], dtype=np.uint64))
        batch.clear()

    for stored, value in engine.store.scan("blocks"):
        record = _sound(engine, known, stored, value)
        if record is None or not engine.space.adopt(record.extent, split_stored_key(stored)[3].scope):
            _log.error("the record of an extent that has another owner, or of no known namespace, is dropped")
            drop.append(Op("blocks", stored, None))
            continue
        batch.append((StoredKey(stored), record))
        if len(batch) == _BATCH:
            insert()
    if batch:
        insert()
    if drop:
        await engine.store.write(drop)
    if rows:
        order = np.argsort(np.concatenate(sequences), kind="stable")
        engine.policy.used(engine.index, np.concatenate(rows)[order])  # the order of commits is all that is known
        engine.changes.skip_to(int(max(s.max() for s in sequences)))
    await _drop_stale_owners(engine)
    return Recovered(0, 0, len(drop))


def load_index(engine: Engine, known: set[int], path: Path, node_id: bytes) -> bool:
    """Fill an empty index and the free map from a checkpoint and what changed since; False when it is of no use.

    ``known`` are the namespaces that blocks may be of. Writes nothing. Raises `MetadataCorrupt`: then both must be
    thrown away.
    """
    index = engine.index
    change = load_checkpoint(engine, path, node_id)
    if change is None:
        return False
    index.relink()
    _drop_rows(index, _found(index)[~np.isin(index.namespace[_found(index)], sorted(known))])
    engine.policy.loaded(index)
    changed = list(dict.fromkeys(stored for _, stored in engine.changes.after(change)))
    for start in range(0, len(changed), _BATCH):
        keys = changed[start : start + _BATCH]
        digests = index.digests(keys)
        while (rows := index.find(digests))[rows >= 0].size:  # a key may stand in two rows of a fuzzy copy
            _drop_rows(index, np.unique(rows[rows >= 0]))
        values = engine.store.multi_get("blocks", keys)
        batch = []
        for stored, value in zip(keys, values, strict=True):
            record = _sound(engine, known, stored, value) if value is not None else None
            if record is not None:
                batch.append((stored, record))
        if batch:
            engine.policy.used(index, _insert(engine, batch))
    if not engine.space.adopt_all(index, _found(index)):
        raise MetadataCorrupt("two blocks have one extent, or a block has none", field="checkpoint")
    return True


def _found(index: BlockIndex) -> Rows:
    state = index.state[: index.high]
    return np.flatnonzero(findable(state))


def _drop_rows(index: BlockIndex, rows: Rows) -> None:
    index.unlink(rows)
    index.free(rows)


def _doubt(index: BlockIndex) -> int:
    """Make suspects of all blocks whose flush is not known; how many."""
    rows = _found(index)
    rows = rows[index.flags[rows] & FLUSHED == 0]
    index.state[rows] = RowState.SUSPECT
    return len(rows)


def _sound(engine: Engine, known: set[int], stored: bytes, value: bytes) -> Record | None:
    """The record, if it decodes and its namespace has the volume it names."""
    try:
        record = Record.decode(value)
        namespace = split_stored_key(stored)[0]
    except (MetadataCorrupt, struct.error) as error:
        _log.error("a block record is bad: %s", error)
        return None
    volume = engine.space.volumes.get(record.extent.volume)
    if namespace not in known or volume is None or volume.namespace != namespace:
        return None
    return record


def _insert(engine: Engine, batch: list[tuple[StoredKey, Record]]) -> Rows:
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
        state=RowState.VISIBLE,
        flags=[r.flags for r in records],
    )


async def _drop_stale_owners(engine: Engine) -> None:
    """Make the owners family say what the blocks family says: one entry an extent."""
    index = engine.index
    rows = _found(index)
    owned = {owner_key(v, o) for v, o in zip(index.volume[rows].tolist(), index.offset[rows].tolist(), strict=True)}
    stale = [Op("owners", key, None) for key, _ in engine.store.scan("owners") if key not in owned]
    if stale:
        _log.warning("%d entries of the owners family had no block and are gone", len(stale))
        await engine.store.write(stale)
