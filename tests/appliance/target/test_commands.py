"""Every opcode, as a host sees it, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.appliance.dataplane.target.volume import Volume
from forebay.nvmetcp import command, spec
from forebay.nvmetcp.command import Command, ControllerIdentity, NamespaceIdentity
from forebay.nvmetcp.events import DataEnd, DataStart, ICRespReceived, R2TReceived, ResponseReceived
from forebay.nvmetcp.spec import CnsValue, FeatureId, IoOpcode, NsDescriptorType, Property, Status
from tests.appliance.target.conftest import LBAS, LIMITS, NGUID, NQN, Rig
from tests.appliance.target.host import HOST_ID, HOST_NQN, OTHER_NQN, RawHost


def pattern(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that repeat after a prime number of them, so that no two blocks are alike."""
    unit = bytes((i * 7 + seed) & 0xFF for i in range(4093))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


# --- connecting (Base §6.3) -------------------------------------------------------------------------------------------


def test_initialize(rig: Rig) -> None:
    with RawHost(rig.port) as host:
        host.send(host.conn.send_ic_req())
        assert host.event() == ICRespReceived(0, LIMITS.max_h2c_data_bytes)


def test_controllers_of_one_host_have_their_own_ids(rig: Rig) -> None:
    with rig.attach() as one, rig.attach() as two:
        assert one.cntlid != two.cntlid
        assert {c.cntlid for c in rig.server.controllers} == {one.cntlid, two.cntlid}


def test_a_host_that_is_not_allowed_is_refused(rig: Rig) -> None:
    rig.subsystem.allow_any_host = False
    rig.subsystem.hosts[OTHER_NQN] = None
    with RawHost(rig.port).initialize() as host:
        done = host.connect(NQN)
        assert (done.status >> 8, done.status & 0xFF, done.do_not_retry) == (1, 0x84, True)
        assert host.connect(NQN, host_nqn=OTHER_NQN).status == 0  # the connection is usable after


@pytest.mark.parametrize(
    ("options", "status", "at"),
    [
        ({"nqn": "nqn.none"}, Status.CONNECT_INVALID_PARAMETERS, 1 << 16 | 256),
        ({"nqn": NQN, "cntlid": 5}, Status.CONNECT_INVALID_PARAMETERS, 1 << 16 | 16),
        ({"nqn": NQN, "entries": 33}, Status.CONNECT_INVALID_PARAMETERS, 44),
        ({"nqn": NQN, "entries": 1}, Status.CONNECT_INVALID_PARAMETERS, 44),
        ({"nqn": NQN, "host_nqn": ""}, Status.CONNECT_INVALID_PARAMETERS, 1 << 16 | 512),
        ({"nqn": NQN, "qid": 1, "cntlid": 999}, Status.CONNECT_INVALID_PARAMETERS, 1 << 16 | 16),
    ],
)
def test_connect_refusals(disk_rig: Rig, options: dict[str, object], status: Status, at: int) -> None:
    with RawHost(disk_rig.port).initialize() as host:
        done = host.connect(**options)  # type: ignore[arg-type]
        assert (done.status, done.result) == (status, at)


def test_an_io_queue_needs_its_controllers_host(disk_rig: Rig) -> None:
    with disk_rig.attach(queues=0) as host, RawHost(disk_rig.port).initialize() as queue:
        done = queue.connect(NQN, qid=1, cntlid=host.cntlid, host_nqn=OTHER_NQN)
        assert done.status == Status.CONNECT_INVALID_PARAMETERS
        assert queue.connect(NQN, qid=5, cntlid=host.cntlid).status == Status.INVALID_QUEUE_ID
        assert queue.connect(NQN, qid=1, cntlid=host.cntlid).status == 0
        with RawHost(disk_rig.port).initialize() as twin:
            assert twin.connect(NQN, qid=1, cntlid=host.cntlid).status == Status.INVALID_QUEUE_ID


