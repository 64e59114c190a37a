"""The connection state machine: both roles against each other, hostile peers, and streams cut anywhere."""

from __future__ import annotations

import struct
from collections.abc import Callable
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.nvmetcp import command, pdu, spec
from forebay.nvmetcp.command import ConnectData
from forebay.nvmetcp.connection import MAX_HEADER_BYTES, Buffer, Connection
from forebay.nvmetcp.events import (
    CommandReceived,
    DataChunk,
    DataEnd,
    DataStart,
    Event,
    ICReqReceived,
    ICRespReceived,
    R2TReceived,
    ResponseReceived,
    TermReceived,
)
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import FatalError, Status
from forebay.nvmetcp.states import Role, State


def join(pieces: list[Buffer]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def pair(*, max_h2c_data_bytes: int = 8192, in_capsule_bytes: int = 8192) -> tuple[Connection, Connection]:
    host = Connection(Role.HOST)
    ctrl = Connection(Role.CONTROLLER, max_h2c_data_bytes=max_h2c_data_bytes, in_capsule_bytes=in_capsule_bytes)
    assert ctrl.receive_data(join(host.send_ic_req())) == [ICReqReceived(0, False, False, 1)]
    assert host.receive_data(join(ctrl.send_ic_resp())) == [ICRespReceived(0, max_h2c_data_bytes)]
    assert host.state is ctrl.state is State.READY
    return host, ctrl


def owned(events: list[Event]) -> list[Event]:
    return [e._replace(data=memoryview(bytes(e.data))) if isinstance(e, DataChunk) else e for e in events]


def test_command_without_data() -> None:
    host, ctrl = pair()
    read = command.read(5, 1, 100, 8)
    raw = join(host.send_command(read, read_bytes=32768))
    (event,) = ctrl.receive_data(raw)
    assert isinstance(event, CommandReceived)
    assert event.in_capsule_bytes == 0
    assert event.command == read._replace(sgl_length_bytes=32768)
    assert (event.command.slba, event.command.block_count) == (100, 8)


def test_read_straight_into_the_destination() -> None:
    """TCP §3.6.2.9: the host learns where data goes before it reads it, and SUCCESS ends the command."""
    host, ctrl = pair()
    host.send_command(command.read(5, 1, 0, 2), read_bytes=8192)
    header = ctrl.send_c2h_data(5, 8192, success=True)
    assert host.bytes_wanted == len(header) == 24
    assert host.receive_data(header) == [DataStart(5, None, 0, 8192, True, True)]
    assert (host.bytes_wanted, host.payload_remaining, host.state) == (0, 8192, State.PAYLOAD)
    assert host.payload_received(8000) == []
    assert host.open_commands == 1
    assert host.payload_received(192) == [DataEnd(5, None, True, True)]
    assert host.open_commands == 0
    assert host.bytes_wanted == 24


def test_read_in_several_pdus_then_a_response() -> None:
    host, ctrl = pair()
    host.send_command(command.read(5, 1, 0, 2), read_bytes=8192)
    raw = b"".join(
        (
            ctrl.send_c2h_data(5, 4096, last=False) + b"a" * 4096,
            ctrl.send_c2h_data(5, 4096, offset_bytes=4096) + b"b" * 4096,
            ctrl.send_response(5, sq_head=1),
        )
    )
    events = host.receive_data(raw)
    assert [type(e) for e in events] == [DataStart, DataChunk, DataEnd] * 2 + [ResponseReceived]
    assert events[4] == DataChunk(5, 4096, memoryview(b"b" * 4096))
    assert events[-1].completion[:] == (0, 1, 0, 5, 0, False)  # type: ignore[union-attr]


def test_chunks_point_into_the_callers_buffer() -> None:
    host, _ = pair()
    host.send_command(command.read(5, 1, 0, 1), read_bytes=4096)
    raw = bytearray(pdu.c2h_data_header(5, 0, 4096, last=True, success=True) + bytes(4096))
    chunk = host.receive_data(raw)[1]
    assert isinstance(chunk, DataChunk)
    raw[24] = 77
    assert chunk.data[0] == 77


def test_write_in_capsule() -> None:
    host, ctrl = pair()
    header, data = host.send_command(command.write(6, 1, 0, 1), data=b"w" * 4096)
    assert data == b"w" * 4096
    got = ctrl.receive_data(header)
    assert isinstance(got[0], CommandReceived)
    assert (got[0].in_capsule_bytes, got[0].command.sgl_kind) == (4096, spec.SGL_DATA_BLOCK_OFFSET)
    assert got[1:] == [DataStart(6, None, 0, 4096, True, False)]
    assert ctrl.payload_received(4096) == [DataEnd(6, None, True, False)]
    done = host.receive_data(ctrl.send_response(6))
    assert isinstance(done[0], ResponseReceived)


def test_write_by_r2t_is_cut_at_max_h2c_data_and_sliced_across_pieces() -> None:
    host, ctrl = pair(max_h2c_data_bytes=8192)
    host.send_command(command.write(6, 1, 0, 5), write_bytes=20480)
    (request,) = host.receive_data(ctrl.send_r2t(6, 33, 0, 20480))
    assert request == R2TReceived(6, 33, 0, 20480)
    assert isinstance(request, R2TReceived)
    data = bytes(range(256)) * 80
    pieces = host.send_h2c_data(request, [data[:5000], memoryview(data)[5000:]])
    events = ctrl.receive_data(join(pieces))
    starts = [e for e in events if isinstance(e, DataStart)]
    assert [(s.offset_bytes, s.length_bytes, s.last) for s in starts] == [
        (0, 8192, False), (8192, 8192, False), (16384, 4096, True)
    ]  # fmt: skip
    assert b"".join(bytes(e.data) for e in events if isinstance(e, DataChunk)) == data
    assert events[-1] == DataEnd(6, 33, True, False)


def test_controller_never_needs_to_read_into_payload() -> None:
    """72 bytes may be read while only capsules can come, 24 once H2CData may."""
    host, ctrl = pair()
    assert ctrl.bytes_wanted == 72
    ctrl.receive_data(join(host.send_command(command.write(1, 1, 0, 1), write_bytes=4096)))
    ctrl.send_r2t(1, 1, 0, 4096)
    assert ctrl.bytes_wanted == 24
    ctrl.receive_data(pdu.h2c_data_header(1, 1, 0, 4096, last=True))
    ctrl.payload_received(4096)
    assert ctrl.bytes_wanted == 72


def test_bytes_wanted_leads_through_a_stream_without_over_reading() -> None:
    """A shell that reads at most `bytes_wanted` never finds payload in it."""
    host, ctrl = pair()
    stream = bytearray()
    stream += join(host.send_command(command.write(1, 1, 0, 2), data=b"x" * 8192))
    stream += join(host.send_command(command.read(2, 1, 0, 1), read_bytes=4096))
    stream += pdu.capsule_cmd_header(command.write(3, 1, 0, 1), 4096, align_bytes=128) + b"y" * 4096
    ends = 0
    while stream:
        if ctrl.payload_remaining:
            assert set(stream[: ctrl.payload_remaining]) in ({ord("x")}, {ord("y")})
            n = ctrl.payload_remaining
            ends += len(ctrl.payload_received(n))
        else:
            n = min(ctrl.bytes_wanted, len(stream))
            events = ctrl.receive_data(bytes(stream[:n]))
            assert not any(isinstance(e, DataChunk) for e in events)
        del stream[:n]
    assert ends == 2


def test_alignment_that_the_host_asks_for() -> None:
    ctrl = Connection(Role.CONTROLLER)
    ctrl.receive_data(pdu.ic_req(hpda=31))
    ctrl.send_ic_resp()
    header = ctrl.send_c2h_data(1, 4096)
    assert len(header) == header[3] == 128


def test_termination_from_the_peer() -> None:
    host, ctrl = pair()
    raw = host.send_term(FatalError.DATA_OUT_OF_RANGE, 8, b"\x07" * 24)
    assert ctrl.receive_data(raw) == [TermReceived(4, 8, b"\x07" * 24)]
    assert ctrl.state is host.state is State.TERMINATED
    assert ctrl.receive_data(b"anything") == []
    assert ctrl.bytes_wanted == 0


def test_end_of_stream() -> None:
    host, ctrl = pair()
    raw = join(host.send_command(command.keep_alive(1)))
    ctrl.receive_data(raw[:10])
    assert ctrl.receive_eof() is False
    assert ctrl.state is State.CLOSED
    assert host.receive_eof() is True


def test_misuse_is_the_callers_mistake() -> None:
    host, ctrl = pair()
    with pytest.raises(AssertionError, match="send CapsuleCmd while ready"):
        ctrl.send_command(command.keep_alive(1))
    host.send_command(command.keep_alive(1))
    with pytest.raises(AssertionError, match="command 1 is open"):
        host.send_command(command.keep_alive(1))
    with pytest.raises(AssertionError):
        host.send_ic_req()


# --- peers that break the protocol, each with the FES and FEI that TCP §3.6.2.4/5 name --------------------------------

CMD = pdu.capsule_cmd_header(command.read(1, 1, 0, 1), 0)


def patch(raw: bytes, offset: int, fmt: str, value: int) -> bytes:
    out = bytearray(raw)
    struct.pack_into("<" + fmt, out, offset, value)
    return bytes(out)


CONTROLLER_BREAKS = [
    ("unknown type", patch(CMD, 0, "B", 0x55), 1, 0),
    ("PDU for a host", pdu.capsule_resp(0, 0, 0, 1, 0), 1, 0),
    ("digest flag", patch(CMD, 1, "B", 1), 1, 1),
    ("HLEN", patch(CMD, 2, "B", 71), 1, 2),
    ("PLEN below HLEN", patch(CMD, 4, "I", 60), 1, 4),
    ("PDO below HLEN", patch(patch(CMD, 4, "I", 72 + 64), 3, "B", 24), 1, 3),
    ("PDO unaligned", patch(patch(CMD, 4, "I", 72 + 64), 3, "B", 73), 1, 3),
    ("PLEN without data", patch(patch(CMD, 4, "I", 76), 3, "B", 76), 1, 4),
    ("capsule too long", patch(patch(CMD, 4, "I", 72 + 8196), 3, "B", 72), 5, 4),
    ("capsule of 4 GiB", patch(patch(CMD, 4, "I", 0xFFFFFFFF), 3, "B", 72), 5, 4),
    ("second ICReq", pdu.ic_req(), 2, 0),
    ("H2CData without R2T", pdu.h2c_data_header(1, 1, 0, 4096, last=True), 1, 10),
    ("TermReq too long", patch(pdu.term_req(from_host=True, fatal_error=1), 4, "I", 153), 1, 4),
]


@pytest.mark.parametrize(
    ("raw", "fes", "fei"), [case[1:] for case in CONTROLLER_BREAKS], ids=[c[0] for c in CONTROLLER_BREAKS]
)
def test_controller_refuses(raw: bytes, fes: int, fei: int) -> None:
    _, ctrl = pair()
    with pytest.raises(PduError) as caught:
        ctrl.receive_data(raw)
    error = caught.value
    assert (error.fatal_error, error.fatal_info) == (fes, fei)
    assert error.termination[0] == spec.PduType.C2H_TERM_REQ
    assert error.header
    assert error.termination.endswith(error.header)
    assert raw.startswith(error.header)
    host, _ = pair()
    assert host.receive_data(error.termination) == [TermReceived(fes, fei, error.header)]
    assert ctrl.state is State.TERMINATED
    assert ctrl.receive_data(CMD) == []


@pytest.mark.parametrize(
    ("raw", "fes", "fei"),
    [
        (pdu.h2c_data_header(1, 8, 0, 4096, last=False), 1, 10),  # tag
        (pdu.h2c_data_header(2, 7, 0, 4096, last=False), 1, 8),  # cid
        (pdu.h2c_data_header(1, 7, 4096, 4096, last=False), 4, 12),  # a gap
        (pdu.h2c_data_header(1, 7, 0, 16384, last=False), 5, 16),  # above MAXH2CDATA
        (pdu.h2c_data_header(1, 7, 0, 4096, last=True), 1, 1),  # LAST too early
        (patch(pdu.h2c_data_header(1, 7, 0, 4096, last=False), 16, "I", 4092), 1, 16),  # DATAL against PLEN
        (pdu.h2c_data_header(1, 7, 0, 0, last=False), 1, 4),  # nothing
    ],
)
def test_controller_refuses_data_that_does_not_fit_its_r2t(raw: bytes, fes: int, fei: int) -> None:
    _, ctrl = pair(max_h2c_data_bytes=8192)
    ctrl.send_r2t(1, 7, 0, 32768)
    with pytest.raises(PduError) as caught:
        ctrl.receive_data(raw)
    assert (caught.value.fatal_error, caught.value.fatal_info) == (fes, fei)


def test_controller_refuses_more_than_its_r2t() -> None:
    _, ctrl = pair(max_h2c_data_bytes=8192)
    ctrl.send_r2t(1, 7, 0, 4096)
    with pytest.raises(PduError) as caught:
        ctrl.receive_data(pdu.h2c_data_header(1, 7, 0, 8192, last=True))
    assert caught.value.fatal_error == FatalError.DATA_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("raw", "fes", "fei"),
    [(CMD, 2, 0), (patch(pdu.ic_req(), 8, "H", 1), 6, 8), (pdu.ic_req(hpda=32), 1, 10), (b"GET / HTTP/1.1\r\n", 1, 0)],
)
def test_controller_refuses_a_bad_start(raw: bytes, fes: int, fei: int) -> None:
    ctrl = Connection(Role.CONTROLLER)
    with pytest.raises(PduError) as caught:
        ctrl.receive_data(raw)
    assert (caught.value.fatal_error, caught.value.fatal_info) == (fes, fei)


