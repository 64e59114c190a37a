"""What the initiator does with targets that lie, fall silent or go away (docs/design.md §6.1, §6.5, §6.7)."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.checksum import crc32c
from forebay.client.transports import controller
from forebay.client.transports.base import Outcome, ReadOp, Segment, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.clock import Clock, SystemClock
from forebay.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ForebayError,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
    VolumeMismatch,
    WriteFenced,
)
from forebay.nvmetcp import pdu
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.spec import DNR, AdminOpcode, FabricsType, FatalError, PduType, Status
from tests.client.conftest import eventually, new_host, now_ms
from tests.client.peer import NGUID, NQN, Link, Peer, truth

SIZE = 1 << 20
LONG_MS = 20_000


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(2 * SIZE) as peer:
        peer.volume[:] = os.urandom(len(peer.volume))
        yield peer


def transport_to(
    peer: Peer, *, nguid: str = NGUID.hex(), clock: Clock | None = None, **options: object
) -> NvmeTcpTransport:
    settings = NvmeTcpOptions(**{"connections": 1, "backoff_ms": (1, 1), **options})  # type: ignore[arg-type]
    address = SubsystemAddress("127.0.0.1", peer.port, NQN)
    return NvmeTcpTransport(address, new_host(), nguids={1: nguid}, options=settings, clock=clock)


@pytest.fixture
def transport(peer: Peer) -> Iterator[NvmeTcpTransport]:
    transport = transport_to(peer)
    yield transport
    transport.close()


def read(transport: NvmeTcpTransport, into: bytearray, left_ms: int = LONG_MS, at: int = 0) -> Outcome:
    op = ReadOp(1, at, (Segment(memoryview(into), len(into), 5),))
    return transport.read([op], now_ms() + left_ms)[0]


def write(transport: NvmeTcpTransport, data: bytes, left_ms: int = LONG_MS) -> Outcome:
    return transport.write([WriteOp(1, 0, (Segment(memoryview(data), len(data), 5),))], now_ms() + left_ms)[0]


def works(peer: Peer, transport: NvmeTcpTransport) -> None:
    """The transport is, or becomes, usable once the target tells the truth."""
    peer.lie = truth
    into = bytearray(SIZE)

    def good() -> bool:
        return read(transport, into).error is None

    eventually(good, "a good read")
    assert into == peer.volume[:SIZE]


def raw_data(cid: int, offset: int, data: bytes, *, last: bool, success: bool) -> bytes:
    return pdu.c2h_data_header(cid, offset, len(data), last=last, success=success) + data


def short_then_success(link: Link, command: Command) -> None:
    link.send(raw_data(command.cid, 0, bytes(4096), last=True, success=True))


def nothing_but_success(link: Link, command: Command) -> None:
    link.send(pdu.capsule_resp(0, 0, 1, command.cid, 0))


def of_another_command(link: Link, command: Command) -> None:
    link.send(raw_data(command.cid + 1 & 0xFFFF, 0, bytes(4096), last=False, success=False))


def too_much(link: Link, command: Command) -> None:
    link.send(raw_data(command.cid, 0, bytes(SIZE + 4096), last=True, success=True))


def out_of_order(link: Link, command: Command) -> None:
    link.send(raw_data(command.cid, 4096, bytes(4096), last=False, success=False))


def answered_twice(link: Link, command: Command) -> None:
    truth(link, command)
    link.send(pdu.capsule_resp(0, 0, 1, command.cid, 0))


def garbage(link: Link, command: Command) -> None:
    link.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def terminated(link: Link, command: Command) -> None:
    link.send(pdu.term_req(from_host=False, fatal_error=FatalError.SEQUENCE_ERROR))


def of_the_other_role(link: Link, command: Command) -> None:
    link.send(pdu.h2c_data_header(command.cid, 0, 0, 4096, last=True), bytes(4096))


def r2t_for_a_read(link: Link, command: Command) -> None:
    link.send(pdu.r2t(command.cid, 1, 0, 4096))


@pytest.mark.parametrize(
    "lie",
    [
        short_then_success,
        nothing_but_success,
        of_another_command,
        too_much,
        out_of_order,
        garbage,
        terminated,
        of_the_other_role,
        r2t_for_a_read,
    ],
)
def test_broken_protocol_ends_the_connection(
    peer: Peer, transport: NvmeTcpTransport, lie: Callable[[Link, Command], None]
) -> None:
    peer.lie = lie
    outcome = read(transport, bytearray(SIZE))
    assert isinstance(outcome.error, ProtocolError)
    assert outcome.checksums == (None,)
    works(peer, transport)


def test_the_target_is_told_what_it_did_wrong(peer: Peer, transport: NvmeTcpTransport) -> None:
    told: list[bytes] = []
    heard = threading.Event()

    def lie(link: Link, command: Command) -> None:
        out_of_order(link, command)
        told.append(link.sock.recv(200))
        heard.set()

    peer.lie = lie
    assert isinstance(read(transport, bytearray(SIZE)).error, ProtocolError)
    assert heard.wait(60)
    assert told[0][0] == PduType.H2C_TERM_REQ


def test_an_answer_too_many_spoils_only_the_connection(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.lie = answered_twice
    into = bytearray(SIZE)
    read(transport, into)  # good or not, depending on when the second answer arrives
    works(peer, transport)


def test_wrong_bytes_have_a_wrong_checksum(peer: Peer, transport: NvmeTcpTransport) -> None:
    def lie(link: Link, command: Command) -> None:
        data = bytearray(peer.volume[:SIZE])
        data[SIZE // 2] ^= 1
        link.send_data(command.cid, bytes(data))

    peer.lie = lie
    outcome = read(transport, bytearray(SIZE))
    assert outcome.error is None
    assert outcome.checksums != (crc32c(peer.volume[:SIZE], 5),)


def test_many_small_pdus_and_a_response_of_its_own(peer: Peer, transport: NvmeTcpTransport) -> None:
    def lie(link: Link, command: Command) -> None:
        for at in range(0, SIZE, 5000):
            piece = peer.volume[at : min(at + 5000, SIZE)]
            last = at + len(piece) == SIZE
            link.send(link.codec.send_c2h_data(command.cid, len(piece), offset_bytes=at, last=last), piece)
        link.respond(command.cid)

    peer.lie = lie
    into = bytearray(SIZE)
    assert read(transport, into).checksums == (crc32c(peer.volume[:SIZE], 5),)
    assert into == peer.volume[:SIZE]


@pytest.mark.parametrize("pdo", [128, 200, 252])
def test_data_that_starts_far_behind_its_header(peer: Peer, transport: NvmeTcpTransport, pdo: int) -> None:
    """PDO is a byte and need not be the least possible. TCP §3.6.1."""

    def lie(link: Link, command: Command) -> None:
        header = pdu.c2h_data_header(command.cid, 0, SIZE, last=True, success=True)
        link.send(header[:3] + bytes([pdo]) + (pdo + SIZE).to_bytes(4, "little") + header[8:].ljust(pdo - 8, b"\0"))
        link.send(peer.volume[:SIZE])

    peer.lie = lie
    into = bytearray(SIZE)
    assert read(transport, into).error is None
    assert into == peer.volume[:SIZE]


def test_queues_that_hold_no_command_are_refused(peer: Peer, transport: NvmeTcpTransport) -> None:
    """MQES is at least 1 (Base §3.1.3.1); with 0 there would be no room for a command, ever."""
    peer.capabilities = 1 << 24
    assert isinstance(read(transport, bytearray(SIZE)).error, ProtocolError)
    peer.capabilities = 1 | 1 << 24
    works(peer, transport)


def test_silence_ends_at_the_deadline(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.lie = lambda link, command: None
    start = time.monotonic()
    assert isinstance(read(transport, bytearray(SIZE), 150).error, DeadlineExceeded)
    assert time.monotonic() - start < 10, "bounded by the deadline, not by the peer"
    works(peer, transport)


def test_a_trickle_ends_at_the_deadline(peer: Peer, transport: NvmeTcpTransport) -> None:
    stop = threading.Event()

    def lie(link: Link, command: Command) -> None:
        header = pdu.c2h_data_header(command.cid, 0, SIZE, last=True, success=True)
        while not stop.wait(0.001):
            link.send(header or b"x")
            header = b""

    peer.lie = lie
    try:
        assert isinstance(read(transport, bytearray(SIZE), 200).error, DeadlineExceeded)
    finally:
        stop.set()
    works(peer, transport)


def test_a_silent_target_does_not_hold_up_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = SubsystemAddress("127.0.0.1", listener.getsockname()[1], NQN)
        transport = NvmeTcpTransport(address, new_host())
        assert isinstance(read(transport, bytearray(4096), 100).error, DeadlineExceeded)
        transport.close()


def test_a_connection_closed_halfway(peer: Peer, transport: NvmeTcpTransport) -> None:
    def lie(link: Link, command: Command) -> None:
        link.send(pdu.c2h_data_header(command.cid, 0, SIZE, last=True, success=True), bytes(SIZE // 2))
        link.sock.shutdown(socket.SHUT_RDWR)

    peer.lie = lie
    assert isinstance(read(transport, bytearray(SIZE)).error, ConnectionLost)
    works(peer, transport)


# --- §6.5: a destination buffer is its owner's again when the call returns --------------------------------------------


class Withheld:
    """Sends half of the data, and the rest only when told to."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.rest_sent = threading.Event()
        self.closed_by_client = threading.Event()

    def __call__(self, link: Link, command: Command) -> None:
        half = SIZE // 2
        data = bytes(self.peer.volume[:SIZE])
        link.send(pdu.c2h_data_header(command.cid, 0, SIZE, last=True, success=True), data[:half])
        self.half_sent.set()
        assert self.go_on.wait(60)
        try:
            link.sock.settimeout(60)
            if link.sock.recv(1) == b"":
                self.closed_by_client.set()
            link.sock.sendall(data[half:])
        except OSError:
            self.closed_by_client.set()
        self.rest_sent.set()


