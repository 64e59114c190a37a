"""Asynchronous events, Abort, log pages and identify data."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from forebay.appliance.dataplane.target.subsystems import Namespace
from forebay.clock import ManualClock
from forebay.nvmetcp import command, spec
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.events import ResponseReceived
from forebay.nvmetcp.spec import CnsValue, FeatureId, LogPage, Status
from tests.appliance.target.conftest import Rig, eventually
from tests.appliance.target.host import HOST_NQN, Association, get_log_page

CHANGED = 0x2 | LogPage.CHANGED_NAMESPACES << 16
ALL_EVENTS = 0xFFFFFFFF


def listen(host: Association, cid: int = 900, events: int = ALL_EVENTS) -> None:
    """Configure events and leave one request."""
    assert host.admin.run(command.set_features(cid + 90, FeatureId.ASYNC_EVENT_CONFIGURATION, events))[0].status == 0
    request(host, cid)


def request(host: Association, cid: int) -> None:
    host.admin.send(host.admin.conn.send_command(command.async_event_request(cid)))


def told(host: Association) -> tuple[int, int]:
    done = host.admin.expect(ResponseReceived).completion
    assert done.status == 0
    return done.cid, done.result


def silent(host: Association) -> bool:
    """Whether the next thing that comes is the answer to what is asked now."""
    return host.admin.run(command.keep_alive(host.admin.next_cid()))[0].status == 0


def changed(host: Association, *, retain: bool = False) -> list[int]:
    return command.active_namespaces(host.admin.log_page(LogPage.CHANGED_NAMESPACES, 4096, retain=retain))


# --- asynchronous events (Base §5.2) ----------------------------------------------------------------------------------


def test_async_event_requests_are_held_up_to_aerl(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        for cid in range(100, 104):
            request(host, cid)
        done, _ = host.admin.run(command.async_event_request(104))
        assert done.status == Status.ASYNC_EVENT_LIMIT_EXCEEDED
        assert silent(host)
        assert host.admin.conn.open_commands == 4


def test_a_namespace_that_comes_and_goes_is_told(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        listen(host)
        disk_rig.add_volume("new", 5)
        assert told(host) == (900, CHANGED)
        # Until the log page was read it is not told again.
        request(host, 901)
        disk_rig.server.remove_namespace(disk_rig.subsystem, 5)
        disk_rig.add_volume("third", 7)
        assert silent(host)
        assert changed(host, retain=True) == [5, 7]
        assert changed(host) == [5, 7]
        assert changed(host) == []
        disk_rig.server.delete_volume("third")
        assert told(host) == (901, CHANGED)
        assert changed(host) == [7]


def test_an_event_waits_for_a_request(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        listen(host)
        disk_rig.add_volume("one", 5)
        assert told(host) == (900, CHANGED)
        assert changed(host) == [5]
        disk_rig.add_volume("two", 6)
        assert silent(host)
        request(host, 901)
        assert told(host) == (901, CHANGED)


def test_only_who_sees_it_is_told(disk_rig: Rig) -> None:
    disk_rig.add_volume("hidden", 9, auto_visible=False)
    namespace = disk_rig.subsystem.namespaces[9]
    with disk_rig.attach() as mine, disk_rig.other() as theirs:
        listen(mine)
        listen(theirs)
        disk_rig.server.show_namespace(namespace, HOST_NQN)
        assert told(mine) == (900, CHANGED)
        assert changed(mine) == [9]
        request(mine, 901)
        disk_rig.server.show_namespace(namespace, HOST_NQN)  # no change
        assert silent(mine)
        disk_rig.server.hide_namespace(namespace, HOST_NQN)
        assert told(mine) == (901, CHANGED)
        disk_rig.server.hide_namespace(namespace, HOST_NQN)
        disk_rig.server.remove_namespace(disk_rig.subsystem, 9)
        assert silent(theirs)
        assert changed(theirs) == []


def test_events_that_were_not_enabled_are_not_told(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        listen(host, events=0xFF)
        disk_rig.add_volume("new", 5)
        assert silent(host)
        assert changed(host) == [5]


def test_more_changes_than_the_list_holds(disk_rig: Rig) -> None:  # Base §5.16.1.5
    disk_rig.subsystem.max_namespaces = 5000
    with disk_rig.attach() as host:
        (controller,) = disk_rig.server.controllers
        for nsid in range(2, 1200):
            controller.events.namespace_changed(nsid)
        assert changed(host) == [0xFFFFFFFF]


def test_a_reset_forgets_requests_and_what_was_enabled(disk_rig: Rig) -> None:
    with disk_rig.attach(queues=0) as host:
        listen(host)
        assert host.admin.run(command.property_set(50, spec.Property.CC, 0))[0].status == 0
        host.admin.enable()
        disk_rig.add_volume("new", 5)
        assert silent(host)


def fill(sock: socket.socket) -> None:
    """Send until this end and the peer's hold all they can: nothing is on its way, and nothing more is taken.

    What is on its way when the socket first refuses makes room as it arrives, so that a short message would fit again.
    """
    unacked_at = 24  # tcpi_unacked of struct tcp_info: segments sent and not acknowledged

    def full() -> bool:
        on_its_way = struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), unacked_at)[0]
        try:
            while True:
                sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)
                on_its_way = 1
        except BlockingIOError:
            return not on_its_way

    eventually(full, "the peer's window is closed", 60.0)


def test_a_host_that_takes_nothing_holds_up_no_change(disk_rig: Rig) -> None:
    """An event that does not fit into the socket ends the connection, and the change goes on."""
    with disk_rig.attach(queues=0) as host:
        listen(host)
        (controller,) = disk_rig.server.controllers
        sock = controller.queues[0]._stream._sock
        # Fixed sizes: the kernel grows others by itself.
        host.admin.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        fill(sock)
        disk_rig.add_volume("new", 5)
        eventually(lambda: not disk_rig.server.controllers, "the controller is gone")


def test_abort(disk_rig: Rig) -> None:  # Base §5.1
    with disk_rig.attach() as host:
        request(host, 900)
        request(host, 901)
        host.admin.send(host.admin.conn.send_command(Command(0x08, 0x40, 50, cdw10=901 << 16)))
        first, second = host.admin.expect(ResponseReceived).completion, host.admin.expect(ResponseReceived).completion
        assert (first.cid, first.status) == (901, Status.ABORTED_BY_REQUEST)
        assert (second.cid, second.status, second.result & 1) == (50, 0, 0)
        for row in (901 << 16, 7 << 16 | 1, 3 << 16 | 77):  # aborted already, unknown, no such queue
            done, _ = host.admin.run(Command(0x08, 0x40, 51, cdw10=row))
            assert (done.status, done.result & 1) == (0, 1)


# --- log pages (Base §5.16) -------------------------------------------------------------------------------------------


def test_smart(tmp_path: Path) -> None:
    clock = ManualClock()
    rig = Rig(tmp_path, clock=clock)
    rig.volume.fenced = False
    rig.add_volume("hidden", 9, auto_visible=False)
    clock.advance(3 * 3_600_000 + 5)
    with rig.attach() as host:
        host.io[0].write(0, bytes(1 << 20))
        host.io[0].read(0, 256)
        host.io[0].read(0, 256)
        raw = host.admin.log_page(LogPage.SMART, 512)
        found = {
            name: spec.SMART.integer(raw, name)
            for name in ("data_units_read", "data_units_written", "host_reads", "host_writes", "power_on_hours")
        }
        assert found == {
            "data_units_read": 5,  # 4.096 thousands of 512 bytes, rounded up
            "data_units_written": 3,
            "host_reads": 2,
            "host_writes": 1,
            "power_on_hours": 3,
        }
        assert raw[0] == 0
        assert spec.SMART.integer(raw, "available_spare") == 100
        assert spec.SMART.integer(raw, "media_errors") == spec.SMART.integer(raw, "error_log_entries") == 0
        one = get_log_page(60, LogPage.SMART, 512)._replace(nsid=1)
        assert host.admin.run(one, read_bytes=512)[0].status == Status.INVALID_FIELD
    rig.server.close()


def test_error_information(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        assert host.admin.log_page(LogPage.ERROR_INFORMATION, 1024) == bytes(1024)
        refused = host.io[0].write(77, bytes(4096))
        assert refused.status == Status.ACCESS_DENIED
        host.admin.run(command.identify(66, 0x55), read_bytes=4096)  # type: ignore[arg-type]
        raw = host.admin.log_page(LogPage.ERROR_INFORMATION, 1024)
        names = ("error_count", "sqid", "cid", "lba", "nsid", "parameter")
        rows = [tuple(spec.ERROR_ENTRY.integer(raw[at : at + 64], name) for name in names) for at in range(0, 1024, 64)]
        assert rows[:2] == [(2, 0, 66, 0, 0, 0xFFFF), (1, 1, refused.cid, 77, 1, 0xFFFF)]
        assert spec.ERROR_ENTRY.integer(raw[64:], "status") >> 1 == Status.ACCESS_DENIED | spec.DNR
        assert set(rows[2:]) == {(0, 0, 0, 0, 0, 0)}
        for cid in range(100, 120):
            host.admin.run(command.identify(cid, 0x55), read_bytes=4096)  # type: ignore[arg-type]
        raw = host.admin.log_page(LogPage.ERROR_INFORMATION, 1024)
        assert spec.ERROR_ENTRY.integer(raw, "error_count") == 22
        assert spec.ERROR_ENTRY.integer(raw[-64:], "error_count") == 7
        assert spec.SMART.integer(host.admin.log_page(LogPage.SMART, 512), "error_log_entries") == 22


def test_firmware_and_effects(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        raw = host.admin.log_page(LogPage.FIRMWARE_SLOT, 512)
        revision = raw[8:16]
        assert raw[0] == 1
        _, identity = host.admin.run(command.identify(60, CnsValue.CONTROLLER), read_bytes=4096)
        assert identity[64:72] == revision

        def effects() -> tuple[int, ...]:
            return struct.unpack("<1024I", host.admin.log_page(LogPage.COMMANDS_SUPPORTED, 4096))

        found = effects()
        assert [op for op in range(256) if found[op] & 1] == [0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18]
        assert [op for op in range(256) if found[256 + op] & 1] == [0, 1, 2]
        assert not any(found[512:])
        disk_rig.server.set_fenced("vol", False)
        found = effects()
        assert {op: found[256 + op] for op in range(256) if found[256 + op]} == {0: 1, 1: 3, 2: 1, 8: 3, 9: 3}


def test_supported_log_pages(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        found = struct.unpack("<256I", host.admin.log_page(LogPage.SUPPORTED_LOG_PAGES, 1024))
        pages = [page for page in range(256) if found[page]]
        assert pages == [0, 1, 2, 3, 4, 5]
        for page in pages:
            assert len(host.admin.log_page(page, 512)) == 512


def test_log_pages_by_offset_and_what_is_refused(disk_rig: Rig) -> None:
    with disk_rig.attach() as host:
        whole = host.admin.log_page(LogPage.COMMANDS_SUPPORTED, 4096)
        assert host.admin.log_page(LogPage.COMMANDS_SUPPORTED, 64, offset_bytes=1020) == whole[1020:1084]
        assert host.admin.log_page(LogPage.COMMANDS_SUPPORTED, 64, offset_bytes=4064) == whole[4064:] + bytes(32)
        page = int(LogPage.COMMANDS_SUPPORTED)
        for one, read_bytes, status in (
            (get_log_page(60, page, 64, 4100), 64, Status.INVALID_FIELD),
            (get_log_page(61, page, 64, 2), 64, Status.INVALID_FIELD),
            (get_log_page(62, page, 2 << 20), 2 << 20, Status.INVALID_FIELD),
            (get_log_page(63, page, 4096), 64, Status.DATA_SGL_LENGTH_INVALID),
            (get_log_page(64, 0x70, 64), 64, Status.INVALID_LOG_PAGE),
        ):
            done, _ = host.admin.run(one, read_bytes=read_bytes)
            assert (done.status, done.do_not_retry) == (status, True)


# --- identify ---------------------------------------------------------------------------------------------------------


def test_what_identify_says_of_deallocation(disk_rig: Rig) -> None:
    """ONCS and DLFEAT follow the volumes that this host sees."""
    layout = spec.IDENTIFY_CONTROLLER

    def look(host: Association) -> tuple[int, int]:
        _, raw = host.admin.run(command.identify(host.admin.next_cid(), CnsValue.CONTROLLER), read_bytes=4096)
        _, space = host.admin.run(command.identify(host.admin.next_cid(), CnsValue.NAMESPACE, 1), read_bytes=4096)
        return layout.integer(raw, "oncs"), spec.IDENTIFY_NAMESPACE.integer(space, "dlfeat")

    with disk_rig.attach(queues=0) as host:
        assert look(host) == (0, 0x1)
        disk_rig.server.set_fenced("vol", False)
        assert look(host) == (0xC, 0x9)
        _, raw = host.admin.run(command.identify(900, CnsValue.CONTROLLER), read_bytes=4096)
        assert layout.integer(raw, "oaes") == 0x100
        assert layout.integer(raw, "cmic") == 2  # no ANA
        _, raw = host.admin.run(command.identify(901, CnsValue.CONTROLLER_OF_COMMAND_SET), read_bytes=4096)
        assert spec.IDENTIFY_CONTROLLER_NVM.integer(raw, "wzsl") == 11  # 2^11 pages: max_command_bytes
        disk_rig.volume.readonly = True
        assert look(host) == (0, 0x1)


def test_an_auto_visible_namespace_is_told_to_all(disk_rig: Rig) -> None:
    volume = disk_rig.add_volume("solo", 3)
    disk_rig.server.remove_namespace(disk_rig.subsystem, 3)
    with disk_rig.attach(queues=0) as mine, disk_rig.other(queues=0) as theirs:
        listen(mine)
        listen(theirs)
        namespace = Namespace(0, volume, nguid=bytes(16), uuid=None, auto_visible=True)
        disk_rig.server.add_namespace(disk_rig.subsystem, namespace)
        assert told(mine) == told(theirs) == (900, CHANGED)
        assert changed(mine) == changed(theirs) == [2]
