"""Schemas: everything that makes two blocks interchangeable, and the tile grid that follows from it.

A schema is canonical CBOR (RFC 8949 §4.2.3, length-first keys); its SHA-256 is the **keyspace**. Two sessions share
blocks if and only if their schemas are equal to the byte, so every field is required and unknown fields are refused:
identity is exact and closed by default.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import cbor2

from forebay.errors import GridInvalid, SchemaInvalid, ValueSize
from forebay.ids import LBA_BYTES, MAX_GROUPS, MAX_TILES, MAX_VALUE_BYTES, Keyspace, align_up

__all__ = [
    "MAX_SCHEMA_BYTES",
    "SCHEMA_VERSION",
    "Group",
    "GroupKind",
    "HashAlgorithm",
    "Required",
    "Scales",
    "Schema",
    "TileLayout",
]

SCHEMA_VERSION = 1
MAX_SCHEMA_BYTES = 64 << 10

GroupKind = Literal["full", "mla", "indexer", "sliding", "chunked", "mamba", "draft", "opaque"]
_DIGEST_BYTES = (0, 16, 20, 32, 64)


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """How the engine hashes token blocks: algorithm name and tokens per hashed block."""

    algorithm: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Scales:
    """Quantisation scales, stored inline at the end of each tile: ``bytes_per_head`` for every layer and head."""

    kind: str = "none"
    bytes_per_head: int = 0


@dataclass(frozen=True, slots=True)
class Required:
    """Which blocks of a prefix an engine needs: ``all``, the ``trailing`` n, or the one at the ``boundary``."""

    kind: Literal["all", "trailing", "boundary"] = "all"
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Where the tiles of one block lie, in bytes.

    ``lengths`` are exact; on media tile i starts at ``offsets[i]`` of the extent (a multiple of 4 KiB, padding zeroed);
    in a client's buffer the tiles stand back to back at ``value_offsets[i]``.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    value_offsets: tuple[int, ...]
    extent_bytes: int
    value_bytes: int

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> TileLayout:
        """The layout of tiles of these exact lengths."""
        offsets, value_offsets, at, value_at = [], [], 0, 0
        for length in lengths:
            offsets.append(at)
            value_offsets.append(value_at)
            at += align_up(length)
            value_at += length
        return cls(tuple(offsets), lengths, tuple(value_offsets), at, value_at)

    @property
    def tiles(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group of a model: layers that share a layout.

    ``layers`` are the model's layer numbers; ``kv_heads`` 0 means replicated (no head axis, as in MLA);
    ``bytes_per_head`` is per token and head (K and V together), or per state and head for ``mamba``;
    ``dtype`` is the logical type (``e4m3`` is not ``e5m2``); ``format`` names the canonical order of bytes inside a
    tile; ``layer_groups`` × ``head_groups`` is the grid.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    block_tokens: int
    kv_heads: int
    bytes_per_head: int
    dtype: str
    format: str
    scales: Scales = Scales()
    required: Required = Required()
    layer_groups: int = 1
    head_groups: int = 1

    @property
    def tiles(self) -> int:
        return self.layer_groups * self.head_groups

    def layer_range(self, layer_group: int) -> range:
        """Positions in ``layers`` that a layer group covers (the first groups take what does not divide)."""
        return _share(len(self.layers), self.layer_groups, layer_group)

    def head_range(self, head_group: int) -> range:
        """Heads that a head group covers; empty for replicated groups."""
        return _share(self.kv_heads, self.head_groups, head_group)

    def tiles_of(self, heads: range | None = None, layers: range | None = None) -> tuple[int, ...]:
        """The tiles that make up these heads and these positions in ``layers``, ascending; None means all of them.

        A block's tiles are numbered ``[head group][layer group]``. Raises `GridInvalid` where a range ends inside a
        tile, or is not of the grid; a group without a head axis takes no ``heads``.
        """
        if heads is not None and not self.kv_heads:
            raise GridInvalid(f"the {self.kind} group has no head axis to take heads from", field="heads")
        columns = _covered("heads", heads, self.kv_heads, self.head_groups)
        rows = _covered("layers", layers, len(self.layers), self.layer_groups)
        return tuple(column * self.layer_groups + row for column in columns for row in rows)

    def layout(self, value_bytes: int | None = None) -> TileLayout:
        """Tile lengths and offsets; ``value_bytes`` is needed for ``opaque`` and checked for everything else.

        Raises `ValueSize`.
        """
        if self.kind == "opaque":
            if value_bytes is None or not 1 <= value_bytes <= MAX_VALUE_BYTES:
                raise ValueSize(
                    f"a value of {value_bytes} bytes", field="length_bytes", limit=f"1 to {MAX_VALUE_BYTES}"
                )
            return _alone(value_bytes)
        layout = _grid(self)
        if value_bytes is not None and value_bytes != layout.value_bytes:
            raise ValueSize(
                f"a value of {value_bytes} bytes where the schema's blocks have {layout.value_bytes}",
                field="length_bytes",
                limit=layout.value_bytes,
            )
        return layout


def _share(count: int, parts: int, part: int) -> range:
    base, extra = divmod(count, parts)
    start = part * base + min(part, extra)
    return range(start, start + base + (part < extra))


def _covered(what: str, wanted: range | None, count: int, parts: int) -> range:
    """The parts that a range of heads or layers consists of."""
    if wanted is None:
        return range(parts)
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= count:
        raise GridInvalid(f"{wanted} of {count} {what}", field=what, limit=f"a range inside range(0, {count})")
    shares = [_share(count, parts, part) for part in range(parts)]
    found = [part for part in range(parts) if shares[part].start < wanted.stop and wanted.start < shares[part].stop]
    for share in (shares[found[0]], shares[found[-1]]):
        if not (wanted.start <= share.start and share.stop <= wanted.stop):
            axis = "head_groups" if what == "heads" else "layer_groups"
            raise GridInvalid(
                f"{what} {wanted.start} to {wanted.stop - 1} end inside the tile of {what} {share.start} to "
                f"{share.stop - 1}: a schema with more {axis} than {parts} can be cut there",
                field=what,
                limit=axis,
            )
    return range(found[0], found[-1] + 1)


@lru_cache(maxsize=256)
def _alone(value_bytes: int) -> TileLayout:
    return TileLayout.of((value_bytes,))


@lru_cache(maxsize=256)
def _grid(group: Group) -> TileLayout:
    tokens = 1 if group.kind == "mamba" else group.block_tokens
    lengths = []
    for head_group in range(group.head_groups):
        heads = len(group.head_range(head_group)) if group.kv_heads else 1
        per_layer = heads * (tokens * group.bytes_per_head + group.scales.bytes_per_head)
        lengths += [per_layer * len(group.layer_range(i)) for i in range(group.layer_groups)]
    return TileLayout.of(tuple(lengths))


@dataclass(frozen=True)
class Schema:
    """The identity of a keyspace. Digests are raw bytes, empty for none.

    ``probe`` is the engine's own hash of a fixed token list, which exposes seeds and versions. Frozen; construct it
    with every field, or take `Schema.opaque`.
    """

    engine: str
    model: bytes
    hash: HashAlgorithm
    groups: tuple[Group, ...]
    probe: bytes = b""
    draft: bytes = b""
    processor: bytes = b""
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def opaque(cls) -> Schema:
        """The built-in schema of objects: one tile, any bytes."""
        group = Group("opaque", (), 0, 0, 0, "u8", "bytes")
        return cls("opaque", b"", HashAlgorithm("none", 0), (group,))

    @cached_property
    def cbor(self) -> bytes:
        """Canonical CBOR."""
        return cbor2.dumps(asdict(self), canonical=True)

    @cached_property
    def keyspace(self) -> Keyspace:
        """SHA-256 of the canonical CBOR, 32 bytes."""
        return Keyspace(hashlib.sha256(self.cbor).digest())

    def differences(self, other: Schema) -> list[str]:
        """What keeps the blocks of two schemas apart, by field, each as ``field: here, there``."""
        mine, theirs = _leaves(asdict(self)), _leaves(asdict(other))
        return [
            f"{name}: {mine.get(name, 'none')}, {theirs.get(name, 'none')}"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]

    @classmethod
    def from_cbor(cls, data: bytes) -> Schema:
        """Parse and check what a client sent. Raises `SchemaInvalid` naming the field."""
        if len(data) > MAX_SCHEMA_BYTES:
            raise SchemaInvalid(f"a schema of {len(data)} bytes", field="schema", limit=MAX_SCHEMA_BYTES)
        try:
            raw = cbor2.loads(data)
        except Exception as e:  # cbor2 raises many kinds on hostile input
            raise SchemaInvalid(f"the schema is not CBOR: {e}", field="schema") from e
        schema: Schema = _build(cls, raw, "schema")
        if schema.cbor != data:
            raise SchemaInvalid("the schema's CBOR is not canonical (RFC 8949 §4.2.3)", field="schema")
        return schema


_NESTED: dict[tuple[type, str], type] = {
    (Schema, "hash"): HashAlgorithm,
    (Group, "scales"): Scales,
    (Group, "required"): Required,
}


def _leaves(value: object, path: str = "") -> dict[str, str]:
    """The fields of a schema as text, by their paths."""
    if isinstance(value, dict):
        return {
            k: v for name, part in value.items() for k, v in _leaves(part, f"{path}.{name}" if path else name).items()
        }
    if path == "groups" and isinstance(value, tuple):
        return {k: v for i, part in enumerate(value) for k, v in _leaves(part, f"{path}[{i}]").items()}
    return {path: value.hex() or "none" if isinstance(value, bytes) else str(value)}


def _build(cls: type[Any], raw: Any, path: str) -> Any:
    if not isinstance(raw, dict):
        raise SchemaInvalid(f"{path} must be a map", field=path)
    names = set(cls.__dataclass_fields__)
    if raw.keys() != names:
        odd = sorted(map(str, raw.keys() ^ names))
        raise SchemaInvalid(f"{path} has missing or unknown fields: {', '.join(odd)}", field=f"{path}.{odd[0]}")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        nested = _NESTED.get((cls, name))
        if nested is not None:
            values[name] = _build(nested, value, f"{path}.{name}")
        elif cls is Schema and name == "groups":
            if not isinstance(value, list | tuple):
                raise SchemaInvalid("schema.groups must be a list", field="schema.groups")
            values[name] = tuple(_build(Group, g, f"schema.groups[{i}]") for i, g in enumerate(value[: MAX_GROUPS + 1]))
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _need(ok: bool, field: str, message: str, limit: int | str | None = None) -> None:
    if not ok:
        raise SchemaInvalid(f"{field}: {message}", field=field, limit=limit)


def _int(value: Any, field: str, low: int, high: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _need(ok, field, f"{value!r} is not an integer in range", f"{low} to {high}")


def _text(value: Any, field: str) -> None:
    _need(isinstance(value, str) and 1 <= len(value) <= 128, field, "must be text of 1 to 128 characters", 128)


def _check(schema: Schema) -> None:
    _int(schema.version, "schema.version", SCHEMA_VERSION, SCHEMA_VERSION)
    _text(schema.engine, "schema.engine")
    for name in ("model", "draft", "processor"):
        digest: Any = getattr(schema, name)
        ok = isinstance(digest, bytes) and len(digest) in _DIGEST_BYTES
        _need(ok, f"schema.{name}", "must be a digest in bytes, or empty", f"lengths {_DIGEST_BYTES}")
    probe: Any = schema.probe  # decoded fields may be anything whatever their annotation says
    ok = isinstance(probe, bytes) and len(probe) <= 64
    _need(ok, "schema.probe", "must be at most 64 bytes", 64)
    _text(schema.hash.algorithm, "schema.hash.algorithm")
    _int(schema.hash.block_tokens, "schema.hash.block_tokens", 0, 1 << 20)
    _need(1 <= len(schema.groups) <= MAX_GROUPS, "schema.groups", "wrong number of groups", f"1 to {MAX_GROUPS}")
    for i, group in enumerate(schema.groups):
        _check_group(group, f"schema.groups[{i}]")


def _check_group(group: Group, at: str) -> None:
    _need(group.kind in get_args(GroupKind), f"{at}.kind", f"{group.kind!r} is not known")
    _text(group.dtype, f"{at}.dtype")
    _text(group.format, f"{at}.format")
    _text(group.scales.kind, f"{at}.scales.kind")
    _int(group.scales.bytes_per_head, f"{at}.scales.bytes_per_head", 0, 1 << 20)
    _need(group.required.kind in ("all", "trailing", "boundary"), f"{at}.required.kind", "is not known")
    _int(group.required.blocks, f"{at}.required.blocks", 0, 1 << 20)
    if group.kind == "opaque":
        _need(group.layers == (), f"{at}.layers", "an opaque group has no layers")
        for name, only in (
            ("block_tokens", 0),
            ("kv_heads", 0),
            ("bytes_per_head", 0),
            ("layer_groups", 1),
            ("head_groups", 1),
        ):
            _int(getattr(group, name), f"{at}.{name}", only, only)
        return
    layers: Any = group.layers
    _need(isinstance(layers, tuple) and 1 <= len(layers) <= 4096, f"{at}.layers", "1 to 4096 numbers", 4096)
    for layer in group.layers:
        _int(layer, f"{at}.layers", 0, 65_535)
    _need(len(set(group.layers)) == len(group.layers), f"{at}.layers", "a layer stands twice")
    _int(group.block_tokens, f"{at}.block_tokens", 1, 1 << 20)
    _int(group.kv_heads, f"{at}.kv_heads", 0, 65_535)
    _int(group.bytes_per_head, f"{at}.bytes_per_head", 1, MAX_VALUE_BYTES)
    _int(group.layer_groups, f"{at}.layer_groups", 1, len(group.layers))
    _int(group.head_groups, f"{at}.head_groups", 1, max(1, group.kv_heads))
    _need(group.tiles <= MAX_TILES, f"{at}.layer_groups", f"{group.tiles} tiles", MAX_TILES)
    heads = max(1, group.kv_heads)
    per_head = group.block_tokens * group.bytes_per_head + group.scales.bytes_per_head
    size = heads * len(group.layers) * per_head + group.tiles * LBA_BYTES
    _need(size <= MAX_VALUE_BYTES, at, f"a block would take {size} bytes", MAX_VALUE_BYTES)