def test_late_data_reaches_no_buffer(peer: Peer, transport: NvmeTcpTransport) -> None:
    """A queue with a command in flight is closed at the deadline, before the call returns; never used again."""
    peer.lie = late = Withheld(peer)
    into = bytearray(SIZE)
    assert isinstance(read(transport, into, 200).error, DeadlineExceeded)
    assert late.half_sent.is_set()
    into[:] = b"\xaa" * SIZE  # the owner uses it for something else
    late.go_on.set()
    assert late.rest_sent.wait(60)
    assert late.closed_by_client.is_set(), "the connection was left open"
    works(peer, transport)
    assert into == b"\xaa" * SIZE


class _Interrupting(SystemClock):
    """Raises KeyboardInterrupt when the clock is read after ``armed`` is set."""

    def __init__(self) -> None:
        self.armed: threading.Event | None = None

    def monotonic_ms(self) -> int:
        if self.armed is not None and threading.current_thread() is threading.main_thread() and self.armed.is_set():
            self.armed = None
            raise KeyboardInterrupt
        return super().monotonic_ms()


def test_an_interrupted_call_leaves_no_queue_behind(peer: Peer) -> None:
    clock = _Interrupting()
    transport = transport_to(peer, clock=clock)
    works(peer, transport)
    peer.lie = late = Withheld(peer)
    clock.armed = late.half_sent
    into = bytearray(SIZE)
    with pytest.raises(KeyboardInterrupt):
        read(transport, into)
    into[:] = b"\xaa" * SIZE
    late.go_on.set()
    assert late.rest_sent.wait(60)
    assert late.closed_by_client.is_set(), "the connection was left open"
    works(peer, transport)
    assert into == b"\xaa" * SIZE
    transport.close()


