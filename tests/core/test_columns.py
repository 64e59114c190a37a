import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ForebayError, InvalidArgument, KeySize
from forebay.ids import MAX_BATCH_KEYS, MAX_KEY_BYTES, BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import key_bytes_to_proto, keys_from_proto, keys_to_proto, pack, rows16, unpack

blocks = st.builds(
    BlockKey,
    st.binary(min_size=1, max_size=40),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
)


@given(st.lists(blocks, min_size=1, max_size=20))
def test_keys_come_back(keys: list[BlockKey]) -> None:
    assert keys_from_proto(pb.Keys.FromString(keys_to_proto(keys).SerializeToString())) == keys


@given(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=5))
def test_keys_alone_are_the_same_column(keys: list[bytes]) -> None:
    assert key_bytes_to_proto(keys) == keys_to_proto([BlockKey(key) for key in keys])


def test_keys_golden() -> None:
    """docs/adr/0006: equal lengths travel as a stride, columns of defaults not at all."""
    assert keys_to_proto([BlockKey(b"ab"), BlockKey(b"cd")]) == pb.Keys(data=b"abcd", stride=2)
    assert keys_to_proto([BlockKey(b"a"), BlockKey(b"bc", 1, 2)]) == pb.Keys(
        data=b"abc",
        lengths=bytes.fromhex("01000200"),
        groups=bytes.fromhex("00000100"),
        scopes=bytes.fromhex("0000000002000000"),
    )


@given(st.sampled_from(["u8", "u16", "u32", "u64"]), st.data())
def test_integers_come_back(kind: str, data: st.DataObject) -> None:
    cells = data.draw(st.lists(st.integers(0, 2 ** int(kind[1:]) - 1), max_size=10))
    packed = pack(kind, cells)
    assert len(packed) == len(cells) * int(kind[1:]) // 8
    assert unpack(kind, packed, "x") == unpack(kind, packed, "x", len(cells)) == cells
    assert pack(kind, np.array(cells, dtype=np.uint64)) == packed


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Keys(), "keys"),
        (pb.Keys(data=b"abc", stride=2), "keys.data"),
        (pb.Keys(data=b"ab", stride=2, lengths=b"\x02\0"), "keys.data"),
        (pb.Keys(data=b"a" * 1025, stride=1025), "keys.stride"),
        (pb.Keys(stride=2), "keys"),
        (pb.Keys(data=b"a", lengths=b"\x01"), "keys.lengths"),
        (pb.Keys(data=b"a", lengths=b"\x02\0"), "keys.data"),
        (pb.Keys(data=b"abc", lengths=b"\x02\0"), "keys.data"),
        (pb.Keys(data=b"", lengths=b"\0\0"), "keys[0]"),
        (pb.Keys(data=b"a" * 1025, lengths=pack("u16", [1025])), "keys[0]"),
        (pb.Keys(data=b"ab", stride=1, groups=b"\0\0"), "keys.groups"),
        (pb.Keys(data=b"ab", stride=1, scopes=b"\0\0\0\0"), "keys.scopes"),
        (pb.Keys(data=bytes(MAX_BATCH_KEYS + 1), stride=1), "keys"),
    ],
)
def test_columns_that_do_not_fit_name_themselves(message: pb.Keys, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        keys_from_proto(message)
    assert caught.value.field == field


def test_key_sizes_have_their_own_code() -> None:
    for message in (pb.Keys(lengths=b"\0\0"), pb.Keys(data=bytes(2000), stride=2000)):
        with pytest.raises(KeySize) as caught:
            keys_from_proto(message)
        assert str(MAX_KEY_BYTES) in str(caught.value.limit)
    assert keys_from_proto(pb.Keys(lengths=b"\0\0"), allow_empty_key=True) == [BlockKey(b"")]


@given(
    st.builds(
        pb.Keys,
        data=st.binary(max_size=64),
        stride=st.integers(0, 2**32 - 1) | st.integers(0, 4),
        lengths=st.binary(max_size=16) | st.lists(st.integers(0, 8), max_size=8).map(lambda v: pack("u16", v)),
        groups=st.binary(max_size=16),
        scopes=st.binary(max_size=16),
    )
)
def test_hostile_columns_are_keys_or_a_coded_error(message: pb.Keys) -> None:
    try:
        keys = keys_from_proto(message)
    except ForebayError as error:
        assert isinstance(error, InvalidArgument) and error.field.startswith("keys")
    else:
        assert b"".join(k.key for k in keys) == message.data
        assert all(1 <= len(k.key) <= MAX_KEY_BYTES for k in keys)


@given(st.binary(max_size=70))
def test_write_ids_are_whole(data: bytes) -> None:
    if len(data) % 16:
        with pytest.raises(InvalidArgument) as caught:
            rows16(data, "write_ids")
        assert caught.value.field == "write_ids"
    else:
        assert b"".join(rows16(data, "write_ids")) == data


@given(st.sampled_from(["u16", "u32", "u64"]), st.binary(max_size=40), st.none() | st.integers(0, 10))
def test_hostile_integers_are_cells_or_a_coded_error(kind: str, data: bytes, count: int | None) -> None:
    size = int(kind[1:]) // 8
    if len(data) % size or (count is not None and len(data) != count * size):
        with pytest.raises(InvalidArgument) as caught:
            unpack(kind, data, "column", count)
        assert caught.value.field == "column"
    else:
        assert len(unpack(kind, data, "column", count)) == len(data) // size
