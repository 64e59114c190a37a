"""The NVMe/RDMA transport above the device: the conformance suite, and targets that lie (docs/design.md §6.1, §6.5)."""

import os
import random
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checksum import crc32c
from forebay.client.device import DeviceView
from forebay.client.registered import register
from forebay.client.transports.base import DeviceReadOp, DeviceSegment, Outcome, ReadOp, Segment, Transport, WriteOp
from forebay.client.transports.nvme_rdma_link import Response, Sent
from forebay.client.transports.nvme_rdma_queue import RdmaQueue
from forebay.client.transports.requests import Request
from forebay.clock import SystemClock
from forebay.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ForebayError,
    InvalidArgument,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
    WriteFenced,
)
from forebay.ids import LBA_BYTES
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command, identify
from forebay.nvmetcp.spec import IoOpcode, Status
from forebay.testing.transport_suite import Area, TransportSuite
from tests.client import rdma_peer
from tests.client.conftest import eventually, now_ms
from tests.client.rdma_peer import IN_CAPSULE_BYTES, Peer, StandInTensor, Wire
from tests.conftest import LONG

SIZE = 256 << 10
SHORT_MS = 100
"""All of which a call waits that gets no answer."""
LONG_MS = 20_000


class TestStaged(TransportSuite):
    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        one = rdma_peer.Transport(Peer(32 << 20), connections=4)
        yield one
        one.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, 1 << 20, 24 << 20, 32 << 20)


class TestRegistered(TestStaged):
    """Straight to and from the caller's memory, whatever of it fits."""

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        one = Registering(Peer(32 << 20), connections=4, direct_bytes=LBA_BYTES)
        yield one
        one.close()


class Registering(rdma_peer.Transport):
    """Registers whatever it is given for as long as a call takes."""

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        with ExitStack() as held:
            self._register(held, ops)
            return super().read(ops, deadline_ms)

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        with ExitStack() as held:
            self._register(held, ops)
            return super().write(ops, deadline_ms)

    @staticmethod
    def _register(held: ExitStack, ops: Sequence[ReadOp | WriteOp]) -> None:
        buffers = {id(s.view.obj): s.view.obj for op in ops for s in op.segments if s.view is not None}
        for buffer in buffers.values():
            if not memoryview(buffer).readonly:
                held.enter_context(register(buffer))


class TestLittleStaging(TestStaged):
    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        one = rdma_peer.Transport(Peer(32 << 20), max_command_bytes=64 << 10, staging_bytes=192 << 10)
        yield one
        one.close()


@pytest.fixture
def peer() -> Peer:
    peer = Peer(2 << 20)
    peer.volume[:] = os.urandom(len(peer.volume))
    return peer


@pytest.fixture
def transport(peer: Peer) -> Iterator[rdma_peer.Transport]:
    one = rdma_peer.Transport(peer)
    yield one
    one.close()
    assert len(peer.closed) == len(peer.wires), "every connection is closed"


def read(one: Transport, into: bytearray, left_ms: int = LONG_MS, at: int = 0) -> Outcome:
    return one.read([ReadOp(1, at, (Segment(memoryview(into), len(into), 5),))], now_ms() + left_ms)[0]


def write(one: Transport, data: bytes | bytearray, left_ms: int = LONG_MS, at: int = 0) -> Outcome:
    return one.write([WriteOp(1, at, (Segment(memoryview(data), len(data), 5),), 0xABCD)], now_ms() + left_ms)[0]


def works(peer: Peer, one: Transport) -> None:
    """A target that tells the truth again is believed."""
    peer.lie = lambda *_: False
    into = bytearray(SIZE)
    outcome = read(one, into)
    assert outcome.error is None
    assert outcome.checksums == (crc32c(into, 5),)
    assert into == peer.volume[:SIZE]


def hold(wire: Wire, command: Command, key: int) -> bool:
    wire.held.append(command)
    return True


def late(peer: Peer, call: Callable[[], Outcome]) -> Outcome:
    """A call whose command the target held for too long; on a busy machine calls may be late before they send one."""
    outcomes: list[Outcome] = []

    def held() -> bool:
        outcomes.append(call())
        assert isinstance(outcomes[-1].error, DeadlineExceeded)
        return any(wire.held for wire in peer.wires)

    peer.lie = hold
    eventually(held, "a command is under way")
    return outcomes[-1]


def refuse(wire: Wire, command: Command, key: int) -> bool:
    wire.respond(command.cid, Status.ACCESS_DENIED)
    return True


def by_no_key(wire: Wire, command: Command, key: int) -> bool:
    wire.io(command, key ^ 1)
    return True


