import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.checksum import CHECKSUM_BYTES, CRC32C, crc32c, tile_seed, tile_seeds

KEY = bytes.fromhex(
    "000000070031b3100005569d5758247ff6b2c893baad2dd1f190a3821a54d828668bcfe900000000000000030000000500006c6f72613a6e6f6e65"
    "7c000102030405060708090a0b0c0d0e0f"
)
WRITE = bytes(range(0x40, 0x50))


def test_crc32c_is_castagnolis() -> None:
    """RFC 3720 §B.4."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_golden() -> None:
    """docs/adr/0006: seeds and checksums of three tiles."""
    assert (CRC32C, CHECKSUM_BYTES) == (1, 4)
    assert tile_seeds(KEY, (0, 1, 7), WRITE) == [934522483, 2488518716, 1717502614]
    assert [crc32c(b"forebay", tile_seed(KEY, t, WRITE)) for t in (0, 1, 7)] == [0x78A7F883, 0x16AD36D9, 0xB437EE7C]


def naive(data: bytes, value: int) -> int:
    """Bit by bit, from the polynomial."""
    value ^= 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1), st.integers(0, 200))
def test_continues_from_any_value_at_any_place(data: bytes, seed: int, cut: int) -> None:
    assert crc32c(data, seed) == naive(data, seed) == crc32c(data[cut:], crc32c(data[:cut], seed))


@given(st.binary(min_size=1, max_size=100), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_equal_bytes_from_other_seeds_never_have_equal_checksums(data: bytes, one: int, other: int) -> None:
    """What binds a tile to its key and write: the CRC is a bijection of its start value."""
    assert (crc32c(data, one) == crc32c(data, other)) == (one == other)


def test_takes_any_buffer() -> None:
    data = bytes(range(256)) * 16
    want = crc32c(data)
    for buffer in (bytearray(data), memoryview(data), np.frombuffer(data, "<u4")):
        assert crc32c(buffer) == want


@pytest.mark.parametrize("change", ["key", "tile", "write"])
def test_seed_depends_on_every_part(change: str) -> None:
    key, tile, write = KEY, 3, WRITE
    if change == "key":
        key = KEY[:-1] + b"\x10"
    elif change == "tile":
        tile = 4
    else:
        write = bytes(16)
    assert tile_seed(key, tile, write) != tile_seed(KEY, 3, WRITE)
