"""Header and data digests (NVMe/TCP Transport Spec 1.1 §3.3.1.1), both roles."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.checksum import crc32c
from forebay.nvmetcp import command, pdu, spec
from forebay.nvmetcp.connection import Buffer, Connection
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
)
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import FatalError
from forebay.nvmetcp.states import Role, State

BOTH = (True, True)
EVERY = [(False, False), (True, False), (False, True), BOTH]


def join(pieces: list[Buffer]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def pair(header: bool, data: bool, *, hpda: int = 0) -> tuple[Connection, Connection]:
    host = Connection(Role.HOST, header_digest=header, data_digest=data)
    ctrl = Connection(Role.CONTROLLER, max_h2c_data_bytes=8192, header_digest=True, data_digest=True)
    request = bytearray(join(host.send_ic_req()))
    request[10] = hpda
    assert ctrl.receive_data(request) == [ICReqReceived(hpda, header, data, 1)]
    assert host.receive_data(join(ctrl.send_ic_resp())) == [ICRespReceived(0, 8192, header, data)]
    assert (host.header_digest, host.data_digest) == (ctrl.header_digest, ctrl.data_digest) == (header, data)
    return host, ctrl


@pytest.mark.parametrize(("asked", "offered"), [(a, o) for a in range(4) for o in range(4)])
def test_in_use_is_what_one_asks_for_and_the_other_offers(asked: int, offered: int) -> None:
    host = Connection(Role.HOST, header_digest=bool(asked & 1), data_digest=bool(asked & 2))
    ctrl = Connection(Role.CONTROLLER, header_digest=bool(offered & 1), data_digest=bool(offered & 2))
    ctrl.receive_data(join(host.send_ic_req()))
    raw = join(ctrl.send_ic_resp())
    assert raw[11] == asked & offered
    host.receive_data(raw)
    for end in (host, ctrl):
        assert end.header_digest + 2 * end.data_digest == asked & offered


def test_the_bytes_of_a_digested_pdu() -> None:
    """HDGST behind the header, DDGST behind the data, PLEN counts both, PDO starts after HDGST. TCP §3.6.1."""
    host, ctrl = pair(*BOTH)
    raw = join(host.send_command(command.write(6, 1, 0, 1), data=b"w" * 4096))
    kind, flags, hlen, pdo, plen = spec.COMMON_HEADER.unpack_from(raw)
    assert (kind, flags, hlen, pdo, plen) == (4, 3, 72, 76, 76 + 4096 + 4)
    assert len(raw) == plen
    assert struct.unpack_from("<I", raw, 72)[0] == crc32c(raw[:72])
    assert struct.unpack_from("<I", raw, 76 + 4096)[0] == crc32c(b"w" * 4096)
    assert crc32c(b"123456789") == 0xE3069283  # CRC-32C, RFC 3720 §B.4
    response = ctrl.send_response(6)
    assert spec.COMMON_HEADER.unpack_from(response) == (5, 1, 24, 0, 28)


@pytest.mark.parametrize("digests", EVERY)
@pytest.mark.parametrize("hpda", [0, 15])
def test_commands_and_data_both_ways(digests: tuple[bool, bool], hpda: int) -> None:
    host, ctrl = pair(*digests, hpda=hpda)
    data = bytes(range(256)) * 80
    ctrl.receive_data(join(host.send_command(command.write(6, 1, 0, 5), write_bytes=20480)))
    (request,) = host.receive_data(ctrl.send_r2t(6, 33, 0, 20480))
    assert isinstance(request, R2TReceived)
    events = ctrl.receive_data(join(host.send_h2c_data(request, [data[:5000], memoryview(data)[5000:]])))
    assert b"".join(bytes(e.data) for e in events if isinstance(e, DataChunk)) == data
    ends = [e for e in events if isinstance(e, DataEnd)]
    assert [(e.last, e.digest_ok) for e in ends] == [(False, True), (False, True), (True, True)]
    host.receive_data(ctrl.send_response(6))

    got = ctrl.receive_data(join(host.send_command(command.read(7, 1, 0, 2), read_bytes=8192)))
    assert [type(e) for e in got] == [CommandReceived]
    raw = ctrl.send_c2h_data(7, 8192, success=True) + join([data[:8192], *ctrl.data_digest_of(data[:8192])])
    if hpda:
        assert raw[3] == 64
    assert host.receive_data(raw)[-1] == DataEnd(7, None, True, True, True)
    assert host.open_commands == 0

    got = ctrl.receive_data(join(host.send_command(command.write(8, 1, 0, 1), data=data[:4096])))
    assert [type(e) for e in got] == [CommandReceived, DataStart, DataChunk, DataEnd]
    assert got[0].in_capsule_bytes == 4096  # type: ignore[union-attr]
    assert isinstance(host.receive_data(ctrl.send_response(8))[0], ResponseReceived)


def test_payload_straight_into_the_destination_ends_with_its_digest() -> None:
    host, ctrl = pair(*BOTH)
    host.send_command(command.read(5, 1, 0, 2), read_bytes=8192)
    header = ctrl.send_c2h_data(5, 8192, success=True)
    assert host.bytes_wanted == len(header) == 28
    host.receive_data(header)
    for piece in (b"a" * 8000, b"b" * 192):
        host.digest_payload(piece)
        assert host.payload_received(len(piece)) == []
    assert (host.state, host.bytes_wanted, host.payload_remaining, host.between_pdus) == (State.DIGEST, 4, 0, False)
    digest = join(ctrl.data_digest_of(b"a" * 8000, b"b" * 192))
    assert host.receive_data(digest[:1]) == []
    assert host.bytes_wanted == 3
    assert host.receive_data(digest[1:]) == [DataEnd(5, None, True, True, True)]
    assert host.between_pdus


def test_a_controller_may_read_whole_capsules() -> None:
    host, ctrl = pair(*BOTH)
    assert ctrl.bytes_wanted == 76
    ctrl.receive_data(join(host.send_command(command.write(1, 1, 0, 1), write_bytes=4096)))
    ctrl.send_r2t(1, 1, 0, 4096)
    assert ctrl.bytes_wanted == 28


def test_damaged_data_fails_its_command_and_not_the_connection() -> None:
    host, ctrl = pair(*BOTH)
    raw = bytearray(join(host.send_command(command.write(6, 1, 0, 1), data=b"w" * 4096)))
    raw[100] ^= 1
    assert ctrl.receive_data(raw)[-1] == DataEnd(6, None, True, False, False)
    host.receive_data(ctrl.send_response(6, spec.Status.TRANSIENT_TRANSPORT_ERROR))
    host.send_command(command.read(7, 1, 0, 1), read_bytes=4096)
    raw = bytearray(ctrl.send_c2h_data(7, 4096, success=True) + bytes(4096) + join(ctrl.data_digest_of(bytes(4096))))
    raw[-1] ^= 0x80  # the digest itself
    assert host.receive_data(raw)[-1] == DataEnd(7, None, True, True, False)
    assert host.state is ctrl.state is State.READY


def test_a_damaged_header_ends_the_connection() -> None:
    """FES 03h, with the digest that came as FEI. TCP §3.6.2.4, §3.6.2.5."""
    for at in (12, 40, 75):
        host, ctrl = pair(*BOTH)
        raw = bytearray(join(host.send_command(command.read(7, 1, 0, 1), read_bytes=4096)))
        raw[at] ^= 4
        with pytest.raises(PduError) as caught:
            ctrl.receive_data(raw)
        assert caught.value.fatal_error == FatalError.HEADER_DIGEST_ERROR
        assert caught.value.fatal_info == struct.unpack_from("<I", raw, 72)[0]
        assert len(caught.value.header) == 72
        assert spec.COMMON_HEADER.unpack_from(caught.value.termination) == (3, 0, 24, 0, 96)
    host, ctrl = pair(True, False)
    host.send_command(command.flush(1, 1))
    raw = bytearray(ctrl.send_response(1))
    raw[8] ^= 1
    with pytest.raises(PduError, match="digest"):
        host.receive_data(raw)


@pytest.mark.parametrize("digests", EVERY)
def test_flags_that_were_not_agreed_on(digests: tuple[bool, bool]) -> None:
    for flags in range(4):
        host, ctrl = pair(*digests)
        good = join(host.send_command(command.write(6, 1, 0, 1), data=b"w" * 4096))
        if flags == good[1]:
            continue
        raw = bytes((good[0], flags)) + good[2:]
        with pytest.raises(PduError) as caught:
            ctrl.receive_data(raw)
        assert (caught.value.fatal_error, caught.value.fatal_info) == (FatalError.INVALID_HEADER_FIELD, 1)


def test_a_capsule_without_data_has_no_data_digest() -> None:
    host, ctrl = pair(*BOTH)
    raw = join(host.send_command(command.flush(6, 1)))
    assert spec.COMMON_HEADER.unpack_from(raw) == (4, 1, 72, 0, 76)
    with pytest.raises(PduError):
        ctrl.receive_data(raw[:1] + b"\x03" + raw[2:])


@pytest.mark.parametrize(("flags", "plen"), [(3, 80), (3, 79), (1, 72), (1, 77)])
def test_lengths_that_leave_no_room_for_digests(flags: int, plen: int) -> None:
    _, ctrl = pair(*BOTH)
    raw = bytearray(pdu.capsule_cmd_header(command.flush(6, 1), 0))
    spec.COMMON_HEADER.pack_into(raw, 0, 4, flags, 72, 76, plen)
    with pytest.raises(PduError) as caught:
        ctrl.receive_data(raw)
    assert caught.value.fatal_error == FatalError.INVALID_HEADER_FIELD


@given(st.sampled_from(EVERY), st.lists(st.integers(0, 1 << 20), max_size=30))
def test_events_do_not_depend_on_where_the_stream_is_cut(digests: tuple[bool, bool], cuts: list[int]) -> None:
    host, ctrl = pair(*digests)
    raw = join(host.send_command(command.write(1, 1, 0, 1), data=b"\x04" * 4096))
    raw += join(host.send_command(command.write(2, 1, 0, 2), write_bytes=8192))
    host.receive_data(ctrl.send_r2t(2, 9, 0, 8192))
    raw += join(host.send_h2c_data(R2TReceived(2, 9, 0, 8192), [b"\x05" * 8192]))
    raw += join(host.send_command(command.flush(3, 1)))
    got: list[Event] = []
    at = 0
    for cut in [*sorted(c % (len(raw) + 1) for c in cuts), len(raw)]:
        got += [e for e in ctrl.receive_data(raw[at:cut]) if not isinstance(e, DataChunk)]
        at = cut
    assert [type(e) for e in got] == [
        CommandReceived, DataStart, DataEnd, CommandReceived, DataStart, DataEnd, CommandReceived
    ]  # fmt: skip
    assert all(e.digest_ok for e in got if isinstance(e, DataEnd))


@given(st.sampled_from(EVERY[1:]), st.integers(0, 10_000), st.integers(1, 255))
def test_no_damage_goes_unnoticed(digests: tuple[bool, bool], at: int, mask: int) -> None:
    """Any one byte that is changed in what a digest covers is a protocol error or a failed command."""
    host, ctrl = pair(*digests)
    raw = bytearray(join(host.send_command(command.write(1, 1, 0, 1), data=b"\x04" * 4096)))
    data_at = raw[3]
    end = len(raw) - (4 if digests[1] else 0)
    covered = [*range(raw[2])] * digests[0] + [*range(data_at, end)] * digests[1]
    raw[covered[at % len(covered)]] ^= mask
    raw += bytes(64)
    try:
        ends = [e for e in ctrl.receive_data(raw) if isinstance(e, DataEnd)]
    except PduError:
        return
    assert not any(e.digest_ok for e in ends)


@given(
    st.sampled_from(list(Role)),
    st.sampled_from(EVERY[1:]),
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(
                lambda kind, flags, hlen, pdo, plen, rest: pdu.digested(
                    struct.pack("<BBBBI", kind, flags, hlen, pdo, pdo + plen) + rest,
                    4,
                    header_digest=True,
                    data_digest=False,
                ),
                st.sampled_from([0, 1, 4, 5, 6, 7, 9]),
                st.integers(0, 15),
                st.sampled_from([24, 72]),
                st.sampled_from([0, 24, 72]),
                st.integers(0, 9000),
                st.binary(min_size=64, max_size=64),
            ),
        ),
        max_size=6,
    ),
)
def test_garbage_raises_nothing_but_the_protocol_error(
    role: Role, digests: tuple[bool, bool], pieces: list[bytes]
) -> None:
    host, ctrl = pair(*digests)
    conn = host if role is Role.HOST else ctrl
    if role is Role.HOST:
        host.send_command(command.read(0, 1, 0, 2), read_bytes=8192)
    else:
        ctrl.send_r2t(0, 0, 0, 8192)
    for piece in pieces:
        try:
            conn.receive_data(piece)
        except PduError:
            assert conn.state is State.TERMINATED
    assert conn.bytes_wanted >= 0
