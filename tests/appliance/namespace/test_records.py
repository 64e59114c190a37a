from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.namespace.records import (
    FLUSHED,
    PINNED,
    PREFIX,
    PREFIX_DTYPE,
    RECORD_VERSION,
    Durability,
    Record,
    encode_tail,
)
from forebay.checksum import crc32c
from forebay.errors import DataDirNewer, MetadataCorrupt
from forebay.ids import MAX_TILES, Extent, VolumeId, WriteId

GOLDEN = Record(
    write_id=WriteId(bytes(range(0x40, 0x50))),
    extent=Extent(VolumeId(9), 0x4001000, 0x200000),
    value_bytes=0x1FFFFF,
    checksums=(0x11223344, 0xAABBCCDD),
    policy=Durability.VERIFY,
    sequence=77,
    created_ms=1_700_000_000_123,
    retain_until_ms=1_700_000_060_000,
    expires_ms=1_700_086_400_000,
    flags=FLUSHED | PINNED,
    tail=encode_tail({"block_tokens": 16, "parent": b"p"}, {"origin": "x"}),
)
GOLDEN_BYTES = (
    "0101040103000200404142434445464748494a4b4c4d4e4f0900000000000000"
    "00100004000000000000200000000000ffff1f00000000004d00000000000000"
    "7b68e5cf8b0100006052e6cf8b01000000c40bd58b01000027000000444b4e98"
    "44332211ddccbbaa"
    "a26164a266706172656e7441706c626c6f636b5f746f6b656e73106168a1666f726967696e6178"
)


def test_golden() -> None:
    """docs/adr/0006: the record, to the byte. A directory written today must be read by every later version."""
    data = GOLDEN.encode()
    assert data.hex() == GOLDEN_BYTES
    assert Record.decode(data) == GOLDEN
    assert GOLDEN.described() == {"d": {"block_tokens": 16, "parent": b"p"}, "h": {"origin": "x"}}


records = st.builds(
    Record,
    write_id=st.binary(min_size=16, max_size=16).map(WriteId),
    extent=st.builds(
        Extent, st.integers(0, 2**32 - 1).map(VolumeId), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)
    ),
    value_bytes=st.integers(0, 2**64 - 1),
    checksums=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20).map(tuple),
    policy=st.sampled_from(Durability),
    sequence=st.integers(0, 2**64 - 1),
    created_ms=st.integers(0, 2**64 - 1),
    retain_until_ms=st.integers(0, 2**64 - 1),
    expires_ms=st.integers(0, 2**64 - 1),
    flags=st.integers(0, 3),
    tail=st.binary(max_size=30),
)


@given(records)
def test_records_come_back_and_their_prefix_in_bulk(record: Record) -> None:
    data = record.encode()
    assert Record.decode(data) == record
    prefix = np.frombuffer(data[: PREFIX.size] * 2, PREFIX_DTYPE)[1]
    assert prefix["sequence"] == record.sequence and prefix["offset_bytes"] == record.extent.offset_bytes
    assert prefix["write_id"].tobytes() == record.write_id and prefix["tiles"] == len(record.checksums)
    assert prefix["expires_ms"] == record.expires_ms and prefix["tail_bytes"] == len(record.tail)


@given(records, st.data())
def test_any_flipped_bit_and_any_other_length_is_noticed(record: Record, data: st.DataObject) -> None:
    good = record.encode()
    at = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[at // 8] ^= 1 << at % 8
    with pytest.raises((MetadataCorrupt, DataDirNewer)):
        Record.decode(bytes(bad))
    cut = data.draw(st.integers(0, len(good) - 1))
    for other in (good[:cut], good + b"\0"):
        with pytest.raises(MetadataCorrupt):
            Record.decode(other)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_coded_error(data: bytes) -> None:
    with pytest.raises((MetadataCorrupt, DataDirNewer)):
        Record.decode(data)


def sealed(**changes: int) -> bytes:
    """GOLDEN with fields of its prefix changed and its CRC right."""
    data = bytearray(GOLDEN.encode())
    prefix = np.frombuffer(data, PREFIX_DTYPE, 1)
    for name, value in changes.items():
        prefix[name] = value
    prefix["crc"] = 0
    prefix["crc"] = crc32c(bytes(data))
    return bytes(data)


def test_a_newer_version_is_refused_as_newer() -> None:
    """The upgrade rule: never guess at what a newer program wrote."""
    with pytest.raises(DataDirNewer) as caught:
        Record.decode(sealed(version=RECORD_VERSION + 1))
    assert caught.value.limit == RECORD_VERSION


@pytest.mark.parametrize(
    "changes", [{"version": 0}, {"checksum_kind": 2}, {"policy": 3}, {"tiles": 0, "tail_bytes": 39 + 8}]
)
def test_fields_out_of_range_are_refused_though_the_crc_is_right(changes: dict[str, int]) -> None:
    assert Record.decode(sealed()) == GOLDEN
    with pytest.raises(MetadataCorrupt):
        Record.decode(sealed(**changes))


def test_there_is_room_for_the_largest_grid() -> None:
    record = replace(GOLDEN, checksums=(5,) * MAX_TILES)
    assert Record.decode(record.encode()) == record


def test_flags_change_nothing_else() -> None:
    assert GOLDEN.with_flags(0) == replace(GOLDEN, flags=0)
