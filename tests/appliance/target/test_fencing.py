"""Writes reach media under live grants that name their host, or not at all; and what was taken away stays away."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.dataplane.target.grants import GrantTable
from forebay.errors import AlreadyExists, InvalidArgument
from forebay.ids import HostIdentity
from forebay.nvmetcp import command
from forebay.nvmetcp.command import Completion
from forebay.nvmetcp.spec import Status
from tests.appliance.target.conftest import HOST, NQN, OTHER, Rig, eventually
from tests.appliance.target.host import HOST_ID, HOST_NQN, Association, RawHost

DATA = b"\x5a" * 8192


def denied(done: Completion) -> bool:
    """Access Denied, SCT 2h SC 86h, with DNR."""
    return (done.status, done.do_not_retry) == (Status.ACCESS_DENIED, True)


class Gate:
    """Holds media writes of a volume until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        real = rig.volume.write

        def write(view: memoryview, offset_bytes: int) -> None:
            self.entered.set()
            assert self.open.wait(60)
            real(view, offset_bytes)

        monkeypatch.setattr(rig.volume, "write", write)


@pytest.mark.parametrize("in_capsule", [False, True])
@pytest.mark.parametrize(
    ("slba", "why"),
    [(100, "no grant"), (9, "ends outside"), (3, "begins outside"), (20, "of another host"), (30, "a gap")],
)
def test_refused_without_a_grant(rig: Rig, slba: int, why: str, in_capsule: bool) -> None:
    rig.grant(1, 4, 6)
    rig.grant(2, 20, 10, OTHER)
    rig.grant(3, 30, 1)
    rig.grant(4, 32, 1)
    with rig.attach() as host:
        assert denied(host.io[0].write(slba, DATA, in_capsule=in_capsule)), why
        assert rig.stored(slba, 2) == bytes(8192)
        assert host.io[0].write(4, DATA, in_capsule=in_capsule).status == 0


def test_a_write_without_a_grant_moves_no_data(rig: Rig) -> None:
    """Refused when the command comes: no R2T, so a host cannot make the target take megabytes for nothing."""
    with rig.attach() as host:
        queue = host.io[0]
        queue.send(queue.conn.send_command(command.write(90, 1, 0, 2048), write_bytes=8 << 20))
        assert denied(queue.finish())


def test_a_write_may_span_adjacent_grants_of_its_host(rig: Rig) -> None:
    rig.grant(2, 10, 5)
    rig.grant(1, 15, 300)
    rig.grant(3, 315, 1)
    with rig.attach() as host:
        assert host.io[0].write(10, b"x" * 306 * 4096).status == 0
        assert denied(host.io[0].write(10, b"x" * 307 * 4096))


def test_hosts_of_one_grant_write_side_by_side_and_no_other_does(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.grant(1, 0, 10, HOST, OTHER)
    gate = Gate(monkeypatch, rig)
    third = HostIdentity("nqn.2026-11.test:third", HOST.host_id)
    with rig.attach() as mine, rig.other() as theirs, ThreadPoolExecutor(3) as pool:
        held = pool.submit(mine.io[0].write, 0, DATA)
        assert gate.entered.wait(60)
        beside = pool.submit(theirs.io[0].write, 5, DATA)
        assert not rig.server.grants.covers("vol", third, 0, 10)
        revoking = pool.submit(rig.server.grants.revoke, [1])
        eventually(lambda: not rig.server.grants.covers("vol", OTHER, 0, 1), "the grant is no longer live")
        gate.open.set()
        assert revoking.result(60) == 1
        assert held.result(60).status == 0
        # either it was counted in before, or it is refused
        assert beside.result(60).status in (0, Status.ACCESS_DENIED)
        for host in (mine, theirs):
            assert denied(host.io[0].write(0, DATA))


def test_only_commands_with_its_tag_are_under_a_grant(rig: Rig) -> None:
    rig.grant(1, 0, 4, tag=7)
    rig.grant(2, 4, 4, tag=8)
    rig.grant(3, 8, 4)
    with rig.attach() as host:
        for in_capsule in (False, True):
            assert host.io[0].write(0, DATA, tag=7, in_capsule=in_capsule).status == 0
            assert host.io[0].write(8, DATA, in_capsule=in_capsule).status == 0
            for slba, tag in ((0, 0), (0, 8), (8, 7), (3, 7), (3, 8)):
                assert denied(host.io[0].write(slba, DATA, tag=tag, in_capsule=in_capsule))


def test_a_late_command_of_an_earlier_grant_is_refused_in_the_same_place(rig: Rig) -> None:
    rig.grant(1, 0, 10, tag=1)
    with rig.attach() as host:
        request = host.io[0].start_write(0, 8192, tag=1)
        rig.server.grants.revoke([1])
        rig.grant(2, 0, 10, tag=2)
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [DATA]))
        assert denied(host.io[0].finish())
        assert denied(host.io[0].write(0, DATA, tag=1))
        assert rig.stored(0, 2) == bytes(8192)
        assert host.io[0].write(0, DATA, tag=2).status == 0


