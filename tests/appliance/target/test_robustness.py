"""Peers that are slow, stopped, dead or hostile harm nobody but themselves."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.clock import ManualClock
from forebay.errors import ConfigInvalid
from forebay.nvmetcp import command, pdu
from forebay.nvmetcp.events import R2TReceived
from forebay.nvmetcp.spec import FatalError, Status
from tests.appliance.target.conftest import LIMITS, NQN, Rig, eventually
from tests.appliance.target.host import Gone, RawHost


@pytest.fixture
def quick_rig(tmp_path: Path) -> Iterator[Rig]:
    """With time-outs that a test can wait for."""
    made = Rig(tmp_path, replace(LIMITS, io_timeout_s=1.0, connect_timeout_s=1.0, max_connections=6))
    yield made
    made.server.close()


def patch(raw: bytes, offset: int, fmt: str, value: int) -> bytes:
    out = bytearray(raw)
    struct.pack_into("<" + fmt, out, offset, value)
    return bytes(out)


READ = pdu.capsule_cmd_header(command.read(77, 1, 0, 1), 0)


@pytest.mark.parametrize(
    ("raw", "fes"),
    [
        (patch(READ, 0, "B", 0x44), FatalError.INVALID_HEADER_FIELD),
        (patch(READ, 2, "B", 24), FatalError.INVALID_HEADER_FIELD),
        (patch(READ, 4, "I", 0xFFFFFFFF), FatalError.INVALID_HEADER_FIELD),
        (patch(patch(READ, 4, "I", 0xFFFFFFFC), 3, "B", 72), FatalError.LIMIT_EXCEEDED),
        (pdu.ic_req(), FatalError.SEQUENCE_ERROR),
        (pdu.h2c_data_header(1, 1, 0, 4096, last=True), FatalError.INVALID_HEADER_FIELD),
        (pdu.capsule_resp(0, 0, 0, 1, 0), FatalError.INVALID_HEADER_FIELD),
        (b"GET / HTTP/1.1\r\nHost: target\r\n\r\n" * 4, FatalError.INVALID_HEADER_FIELD),
    ],
    ids=["type", "hlen", "plen", "capsule", "second ICReq", "no R2T", "direction", "http"],
)
def test_malformed_pdus_end_their_connection_and_no_other(disk_rig: Rig, raw: bytes, fes: FatalError) -> None:
    """TCP §3.5: a C2HTermReq, then the connection is closed."""
    with disk_rig.attach(queues=2) as host:
        host.io[0].sock.sendall(raw)
        term = host.io[0].gone()
        assert term is not None
        assert term.fatal_error == fes
        assert term.header
        assert raw.startswith(term.header)
        assert host.io[1].read(0, 4)[0].status == 0
        assert host.admin.run(command.keep_alive(200))[0].status == 0
        eventually(lambda: len(disk_rig.server.queues) == 2, "the bad queue is forgotten")


def test_more_data_than_the_r2t(disk_rig: Rig) -> None:
    disk_rig.grant(1, 0, 100)
    with disk_rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        host.io[0].sock.sendall(pdu.h2c_data_header(request.cid, request.tag, 0, 12288, last=True) + bytes(12288))
        term = host.io[0].gone()
        assert term is not None
        assert term.fatal_error == FatalError.DATA_OUT_OF_RANGE
        assert disk_rig.stored(0, 2) == bytes(8192)


def test_more_commands_than_the_queue_has_entries(disk_rig: Rig) -> None:
    disk_rig.grant(1, 0, 100)
    with disk_rig.attach() as host:
        queue = host.io[0]
        raw = b""
        for cid in range(100, 133):
            raw += b"".join(queue.conn.send_command(command.write(cid, 1, 0, 1), write_bytes=4096))
        queue.sock.sendall(raw)
        term = queue.gone()
        assert term is not None
        assert term.fatal_error == FatalError.LIMIT_EXCEEDED


def test_a_termination_from_the_host_ends_its_connection(disk_rig: Rig) -> None:
    with disk_rig.attach(queues=2) as host:
        host.io[0].sock.sendall(host.io[0].conn.send_term(FatalError.SEQUENCE_ERROR))
        assert host.io[0].gone() is None
        assert host.io[1].read(0, 1)[0].status == 0


def test_a_host_that_takes_nothing_holds_up_nobody(rig: Rig) -> None:
    """Its queue stands in one send; every other queue, its own controller's too, goes on."""
    with rig.attach(queues=2, receive_buffer_bytes=4096) as stopped, rig.other() as lively:
        queue = stopped.io[0]
        for _ in range(8):
            one = command.read(queue.next_cid(), 1, 0, 2048)
            queue.send(queue.conn.send_command(one, read_bytes=2048 * 4096))
        for _ in range(20):
            assert lively.io[0].read(0, 256)[0].status == 0
            assert stopped.io[1].read(0, 1)[0].status == 0
        # And when it takes them after all, they are all there.
        assert queue.read(5, 1)[0].status == 0


