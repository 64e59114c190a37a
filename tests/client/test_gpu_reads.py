"""Reads of a block device into GPU memory by kvikio: a real device, and a stand-in for kvikio and the memory."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.checksum import crc32c
from forebay.client.device import DeviceView
from forebay.client.transports import gpu_path as gpu_path_module
from forebay.client.transports.base import DeviceReadOp, DeviceSegment, ReadOp, Segment
from forebay.client.transports.block_device import BlockDeviceOptions, BlockDeviceTransport
from forebay.client.transports.device_reads import DeviceReads
from forebay.client.transports.disks import Disk
from forebay.client.transports.gpu_path import GpuPath, choose_gpu_path, gpu_path
from forebay.clock import SystemClock
from forebay.errors import DeadlineExceeded, InvalidArgument, Unavailable
from tests.appliance.loop_device import loop_device
from tests.client.conftest import eventually, now_ms
from tests.client.kvikio_stand_in import StandInKvikio, StandInMemory, StandInTensor, stand_in_checksum
from tests.client.test_block_device import LONG_MS, NQN, SIZE_BYTES, label

AT = 1 << 20
CONTENT = np.random.default_rng(7).integers(0, 256, 8 << 20, np.uint8)


class Scene:
    """A device with content, and a transport that reads it by the stand-in."""

    def __init__(self, path: Path, nguid: uuid.UUID) -> None:
        self.path = path
        self.kvikio = StandInKvikio()
        self.kvikio.defaults.set("auto_direct_io_read", True)
        self.memory = StandInMemory()
        self._reads = reads = DeviceReads(
            GpuPath("gds", "stand-in", self.kvikio),
            depth=4,
            max_command_bytes=1 << 20,
            clock=SystemClock(),
            memory=self.memory,
            checksum=stand_in_checksum,
        )
        self.transport = BlockDeviceTransport(
            NQN, nguids={1: nguid.hex}, local=True, options=BlockDeviceOptions(depth=4), device_reads=reads
        )

    @property
    def stuck(self) -> int:
        """Reads that were left behind."""
        return sum(pool.stuck for pool in self._reads._pools.values())

    def read(self, *ops: DeviceReadOp, left_ms: int = LONG_MS) -> list[Any]:
        return self.transport.read_device(ops, now_ms() + left_ms)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    nguid = uuid.uuid4()
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.write(label(nguid))
        file.seek(AT)
        file.write(CONTENT.tobytes())
    with loop_device(backing, SIZE_BYTES) as path:
        scene = Scene(path, nguid)
        yield scene
        scene.kvikio.reading.set()
        scene.transport.close()


def tensor(size: int) -> StandInTensor:
    return StandInTensor(np.full(size, 0xEE, np.uint8))


def view(of: StandInTensor) -> DeviceView:
    return DeviceView(of)


def test_tiles_land_where_they_belong_and_are_verified_there(scene: Scene) -> None:
    """Segments with and without a place, of any size, over several commands."""
    assert scene.transport.capabilities.device_memory
    first, second = tensor(2_500_001), tensor(70_000)
    gap = 4096 - 2_500_001 % 4096
    tail = -(2_500_001 + gap + 70_000) % 4096
    segments = (
        DeviceSegment(view(first), 2_500_001, 5),
        DeviceSegment(None, gap),
        DeviceSegment(view(second), 70_000, 9),
        DeviceSegment(None, tail),
    )
    third = tensor(4096)
    whole, small = scene.read(
        DeviceReadOp(1, AT, segments), DeviceReadOp(1, AT + (4 << 20), (DeviceSegment(view(third), 4096),))
    )
    assert whole.error is None and small.error is None
    at = 2_500_001 + gap
    assert (first.array == CONTENT[:2_500_001]).all()
    assert (second.array == CONTENT[at : at + 70_000]).all()
    assert (third.array == CONTENT[4 << 20 : (4 << 20) + 4096]).all()
    assert whole.checksums == (crc32c(first.array, 5), None, crc32c(second.array, 9), None)
    assert small.checksums == (None,)
    assert scene.memory.settled >= len(scene.kvikio.reads), "copies were made before a buffer was used again"


def test_memory_is_registered_once_and_the_file_opened_once(scene: Scene) -> None:
    for _ in range(5):
        into = tensor(3 << 20)
        (outcome,) = scene.read(DeviceReadOp(1, AT, (DeviceSegment(view(into), 3 << 20, 0),)))
        assert outcome.error is None
        assert (into.array == CONTENT[: 3 << 20]).all()
    assert scene.memory.allocated == [4 << 20]
    assert len(scene.kvikio.registered) == 1
    assert len(scene.kvikio.opened) == 1
    scene.transport.close()
    assert scene.kvikio.deregistered == scene.kvikio.registered


def test_short_reads_are_continued(scene: Scene) -> None:
    scene.kvikio.short = 128 << 10
    into = tensor(1 << 20)
    (outcome,) = scene.read(DeviceReadOp(1, AT, (DeviceSegment(view(into), 1 << 20, 0),)))
    assert outcome.error is None
    assert (into.array == CONTENT[: 1 << 20]).all()


def test_a_stuck_read_leaves_the_callers_tensor_alone(scene: Scene) -> None:
    good = tensor(4096)
    assert scene.read(DeviceReadOp(1, AT, (DeviceSegment(view(good), 4096),)))[0].error is None
    scene.kvikio.reading.clear()
    into = tensor(4096)
    op = DeviceReadOp(1, AT, (DeviceSegment(view(into), 4096, 3),))

    def left_behind() -> int:
        (outcome,) = scene.read(op, left_ms=50)
        assert isinstance(outcome.error, DeadlineExceeded)
        return scene.stuck  # on a busy machine a read may be late before a thread has taken it

    eventually(left_behind, "a read is stuck")
    eventually(lambda: scene.kvikio.under_way == 1, "the device has it")
    scene.kvikio.reading.set()
    eventually(lambda: not scene.kvikio.under_way, "it came back")
    assert (into.array == 0xEE).all()
    assert scene.read(op)[0].error is None
    assert (into.array == CONTENT[:4096]).all()


def test_memory_of_a_stuck_read_is_not_given_back(scene: Scene) -> None:
    scene.kvikio.reading.clear()
    answers: list[Any] = []
    op = DeviceReadOp(1, AT, (DeviceSegment(view(tensor(4096)), 4096),))
    reader = threading.Thread(target=lambda: answers.extend(scene.read(op)))
    reader.start()
    eventually(lambda: scene.kvikio.under_way, "it is under way")
    scene.transport.close()
    reader.join(30)
    assert isinstance(answers[0].error, Unavailable)
    assert not scene.kvikio.deregistered
    scene.kvikio.reading.set()
    eventually(lambda: scene.kvikio.deregistered == scene.kvikio.registered, "given back when it has come back")
    assert len(scene.kvikio.deregistered) == 1


def test_a_read_that_comes_as_it_is_closed_leaves_no_memory_registered(scene: Scene) -> None:
    op = DeviceReadOp(1, AT, (DeviceSegment(view(tensor(4096)), 4096),))
    disk = Disk(scene.path)
    scene.transport.close()
    outcomes, failed = scene._reads.run({0: op}, [4096], {1: disk}, now_ms() + LONG_MS)
    disk.close()
    assert isinstance(outcomes[0].error, Unavailable)
    assert not failed and not scene.kvikio.registered


def test_a_device_that_is_slow_to_open_keeps_no_call_beyond_its_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), scene.kvikio.CuFile

    def slow(*arguments: str) -> Any:
        go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(scene.kvikio, "CuFile", slow)
    op = DeviceReadOp(1, AT, (DeviceSegment(view(tensor(4096)), 4096, 3),))
    began_ms = now_ms()
    for _ in range(2):  # the second one has nothing to do with the opening
        (outcome,) = scene.read(op, left_ms=50)
        assert isinstance(outcome.error, DeadlineExceeded)
    assert now_ms() - began_ms < 50_000, "it waited for the device"
    go.set()
    assert scene.read(op)[0].error is None
    assert len(scene.kvikio.opened) == 1


def test_copies_are_waited_for_though_one_of_them_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it may be under way: nothing writes to the caller's tensors once the call has returned."""
    copied: list[StandInTensor] = []
    copy_ = StandInTensor.copy_

    def failing(self: StandInTensor, other: StandInTensor) -> None:
        if copied:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        copied.append(self)
        copy_(self, other)

    with monkeypatch.context() as patched:
        patched.setattr(StandInTensor, "copy_", failing)
        segments = tuple(DeviceSegment(view(tensor(4096)), 4096) for _ in range(2))
        with pytest.raises(RuntimeError):
            scene.read(DeviceReadOp(1, AT, segments))
    assert copied and scene.memory.settled == 1
    assert scene.read(DeviceReadOp(1, AT, segments))[0].error is None


