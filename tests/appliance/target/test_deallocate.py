"""Write Zeroes, Dataset Management and FUA (NVM §3.2), on files and on block devices."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.appliance.dataplane.target.subsystems import Namespace
from forebay.appliance.dataplane.target.volume import Volume, aligned_buffers
from forebay.nvmetcp import command
from forebay.nvmetcp.command import Command, Completion
from forebay.nvmetcp.spec import IoOpcode, Status
from tests.appliance.loop_device import loop_device
from tests.appliance.target.conftest import LBAS, LIMITS, Rig
from tests.appliance.target.host import RawHost
from tests.appliance.target.test_commands import pattern

DEALLOCATE = 4
DEAC = 1 << 25
FUA = 1 << 30


def zeroes(host: RawHost, slba: int, nlb: int, control: int = 0, nsid: int = 1) -> Completion:
    one = Command(IoOpcode.WRITE_ZEROES, 0x40, host.next_cid(), nsid)
    low, high = slba & 0xFFFFFFFF, slba >> 32
    return host.run(one._replace(cdw10=low, cdw11=high, cdw12=nlb - 1 | control))[0]


def dataset(
    host: RawHost, *ranges: tuple[int, int], in_capsule: bool = False, attributes: int = DEALLOCATE, nsid: int = 1
) -> Completion:
    data = b"".join(struct.pack("<IIQ", 0, nlb, slba) for slba, nlb in ranges)
    one = Command(IoOpcode.DATASET_MANAGEMENT, 0x40, host.next_cid(), nsid, cdw10=len(ranges) - 1, cdw11=attributes)
    return host.run(one, data=data)[0] if in_capsule else host.run(one, write=data)[0]


@pytest.fixture
def raw_rig(rig: Rig) -> Rig:
    rig.server.set_fenced("vol", False)
    return rig


def held_bytes(rig: Rig) -> int:
    return rig.volume.path.stat().st_blocks * 512


@pytest.mark.parametrize("control", [0, DEAC])
def test_write_zeroes(raw_rig: Rig, control: int) -> None:
    with raw_rig.attach() as host:
        host.io[0].write(0, pattern(1 << 20))
        before = held_bytes(raw_rig)
        assert zeroes(host.io[0], 16, 64, control).status == 0
        # Looked at before the range is read, which on tmpfs would allocate it again.
        assert (held_bytes(raw_rig) < before) == bool(control)
        assert raw_rig.stored(0, 16) == pattern(1 << 20)[: 16 * 4096]
        assert host.io[0].read(16, 64)[1] == bytes(64 * 4096)
        assert raw_rig.stored(80, 1) == pattern(1 << 20)[80 * 4096 : 81 * 4096]


@pytest.mark.parametrize("in_capsule", [False, True])
def test_deallocate(raw_rig: Rig, in_capsule: bool) -> None:
    with raw_rig.attach() as host:
        host.io[0].write(0, pattern(1 << 20))
        before = held_bytes(raw_rig)
        assert dataset(host.io[0], (16, 64), (100, 1), (3, 0), (200, 40), in_capsule=in_capsule).status == 0
        assert held_bytes(raw_rig) <= before - 100 * 4096
        data = bytearray(pattern(1 << 20))
        for slba, nlb in ((16, 64), (100, 1), (200, 40)):
            data[slba * 4096 : (slba + nlb) * 4096] = bytes(nlb * 4096)
        assert host.io[0].read(0, 256)[1] == data
        assert raw_rig.stored(0, 256) == data
        tally = raw_rig.volume.tally()
        assert (tally.unmaps, tally.bytes_unmapped) == (3, 105 * 4096)


def test_a_full_list_of_ranges_and_hints_alone(raw_rig: Rig) -> None:
    with raw_rig.attach() as host:
        host.io[0].write(0, pattern(4 << 20))
        assert dataset(host.io[0], *((i * 2, 1) for i in range(256))).status == 0
        got = host.io[0].read(0, 512)[1]
        assert all((got[i * 4096 : (i + 1) * 4096] == bytes(4096)) == (i % 2 == 0) for i in range(512))
        assert dataset(host.io[0], (1, 1), attributes=1).status == 0  # a hint: nothing is deallocated
        assert host.io[0].read(1, 1)[1] == pattern(4 << 20)[4096:8192]


def test_a_list_in_a_longer_buffer(raw_rig: Rig) -> None:
    """Linux sends 4,096 bytes whatever the number of ranges."""
    with raw_rig.attach() as host:
        queue = host.io[0]
        queue.write(0, pattern(8192))
        data = struct.pack("<IIQ", 0, 1, 1).ljust(4096, b"\xff")
        one = Command(IoOpcode.DATASET_MANAGEMENT, 0x40, queue.next_cid(), 1, cdw11=DEALLOCATE)
        assert queue.run(one, write=data)[0].status == 0
        assert queue.run(one._replace(cid=queue.next_cid()), data=data)[0].status == 0
        assert queue.read(0, 2)[1] == pattern(4096) + bytes(4096)


def test_what_is_refused(raw_rig: Rig) -> None:
    with raw_rig.attach() as host:
        queue = host.io[0]
        queue.write(0, pattern(8192))
        assert zeroes(queue, LBAS - 1, 2).status == Status.LBA_OUT_OF_RANGE
        assert zeroes(queue, (1 << 64) - 1, 1).status == Status.LBA_OUT_OF_RANGE
        assert zeroes(queue, 0, LIMITS.max_command_bytes // 4096 + 1).status == Status.INVALID_FIELD
        assert zeroes(queue, 0, 1, nsid=9).status == Status.INVALID_NAMESPACE
        assert dataset(queue, (0, 1), (LBAS - 1, 2)).status == Status.LBA_OUT_OF_RANGE
        assert dataset(queue, ((1 << 64) - 1, 0xFFFFFFFF), in_capsule=True).status == Status.LBA_OUT_OF_RANGE
        assert dataset(queue, (0, 1), nsid=9).status == Status.INVALID_NAMESPACE
        short = Command(IoOpcode.DATASET_MANAGEMENT, 0x40, queue.next_cid(), 1, cdw10=1, cdw11=DEALLOCATE)
        assert queue.run(short, data=bytes(16))[0].status == Status.DATA_SGL_LENGTH_INVALID
        assert queue.run(short._replace(cid=queue.next_cid()), write=bytes(16))[0].status == (
            Status.DATA_SGL_LENGTH_INVALID
        )
        longer = short._replace(cid=queue.next_cid(), cdw10=0)
        assert queue.run(longer, write=bytes(4112))[0].status == Status.DATA_SGL_LENGTH_INVALID
        assert raw_rig.stored(0, 2) == pattern(8192)  # all ranges are judged before the first is touched


def test_fenced_and_read_only_volumes_refuse_hosts(rig: Rig) -> None:
    """Even inside a grant: giving space back is the daemon's part (design §6.4)."""
    rig.grant(1, 0, 100)
    with rig.attach() as host:
        host.io[0].write(0, pattern(8192))
        for done in (
            zeroes(host.io[0], 0, 1),
            zeroes(host.io[0], 0, 1, DEAC),
            dataset(host.io[0], (0, 1)),
            dataset(host.io[0], (0, 1), in_capsule=True),
        ):
            assert (done.status, done.do_not_retry) == (Status.ACCESS_DENIED, True)
        rig.server.set_fenced("vol", False)
        rig.volume.readonly = True
        assert zeroes(host.io[0], 0, 1).status == dataset(host.io[0], (0, 1)).status == Status.ACCESS_DENIED
        assert rig.stored(0, 2) == pattern(8192)