@pytest.mark.parametrize(
    ("raw", "fes", "fei"),
    [
        (pdu.ic_resp(max_h2c_data_bytes=4096, digests=1), 6, 11),
        (pdu.ic_resp(max_h2c_data_bytes=4095), 1, 12),
        (pdu.ic_resp(max_h2c_data_bytes=4096, cpda=32), 1, 10),
        (patch(pdu.ic_resp(max_h2c_data_bytes=4096), 8, "H", 9), 6, 8),
        (pdu.capsule_resp(0, 0, 0, 1, 0), 2, 0),
    ],
)
def test_host_refuses_a_bad_answer_to_its_start(raw: bytes, fes: int, fei: int) -> None:
    host = Connection(Role.HOST)
    host.send_ic_req()
    with pytest.raises(PduError) as caught:
        host.receive_data(raw)
    assert (caught.value.fatal_error, caught.value.fatal_info) == (fes, fei)
    assert caught.value.termination[0] == spec.PduType.H2C_TERM_REQ


@pytest.mark.parametrize(
    ("raw", "fes", "fei"),
    [
        (pdu.capsule_resp(0, 0, 0, 9, 0), 1, 20),  # not open
        (pdu.capsule_resp(0, 0, 0, 1, 0), 2, 0),  # success before the data
        (pdu.capsule_resp(0, 0, 0, 2, 0), 2, 0),  # success before the data was asked for
        (pdu.c2h_data_header(9, 0, 4096, last=True, success=False), 1, 8),
        (pdu.c2h_data_header(1, 4096, 4096, last=True, success=False), 4, 12),
        (pdu.c2h_data_header(1, 0, 12288, last=True, success=False), 4, 16),
        (pdu.c2h_data_header(2, 0, 4096, last=True, success=False), 4, 16),  # data of a write
        (pdu.c2h_data_header(1, 0, 4096, last=True, success=True), 1, 1),
        (pdu.r2t(9, 1, 0, 4096), 1, 8),
        (pdu.r2t(2, 1, 4096, 4096), 4, 12),
        (pdu.r2t(2, 1, 0, 12288), 4, 16),
        (pdu.r2t(2, 1, 0, 0), 4, 16),
        (pdu.r2t(1, 1, 0, 4096), 4, 16),  # R2T of a read
        (pdu.r2t(2, 1, 0, 4096) + pdu.r2t(2, 2, 4096, 4096), 5, 0),  # MAXR2T is 1
    ],
)
def test_host_refuses(raw: bytes, fes: int, fei: int) -> None:
    host, _ = pair()
    host.send_command(command.read(1, 1, 0, 2), read_bytes=8192)
    host.send_command(command.write(2, 1, 0, 2), write_bytes=8192)
    with pytest.raises(PduError) as caught:
        host.receive_data(raw)
    assert (caught.value.fatal_error, caught.value.fatal_info) == (fes, fei)