def test_writes_carry_their_tag_and_short_ones_their_data(peer: Peer, transport: rdma_peer.Transport) -> None:
    data = os.urandom(IN_CAPSULE_BYTES + LBA_BYTES)
    assert write(transport, data[:IN_CAPSULE_BYTES]).error is None
    assert write(transport, data, at=1 << 20).error is None
    short, long = [c for wire in peer.wires for c in wire.commands if wire.queue_id and c.opcode == IoOpcode.WRITE]
    assert (short.sgl_kind, short.sgl_address) == (spec.SGL_DATA_BLOCK_OFFSET, 0)
    assert long.sgl_kind == 0x40
    assert short.reference_tag == long.reference_tag == 0xABCD
    assert peer.volume[:IN_CAPSULE_BYTES] == data[:IN_CAPSULE_BYTES]
    assert peer.volume[1 << 20 :][: len(data)] == data


def test_registered_memory_is_reached_without_a_copy(peer: Peer, transport: rdma_peer.Transport) -> None:
    into = bytearray(SIZE)
    registration = register(into)
    outcome = read(transport, into)
    assert (outcome.error, outcome.checksums) == (None, (crc32c(into, 5),))
    assert into == peer.volume[:SIZE]
    into[:] = os.urandom(SIZE)
    assert write(transport, into, at=1 << 20).error is None
    assert peer.volume[1 << 20 :][:SIZE] == into
    (wire,) = [wire for wire in peer.wires if wire.queue_id]
    start = registration.address
    registration.close()
    moves = [command for command in wire.commands if command.opcode in (IoOpcode.READ, IoOpcode.WRITE)]
    assert [(command.sgl_address, command.sgl_length_bytes) for command in moves] == [(start, SIZE)] * 2


def test_responses_before_the_capsules_are_sent_and_in_any_order(peer: Peer) -> None:
    """A completion of the response may be seen before that of the send (InfiniBand architecture §9.9)."""
    one = rdma_peer.Transport(peer, max_command_bytes=LBA_BYTES)

    def late(wire: Wire, command: Command, key: int) -> bool:
        wire.held.append(command)
        if len(wire.held) < SIZE // LBA_BYTES:
            return True
        for sent in [event for event in wire.events if isinstance(event, Sent)]:
            wire.events.remove(sent)
        for waiting in reversed(wire.held):
            wire.io(waiting, key)
        wire.say(*(Sent(waiting.cid) for waiting in wire.held))
        wire.held.clear()
        return True

    peer.lie = late
    into = bytearray(SIZE)
    assert read(one, into).error is None
    assert into == peer.volume[:SIZE]
    (wire,) = [wire for wire in peer.wires if wire.queue_id]
    assert not wire.events, "no capsule's memory serves again before it was sent"
    one.close()


def answer(raw: bytes) -> Callable[[Wire, Command, int], bool]:
    def lie(wire: Wire, command: Command, key: int) -> bool:
        wire.say(Response(raw, len(raw)))
        return True

    return lie


def twice(wire: Wire, command: Command, key: int) -> bool:
    wire.respond(command.cid)
    wire.respond(command.cid)
    return True


@pytest.mark.parametrize(
    "lie", [answer(b"\0" * 8), answer(spec.CQE.pack(0, 0, 1, 99, 0)), answer(spec.CQE.pack(0, 0, 1, 0xFFFF, 0)), twice]
)
def test_nonsense_ends_the_connection(
    peer: Peer, transport: rdma_peer.Transport, lie: Callable[[Wire, Command, int], bool]
) -> None:
    peer.lie = lie
    outcome = read(transport, bytearray(SIZE))
    # A second response may come after the call has its own: then the next call finds it.
    assert outcome.error is None if lie is twice else isinstance(outcome.error, ProtocolError)
    works(peer, transport)
    assert len([wire for wire in peer.wires if wire.queue_id]) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [(Status.UNRECOVERED_READ_ERROR, TargetFailed), (Status.INVALID_NAMESPACE, TargetRefused), (0x7FF, TargetFailed)],
)
def test_a_status_concerns_its_command_alone(
    peer: Peer, transport: rdma_peer.Transport, status: int, error: type[ForebayError]
) -> None:
    def lie(wire: Wire, command: Command, key: int) -> bool:
        wire.respond(command.cid, status)
        return True

    peer.lie = lie
    outcome = read(transport, bytearray(SIZE))
    assert isinstance(outcome.error, error)
    assert outcome.quiesced
    works(peer, transport)
    assert transport.state().connections == 1
    assert len([wire for wire in peer.wires if wire.queue_id]) == 1


