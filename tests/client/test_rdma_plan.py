"""Which commands go straight to registered memory."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checksum import crc32c
from forebay.client.registered import address_of
from forebay.client.transports.base import ReadOp, Segment, WriteOp
from forebay.client.transports.nvme_rdma_plan import plan_direct, span
from forebay.client.transports.requests import Request, outcomes
from forebay.ids import LBA_BYTES

BLOCKS = 24


class Arena:
    """Memory of which one part is registered."""

    def __init__(self) -> None:
        self.memory = bytearray(4 * BLOCKS * LBA_BYTES)
        self.base = address_of(memoryview(self.memory))
        self.registered = (self.base + len(self.memory) // 4, self.base + len(self.memory) * 3 // 4)

    def find(self, address: int, length_bytes: int) -> object | None:
        inside = self.registered[0] <= address and address + length_bytes <= self.registered[1]
        return object() if inside else None

    def view(self, at: int, length_bytes: int) -> memoryview:
        return memoryview(self.memory)[at : at + length_bytes]


def carry_out(request: Request, volume: bytearray) -> None:
    """What a target and a queue would do, a byte at a time."""
    at = request.offset_bytes
    if request.write:
        data = b"".join(request.pieces(0, request.length_bytes))
        assert len(data) == request.length_bytes
        volume[at : at + len(data)] = data
        request.seal()
        return
    for view, length_bytes, _ in request.segments:
        if view is not None:
            view[:] = volume[at : at + length_bytes]
        at += length_bytes
    request.seal()


def test_one_range_is_one_range() -> None:
    arena = Arena()
    first, second = arena.view(0, 100), arena.view(100, 50)
    assert span([Segment(first, 100), Segment(second, 50)]) == (arena.base, 150)
    assert span([Segment(second, 50), Segment(first, 100)]) is None
    assert span([Segment(first, 100), Segment(None, 50)]) is None


def test_read_only_memory_has_an_address() -> None:
    arena = Arena()
    assert address_of(arena.view(4096, 10).toreadonly()) == arena.base + 4096


def test_blocks_in_registered_memory_are_one_command() -> None:
    arena = Arena()
    start = arena.registered[0] - arena.base
    op = ReadOp(1, 0, (Segment(arena.view(start, 5 * LBA_BYTES), 5 * LBA_BYTES, 3),))
    (request,) = plan_direct([op], [0], [5 * LBA_BYTES], 1 << 20, find=arena.find, direct_bytes=LBA_BYTES)
    assert request.parts == [(0, 0, 1)]
    assert span(request.segments) == (arena.registered[0], 5 * LBA_BYTES)


def test_a_tile_that_ends_within_a_block_goes_straight_but_for_its_end() -> None:
    arena = Arena()
    start = arena.registered[0] - arena.base
    length = 3 * LBA_BYTES + 17
    op = ReadOp(1, 0, (Segment(arena.view(start, length), length), Segment(None, LBA_BYTES - 17)))
    requests = plan_direct([op], [0], [4 * LBA_BYTES], 1 << 20, find=arena.find, direct_bytes=LBA_BYTES)
    assert [(r.offset_bytes, r.length_bytes) for r in requests] == [(0, 3 * LBA_BYTES), (3 * LBA_BYTES, LBA_BYTES)]
    assert span(requests[0].segments) == (arena.registered[0], 3 * LBA_BYTES)
    assert span(requests[1].segments) is None


def test_short_runs_are_not_worth_a_command() -> None:
    arena = Arena()
    start = arena.registered[0] - arena.base
    op = ReadOp(1, 0, (Segment(arena.view(start, LBA_BYTES), LBA_BYTES), Segment(None, 3 * LBA_BYTES)))
    requests = plan_direct([op], [0], [4 * LBA_BYTES], 1 << 20, find=arena.find, direct_bytes=2 * LBA_BYTES)
    assert len(requests) == 1


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.booleans(), st.integers(1, 6), st.integers(1, 4))
def test_every_byte_goes_where_it_belongs(seed: int, writes: bool, max_blocks: int, direct_blocks: int) -> None:
    rng = random.Random(seed)
    arena = Arena()
    ops: list[ReadOp | WriteOp] = []
    sizes = []
    at = rng.randrange(3) * LBA_BYTES
    memory = 0
    while memory < len(arena.memory) - 8 * LBA_BYTES and len(ops) < 12:
        segments, total = [], 0
        for _ in range(rng.randrange(1, 4)):
            length = rng.choice([LBA_BYTES, 2 * LBA_BYTES, rng.randrange(1, 3 * LBA_BYTES)])
            if rng.random() < 0.2:
                segments.append(Segment(None, length))
            else:
                segments.append(Segment(arena.view(memory, length), length, rng.choice([None, 9])))
                memory += length
            total += length
            if rng.random() < 0.3:
                memory += rng.randrange(1, 5000)  # apart in memory, not in the volume
        if total % LBA_BYTES:
            segments.append(Segment(None, LBA_BYTES - total % LBA_BYTES))
            total += LBA_BYTES - total % LBA_BYTES
        kind = WriteOp if writes else ReadOp
        ops.append(kind(1, at, tuple(segments)))
        sizes.append(total)
        at += total + rng.choice([0, 0, LBA_BYTES])
    volume = bytearray(rng.randbytes(at + LBA_BYTES))
    if writes:
        arena.memory[:] = rng.randbytes(len(arena.memory))
    expected_memory, expected_volume = bytearray(arena.memory), bytearray(volume)
    for op in ops:
        place = op.offset_bytes
        for view, length, _ in op.segments:
            if writes:
                expected_volume[place : place + length] = bytes(length) if view is None else view
            elif view is not None:
                start = address_of(view) - arena.base
                expected_memory[start : start + length] = volume[place : place + length]
            place += length
    requests = plan_direct(
        ops,
        range(len(ops)),
        sizes,
        max_blocks * LBA_BYTES,
        find=arena.find,
        direct_bytes=direct_blocks * LBA_BYTES,
    )
    covered: Counter[int] = Counter()
    for request in requests:
        assert request.length_bytes <= max_blocks * LBA_BYTES
        assert request.offset_bytes % LBA_BYTES == request.length_bytes % LBA_BYTES == 0
        assert sum(length for _, length, _ in request.segments) == request.length_bytes
        covered.update(range(request.offset_bytes, request.offset_bytes + request.length_bytes, LBA_BYTES))
        carry_out(request, volume)
    assert covered == Counter(
        b
        for op, size in zip(ops, sizes, strict=True)
        for b in range(op.offset_bytes, op.offset_bytes + size, LBA_BYTES)
    )
    assert arena.memory == expected_memory
    assert volume == expected_volume
    results: dict[int, object] = {}
    outcomes(ops, requests, results)  # type: ignore[arg-type]
    for i, op in enumerate(ops):
        assert results[i].checksums == tuple(  # type: ignore[attr-defined]
            crc32c(view, seed) if view is not None and seed is not None else None for view, _, seed in op.segments
        )