def test_a_grant_is_for_the_host_id_not_for_the_nqn(rig: Rig) -> None:
    rig.grant(1, 0, 10, HostIdentity(HOST.nqn, OTHER.host_id))
    with rig.attach() as host:
        assert denied(host.io[0].write(0, DATA))


def test_raw_volumes_take_any_write(rig: Rig) -> None:
    with rig.attach() as host:
        rig.server.set_fenced("vol", False)
        assert host.io[0].write(50, DATA).status == 0
        rig.server.set_fenced("vol", True)
        assert denied(host.io[0].write(50, DATA))


def test_revoke_between_r2t_and_data(rig: Rig) -> None:
    """The second check is what counts: the grant was there when the command came."""
    rig.grant(1, 0, 10)
    with rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        assert rig.server.grants.revoke([1]) == 1
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [DATA]))
        assert denied(host.io[0].finish())
        assert rig.stored(0, 2) == bytes(8192)
        assert host.io[0].read(0, 1)[0].status == 0


def test_revoke_and_regrant_between_r2t_and_data(rig: Rig) -> None:
    rig.grant(1, 0, 10)
    with rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        rig.server.grants.revoke([1])
        rig.grant(2, 0, 10, OTHER)
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [DATA]))
        assert denied(host.io[0].finish())
        assert rig.stored(0, 2) == bytes(8192)


def test_revoke_waits_for_the_media_write(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.grant(1, 0, 10)
    rig.grant(2, 10, 10)
    gate = Gate(monkeypatch, rig)
    with rig.attach() as host, ThreadPoolExecutor(2) as pool:
        writing = pool.submit(host.io[0].write, 8, b"x" * 4 * 4096)
        assert gate.entered.wait(60)
        revoking = pool.submit(rig.server.grants.revoke, [2, 77])
        eventually(lambda: not rig.server.grants.covers("vol", HOST, 10, 1), "the grant is no longer live")
        assert rig.server.grants.covers("vol", HOST, 0, 10)
        assert not revoking.done()
        with pytest.raises(AlreadyExists):  # its range is not free before the write has ended
            rig.grant(3, 10, 1, OTHER)
        gate.open.set()
        assert revoking.result(60) == 1
        assert writing.result(60).status == 0
        assert rig.stored(8, 4) == b"x" * 4 * 4096
        rig.grant(3, 10, 1, OTHER)


def test_teardown_waits_for_the_media_write(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.grant(1, 0, 10)
    gate = Gate(monkeypatch, rig)
    with rig.attach(queues=2) as host, ThreadPoolExecutor(2) as pool:
        request = host.io[0].start_write(0, 8192)
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [DATA]))
        assert gate.entered.wait(60)
        tearing = pool.submit(rig.server.teardown_host, HOST_NQN, str(HOST_ID))
        assert host.admin.gone() is None
        assert host.io[1].gone() is None
        assert not tearing.done()
        eventually(lambda: len(rig.server.queues) == 1, "only the queue that writes is left")
        assert not tearing.done()
        gate.open.set()
        assert tearing.result(60) == 1
        assert not rig.server.queues
        assert not rig.server.controllers
        assert rig.stored(0, 2) == DATA  # it was under way, and is over now
    assert rig.server.grants.covers("vol", HOST, 0, 10), "grants stay"


