"""Revocation and barrier in one call: nothing under the grants reaches media any more, what they wrote is stable."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.dataplane.target.volume import Volume
from forebay.nvmetcp.spec import Status
from tests.appliance.target.conftest import eventually
from tests.appliance.target.host import HOST_ID, HOST_NQN, Association
from tests.appliance.target.test_rpc import NQN, Control

DATA = b"\x5a" * 8192
GRANTS = {"name": "v", "hosts": [[HOST_NQN, str(HOST_ID)]], "grants": [[1, 0, 8, 0], [2, 8, 8, 0]]}


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    made = Control(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["disk", "memory"])
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the target takes flushes of the volume to be nothing, wherever the tests run."""
    there: bool = request.param == "memory"
    monkeypatch.setattr(Volume, "in_memory", there)
    return there


class Media:
    """What happens to the volume, in order; writes and flushes can be held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, volume: Volume) -> None:
        self.seen: list[str] = []
        self.writing, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        real_write, real_sync = volume.write, os.fdatasync

        def write(view: memoryview, offset_bytes: int) -> None:
            self.writing.set()
            assert self.go_on.wait(60)
            real_write(view, offset_bytes)
            self.seen.append("written")

        def sync(fd: int) -> None:
            real_sync(fd)
            self.seen.append("flushed")

        monkeypatch.setattr(volume, "write", write)
        monkeypatch.setattr(os, "fdatasync", sync)


@contextmanager
def connected(control: Control) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(control.socket))
        yield sock


def ask(sock: socket.socket, ident: int, method: str, **params: Any) -> None:
    sock.sendall(json.dumps({"jsonrpc": "2.0", "method": method, "params": params, "id": ident}).encode())


def call_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rpc call"}


def test_grants_are_gone_and_what_was_written_is_flushed(
    control: Control, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    port = control.serve()
    media = Media(monkeypatch, control.server.volumes["v"])
    with Association(port, NQN) as host:
        control.client.forebay_grants_add(**GRANTS)
        assert host.io[0].write(0, DATA).status == 0
        assert control.client.forebay_seal(ids=[1, 77], name="v") == {"result": "flushed"}
        assert media.seen == ["written", "flushed"]
        assert host.io[0].write(0, DATA).status == Status.ACCESS_DENIED
        assert host.io[0].write(8, DATA).status == 0, "a grant that was not named stays"
        assert control.client.forebay_seal(ids=[1], name="v") == {"result": "flushed"}, "it may be repeated"
        assert control.client.forebay_seal(ids=[], name="v") == {"result": "flushed"}
    assert control.client.forebay_get_info()["grants"] == 1


def test_a_write_under_way_ends_before_the_flush_and_holds_up_no_other_request(
    control: Control, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    port = control.serve()
    media = Media(monkeypatch, control.server.volumes["v"])
    media.go_on.clear()
    with Association(port, NQN) as host, ThreadPoolExecutor(1) as pool, connected(control) as sock:
        control.client.forebay_grants_add(**GRANTS)
        try:
            writing = pool.submit(host.io[0].write, 0, DATA)
            assert media.writing.wait(60)
            ask(sock, 1, "forebay_seal", ids=[1], name="v")
            ask(sock, 2, "spdk_get_version")
            assert json.loads(sock.recv(65536))["id"] == 2
            assert not media.seen
            with Association(port, NQN) as other:
                assert other.io[0].write(0, DATA).status == Status.ACCESS_DENIED, "no new write begins"
        finally:
            media.go_on.set()
        assert json.loads(sock.recv(65536)) == {"jsonrpc": "2.0", "id": 1, "result": {"result": "flushed"}}
        assert media.seen == ["written", "flushed"]
        assert writing.result(60).status == 0


def test_a_revocation_waits_in_the_same_way(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    port = control.serve()
    media = Media(monkeypatch, control.server.volumes["v"])
    media.go_on.clear()
    with Association(port, NQN) as host, ThreadPoolExecutor(1) as pool, connected(control) as sock:
        control.client.forebay_grants_add(**GRANTS)
        try:
            writing = pool.submit(host.io[0].write, 0, DATA)
            assert media.writing.wait(60)
            ask(sock, 1, "forebay_grants_revoke", ids=[1, 2])
            ask(sock, 2, "forebay_grants_revoke", ids=[77])
            assert json.loads(sock.recv(65536)) == {"jsonrpc": "2.0", "id": 2, "result": {"revoked": 0}}
            assert control.client.forebay_get_info()["grants"] == 2, "its places are not free yet"
        finally:
            media.go_on.set()
        assert json.loads(sock.recv(65536)) == {"jsonrpc": "2.0", "id": 1, "result": {"revoked": 2}}
        assert writing.result(60).status == 0
    assert control.client.forebay_get_info()["grants"] == 0


def test_a_flush_that_fails_is_an_error_and_the_grants_are_gone(
    control: Control, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    port = control.serve()

    def failing(fd: int) -> None:
        raise OSError(5, "EIO")

    monkeypatch.setattr(os, "fdatasync", failing)
    with Association(port, NQN) as host:
        control.client.forebay_grants_add(**GRANTS)
        assert control.error("forebay_seal", ids=[1, 2], name="v") == (-5, "Input/output error")
        assert host.io[0].write(0, DATA).status == Status.ACCESS_DENIED
    monkeypatch.undo()
    assert control.error("forebay_seal", ids=[], name="v") == (-5, "Input/output error"), "it is never forgotten"


def test_what_cannot_be_sealed_is_refused_and_changes_nothing(control: Control) -> None:
    control.serve()
    control.client.forebay_grants_add(**GRANTS)
    assert control.error("forebay_seal", ids=[1], name="x") == (-19, "No such device")
    for bad in ({"ids": ["1"]}, {"ids": 1}, {"ids": [1], "more": 1}, {"ids": [True]}):
        assert control.error("forebay_seal", name="v", **bad) == (-32602, "Invalid parameters")
    assert control.error("forebay_seal", ids=[1]) == (-32602, "Invalid parameters")
    assert control.client.forebay_get_info()["grants"] == 2


def test_a_flush_does_not_pass_beside_one_that_fails(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells one of them; the other would say that all is well."""
    control.volume()
    volume = control.server.volumes["v"]
    first, go_on = threading.Event(), threading.Event()

    def sync(fd: int) -> None:
        if not first.is_set():
            first.set()
            assert go_on.wait(60)
            raise OSError(5, "EIO")

    monkeypatch.setattr(os, "fdatasync", sync)
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(volume.flush)
        assert first.wait(60)
        beside = pool.submit(volume.flush)
        go_on.set()
        for one in (failing, beside):
            with pytest.raises(OSError):
                one.result(60)


def test_threads_of_a_connection_are_kept_and_end_with_it(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    control.volume()
    before, used = call_threads(), set[threading.Thread]()
    monkeypatch.setattr(Volume, "in_memory", False)
    monkeypatch.setattr(Volume, "flush", lambda _: used.add(threading.current_thread()))
    with connected(control) as sock:
        for ident in range(50):
            ask(sock, ident, "forebay_seal", ids=[], name="v")
            assert json.loads(sock.recv(65536))["id"] == ident
        # not one at all times: a request may come before the last one's thread has said that it is free
        assert len(used) < 50
    eventually(lambda: call_threads() <= before, "its threads have ended")


def test_nothing_waits_in_a_thread_where_there_is_nothing_to_wait_for(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.serve()
    monkeypatch.setattr(Volume, "in_memory", True)
    before = call_threads()
    control.client.forebay_grants_add(**GRANTS)
    assert control.client.forebay_seal(ids=[1], name="v") == {"result": "flushed"}
    assert control.client.forebay_grants_revoke(ids=[2]) == {"revoked": 1}
    assert call_threads() <= before