def test_failed_read_may_end_without_data() -> None:
    host, _ = pair()
    host.send_command(command.read(1, 1, 0, 2), read_bytes=8192)
    (event,) = host.receive_data(pdu.capsule_resp(0, 0, 0, 1, Status.LBA_OUT_OF_RANGE | spec.DNR))
    assert isinstance(event, ResponseReceived)
    assert (event.completion.status, event.completion.do_not_retry) == (Status.LBA_OUT_OF_RANGE, True)


# --- properties -------------------------------------------------------------------------------------------------------


def controller_stream() -> tuple[bytes, Callable[[], Connection]]:
    host, _ = pair()
    connect = ConnectData(UUID(int=7), 0xFFFF, "nqn.a", "nqn.b").to_bytes()
    raw = pdu.ic_req()
    raw += join(host.send_command(command.connect(0, 1, 128), data=connect))
    raw += join(host.send_command(command.read(1, 1, 5, 2), read_bytes=8192))
    raw += join(host.send_command(command.write(2, 1, 5, 1), data=b"\x04" * 4096))
    raw += pdu.capsule_cmd_header(command.write(3, 1, 0, 1), 512, align_bytes=128) + b"z" * 512
    raw += pdu.h2c_data_header(9, 1, 0, 4000, last=False) + b"d" * 4000
    raw += pdu.h2c_data_header(9, 1, 4000, 96, last=True) + b"e" * 96
    raw += pdu.term_req(from_host=True, fatal_error=2, header=b"q" * 77)

    def make() -> Connection:
        return Connection(Role.CONTROLLER)

    return raw, make


