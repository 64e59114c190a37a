"""One choice of transport: by what there is, away from what fails, and back; real devices and targets, real breaks."""

import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.checksum import crc32c
from forebay.client import ClientOptions, connect
from forebay.client.transports import choice as choice_module
from forebay.client.transports import kinds as kinds_module
from forebay.client.transports.base import (
    Capabilities,
    Outcome,
    ReadOp,
    Segment,
    Transport,
    TransportState,
    WriteOp,
)
from forebay.client.transports.choice import Choice
from forebay.client.transports.kinds import KINDS, Kind, Offer, nvme_tcp, tcp_kind
from forebay.client.transports.options import NvmeTcpOptions
from forebay.clock import Clock, ManualClock, SystemClock
from forebay.errors import DeadlineExceeded, ForebayError, InvalidArgument, Unavailable
from forebay.ids import NamespaceId, VolumeId
from forebay.proto import forebay_pb2 as pb
from forebay.testing.proxy import Action, Cut, FaultProxy, Moment
from forebay.testing.steps import NvmeTcpSteps
from forebay.testing.transport_suite import Area, TransportSuite
from forebay.volume_label import VolumeLabel
from tests.appliance.loop_device import loop_device
from tests.client.conftest import NQN, VOLUME_BYTES, TargetProcess, eventually, new_host, now_ms
from tests.client.scripted_node import ScriptedNode
from tests.conftest import LONG

LONG_MS = 30_000
AT = 1 << 20
OPTIONS = ClientOptions(nvme_tcp=NvmeTcpOptions(backoff_ms=(1, 20), keep_alive_ms=3_000))


@pytest.fixture(autouse=True)
def _quickly_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "_BACKOFF_MS", (20, 100))


def label(target: TargetProcess) -> bytes:
    return VolumeLabel(bytes(16), VolumeId(1), NamespaceId(1), target.nguid.bytes, 1, 64 << 20, VOLUME_BYTES).encode()


def offer_of(target: TargetProcess) -> Offer:
    return Offer(NQN, (("tcp", target.subsystem),), new_host())


def choose(target: TargetProcess, kinds: Sequence[Kind] = KINDS, options: ClientOptions = OPTIONS) -> Choice:
    return Choice(offer_of(target), {1: target.nguid.hex}, options, SystemClock(), kinds=kinds)


def read(transport: Transport, into: bytearray, left_ms: int = LONG_MS, nsid: int = 1) -> ForebayError | None:
    op = ReadOp(nsid, AT, (Segment(memoryview(into), len(into)),))
    return transport.read([op], now_ms() + left_ms)[0].error


def store(transport: Transport, data: bytes) -> None:
    op = WriteOp(1, AT, (Segment(memoryview(data), len(data)),))
    (outcome,) = transport.write([op], now_ms() + LONG_MS)
    assert outcome.error is None


def reads_by(transport: Choice) -> str:
    (way,) = transport.chosen()
    return way.transport


@pytest.fixture(scope="module")
def labelled(shared_target: TargetProcess) -> Iterator[TargetProcess]:
    """A target whose volume is a block device of this machine, too: a loop device over its file."""
    with shared_target.volume.open("r+b") as file:
        file.write(label(shared_target))
    with loop_device(shared_target.volume, VOLUME_BYTES):
        yield shared_target


class TestChoice(TransportSuite):
    """What every transport must do, with reads by block device and writes by NVMe/TCP."""

    @pytest.fixture
    def transport(self, labelled: TargetProcess) -> Iterator[Transport]:
        transport = choose(labelled)
        transport.connect(now_ms() + LONG_MS)
        assert reads_by(transport) == "block"
        yield transport
        transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, AT, 32 << 20, VOLUME_BYTES)


