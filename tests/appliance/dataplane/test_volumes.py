import errno
import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.dataplane.labels import volume_size_bytes
from forebay.appliance.dataplane.volumes import FileVolumes, claim_drive, drive_space, open_drive, require_capacity
from forebay.errors import AlreadyExists, CapacityShort, InvalidArgument, NoSpace, Unavailable, VolumeMismatch
from forebay.ids import NamespaceId, VolumeId
from forebay.volume_label import LABEL_BYTES, VolumeLabel

NODE = bytes(range(16))
OTHER_NODE = bytes(16)
REGION = 64 << 20


def label(volume: int = 1, epoch: int = 1, **changes: Any) -> VolumeLabel:
    found = VolumeLabel(
        NODE,
        VolumeId(volume),
        NamespaceId(7),
        uuid.uuid5(uuid.NAMESPACE_OID, str(volume)).bytes,
        epoch,
        REGION,
        4 * REGION,
    )
    return replace(found, **changes)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    claim_drive(tmp_path / "drive0", NODE)
    return tmp_path / "drive0"


@pytest.fixture
def files(drive: Path) -> FileVolumes:
    return FileVolumes(drive)


@pytest.mark.parametrize("name", ["forebay-none", "mapper/forebay-none"])
def test_a_device_that_is_not_there_is_not_made_a_directory(name: str) -> None:
    device = Path("/dev") / name
    with pytest.raises(Unavailable, match="no such device"):
        claim_drive(device, NODE)
    assert not device.exists()


def refused(files: FileVolumes, expected: VolumeLabel, intended_epoch: int | None = None) -> VolumeMismatch:
    with pytest.raises(VolumeMismatch) as caught:
        files.check(expected, expected.epoch if intended_epoch is None else intended_epoch)
    return caught.value


class TestLabel:
    def test_golden_bytes(self) -> None:
        block = VolumeLabel(NODE, VolumeId(2), NamespaceId(3), b"u" * 16, 4, REGION, 2 * REGION).encode()
        assert len(block) == LABEL_BYTES and not any(block[88:])
        assert block[:88].hex() == (
            "464f524542415900766f6c756d650d0a01000000000102030405060708090a0b0c0d0e0f0200000003000000"
            "75757575757575757575757575757575040000000000000000000004000000000000000800000000"
            "43a09f0c"
        )

    @given(
        st.builds(
            VolumeLabel,
            st.binary(min_size=16, max_size=16),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.binary(min_size=16, max_size=16),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
        )
    )
    def test_reads_back(self, value: VolumeLabel) -> None:
        assert VolumeLabel.decode(value.encode()) == value

    @given(st.integers(0, 87), st.integers(1, 255))
    def test_no_changed_byte_goes_unseen(self, at: int, change: int) -> None:
        block = bytearray(label().encode())
        block[at] ^= change
        with pytest.raises(VolumeMismatch) as caught:
            VolumeLabel.decode(bytes(block))
        assert caught.value.field in {"magic", "version", "checksum"}

    @given(st.binary(max_size=200))
    def test_no_bytes_make_it_fail_otherwise(self, data: bytes) -> None:
        with pytest.raises(VolumeMismatch):
            VolumeLabel.decode(data)