def test_nothing_before_connect(disk_rig: Rig) -> None:
    with RawHost(disk_rig.port).initialize() as host:
        done, _ = host.run(command.property_get(1, Property.CAP, wide=True))
        assert done.status == Status.COMMAND_SEQUENCE_ERROR
        done, _ = host.run(command.write(2, 1, 0, 1), data=bytes(4096))
        assert done.status == Status.COMMAND_SEQUENCE_ERROR
        one = command.connect(3, 0, 32)._replace(cdw10=1)  # RECFMT
        done, _ = host.run(one, data=command.ConnectData(HOST_ID, 0xFFFF, NQN, HOST_NQN).to_bytes())
        assert done.status == Status.CONNECT_INCOMPATIBLE_FORMAT


def test_nothing_before_enable(disk_rig: Rig) -> None:
    with RawHost(disk_rig.port).initialize() as host:
        cntlid = host.connect(NQN).result
        done, _ = host.run(command.identify(9, CnsValue.CONTROLLER), read_bytes=4096)
        assert done.status == Status.COMMAND_SEQUENCE_ERROR
        with RawHost(disk_rig.port).initialize() as queue:
            assert queue.connect(NQN, qid=1, cntlid=cntlid).status == Status.COMMAND_SEQUENCE_ERROR


# --- admin ------------------------------------------------------------------------------------------------------------


def test_properties(disk_rig: Rig) -> None:  # Base §3.1.3
    with disk_rig.attach(queues=1) as host:
        cap = host.admin.run(command.property_get(50, Property.CAP, wide=True))[0].result
        assert cap & 0xFFFF == LIMITS.max_queue_depth - 1
        assert cap >> 37 & 1
        assert host.admin.run(command.property_get(51, Property.VS, wide=False))[0].result == 0x10400
        assert host.admin.run(command.property_get(52, Property.CC, wide=False))[0].result == 0x460001
        done, _ = host.admin.run(command.property_get(53, 0x30, wide=False))
        assert done.status == Status.INVALID_FIELD
        done, _ = host.admin.run(command.property_set(54, Property.CSTS, 1))
        assert done.status == Status.INVALID_FIELD


def test_shutdown_ends_io_queues_and_says_when_it_is_done(disk_rig: Rig) -> None:
    with disk_rig.attach(queues=2) as host:
        assert host.admin.run(command.property_set(60, Property.CC, 0x464001))[0].status == 0
        assert host.admin.run(command.property_get(61, Property.CSTS, wide=False))[0].result >> 2 & 3 == 2
        for queue in host.io:
            assert queue.gone() is None
        assert host.admin.run(command.keep_alive(62))[0].status == 0


def test_identify(rig: Rig) -> None:  # Base §5.17
    rig.add_volume("hidden", 7, lbas=256, auto_visible=False)
    rig.add_volume("late", 9, lbas=512)
    with rig.attach() as host:
        done, raw = host.admin.run(command.identify(70, CnsValue.CONTROLLER), read_bytes=4096)
        assert done.status == 0
        found = ControllerIdentity.from_bytes(raw)
        assert found == ControllerIdentity(
            host.cntlid,
            "FB1",
            "Forebay",
            NQN,
            LIMITS.max_command_bytes,
            LIMITS.max_queue_depth,
            8192,
            100,
            64,
            0x100001,
        )
        _, raw = host.admin.run(command.identify(71, CnsValue.ACTIVE_NAMESPACES), read_bytes=4096)
        assert command.active_namespaces(raw) == [1, 9]
        _, raw = host.admin.run(command.identify(72, CnsValue.ACTIVE_NAMESPACES, 1), read_bytes=4096)
        assert command.active_namespaces(raw) == [9]
        _, raw = host.admin.run(command.identify(73, CnsValue.NAMESPACE, 1), read_bytes=4096)
        assert NamespaceIdentity.from_bytes(raw) == NamespaceIdentity(LBAS, 4096, NGUID.bytes)
        _, raw = host.admin.run(command.identify(74, CnsValue.NAMESPACE, 7), read_bytes=4096)
        assert raw == bytes(4096)
        _, raw = host.admin.run(command.identify(75, CnsValue.NAMESPACE_DESCRIPTORS, 1), read_bytes=4096)
        found_ids = command.namespace_descriptors(raw)
        assert found_ids == {NsDescriptorType.NGUID: NGUID.bytes, NsDescriptorType.UUID: NGUID.bytes}
        for cid, cns, nsid, status in (
            (76, CnsValue.NAMESPACE, 0, Status.INVALID_NAMESPACE),
            (77, CnsValue.NAMESPACE, 65, Status.INVALID_NAMESPACE),
            (78, CnsValue.NAMESPACE_DESCRIPTORS, 7, Status.INVALID_NAMESPACE),
            (79, CnsValue.ACTIVE_NAMESPACES, 0xFFFFFFFE, Status.INVALID_NAMESPACE),
            (80, 0x05, 0, Status.INVALID_FIELD),
        ):
            done, _ = host.admin.run(command.identify(cid, cns, nsid), read_bytes=4096)  # type: ignore[arg-type]
            assert (done.status, done.do_not_retry) == (status, True)


