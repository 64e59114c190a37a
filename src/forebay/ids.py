"""Identifiers and small values that every part shares, with the limits that belong to them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from forebay.errors import DuplicateKey, InvalidArgument, KeySize
from forebay.nvmetcp.secret import HostSecrets

__all__ = [
    "DEFAULT_SCOPE",
    "LBA_BYTES",
    "MAX_BATCH_KEYS",
    "MAX_GROUPS",
    "MAX_KEY_BYTES",
    "MAX_TILES",
    "MAX_VALUE_BYTES",
    "STORED_PREFIX",
    "BlockKey",
    "Extent",
    "GrantId",
    "HostIdentity",
    "Keyspace",
    "LeaseId",
    "NamespaceId",
    "SessionId",
    "StoredKey",
    "VolumeId",
    "WriteId",
    "align_up",
    "check_keys",
    "split_stored_key",
    "stored_key",
    "stored_prefix",
]

LBA_BYTES = 4096
"""Logical block size of every volume; tiles and extents are multiples of it."""
MAX_KEY_BYTES = 1024
MAX_TILES = 1024
"""Tiles of one block at most: a u16 column with room, and one bitmap word array per pending write."""
MAX_GROUPS = 64
MAX_BATCH_KEYS = 16_384
"""Keys of one call at most."""
MAX_VALUE_BYTES = 64 << 20
"""Bytes of one block at most: an extent lives inside one region."""
DEFAULT_SCOPE = 0
"""Scope id of a principal that acts for itself."""

NamespaceId = NewType("NamespaceId", int)
Keyspace = NewType("Keyspace", bytes)
StoredKey = NewType("StoredKey", bytes)
WriteId = NewType("WriteId", bytes)
VolumeId = NewType("VolumeId", int)
LeaseId = NewType("LeaseId", int)
GrantId = NewType("GrantId", int)
SessionId = NewType("SessionId", bytes)

STORED_PREFIX = struct.Struct(">I32sQIH")
"""Fixed prefix of a stored key: namespace id, keyspace, generation, scope id, group; big-endian so that RocksDB
keeps a namespace, then a keyspace, then a generation together. The client's key follows."""
assert STORED_PREFIX.size == 50


class BlockKey(NamedTuple):
    """What a client names a block by inside its session: the key with its two columns beside it.

    A tuple, since batches are made of thousands of them.
    """

    key: bytes
    group: int = 0
    scope: int = DEFAULT_SCOPE


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of one volume, in bytes, both multiples of `LBA_BYTES`."""

    volume: VolumeId
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """An NVMe host as a target sees it: host NQN and host id (a UUID string). One for each client process.

    ``secrets`` are how it proves that, where the target asks; they are no part of who it is, and are not shown.
    """

    nqn: str
    host_id: str
    secrets: HostSecrets | None = field(default=None, compare=False, repr=False)


def align_up(length_bytes: int, unit_bytes: int = LBA_BYTES) -> int:
    """``length_bytes`` rounded up to whole units."""
    return -(-length_bytes // unit_bytes) * unit_bytes


def stored_prefix(namespace: int, keyspace: bytes, generation: int, scope: int, group: int) -> bytes:
    """The fixed 50 bytes before a client's key in a stored key."""
    return STORED_PREFIX.pack(namespace, keyspace, generation, scope, group)


def stored_key(namespace: int, keyspace: bytes, generation: int, block: BlockKey) -> StoredKey:
    """The key of a block in metadata: ``(namespace id, keyspace, generation, scope id, group, key)``."""
    return StoredKey(stored_prefix(namespace, keyspace, generation, block.scope, block.group) + block.key)


def split_stored_key(stored: bytes) -> tuple[NamespaceId, Keyspace, int, BlockKey]:
    """The parts of a stored key: namespace id, keyspace, generation, block key."""
    namespace, keyspace, generation, scope, group = STORED_PREFIX.unpack_from(stored)
    return NamespaceId(namespace), Keyspace(keyspace), generation, BlockKey(stored[STORED_PREFIX.size :], group, scope)


def check_keys(keys: Sequence[BlockKey], *, unique: bool = False) -> None:
    """Refuse an empty or too long batch, keys outside 1 to 1,024 bytes and, if ``unique``, a key given twice.

    Raises `InvalidArgument`, `KeySize` or `DuplicateKey`, naming the position.
    """
    if not 1 <= len(keys) <= MAX_BATCH_KEYS:
        raise InvalidArgument(f"a batch of {len(keys)} keys", field="keys", limit=f"1 to {MAX_BATCH_KEYS}")
    for i, block in enumerate(keys):
        if not 1 <= len(block.key) <= MAX_KEY_BYTES:
            raise KeySize(f"keys[{i}] has {len(block.key)} bytes", field=f"keys[{i}]", limit=f"1 to {MAX_KEY_BYTES}")
    if unique and len(set(keys)) != len(keys):
        seen: set[BlockKey] = set()
        for i, block in enumerate(keys):
            if block in seen:
                raise DuplicateKey(f"keys[{i}] stands earlier in the same batch", field=f"keys[{i}]")
            seen.add(block)