def test_nothing_waits_for_a_look_at_the_machine(labelled: TargetProcess) -> None:
    transport = choose(labelled)
    assert reads_by(transport) == "tcp"
    data = os.urandom(1 << 20)
    store(transport, data)
    into = bytearray(len(data))
    assert read(transport, into) is None
    assert into == data
    transport.connect(now_ms() + LONG_MS)
    assert reads_by(transport) == "block"
    assert read(transport, into) is None
    assert into == data
    assert not transport.fallbacks
    transport.close()


class Broken:
    """Reads of block devices that fail, as when the path to the drive is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return self._preadv(fd, buffers, offset)


def test_a_device_that_fails_costs_no_read_and_is_used_again(
    labelled: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch)
    transport = choose(labelled)
    data = os.urandom(1 << 20)
    store(transport, data)
    transport.connect(now_ms() + LONG_MS)
    broken.number = errno.ENOLINK
    into = bytearray(len(data))
    assert read(transport, into) is None, "it went by NVMe/TCP in the same call"
    assert into == data
    assert transport.fallbacks == {"block": 1}
    (way,) = transport.chosen()
    assert (way.transport, way.place) == ("tcp", f"127.0.0.1:{labelled.port}")
    assert "ENOLINK" in way.instead_of["block"]
    for _ in range(3):
        transport.connect(now_ms() + LONG_MS)
        assert read(transport, into) is None
    assert reads_by(transport) == "tcp"
    broken.number = 0

    def back() -> bool:
        transport.connect(now_ms() + LONG_MS)
        return reads_by(transport) == "block"

    eventually(back, "the device is used again")
    into = bytearray(len(data))
    assert read(transport, into) is None
    assert into == data
    assert transport.fallbacks == {"block": 1}
    transport.close()


def test_a_bad_medium_is_no_reason_to_go_elsewhere(labelled: TargetProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drive is behind every way."""
    broken = Broken(monkeypatch)
    transport = choose(labelled)
    transport.connect(now_ms() + LONG_MS)
    broken.number = errno.ENODATA
    assert type(read(transport, bytearray(4096))).__name__ == "TargetFailed"
    assert not transport.fallbacks
    transport.close()


@pytest.mark.parametrize(
    ("only", "reads", "writes"), [("tcp", "tcp", True), ("block", "block", True), ("rdma", "none", False)]
)
def test_one_kind_alone(labelled: TargetProcess, only: str, reads: str, writes: bool) -> None:
    transport = choose(labelled, options=replace(OPTIONS, transport=only))
    into = bytearray(4096)
    error = read(transport, into)  # by block it looks at once, since there is nothing else
    assert reads_by(transport) == reads
    assert (error is None) == (reads != "none")
    if writes:
        store(transport, b"w" * 4096)
        assert read(transport, into) is None
        assert into == b"w" * 4096
    else:
        assert isinstance(error, Unavailable)
    transport.close()


def test_block_alone_does_not_read_by_another(labelled: TargetProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(monkeypatch)
    transport = choose(labelled, options=replace(OPTIONS, transport="block"))
    assert read(transport, bytearray(4096)) is None
    broken.number = errno.ENOLINK
    for _ in range(3):
        assert isinstance(read(transport, bytearray(4096)), Unavailable)
    broken.number = 0
    assert read(transport, bytearray(4096)) is None
    transport.close()


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="transport"):
        ClientOptions(transport="nvme")


def test_the_environment_names_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TRANSPORT", "tcp")
    assert ClientOptions().transport == "tcp"
    assert ClientOptions(transport="auto").transport == "auto"


# --- two ways over the network, one of which breaks -------------------------------------------------------------------

READ_STEPS = [
    *("ic_req", "ic_resp", "connect_admin", "connect_admin.response", "connect_io", "connect_io.response"),
    *("property_get.response", "set_features.response", "identify", "identify.c2h_data", "read", "read.c2h_data"),
]


def by_proxy(proxy: FaultProxy) -> Kind:
    """NVMe/TCP through a proxy, as a kind of its own that is preferred."""

    def make(subsystem: Any, host: Any, nguids: Mapping[int, str], options: ClientOptions, clock: Clock) -> Transport:
        return nvme_tcp(replace(subsystem, port=proxy.port), host, nguids, options, clock)

    return replace(tcp_kind(make), name="first")