@pytest.mark.parametrize("at", ["counting those there are", "opening another"])
def test_a_call_that_is_interrupted_as_it_connects_keeps_no_queue(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The queue that it had taken already is the next one's."""
    transport = transport_to(peer, connections=2, call_connections=2, queue_bytes=SIZE // 2)
    works(peer, transport)
    association = transport._association
    assert association is not None and len(association.idle) == 2
    transport._drop(association, [association.idle.pop()])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if at == "opening another":
            patched.setattr(transport, "_open_queue", interrupt)
        else:
            patched.setattr(controller.Controller, "queues", property(interrupt))
        with pytest.raises(KeyboardInterrupt):
            read(transport, bytearray(SIZE))
    assert len(association.idle) == 1, "nobody holds it"
    works(peer, transport)
    transport.close()


def test_what_comes_unasked_is_never_taken_for_an_answer(peer: Peer, transport: NvmeTcpTransport) -> None:
    """Bytes that wait on an idle queue: it is closed, not used, since they would be taken for the next command's."""
    works(peer, transport)
    lies = bytes(SIZE)
    link = peer.links[-1]
    link.sock.sendall(raw_data(0, 0, lies, last=True, success=True)[:4096])
    into = bytearray(SIZE)
    assert read(transport, into).error is None
    assert into == peer.volume[:SIZE]
    assert link.sock.fileno() == -1 or link.sock.recv(1) == b""


def test_no_thread_receives_but_the_caller(peer: Peer, transport: NvmeTcpTransport) -> None:
    """The property that makes the rest true by construction."""
    others = set(threading.enumerate())
    works(peer, transport)
    mine = {t.name for t in set(threading.enumerate()) - others if t.name.startswith("forebay")}
    assert mine == {"forebay-keep-alive"}


# --- statuses ---


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.UNRECOVERED_READ_ERROR, TargetFailed),
        (Status.INTERNAL_ERROR, TargetFailed),
        (Status.ACCESS_DENIED | DNR, WriteFenced),
        (Status.INVALID_NAMESPACE | DNR, TargetRefused),
        (0x7FF, TargetFailed),
    ],
)
def test_a_status_is_an_error_and_the_connection_stays(
    peer: Peer, transport: NvmeTcpTransport, status: int, kind: type[ForebayError]
) -> None:
    works(peer, transport)
    before = list(peer.connects)
    peer.lie = lambda link, command: link.respond(command.cid, status)
    outcome = read(transport, bytearray(SIZE))
    assert type(outcome.error) is kind
    works(peer, transport)
    assert peer.connects == before


