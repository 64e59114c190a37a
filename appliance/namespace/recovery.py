"""Start: the index and the free map from metadata.

With a checkpoint of the index only what changed since is read; without one every record is decoded and its CRC checked.
A record that cannot stand (another owner of its extent, an unknown namespace or volume) is deleted and counted, never
guessed at. After an unclean stop blocks whose flush is not known become suspects, verified before they are served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.appliance.namespace.checkpoint import load_checkpoint
from forebay.appliance.namespace.desired_state import DesiredState
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.record_batch import RecordBatch
from forebay.appliance.namespace.records import FLUSHED
from forebay.appliance.namespace.store import Op
from forebay.appliance.namespace.takeover import Takeover
from forebay.errors import MetadataCorrupt
from forebay.index import BlockIndex, Rows, RowState, findable

__all__ = ["Recovered", "load_index", "recover"]

_log = logging.getLogger(__name__)
_BATCH = 1 << 15
_OWN_ROWS = 1 << 20
"""Rows looked at together: their columns should not take as much memory as the index."""
_OWNER_DTYPE = np.dtype([("volume", ">u4"), ("offset_bytes", ">u8")])
"""A key of the owners family."""


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
    takeover = Takeover(engine.space)
    drop: list[Op] = []
    sequences: list[npt.NDArray[np.uint64]] = []
    rows: list[Rows] = []
    for pairs in _batches(engine.store.scan("blocks"), _BATCH):
        stored, values = zip(*pairs, strict=True)
        batch, stands = RecordBatch.decode(stored, values)
        mine = _known(batch, known)
        mine[mine] = _own(takeover, batch.only(mine))
        stands[stands] = mine
        batch = batch.only(mine)
        rows.append(_insert(engine, batch))
        sequences.append(batch.prefixes["sequence"])
        drop += [Op("blocks", stored[i], None) for i in np.flatnonzero(~stands).tolist()]
    takeover.finish()
    if drop:
        _log.error(
            "%d records that are bad, of no known namespace or volume, or of an owned extent are dropped", len(drop)
        )
        await engine.store.write(drop)
    if rows:
        order = np.argsort(np.concatenate(sequences), kind="stable")
        engine.policy.used(engine.index, np.concatenate(rows)[order])  # the order of commits is all that is known
        engine.changes.skip_to(max(int(s.max(initial=0)) for s in sequences))
    await _drop_stale_owners(engine)
    return Recovered(0, 0, len(drop))


def _batches(pairs: Iterable[tuple[bytes, bytes]], size: int) -> Iterator[list[tuple[bytes, bytes]]]:
    left = iter(pairs)
    while batch := list(islice(left, size)):
        yield batch


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
        there = [(stored, value) for stored, value in zip(keys, values, strict=True) if value is not None]
        if there:
            batch, _ = RecordBatch.decode(*zip(*there, strict=True))
            engine.policy.used(index, _insert(engine, batch.only(_known(batch, known))))
    takeover, rows = Takeover(engine.space), _found(index)
    for start in range(0, len(rows), _OWN_ROWS):
        part = rows[start : start + _OWN_ROWS]
        columns = (index.namespace, index.scope, index.volume, index.offset, index.length)
        if not takeover.own(*(column.take(part) for column in columns)).all():
            raise MetadataCorrupt("two blocks have one extent, or a block has none", field="checkpoint")
    takeover.finish()
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
    index.suspect(rows)
    return len(rows)


def _known(batch: RecordBatch, known: set[int]) -> npt.NDArray[np.bool_]:
    """Which records are of these namespaces, and fit into their extents."""
    lengths = batch.prefixes["length_bytes"]
    fits: npt.NDArray[np.bool_] = (batch.prefixes["value_bytes"] <= lengths) & (lengths < 1 << 32)
    return fits & np.isin(batch.keys["namespace"], sorted(known))


def _own(takeover: Takeover, batch: RecordBatch) -> npt.NDArray[np.bool_]:
    keys, prefixes = batch.keys, batch.prefixes
    columns = (prefixes[name] for name in ("volume", "offset_bytes", "length_bytes"))
    return takeover.own(keys["namespace"], keys["scope"], *columns)


def _insert(engine: Engine, batch: RecordBatch) -> Rows:
    keys, prefixes = batch.keys, batch.prefixes
    return engine.index.insert_packed(
        engine.index.digests(batch.stored),
        prefixes["tiles"],
        batch.sums,
        write_id=np.frombuffer(prefixes["write_id"].tobytes(), "<u8").reshape(-1, 2),
        offset=prefixes["offset_bytes"],
        generation=keys["generation"],
        volume=prefixes["volume"],
        namespace=keys["namespace"],
        length=prefixes["length_bytes"],
        value_length=prefixes["value_bytes"],
        retain_until_s=prefixes["retain_until_ms"] // 1000,
        expires_s=prefixes["expires_ms"] // 1000,
        scope=keys["scope"],
        state=RowState.VISIBLE,
        flags=prefixes["flags"],
    )


async def _drop_stale_owners(engine: Engine) -> None:
    """Make the owners family say what the blocks family says: one entry an extent."""
    index = engine.index
    rows = _found(index)
    order = np.lexsort((index.offset[rows], index.volume[rows]))
    volumes, offsets = index.volume[rows][order], index.offset[rows][order]
    stale: list[Op] = []
    for pairs in _batches(engine.store.scan("owners"), _BATCH):
        keys = [key for key, _ in pairs]
        owned = _standing(keys, volumes, offsets)
        stale += [Op("owners", keys[i], None) for i in np.flatnonzero(~owned).tolist()]
    if stale:
        _log.warning("%d entries of the owners family had no block and are gone", len(stale))
        await engine.store.write(stale)


def _standing(
    keys: Sequence[bytes], volumes: npt.NDArray[np.uint32], offsets: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Which keys of the owners family are of one of these extents, which are in order of volume and offset."""
    whole = np.array([len(key) == _OWNER_DTYPE.itemsize for key in keys])
    found = np.zeros(len(keys), bool)
    entries = np.frombuffer(
        b"".join([key for key, fits in zip(keys, whole.tolist(), strict=True) if fits]), _OWNER_DTYPE
    )
    there = np.zeros(len(entries), bool)
    for volume in np.unique(entries["volume"]).tolist():
        mine = entries["volume"] == volume
        first, end = np.searchsorted(volumes, [volume, volume + 1])
        of_volume, wanted = offsets[first:end], entries["offset_bytes"][mine]
        if of_volume.size:
            at = np.minimum(np.searchsorted(of_volume, wanted), len(of_volume) - 1)
            there[mine] = of_volume[at] == wanted
    found[whole] = there
    return found
