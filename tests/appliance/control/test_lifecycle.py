"""The daemon as a process: what it refuses to start with, how it stops, and what a kill of either process leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import cbor2
import grpc
import pytest

import forebay
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import Op
from forebay.errors import OK, Absent, SessionExpired, StaleIncarnation
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import unpack
from tests.appliance.control.peer import CAPACITY, Daemon, alive, eventually, failure
from tests.client.conftest import patient

Make = Callable[..., Daemon]
VALUES = {b"k%d" % i: os.urandom(90 * i + 1) for i in range(40)}


def store(daemon: Daemon) -> None:
    with forebay.connect(f"forebay://{daemon.address}", token=daemon.token, options=patient()) as client:
        results = client.put(list(VALUES), list(VALUES.values()))
        assert [r.reason for r in results if not r.stored] == []


def check(daemon: Daemon, missing: tuple[bytes, ...] = ()) -> None:
    with forebay.connect(f"forebay://{daemon.address}", token=daemon.token, options=patient()) as client:
        found = client.get(list(VALUES))
        for key, got in zip(VALUES, found, strict=True):
            assert got.hit == (key not in missing), (key, got.reason)
            if got.hit:
                assert bytes(got.value or b"") == VALUES[key]


# ------------------------------------------------------------------------------------------------------ refusals


def test_a_data_directory_in_use_is_refused(make: Make) -> None:
    first = make().start()
    second = Daemon(first.data)
    error = second.refused()
    assert (error["error"], error["field"]) == ("DataDirInUse", "data")
    assert str(first.data) in error["message"]
    check(first, tuple(VALUES))  # the first one is not disturbed


@pytest.mark.parametrize(
    ("flags", "error", "field"),
    [
        ({"capacity": 1 << 50}, "CapacityShort", "capacity"),
        ({"capacity": 1 << 20}, "ConfigInvalid", "capacity"),
        ({"space__region": "65MiB"}, "ConfigInvalid", "space.region"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    make: Make, flags: dict[str, object], error: str, field: str
) -> None:
    found = make(**flags).refused()
    assert (found["error"], found["field"]) == (error, field)
    assert found["limit"] is not None


def test_a_port_that_is_taken_is_refused(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = make(grpc__listen=f"127.0.0.1:{taken.getsockname()[1]}").refused()
    assert (found["error"], found["field"]) == ("ConfigInvalid", "grpc.listen")


def test_directories_that_another_version_or_configuration_made(make: Make, tmp_path: Path) -> None:
    """Format from the future, another region size, a swapped drive: each refused by name, none touched."""
    daemon = make().start()
    store(daemon)
    assert daemon.stop() == 0
    changed = Daemon(daemon.data, space__region="128MiB").refused()
    assert (changed["error"], changed["field"], changed["limit"]) == ("ConfigInvalid", "space.region", 64 << 20)
    volume = next((daemon.data / "drive0" / "volumes").glob("*.vol"))
    away = volume.with_suffix(".away")
    volume.rename(away)
    missing = Daemon(daemon.data).refused()
    assert missing["error"] == "VolumeMismatch" and str(volume) in missing["message"]
    away.rename(volume)
    (daemon.data / "drive0" / "forebay.drive").rename(tmp_path / "kept")
    assert Daemon(daemon.data).refused()["error"] == "VolumeMismatch"
    (tmp_path / "kept").rename(daemon.data / "drive0" / "forebay.drive")
    daemon.start()
    check(daemon)
    assert daemon.stop() == 0
    _make_newer(daemon.data / "metadata" / "rocksdb")
    newer = Daemon(daemon.data).refused()
    assert (newer["error"], newer["field"], newer["limit"]) == ("DataDirNewer", "meta.format", 1)


def _make_newer(metadata: Path) -> None:
    store = RocksStore(metadata)
    found = cbor2.loads(store.get("meta", b"format") or b"")
    asyncio.run(store.write([Op("meta", b"format", cbor2.dumps(found | {"v": 2}, canonical=True))]))
    store.close()


def test_metadata_that_is_gone_is_not_made_anew_over_volumes(make: Make) -> None:
    daemon = make().start()
    store(daemon)
    assert daemon.stop() == 0
    shutil.rmtree(daemon.data / "metadata")
    assert Daemon(daemon.data).refused()["error"] == "VolumeMismatch"


# ------------------------------------------------------------------------------------------------------ stops and kills


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_stop(make: Make, number: signal.Signals) -> None:
    daemon = make(target__on_stop="stop").start()
    store(daemon)
    target = daemon.target_pid
    assert daemon.process is not None
    daemon.process.send_signal(number)
    assert daemon.process.wait(30) == 0, daemon.log()
    assert not (daemon.data / "node.json").exists()
    eventually(lambda: not alive(target), "the target is gone")
    daemon.start()
    check(daemon)
    assert "0 to verify, 0 records dropped" in daemon.log()


def test_a_kill_of_the_daemon_loses_nothing_and_the_target_goes_on(make: Make) -> None:
    daemon = make().start()
    store(daemon)
    caller = daemon.caller()
    opened = caller.open()
    caller.allocate(b"pending")
    target = daemon.target_pid
    daemon.kill()
    caller.close()
    assert alive(target)
    daemon.start()
    assert daemon.target_pid == target
    check(daemon)
    caller = daemon.caller()
    caller.session = opened
    with pytest.raises(grpc.RpcError) as caught:
        caller.match(b"k1")
    assert isinstance(failure(caught.value)[1], StaleIncarnation)
    caller.open()
    assert caller.session is not None and caller.session.incarnation == opened.incarnation + 1
    assert caller.match(b"pending") == [Absent.code]
    reply = caller.allocate(b"pending")
    assert unpack("u16", reply.status, "status") == [OK]
    caller.close()


def test_a_kill_of_the_target_is_noticed_and_its_state_replayed(make: Make) -> None:
    daemon = make().start()
    store(daemon)
    caller = daemon.caller()
    caller.open()
    pending = caller.allocate(b"pending")
    target = daemon.target_pid
    os.kill(target, signal.SIGKILL)
    eventually(lambda: daemon.target_pid != target, "another target")

    def restarts() -> int:
        try:
            return int(caller.admin("NodeStatus", pb.NodeStatusRequest()).target_restarts)
        except grpc.RpcError as error:  # as long as there is no target
            assert failure(error)[0] == "UNAVAILABLE"
            return 0

    eventually(lambda: restarts() == 1, "the restart is counted")
    check(daemon)
    # the replay, not the restart, is what a writer waits for
    sums = caller.zeros(pending, b"pending")
    eventually(lambda: caller.commit(pending.write_ids, sums) == [OK], "what was being written can be committed")
    caller.close()
    assert daemon.stop() == 0


def test_a_kill_of_both_loses_nothing(make: Make) -> None:
    daemon = make().start()
    store(daemon)
    with forebay.connect(f"forebay://{daemon.address}", token=daemon.token, options=patient()) as client:
        client.delete([b"k3"])
    target = daemon.target_pid
    daemon.kill()
    os.kill(target, signal.SIGKILL)
    eventually(lambda: not alive(target), "the target is gone")
    daemon.start()
    assert daemon.target_pid != target
    check(daemon, (b"k3",))


# ------------------------------------------------------------------------------------------------------ sessions


def test_a_silent_session_ends_with_its_leases_pins_and_writes(make: Make) -> None:
    daemon = make(sessions__heartbeat="100ms", sessions__expiry="400ms").start()
    silent, watcher = daemon.caller(), daemon.caller()
    silent.open()
    silent.put(b"k")
    silent("Acquire", pb.AcquireRequest(context=silent.context(), keys=silent.keys(b"k")))
    silent("Pin", pb.PinRequest(context=silent.context(), keys=silent.keys(b"k"), pinned=True))
    silent.allocate(b"pending")

    def status() -> pb.NodeStatusReply:
        found: pb.NodeStatusReply = watcher.admin("NodeStatus", pb.NodeStatusRequest())
        return found

    eventually(lambda: status().sessions == 0, "the session ended")
    assert (status().leases, status().pending_writes) == (0, 0)
    watcher.open()
    stat = watcher("Stat", pb.StatRequest(context=watcher.context(), keys=watcher.keys(b"k")))
    assert (unpack("u16", stat.pins, "pins"), unpack("u16", stat.leases, "leases")) == ([0], [0])
    with pytest.raises(grpc.RpcError) as caught:
        silent.match(b"k")
    assert isinstance(failure(caught.value)[1], SessionExpired)
    assert unpack("u16", watcher.allocate(b"pending").status, "status") == [OK]
    silent.close()
    watcher.close()


def test_capacity_is_a_limit(make: Make) -> None:
    """More regions than the capacity has are never claimed, whatever is asked."""
    daemon = make().start()
    caller = daemon.caller()
    caller.open()
    for i in range(2 * CAPACITY // (64 << 20)):
        reply = caller.allocate(BlockKey(b"%d" % i), sizes=[64 << 20])
        if unpack("u16", reply.status, "status") == [OK]:
            assert caller.commit(reply.write_ids, caller.zeros(reply, b"%d" % i, size=64 << 20)) == [OK]
        status = caller.admin("NodeStatus", pb.NodeStatusRequest())
        assert status.used_bytes <= status.capacity_bytes == CAPACITY
    assert status.blocks >= CAPACITY // (64 << 20) - 1  # eviction ahead of need may have made room for one
    volume = next((daemon.data / "drive0" / "volumes").glob("*.vol"))
    assert volume.stat().st_blocks * 512 <= CAPACITY + (1 << 20)
    caller.close()
