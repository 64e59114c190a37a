from __future__ import annotations

from dataclasses import replace
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ForebayError, SchemaInvalid, ValueSize
from forebay.ids import LBA_BYTES, MAX_GROUPS, MAX_TILES, MAX_VALUE_BYTES
from forebay.schema import MAX_SCHEMA_BYTES, Group, HashAlgorithm, Required, Scales, Schema

LLAMA_GROUP = Group("full", tuple(range(32)), 16, 8, 512, "bf16", "kv-head-token", layer_groups=4, head_groups=2)
LLAMA = Schema(
    "vllm",
    bytes(range(32)),
    HashAlgorithm("sha256_cbor", 16),
    (LLAMA_GROUP,),
    probe=bytes.fromhex("00112233445566778899aabbccddeeff"),
)
OPAQUE_CBOR = (
    "a86468617368a269616c676f726974686d646e6f6e656c626c6f636b5f746f6b656e730065647261667440656d6f64656c406570726f626540"
    "66656e67696e65666f70617175656667726f75707381ab646b696e64666f70617175656564747970656275"
    "3866666f726d6174656279746573666c617965727380667363616c6573a2646b696e64646e6f6e656e62797465735f7065725f6865616400"
    "686b765f686561647300687265717569726564a2646b696e6463616c6c66626c6f636b73006b686561645f67726f757073016c626c6f636b5f74"
    "6f6b656e73006c6c617965725f67726f757073016e62797465735f7065725f68656164006776657273696f6e016970726f636573736f7240"
)
LLAMA_CBOR = (
    "a86468617368a269616c676f726974686d6b7368613235365f63626f726c626c6f636b5f746f6b656e731065647261667440656d6f64656c5820"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f6570726f62655000112233445566778899aabbccddeeff66656e"
    "67696e6564766c6c6d6667726f75707381ab646b696e646466756c6c656474797065646266313666666f726d61746d6b762d686561642d746f6b"
    "656e666c61796572739820000102030405060708090a0b0c0d0e0f101112131415161718181819181a181b181c181d181e181f667363616c6573"
    "a2646b696e64646e6f6e656e62797465735f7065725f6865616400686b765f686561647308687265717569726564a2646b696e6463616c6c6662"
    "6c6f636b73006b686561645f67726f757073026c626c6f636b5f746f6b656e73106c6c617965725f67726f757073046e62797465735f7065725f"
    "686561641902006776657273696f6e016970726f636573736f7240"
)


@pytest.mark.parametrize(
    ("schema", "cbor", "keyspace"),
    [
        (Schema.opaque(), OPAQUE_CBOR, "acd40d48e6df12b54aad581defa98579176c95892f0d7d66f1e209fcfc10aa20"),
        (LLAMA, LLAMA_CBOR, "0031b3100005569d5758247ff6b2c893baad2dd1f190a3821a54d828668bcfe9"),
    ],
    ids=["opaque", "llama"],
)
def test_golden(schema: Schema, cbor: str, keyspace: str) -> None:
    """docs/adr/0006: canonical CBOR and keyspace, to the byte. A change here loses every block ever stored."""
    assert schema.cbor.hex() == cbor
    assert schema.keyspace.hex() == keyspace
    assert Schema.from_cbor(bytes.fromhex(cbor)) == schema


# -------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    "other",
    [
        replace(LLAMA, engine="sglang"),
        replace(LLAMA, model=bytes(32)),
        replace(LLAMA, draft=bytes(32)),
        replace(LLAMA, processor=bytes(32)),
        replace(LLAMA, probe=b""),
        replace(LLAMA, hash=HashAlgorithm("sha256", 16)),
        replace(LLAMA, hash=HashAlgorithm("sha256_cbor", 32)),
        *(
            replace(LLAMA, groups=(replace(LLAMA_GROUP, **change),))
            for change in (
                {"kind": "sliding"},
                {"layers": tuple(range(1, 33))},
                {"block_tokens": 32},
                {"kv_heads": 4},
                {"bytes_per_head": 256},
                {"dtype": "e4m3"},
                {"format": "other"},
                {"scales": Scales("per_head", 4)},
                {"required": Required("trailing", 2)},
                {"layer_groups": 2},
                {"head_groups": 1},
            )
        ),
        replace(LLAMA, groups=(LLAMA_GROUP, LLAMA_GROUP)),
    ],
)
def test_every_field_is_identity(other: Schema) -> None:
    assert other.keyspace != LLAMA.keyspace
    assert Schema.from_cbor(other.cbor) == other