def test_a_host_that_takes_nothing_for_too_long_is_cut_off(quick_rig: Rig) -> None:
    with quick_rig.attach(queues=2, receive_buffer_bytes=4096) as host:
        queue = host.io[0]
        for _ in range(8):
            one = command.read(queue.next_cid(), 1, 0, 2048)
            queue.send(queue.conn.send_command(one, read_bytes=2048 * 4096))
        eventually(lambda: len(quick_rig.server.queues) == 2, "the stopped queue is gone")
        assert host.io[1].read(0, 1)[0].status == 0


def test_a_host_that_stops_in_the_middle_of_data_is_cut_off(quick_rig: Rig) -> None:
    quick_rig.grant(1, 0, 10)
    with quick_rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [bytes(8192)])[:1])
        assert host.io[0].gone() is None
        host.admin.sock.sendall(READ[:20])
        assert host.admin.gone() is None


def test_an_idle_queue_is_not_cut_off(quick_rig: Rig) -> None:
    """Silence between PDUs is legal for as long as the host likes, if it wants no keep-alive."""
    with quick_rig.attach() as host:
        with RawHost(quick_rig.port).initialize() as silent:
            assert silent.gone() is None  # this took connect_timeout_s, which is io_timeout_s here
        assert host.io[0].read(0, 1)[0].status == 0
        assert host.admin.run(command.keep_alive(90))[0].status == 0


def test_a_dead_host_leaves_nothing_behind(rig: Rig) -> None:
    rig.grant(1, 0, 100)
    for _ in range(3):
        host = rig.attach(queues=2)
        host.io[0].start_write(0, 8192)
        host.io[1].send(host.io[1].conn.send_command(command.read(9, 1, 0, 2048), read_bytes=2048 * 4096))
        for queue in (*host.io, host.admin):
            queue.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # a reset, as by a crash
        host.close()
    eventually(lambda: not rig.server.queues and not rig.server.controllers, "all queues are gone")
    assert rig.server.grants.revoke([1]) == 1


def test_connections_above_the_limit_are_told_so(quick_rig: Rig) -> None:  # Fabrics: Connect, Controller Busy
    with quick_rig.attach(queues=4) as host, RawHost(quick_rig.port).initialize():
        for _ in range(2):
            with RawHost(quick_rig.port).initialize() as extra:
                assert extra.connect(NQN).status == Status.CONNECT_CONTROLLER_BUSY  # which may be tried again
                assert extra.gone() is None
        assert host.io[0].read(0, 1)[0].status == 0
    eventually(lambda: not quick_rig.server.queues, "all are gone")
    assert quick_rig.server.counts["refused_connections"] == 2
    quick_rig.attach(queues=1).close()


def test_a_flood_of_connections_is_closed_unheard(quick_rig: Rig) -> None:
    """Those that are told cost a thread each, so there is a bound to them too."""
    with quick_rig.attach(queues=4) as host:
        flood = [RawHost(quick_rig.port) for _ in range(100)]
        try:
            eventually(lambda: quick_rig.server.counts["refused_connections"] == 99, "all were looked at")
            assert len(quick_rig.server.queues) == 6 + 32
            with pytest.raises(Gone):
                flood[-1].initialize()
            assert host.io[0].read(0, 1)[0].status == 0
        finally:
            for one in flood:
                one.sock.close()
    eventually(lambda: not quick_rig.server.queues, "all are gone")
    with quick_rig.attach(queues=4) as host:
        assert host.io[3].read(0, 1)[0].status == 0


@pytest.mark.parametrize("part", ["connection", "capsule"])
def test_who_comes_byte_by_byte_has_a_limit_for_all(quick_rig: Rig, part: str) -> None:
    """Each byte in time is not enough: the Connect command must be here by then."""
    with RawHost(quick_rig.port) as slow, quick_rig.attach() as host:
        if part == "connection":
            raw = b"".join(bytes(piece) for piece in slow.conn.send_ic_req())
        else:
            slow.initialize()
            raw = pdu.capsule_cmd_header(command.connect(1, 0, 32), 1024) + bytes(1024)
        ended = False
        for at in range(len(raw)):
            try:
                slow.sock.sendall(raw[at : at + 1])
            except ConnectionError:
                ended = True
                break
            time.sleep(0.1)  # well within the time for one receive
        assert ended
        assert host.io[0].read(0, 1)[0].status == 0


