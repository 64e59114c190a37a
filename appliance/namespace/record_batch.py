"""Block records in columns: what a start makes of millions of them, without an object for each.

`Record.decode` says what a record has to be; a batch is held to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.appliance.namespace.records import PREFIX_DTYPE, RECORD_VERSION
from forebay.checksum import CHECKSUM_BYTES, CRC32C, crc32c
from forebay.errors import DataDirNewer
from forebay.ids import MAX_TILES, STORED_PREFIX, StoredKey

__all__ = ["RecordBatch"]

_PREFIX_BYTES = PREFIX_DTYPE.itemsize
_CRC_AT = PREFIX_DTYPE.fields["crc"][1]  # type: ignore[index]  # it has fields
_NO_CRC = bytes(4)
_KEY_DTYPE = np.dtype(
    [("namespace", ">u4"), ("keyspace", "V32"), ("generation", ">u8"), ("scope", ">u4"), ("group", ">u2")]
)
"""What stored keys begin with, `forebay.ids.STORED_PREFIX`, for numpy."""
assert _KEY_DTYPE.itemsize == STORED_PREFIX.size


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Records that decoded, one a row.

    ``keys`` has the fields of the stored keys' fixed part, ``prefixes`` those of `PREFIX_DTYPE`; ``sums`` are the tile
    checksums of all records, one record's after another's.
    """

    stored: list[StoredKey]
    keys: npt.NDArray[np.void]
    prefixes: npt.NDArray[np.void]
    sums: npt.NDArray[np.uint32]

    @classmethod
    def decode(cls, stored: Sequence[bytes], values: Sequence[bytes]) -> tuple[RecordBatch, npt.NDArray[np.bool_]]:
        """The records that are whole, and which those are. Raises `DataDirNewer`."""
        long_enough = np.array([len(k) for k in stored]) >= _KEY_DTYPE.itemsize
        long_enough &= np.array([len(v) for v in values]) >= _PREFIX_BYTES
        good = np.zeros(len(values), bool)
        at = np.flatnonzero(long_enough).tolist()
        stored, values = [stored[i] for i in at], [values[i] for i in at]
        prefixes = np.frombuffer(b"".join([v[:_PREFIX_BYTES] for v in values]), PREFIX_DTYPE)
        newer = prefixes["version"][prefixes["version"] > RECORD_VERSION]
        if newer.size:
            raise DataDirNewer(f"record version {newer[0]}", field="record.version", limit=RECORD_VERSION)
        tiles = prefixes["tiles"].astype(np.int64)
        ends = _PREFIX_BYTES + tiles * prefixes["checksum_width"]
        ends += prefixes["shards"].astype(np.int64) * prefixes["shard_bytes"] + prefixes["tail_bytes"]
        sums = [crc32c(v[_PREFIX_BYTES:], crc32c(v[:_CRC_AT] + _NO_CRC)) for v in values]
        whole = (np.array([len(v) for v in values], np.int64) == ends) & (np.array(sums, np.uint32) == prefixes["crc"])
        whole &= (prefixes["version"] >= 1) & (prefixes["checksum_kind"] == CRC32C)
        whole &= (prefixes["checksum_width"] == CHECKSUM_BYTES) & (prefixes["policy"] <= 2)
        whole &= (tiles >= 1) & (tiles <= MAX_TILES)
        good[long_enough] = whole
        kept = np.flatnonzero(whole).tolist()
        parts = [values[i][_PREFIX_BYTES : _PREFIX_BYTES + CHECKSUM_BYTES * tiles.item(i)] for i in kept]
        keys = np.frombuffer(b"".join([stored[i][: _KEY_DTYPE.itemsize] for i in kept]), _KEY_DTYPE)
        batch = cls([StoredKey(stored[i]) for i in kept], keys, prefixes[whole], np.frombuffer(b"".join(parts), "<u4"))
        return batch, good

    def __len__(self) -> int:
        return len(self.stored)

    def only(self, rows: npt.NDArray[np.bool_]) -> RecordBatch:
        """Those of which ``rows`` says so."""
        if rows.all():
            return self
        stored = [self.stored[i] for i in np.flatnonzero(rows).tolist()]
        sums = self.sums[np.repeat(rows, self.prefixes["tiles"])]
        return RecordBatch(stored, self.keys[rows], self.prefixes[rows], sums)