# -------------------------------------------------------------------------------------------------- hostile input


def changed(path: str, value: Any) -> bytes:
    """LLAMA's CBOR with one field replaced; ``...`` removes it."""
    raw = cbor2.loads(LLAMA.cbor)
    at = raw
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name) if name.isdigit() else name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return cbor2.dumps(raw, canonical=True)


NOT_INTEGERS = [-1, 1 << 70, 1.0, "1", None, [], True]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("version", 2, "schema.version"),
        ("version", True, "schema.version"),
        ("version", 1.0, "schema.version"),
        ("engine", "", "schema.engine"),
        ("engine", "x" * 129, "schema.engine"),
        ("engine", b"vllm", "schema.engine"),
        ("model", b"short", "schema.model"),
        ("model", "text", "schema.model"),
        ("draft", None, "schema.draft"),
        ("processor", bytes(65), "schema.processor"),
        ("probe", bytes(65), "schema.probe"),
        ("probe", 1, "schema.probe"),
        ("hash", None, "schema.hash"),
        ("hash", {}, "schema.hash.algorithm"),
        ("hash.algorithm", 7, "schema.hash.algorithm"),
        *(("hash.block_tokens", v, "schema.hash.block_tokens") for v in NOT_INTEGERS),
        ("groups", {}, "schema.groups"),
        ("groups", [], "schema.groups"),
        ("groups", [1], "schema.groups[0]"),
        ("groups.0.kind", "wide", "schema.groups[0].kind"),
        ("groups.0.kind", ["full"], "schema.groups[0].kind"),
        ("groups.0.layers", [], "schema.groups[0].layers"),
        ("groups.0.layers", [1, 1], "schema.groups[0].layers"),
        ("groups.0.layers", [70_000], "schema.groups[0].layers"),
        ("groups.0.layers", ["a"], "schema.groups[0].layers"),
        ("groups.0.layers", 5, "schema.groups[0].layers"),
        ("groups.0.layers", list(range(5000)), "schema.groups[0].layers"),
        *(
            (f"groups.0.{name}", v, f"schema.groups[0].{name}")
            for name in ("block_tokens", "kv_heads", "bytes_per_head", "layer_groups", "head_groups")
            for v in NOT_INTEGERS
        ),
        ("groups.0.block_tokens", 0, "schema.groups[0].block_tokens"),
        ("groups.0.bytes_per_head", 0, "schema.groups[0].bytes_per_head"),
        ("groups.0.layer_groups", 33, "schema.groups[0].layer_groups"),
        ("groups.0.head_groups", 9, "schema.groups[0].head_groups"),
        ("groups.0.dtype", "", "schema.groups[0].dtype"),
        ("groups.0.format", [], "schema.groups[0].format"),
        ("groups.0.scales", {"kind": "none"}, "schema.groups[0].scales.bytes_per_head"),
        ("groups.0.scales.kind", "", "schema.groups[0].scales.kind"),
        *(("groups.0.scales.bytes_per_head", v, "schema.groups[0].scales.bytes_per_head") for v in NOT_INTEGERS),
        ("groups.0.required.kind", "some", "schema.groups[0].required.kind"),
        ("groups.0.required.blocks", -1, "schema.groups[0].required.blocks"),
        ("groups.0.bytes_per_head", MAX_VALUE_BYTES, "schema.groups[0]"),
        ("engine", ..., "schema.engine"),
        ("groups.0.dtype", ..., "schema.groups[0].dtype"),
        ("colour", "red", "schema.colour"),
        ("groups.0.colour", "red", "schema.groups[0].colour"),
    ],
)
def test_each_bad_field_is_named(path: str, value: Any, field: str) -> None:
    with pytest.raises(SchemaInvalid) as caught:
        Schema.from_cbor(changed(path, value))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", [1]),
        ("block_tokens", 1),
        ("kv_heads", 1),
        ("bytes_per_head", 1),
        ("layer_groups", 2),
        ("head_groups", 2),
        ("layer_groups", "a"),
        ("head_groups", ["a"]),
        ("layer_groups", 1.0),
        ("kv_heads", False),
    ],
)
def test_an_opaque_group_has_no_grid(name: str, value: Any) -> None:
    raw = cbor2.loads(Schema.opaque().cbor)
    raw["groups"][0][name] = value
    with pytest.raises(SchemaInvalid) as caught:
        Schema.from_cbor(cbor2.dumps(raw, canonical=True))
    assert caught.value.field == f"schema.groups[0].{name}"