def host_stream() -> bytes:
    raw = pdu.c2h_data_header(1, 0, 5000, last=False, success=False) + b"\x07" * 5000
    raw += pdu.r2t(2, 4, 0, 4096)
    raw += pdu.c2h_data_header(1, 5000, 3192, last=True, success=True, align_bytes=64) + b"b" * 3192
    raw += pdu.capsule_resp(0, 1, 1, 3, Status.INVALID_FIELD)
    return raw + pdu.term_req(from_host=False, fatal_error=1)


def merge(events: list[Event]) -> list[Event]:
    """Join neighbouring chunks, the one thing that depends on how the stream was cut."""
    out: list[Event] = []
    for event in owned(events):
        if isinstance(event, DataChunk) and out and isinstance(out[-1], DataChunk):
            out[-1] = out[-1]._replace(data=memoryview(bytes(out[-1].data) + bytes(event.data)))
        else:
            out.append(event)
    return out


def feed(conn: Connection, raw: bytes, cuts: list[int]) -> list[Event]:
    got: list[Event] = []
    at = 0
    for cut in [*sorted(c % (len(raw) + 1) for c in cuts), len(raw)]:
        for event in conn.receive_data(raw[at:cut]):
            got.append(event)
            if isinstance(event, ICReqReceived):
                conn.send_ic_resp()
                conn.send_r2t(9, 1, 0, 4096)
        at = cut
    return merge(got)