def test_a_media_error_spoils_no_neighbour(peer: Peer, transport: NvmeTcpTransport) -> None:
    """Neighbours share a command; when it fails, each is asked for alone."""
    commands: list[int] = []

    def lie(link: Link, command: Command) -> None:
        commands.append(command.block_count)
        if command.slba <= 3 < command.slba + command.block_count:
            link.respond(command.cid, Status.UNRECOVERED_READ_ERROR)
        else:
            truth(link, command)

    peer.lie = lie
    into = [bytearray(4096) for _ in range(8)]
    ops = [ReadOp(1, i * 4096, (Segment(memoryview(b), 4096, 5),)) for i, b in enumerate(into)]
    outcomes = transport.read(ops, now_ms() + LONG_MS)
    assert [type(o.error) for o in outcomes] == [TargetFailed if i == 3 else type(None) for i in range(8)]
    assert [o.checksums[0] for i, o in enumerate(outcomes) if i != 3] == [
        crc32c(peer.volume[i * 4096 : (i + 1) * 4096], 5) for i in range(8) if i != 3
    ]
    assert commands == [8] + [1] * 8


def test_an_admin_queue_that_ends_right_behind_its_answer(peer: Peer) -> None:
    """They are read in one go: the association is over, and the next call makes another."""
    answer = Link.admin

    def answer_and_end(link: Link, command: Command) -> None:
        ends = command.opcode == AdminOpcode.IDENTIFY and command.nsid
        if ends:
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # one segment: data and the end
        answer(link, command)
        if ends:
            link.sock.shutdown(socket.SHUT_WR)

    transport = transport_to(peer, connections=2)
    into = bytearray(SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "admin", answer_and_end)
        op = ReadOp(1, 0, (Segment(memoryview(into), len(into)),))
        outcomes = [*transport.read([op, op._replace(nsid=2)], now_ms() + LONG_MS), read(transport, into)]
    assert all(isinstance(outcome.error, ConnectionLost | ProtocolError) for outcome in outcomes)
    works(peer, transport)
    transport.close()


