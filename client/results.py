"""What the client's calls answer and take: plain values, one a key. A miss is a value with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.schema import Schema

__all__ = [
    "BlockStat",
    "ClientStats",
    "Describe",
    "GetResult",
    "Hints",
    "KeyspaceInfo",
    "ListedBlock",
    "MatchResult",
    "PutResult",
    "StatResult",
    "TilesResult",
    "VolumeTransport",
    "WatchEvent",
]


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What is present, at this moment; it promises nothing for the next.

    ``reasons`` say why not (``ok``, ``absent``, ``evicted``, ``stale_generation``, ...); that of the first absent key
    is ``other_keyspace`` or ``other_generation`` where the namespace has it there, which ``elsewhere`` names: keyspace
    and generation. ``prefix`` is, by group, how many of the group's keys are present before the first that is not.
    ``load_ms`` estimates reading all that is present.
    """

    present: tuple[bool, ...]
    reasons: tuple[str, ...]
    prefix: dict[int, int]
    load_ms: float
    present_bytes: int
    elsewhere: tuple[bytes, int] | None = None


@dataclass(frozen=True, slots=True)
class KeyspaceInfo:
    """A keyspace and generation that blocks of the namespace were lately stored under."""

    keyspace: bytes
    generation: int
    schema: Schema


@dataclass(frozen=True, slots=True)
class GetResult:
    """One block of a read: a hit with ``length_bytes`` bytes, or a miss whose ``reason`` says why.

    ``value`` is there for `Client.get` only; `Client.get_into` filled the caller's buffer. Who reads a block's tiles by
    several calls compares ``write_id``, so that all of them are of one attempt to write it.
    """

    hit: bool
    reason: str
    value: memoryview | None = None
    length_bytes: int = 0
    write_id: bytes = b""


@dataclass(frozen=True, slots=True)
class PutResult:
    """One block of a write. ``stored``: by this call, durable by policy. ``present``: visible now, whoever wrote it."""

    stored: bool
    present: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TilesResult:
    """One block of a plan after this rank's part. ``committed``: the node has this rank's tiles.

    ``visible``: the block is whole, and can be read. ``reason`` is ``ok`` when it is; ``pending`` while tiles of other
    ranks are missing, or as in the plan; else what went wrong: ``write_fenced`` (this process has no grant: it joined
    the session too late, or the write is over), ``write_expired``, ``grid_invalid`` (another rank committed other
    bytes for a tile), ``unavailable``, ...
    """

    committed: bool
    visible: bool
    reason: str


@dataclass(frozen=True, slots=True)
class BlockStat:
    """A block as the node has it. ``durability`` is the policy it was written under.

    ``describe`` and ``hints`` are what its writer said: maps whose names are those of `Describe` (for one block:
    ``parent``, ``token_hash``) and `Hints`.
    """

    length_bytes: int
    extent_bytes: int
    tiles: int
    created_unix_ms: int
    pins: int
    leases: int
    write_id: bytes
    volume: int
    offset_bytes: int
    durability: str
    describe: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatResult:
    """One key of a stat: ``ok`` and the block, or why there is none (``absent``) or none can be told."""

    reason: str
    block: BlockStat | None = None


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """One row of a listing."""

    key: bytes
    group: int
    scope: int
    length_bytes: int
    created_unix_ms: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that happened to a block of the session's namespace.

    ``kind`` is stored, removed, cleared, generation or resync; after a resync events were lost, and a listing gives the
    state anew. ``(log, sequence)`` is where to go on watching from.
    """

    log: int
    sequence: int
    kind: str
    key: bytes = b""
    group: int = 0
    scope: int = 0
    generation: int = 0
    keyspace: bytes = b""
    reason: str = ""
    describe: bytes = b""
    length_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hints:
    """Advice to the node about blocks; never a right. Fields as in the protocol's `Hints`."""

    priority_class: int = 0
    session: str = ""
    parent_session: str = ""
    final: bool = False
    reuse_after_ms: int = 0
    retain_until_unix_ms: int = 0
    expected_reuse: int = 0
    deadline_ms: int = 0
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Describe:
    """What a router's index needs of new blocks: one parent key (empty for a chain's first) and token hash a block."""

    parents: Sequence[bytes] = ()
    block_tokens: int = 0
    token_hashes: Sequence[int] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters since the client was made. ``reconnects`` are of the data path, ``reopened`` counts sessions.

    ``fallbacks`` counts by kind of transport how often it failed for a volume that then went by another one.
    """

    hits: int
    misses: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    reconnects: int = 0
    reopened: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VolumeTransport:
    """How a volume is read now: by which kind of transport (block, rdma, tcp, none) and from where.

    ``instead_of`` has the kinds that would be preferred, and why each is not used.
    """

    volume: int
    transport: str
    place: str
    instead_of: Mapping[str, str]