def test_features(disk_rig: Rig) -> None:  # Base §5.27
    with disk_rig.attach() as host:
        done, _ = host.admin.run(command.set_features(20, FeatureId.NUMBER_OF_QUEUES, 0x00080008))
        assert done.result == (LIMITS.max_io_queues - 1) * 0x10001
        done, _ = host.admin.run(command.set_features(21, FeatureId.NUMBER_OF_QUEUES, 0x00010001))
        assert done.result == 0x10001
        assert host.admin.run(command.get_features(22, FeatureId.NUMBER_OF_QUEUES))[0].result == 0x10001
        assert host.admin.run(command.set_features(23, FeatureId.NUMBER_OF_QUEUES, 0xFFFFFFFF))[0].status == 2
        assert host.admin.run(command.set_features(24, FeatureId.KEEP_ALIVE_TIMER, 120_000))[0].status == 0
        assert host.admin.run(command.get_features(25, FeatureId.KEEP_ALIVE_TIMER))[0].result == 120_000
        assert host.admin.run(command.set_features(26, FeatureId.ASYNC_EVENT_CONFIGURATION, 0x100))[0].status == 0
        assert host.admin.run(command.get_features(27, FeatureId.ASYNC_EVENT_CONFIGURATION))[0].result == 0x100
        assert host.admin.run(command.set_features(28, FeatureId.HOST_IDENTIFIER, 0))[0].status == 2
        assert host.admin.run(command.get_features(29, FeatureId.HOST_IDENTIFIER))[0].status == 2
        wide = command.get_features(30, FeatureId.HOST_IDENTIFIER)._replace(cdw11=1)
        assert host.admin.run(wide, read_bytes=16)[1] == HOST_ID.bytes
        assert host.admin.run(wide._replace(cid=31))[0].status == Status.DATA_SGL_LENGTH_INVALID


@pytest.mark.parametrize(
    ("feature", "at_first", "good", "bad"),
    [
        (FeatureId.ARBITRATION, 0x7, 0x3, None),
        (FeatureId.POWER_MANAGEMENT, 0, 0, 1),
        (FeatureId.TEMPERATURE_THRESHOLD, 0xFFFF, 0x150, None),
        (FeatureId.ERROR_RECOVERY, 0, 5, None),
        (FeatureId.VOLATILE_WRITE_CACHE, 1, 1, 0),
        (FeatureId.WRITE_ATOMICITY, 0, 1, None),
    ],
)
def test_features_that_every_controller_has(
    disk_rig: Rig, feature: FeatureId, at_first: int, good: int, bad: int | None
) -> None:
    with disk_rig.attach() as host:
        assert host.admin.run(command.get_features(20, feature))[0].result == at_first
        if bad is not None:
            assert host.admin.run(command.set_features(21, feature, bad))[0].status
            assert host.admin.run(command.get_features(22, feature))[0].result == at_first
        assert host.admin.run(command.set_features(23, feature, good))[0].status == 0
        assert host.admin.run(command.get_features(24, feature))[0].result == good
        saved = command.set_features(25, feature, good)
        assert host.admin.run(saved._replace(cdw10=saved.cdw10 | 1 << 31))[0].status == Status.FEATURE_NOT_SAVEABLE
        default = command.get_features(26, feature)
        assert host.admin.run(default._replace(cdw10=default.cdw10 | 1 << 8))[0].status == Status.INVALID_FIELD


