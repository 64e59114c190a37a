"""What the NVMe/RDMA transport must do, against Linux's target on Soft-RoCE. Runs in the guest, see rdma.sh."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from forebay.checksum import crc32c
from forebay.client.registered import register
from forebay.client.transports.base import Outcome, ReadOp, Segment, Transport, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_rdma import NvmeRdmaTransport, usable
from forebay.client.transports.nvme_rdma_device import Key
from forebay.client.transports.nvme_rdma_queue import RdmaQueue
from forebay.client.transports.options import NvmeRdmaOptions
from forebay.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    TargetRefused,
    Unavailable,
    VolumeMismatch,
)
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.testing.transport_suite import Area, TransportSuite

NQN = os.environ["NQN"]
ADDRESS = os.environ["ADDRESS"]
PORT = int(os.environ["PORT"])
VOLUME_BYTES = 64 << 20
FAST, SLOW = 1, 2  # NSIDs; the slow one answers after 0.7 s
LINK = Path(f"/sys/kernel/config/nvmet/ports/1/subsystems/{NQN}")
SUBSYSTEM = Path(f"/sys/kernel/config/nvmet/subsystems/{NQN}")
LONG_MS = 30_000
SIZE = 256 << 10


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def make(
    *,
    nqn: str = NQN,
    port: int = PORT,
    address: str = ADDRESS,
    nguids: dict[int, str] | None = None,
    secrets: HostSecrets | None = None,
    **options: object,
) -> NvmeRdmaTransport:
    identity = str(uuid4())
    settings = NvmeRdmaOptions(**{"backoff_ms": (1, 1), **options})  # type: ignore[arg-type]
    return NvmeRdmaTransport(
        SubsystemAddress(address, port, nqn),
        HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{identity}", identity, secrets),
        nguids=nguids,
        options=settings,
    )


def eventually(condition: Callable[[], bool], what: str, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def read(transport: Transport, into: bytearray, nsid: int = FAST, at: int = 0, left_ms: int = LONG_MS) -> Outcome:
    segment = Segment(memoryview(into), len(into), 5)
    return transport.read([ReadOp(nsid, at, (segment,))], now_ms() + left_ms)[0]


def write(transport: Transport, data: bytes, nsid: int = FAST, at: int = 0, left_ms: int = LONG_MS) -> Outcome:
    segment = Segment(memoryview(data), len(data), 5)
    return transport.write([WriteOp(nsid, at, (segment,), 7)], now_ms() + left_ms)[0]


def queues(transport: NvmeRdmaTransport) -> list[RdmaQueue]:
    """The idle I/O queues."""
    assert transport._association is not None
    return [queue for queue in transport._association.idle if isinstance(queue, RdmaQueue)]


@pytest.fixture
def transport() -> Iterator[NvmeRdmaTransport]:
    one = make(connections=1)
    yield one
    one.close()


class TestStaged(TransportSuite):
    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        one = make()
        yield one
        one.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(FAST, 1 << 20, 32 << 20, VOLUME_BYTES)


class TestLittleStaging(TestStaged):
    """One queue for all threads, small commands, and room for few of them."""

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        one = make(connections=1, max_command_bytes=64 << 10, staging_bytes=192 << 10)
        yield one
        one.close()


class _Registering(NvmeRdmaTransport):
    """Registers whatever it is given for as long as a call takes."""

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        return self._registered(ops, lambda: super(_Registering, self).read(ops, deadline_ms))

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        return self._registered(ops, lambda: super(_Registering, self).write(ops, deadline_ms))

    def _registered(self, ops: Sequence[ReadOp | WriteOp], call: Callable[[], list[Outcome]]) -> list[Outcome]:
        buffers = {id(s.view.obj): s.view.obj for op in ops for s in op.segments if s.view is not None}
        held = [register(buffer) for buffer in buffers.values() if not memoryview(buffer).readonly]
        try:
            return call()
        finally:
            for one in held:
                one.close()


class TestRegistered(TestStaged):
    """Straight to and from the caller's memory."""

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        identity = str(uuid4())
        host = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{identity}", identity)
        options = NvmeRdmaOptions(direct_bytes=LBA_BYTES)
        one = _Registering(SubsystemAddress(ADDRESS, PORT, NQN), host, options=options)
        one.connect(now_ms() + LONG_MS)  # what is registered before that is reached when the device has come to it
        yield one
        one.close()


def test_it_is_usable() -> None:
    assert usable() is None


def test_registered_memory_is_reached_without_a_copy(transport: NvmeRdmaTransport) -> None:
    data = os.urandom(3 * SIZE)
    assert write(transport, data).error is None
    into = bytearray(3 * SIZE)
    registration = register(into)
    (queue,) = queues(transport)
    queue._staging.view[:] = bytes(len(queue._staging.view))
    outcome = read(transport, into)
    assert (outcome.error, outcome.checksums) == (None, (crc32c(data, 5),))
    assert into == data
    assert not any(queue._staging.view), "nothing went by way of staging memory"
    into[:] = into[::-1]
    assert write(transport, into).error is None  # type: ignore[arg-type]
    registration.close()
    again = bytearray(3 * SIZE)
    assert read(transport, again).error is None
    assert again == into


