"""A checkpoint of the packed index, so that a start reads columns instead of every record.

The file is fuzzy: rows are copied in parts while the node serves. That is sound because every key that changed after
the copy began is in the change log and is looked up again at load; a row copied twice or too late belongs to such a
key. Before the file gets its name, all changes it can show are made durable. Anything wrong with it (version, node,
damage, a change log that does not reach it) means a rebuild from the records, never a guess.

Layout: a CBOR header; cells of every column, a range of rows at a time; a CBOR map of pools (tiles → rows used); the
checksums of every pool. Each part is its length, its bytes, and their CRC-32C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import cbor2
import numpy as np
import numpy.typing as npt

from forebay.appliance.directories import sync_directory
from forebay.appliance.namespace.cbor_map import load_map
from forebay.appliance.namespace.engine import Engine
from forebay.checksum import crc32c
from forebay.crashpoints import crash_point
from forebay.errors import MetadataCorrupt
from forebay.ids import MAX_TILES
from forebay.index import COLUMNS, BlockIndex, findable

__all__ = ["FILE_NAME", "drop_unfinished", "load_checkpoint", "save_checkpoint"]

_log = logging.getLogger(__name__)

FILE_NAME = "index.checkpoint"
_VERSION = 1
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_PART_ROWS = 1 << 16
_MAX_HEADER_BYTES = 1 << 20


def _ranges(rows: int) -> Iterator[slice]:
    return (slice(start, min(rows, start + _PART_ROWS)) for start in range(0, rows, _PART_ROWS))


def _write_part(file: IO[bytes], data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.write(_CRC.pack(crc32c(data)))


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


async def save_checkpoint(engine: Engine, path: Path, node_id: bytes, delete_failed: Callable[[], bool]) -> bool:
    """Write the index to ``path`` while the node serves, and shorten the change log; False if it was given up.

    After ``delete_failed`` a row is retired whose record is still there: the file would forget it.
    """
    index, run = engine.index, asyncio.get_running_loop().run_in_executor
    change, high = engine.changes.settled, index.high
    unfinished = path.with_name(path.name + ".new")
    with open(unfinished, "wb") as file:
        header = {"v": _VERSION, "node": node_id, "change": change, "high": high, "columns": list(COLUMNS)}
        await run(None, _write_part, file, cbor2.dumps(header, canonical=True))
        for rows in _ranges(high):
            # copied at one moment, written while the loop serves
            for data in [getattr(index, name)[rows].tobytes() for name in COLUMNS]:
                await run(None, _write_part, file, data)
        used = {tiles: index.pools[tiles].used for tiles in sorted(index.pools)}  # as canonical CBOR orders them
        await run(None, _write_part, file, cbor2.dumps(used, canonical=True))
        for tiles, count in used.items():
            for rows in _ranges(count):
                await run(None, _write_part, file, index.pools[tiles].data[rows].tobytes())
        await engine.store.write([])  # behind everything that the copy may show
        if delete_failed():
            _log.warning("no checkpoint: a delete could not be written")
            return False
        await run(None, _sync, file)
    crash_point("checkpoint.before_rename")
    os.replace(unfinished, path)
    await run(None, sync_directory, path.parent)  # else an older one may be back that has not what is forgotten here
    crash_point("checkpoint.after_rename_before_forget")
    await engine.changes.forget(change)
    return True


def drop_unfinished(path: Path) -> None:
    """Remove what a `save_checkpoint` that failed has left."""
    with suppress(OSError):
        path.with_name(path.name + ".new").unlink(missing_ok=True)


def _read_part(file: IO[bytes], most_bytes: int) -> bytes:
    length = _LENGTH.unpack(_exactly(file, _LENGTH.size))[0]
    if length > most_bytes:
        raise MetadataCorrupt(f"a part of {length} bytes", field="checkpoint", limit=most_bytes)
    data = _exactly(file, length)
    _check(file, data)
    return data


def _check(file: IO[bytes], data: bytes | memoryview) -> None:
    if _CRC.unpack(_exactly(file, _CRC.size))[0] != crc32c(data):
        raise MetadataCorrupt("a part's CRC is wrong", field="checkpoint")


def _exactly(file: IO[bytes], length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise MetadataCorrupt("the file ends early", field="checkpoint")
    return data


def load_checkpoint(engine: Engine, path: Path, node_id: bytes) -> int | None:
    """Fill an empty index from ``path``; the change up to which it is whole, or None when there is no use in it.

    Rows that were free or retired when copied are free. The index's table is not made yet: see `BlockIndex.relink`.
    Raises `MetadataCorrupt` for a damaged file, and then the index must be thrown away.
    """
    try:
        with open(path, "rb") as file:
            header = load_map(_read_part(file, _MAX_HEADER_BYTES), "checkpoint.header")
            if header["v"] != _VERSION or header["node"] != node_id or header["columns"] != list(COLUMNS):
                _log.warning("%s is of another version or node: the index is rebuilt from the records", path)
                return None
            change, high = int(header["change"]), int(header["high"])
            if change < engine.changes.base:
                _log.warning("%s is older than the log of changes: the index is rebuilt from the records", path)
                return None
            if high < 0:
                raise MetadataCorrupt(f"an index of {high} rows", field="checkpoint.header")
            if change > engine.changes.last or high > engine.index.max_rows:
                _log.warning("%s is newer than the records: the index is rebuilt from them", path)
                return None
            _fill(engine.index, file, high)
            return change
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise MetadataCorrupt(f"{path}: {error!r}", field="checkpoint") from error


def _fill(index: BlockIndex, file: BufferedReader, high: int) -> None:
    for rows in _ranges(high):
        for name in COLUMNS:
            _put(getattr(index, name)[rows], file)
    used = load_map(_read_part(file, _MAX_HEADER_BYTES), "checkpoint.pools")
    for tiles, count in used.items():
        if not 1 <= tiles <= MAX_TILES or not 0 <= count <= index.max_rows:
            raise MetadataCorrupt(f"a pool of {count} rows of {tiles}", field="checkpoint.pools", limit=index.max_rows)
        pool = index.pool(tiles)
        pool.make_room(count)
        for rows in _ranges(count):
            _put(pool.data[rows], file)
        pool.used = count
    index.high = high
    live = findable(index.state[:high])
    for tiles in np.flatnonzero(np.bincount(index.tiles[:high][live])).tolist():
        mine = live & (index.tiles[:high] == tiles)
        if tiles not in index.pools or int(index.sums[:high][mine].max()) >= index.pools[tiles].used:
            raise MetadataCorrupt("a row's checksums are not in the file", field="checkpoint")


def _put(cells: npt.NDArray[Any], file: BufferedReader) -> None:
    """A part straight into the cells that it holds."""
    length = _LENGTH.unpack(_exactly(file, _LENGTH.size))[0]
    if length != cells.nbytes:
        raise MetadataCorrupt(f"a part of {length} bytes", field="checkpoint", limit=cells.nbytes)
    view = cells.data.cast("B")
    if file.readinto(view) != length:
        raise MetadataCorrupt("the file ends early", field="checkpoint")
    _check(file, view)