def test_keep_alive_timer_is_rounded_up(disk_rig: Rig) -> None:  # Base §5.27.1.12
    with disk_rig.attach() as host:
        host.admin.run(command.set_features(20, FeatureId.KEEP_ALIVE_TIMER, 120_001))
        assert host.admin.run(command.get_features(21, FeatureId.KEEP_ALIVE_TIMER))[0].result == 120_100


def test_the_other_admin_commands(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        assert host.admin.run(Command(0x08, 0x40, 30, cdw10=0x00010001))[0].result & 1  # Abort: not aborted
        assert host.admin.run(Command(0x02, 0x40, 31, cdw10=0x0D))[0].status == Status.INVALID_LOG_PAGE
        assert host.admin.run(Command(0x7C, 0x40, 32))[0].status == Status.INVALID_OPCODE
        assert host.admin.run(Command(0x7F, 0x40, 33, nsid=0x08))[0].status == Status.INVALID_OPCODE  # Disconnect
        done, _ = host.admin.run(Command(0x09, 0x40, 34, cdw10=0x16), data=bytes(512))
        assert done.status == Status.INVALID_FIELD
        assert host.admin.connect(NQN).status == Status.COMMAND_SEQUENCE_ERROR
        assert host.io[0].run(command.property_get(35, Property.CAP, wide=True))[0].status == Status.INVALID_FIELD


# --- I/O --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nlb", [1, 2, 255, 256, 257, 1100])
@pytest.mark.parametrize("flow_control", [False, True])
def test_what_is_written_is_read(rig: Rig, nlb: int, flow_control: bool) -> None:
    rig.grant(1, 100, 2000)
    data = pattern(nlb * 4096)
    with rig.attach(flow_control=flow_control) as host:
        assert host.io[0].write(100, data).status == 0
        assert rig.stored(100, nlb) == data
        done, got = host.io[0].read(100, nlb)
        assert done.status == 0
        assert got == data
        assert host.io[0].read(99, 1)[1] == bytes(4096)


def test_a_read_ends_with_success_or_with_a_response(rig: Rig) -> None:
    """TCP §3.6.2.9: SUCCESS only if the host gave up SQ flow control."""
    with rig.attach() as plain, rig.attach(flow_control=True) as controlled:
        plain.io[0].send(plain.io[0].conn.send_command(command.read(50, 1, 0, 1), read_bytes=4096))
        assert plain.io[0].event() == DataStart(50, None, 0, 4096, True, True)
        controlled.io[0].send(controlled.io[0].conn.send_command(command.read(50, 1, 0, 1), read_bytes=4096))
        assert controlled.io[0].event() == DataStart(50, None, 0, 4096, True, False)
        controlled.io[0].event()
        assert controlled.io[0].event() == DataEnd(50, None, True, False)
        assert controlled.io[0].expect(ResponseReceived).completion.sq_head == 2


def test_write_in_capsule(rig: Rig) -> None:
    rig.grant(1, 0, 10)
    with rig.attach() as host:
        assert host.io[0].write(3, pattern(8192), in_capsule=True).status == 0
        assert rig.stored(3, 2) == pattern(8192)
        one = command.write(40, 1, 3, 2)  # 8,192 bytes announced, 4,096 in the capsule
        assert host.io[0].run(one, data=bytes(4096))[0].status == Status.DATA_SGL_LENGTH_INVALID
        assert rig.stored(3, 2) == pattern(8192)


def test_data_in_small_pdus_and_interleaved_writes(rig: Rig) -> None:
    """H2CData of any size, of two commands in turn, ends where it belongs."""
    rig.grant(1, 0, 1000)
    one, two = pattern(300 * 4096, 3), pattern(300 * 4096, 5)
    with rig.attach() as host:
        queue = host.io[0]
        first, second = queue.start_write(0, len(one)), queue.start_write(400, len(two))
        queue.conn.max_h2c_data_bytes = 100_000
        sizes = (100_000, 4)
        pieces = [queue.conn.send_h2c_data(first, [one]), queue.conn.send_h2c_data(second, [two])]
        assert len(pieces[0]) > 2 * sizes[1]
        for i in range(0, len(pieces[0]), 2):
            queue.send(pieces[0][i : i + 2])
            queue.send(pieces[1][i : i + 2])
        assert {queue.finish().status, queue.finish().status} == {0}
        assert rig.stored(0, 300) == one
        assert rig.stored(400, 300) == two


def test_more_writes_than_buffers_wait_for_their_r2t(rig: Rig) -> None:
    rig.grant(1, 0, 100)
    count = LIMITS.open_writes + 3
    with rig.attach() as host:
        queue = host.io[0]
        for i in range(count):
            one = command.write(queue.next_cid(), 1, i, 1)
            queue.send(queue.conn.send_command(one, write_bytes=4096))
        done = 0
        asked = []
        while done < count:
            event = queue.event()
            if isinstance(event, ResponseReceived):
                assert event.completion.status == 0
                done += 1
            else:
                assert isinstance(event, R2TReceived)
                asked.append(event)
                slba = event.cid - queue.cid + count - 1
                queue.send(queue.conn.send_h2c_data(event, [pattern(4096, slba)]))
        assert len(asked) == count
        for i in range(count):
            assert rig.stored(i, 1) == pattern(4096, i)


def test_flush(rig: Rig) -> None:
    with rig.attach() as host:
        assert host.io[0].run(command.flush(60, 1))[0].status == 0
        assert host.io[0].run(command.flush(61, 0xFFFFFFFF))[0].status == 0
        assert host.io[0].run(command.flush(62, 2))[0].status == Status.INVALID_NAMESPACE


@pytest.mark.parametrize(
    ("one", "read_bytes", "status"),
    [
        (command.read(1, 1, LBAS, 1), 4096, Status.LBA_OUT_OF_RANGE),
        (command.read(1, 1, LBAS - 1, 2), 8192, Status.LBA_OUT_OF_RANGE),
        (command.read(1, 1, (1 << 64) - 1, 2), 8192, Status.LBA_OUT_OF_RANGE),
        (command.read(1, 2, 0, 1), 4096, Status.INVALID_NAMESPACE),
        (command.read(1, 0, 0, 1), 4096, Status.INVALID_NAMESPACE),
        (command.read(1, 1, 0, LIMITS.max_command_bytes // 4096 + 1), 8 << 20, Status.INVALID_FIELD),
        (command.read(1, 1, 0, 2), 4096, Status.DATA_SGL_LENGTH_INVALID),
        (Command(IoOpcode.WRITE_ZEROES, 0x40, 1, 1), 0, Status.ACCESS_DENIED),
        (Command(IoOpcode.DATASET_MANAGEMENT, 0x40, 1, 1, cdw11=4), 0, Status.ACCESS_DENIED),
        (Command(0x05, 0x40, 1, 1), 0, Status.INVALID_OPCODE),
    ],
)
def test_io_refusals(disk_rig: Rig, one: Command, read_bytes: int, status: Status) -> None:
    with disk_rig.attach() as host:
        done, _ = host.io[0].run(one._replace(cid=200), read_bytes=read_bytes)
        assert (done.status, done.do_not_retry) == (status, True)
        assert host.io[0].read(0, 1)[0].status == 0


def test_per_host_visibility(rig: Rig) -> None:
    """Reads need a namespace that the host sees; SPDK's `no_auto_visible`."""
    rig.add_volume("hidden", 7, lbas=256, auto_visible=False)
    namespace = rig.subsystem.namespaces[7]
    namespace.hosts.add(HOST_NQN)
    with rig.attach() as mine, rig.other() as theirs:
        assert mine.io[0].read(0, 1, nsid=7)[0].status == 0
        assert theirs.io[0].read(0, 1, nsid=7)[0].status == Status.INVALID_NAMESPACE
        rig.server.hide_namespace(namespace, HOST_NQN)
        assert mine.io[0].read(0, 1, nsid=7)[0].status == Status.INVALID_NAMESPACE


def test_a_removed_namespace_is_gone(rig: Rig) -> None:
    rig.grant(1, 0, 10)
    with rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        rig.server.delete_volume("vol")
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [bytes(8192)]))
        assert host.io[0].finish().status == Status.INVALID_NAMESPACE
        assert host.io[0].read(0, 1)[0].status == Status.INVALID_NAMESPACE


def test_media_errors_are_told_and_the_connection_lives(disk_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_rig.grant(1, 0, 100)
    volume = disk_rig.volume

    def fail(code: int) -> object:
        def raising(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return raising

    with disk_rig.attach() as host:
        with monkeypatch.context() as patch:
            patch.setattr(volume, "write", fail(28))
            assert host.io[0].write(0, bytes(4096)).status == Status.CAPACITY_EXCEEDED
            patch.setattr(volume, "write", fail(5))
            assert host.io[0].write(0, bytes(4096), in_capsule=True).status == Status.WRITE_FAULT
            patch.setattr(os, "fdatasync", fail(5))
            assert host.io[0].run(command.flush(90, 1))[0].status == Status.WRITE_FAULT
        assert host.io[0].write(0, bytes(4096)).status == 0
        # After one failed flush Linux would let the next one succeed; we do not.
        assert host.io[0].run(command.flush(91, 1))[0].status == Status.WRITE_FAULT
        if volume.read_view is None:
            with monkeypatch.context() as patch:
                patch.setattr(volume, "read_into", fail(5))
                assert host.io[0].read(0, 1)[0].status == Status.UNRECOVERED_READ_ERROR
        assert host.io[0].read(0, 1)[0].status == 0


def test_a_read_error_after_the_first_chunk_is_told_too(disk_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = disk_rig.volume
    if volume.read_view is not None:
        pytest.skip("reads are sent from memory here")
    real = Volume.read_into

    def second_fails(self: Volume, view: memoryview, offset_bytes: int) -> None:
        if offset_bytes:
            raise OSError(5, "EIO")
        real(self, view, offset_bytes)

    monkeypatch.setattr(Volume, "read_into", second_fails)
    with disk_rig.attach() as host:
        done, _ = host.io[0].read(0, 512)
        assert done.status == Status.UNRECOVERED_READ_ERROR
        assert host.io[0].read(0, 1)[0].status == 0


def test_iostat_counts_what_was_done(rig: Rig) -> None:
    rig.grant(1, 0, 10)
    with rig.attach(queues=2) as host:
        host.io[0].write(0, bytes(8192))
        host.io[0].read(0, 2)
        host.io[1].read(0, 1)
        tally = rig.volume.tally()
        assert (tally.writes, tally.bytes_written, tally.reads, tally.bytes_read) == (1, 8192, 2, 12288)
    rig.server.teardown(lambda _: True)
    assert rig.volume.tally().bytes_read == 12288


def test_the_way_a_volume_is_read_depends_on_its_file_system(rig: Rig) -> None:
    in_memory = rig.directory.is_relative_to("/dev/shm")
    assert rig.volume.io == "mmap" if in_memory else rig.volume.io in ("direct", "buffered", "mmap")


def test_a_file_is_one_volume_at_a_time(disk_rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="busy"):
        Volume("again", disk_rig.volume.path)
    odd = tmp_path / "odd"
    odd.write_bytes(bytes(5000))
    with pytest.raises(OSError, match="Invalid"):
        Volume("odd", odd)


def test_buffered_io_where_direct_is_refused(disk_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without O_DIRECT."""
    if disk_rig.volume.io == "mmap":
        pytest.skip("the temporary directory is in memory")
    real = os.preadv

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    path = disk_rig.directory / "buffered"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 1 << 20)
    volume = Volume("buffered", path)
    monkeypatch.setattr(os, "preadv", real)
    assert volume.io == "buffered"
    volume.write(memoryview(pattern(4096)), 8192)
    volume.flush()
    got = memoryview(bytearray(4096))
    volume.read_into(got, 8192)
    assert bytes(got) == pattern(4096)
    volume.close()


def test_layout_of_status_is_as_the_issue_names_it() -> None:
    assert divmod(Status.ACCESS_DENIED, 256) == (2, 0x86)
    assert divmod(Status.CONNECT_INVALID_HOST, 256) == (1, 0x84)
    assert spec.DNR == 1 << 14