cut_lists = st.lists(st.integers(0, 1 << 20), max_size=40)


@given(cut_lists)
def test_controller_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    raw, make = controller_stream()
    start = len(pdu.ic_req())  # a host waits for ICResp, so no call ever holds ICReq and more
    whole = feed(make(), raw, [start])
    assert len(whole) == 21
    assert feed(make(), raw, [start, *cuts]) == whole


@given(cut_lists)
def test_host_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    def make() -> Connection:
        host, _ = pair()
        host.send_command(command.read(1, 1, 0, 2), read_bytes=8192)
        host.send_command(command.write(2, 1, 0, 1), write_bytes=4096)
        host.send_command(command.flush(3, 1))
        return host

    raw = host_stream()
    whole = feed(make(), raw, [])
    assert len(whole) == 9
    assert feed(make(), raw, cuts) == whole


def test_byte_by_byte() -> None:
    raw, make = controller_stream()
    assert feed(make(), raw, list(range(len(raw)))) == feed(make(), raw, [128])


garbage = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda kind, flags, hlen, pdo, plen, rest: struct.pack("<BBBBI", kind, flags, hlen, pdo, plen) + rest,
        st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 9]),
        st.sampled_from([0, 4, 8, 12, 1]),
        st.sampled_from([24, 72, 128, 8]),
        st.sampled_from([0, 24, 72, 128, 255]),
        st.one_of(st.integers(0, 9000), st.integers(0, 0xFFFFFFFF)),
        st.binary(max_size=150),
    ),
)


