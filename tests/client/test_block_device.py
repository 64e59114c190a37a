"""Reads by block device, on a real one (a loop device): conformance, identity, and reads that do not come back."""

import errno
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.client.registered import address_of
from forebay.client.transports import block_device
from forebay.client.transports.base import ReadOp, Segment, Transport, WriteOp
from forebay.client.transports.block_device import BlockDeviceOptions, BlockDeviceTransport
from forebay.client.transports.bounce import BouncePool, Job, _Call
from forebay.client.transports.disks import Disk, Machine, VolumeIdentity
from forebay.client.transports.drive_labels import DriveLabels
from forebay.clock import ManualClock, SystemClock
from forebay.errors import DeadlineExceeded, ForebayError, TargetFailed, TargetRefused, Unavailable, VolumeMismatch
from forebay.ids import NamespaceId, VolumeId
from forebay.testing.transport_suite import Area, TransportSuite
from forebay.volume_label import VolumeLabel
from tests.appliance.loop_device import loop_device
from tests.client.conftest import eventually, now_ms

NQN = "nqn.2026-11.test:block"
SIZE_BYTES = 64 << 20
LONG_MS = 30_000
_LOOP_CHANGE_FD = 0x4C06


def label(nguid: uuid.UUID) -> bytes:
    return VolumeLabel(bytes(16), VolumeId(1), NamespaceId(1), nguid.bytes, 1, 64 << 20, SIZE_BYTES).encode()


class Device:
    """A loop device with the label of a volume."""

    def __init__(self, path: Path, backing: Path) -> None:
        self.path = path
        self.backing = backing
        self.nguid = uuid.uuid4()
        self.write(0, label(self.nguid))

    def write(self, offset_bytes: int, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, data, offset_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)

    def transport(self, **settings: Any) -> BlockDeviceTransport:
        nguids = settings.pop("nguids", {1: self.nguid.hex})
        return BlockDeviceTransport(NQN, nguids=nguids, local=True, **settings)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with loop_device(tmp_path / "backing", SIZE_BYTES) as path:
        yield Device(path, tmp_path / "backing")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    directory = tmp_path_factory.mktemp("loop")
    with loop_device(directory / "backing", SIZE_BYTES) as path:
        yield Device(path, directory / "backing")


class TestBlockDevice(TransportSuite):
    options = BlockDeviceOptions()

    @pytest.fixture
    def transport(self, shared: Device) -> Iterator[Transport]:
        transport = shared.transport(writable=True, options=self.options)
        yield transport
        transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(1, 1 << 20, 32 << 20, SIZE_BYTES)


class TestSmallCommands(TestBlockDevice):
    """Most operations are several commands, on two threads."""

    options = BlockDeviceOptions(depth=2, max_command_bytes=64 << 10)


def read(transport: Transport, into: bytearray, at: int = 1 << 20, left_ms: int = LONG_MS) -> ForebayError | None:
    op = ReadOp(1, at, (Segment(memoryview(into), len(into)),))
    return transport.read([op], now_ms() + left_ms)[0].error


def test_writes_are_refused_in_words(device: Device) -> None:
    transport = device.transport()
    assert not transport.capabilities.writes
    op = WriteOp(1, 1 << 20, (Segment(memoryview(b"x" * 4096), 4096),))
    (outcome,) = transport.write([op], now_ms() + LONG_MS)
    assert isinstance(outcome.error, TargetRefused)
    assert "tag" in outcome.error.message
    assert outcome.quiesced
    transport.close()


def test_the_page_cache_is_passed_by(device: Device) -> None:
    """What another host writes to the medium is read, though this machine has older pages of it."""
    fd = os.open(device.path, os.O_RDONLY)
    assert os.pread(fd, 4096, 1 << 20) == bytes(4096)  # now in the page cache
    with device.backing.open("r+b") as backing:  # behind the back of the device
        os.pwrite(backing.fileno(), b"n" * 4096, 1 << 20)
        os.fsync(backing.fileno())
    assert os.pread(fd, 4096, 1 << 20) == bytes(4096), "the machine would show nothing otherwise"
    transport = device.transport()
    into = bytearray(4096)
    assert read(transport, into) is None
    assert into == b"n" * 4096
    transport.close()
    os.close(fd)  # not before: the kernel forgets the pages of a device that nobody has open


