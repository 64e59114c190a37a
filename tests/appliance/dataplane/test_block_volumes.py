"""Block devices as drives."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.appliance.dataplane.block_volumes import BlockVolumes
from forebay.appliance.dataplane.target.volume import Volume
from forebay.appliance.dataplane.volumes import (
    FileVolumes,
    claim_drive,
    discard_drive,
    drive_space,
    open_drive,
    require_capacity,
    volumes_on,
)
from forebay.errors import CapacityShort, DataDirInUse, InvalidArgument, VolumeMismatch
from forebay.ids import NamespaceId, VolumeId
from forebay.volume_label import LABEL_BYTES
from tests.appliance.dataplane.test_volumes import NODE, OTHER_NODE, REGION, label
from tests.appliance.loop_device import loop_device


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    with loop_device(tmp_path / "backing", 5 * REGION) as path:
        yield path


def overwrite(device: Path, data: bytes, offset_bytes: int) -> None:
    with device.open("r+b") as file:
        file.seek(offset_bytes)
        file.write(data)
        os.fsync(file.fileno())


def test_claiming_may_be_repeated_and_is_found_again(device: Path) -> None:
    identity = claim_drive(device, NODE)
    assert claim_drive(device, NODE) == identity
    assert open_drive(device, NODE, identity.drive_uuid) == identity
    with pytest.raises(VolumeMismatch, match="belongs to node"):
        claim_drive(device, OTHER_NODE)
    with pytest.raises(VolumeMismatch, match="of this node"):
        open_drive(device, NODE, uuid.uuid4())


def test_a_device_that_was_swapped_is_told(device: Path) -> None:
    with pytest.raises(VolumeMismatch, match="is it the device that it was"):
        open_drive(device, NODE, uuid.uuid4())


@pytest.mark.parametrize("offset_bytes", [0, 510, 1024, 4096, (1 << 20) - 1])
def test_a_device_with_anything_on_it_is_left_alone(device: Path, offset_bytes: int) -> None:
    overwrite(device, b"\x55", offset_bytes)
    with pytest.raises(VolumeMismatch, match="not empty"):
        claim_drive(device, NODE)
    with device.open("rb") as file:
        assert file.read(1 << 20).strip(b"\0") == b"\x55"


def test_only_what_is_a_drive_of_forebays_is_discarded(device: Path) -> None:
    overwrite(device, b"a file system", 0)
    assert discard_drive(device, NODE) == []
    assert device.read_bytes()[:13] == b"a file system"
    overwrite(device, bytes(13), 0)
    identity = claim_drive(device, OTHER_NODE)
    assert discard_drive(device, OTHER_NODE) == []
    target = Volume("vol", device)
    with pytest.raises(DataDirInUse):
        discard_drive(device, NODE)
    target.close()
    assert open_drive(device, OTHER_NODE, identity.drive_uuid) == identity
    assert discard_drive(device, NODE) == [device]
    assert claim_drive(device, NODE).drive_uuid != identity.drive_uuid


def test_a_device_that_is_in_use_is_left_alone(device: Path) -> None:
    holder = os.open(device, os.O_RDWR | os.O_EXCL)
    try:
        with pytest.raises(VolumeMismatch, match="mounted"):
            claim_drive(device, NODE)
    finally:
        os.close(holder)


def test_a_damaged_identity_is_told(device: Path) -> None:
    identity = claim_drive(device, NODE)
    overwrite(device, b"{]", LABEL_BYTES)
    with pytest.raises(VolumeMismatch, match="does not name a node"):
        open_drive(device, NODE, identity.drive_uuid)


def test_space(device: Path, tmp_path: Path) -> None:
    space = drive_space(device)
    assert (space.total_bytes, space.usable_bytes) == (5 * REGION, 4 * REGION)
    require_capacity(device, 4 * REGION)
    with pytest.raises(CapacityShort):
        require_capacity(device, 5 * REGION)


def test_its_one_volume(device: Path, tmp_path: Path) -> None:
    claim_drive(device, NODE)
    link = tmp_path / "link"
    link.symlink_to(device)
    volumes = volumes_on(link)
    assert isinstance(volumes, BlockVolumes)
    assert not isinstance(volumes_on(tmp_path), BlockVolumes)
    assert isinstance(volumes_on(tmp_path), FileVolumes)
    assert volumes.present() == []
    with pytest.raises(VolumeMismatch, match="no label"):
        volumes.read_label(VolumeId(1))
    one = label(1)
    assert volumes.create(one) == device
    assert volumes.create(one) == volumes.path(VolumeId(1)) == device
    assert volumes.present() == [1]
    assert volumes.check(one, 1) == one
    assert volumes.stamp(VolumeId(1), 2).epoch == 2
    assert volumes.check(one, 2).epoch == 2
    assert claim_drive(device, NODE).node_id == NODE  # the identity stands beside the label
    with pytest.raises(VolumeMismatch, match="older"):
        volumes.check(replace(one, epoch=5), 6)


def test_it_belongs_to_one_namespace_at_a_time(device: Path) -> None:
    claim_drive(device, NODE)
    volumes = volumes_on(device)
    volumes.create(label(1))
    with pytest.raises(InvalidArgument, match="a block device holds one"):
        volumes.create(label(2, namespace=NamespaceId(9)))
    volumes.remove(VolumeId(2))  # what was not made cannot be taken away
    assert volumes.present() == [1]
    volumes.remove(VolumeId(1))
    volumes.remove(VolumeId(1))
    assert volumes.present() == []
    volumes.create(label(2, namespace=NamespaceId(9)))
    assert volumes.present() == [2]


def test_a_volume_that_does_not_fit(device: Path) -> None:
    with pytest.raises(CapacityShort) as caught:
        volumes_on(device).create(label(1, size_bytes=6 * REGION))
    assert caught.value.limit == 4 * REGION
    assert volumes_on(device).present() == []


def test_a_smaller_device_is_refused(device: Path, tmp_path: Path) -> None:
    volumes_on(device).create(label(1))
    with device.open("rb") as file:
        start = file.read(2 * LABEL_BYTES)
    with loop_device(tmp_path / "small", 2 * REGION) as small:
        overwrite(small, start, 0)
        with pytest.raises(VolumeMismatch, match="smaller"):
            volumes_on(small).read_label(VolumeId(1))


def test_a_node_on_a_device(tmp_path: Path) -> None:
    """Stored, found again after a restart, and a second namespace is refused until the first is gone."""
    with loop_device(tmp_path / "backing", 6 * REGION) as device:
        config = tmp_path / "node.toml"
        config.write_text(
            f'data = "{tmp_path}/data"\ncapacity = "256MiB"\n[grpc]\nlisten = "127.0.0.1:0"\n[http]\nenabled = false\n'
            f'[target]\nlisten = "127.0.0.1:0"\n[[drives]]\npath = "{device}"\n'
        )
        value = tmp_path / "value"
        value.write_bytes(os.urandom(3_000_000))

        def forebay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "forebay.cli.main", *map(str, arguments), "--data", str(tmp_path / "data")]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

        def serve() -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "forebay.cli.main", "serve", "--config", str(config)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if line.startswith("admin token"):
                    return process
            raise AssertionError("".join(seen))

        def end(process: subprocess.Popen[str]) -> None:
            process.terminate()
            process.communicate(timeout=30)
            assert process.returncode == 0

        node = serve()
        try:
            assert forebay("put", "k", value).returncode == 0
            refused = forebay("namespace", "create", "acme/two")
            assert refused.returncode
            assert "a block device holds one" in refused.stderr
            end(node)
            node = serve()
            got = forebay("get", "k", tmp_path / "got")
            assert got.returncode == 0, got.stderr
            assert (tmp_path / "got").read_bytes() == value.read_bytes()
            assert forebay("namespace", "rm", "default/default", "--force").returncode == 0
            assert forebay("namespace", "create", "acme/two").returncode == 0
            assert forebay("put", "k", value, "-n", "acme/two").returncode == 0
        finally:
            end(node)
