"""Blocks of the demo: sizes, schema, and bytes that cannot be mistaken for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.demo.workload import MODEL, Contents, Scale, block_key, block_schema
from forebay.errors import InvalidArgument
from forebay.schema import Schema

BLOCK_BYTES = 128 << 10
PAGE = 4096


def test_the_model_is_llama() -> None:
    assert MODEL.bytes_per_token == 128 << 10


@pytest.mark.parametrize(("wanted", "given_bytes", "factor"), [(128, 128, 512.0), (512, 512, 128.0), (700, 640, 102.4)])
def test_scales(wanted: int, given_bytes: int, factor: float) -> None:
    scale = Scale.of(MODEL, wanted << 10)
    assert scale.block_bytes == given_bytes << 10 and scale.factor == factor
    layout = block_schema(scale).groups[0].layout()
    assert layout.tiles == 8 and layout.value_bytes == scale.block_bytes
    assert Schema.from_cbor(block_schema(scale).cbor) == block_schema(scale)


@pytest.mark.parametrize("block_bytes", [0, (128 << 10) - 1, 64 << 20])
def test_scales_out_of_range(block_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="tokens of Llama"):
        Scale.of(MODEL, block_bytes)


def test_keyspaces_of_different_scales_differ() -> None:
    assert block_schema(Scale.of(MODEL, 128 << 10)).keyspace != block_schema(Scale.of(MODEL, 256 << 10)).keyspace


def test_no_page_of_one_block_is_a_page_of_another() -> None:
    contents = Contents(BLOCK_BYTES, seed=7)
    pages: set[bytes] = set()
    buffer = bytearray(BLOCK_BYTES)
    for block in range(40):
        contents.fill(block, buffer)
        pages |= {bytes(buffer[at : at + PAGE]) for at in range(0, BLOCK_BYTES, PAGE)}
    assert len(pages) == 40 * BLOCK_BYTES // PAGE
    assert len({block_key(block) for block in range(-5, 1000)}) == 1005


@given(st.integers(0, 1 << 40), st.integers(0, BLOCK_BYTES - 1), st.integers(1, 255))
def test_any_wrong_byte_is_seen(block: int, at: int, change: int) -> None:
    contents = Contents(BLOCK_BYTES, seed=1)
    buffer = bytearray(BLOCK_BYTES)
    contents.fill(block, buffer)
    assert contents.matches(block, buffer) and Contents(BLOCK_BYTES, seed=1).matches(block, buffer)
    assert not contents.matches(block + 1, buffer) and not Contents(BLOCK_BYTES, seed=2).matches(block, buffer)
    buffer[at] ^= change
    assert not contents.matches(block, buffer)
