"""More connections than the target takes: the excess is told so and what it can do; who is there goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.client.transports.base import Outcome, ReadOp, Segment
from forebay.client.transports.controller import Controller, SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.client.transports.queue_pair import QueuePair
from forebay.errors import Busy, ConnectionLost, DeadlineExceeded
from forebay.nvmetcp import command
from forebay.nvmetcp.spec import CnsValue
from tests.appliance.target.conftest import LIMITS, NQN, Rig, eventually
from tests.client.conftest import TargetProcess, new_host, now_ms, stop
from tests.pressure.conftest import HANG_S

PLACES = 3
"""Connections that the target takes: an admin queue and two for data."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, replace(LIMITS, max_connections=PLACES))
    yield made
    made.server.close()


def transport(rig: Rig, connections: int = 4) -> NvmeTcpTransport:
    options = NvmeTcpOptions(connections=connections, call_connections=connections, queue_bytes=4096)
    return NvmeTcpTransport(SubsystemAddress("127.0.0.1", rig.port, NQN), new_host(), options=options, seed=1)


def read(one: NvmeTcpTransport, deadline_ms: int, commands: int = 8) -> list[Outcome]:
    ops = [ReadOp(1, 65536 * i, (Segment(memoryview(bytearray(65536)), 65536),)) for i in range(commands)]
    return one.read(ops, now_ms() + deadline_ms)


def test_a_client_gets_on_with_the_connections_that_it_has(rig: Rig) -> None:
    one = transport(rig)
    with ThreadPoolExecutor(16) as pool:
        for outcomes in pool.map(lambda _: read(one, 60_000), range(64)):
            assert [outcome.error for outcome in outcomes] == [None] * 8
    assert one.state().connections == PLACES - 1
    assert one.state().failures == 0
    one.close()


@pytest.mark.parametrize("why", ["its turn to connect does not come", "the target is late"])
def test_one_that_has_no_time_to_connect_takes_nobodys_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    one, reading, go_on = transport(rig), threading.Event(), threading.Event()
    monkeypatch.setattr(one, "_options", replace(one._options, call_connections=1))
    real = rig.volume.read_into

    def read_into(view: memoryview, offset_bytes: int) -> None:
        reading.set()
        assert go_on.wait(60)
        real(view, offset_bytes)

    monkeypatch.setattr(rig.volume, "read_view", None)
    monkeypatch.setattr(rig.volume, "read_into", read_into)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(read, one, 60_000, 1)
        try:
            assert reading.wait(60)
            if why == "the target is late":
                monkeypatch.setattr(Controller, "open_queue", late)
                hurried = read(one, 60_000, 1)
            else:
                with one._dialling:
                    hurried = read(one, 50, 1)
            state = one.state()
        finally:
            go_on.set()
        assert isinstance(hurried[0].error, DeadlineExceeded)
        assert state.connected and state.failures == 0
        assert patient.result(60)[0].error is None
    assert one.state().connections == 1, "it is kept"
    one.close()


def late(*_: object) -> QueuePair:
    raise DeadlineExceeded("the target did not answer in time")


def test_the_excess_is_told_what_to_do_and_comes_in_when_there_is_room(rig: Rig) -> None:
    first, second = transport(rig), transport(rig)
    assert {outcome.error for outcome in read(first, 60_000)} == {None}
    (error,) = {type(outcome.error): outcome.error for outcome in read(second, 300)}.values()
    assert isinstance(error, Busy) and error.retry_after_ms > 0
    assert "target.max_connections" in error.message and "NvmeTcpOptions.connections" in error.message
    assert {outcome.error for outcome in read(first, 60_000)} == {None}, "who is there goes on"
    waiting = threading.Event()

    def patient() -> list[Outcome]:
        waiting.set()
        return read(second, 120_000)

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(patient)
        waiting.wait()
        eventually(lambda: rig.server.counts["refused_connections"] > 4, "it asks again by itself", 60)
        first.close()
        assert {outcome.error for outcome in coming.result(120)} == {None}
    second.close()
    eventually(lambda: not rig.server.queues, "all are gone", 60)


def test_closing_waits_for_no_command(tmp_path: Path) -> None:
    """Neither for one with a deadline of its own, nor for a target that is stopped."""
    target = TargetProcess(tmp_path)
    one = target.transport()
    ended: list[Exception] = []
    try:
        one.connect(now_ms() + 60_000)
        assert one._association is not None
        controller = one._association.controller
        stop(target.process.pid)

        def ask() -> None:
            try:
                controller._admin_command(command.identify(0, CnsValue.NAMESPACE, 1), now_ms() + 600_000, 4096)
            except (ConnectionLost, DeadlineExceeded) as e:
                ended.append(e)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: controller._admin is not None and controller._admin.in_flight > 0, "it is out", 60)
        began_s = time.monotonic()
        one.close()
        assert time.monotonic() - began_s < HANG_S
        asking.join(HANG_S)
        assert [type(e) for e in ended] == [ConnectionLost]
    finally:
        os.kill(target.process.pid, signal.SIGCONT)
        target.stop()