@contextmanager
def two_ways(target: TargetProcess, cut: Cut | None = None) -> Iterator[tuple[Choice, FaultProxy]]:
    with FaultProxy(("127.0.0.1", target.port), NvmeTcpSteps, cut) as proxy:
        transport = choose(target, [by_proxy(proxy), tcp_kind()])
        yield transport, proxy
        transport.close()


def test_the_steps_are_those_of_a_read(shared_target: TargetProcess) -> None:
    with two_ways(shared_target) as (transport, proxy):
        assert read(transport, bytearray(1 << 20)) is None
        assert set(READ_STEPS) <= set(proxy.seen)
        assert set(proxy.seen) - set(READ_STEPS) <= {
            "property_get",
            "property_set",
            "property_set.response",
            "set_features",
        }


ACTIONS = [Action.CLOSE, Action.RESET, Action.SILENCE, Action.HALF_OPEN]
BREAKS = [
    (step, action)
    for step, action in itertools.product(READ_STEPS, ACTIONS)
    if LONG or action is Action.RESET or (action is Action.SILENCE and step in ("connect_io", "read", "read.c2h_data"))
]


@pytest.mark.parametrize(("step", "action"), BREAKS)
def test_a_way_that_breaks_at_any_step(shared_target: TargetProcess, step: str, action: Action) -> None:
    """A break is not noticed by the reader, silence is at its deadline; no byte is wrong, and the way is used again."""
    with two_ways(shared_target) as (transport, proxy):
        data = random.Random(step).randbytes(1 << 20)
        store(transport, data)
        transport.close()
    with two_ways(shared_target, Cut(step, Moment.INSIDE, action)) as (transport, proxy):
        silent = action in (Action.SILENCE, Action.HALF_OPEN)
        hits = misses = 0
        while hits < 3:
            into = bytearray(b"\xee" * len(data))
            op = ReadOp(1, AT, (Segment(memoryview(into), len(into), 7),))
            (outcome,) = transport.read([op], now_ms() + (400 if silent else LONG_MS))
            seen = bytes(into)
            if outcome.error is None:
                hits += 1
                assert seen == data and outcome.checksums == (crc32c(data, 7),)
            else:
                misses += 1
                assert isinstance(outcome.error, DeadlineExceeded), outcome.error
                assert misses <= 20
        assert proxy.cuts == 1
        assert misses == 0 or silent
        if not silent:
            assert transport.fallbacks == {"first": 1}

        def back() -> bool:
            transport.connect(now_ms() + LONG_MS)
            return reads_by(transport) == "first"

        eventually(back, "the first way is used again")
        into = bytearray(len(data))
        assert read(transport, into) is None
        assert into == data


def test_a_late_answer_of_the_first_way_reaches_no_buffer(shared_target: TargetProcess) -> None:
    """The bytes come after the deadline, when the second way has filled the buffer already: with what is there now."""
    with two_ways(shared_target) as (transport, proxy):
        store(transport, b"o" * AT)
        proxy.arm(Cut("read.c2h_data", Moment.BEFORE, Action.DELAY, 1.0))
        into = bytearray(AT)
        assert isinstance(read(transport, into, left_ms=300), DeadlineExceeded)
        direct = shared_target.transport()
        store(direct, b"n" * AT)
        assert read(direct, into) is None
        direct.close()
        eventually(lambda: proxy.links <= 3, "the late answer has come, or its connection ended")
        assert into == b"n" * AT


def test_writes_are_never_repeated_by_another_way(shared_target: TargetProcess) -> None:
    with two_ways(shared_target) as (transport, proxy):
        assert read(transport, bytearray(4096)) is None  # connected
        proxy.arm(Cut("write_in_capsule", Moment.AFTER, Action.RESET))
        op = WriteOp(1, AT, (Segment(memoryview(b"w" * 4096), 4096),))
        (outcome,) = transport.write([op], now_ms() + LONG_MS)
        assert outcome.error is not None
        assert not outcome.quiesced
        store(transport, b"v" * 4096)  # the next one goes by the other
        assert reads_by(transport) == "tcp"


