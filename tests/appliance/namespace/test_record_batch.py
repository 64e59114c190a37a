"""Records in columns are the records one by one, and nothing passes in a batch that would not pass alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.namespace.record_batch import RecordBatch
from forebay.appliance.namespace.records import Record
from forebay.errors import DataDirNewer, MetadataCorrupt
from forebay.ids import STORED_PREFIX, BlockKey, split_stored_key, stored_key
from tests.appliance.namespace.test_records import records, sealed

keys = st.builds(
    stored_key,
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.builds(BlockKey, st.binary(min_size=1, max_size=40), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A record with one bit flipped, cut short, made longer, or with other fields under a right CRC."""
    how = draw(st.sampled_from(["bit", "cut", "longer", "fields", "bytes"]))
    if how == "bytes":
        return draw(st.binary(max_size=200).filter(lambda data: not data or data[0] <= 1))
    if how == "fields":
        name, value = draw(
            st.sampled_from([("version", 0), ("checksum_kind", 2), ("checksum_width", 8), ("policy", 3), ("tiles", 0)])
        )
        return sealed(**{name: value})
    good = draw(records).encode()
    if how == "cut":
        return good[: draw(st.integers(0, len(good) - 1))]
    if how == "longer":
        return good + b"\0"
    at = draw(st.integers(8, len(good) * 8 - 1))  # not of the version, which may say that it is newer
    bad = bytearray(good)
    bad[at // 8] ^= 1 << at % 8
    return bytes(bad)


def alone(stored: bytes, value: bytes) -> Record | None:
    if len(stored) < STORED_PREFIX.size:
        return None
    try:
        return Record.decode(value)
    except MetadataCorrupt:
        return None


@given(
    st.lists(
        st.tuples(keys | st.binary(max_size=STORED_PREFIX.size - 1), records.map(Record.encode) | damaged()),
        max_size=12,
    ),
    st.data(),
)
def test_a_batch_is_its_records_one_by_one(pairs: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    found, good = RecordBatch.decode([stored for stored, _ in pairs], [value for _, value in pairs])
    want = [(stored, record) for stored, value in pairs if (record := alone(stored, value)) is not None]
    assert good.tolist() == [alone(stored, value) is not None for stored, value in pairs]
    same(found, want)
    kept = data.draw(st.lists(st.booleans(), min_size=len(want), max_size=len(want)))
    mask = good[good]
    mask[:] = kept
    same(found.only(mask), [one for one, stays in zip(want, kept, strict=True) if stays])


def same(found: RecordBatch, want: list[tuple[bytes, Record]]) -> None:
    assert found.stored == [stored for stored, _ in want] and len(found) == len(want)
    sums = found.sums.tolist()
    for (stored, record), key, prefix in zip(want, found.keys, found.prefixes, strict=True):
        namespace, keyspace, generation, block = split_stored_key(stored)
        assert (key["namespace"], key["generation"], key["scope"], key["group"]) == (
            namespace,
            generation,
            block.scope,
            block.group,
        )
        assert key["keyspace"].tobytes() == keyspace
        assert tuple(sums[: prefix["tiles"]]) == record.checksums
        sums = sums[prefix["tiles"] :]
        assert prefix["write_id"].tobytes() == record.write_id and prefix["volume"] == record.extent.volume
        assert (prefix["offset_bytes"], prefix["length_bytes"]) == (
            record.extent.offset_bytes,
            record.extent.length_bytes,
        )
        assert (prefix["value_bytes"], prefix["sequence"], prefix["flags"]) == (
            record.value_bytes,
            record.sequence,
            record.flags,
        )
        assert (prefix["retain_until_ms"], prefix["expires_ms"]) == (record.retain_until_ms, record.expires_ms)
    assert not sums


@given(st.lists(records, max_size=3))
def test_a_newer_record_refuses_the_directory(others: list[Record]) -> None:
    values = [*(record.encode() for record in others), sealed(version=2)]
    with pytest.raises(DataDirNewer):
        RecordBatch.decode([bytes(STORED_PREFIX.size + 1)] * len(values), values)
