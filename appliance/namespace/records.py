"""The record of a block: what metadata keeps under a stored key.

A fixed-width prefix that decodes in bulk, then tile checksums, then shards (none yet), then a CBOR tail:

====== ==== =============================================================
offset type field
====== ==== =============================================================
0      u8   version (1)
1      u8   checksum kind (1: CRC-32C seeded by `forebay.checksum.tile_seed`)
2      u8   checksum width in bytes
3      u8   durability policy (0 flush, 1 verify, 2 volatile)
4      u16  flags (bit 0: flushed before it became visible; bit 1: pinned)
6      u16  tiles
8      16   write id
24     u32  volume
28     u8   shards (0: the one extent of this prefix)
29     u8   shard entry size in bytes
30     u16  reserved, 0
32     u64  extent offset in bytes
40     u64  extent length in bytes
48     u64  exact value length in bytes
56     u64  sequence of the commit
64     u64  created, Unix ms
72     u64  retain until, Unix ms, 0 for none
80     u64  expires, Unix ms, 0 for never
88     u32  tail length in bytes
92     u32  CRC-32C of the whole record with this field zero
96          tile checksums (tiles × width), shards (count × size), tail (CBOR map: ``d`` describe, ``h`` hints)
====== ==== =============================================================

Little-endian. Upgrade rule: a reader takes every version up to its own; a version's prefix never changes once
released, a new field means a new version whose prefix starts with the old one; a higher version than known means
that a newer program wrote the directory, which is refused as a whole (`DataDirNewer`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import cbor2
import numpy as np

from forebay.appliance.namespace.cbor_map import load_map
from forebay.checksum import CHECKSUM_BYTES, CRC32C, crc32c
from forebay.errors import DataDirNewer, MetadataCorrupt
from forebay.ids import MAX_TILES, Extent, VolumeId, WriteId

__all__ = [
    "FLUSHED",
    "PINNED",
    "PREFIX",
    "PREFIX_DTYPE",
    "RECORD_VERSION",
    "Durability",
    "Record",
    "encode_tail",
    "owner_key",
]

RECORD_VERSION = 1
FLUSHED = 1
PINNED = 2

PREFIX = struct.Struct("<BBBBHH16sIBBHQQQQQQQII")
assert PREFIX.size == 96
_CRC = struct.Struct("<I")
_CRC_AT = 92
_OWNER_KEY = struct.Struct(">IQ")

PREFIX_DTYPE = np.dtype(
    [
        ("version", "u1"),
        ("checksum_kind", "u1"),
        ("checksum_width", "u1"),
        ("policy", "u1"),
        ("flags", "<u2"),
        ("tiles", "<u2"),
        ("write_id", "V16"),
        ("volume", "<u4"),
        ("shards", "u1"),
        ("shard_bytes", "u1"),
        ("reserved", "<u2"),
        ("offset_bytes", "<u8"),
        ("length_bytes", "<u8"),
        ("value_bytes", "<u8"),
        ("sequence", "<u8"),
        ("created_ms", "<u8"),
        ("retain_until_ms", "<u8"),
        ("expires_ms", "<u8"),
        ("tail_bytes", "<u4"),
        ("crc", "<u4"),
    ]
)
"""The prefix for numpy: many records at once."""
assert PREFIX_DTYPE.itemsize == PREFIX.size


def owner_key(volume: int, offset_bytes: int) -> bytes:
    """Key of the owners family: who has the extent at that place."""
    return _OWNER_KEY.pack(volume, offset_bytes)


class Durability(IntEnum):
    """What an acknowledged block survives (design §6.2)."""

    FLUSH = 0
    VERIFY = 1
    VOLATILE = 2


@dataclass(frozen=True, slots=True)
class Record:
    """A visible block."""

    write_id: WriteId
    extent: Extent
    value_bytes: int
    checksums: tuple[int, ...]
    policy: Durability
    sequence: int
    created_ms: int
    retain_until_ms: int = 0
    expires_ms: int = 0
    flags: int = 0
    checksum_kind: int = CRC32C
    tail: bytes = b""

    def encode(self) -> bytes:
        """The record's bytes."""
        body = b"".join(c.to_bytes(CHECKSUM_BYTES, "little") for c in self.checksums) + self.tail
        prefix = bytearray(
            PREFIX.pack(
                RECORD_VERSION,
                self.checksum_kind,
                CHECKSUM_BYTES,
                self.policy,
                self.flags,
                len(self.checksums),
                self.write_id,
                self.extent.volume,
                0,
                0,
                0,
                self.extent.offset_bytes,
                self.extent.length_bytes,
                self.value_bytes,
                self.sequence,
                self.created_ms,
                self.retain_until_ms,
                self.expires_ms,
                len(self.tail),
                0,
            )
        )
        _CRC.pack_into(prefix, _CRC_AT, crc32c(body, crc32c(bytes(prefix))))
        return bytes(prefix) + body

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Parse and check. Raises `MetadataCorrupt`, or `DataDirNewer` for a version above `RECORD_VERSION`."""
        if len(data) < PREFIX.size:
            raise MetadataCorrupt(f"a record of {len(data)} bytes", field="record", limit=PREFIX.size)
        if data[0] > RECORD_VERSION:
            raise DataDirNewer(f"record version {data[0]}", field="record.version", limit=RECORD_VERSION)
        fields = PREFIX.unpack_from(data)
        version, kind, width, policy, flags, tiles, write_id, volume, shards, shard_bytes, _ = fields[:11]
        offset, length, value, sequence, created, retain, expires, tail_bytes, crc = fields[11:]
        tail_at = PREFIX.size + tiles * width + shards * shard_bytes
        zeroed = data[:_CRC_AT] + bytes(4)
        if len(data) != tail_at + tail_bytes or crc32c(data[PREFIX.size :], crc32c(zeroed)) != crc:
            raise MetadataCorrupt("a record's length or CRC is wrong", field="record")
        if version < 1 or kind != CRC32C or width != CHECKSUM_BYTES or not 1 <= tiles <= MAX_TILES or policy > 2:
            raise MetadataCorrupt("a record has a field out of range", field="record")
        sums = struct.unpack_from(f"<{tiles}I", data, PREFIX.size)
        return cls(
            WriteId(write_id),
            Extent(VolumeId(volume), offset, length),
            value,
            sums,
            Durability(policy),
            sequence,
            created,
            retain,
            expires,
            flags,
            kind,
            data[tail_at:],
        )

    def with_flags(self, flags: int) -> Record:
        """The same block with other flags."""
        return replace(self, flags=flags)

    def described(self) -> dict[str, Any]:
        """The tail as a map: ``d`` what the writer described, ``h`` its hints; empty when there is none.

        Raises `MetadataCorrupt`.
        """
        return load_map(self.tail, "record.tail") if self.tail else {}


def encode_tail(describe: dict[str, Any], hints: dict[str, Any]) -> bytes:
    """The CBOR tail of a record; empty when there is nothing to say."""
    tail = {name: part for name, part in (("d", describe), ("h", hints)) if part}
    return cbor2.dumps(tail, canonical=True) if tail else b""