@pytest.mark.parametrize("registered", [False, True])
def test_what_is_late_is_late_and_its_buffer_safe(transport: NvmeRdmaTransport, registered: bool) -> None:
    """The target answers after the call has returned: it finds no queue pair any more."""
    assert write(transport, b"\x55" * SIZE, SLOW).error is None
    into = bytearray(b"\xaa" * SIZE)
    registration = register(into) if registered else None

    def gone() -> bool:
        assert isinstance(read(transport, into, SLOW, left_ms=200).error, DeadlineExceeded)
        return not transport.state().connections  # on a busy machine a read may be late before it is sent

    eventually(gone, "the queue is gone")
    other = bytearray(SIZE)
    assert read(transport, other, SLOW).error is None, "by now the target has done what was late"
    assert other == b"\x55" * SIZE
    assert into == b"\xaa" * SIZE
    if registration is not None:
        registration.close()


def test_a_write_that_is_late_may_happen_and_says_so(transport: NvmeRdmaTransport) -> None:
    assert write(transport, b"a" * SIZE, SLOW).error is None

    def doubtful() -> bool:
        late = write(transport, b"b" * SIZE, SLOW, left_ms=200)
        assert isinstance(late.error, DeadlineExceeded)
        return not late.quiesced  # on a busy machine a write may be late before it is sent

    eventually(doubtful, "a write that the target has")


@pytest.mark.parametrize("writes", [False, True])
def test_a_key_that_is_none(transport: NvmeRdmaTransport, writes: bool) -> None:
    """The target's access fails: it ends the queue, and neither memory nor volume has changed."""
    before = os.urandom(SIZE)
    assert write(transport, before).error is None
    (queue,) = queues(transport)
    key = queue._staging.key
    queue._staging.key = Key(key.local, key.remote ^ 0xFF00)
    into = bytearray(b"\xaa" * SIZE)
    outcome = write(transport, bytes(SIZE)) if writes else read(transport, into)
    assert isinstance(outcome.error, ConnectionLost | ProtocolError)
    assert not outcome.quiesced
    assert into == b"\xaa" * SIZE
    assert read(transport, into).error is None, "by another queue"
    assert into == before