class TestVolumes:
    def test_a_new_volume_is_sparse_and_has_its_label(self, files: FileVolumes) -> None:
        path = files.create(label())
        assert path.stat().st_size == 4 * REGION
        assert path.stat().st_blocks * 512 < 1 << 20
        assert path.stat().st_mode & 0o077 == 0
        assert files.check(label(), 1) == label()
        assert files.present() == [1]
        assert label().regions == 3

    def test_creation_may_be_repeated_but_not_with_another_label(self, files: FileVolumes) -> None:
        files.create(label())
        files.create(label())
        with pytest.raises(AlreadyExists):
            files.create(label(epoch=2))

    def test_a_removed_volume_leaves_nothing(self, files: FileVolumes, drive: Path) -> None:
        path = files.create(label())
        files.remove(VolumeId(1))
        files.remove(VolumeId(1))
        assert not path.exists() and list((drive / "volumes").iterdir()) == []
        assert refused(files, label()).field == "path"

    def test_a_creation_that_was_cut_short_is_found_and_leaves_nothing(self, files: FileVolumes, drive: Path) -> None:
        path = files.create(label())
        path.rename(path.with_name(path.name + ".new"))
        assert files.present() == [1]
        files.remove(VolumeId(1))
        assert files.present() == [] == list((drive / "volumes").iterdir())

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"node_id": OTHER_NODE}, "node_id"),
            ({"namespace": 8}, "namespace"),
            ({"volume_uuid": bytes(16)}, "volume_uuid"),
            ({"region_bytes": 2 * REGION}, "region_bytes"),
        ],
    )
    def test_each_field_is_compared(self, files: FileVolumes, change: dict[str, Any], field: str) -> None:
        files.create(label())
        assert refused(files, label(**change)).field == field

    def test_swapped_files_are_refused(self, files: FileVolumes, tmp_path: Path) -> None:
        one, two = files.create(label(1)), files.create(label(2))
        one.rename(tmp_path / "aside")
        two.rename(one)
        (tmp_path / "aside").rename(two)
        error = refused(files, label(1))
        assert error.field == "volume" and "swapped" in str(error)
        assert refused(files, label(2)).field == "volume"

    def test_swapped_labels_are_refused(self, files: FileVolumes) -> None:
        one, two = files.create(label(1)), files.create(label(2))
        with one.open("r+b") as first, two.open("r+b") as second:
            a, b = first.read(LABEL_BYTES), second.read(LABEL_BYTES)
            first.seek(0)
            second.seek(0)
            first.write(b)
            second.write(a)
        assert refused(files, label(1)).field == "volume"

    def test_an_older_copy_is_refused(self, files: FileVolumes, tmp_path: Path) -> None:
        path = files.create(label(epoch=1))
        shutil.copyfile(path, tmp_path / "backup")
        files.stamp(VolumeId(1), 2)
        assert files.check(label(epoch=2), 2).epoch == 2
        os.replace(tmp_path / "backup", path)
        error = refused(files, label(epoch=2), 3)
        assert error.field == "epoch" and "older copy" in str(error)

    def test_older_metadata_is_refused(self, files: FileVolumes) -> None:
        files.create(label(epoch=5))
        assert "metadata is older" in str(refused(files, label(epoch=3), 4))

    def test_a_start_cut_short_leaves_either_epoch(self, files: FileVolumes) -> None:
        files.create(label(epoch=1))
        files.check(label(epoch=1), 2)  # cut before the stamp
        files.stamp(VolumeId(1), 2)
        files.check(label(epoch=1), 2)  # cut between the stamp and its confirmation

    @pytest.mark.parametrize("size_bytes", [REGION, 8 * REGION, 0])
    def test_a_cut_or_grown_file_is_refused(self, files: FileVolumes, size_bytes: int) -> None:
        os.truncate(files.create(label()), size_bytes)
        assert refused(files, label()).field in {"size", "magic"}

    def test_an_overwritten_label_is_refused(self, files: FileVolumes) -> None:
        with files.create(label()).open("r+b") as file:
            file.write(bytes(LABEL_BYTES))
        assert refused(files, label()).field == "magic"

    def test_a_link_in_place_of_the_file_is_refused(self, files: FileVolumes, tmp_path: Path) -> None:
        path = files.create(label())
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert "symbolic link" in str(refused(files, label()))

    def test_a_full_drive_says_so_and_leaves_no_half_file(
        self, files: FileVolumes, drive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(NoSpace):
            files.create(label())
        assert list((drive / "volumes").iterdir()) == []

    @pytest.mark.parametrize("region_bytes", [32 << 20, 96 << 20, (64 << 20) + 4096])
    def test_regions_are_powers_of_two_of_clusters(self, region_bytes: int) -> None:
        with pytest.raises(InvalidArgument):
            volume_size_bytes(4, region_bytes)

    def test_the_label_has_a_region_of_its_own(self) -> None:
        assert volume_size_bytes(3, REGION) == 4 * REGION
        with pytest.raises(InvalidArgument):
            volume_size_bytes(0, REGION)


class TestDrive:
    def test_a_claimed_drive_opens_again(self, tmp_path: Path) -> None:
        identity = claim_drive(tmp_path / "d", NODE)
        assert claim_drive(tmp_path / "d", NODE) == identity
        assert open_drive(tmp_path / "d", NODE, identity.drive_uuid) == identity

    def test_a_foreign_drive_is_refused(self, tmp_path: Path) -> None:
        identity = claim_drive(tmp_path / "d", OTHER_NODE)
        with pytest.raises(VolumeMismatch, match=OTHER_NODE.hex()) as claimed:
            claim_drive(tmp_path / "d", NODE)
        with pytest.raises(VolumeMismatch, match=OTHER_NODE.hex()) as opened:
            open_drive(tmp_path / "d", NODE, identity.drive_uuid)
        assert (claimed.value.field, opened.value.field) == ("node", "node")

    def test_an_empty_mount_point_is_refused(self, tmp_path: Path) -> None:
        identity = claim_drive(tmp_path / "d", NODE)
        shutil.rmtree(tmp_path / "d")
        for make in (False, True):
            if make:
                (tmp_path / "d").mkdir()
            with pytest.raises(VolumeMismatch, match="mounted"):
                open_drive(tmp_path / "d", NODE, identity.drive_uuid)

    def test_drives_that_changed_places_are_refused(self, tmp_path: Path) -> None:
        one, two = (claim_drive(tmp_path / name, NODE) for name in "ab")
        with pytest.raises(VolumeMismatch) as caught:
            open_drive(tmp_path / "a", NODE, two.drive_uuid)
        assert caught.value.field == "drive" and str(one.drive_uuid) in str(caught.value)

    def test_volumes_without_their_drive_file_are_not_claimed(self, drive: Path, files: FileVolumes) -> None:
        files.create(label())
        (drive / "forebay.drive").unlink()
        with pytest.raises(VolumeMismatch, match="is gone"):
            claim_drive(drive, NODE)

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", "1", "{", '{"version": 1, "node": "zz", "drive": "1"}', '{"version": 2}']
    )
    def test_a_damaged_drive_file_is_refused(self, drive: Path, text: str) -> None:
        (drive / "forebay.drive").write_text(text)
        with pytest.raises(VolumeMismatch):
            claim_drive(drive, NODE)

    def test_what_volumes_hold_counts_as_usable(self, drive: Path, files: FileVolumes) -> None:
        with files.create(label()).open("r+b") as file:
            file.seek(REGION)
            file.write(os.urandom(4 << 20))
            file.flush()
            os.fsync(file.fileno())
        space = require_capacity(drive, 1 << 20)
        assert 4 << 20 <= space.held_bytes < 8 << 20
        assert space.usable_bytes == space.free_bytes + space.held_bytes

    def test_a_capacity_above_the_drive_is_refused(self, tmp_path: Path) -> None:
        space = drive_space(tmp_path / "not" / "yet")
        with pytest.raises(CapacityShort) as caught:
            require_capacity(tmp_path / "not" / "yet", space.total_bytes * 2)
        assert caught.value.field == "capacity"