# --- writes ---


def test_a_fenced_write_is_quiesced(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.write = lambda link, command, data: link.respond(command.cid, Status.ACCESS_DENIED | DNR)
    for size in (4096, SIZE):
        outcome = write(transport, bytes(size))
        assert isinstance(outcome.error, WriteFenced)
        assert outcome.quiesced


def test_a_write_without_an_answer_is_not_quiesced(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.write = lambda link, command, data: None
    for size in (4096, SIZE):
        outcome = write(transport, bytes(size), 200)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert not outcome.quiesced


def test_a_write_whose_connection_breaks_is_not_quiesced(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.write = lambda link, command, data: link.sock.shutdown(socket.SHUT_RDWR)
    outcome = write(transport, bytes(SIZE))
    assert isinstance(outcome.error, ConnectionLost)
    assert not outcome.quiesced


def test_a_target_that_stops_reading(peer: Peer, transport: NvmeTcpTransport) -> None:
    """The socket's buffer fills, and the deadline still holds."""
    stuck = threading.Event()
    peer.max_h2c_data_bytes = peer.r2t_bytes = 64 << 20
    take = Link.next_r2t

    def next_r2t(link: Link, command: Command, data: bytearray) -> bool:
        done = take(link, command, data)
        stuck.wait(60)
        return done

    peer.volume = bytearray(64 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "next_r2t", next_r2t)
        large = transport_to(peer, max_command_bytes=32 << 20)
        outcome = write(large, bytes(32 << 20), 300)
        large.close()
        stuck.set()
    assert isinstance(outcome.error, DeadlineExceeded)
    assert not outcome.quiesced


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE + 4096), (4096, 4096), (0, 0)])
def test_an_r2t_that_makes_no_sense(peer: Peer, transport: NvmeTcpTransport, offset: int, length: int) -> None:
    def next_r2t(link: Link, command: Command, data: bytearray) -> bool:
        link.send(pdu.r2t(command.cid, 1, offset, length))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "next_r2t", next_r2t)
        outcome = write(transport, bytes(SIZE))
    assert isinstance(outcome.error, ProtocolError)
    assert not outcome.quiesced


# --- connecting ---