def test_memory_that_is_registered_no_more(transport: NvmeRdmaTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a registration that was closed while its command was on its way is good for nothing."""
    assert write(transport, b"\x55" * SIZE).error is None
    into = bytearray(b"\xaa" * SIZE)
    registration = register(into)
    (queue,) = queues(transport)
    flush = queue.flush

    def closing() -> None:
        registration.close()
        flush()

    monkeypatch.setattr(queue, "flush", closing)
    outcome = read(transport, into)
    assert isinstance(outcome.error, ConnectionLost | ProtocolError)
    assert into == b"\xaa" * SIZE
    assert read(transport, into).error is None


def _busy(transport: NvmeRdmaTransport) -> bool:
    """Whether an I/O queue is out."""
    association = transport._association
    return association is not None and len(association.open) > len(association.idle) and not association.opening


def test_the_target_goes_away_in_the_middle(transport: NvmeRdmaTransport) -> None:
    assert write(transport, b"\x55" * SIZE, SLOW).error is None
    into = bytearray(b"\xaa" * SIZE)
    registration = register(into)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, transport, into, SLOW)
        eventually(lambda: _busy(transport), "the read is under way")
        LINK.unlink()
        try:
            outcome = reading.result()
            # The kernel lets what is under way end before it closes, or not: both are good, a mixture is not.
            assert outcome.error is None or isinstance(outcome.error, ConnectionLost)
            assert into == (b"\x55" if outcome.error is None else b"\xaa") * SIZE
            eventually(lambda: read(transport, into, left_ms=5_000).error is not None, "it is noticed")
        finally:
            LINK.symlink_to(SUBSYSTEM)
    eventually(lambda: read(transport, into).error is None, "it is back")
    assert transport.state().reconnects == 1
    registration.close()


def test_nobody_listens() -> None:
    one = make(port=PORT + 1, backoff_ms=(60_000, 60_000))
    into = bytearray(LBA_BYTES)
    assert isinstance(read(one, into).error, ConnectionLost)
    assert one.state().breaker_open
    assert isinstance(read(one, into).error, Unavailable), "it is not tried again yet"
    one.close()


@pytest.mark.parametrize("address", ["10.0.2.77", "127.0.0.1", "none.invalid"])
def test_no_way_leads_there(address: str) -> None:
    """Nobody has the address, no RDMA device leads to it, or the name has none."""
    one = make(address=address)
    error = read(one, bytearray(LBA_BYTES), left_ms=1_000).error
    assert isinstance(error, ConnectionLost | DeadlineExceeded | Unavailable)
    assert one.state().failures == 1
    one.close()


def test_a_subsystem_that_is_not_there() -> None:
    one = make(nqn="nqn.2026-01.io.forebay:none")
    assert isinstance(read(one, bytearray(LBA_BYTES)).error, TargetRefused)
    one.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_host_proves_itself_and_the_target_too(known: bool) -> None:
    """DH-HMAC-CHAP in both directions; a host without the secret is refused."""
    kernel = SUBSYSTEM.parents[1]
    nqn = f"{NQN}:secure-{known}"
    secrets = HostSecrets(Secret.generate(), Secret.generate())
    one = make(nqn=nqn, secrets=secrets if known else HostSecrets(Secret.generate()))
    host, subsystem = kernel / "hosts" / one._host.nqn, kernel / "subsystems" / nqn
    host.mkdir()
    assert secrets.controller is not None
    (host / "dhchap_key").write_text(secrets.host.text())
    (host / "dhchap_ctrl_key").write_text(secrets.controller.text())
    subsystem.mkdir()
    (subsystem / "namespaces/1").mkdir()
    (subsystem / "namespaces/1/device_path").write_text("/dev/fast")
    (subsystem / "namespaces/1/enable").write_text("1")
    (subsystem / "allowed_hosts" / host.name).symlink_to(host)
    LINK.with_name(nqn).symlink_to(subsystem)
    try:
        outcome = write(one, b"proven" * 2048)
        if known:
            assert outcome.error is None
        else:
            # The kernel closes right after it has said no, and what it said may be lost by that.
            assert isinstance(outcome.error, TargetRefused | ConnectionLost)
            assert "does not take this host's secret" in str(outcome.error)
    finally:
        one.close()
        LINK.with_name(nqn).unlink()


def test_another_volume_than_expected() -> None:
    one = make(nguids={FAST: "0" * 31 + "1"})
    assert isinstance(read(one, bytearray(LBA_BYTES)).error, VolumeMismatch)
    one.close()


def test_several_queues_at_depth() -> None:
    one = make(connections=4, call_connections=4, queue_bytes=64 << 10, max_command_bytes=LBA_BYTES)
    data = os.urandom(1 << 20)
    assert write(one, data).error is None
    assert one.state().connections == 4
    into = bytearray(len(data))
    assert read(one, into).error is None
    assert into == data
    one.close()


def test_an_idle_association_is_kept_alive() -> None:
    """The target gives up a controller that is silent for longer than KATO."""
    kato_ms = 2_000
    one = make(connections=1, keep_alive_ms=kato_ms)
    assert write(one, b"k" * LBA_BYTES).error is None
    began_ms = now_ms()
    eventually(lambda: now_ms() - began_ms > 2 * kato_ms, "time passes")
    assert one.state().connected
    assert read(one, bytearray(LBA_BYTES)).error is None
    assert one.state().reconnects == 0
    one.close()


def test_closing_waits_for_no_command(transport: NvmeRdmaTransport) -> None:
    assert write(transport, b"\x55" * SIZE, SLOW).error is None
    into = bytearray(b"\xaa" * SIZE)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, transport, into, SLOW)
        reading.add_done_callback(lambda _: ended.set())
        eventually(lambda: _busy(transport), "the read is under way")
        over = reading.done()  # on a machine that stood still for so long
        transport.close()
        assert ended.wait(30)
        assert over or isinstance(reading.result().error, Unavailable)
    assert into == (b"\x55" if over else b"\xaa") * SIZE


def test_nothing_is_left_behind() -> None:
    """Queue pairs, completion queues, memory regions and ids, of this process and of the target."""

    def held() -> list[str]:
        listed = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"\b(?:pd|cq|qp|cm_id|mr|ctx) \d+", listed)

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    one = make()
    assert write(one, b"x" * SIZE).error is None
    one.close()
    eventually(lambda: not any("qp" in line and not line.endswith(" 1") for line in held()), "the target is idle")
    before, files = held(), opened()
    for _ in range(3):
        one = make()
        assert write(one, b"x" * SIZE).error is None
        assert isinstance(read(one, bytearray(SIZE), SLOW, left_ms=100).error, DeadlineExceeded)
        one.close()
    eventually(lambda: held() == before, f"{before} again, which are {held()}")
    assert opened() == files


def test_the_device_goes_away_in_the_middle() -> None:
    """The last one: no RDMA comes after it."""
    one = make(connections=1)
    assert write(one, b"\x55" * SIZE, SLOW).error is None
    into = bytearray(b"\xaa" * SIZE)
    registration = register(into)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, one, into, SLOW)
        eventually(lambda: _busy(one), "the read is under way")
        # Soft-RoCE waits until this process has ended, since the connection manager's library keeps the device open.
        subprocess.Popen(["rdma", "link", "delete", "rxe0"])
        outcome = reading.result()
    assert outcome.error is None or isinstance(outcome.error, ConnectionLost | ProtocolError)
    assert into == (b"\x55" if outcome.error is None else b"\xaa") * SIZE
    registration.close()
    one.close()