def test_teardown_before_the_data_means_no_write(rig: Rig) -> None:
    rig.grant(1, 0, 10)
    with rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [DATA])[:1])  # the header, and then nothing
        assert rig.server.teardown_host(HOST_NQN, None) == 1
        assert rig.stored(0, 2) == bytes(8192)
        assert host.io[0].gone() is None
    with rig.attach() as again:  # it may come back
        assert again.io[0].write(0, DATA).status == 0


def test_teardown_is_for_one_host(rig: Rig) -> None:
    rig.grant(1, 0, 10, OTHER)
    with rig.attach() as mine, rig.attach() as twin, rig.other() as theirs:
        assert rig.server.teardown_host(HOST_NQN, OTHER.host_id) == 0
        assert rig.server.teardown_host(HOST_NQN, str(HOST_ID)) == 2
        for host in (mine, twin):
            assert host.admin.gone() is None
            assert host.io[0].gone() is None
        assert theirs.io[0].write(0, DATA).status == 0


def test_an_io_queue_cannot_join_a_controller_that_is_being_torn_down(rig: Rig) -> None:
    with rig.attach(queues=1) as host:
        (controller,) = rig.server.controllers
        controller.closing = True
        with RawHost(rig.port).initialize() as late:
            assert late.connect(NQN, qid=2, cntlid=host.cntlid).status == Status.CONNECT_INVALID_PARAMETERS


def test_closing_the_admin_queue_ends_the_io_queues(rig: Rig) -> None:
    with rig.attach(queues=2) as host:
        host.admin.sock.close()
        for queue in host.io:
            assert queue.gone() is None
        eventually(lambda: not rig.server.controllers, "the controller is gone")


def test_removing_a_namespace_waits_for_its_media_write(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.grant(1, 0, 10)
    gate = Gate(monkeypatch, rig)
    with rig.attach() as host, ThreadPoolExecutor(2) as pool:
        writing = pool.submit(host.io[0].write, 0, DATA)
        assert gate.entered.wait(60)
        removing = pool.submit(rig.server.remove_namespace, rig.subsystem, 1)
        eventually(lambda: not rig.subsystem.namespaces, "the namespace is out of sight")
        assert not removing.done()
        gate.open.set()
        removing.result(60)
        assert writing.result(60).status == 0


def test_many_hosts_write_only_where_they_may(rig: Rig) -> None:
    """Two hosts, several queues, grants that come and go: no byte outside a grant of its writer."""
    for i in range(16):
        rig.grant(i, i * 8, 8, HOST if i % 2 else OTHER)

    def hammer(host: Association, value: int, queue: int) -> int:
        good = 0
        for i in range(queue, 16, 2):
            done = host.io[queue].write(i * 8, bytes([value]) * 8 * 4096)
            good += done.status == 0
            assert done.status == 0 or denied(done)
        return good

    with rig.attach(queues=2) as mine, rig.other(queues=2) as theirs, ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(hammer, host, value, q) for host, value in ((mine, 1), (theirs, 2)) for q in (0, 1)]
        assert [run.result(60) for run in runs] == [0, 8, 8, 0]
    for i in range(16):
        assert set(rig.stored(i * 8, 8)) == {1 if i % 2 else 2}


def test_a_write_under_way_does_not_outlive_the_hosts_sight_of_the_volume(rig: Rig) -> None:
    namespace = rig.subsystem.namespaces[1]
    namespace.auto_visible = False
    namespace.hosts.add(HOST_NQN)
    rig.server.set_fenced("vol", False)
    with rig.attach() as host:
        request = host.io[0].start_write(0, 8192)
        rig.server.hide_namespace(namespace, HOST_NQN)
        host.io[0].send(host.io[0].conn.send_h2c_data(request, [DATA]))
        assert host.io[0].finish().status == Status.INVALID_NAMESPACE
        assert rig.stored(0, 2) == bytes(8192)