def test_a_volume_fenced_between_request_and_data(raw_rig: Rig) -> None:
    with raw_rig.attach() as host:
        queue = host.io[0]
        queue.write(0, pattern(8192))
        one = Command(IoOpcode.DATASET_MANAGEMENT, 0x40, queue.next_cid(), 1, cdw11=DEALLOCATE)
        queue.send(queue.conn.send_command(one, write_bytes=16))
        request = queue.event()
        raw_rig.server.set_fenced("vol", True)
        queue.send(queue.conn.send_h2c_data(request, [struct.pack("<IIQ", 0, 2, 0)]))  # type: ignore[arg-type]
        assert queue.finish().status == Status.ACCESS_DENIED
        assert raw_rig.stored(0, 2) == pattern(8192)


def test_media_errors_are_told_and_counted(raw_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(5, "EIO")

    monkeypatch.setattr(raw_rig.volume, "release_region", failing)
    with raw_rig.attach() as host:
        assert dataset(host.io[0], (0, 1)).status == Status.WRITE_FAULT
        assert zeroes(host.io[0], 0, 1, DEAC).status == Status.WRITE_FAULT
        assert raw_rig.volume.tally().errors == 2


def test_force_unit_access_flushes(raw_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Write or Write Zeroes with FUA is on stable media when it is answered. NVM §3.2.6."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fdatasync", calls.append)
    with raw_rig.attach() as host:
        queue = host.io[0]
        assert queue.write(0, pattern(4096)).status == 0
        assert zeroes(queue, 0, 1).status == 0
        assert not calls
        one = command.write(queue.next_cid(), 1, 0, 1)
        assert queue.run(one._replace(cdw12=one.cdw12 | FUA), write=pattern(4096))[0].status == 0
        assert len(calls) == 1
        one = one._replace(cid=queue.next_cid(), cdw12=one.cdw12 | FUA)
        assert queue.run(one, data=pattern(4096))[0].status == 0
        assert zeroes(queue, 0, 1, FUA).status == 0
        assert len(calls) == 3

        def failing(_: int) -> None:
            raise OSError(5, "EIO")

        monkeypatch.setattr(os, "fdatasync", failing)
        assert queue.run(one._replace(cid=queue.next_cid()), data=pattern(4096))[0].status == Status.WRITE_FAULT


def test_what_was_not_flushed_is_not_said_to_be(raw_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace is taken away between a write and its flush, which nobody does for this command then."""
    namespace, volume = raw_rig.subsystem.namespaces[1], raw_rig.volume
    real = volume.write

    def write(view: memoryview, offset_bytes: int) -> None:
        real(view, offset_bytes)
        namespace.live = False

    monkeypatch.setattr(volume, "write", write)
    with raw_rig.attach() as host:
        queue = host.io[0]
        one = command.write(queue.next_cid(), 1, 0, 1)
        done = queue.run(one._replace(cdw12=one.cdw12 | FUA), data=pattern(4096))[0]
        assert (done.status, done.do_not_retry) == (Status.INVALID_NAMESPACE, True)


# --- block devices ----------------------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    with loop_device(tmp_path / "backing", 64 << 20) as path:
        yield path


def test_a_block_device_is_a_volume(device: Path, tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    volume = Volume("dev", device)
    try:
        assert (volume.size_bytes, volume.is_device, volume.io) == (64 << 20, True, "direct")
        data = aligned_buffers(8 << 20)[0]
        data[:] = pattern(8 << 20)
        volume.write(data, 16 << 20)
        volume.flush()
        got = aligned_buffers(8 << 20)[0]
        volume.read_into(got, 16 << 20)
        assert got == data
        held = backing.stat().st_blocks
        volume.release_region(16 << 20, 4 << 20)
        volume.read_into(got, 16 << 20)
        assert got[: 4 << 20] == bytes(4 << 20)
        assert got[4 << 20 :] == data[4 << 20 :]
        assert backing.stat().st_blocks < held
        volume.prepare_region(20 << 20, 4 << 20)
        volume.read_into(got, 16 << 20)
        assert got == bytes(8 << 20)
        with pytest.raises(OSError, match="busy"):
            Volume("twice", device)
    finally:
        volume.close()


def test_a_host_on_a_block_device(device: Path, disk_rig: Rig) -> None:
    server = disk_rig.server
    server.delete_volume("vol")
    volume = Volume("vol", device)
    server.add_volume(volume)
    volume.fenced = False
    server.add_namespace(disk_rig.subsystem, Namespace(1, volume, nguid=bytes(16), uuid=None, auto_visible=True))
    with disk_rig.attach() as host:
        assert host.io[0].write(0, pattern(1 << 20)).status == 0
        assert zeroes(host.io[0], 0, 16).status == dataset(host.io[0], (32, 16)).status == 0
        data = bytearray(pattern(1 << 20))
        data[: 16 * 4096] = data[32 * 4096 : 48 * 4096] = bytes(16 * 4096)
        assert host.io[0].read(0, 256)[1] == data
