"""Room in staging memory."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.client.transports.nvme_rdma_staging import Room
from forebay.ids import LBA_BYTES


@given(st.data(), st.integers(1, 40))
def test_ranges_never_overlap_and_all_come_back(data: st.DataObject, blocks: int) -> None:
    room = Room(blocks * LBA_BYTES)
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        back = bool(held) and data.draw(st.sampled_from([False, True]))
        if back:
            start = data.draw(st.sampled_from(sorted(held)))
            room.give(start, held.pop(start))
            continue
        length = data.draw(st.integers(1, blocks * LBA_BYTES))
        fits = room.fits(length)
        start_or_none = room.take(length)
        assert (start_or_none is not None) == fits
        if start_or_none is None:
            continue
        start = start_or_none
        assert start % LBA_BYTES == 0
        assert start + length <= blocks * LBA_BYTES
        for other, size in held.items():
            assert start + length <= other or other + size <= start
        held[start] = length
    for start, length in held.items():
        room.give(start, length)
    assert room.take(blocks * LBA_BYTES) == 0, "what came back is one piece"