def test_who_stops_half_way_comes_back(peer: Peer) -> None:
    """A device tells of a completion once: what was left there would be waited for in vain."""
    wire = Wire(peer, 1, 1 << 20)
    queue = RdmaQueue(wire, SystemClock(), peer.find, lambda like: peer.gpu(1 << 20))
    queue.set_depth(8)
    poller = select.poll()
    poller.register(queue.fd, select.POLLIN)
    into = bytearray(4 * LBA_BYTES)
    for i in range(4):
        view = memoryview(into)[i * LBA_BYTES : (i + 1) * LBA_BYTES]
        queue.submit(Request(1, i * LBA_BYTES, LBA_BYTES, [Segment(view, LBA_BYTES)], write=False))
    queue.flush()
    turns = 0
    while queue.in_flight:
        assert poller.poll(30_000)
        assert queue.receive(1), "there is more"
        turns += 1
    assert turns > 4
    assert into == peer.volume[: len(into)]
    assert poller.poll(30_000)
    assert not queue.receive(1)
    assert not poller.poll(0), "nothing is left"
    queue.close()


@pytest.mark.parametrize("registered", [False, True])
def test_what_is_late_finds_no_connection(peer: Peer, transport: rdma_peer.Transport, registered: bool) -> None:
    works(peer, transport)  # to connect may take longer than what is left below
    into = bytearray(b"\xaa" * SIZE)
    with register(into) if registered else nullcontext():
        late(peer, lambda: read(transport, into, left_ms=SHORT_MS))
    (wire,) = [wire for wire in peer.wires if wire.queue_id]
    assert wire.closed, "before the call returned"
    assert wire.proven is registered, "no device may reach a caller's memory; the queue's own may have to wait"
    assert into == b"\xaa" * SIZE
    works(peer, transport)


def test_a_device_that_lets_no_idle_queue_go_keeps_nobody_waiting(peer: Peer) -> None:
    """The thread that found the queue broken waits for the device; the others have theirs meanwhile."""
    one = rdma_peer.Transport(peer, connections=2)
    works(peer, one)
    (first,) = [wire for wire in peer.wires if wire.queue_id]
    asked, confirmed = threading.Event(), threading.Event()

    def ending(wire: rdma_peer.Wire) -> None:
        if wire is first:
            asked.set()
            assert confirmed.wait(60)

    peer.ending = ending
    first.break_off("the target closed the connection")
    into = bytearray(SIZE)
    waiting = threading.Thread(target=lambda: read(one, into))
    waiting.start()
    assert asked.wait(30)
    works(peer, one)
    assert one.state().connected
    assert not first.closed
    confirmed.set()
    waiting.join(30)
    assert into == peer.volume[:SIZE]
    assert first.closed and first.proven is False, "a thread may do it where the device refuses for long"
    one.close()


@pytest.mark.parametrize("quiesced", [False, True])
def test_a_write_says_whether_it_may_still_happen(peer: Peer, transport: rdma_peer.Transport, quiesced: bool) -> None:
    works(peer, transport)
    data = os.urandom(SIZE)
    if quiesced:
        peer.lie = refuse
        assert isinstance(write(transport, data).error, WriteFenced)
        assert write(transport, data).quiesced
    else:
        assert not late(peer, lambda: write(transport, data, left_ms=SHORT_MS)).quiesced


def test_a_connection_that_breaks_in_the_middle(peer: Peer, transport: rdma_peer.Transport) -> None:
    def lie(wire: Wire, command: Command, key: int) -> bool:
        wire.break_off("the target closed the connection")
        return True

    peer.lie = lie
    into = bytearray(b"\xaa" * SIZE)
    outcome = read(transport, into)
    assert isinstance(outcome.error, ConnectionLost)
    assert into == b"\xaa" * SIZE
    works(peer, transport)


def test_a_key_that_is_none(peer: Peer, transport: rdma_peer.Transport) -> None:
    peer.lie = by_no_key
    assert isinstance(read(transport, bytearray(SIZE)).error, ConnectionLost)
    works(peer, transport)


def test_a_target_without_keyed_sgls_is_refused(peer: Peer, transport: rdma_peer.Transport) -> None:
    peer.sgls = 1
    assert isinstance(read(transport, bytearray(SIZE)).error, TargetRefused)
    peer.sgls = 5
    eventually(lambda: read(transport, bytearray(SIZE)).error is None, "it is asked again")


def test_a_subsystem_that_is_not_there(peer: Peer) -> None:
    one = rdma_peer.Transport(peer, nqn="nqn.2026-01.io.forebay:other")
    assert isinstance(read(one, bytearray(SIZE)).error, TargetRefused)
    one.close()
    assert len(peer.closed) == len(peer.wires)