def test_only_commands_under_way_hold_buffers(tmp_path: Path) -> None:
    """Memory goes by what is under way, not by the connections that there are or were."""
    rig = Rig(tmp_path, replace(LIMITS, buffer_bytes=4 << 20))
    pool = rig.server.buffers
    rig.grant(1, 0, 2048)
    with rig.attach(queues=4) as host, rig.attach(queues=4) as other:
        for queue in (*host.io, *other.io):
            assert queue.read(0, 256)[0].status == 0
            assert queue.write(0, bytes(1 << 20)).status == 0
            assert queue.write(0, bytes(4096), in_capsule=True).status == 0
        assert pool.lent_bytes == 0
        writes = [(queue, [queue.start_write(0, 1 << 20)]) for queue in (*host.io, *other.io)]
        assert pool.lent_bytes == 8 << 20, "each queue has what it needs, though that is more than the pool keeps"
        queue, r2ts = writes[0]
        more = command.write(queue.next_cid(), 1, 256, 256)
        queue.send(queue.conn.send_command(more, write_bytes=1 << 20))
        assert queue.read(0, 256)[0].status == 0, "a further write waits, and holds up nothing"
        eventually(lambda: pool.lent_bytes == 8 << 20, "the read's buffer comes back, behind its answer")
        queue.send(queue.conn.send_h2c_data(r2ts[0], [bytes(1 << 20)]))
        assert queue.finish().status == 0
        r2ts[0] = queue.expect(R2TReceived)  # its turn
        for queue, (r2t,) in writes:
            queue.send(queue.conn.send_h2c_data(r2t, [bytes(1 << 20)]))
            assert queue.finish().status == 0
        assert pool.lent_bytes == 0
        host.io[0].start_write(0, 1 << 20)
        assert pool.lent_bytes == 1 << 20
    eventually(lambda: not rig.server.queues, "all are gone")
    assert pool.lent_bytes == 0
    rig.server.close()


def test_keep_alive(tmp_path: Path) -> None:  # Base §3.9
    """A controller whose host is silent ends; traffic on any queue, or Keep Alive, keeps one."""
    clock = ManualClock()
    rig = Rig(tmp_path, clock=clock)
    with (
        rig.attach(keep_alive_ms=1000) as silent,
        rig.attach(keep_alive_ms=1000) as reading,
        rig.attach(keep_alive_ms=1000) as alive,
        rig.attach(keep_alive_ms=0) as careless,
    ):

        def seen() -> bool:
            return not any(controller.heard for controller in rig.server.controllers)

        eventually(seen, "what was heard so far is noted")
        clock.advance(900)
        assert reading.io[0].read(0, 1)[0].status == 0
        assert alive.admin.run(command.keep_alive(200))[0].status == 0
        eventually(seen, "the commands are noted")
        clock.advance(900)
        assert silent.io[0].gone() is None
        assert silent.admin.gone() is None
        for host in (reading, alive, careless):
            assert host.io[0].read(0, 1)[0].status == 0
        # the silent one's threads close their sockets first and end after
        eventually(lambda: len(rig.server.controllers) == 3, "the silent host's controller is gone")
    rig.server.close()


def test_limits_that_make_no_sense_are_refused() -> None:
    for bad in (
        {"chunk_bytes": 5000},
        {"max_connections": 0},
        {"max_command_bytes": 1 << 40},
        {"open_writes": 0},
        {"in_capsule_bytes": 65536, "chunk_bytes": 4096},
    ):
        with pytest.raises(ConfigInvalid):
            TargetLimits(**bad)
    assert TargetLimits(max_command_bytes=256 << 20).mdts == 0
    assert TargetLimits(max_command_bytes=3 << 20).mdts == 9


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.booleans(),
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=200),
            st.builds(
                lambda kind, hlen, pdo, plen, rest: struct.pack("<BBBBI", kind, 0, hlen, pdo, plen) + rest,
                st.integers(0, 9),
                st.sampled_from([24, 72, 128]),
                st.sampled_from([0, 24, 72]),
                st.integers(0, 9000),
                st.binary(max_size=150),
            ),
            st.builds(
                lambda op, cid, nsid, a, b, c: pdu.capsule_cmd_header(
                    command.Command(op, 0x40, cid, nsid, sgl_length_bytes=c, cdw10=a, cdw11=b, cdw12=c), 0
                ),
                st.sampled_from([0, 1, 2, 6, 8, 9, 0x0A, 0x0C, 0x18, 0x7F]),
                st.integers(0, 0xFFFF),
                st.integers(0, 0xFFFFFFFF),
                st.integers(0, 0xFFFFFFFF),
                st.integers(0, 0xFFFFFFFF),
                st.integers(0, 0xFFFFFFFF),
            ),
        ),
        max_size=6,
    ),
)
def test_garbage_never_fails_a_queue_in_any_other_way(
    disk_rig: Rig, caplog: pytest.LogCaptureFixture, admin: bool, pieces: list[bytes]
) -> None:
    """Whatever a connected host sends, the target's thread ends by a protocol error or goes on."""
    caplog.clear()
    with disk_rig.attach() as host:
        queue = host.admin if admin else host.io[0]
        try:
            for piece in pieces:
                queue.sock.sendall(piece)
            queue.sock.shutdown(socket.SHUT_WR)
            while queue.sock.recv(65536):
                pass
        except ConnectionError:
            pass
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    with disk_rig.attach() as again:
        assert again.io[0].read(0, 1)[0].status == 0