@settings(max_examples=400)
@given(st.sampled_from(list(Role)), st.booleans(), st.lists(garbage, max_size=6))
def test_garbage_raises_nothing_but_the_protocol_error(role: Role, ready: bool, pieces: list[bytes]) -> None:
    conn = Connection(role)
    if ready:
        conn = pair()[0 if role is Role.HOST else 1]
        if role is Role.HOST:
            conn.send_command(command.read(0, 1, 0, 2), read_bytes=8192)
        else:
            conn.send_r2t(0, 0, 0, 8192)
    elif role is Role.HOST:
        conn.send_ic_req()
    for piece in pieces:
        try:
            conn.receive_data(piece)
        except PduError as error:
            assert conn.state is State.TERMINATED
            assert 24 <= len(error.termination) <= spec.TERM_MAX_BYTES
    assert conn.bytes_wanted >= 0
    assert len(conn._buffer) == MAX_HEADER_BYTES  # nothing is ever allocated by a length that the peer claims


@pytest.mark.parametrize("success", [True, False])
def test_authentication_receive_may_bring_less_than_there_is_room_for(success: bool) -> None:  # Base §6.1
    host, ctrl = pair()
    ctrl.receive_data(join(host.send_command(command.authentication_receive(3, 4096), read_bytes=4096)))
    sent: list[Buffer] = [ctrl.send_c2h_data(3, 100, last=True, success=success), bytes(100)]
    if not success:
        sent.append(ctrl.send_response(3))
    events = host.receive_data(join(sent))
    assert isinstance(events[-1], DataEnd if success else ResponseReceived)
    ctrl.receive_data(join(host.send_command(command.authentication_receive(4, 4096), read_bytes=4096)))
    with pytest.raises(PduError):  # nothing at all is no message
        host.receive_data(ctrl.send_response(4))
