import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DuplicateKey, InvalidArgument, KeySize
from forebay.ids import (
    LBA_BYTES,
    MAX_BATCH_KEYS,
    MAX_KEY_BYTES,
    STORED_PREFIX,
    BlockKey,
    Extent,
    VolumeId,
    align_up,
    check_keys,
    split_stored_key,
    stored_key,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)


def test_stored_key_golden() -> None:
    """docs/adr/0006: the stored key, to the byte."""
    keyspace = bytes.fromhex("0031b3100005569d5758247ff6b2c893baad2dd1f190a3821a54d828668bcfe9")
    stored = stored_key(7, keyspace, 3, BlockKey(b"lora:none|" + bytes(range(16)), 0, 5))
    assert stored.hex() == (
        "00000007"
        "0031b3100005569d5758247ff6b2c893baad2dd1f190a3821a54d828668bcfe9"
        "0000000000000003"
        "00000005"
        "0000"
        "6c6f72613a6e6f6e657c000102030405060708090a0b0c0d0e0f"
    )


@given(u32, st.binary(min_size=32, max_size=32), u64, u32, u16, keys)
def test_stored_key_splits_into_its_parts(
    ns: int, space: bytes, generation: int, scope: int, grp: int, k: bytes
) -> None:
    block = BlockKey(k, grp, scope)
    assert split_stored_key(stored_key(ns, space, generation, block)) == (ns, space, generation, block)


@given(st.lists(st.tuples(u32, st.binary(min_size=32, max_size=32), u64, u32, u16, keys), min_size=2, max_size=6))
def test_stored_keys_sort_by_namespace_then_keyspace_then_generation(
    parts: list[tuple[int, bytes, int, int, int, bytes]],
) -> None:
    """A prefix scan of the store depends on it."""
    stored = [(stored_key(n, s, g, BlockKey(k, grp, sc)), (n, s, g, sc, grp, k)) for n, s, g, sc, grp, k in parts]
    assert [p for _, p in sorted(stored)] == sorted(p for _, p in stored)
    assert STORED_PREFIX.size == 50


@given(st.integers(0, 2**40))
def test_align_up(length: int) -> None:
    found = align_up(length)
    assert found % LBA_BYTES == 0 and 0 <= found - length < LBA_BYTES


def test_extent_end() -> None:
    assert Extent(VolumeId(1), 4096, 8192).end_bytes == 12288


@pytest.mark.parametrize("size", [0, MAX_KEY_BYTES + 1])
def test_keys_outside_their_size_are_refused(size: int) -> None:
    with pytest.raises(KeySize) as caught:
        check_keys([BlockKey(b"a"), BlockKey(bytes(size))])
    assert caught.value.field == "keys[1]" and str(MAX_KEY_BYTES) in str(caught.value.limit)


def test_batches_outside_their_size_are_refused() -> None:
    for count in (0, MAX_BATCH_KEYS + 1):
        with pytest.raises(InvalidArgument) as caught:
            check_keys([BlockKey(b"a")] * count)
        assert caught.value.field == "keys"
    check_keys([BlockKey(b"a")] * MAX_BATCH_KEYS)


def test_a_key_twice_is_refused_only_where_it_matters() -> None:
    batch = [BlockKey(b"a"), BlockKey(b"a", group=1), BlockKey(b"a", scope=1), BlockKey(b"a")]
    check_keys(batch)
    check_keys(batch[:3], unique=True)
    with pytest.raises(DuplicateKey) as caught:
        check_keys(batch, unique=True)
    assert caught.value.field == "keys[3]"