def test_an_error_of_the_library_is_no_exception(scene: Scene) -> None:
    scene.kvikio.fails = True
    op = DeviceReadOp(1, AT, (DeviceSegment(view(tensor(4096)), 4096, 3),))
    (outcome,) = scene.read(op)
    assert isinstance(outcome.error, Unavailable)
    assert "driver not initialized" in outcome.error.message
    assert outcome.checksums == (None,)
    assert scene.transport.serves(1) is not None, "it is looked at again"
    scene.kvikio.fails = False
    assert scene.read(op)[0].error is None


def test_the_page_cache_is_refused(scene: Scene) -> None:
    scene.kvikio.direct_io = False
    (outcome,) = scene.read(DeviceReadOp(1, AT, (DeviceSegment(view(tensor(4096)), 4096, 3),)))
    assert isinstance(outcome.error, Unavailable)
    assert "page cache" in outcome.error.message
    assert not scene.kvikio.reads


def test_bad_operations_spoil_no_other(scene: Scene) -> None:
    good = tensor(4096)
    ops = [
        DeviceReadOp(1, SIZE_BYTES, (DeviceSegment(view(tensor(4096)), 4096),)),
        DeviceReadOp(7, AT, (DeviceSegment(view(tensor(4096)), 4096),)),
        DeviceReadOp(1, AT, (DeviceSegment(view(good), 4096, 1),)),
    ]
    beyond, unknown, fine = scene.read(*ops)
    assert beyond.error is not None and unknown.error is not None and fine.error is None
    assert (good.array == CONTENT[:4096]).all()
    with pytest.raises(InvalidArgument):
        scene.read(DeviceReadOp(1, AT, (DeviceSegment(view(tensor(100)), 100),)))
    assert scene.read() == []


