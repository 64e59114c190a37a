"""Tile checksums: CRC-32C, started from a seed that binds the bytes to their key, tile and write.

CRC-32C (Castagnoli) runs at 14 to 22 GB/s on a core here, is linear (a GPU computes it by chunks and combines them) and
its kind and width are fields of every record, so another kind can stand beside it. The start value is a digest of
(stored key, tile, write id): bytes of another block, of another tile or of an earlier write of the same key never
verify, since for equal bytes different start values always give different CRCs.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from crc32c import crc32c as _crc32c

__all__ = ["CHECKSUM_BYTES", "CRC32C", "crc32c", "tile_seed", "tile_seeds"]

CRC32C = 1
"""Checksum kind 1: CRC-32C, reflected, 32 bits, seeded by `tile_seed`."""
CHECKSUM_BYTES = 4
"""Width of kind 1."""


def crc32c(data: Any, value: int = 0) -> int:
    """CRC-32C of ``data`` (any buffer) continued from ``value``; releases the GIL on large buffers."""
    return int(_crc32c(data, value))


def tile_seed(stored_key: bytes, tile: int, write_id: bytes) -> int:
    """Start value of one tile's checksum: BLAKE2b-32 of the stored key, keyed by the write id, personalised by tile."""
    person = tile.to_bytes(16, "little")
    return int.from_bytes(blake2b(stored_key, digest_size=4, key=write_id, person=person).digest(), "little")


def tile_seeds(stored_key: bytes, tiles: Sequence[int], write_id: bytes) -> list[int]:
    """`tile_seed` of each of ``tiles``."""
    return [tile_seed(stored_key, tile, write_id) for tile in tiles]