def test_the_breaker(peer: Peer) -> None:
    peer.refuses = True
    one = rdma_peer.Transport(peer, backoff_ms=(60_000, 60_000))
    assert isinstance(read(one, bytearray(SIZE)).error, ConnectionLost)
    assert one.state().breaker_open
    assert isinstance(read(one, bytearray(SIZE)).error, Unavailable)
    one.close()


def test_a_dead_admin_queue_ends_the_association(peer: Peer, transport: rdma_peer.Transport) -> None:
    works(peer, transport)
    next(wire for wire in peer.wires if not wire.queue_id).break_off("the target closed the connection")
    works(peer, transport)
    assert transport.state().reconnects == 1


def test_keep_alive(peer: Peer) -> None:
    one = rdma_peer.Transport(peer, keep_alive_ms=3_000)  # of which the thread that asks has a third
    one.connect(now_ms() + LONG_MS)
    (admin,) = peer.wires
    eventually(lambda: sum(c.opcode == 0x18 for c in admin.commands) >= 2, "it is kept alive")
    one.close()


def test_closing_waits_for_no_command(peer: Peer, transport: rdma_peer.Transport) -> None:
    peer.lie = hold
    into = bytearray(b"\xaa" * SIZE)
    outcomes: list[Outcome] = []
    reading = threading.Thread(target=lambda: outcomes.append(read(transport, into)))
    reading.start()
    eventually(lambda: any(wire.held for wire in peer.wires), "it is under way")
    transport.close()
    reading.join(30)
    assert isinstance(outcomes[0].error, Unavailable)
    assert into == b"\xaa" * SIZE


def device_read(one: Transport, into: StandInTensor, *lengths: int, left_ms: int = LONG_MS) -> Outcome:
    segments, at = [], 0
    for length in lengths:
        segments.append(DeviceSegment(DeviceView(into[at : at + length]), length, 5))
        at += length
        if length % LBA_BYTES:
            segments.append(DeviceSegment(None, LBA_BYTES - length % LBA_BYTES))
    return one.read_device([DeviceReadOp(1, 0, tuple(segments))], now_ms() + left_ms)[0]