def test_host_discard_is_not_offered(rig: Rig) -> None:
    rig.grant(1, 0, 10)
    with rig.attach() as host:
        for opcode in (0x08, 0x09):
            done, _ = host.io[0].run(command.Command(opcode, 0x40, 99 + opcode, 1, cdw11=4))
            assert (done.status, done.do_not_retry) == (Status.ACCESS_DENIED, True)


# --- the table itself -------------------------------------------------------------------------------------------------


def test_adding_is_all_or_none_and_may_be_repeated() -> None:
    table = GrantTable()
    table.add("v", [HOST], [(1, 0, 4, 0), (2, 4, 4, 0)], 100)
    for rows in (
        [(3, 50, 1, 0), (4, 7, 1, 0)],
        [(3, 50, 2, 0), (4, 51, 1, 0)],
        [(5, 60, 1, 0), (5, 61, 1, 0)],
        [(1, 60, 1, 0)],
    ):
        with pytest.raises(AlreadyExists):
            table.add("v", [HOST], rows, 100)
    for row in ((9, 100, 1, 0), (9, 99, 2, 0), (9, 0, 0, 0)):
        with pytest.raises(InvalidArgument):
            table.add("v", [HOST], [(8, 20, 1, 0), row], 100)
    assert len(table) == 2
    assert not table.covers("v", HOST, 50, 1)
    table.add("v", [HOST], [(1, 0, 4, 0), (6, 8, 1, 0)], 100)
    with pytest.raises(AlreadyExists):
        table.add("v", [OTHER], [(1, 0, 4, 0)], 100)
    assert table.covers("v", HOST, 0, 9)
    assert table.revoke([1, 1, 99]) == 1
    assert table.revoke([1]) == 0
    assert table.revoke_all() == 2
    table.add("v", [OTHER], [(1, 0, 100, 0)], 100)


ops = st.lists(
    st.tuples(st.sampled_from(["add", "revoke", "check"]), st.integers(0, 9), st.integers(0, 30), st.integers(1, 8)),
    max_size=60,
)


@given(ops)
def test_the_table_agrees_with_a_map_of_lbas(steps: list[tuple[str, int, int, int]]) -> None:
    table = GrantTable()
    owner: dict[int, tuple[frozenset[HostIdentity], int]] = {}
    for op, number, slba, nlb in steps:
        hosts = (frozenset({HOST}), frozenset({OTHER}), frozenset({HOST, OTHER}))[number % 3]
        host = HOST if nlb % 2 else OTHER
        lbas = range(slba, slba + nlb)
        if op == "add":
            taken = any(g == number for _, g in owner.values()) or any(lba in owner for lba in lbas)
            same = {lba for lba, (_, g) in owner.items() if g == number} == set(lbas)
            try:
                table.add("v", hosts, [(number, slba, nlb, 0)], 100)
            except AlreadyExists:
                assert taken and not same
            else:
                assert same or not taken
                owner.update(dict.fromkeys(lbas, (hosts, number)))
        elif op == "revoke":
            table.revoke([number])
            owner = {lba: value for lba, value in owner.items() if value[1] != number}
        else:
            expected = all(host in owner.get(lba, (frozenset(), 0))[0] for lba in lbas)
            assert table.covers("v", host, slba, nlb) == expected
            held = table.begin_write("v", host, slba, nlb)
            assert (held is not None) == expected
            table.end_write(held or ())


def test_the_file_is_what_the_fence_protects(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the checked path writes: without a grant no pwrite happens at all."""
    calls: list[int] = []
    real: Callable[..., int] = os.pwrite

    def pwrite(fd: int, data: memoryview, offset_bytes: int) -> int:
        calls.append(offset_bytes)
        return real(fd, data, offset_bytes)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with rig.attach() as host:
        assert denied(host.io[0].write(0, DATA))
        assert denied(host.io[0].write(0, DATA, in_capsule=True))
        assert not calls
        rig.grant(1, 0, 2)
        assert host.io[0].write(0, DATA).status == 0
        assert calls