def test_too_many_groups_or_tiles_or_bytes_are_refused() -> None:
    with pytest.raises(SchemaInvalid) as caught:
        replace(LLAMA, groups=(LLAMA_GROUP,) * (MAX_GROUPS + 1))
    assert caught.value.field == "schema.groups"
    with pytest.raises(SchemaInvalid) as caught:
        Schema.from_cbor(changed("groups", cbor2.loads(LLAMA.cbor)["groups"] * (MAX_GROUPS + 1)))
    assert caught.value.field == "schema.groups"
    wide = replace(LLAMA_GROUP, layers=tuple(range(64)), kv_heads=64, bytes_per_head=1, layer_groups=64, head_groups=64)
    with pytest.raises(SchemaInvalid) as caught:
        replace(LLAMA, groups=(wide,))
    assert caught.value.limit == MAX_TILES
    with pytest.raises(SchemaInvalid) as caught:
        Schema.from_cbor(bytes(MAX_SCHEMA_BYTES + 1))
    assert caught.value.limit == MAX_SCHEMA_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        cbor2.dumps([1, 2]),
        cbor2.dumps(7),
        bytes.fromhex("5affffffff00"),
        bytes.fromhex("9bffffffffffffffff"),
        bytes.fromhex("bbffffffffffffffff"),
        b"\x81" * 60_000,
        bytes.fromhex("a1a000"),
        bytes.fromhex("a1f97e0000"),
        bytes.fromhex("d81c81d81d00"),
        bytes.fromhex("c249ffffffffffffffffff"),
    ],
    ids=lambda d: d[:8].hex() or "empty",
)
def test_what_is_no_schema_is_a_coded_error(data: bytes) -> None:
    with pytest.raises(SchemaInvalid) as caught:
        Schema.from_cbor(data)
    assert caught.value.field.startswith("schema")


def test_only_canonical_cbor_is_taken() -> None:
    """RFC 8949 §4.2.3. Two encodings of one schema would be two keyspaces, or one with two digests."""
    raw = cbor2.loads(LLAMA.cbor)
    shuffled = cbor2.dumps(dict(reversed(raw.items())))
    longer = LLAMA.cbor.replace(b"gversion\x01", b"gversion\x18\x01")
    assert cbor2.loads(longer) == cbor2.loads(shuffled) == raw
    for data in (shuffled, longer, LLAMA.cbor + b"\0"):
        with pytest.raises(SchemaInvalid, match="canonical") as caught:
            Schema.from_cbor(data)
        assert caught.value.field == "schema"


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=10,
)
PATHS = [
    "version",
    "engine",
    "model",
    "hash",
    "hash.block_tokens",
    "groups",
    "groups.0.kind",
    "groups.0.layers",
    "groups.0.scales",
    "groups.0.required",
    "groups.0.layer_groups",
    "groups.0.head_groups",
    "groups.0.kv_heads",
]