def test_buffers_are_there_before_the_first_read(device: Device) -> None:
    """All pages of them: no read has to wait for one."""
    one = block_device._aligned(8 << 20)
    start = address_of(one)
    assert start % mmap.PAGESIZE == 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * 8)
        entries = memoryview(pagemap.read(len(one) // mmap.PAGESIZE * 8)).cast("Q")
    assert all(entry >> 62 for entry in entries), "present or swapped, Documentation/admin-guide/mm/pagemap.rst"


def test_a_volume_that_is_nowhere(device: Device) -> None:
    transport = device.transport(nguids={1: uuid.uuid4().hex})
    assert transport.serves(1) is not None
    assert isinstance(read(transport, bytearray(4096)), Unavailable)
    with pytest.raises(Unavailable):
        transport.connect(now_ms() + LONG_MS)
    assert transport.serves(1) is not None and not transport.state().connected
    transport.close()


@contextmanager
def exchangeable(directory: Path, *nguids: uuid.UUID) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A device, and what puts another medium into it while it is open: ``change(i)`` the one labelled ``nguids[i]``."""
    media = []
    for i, nguid in enumerate(nguids):
        medium = directory / f"medium{i}"
        medium.write_bytes(label(nguid))
        os.truncate(medium, SIZE_BYTES)
        media.append(medium)
    with loop_device(media[0], SIZE_BYTES, read_only=True) as path:

        def change(which: int) -> None:
            with path.open("rb") as device, media[which].open("rb") as medium:
                fcntl.ioctl(device, _LOOP_CHANGE_FD, medium.fileno())

        yield path, change


def test_another_medium_under_the_same_name_is_seen_before_it_is_read(tmp_path: Path) -> None:
    mine, other = uuid.uuid4(), uuid.uuid4()
    with exchangeable(tmp_path, mine, other) as (path, change):
        transport = BlockDeviceTransport(NQN, nguids={1: mine.hex}, local=True)
        assert read(transport, bytearray(4096)) is None
        assert transport.serves(1) is None and transport.path(1) == str(path)
        change(1)
        into = bytearray(b"mine" * 1024)
        assert isinstance(read(transport, into), Unavailable)
        assert into == b"mine" * 1024
        assert transport.serves(1) is not None
        with pytest.raises(Unavailable):
            transport.connect(now_ms() + LONG_MS)  # which waits a while before it looks again
        change(0)
        assert read(transport, into) is None, "a read looks at once"
        assert transport.serves(1) is None
        assert transport.state().reconnects == 1
        transport.close()


class Stuck:
    """Reads of devices that do not come back before they are let go, as the kernel's when a path is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.let_go = threading.Event()
        self.under_way = 0
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.on and offset:  # and labels are read by others
            self.under_way += 1
            self.let_go.wait()
            self.under_way -= 1
            for buffer in buffers:  # late data, which must reach nobody
                buffer[:] = b"L" * len(buffer)
            return sum(map(len, buffers))
        return self._preadv(fd, buffers, offset)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    stuck = Stuck(monkeypatch)
    yield stuck
    stuck.let_go.set()
    eventually(lambda: not stuck.under_way, "reads came back")


def leave_behind(transport: BlockDeviceTransport, into: bytearray, count: int = 1) -> None:
    """Reads that are late, until so many are stuck: on a busy machine one may be late before a thread has taken it."""

    def left() -> bool:
        assert isinstance(read(transport, into, left_ms=50), DeadlineExceeded)
        return transport._pool.stuck == count

    eventually(left, f"{count} reads are stuck", LONG_MS / 1000)


def test_a_read_that_is_stuck_leaves_the_callers_memory_alone(device: Device, stuck: Stuck) -> None:
    transport = device.transport(options=BlockDeviceOptions(depth=4))
    transport.connect(now_ms() + LONG_MS)
    stuck.on = True
    into = bytearray(b"mine" * 1024)
    leave_behind(transport, into)
    eventually(lambda: stuck.under_way == 1, "the device has it")
    assert transport.serves(1) is None, "there are more threads"
    stuck.on = False
    other = bytearray(4096)
    assert read(transport, other) is None
    assert other == bytes(4096)
    stuck.let_go.set()
    eventually(lambda: not transport._pool.stuck, "the stuck read came back")
    assert into == b"mine" * 1024
    for _ in range(8):  # each buffer, the one of the late data among them
        other = bytearray(4096)
        assert read(transport, other) is None
        assert other == bytes(4096)
    transport.close()


def test_so_many_stuck_reads_and_no_more(device: Device, stuck: Stuck) -> None:
    transport = device.transport(options=BlockDeviceOptions(depth=4))
    transport.connect(now_ms() + LONG_MS)
    stuck.on = True
    leave_behind(transport, bytearray(4096), 3)
    assert transport.serves(1) is not None
    assert transport.state().breaker_open
    stuck.on = False
    began_ms = now_ms()
    assert isinstance(read(transport, bytearray(4096)), Unavailable)
    assert now_ms() - began_ms < LONG_MS, "at once"
    eventually(lambda: stuck.under_way == 3, "the device has them, and no other")
    stuck.let_go.set()
    eventually(lambda: transport.serves(1) is None, "the device is used again")
    assert read(transport, bytearray(4096)) is None
    transport.close()


def test_a_job_finds_a_thread_where_the_idle_one_is_another_jobs() -> None:
    """Two calls at once: the thread that waits was woken for the first one, and has not got so far yet."""
    pool: BouncePool[bytearray] = BouncePool(lambda: bytearray(1), 4, 2, SystemClock(), "test")
    done = []

    def job(name: str) -> Job[bytearray]:
        return Job(lambda _: done.append(name), lambda e: Unavailable(str(e)))

    pool._threads = pool._waiting = 1
    pool._queue.append((_Call(pool._lock), job("first")))
    second = job("second")
    pool.run([second], lambda _job, _buffer: None, now_ms() + LONG_MS)
    assert second.error is None
    assert done == ["first", "second"]
    pool.close()


class _Interrupted(SystemClock):
    """A clock at which whoever looks is interrupted once, when the test says so: as by Ctrl-C."""

    def __init__(self) -> None:
        self.interrupts = threading.Event()

    def monotonic_ms(self) -> int:
        if self.interrupts.is_set():
            self.interrupts.clear()
            raise KeyboardInterrupt
        return super().monotonic_ms()


def test_a_call_that_is_interrupted_loses_no_buffer() -> None:
    """Neither one whose command is under way then, nor one that waits to be taken."""
    clock = _Interrupted()
    buffers: list[bytearray] = []

    def make() -> bytearray:
        buffers.append(bytearray(1))
        return buffers[-1]

    pool: BouncePool[bytearray] = BouncePool(make, 2, 1, clock, "test")
    go = threading.Event()
    taken: list[int] = []

    def job(work: Callable[[], object]) -> Job[bytearray]:
        def do(_: bytearray) -> None:
            work()

        return Job(do, lambda e: Unavailable(str(e)))

    for _ in range(3):
        go.clear()
        jobs = [job(clock.interrupts.set), job(lambda: go.wait(60))]
        with pytest.raises(KeyboardInterrupt):
            pool.run(jobs, lambda _job, _buffer: taken.append(1), now_ms() + LONG_MS)
        took = len(taken)
        go.set()
        eventually(lambda: not pool.stuck and not pool._working, "what was under way came back")
        assert len(taken) == took, "nothing is taken once the call is over"
    both = [job(bool), job(bool)]
    pool.run(both, lambda _job, _buffer: taken.append(2), now_ms() + LONG_MS)
    assert [one.error for one in both] == [None, None]
    assert len(pool._idle) == len(buffers) <= 2
    pool.close()


def test_without_threads_there_is_an_answer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = device.transport()
    transport.connect(now_ms() + LONG_MS)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _cannot_start)
        assert isinstance(read(transport, bytearray(4096)), Unavailable)
    assert read(transport, bytearray(4096)) is None
    transport.close()


def _cannot_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_look_that_is_stuck(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs `connect` a second, no second thread, and no open file."""
    let_go, found = threading.Event(), []
    find = Machine.find

    def slow(*arguments: Any, **settings: Any) -> Disk:
        let_go.wait()
        found.append(find(*arguments, **settings))
        return found[-1]

    monkeypatch.setattr(Machine, "find", slow)
    transport = device.transport()
    with pytest.raises(DeadlineExceeded):
        transport.connect(now_ms() + LONG_MS)
    assert transport.serves(1) is not None
    assert isinstance(read(transport, bytearray(4096)), Unavailable), "at once"
    assert [t.name for t in threading.enumerate()].count("forebay-look") == 1
    let_go.set()
    eventually(lambda: found and not _is_open(found[0]), "what it found in the end is closed")
    assert read(transport, bytearray(4096)) is None
    transport.close()


def test_closing_leaves_no_look_behind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_device, "_CLOSE_S", LONG_MS / 1000)  # however slow the machine is
    begun, find = threading.Event(), Machine.find

    def seen(*arguments: Any, **settings: Any) -> Disk:
        begun.set()
        return find(*arguments, **settings)

    monkeypatch.setattr(Machine, "find", seen)
    for _ in range(20):
        begun.clear()
        transport = device.transport()
        looking = threading.Thread(target=read, args=(transport, bytearray(4096)))
        looking.start()
        begun.wait()
        transport.close()
        assert "forebay-look" not in [thread.name for thread in threading.enumerate()]
        looking.join()


def test_closing_does_not_wait_for_a_stuck_read(device: Device, stuck: Stuck) -> None:
    transport = device.transport()
    transport.connect(now_ms() + LONG_MS)
    fd = transport._volumes[1].disk
    assert fd is not None
    stuck.on = True
    into = bytearray(b"mine" * 1024)
    answers: list[ForebayError | None] = []
    reader = threading.Thread(target=lambda: answers.append(read(transport, into)))
    reader.start()
    eventually(lambda: stuck.under_way, "the read is under way")
    transport.close()
    reader.join(LONG_MS / 1000)
    assert isinstance(answers[0], Unavailable)
    os.fstat(fd.fd)  # still open: the kernel has it
    stuck.let_go.set()
    eventually(lambda: not _is_open(fd), "it is closed when the read has come back")
    assert into == b"mine" * 1024


def _is_open(disk: Disk) -> bool:
    try:
        return os.fstat(disk.fd).st_rdev == disk.device
    except OSError:
        return False


def test_what_the_drive_fails_spoils_no_neighbour(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three neighbours are one command; the medium of the second is bad."""
    bad = (1 << 20) + 4096
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(61, "No data available")  # ENODATA: a medium error
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    transport = device.transport()
    ops = [ReadOp(1, (1 << 20) + i * 4096, (Segment(memoryview(bytearray(4096)), 4096),)) for i in range(3)]
    first, second, third = [o.error for o in transport.read(ops, now_ms() + LONG_MS)]
    assert first is None and third is None
    assert isinstance(second, TargetFailed)
    transport.close()


@pytest.mark.parametrize(("size_bytes", "kind"), [(SIZE_BYTES, TargetFailed), (0, Unavailable)])
def test_a_read_under_way_in_a_device_that_goes_is_no_bad_medium(
    device: Device, monkeypatch: pytest.MonkeyPatch, size_bytes: int, kind: type[ForebayError]
) -> None:
    """Linux ends it with EIO, as one of a bad medium, which is no reason to go another way."""

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    transport = device.transport()
    transport.connect(now_ms() + LONG_MS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing)
        patched.setattr(os, "lseek", lambda *_: size_bytes)
        assert type(read(transport, bytearray(4096))) is kind
    transport.close()


class Sysfs:
    """Files as Linux has them of NVMe disks: /sys/class/block, and a device that can be opened."""

    def __init__(self, root: Path, device: Path) -> None:
        self.root = root
        self.dev = root / "dev"
        self.dev.mkdir()
        self.device = device
        self.machine = Machine(root / "sys", self.dev)
        (root / "sys/class/block").mkdir(parents=True)

    def add(self, name: str, nsid: int, nguid: str = "", *, nqn: str = NQN, **files: str) -> None:
        entry = self.root / "sys/class/block" / name
        (entry / "device").mkdir(parents=True)
        (entry / "queue").mkdir()
        number = self.device.stat().st_rdev
        about = {"nsid": str(nsid), "dev": f"{os.major(number)}:{os.minor(number)}", "uevent": f"DEVNAME={name}"}
        about |= {"queue/logical_block_size": "4096", "device/subsysnqn": nqn, "size": "8", "nguid": nguid, **files}
        for file, text in about.items():
            (entry / file).write_text(text + "\n")
        (self.dev / name).symlink_to(self.device)


BLOCK = memoryview(mmap.mmap(-1, 4096))


def find(sysfs: Sysfs, nguid: uuid.UUID | None, nsid: int = 1) -> Disk:
    volume = VolumeIdentity(NQN, nsid, nguid.hex if nguid else "")
    return sysfs.machine.find(volume, BLOCK)


def test_a_volume_is_found_by_subsystem_and_nsid_whatever_its_name(device: Device, tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path, device.path)
    sysfs.add("nvme0n1", 1, nqn="nqn.2014-08.org.nvmexpress:another")
    sysfs.add("nvme0n2", 2)
    sysfs.add("nvme0c0n1", 1, hidden="1")
    sysfs.add("nvme7n3", 1, str(device.nguid))
    sysfs.add("nvme7n3p1", 1, partition="1")
    disk = find(sysfs, device.nguid)
    assert disk.path == sysfs.dev / "nvme7n3"
    disk.close()
    with pytest.raises(Unavailable, match="is it connected"):
        find(sysfs, device.nguid, nsid=3)


def test_a_drive_with_a_name_that_is_no_text_hides_no_other(device: Device, tmp_path: Path) -> None:
    """As Linux makes one of model and serial number, whatever bytes they are, where a drive has none."""
    sysfs = Sysfs(tmp_path, device.path)
    sysfs.add("nvme0n1", 1)
    (tmp_path / "sys/class/block/nvme0n1/device/subsysnqn").write_bytes(b"nqn.2014.08.org.nvmexpress:1234\xff\xfe\n")
    sysfs.add("nvme1n1", 1, str(device.nguid))
    transport = device.transport(machine=sysfs.machine)
    transport.connect(now_ms() + LONG_MS)
    assert transport.path(1) == str(sysfs.dev / "nvme1n1")
    transport.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_look_that_ends_badly_is_not_the_last(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(*_: Any, **__: Any) -> Disk:
        raise ZeroDivisionError

    transport = device.transport()
    with monkeypatch.context() as patched:
        patched.setattr(Machine, "find", bad)
        with pytest.raises(Unavailable, match="failed"):
            transport.connect(now_ms() + LONG_MS)
    assert read(transport, bytearray(4096)) is None
    transport.close()


@pytest.mark.parametrize("told", ["", "0" * 32])
def test_without_an_nguid_the_label_tells(device: Device, tmp_path: Path, told: str) -> None:
    sysfs = Sysfs(tmp_path, device.path)
    sysfs.add("nvme0n1", 1, told)
    find(sysfs, device.nguid).close()
    with pytest.raises(VolumeMismatch, match="labelled"):
        find(sysfs, uuid.uuid4())
    device.write(0, bytes(4096))
    with pytest.raises(VolumeMismatch, match="neither"):
        find(sysfs, device.nguid)


def test_an_nguid_or_a_label_of_another_volume_is_refused(device: Device, tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path, device.path)
    sysfs.add("nvme0n1", 1, str(device.nguid))
    with pytest.raises(VolumeMismatch, match="NGUID"):
        find(sysfs, uuid.uuid4())
    device.write(0, label(uuid.uuid4()))  # the drive behind the same NVMe namespace is another
    with pytest.raises(VolumeMismatch, match="labelled"):
        find(sysfs, device.nguid)
    device.write(0, b"FOREBAY\0volume\r\n".ljust(4096, b"x"))
    with pytest.raises(VolumeMismatch):
        find(sysfs, device.nguid)


def test_a_name_that_leads_elsewhere_is_refused(device: Device, tmp_path: Path) -> None:
    """As when the disk was exchanged between the look and the opening."""
    sysfs = Sysfs(tmp_path, device.path)
    sysfs.add("nvme0n1", 1, str(device.nguid), dev="259:77")
    with pytest.raises(Unavailable, match="any more"):
        find(sysfs, device.nguid)
    sysfs.add("nvme0n2", 2, str(device.nguid))
    (sysfs.dev / "nvme0n2").unlink()
    (sysfs.dev / "nvme0n2").write_bytes(bytes(8192))
    with pytest.raises(Unavailable):
        find(sysfs, device.nguid, nsid=2)


def test_two_drives_of_one_label_are_both_refused(device: Device, tmp_path: Path) -> None:
    """One is a copy of the other, as a snapshot or a restored image: its blocks would be those of another time."""
    (tmp_path / "copy").write_bytes(label(device.nguid))
    with loop_device(tmp_path / "copy", SIZE_BYTES) as copy:
        transport = device.transport()
        with pytest.raises(VolumeMismatch, match="all labelled") as caught:
            transport.connect(now_ms() + LONG_MS)
        assert str(copy) in caught.value.message and str(device.path) in caught.value.message
        transport.close()


def test_drives_of_others_are_left_asleep(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look opens its own drive; those that are another's are opened once a minute, and when they have changed."""
    opened: list[str] = []
    real = Disk.__init__

    def counted(self: Disk, path: Path | str, **settings: Any) -> None:
        opened.append(str(path))
        real(self, path, **settings)

    monkeypatch.setattr(Disk, "__init__", counted)
    clock, second = ManualClock(), uuid.uuid4()
    nguids = {1: device.nguid.hex, 2: second.hex}
    with loop_device(tmp_path / "other", SIZE_BYTES) as other:
        transport = device.transport(nguids=nguids, clock=clock)

        def looks(count: int = 1) -> tuple[int, int]:
            opened.clear()
            for _ in range(count):
                transport.connect(clock.monotonic_ms() + LONG_MS)
                clock.advance(2_000)
            return opened.count(str(device.path)), opened.count(str(other))

        assert looks() == (1, 1), "whatever volume each was looked at for"
        assert transport.serves(2) is not None
        assert looks(5) == (5, 0)
        clock.advance(60_000)
        assert looks()[1] == 1, "a label may have been written meanwhile"
        Device(other, tmp_path / "other").write(0, label(second))
        clock.advance(60_000)
        assert looks()[1] == 2, "by whoever came first, and by its own"
        assert transport.serves(2) is None
        assert looks(3) == (3, 3), "each has its own"
        transport.close()


def test_another_drive_under_the_same_name_is_looked_at(device: Device, tmp_path: Path) -> None:
    """As the kernel's count of disks says: what was seen under that name says nothing of it."""
    sysfs, labels = Sysfs(tmp_path, device.path), DriveLabels(ManualClock())
    sysfs.add("nvme0n1", 1, nqn="nqn.2014-08.org.nvmexpress:local", diskseq="7")
    volume = VolumeIdentity(NQN, 1, device.nguid.hex)
    device.write(0, label(uuid.uuid4()))
    for written in (False, True):
        with pytest.raises(Unavailable):
            sysfs.machine.find(volume, BLOCK, labels=labels)
        if not written:
            device.write(0, label(device.nguid))
    (tmp_path / "sys/class/block/nvme0n1/diskseq").write_text("8\n")
    sysfs.machine.find(volume, BLOCK, labels=labels).close()


def test_blocks_longer_than_ours_are_refused(device: Device, tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path, device.path)
    sysfs.add("nvme0n1", 1, str(device.nguid), **{"queue/logical_block_size": "8192"})
    with pytest.raises(Unavailable, match="8192"):
        find(sysfs, device.nguid)