def test_a_refused_host(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.refuse = True
    assert isinstance(read(transport, bytearray(SIZE)).error, TargetRefused)
    peer.refuse = False
    works(peer, transport)


def test_a_swapped_volume(peer: Peer) -> None:
    transport = transport_to(peer, nguid="ff" * 16)
    assert isinstance(read(transport, bytearray(SIZE)).error, VolumeMismatch)
    transport.close()


def test_blocks_of_another_size(peer: Peer, transport: NvmeTcpTransport) -> None:
    peer.lba_shift = 9
    assert isinstance(read(transport, bytearray(SIZE)).error, ProtocolError)


def test_the_breaker_opens_and_closes(peer: Peer) -> None:
    transport = transport_to(peer, backoff_ms=(60_000, 60_000))
    peer.refuse = True
    assert isinstance(read(transport, bytearray(SIZE)).error, TargetRefused)
    state = transport.state()
    assert state.breaker_open
    assert state.failures == 1
    peer.refuse = False
    before = len(peer.connects)
    error = read(transport, bytearray(SIZE)).error
    assert isinstance(error, Unavailable)
    assert 0 < error.retry_after_ms <= 60_000
    assert len(peer.connects) == before, "it was not asked again"
    transport.close()


def test_an_association_that_cannot_be_kept_alive_is_closed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have no more threads: that is an answer, and leaves no connection."""

    def none(*_: object) -> None:
        raise Unavailable("no thread can be started")

    transport = transport_to(peer)
    with monkeypatch.context() as patched:
        patched.setattr(controller, "begin", none)
        assert isinstance(read(transport, bytearray(SIZE)).error, Unavailable)
    eventually(lambda: all(link.sock.fileno() == -1 for link in peer.links), "the connection is closed")
    eventually(lambda: not transport.state().breaker_open, "the breaker to let one through")
    works(peer, transport)
    transport.close()


def test_back_off_grows_and_is_bounded() -> None:
    clock = SystemClock()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    transport = NvmeTcpTransport(
        SubsystemAddress("127.0.0.1", port, NQN), new_host(), options=NvmeTcpOptions(backoff_ms=(1, 40)), clock=clock
    )
    waits = []
    for failures in range(1, 12):
        eventually(lambda: not transport.state().breaker_open, "the breaker to let one through")
        with pytest.raises(ConnectionLost):
            transport.connect(now_ms() + LONG_MS)
        assert transport.state().failures == failures
        waits.append(transport.state().retry_after_ms)
    assert max(waits) <= 40
    assert max(waits[-3:]) > max(waits[:3])
    transport.close()


def test_back_off_grows_where_controllers_are_taken_and_queues_are_not(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Link.fabrics

    def fabrics(link: Link, command: Command, data: bytearray | None) -> None:
        if command.fabrics_type == FabricsType.CONNECT and command.cdw10 >> 16:
            link.respond(command.cid, Status.CONNECT_INVALID_HOST | DNR)
        else:
            real(link, command, data)

    transport = transport_to(peer, backoff_ms=(1, 40))
    with monkeypatch.context() as patched:
        patched.setattr(Link, "fabrics", fabrics)
        for failures in range(1, 8):
            eventually(lambda: not transport.state().breaker_open, "the breaker to let one through")
            assert isinstance(read(transport, bytearray(SIZE)).error, TargetRefused)
            assert transport.state().failures == failures
    eventually(lambda: not transport.state().breaker_open, "the breaker to let one through")
    works(peer, transport)
    assert transport.state().failures == 0
    transport.close()


def test_a_keep_alive_without_an_answer_ends_the_association(peer: Peer) -> None:
    transport = transport_to(peer, keep_alive_ms=300)

    def asked() -> bool:
        works(peer, transport)  # a busy machine may have been too late to keep it alive
        return peer.keep_alives.acquire(blocking=False)

    def again() -> bool:
        works(peer, transport)
        return peer.connects.count(0) > before

    eventually(asked, "a keep-alive")
    peer.answer_keep_alive = False
    before = peer.connects.count(0)
    eventually(asked, "one without an answer")
    eventually(again, "a new association")
    assert transport.state().reconnects >= 1
    transport.close()


def test_every_connection_lost_while_idle_is_noticed(peer: Peer, transport: NvmeTcpTransport) -> None:
    works(peer, transport)
    peer.drop()
    into = bytearray(SIZE)
    assert read(transport, into).error is None, "no call fails for connections that broke before it"
    assert into == peer.volume[:SIZE]


def test_callers_wait_for_a_connection_until_their_deadline(peer: Peer, transport: NvmeTcpTransport) -> None:
    works(peer, transport)
    peer.lie = late = Withheld(peer)
    first: list[Outcome] = []
    thread = threading.Thread(target=lambda: first.append(read(transport, bytearray(SIZE))))
    thread.start()
    assert late.half_sent.wait(60)
    assert isinstance(read(transport, bytearray(SIZE), 100).error, DeadlineExceeded)
    transport.close()
    thread.join(60)
    assert isinstance(first[0].error, Unavailable), "closing ends calls under way"
    late.go_on.set()