@given(st.sampled_from(PATHS), json_like)
def test_any_value_in_any_field_is_a_schema_or_a_coded_error(path: str, value: Any) -> None:
    try:
        data = changed(path, value)
    except (OverflowError, ValueError):
        return
    try:
        schema = Schema.from_cbor(data)
    except ForebayError as error:
        assert isinstance(error, SchemaInvalid) and error.field.startswith("schema")
    else:
        assert schema.cbor == data
        for group in schema.groups:
            group.layout(1 if group.kind == "opaque" else None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_coded_error(data: bytes) -> None:
    with pytest.raises(SchemaInvalid):
        Schema.from_cbor(data)


# -------------------------------------------------------------------------------------------------- layouts


def test_layout_golden() -> None:
    """docs/adr/0006: tiles in the order [head group][layer group], the first groups take what does not divide."""
    group = Group(
        "full", tuple(range(10)), 4, 5, 100, "bf16", "x", scales=Scales("s", 4), layer_groups=3, head_groups=2
    )
    layout = group.layout()
    assert [len(group.layer_range(i)) for i in range(3)] == [4, 3, 3]
    assert [len(group.head_range(i)) for i in range(2)] == [3, 2]
    assert layout.lengths == (4848, 3636, 3636, 3232, 2424, 2424)
    assert layout.offsets == (0, 8192, 12288, 16384, 20480, 24576)
    assert layout.value_offsets == (0, 4848, 8484, 12120, 15352, 17776)
    assert (layout.extent_bytes, layout.value_bytes, layout.tiles) == (28672, 20200, 6)
    llama = LLAMA_GROUP.layout()
    assert (llama.extent_bytes, llama.value_bytes, llama.tiles) == (2 << 20, 2 << 20, 8)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    layers = draw(st.integers(1, 40))
    heads = draw(st.integers(0, 12))
    return Group(
        draw(st.sampled_from(["full", "mla", "indexer", "sliding", "chunked", "mamba", "draft"])),
        tuple(range(layers)),
        draw(st.integers(1, 33)),
        heads,
        draw(st.integers(1, 300)),
        "bf16",
        "x",
        scales=Scales("s", draw(st.integers(0, 9))),
        layer_groups=draw(st.integers(1, layers)),
        head_groups=draw(st.integers(1, max(1, heads))),
    )


@given(groups())
def test_tiles_cover_the_grid_once_and_are_aligned(group: Group) -> None:
    replace(LLAMA, groups=(group,))  # a schema may have it
    layout = group.layout()
    assert layout.tiles == group.tiles == group.layer_groups * group.head_groups
    covered = [
        (head, layer)
        for h in range(group.head_groups)
        for part in range(group.layer_groups)
        for head in (group.head_range(h) if group.kv_heads else [0])
        for layer in group.layer_range(part)
    ]
    heads = max(1, group.kv_heads)
    assert sorted(covered) == [(h, n) for h in range(heads) for n in range(len(group.layers))]
    tokens = 1 if group.kind == "mamba" else group.block_tokens
    per_head = tokens * group.bytes_per_head + group.scales.bytes_per_head
    assert layout.value_bytes == sum(layout.lengths) == heads * len(group.layers) * per_head
    ends = [o + n for o, n in zip(layout.offsets, layout.lengths, strict=True)]
    assert all(length > 0 for length in layout.lengths)
    assert all(o % LBA_BYTES == 0 for o in layout.offsets) and layout.extent_bytes % LBA_BYTES == 0
    for end, following in zip(ends, (*layout.offsets[1:], layout.extent_bytes), strict=True):
        assert 0 <= following - end < LBA_BYTES
    assert layout.value_offsets == tuple(sum(layout.lengths[:i]) for i in range(layout.tiles))
    assert group.layout(layout.value_bytes) == layout
    with pytest.raises(ValueSize) as caught:
        group.layout(layout.value_bytes + 1)
    assert caught.value.limit == layout.value_bytes


@given(st.integers(1, 100_000))
def test_an_opaque_value_is_one_tile(size: int) -> None:
    layout = Schema.opaque().groups[0].layout(size)
    assert (layout.lengths, layout.offsets, layout.value_bytes) == ((size,), (0,), size)
    assert layout.extent_bytes == -(-size // LBA_BYTES) * LBA_BYTES


@pytest.mark.parametrize("size", [None, 0, -1, MAX_VALUE_BYTES + 1])
def test_opaque_values_have_limits(size: int | None) -> None:
    with pytest.raises(ValueSize) as caught:
        Schema.opaque().groups[0].layout(size)
    assert caught.value.field == "length_bytes"
