"""Values that say whose they are: any reader can tell whether it got all of one write of that key, and nothing else."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b

from tests.sim.rig import grid

__all__ = ["GRID", "GRID_BYTES", "LEAST_BYTES", "NAMESPACES", "SHARED_KEYS", "problem", "value_of", "write_of"]

_HEADER = struct.Struct("<8s16sQQ")
"""Magic, digest of the key, number of the write, bytes of the value."""
_MAGIC = b"soak\r\n\0\1"
LEAST_BYTES = _HEADER.size
"""No value is shorter."""
GRID = grid(9_001)
"""Blocks of groups of ranks: four tiles, of a length that is no multiple of anything."""
GRID_BYTES = GRID.groups[0].layout().value_bytes
SHARED_KEYS = 1_500
"""Keys of ``soak/shared``: more than there is room for."""
NAMESPACES: dict[str, dict[str, object]] = {
    "soak/shared": {"durability": "flush", "eviction": "lru"},
    "soak/kept": {"durability": "flush", "eviction": "none"},
    "soak/brief": {"durability": "volatile", "eviction": "lru", "ttl_ms": 2_000},
    "soak/ranks": {"durability": "verify", "eviction": "lru"},
}
"""What is written where: keys that all writers share, at capacity; keys of one writer each, which must be there; blocks
that expire; blocks that several ranks write together."""


def value_of(key: bytes, write: int, length_bytes: int) -> bytes:
    """What that write of the key holds; at least `LEAST_BYTES`."""
    digest = blake2b(key, digest_size=16).digest()
    head = _HEADER.pack(_MAGIC, digest, write, length_bytes)
    return head + random.Random(digest + write.to_bytes(8, "little")).randbytes(length_bytes - len(head))


def write_of(value: bytes) -> int:
    """Which write a value is of, if it is whole."""
    return int(_HEADER.unpack_from(value)[2])


def problem(key: bytes, value: bytes) -> str | None:
    """What is wrong with a value that was read of a key, or None."""
    if len(value) < LEAST_BYTES:
        return f"{len(value)} bytes"
    magic, digest, write, length_bytes = _HEADER.unpack_from(value)
    if magic != _MAGIC:
        return f"no value of ours: {value[:32].hex()}"
    if digest != blake2b(key, digest_size=16).digest():
        return "another key's value"
    if length_bytes != len(value):
        return f"{len(value)} bytes of {length_bytes}"
    expected = value_of(key, write, length_bytes)
    if value != expected:
        at = next(i for i, (a, b) in enumerate(zip(value, expected, strict=True)) if a != b)
        return f"write {write} differs from byte {at} on: {value[at : at + 16].hex()}"
    return None
