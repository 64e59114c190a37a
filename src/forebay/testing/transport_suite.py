"""The conformance suite of transports: subclass `TransportSuite` and provide its two fixtures.

class TestMyTransport(TransportSuite):
@pytest.fixture
def transport(self): ...

@pytest.fixture
def area(self): ...
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from forebay.checksum import crc32c
from forebay.client.transports.base import ReadOp, Segment, Transport, WriteOp
from forebay.errors import DeadlineExceeded, ForebayError, InvalidArgument, Unavailable
from forebay.ids import LBA_BYTES

__all__ = ["Area", "TransportSuite"]

_LONG_MS = 30_000
_AREA_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Area:
    """A range of one volume that the tests may write: 16 MiB or more. ``end_bytes`` is the end of the whole volume."""

    nsid: int
    offset_bytes: int
    length_bytes: int
    end_bytes: int


def _deadline(left_ms: int = _LONG_MS) -> int:
    return time.monotonic_ns() // 1_000_000 + left_ms


def _noise(length_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length_bytes)


def _segments(data: bytes | bytearray, *lengths: int, seed: int | None = None) -> tuple[Segment, ...]:
    """``data`` cut into segments; each is padded to whole blocks with a segment of its own."""
    view, out, at = memoryview(data), [], 0
    for length in lengths or (len(data),):
        out.append(Segment(view[at : at + length], length, seed))
        at += length
        if length % LBA_BYTES:
            out.append(Segment(None, LBA_BYTES - length % LBA_BYTES))
    return tuple(out)


class TransportSuite:
    """What every transport must do (docs/design.md §5, §6.5, §6.7)."""

    @pytest.fixture
    def transport(self) -> Transport:
        """The transport under test, fresh; the fixture closes it."""
        raise NotImplementedError

    @pytest.fixture
    def area(self) -> Area:
        """Where the tests may write."""
        raise NotImplementedError

    def _write(self, transport: Transport, area: Area, offset_bytes: int, data: bytes) -> None:
        op = WriteOp(area.nsid, area.offset_bytes + offset_bytes, _segments(data))
        (outcome,) = transport.write([op], _deadline())
        assert outcome.error is None
        assert outcome.quiesced

    def _read(self, transport: Transport, area: Area, offset_bytes: int, length_bytes: int) -> bytes:
        into = bytearray(length_bytes)
        op = ReadOp(area.nsid, area.offset_bytes + offset_bytes, _segments(into))
        (outcome,) = transport.read([op], _deadline())
        assert outcome.error is None
        return bytes(into)

    def test_no_operations(self, transport: Transport, area: Area) -> None:
        assert transport.read([], _deadline()) == []
        assert transport.write([], _deadline()) == []

    @pytest.mark.parametrize("length_bytes", [1, 4095, 4096, 4097, 8192, 100_000, 1 << 20, (4 << 20) + 5, 9 << 20])
    def test_what_was_written_is_read(self, transport: Transport, area: Area, length_bytes: int) -> None:
        data = _noise(length_bytes, length_bytes)
        self._write(transport, area, 0, data)
        assert self._read(transport, area, 0, length_bytes) == data

    def test_padding_is_written_as_zeros(self, transport: Transport, area: Area) -> None:
        self._write(transport, area, 0, b"\xff" * 2 * LBA_BYTES)
        self._write(transport, area, 0, b"x" * 5000)
        assert self._read(transport, area, 0, 2 * LBA_BYTES) == b"x" * 5000 + bytes(2 * LBA_BYTES - 5000)

    @pytest.mark.parametrize("length_bytes", [1, 4096, 300_000, 3 << 20, (5 << 20) + 1])
    def test_checksums_of_reads_and_writes(self, transport: Transport, area: Area, length_bytes: int) -> None:
        data = _noise(length_bytes, 7)
        expected = crc32c(data, 0x1234)
        offset = area.offset_bytes
        (written,) = transport.write([WriteOp(area.nsid, offset, _segments(data, seed=0x1234))], _deadline())
        assert written.checksums[0] == expected
        into = bytearray(length_bytes)
        (read,) = transport.read([ReadOp(area.nsid, offset, _segments(into, seed=0x1234))], _deadline())
        assert read.checksums[0] == expected
        assert all(checksum is None for checksum in read.checksums[1:])

    def test_several_tiles_in_one_operation(self, transport: Transport, area: Area) -> None:
        lengths = [3, 4096, 70_000, 1, 262_144, 12_288, 5]
        data = _noise(sum(lengths), 3)
        offset = area.offset_bytes + LBA_BYTES
        (written,) = transport.write([WriteOp(area.nsid, offset, _segments(data, *lengths, seed=9))], _deadline())
        into = bytearray(len(data))
        (read,) = transport.read([ReadOp(area.nsid, offset, _segments(into, *lengths, seed=9))], _deadline())
        assert into == data
        assert read.checksums == written.checksums
        assert [c for c in read.checksums if c is not None] == [
            crc32c(data[sum(lengths[:i]) : sum(lengths[: i + 1])], 9) for i in range(len(lengths))
        ]

    def test_reading_into_nowhere(self, transport: Transport, area: Area) -> None:
        data = _noise(3 * LBA_BYTES, 4)
        self._write(transport, area, 0, data)
        into = bytearray(LBA_BYTES)
        segments = (Segment(None, LBA_BYTES), Segment(memoryview(into), LBA_BYTES), Segment(None, LBA_BYTES))
        (outcome,) = transport.read([ReadOp(area.nsid, area.offset_bytes, segments)], _deadline())
        assert outcome.error is None
        assert into == data[LBA_BYTES : 2 * LBA_BYTES]

    def test_many_operations_answer_in_order(self, transport: Transport, area: Area) -> None:
        """Neighbours, gaps, and both directions."""
        count, step = 200, 16 << 10
        blocks = [_noise(step, i) for i in range(count)]
        order = [*range(0, count, 2), *range(count - 1, 0, -2)]
        ops = [WriteOp(area.nsid, area.offset_bytes + i * step, _segments(blocks[i], seed=i)) for i in order]
        outcomes = transport.write(ops, _deadline())
        assert [o.checksums[0] for o in outcomes] == [crc32c(blocks[i], i) for i in order]
        into = [bytearray(step) for _ in range(count)]
        reads = [ReadOp(area.nsid, area.offset_bytes + i * step, _segments(into[i], seed=i)) for i in range(count)]
        outcomes = transport.read(reads, _deadline())
        assert [o.checksums[0] for o in outcomes] == [crc32c(block, i) for i, block in enumerate(blocks)]
        assert into == blocks

    def test_one_bad_operation_spoils_no_other(self, transport: Transport, area: Area) -> None:
        data = _noise(2 * LBA_BYTES, 5)
        self._write(transport, area, 0, data)
        into = bytearray(2 * LBA_BYTES)
        beyond = bytearray(LBA_BYTES)
        ops = [
            ReadOp(area.nsid, area.offset_bytes, _segments(into)),
            ReadOp(area.nsid, area.end_bytes, _segments(beyond)),
            ReadOp(0xFFFF, 0, _segments(beyond)),
        ]
        good, outside, unknown = transport.read(ops, _deadline())
        assert good.error is None
        assert into == data
        assert isinstance(outside.error, ForebayError)
        assert isinstance(unknown.error, ForebayError)
        assert self._read(transport, area, 0, len(data)) == data, "the transport must be usable after that"

    @pytest.mark.parametrize(
        ("offset_bytes", "segments"),
        [
            (1, (Segment(memoryview(bytearray(4096)), 4096),)),
            (-4096, (Segment(memoryview(bytearray(4096)), 4096),)),
            (0, (Segment(memoryview(bytearray(100)), 100),)),
            (0, ()),
            (0, (Segment(memoryview(bytearray(4096)), 0),)),
            (0, (Segment(memoryview(bytearray(10)), 4096),)),
            (0, (Segment(memoryview(bytes(4096)), 4096),)),
            (0, (Segment(memoryview(bytearray(8192))[::2], 4096),)),
            (0, (Segment(None, 4096, 1),)),
        ],
    )
    def test_malformed_operations_raise(
        self, transport: Transport, area: Area, offset_bytes: int, segments: tuple[Segment, ...]
    ) -> None:
        with pytest.raises(InvalidArgument):
            transport.read([ReadOp(area.nsid, offset_bytes, segments)], _deadline())

    def test_a_deadline_that_has_passed(self, transport: Transport, area: Area) -> None:
        self._write(transport, area, 0, b"a" * LBA_BYTES)
        into = bytearray(b"untouched " * 410)[:LBA_BYTES]
        before = bytes(into)
        (read,) = transport.read([ReadOp(area.nsid, area.offset_bytes, _segments(into))], _deadline(-1))
        assert isinstance(read.error, DeadlineExceeded)
        assert into == before
        (written,) = transport.write(
            [WriteOp(area.nsid, area.offset_bytes, _segments(b"b" * LBA_BYTES))], _deadline(-1)
        )
        assert isinstance(written.error, DeadlineExceeded)
        assert written.quiesced, "nothing was sent"
        assert self._read(transport, area, 0, LBA_BYTES) == b"a" * LBA_BYTES

    def test_threads_share_a_transport(self, transport: Transport, area: Area) -> None:
        threads, rounds, size = 8, 12, 96 << 10
        share = area.length_bytes // threads // LBA_BYTES * LBA_BYTES

        def work(number: int) -> None:
            rng = random.Random(number)
            for turn in range(rounds):
                data = rng.randbytes(rng.randrange(1, size))
                at = number * share + rng.randrange(0, (share - size) // LBA_BYTES) * LBA_BYTES
                self._write(transport, area, at, data)
                assert self._read(transport, area, at, len(data)) == data, f"thread {number}, turn {turn}"

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, number) for number in range(threads)]:
                done.result()

    def test_closed(self, transport: Transport, area: Area) -> None:
        transport.connect(_deadline())
        transport.close()
        transport.close()
        into = bytearray(LBA_BYTES)
        (read,) = transport.read([ReadOp(area.nsid, area.offset_bytes, _segments(into))], _deadline())
        (written,) = transport.write([WriteOp(area.nsid, area.offset_bytes, _segments(into))], _deadline())
        assert isinstance(read.error, Unavailable)
        assert isinstance(written.error, Unavailable)
        with pytest.raises(Unavailable):
            transport.connect(_deadline())

    def test_state(self, transport: Transport, area: Area) -> None:
        transport.connect(_deadline())
        state = transport.state()
        assert state.connected
        assert not state.breaker_open
        assert area.length_bytes >= _AREA_BYTES
