"""Digests at the target: data moves with them, and damage is told (NVMe/TCP Transport Spec 1.1 §3.3.1.1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.nvmetcp import command
from forebay.nvmetcp.command import ConnectData
from forebay.nvmetcp.events import ICRespReceived
from forebay.nvmetcp.spec import FatalError, Status
from tests.appliance.target.conftest import LIMITS, NQN, Rig
from tests.appliance.target.host import HOST_ID, HOST_NQN, RawHost
from tests.appliance.target.test_commands import pattern

DIGESTS = [{"header_digest": True}, {"data_digest": True}, {"header_digest": True, "data_digest": True}]
BOTH = DIGESTS[2]


@pytest.mark.parametrize("digests", DIGESTS, ids=["header", "data", "both"])
@pytest.mark.parametrize("flow_control", [False, True])
@pytest.mark.parametrize("nlb", [1, 3, 257, 1100])
def test_what_is_written_is_read(rig: Rig, digests: dict[str, bool], flow_control: bool, nlb: int) -> None:
    rig.grant(1, 100, 2000)
    data = pattern(nlb * 4096)
    with rig.attach(flow_control=flow_control, **digests) as host:
        assert host.io[0].write(100, data).status == 0
        assert host.io[0].write(100, data[:4096], in_capsule=True).status == 0
        assert rig.stored(100, nlb) == data
        done, got = host.io[0].read(100, nlb)
        assert (done.status, got) == (0, data)
        assert host.io[0].read(99, 1)[1] == bytes(4096)


def test_digests_that_are_not_offered(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(LIMITS, digests=1))
    with RawHost(rig.port, **BOTH) as host:
        host.send(host.conn.send_ic_req())
        assert host.event() == ICRespReceived(0, LIMITS.max_h2c_data_bytes, True, False)
        assert host.connect(NQN).status == 0
    rig.server.close()


def damaged(pieces: list[bytes | bytearray | memoryview]) -> bytes:
    """One bit less or more in the data, which lies before the last piece, the digest."""
    raw = bytearray(b"".join(bytes(piece) for piece in pieces))
    raw[-5] ^= 0x10
    return bytes(raw)


def test_damaged_writes_are_told_and_not_stored(rig: Rig) -> None:
    """Transient Transport Error, and the connection goes on."""
    rig.grant(1, 0, 100)
    with rig.attach(**BOTH) as host:
        queue = host.io[0]
        one = command.write(queue.next_cid(), 1, 3, 2)
        queue.sock.sendall(damaged(queue.conn.send_command(one, data=pattern(8192))))
        done = queue.finish()
        assert (done.cid, done.status, done.do_not_retry) == (one.cid, Status.TRANSIENT_TRANSPORT_ERROR, False)
        request = queue.start_write(3, 8192)
        queue.sock.sendall(damaged(queue.conn.send_h2c_data(request, [pattern(8192)])))
        assert queue.finish().status == Status.TRANSIENT_TRANSPORT_ERROR
        assert rig.stored(3, 2) == bytes(8192)
        assert queue.write(3, pattern(8192)).status == 0
        assert rig.stored(3, 2) == pattern(8192)


def test_damage_in_an_early_pdu_of_a_write_is_not_forgotten(disk_rig: Rig) -> None:
    disk_rig.grant(1, 0, 100)
    with disk_rig.attach(**BOTH) as host:
        queue = host.io[0]
        request = queue.start_write(0, 16384)
        queue.conn.max_h2c_data_bytes = 8192
        pieces = queue.conn.send_h2c_data(request, [pattern(16384)])
        assert len(pieces) == 6
        queue.sock.sendall(damaged(pieces[:3]) + b"".join(bytes(piece) for piece in pieces[3:]))
        assert queue.finish().status == Status.TRANSIENT_TRANSPORT_ERROR
        assert disk_rig.stored(0, 4) == bytes(16384)


def test_a_damaged_connect(disk_rig: Rig) -> None:
    data = ConnectData(HOST_ID, 0xFFFF, NQN, HOST_NQN).to_bytes()
    with RawHost(disk_rig.port, **BOTH).initialize() as host:
        host.sock.sendall(damaged(host.conn.send_command(command.connect(1, 0, 32), data=data)))
        assert host.finish().status == Status.TRANSIENT_TRANSPORT_ERROR
        assert host.connect(NQN).status == 0


def test_a_damaged_header_ends_the_connection(disk_rig: Rig) -> None:
    with disk_rig.attach(queues=2, **BOTH) as host:
        (raw,) = host.io[0].conn.send_command(command.read(77, 1, 0, 1), read_bytes=4096)
        host.io[0].sock.sendall(bytes(raw[:60]) + b"\xff" + bytes(raw[61:]))
        term = host.io[0].gone()
        assert term is not None
        assert term.fatal_error == FatalError.HEADER_DIGEST_ERROR
        assert host.io[1].read(0, 1)[0].status == 0