class _Mute(Transport):
    """Can be connected, and reads nothing; the other kind reads."""

    def __init__(self, error: ForebayError | None) -> None:
        self.capabilities = Capabilities("stand-in")
        self.error = error

    def connect(self, deadline_ms: int) -> None:
        return

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        return [Outcome(self.error, (None,) * len(op.segments)) for op in ops]

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        raise AssertionError("nothing is written here")

    def state(self) -> TransportState:
        return TransportState(True, 1, 0, 0, False, 0)

    def close(self) -> None:
        return


def test_a_way_that_only_connects_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "_BACKOFF_MS", (1_000, 60_000))
    clock = ManualClock()
    mute = _Mute(Unavailable("mute"))
    kinds = [Kind("first", lambda _: None, lambda *_: mute), Kind("second", lambda _: None, lambda *_: _Mute(None))]
    offer = Offer(NQN, (), new_host())
    transport = Choice(offer, {1: ""}, OPTIONS, clock, kinds=kinds)

    def out_ms() -> int:
        """How long the first way is left alone, once a read has failed by it."""
        (outcome,) = transport.read([ReadOp(1, 0, (Segment(None, 4096),))], clock.monotonic_ms() + LONG_MS)
        assert outcome.error is None
        began_ms = clock.monotonic_ms()
        while reads_by(transport) == "second":
            clock.advance(100)
            transport.connect(clock.monotonic_ms() + LONG_MS)
        return clock.monotonic_ms() - began_ms

    waits_ms = [out_ms() for _ in range(9)]
    assert waits_ms[0] <= 1_000
    assert all(wait_ms >= 30_000 for wait_ms in waits_ms[7:]), waits_ms
    mute.error = None
    assert out_ms() == 0
    mute.error = Unavailable("mute again")
    assert out_ms() <= 1_000, "a read that worked makes it as good as new"


