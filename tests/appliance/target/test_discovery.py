"""The discovery subsystem (Base §3.1.2.3, §5.16.1.23)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from forebay.appliance.dataplane.target.subsystems import Subsystem
from forebay.nvmetcp import command, spec
from forebay.nvmetcp.command import nqn_field
from forebay.nvmetcp.events import ResponseReceived
from forebay.nvmetcp.spec import DISCOVERY_NQN, CnsValue, FeatureId, LogPage, Status
from tests.appliance.target.conftest import NQN, Rig
from tests.appliance.target.host import HOST_NQN, OTHER_NQN, Association, RawHost

CLOSED = "nqn.2026-01.io.forebay:node:closed"


@dataclass(frozen=True)
class Found:
    generation: int
    entries: list[tuple[str, str, str]]


def discover(host: Association | RawHost, *, retain: bool = False) -> Found:
    admin = host.admin if isinstance(host, Association) else host
    header = admin.log_page(LogPage.DISCOVERY, 1024, retain=retain)
    count = spec.DISCOVERY_HEADER.integer(header, "numrec")
    entries = []
    for index in range(count):
        raw = admin.log_page(LogPage.DISCOVERY, 1024, offset_bytes=1024 * (index + 1), retain=retain)
        layout = spec.DISCOVERY_ENTRY
        assert [layout.integer(raw, name) for name in ("trtype", "subtype", "cntlid", "asqsz")] == [3, 2, 0xFFFF, 32]
        assert layout.octets(raw, "tsas") == bytes(256)  # no TLS
        address, port = layout.octets(raw, "traddr").decode().strip(), layout.octets(raw, "trsvcid").decode().strip()
        assert layout.integer(raw, "adrfam") == (2 if ":" in address else 1)
        entries.append((nqn_field(layout.octets(raw, "subnqn")) or "", address, port))
    return Found(spec.DISCOVERY_HEADER.integer(header, "genctr"), entries)


def attach(rig: Rig, **options: object) -> Association:
    return Association(rig.port, DISCOVERY_NQN, queues=0, **options)  # type: ignore[arg-type]


@pytest.fixture
def rig(disk_rig: Rig) -> Rig:
    closed = Subsystem(CLOSED, serial="FB2", model="Forebay", max_namespaces=4, allow_any_host=False)
    closed.hosts[OTHER_NQN] = None
    disk_rig.server.add_subsystem(closed)
    disk_rig.server.add_listener(closed, "IPv4", "127.0.0.1", disk_rig.port)
    return disk_rig


def test_a_host_is_told_of_what_it_may_connect_to(rig: Rig) -> None:
    here = ("127.0.0.1", str(rig.port))
    with attach(rig) as mine, attach(rig, host_nqn=OTHER_NQN) as theirs:
        assert discover(mine).entries == [(NQN, *here)]
        assert discover(theirs).entries == [(NQN, *here), (CLOSED, *here)]
        found = discover(mine)
        rig.server.remove_listener(rig.server.subsystems[CLOSED], rig.server.subsystems[CLOSED].sorted_listeners()[0])
        assert discover(theirs).entries == [(NQN, *here)]
        assert discover(mine).generation > found.generation


def test_a_listener_on_all_addresses_is_shown_where_the_host_found_it(rig: Rig) -> None:
    port = rig.server.add_listener(rig.subsystem, "IPv4", "0.0.0.0", 0).port
    with Association(port, DISCOVERY_NQN, queues=0) as host:
        assert (NQN, "127.0.0.1", str(port)) in discover(host).entries


def test_identify_says_what_it_is(rig: Rig) -> None:
    with attach(rig) as host:
        _, raw = host.admin.run(command.identify(50, CnsValue.CONTROLLER), read_bytes=4096)
        layout = spec.IDENTIFY_CONTROLLER
        assert [layout.integer(raw, name) for name in ("cntrltype", "nn", "oncs", "sqes")] == [2, 0, 0, 0]
        assert nqn_field(layout.octets(raw, "subnqn")) == DISCOVERY_NQN


def test_it_does_what_discovery_needs_and_no_more(rig: Rig) -> None:
    with attach(rig) as host, RawHost(rig.port).initialize() as queue:
        assert queue.connect(DISCOVERY_NQN, qid=1, cntlid=host.cntlid).status == Status.INVALID_QUEUE_ID
        run = host.admin.run
        assert run(command.identify(51, CnsValue.ACTIVE_NAMESPACES), read_bytes=4096)[0].status == Status.INVALID_FIELD
        assert run(command.set_features(52, FeatureId.NUMBER_OF_QUEUES, 0x10001))[0].status == Status.INVALID_FIELD
        assert run(command.get_features(53, FeatureId.VOLATILE_WRITE_CACHE))[0].status == Status.INVALID_FIELD
        assert run(command.keep_alive(54))[0].status == 0
        assert run(command.property_get(55, spec.Property.VS, wide=False))[0].result == 0x10400
        assert host.admin.log_page(LogPage.ERROR_INFORMATION, 64)[0] == 3
    with rig.attach(queues=0) as plain:
        done, _ = plain.admin.run(command.Command(0x02, 0x40, 60, cdw10=0x70 | 255 << 16), read_bytes=1024)
        assert done.status == Status.INVALID_LOG_PAGE


def test_persistent_discovery_is_told_of_changes(rig: Rig) -> None:
    """Discovery Log Page Change, Base §5.2.1; with KATO the association may stay."""
    server, closed = rig.server, rig.server.subsystems[CLOSED]
    with attach(rig, keep_alive_ms=60_000) as host:
        assert host.admin.run(command.set_features(50, FeatureId.ASYNC_EVENT_CONFIGURATION, 1 << 31))[0].status == 0
        host.admin.send(host.admin.conn.send_command(command.async_event_request(60)))
        with server.lock:
            closed.hosts[HOST_NQN] = None
            server.discovery_changed()
        done = host.admin.expect(ResponseReceived).completion
        assert (done.cid, done.result) == (60, 0x70F002)
        host.admin.send(host.admin.conn.send_command(command.async_event_request(61)))
        assert len(discover(host, retain=True).entries) == 2
        server.delete_subsystem(closed)
        assert host.admin.run(command.keep_alive(62))[0].status == 0  # told once until it is read
        assert len(discover(host).entries) == 1
        server.add_subsystem(Subsystem(CLOSED, serial="1", model="1", max_namespaces=4, allow_any_host=True))
        assert host.admin.expect(ResponseReceived).completion.cid == 61