def test_reads_into_a_device_go_by_staging_memory_there(peer: Peer) -> None:
    one = rdma_peer.Transport(peer, device_memory=True, max_command_bytes=64 << 10, staging_bytes=128 << 10)
    assert one.capabilities.device_memory
    lengths = [5000, 70_000, LBA_BYTES, 300_001]
    into = StandInTensor(np.zeros(sum(lengths), np.uint8))
    outcome = device_read(one, into, *lengths)
    assert outcome.error is None
    at = start = 0
    sums = []
    for length in lengths:
        expected = peer.volume[at : at + length]
        assert into.array[start : start + length].tobytes() == expected
        sums.append(crc32c(expected, 5))
        start += length
        at += -(-length // LBA_BYTES) * LBA_BYTES
    assert [found for found in outcome.checksums if found is not None] == sums
    (gpu,) = peer.gpus
    moves = [c for wire in peer.wires for c in wire.commands if wire.queue_id and c.opcode == IoOpcode.READ]
    assert all(gpu.address <= c.sgl_address < gpu.address + (128 << 10) for c in moves)
    works(peer, one)
    one.close()
    assert gpu.closed


def test_what_is_late_for_a_device_leaves_it_alone(peer: Peer) -> None:
    one = rdma_peer.Transport(peer, device_memory=True)
    into = StandInTensor(np.full(SIZE, 0xAA, np.uint8))
    late(peer, lambda: device_read(one, into, SIZE, left_ms=SHORT_MS))
    assert peer.gpus[-1].closed, "before the call returned"
    assert (into.array == 0xAA).all()
    peer.lie = lambda *_: False
    assert device_read(one, into, SIZE).error is None
    assert into.array.tobytes() == peer.volume[:SIZE]
    one.close()


def test_a_copy_on_the_device_that_fails_fails_the_read(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise Unavailable("copying on stand-in:0: out of memory")

    monkeypatch.setattr(rdma_peer.StandInGpu, "scatter", failing)
    one = rdma_peer.Transport(peer, device_memory=True)
    outcome = device_read(one, StandInTensor(np.zeros(SIZE, np.uint8)), SIZE)
    assert isinstance(outcome.error, Unavailable)
    assert outcome.checksums == (None,)
    works(peer, one)
    one.close()


def test_without_the_option_there_is_no_way_to_a_device(transport: rdma_peer.Transport) -> None:
    assert not transport.capabilities.device_memory
    with pytest.raises(InvalidArgument):
        device_read(transport, StandInTensor(np.zeros(SIZE, np.uint8)), SIZE)


def test_an_answer_counts_though_its_end_is_right_behind_it(peer: Peer) -> None:
    """A target that refuses a host says why, and closes."""
    wire = Wire(peer, 0, 64 << 10)
    queue = RdmaQueue(wire, SystemClock(), peer.find, lambda like: peer.gpu(1 << 20))
    take = wire.take

    def closing(command: Command, key: int, inline: bytes | None) -> None:
        take(command, key, inline)
        wire.break_off("the target closed the connection")

    wire.take = closing  # type: ignore[method-assign]
    completion, raw = queue.execute(identify(0, spec.CnsValue.CONTROLLER), now_ms() + LONG_MS, read_bytes=4096)
    assert completion.status == 0
    assert any(raw)
    assert not queue.usable()
    queue.close()


class Whims:
    """A target that does with each command what a seed says, and with those that it held back whatever comes later."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.held: list[tuple[Wire, Command, int]] = []

    def __call__(self, wire: Wire, command: Command, key: int) -> bool:
        whim = self.random.choices(
            ["answer", "hold", "release", "fail", "break", "nonsense", "bad key"], [30, 20, 20, 4, 1, 1, 1]
        )[0]
        if whim == "answer":
            return False
        self.held.append((wire, command, key))
        if whim == "release":
            self.release()
        elif whim == "fail":
            self.held.pop()
            wire.respond(command.cid, self.random.choice([Status.UNRECOVERED_READ_ERROR, Status.ACCESS_DENIED, 0x7FF]))
        elif whim == "break":
            wire.break_off("the target closed the connection")
        elif whim == "nonsense":
            wire.respond(self.random.choice([command.cid, 200, 0xFFFF]), 0)
            return False
        elif whim == "bad key":
            self.held.pop()
            wire.io(command, key ^ 1)
        return True

    def release(self) -> None:
        """Carry out what was held back, in any order."""
        self.random.shuffle(self.held)
        while self.held:
            wire, command, key = self.held.pop()
            wire.io(command, key)


@settings(deadline=None, max_examples=300 if LONG else 60)
@given(st.integers(0, 1 << 32), st.booleans(), st.booleans())
def test_no_order_of_answers_makes_a_wrong_byte(seed: int, registered: bool, writes: bool) -> None:
    """What succeeded is right; what was given back is left alone, whatever the target does later."""
    rng = random.Random(seed)
    peer = Peer(1 << 20)
    truth = rng.randbytes(len(peer.volume))
    peer.volume[:] = truth
    one = rdma_peer.Transport(
        peer,
        connections=rng.choice([1, 3]),
        call_connections=3,
        max_command_bytes=rng.choice([LBA_BYTES, 4 * LBA_BYTES]),
        staging_bytes=rng.choice([4, 16]) * LBA_BYTES,
        direct_bytes=LBA_BYTES,
        queue_bytes=rng.choice([1, 1 << 20]),
    )
    whims = peer.lie = Whims(seed)
    count = rng.randrange(1, 24)
    arena = bytearray(rng.randbytes(count * 3 * LBA_BYTES) if writes else b"\xaa" * (count * 3 * LBA_BYTES))
    pieces = [memoryview(arena)[i * 3 * LBA_BYTES :][: rng.randrange(1, 3 * LBA_BYTES)] for i in range(count)]
    places = rng.sample(range(0, len(truth) - 3 * LBA_BYTES, 3 * LBA_BYTES), count)
    ops: list[ReadOp | WriteOp] = []
    for view, at in zip(pieces, places, strict=True):
        gap = -len(view) % LBA_BYTES
        segments = (Segment(view, len(view), at), *([Segment(None, gap)] if gap else []))
        ops.append(WriteOp(1, at, segments) if writes else ReadOp(1, at, segments))
    call = one.write if writes else one.read
    with register(arena) if registered else nullcontext():
        outcomes = call(ops, now_ms() + 100)  # type: ignore[arg-type]
        returned, stored = bytes(arena), bytes(peer.volume)
        whims.release()
        assert arena == returned, "a buffer was written to after its call had returned"
    assert one.state().connections <= 3
    one.close()
    for op, view, outcome in zip(ops, pieces, outcomes, strict=True):
        at = op.offset_bytes
        if outcome.error is None:
            assert outcome.checksums[0] == crc32c(view, at)
            assert bytes(view) == (stored if writes else truth)[at : at + len(view)]
        if writes and outcome.quiesced:
            assert peer.volume[at : at + 3 * LBA_BYTES] == stored[at : at + 3 * LBA_BYTES], "it reached media later"