def test_a_way_is_made_once(shared_target: TargetProcess) -> None:
    """Though a heartbeat and a program that asks connect at the same time."""
    made: list[Transport] = []
    offered = threading.Event()
    both, inside = threading.Barrier(2), threading.Barrier(2)

    def make(*_: object) -> Transport:
        with suppress(threading.BrokenBarrierError):  # nobody else should come
            inside.wait(0.2)
        made.append(_Mute(None))
        return made[-1]

    kind = Kind("first", lambda _: None if offered.is_set() else "not yet", make)
    transport = Choice(offer_of(shared_target), {1: ""}, OPTIONS, SystemClock(), kinds=[kind])
    offered.set()

    def connecting() -> None:
        both.wait(LONG_MS / 1000)
        transport.connect(now_ms() + LONG_MS)

    threads = [threading.Thread(target=connecting) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_without_a_way_there_is_an_answer(shared_target: TargetProcess) -> None:
    transport = choose(shared_target, [])
    assert isinstance(read(transport, bytearray(4096)), Unavailable)
    assert transport.serves(1) is not None
    assert transport.chosen()[0].transport == "none"
    transport.close()


def test_rdma_that_cannot_be_connected_costs_no_read(
    shared_target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real transport, on a machine that only seems to have a device."""
    monkeypatch.setattr(kinds_module, "usable", lambda: None)
    offer = offer_of(shared_target)
    offer = replace(offer, addresses=(("rdma", shared_target.subsystem), *offer.addresses))
    transport = Choice(offer, {1: shared_target.nguid.hex}, OPTIONS, SystemClock())
    assert reads_by(transport) == "rdma"
    data = os.urandom(1 << 20)
    direct = shared_target.transport()
    store(direct, data)
    direct.close()
    into = bytearray(len(data))
    assert read(transport, into) is None
    assert into == data
    assert transport.fallbacks == {"rdma": 1}
    assert reads_by(transport) == "tcp"
    transport.close()


def test_a_node_that_offers_several_transports() -> None:
    """The volume is named at the one that this machine has not; the other leads to the same subsystem."""
    with ScriptedNode() as node:
        (tcp,) = node.endpoints()
        rdma = pb.Endpoint(transport="rdma", address="127.0.0.1", port=4420, subsystem_nqn=tcp.subsystem_nqn)
        newer = pb.Endpoint(transport="pigeon", address="127.0.0.1", port=1, subsystem_nqn=tcp.subsystem_nqn)

        def both(reply: pb.SessionReply) -> pb.SessionReply:
            del reply.endpoints[:]
            reply.endpoints.extend([rdma, newer, tcp])
            return reply

        node.answer["OpenSession"] = both
        with node.connect(options=ClientOptions(deadline_ms=LONG_MS)) as client:
            assert client.put([b"k"], [b"value" * 1000])[0].stored
            (got,) = client.get([b"k"])
            assert bytes(got.value or b"") == b"value" * 1000
            (way,) = client.transports()
            assert (way.transport, way.place) == ("tcp", f"127.0.0.1:{tcp.port}")
            assert set(way.instead_of) == {"block", "rdma"}
            assert all(way.instead_of.values())


@pytest.mark.parametrize(("only", "fenced"), [("auto", False), ("tcp", True)])
def test_reads_that_a_target_may_not_see_are_not_fenced_by_it(only: str, fenced: bool) -> None:
    """Though the node says that its target fences reads: a block device is read past it, so everything is verified."""
    with ScriptedNode() as node:
        node.reads_fenced = True
        with node.connect(options=ClientOptions(deadline_ms=LONG_MS, transport=only)) as client:
            assert client.put([b"k"], [b"value"])[0].stored
            assert {route.reads_fenced for route in client._session.view.routes.values()} == {fenced}


# --- a whole node -----------------------------------------------------------------------------------------------------


@pytest.fixture
def node_on_device(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """A node whose only drive is a block device of this machine: its address, its token, the device."""
    with loop_device(tmp_path / "backing", 6 * (64 << 20)) as device:
        config = tmp_path / "node.toml"
        config.write_text(
            f'data = "{tmp_path}/data"\ncapacity = "256MiB"\n[grpc]\nlisten = "127.0.0.1:0"\n[http]\nenabled = false\n'
            f'[target]\nlisten = "127.0.0.1:0"\n[[drives]]\npath = "{device}"\n'
        )
        command = [sys.executable, "-m", "forebay.cli.main", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("admin token"):
                    break
            address = json.loads((tmp_path / "data/node.json").read_text())["grpc"]
            yield f"forebay://{address}", (tmp_path / "data/admin.token").read_text().strip(), device
        finally:
            process.terminate()
            process.communicate(timeout=30)


def test_a_client_reads_a_local_drive(node_on_device: tuple[str, str, Path]) -> None:
    url, token, device = node_on_device
    values = [os.urandom(size) for size in (1, 4096, 100_000, 3_000_000, 9 << 20)]
    keys = [b"k%d" % i for i in range(len(values))]
    options = ClientOptions(deadline_ms=LONG_MS, connect_ms=LONG_MS, attempt_ms=LONG_MS, transport="block")
    with connect(url, token=token, options=options) as client:
        assert all(put.stored for put in client.put(keys, values)), "writes go by NVMe/TCP"
        (way,) = client.transports()
        assert (way.transport, way.place) == ("block", str(device))
        found = client.get(keys)
        assert [bytes(one.value or b"") for one in found] == values
    with connect(url, token=token, options=replace(options, transport="auto")) as client:
        eventually(lambda: client.transports()[0].transport == "block", "a heartbeat has looked")
        found = client.get(keys)
        assert [bytes(one.value or b"") for one in found] == values
        assert client.stats.fallbacks == {}