def test_host_memory_is_read_as_ever(scene: Scene) -> None:
    into = bytearray(4096)
    (outcome,) = scene.transport.read([ReadOp(1, AT, (Segment(memoryview(into), 4096),))], now_ms() + LONG_MS)
    assert outcome.error is None
    assert into == CONTENT[:4096].tobytes()
    assert not scene.kvikio.opened


# --- which path -----------------------------------------------------------------------------------------------------


def machine(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")
    return root


DRIVER = "proc/driver/nvidia/version"
DIRECT = "proc/driver/nvidia-fs/version"


@pytest.mark.parametrize(
    ("files", "wanted", "cufile", "path", "why", "mode"),
    [
        ((), "auto", True, "none", "no NVIDIA driver", None),
        ((), "gds", True, "none", "no NVIDIA driver", None),
        ((DRIVER, DIRECT), "auto", True, "gds", "cuFile answers", "AUTO"),
        (("dev/nvidiactl", "sys/module/nvidia_fs/version"), "auto", True, "gds", "cuFile answers", "AUTO"),
        ((DRIVER,), "auto", True, "compat", "nvidia-fs is not loaded", "ON"),
        ((DRIVER,), "gds", True, "compat", "nvidia-fs is not loaded", "ON"),
        ((DRIVER, DIRECT), "auto", False, "compat", "no cuFile", "AUTO"),
        ((DRIVER, DIRECT), "compat", True, "compat", "asked for", "ON"),
        ((DRIVER, DIRECT), "staging", True, "staging", "asked for", None),
    ],
)
def test_the_path_is_chosen_by_what_is_there(
    tmp_path: Path, files: tuple[str, ...], wanted: str, cufile: bool, path: str, why: str, mode: str | None
) -> None:
    kvikio = StandInKvikio(cufile=cufile)
    chosen = choose_gpu_path(wanted, root=machine(tmp_path, *files), load=lambda: kvikio)
    assert chosen.name == path
    assert why in chosen.why
    assert (chosen.kvikio is kvikio) == (path in ("gds", "compat"))
    if mode is not None:
        assert kvikio.settings == {"auto_direct_io_read": True, "compat_mode": kvikio.CompatMode[mode]}
    else:
        assert not kvikio.settings, "it was not even loaded"


def test_a_library_that_hangs_or_cannot_be_loaded_ends_in_staging(tmp_path: Path) -> None:
    root = machine(tmp_path, DRIVER, DIRECT)
    kvikio = StandInKvikio()
    kvikio.asked.clear()
    hung = choose_gpu_path(root=root, load=lambda: kvikio, ask_s=0.05)
    kvikio.asked.set()
    assert (hung.name, hung.why) == ("staging", "kvikio did not answer within 0.05 s")

    def broken() -> Any:
        raise ImportError("libcuda.so.1: cannot open shared object file")

    failed = choose_gpu_path(root=root, load=broken)
    assert failed.name == "staging"
    assert "libcuda.so.1" in failed.why
    absent = choose_gpu_path(root=root)  # kvikio is not in this environment
    assert absent.name == "staging"
    assert "forebay[gpu]" in absent.why


def test_it_is_chosen_once_with_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gpu_path_module, "_chosen", {})
    with caplog.at_level("INFO"):
        assert gpu_path("auto") is gpu_path("auto")
    assert [record.message for record in caplog.records if "GPU memory" in record.message] == [
        f"reads by block device reach GPU memory by {gpu_path('auto').name}: {gpu_path('auto').why}"
    ]


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="gpu"):
        BlockDeviceOptions(gpu="magic")
