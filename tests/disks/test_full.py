"""File systems that are really full, or really gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import NoSpace
from tests.disks.mounts import ext4, fill, tmpfs, unmount
from tests.disks.node import FaultyNode, eventually
from tests.disks.test_drives import Stock

MIB = 1 << 20

Start = Callable[..., FaultyNode]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[FaultyNode] = []

    def make(drives: Sequence[Path], **options: Any) -> FaultyNode:
        started.append(FaultyNode(tmp_path, None, drives, **options))
        return started[-1]

    yield make
    for node in started:
        node.stop()


def test_a_full_metadata_drive_is_read_and_then_written_again(start: Start, tmp_path: Path) -> None:
    metadata = tmpfs(tmp_path / "meta", 96 * MIB)
    node = start([tmp_path / "a"], metadata=metadata / "forebay")
    with node.client() as client:
        stock = Stock(client)
        assert stock.put("before", 60) == {"ok": 60}

        filler = fill(metadata, leave_bytes=6 * MIB)  # below the reserve, a tenth
        eventually(lambda: stock.put(f"r{len(stock.values)}-", 1) == {"no_space": 1}, "the reserve is kept")
        body = node.degraded()
        assert not body["writes"]
        assert str(metadata) in body["problems"][0]["reason"] and "metadata_reserve" in body["problems"][0]["reason"]
        assert stock.whole()
        assert client.delete([b"before0"]) == ["ok"]  # there is room for that
        del stock.values[b"before0"]
        assert node.metric("forebay_writes_up") == 0 and node.metric("forebay_reads_up") == 1
        filler.unlink()
        eventually(lambda: stock.put(f"s{len(stock.values)}-", 1) == {"ok": 1}, "blocks are stored again")

        filler = fill(metadata)
        with node.admin() as admin, pytest.raises(NoSpace, match="no space left"):
            for i in range(20_000):  # until the log needs another page
                admin.create_principal(f"p{i}")
        assert node.metric("forebay_metadata_up") == 0
        evicted = node.metric('forebay_removed_blocks_total{cause="evicted"}')
        assert stock.put("refused", 5) == {"no_space": 5}
        assert stock.whole()
        assert node.metric('forebay_removed_blocks_total{cause="evicted"}') == evicted
        filler.unlink()
        eventually(lambda: stock.put(f"t{len(stock.values)}-", 1) == {"ok": 1}, "blocks are stored again")
        assert node.metric("forebay_metadata_reopened_total") >= 1
        eventually(lambda: node.ready()[1]["problems"] == [], "all is well")
        node.kill()
        node.start()
    with node.client() as client:
        stock.client = client
        assert stock.whole(), "nothing that was acknowledged is lost"


@pytest.mark.long
def test_a_drive_whose_file_system_others_filled_is_used_again_when_they_made_room(
    start: Start, tmp_path: Path
) -> None:
    drive = ext4(tmp_path / "a", tmp_path / "image", 320 * MIB)
    node = start([drive], capacity="192MiB")
    with node.client() as client, node.admin() as admin:
        stock = Stock(client)
        assert stock.put("first", 10) == {"ok": 10}
        filler = fill(drive, leave_bytes=1 * MIB)
        # one region is there: what does not fit takes the place of what was used longest ago
        for i in range(4):
            assert client.put([f"more{i}-{j}".encode() for j in range(80)], [os.urandom(256 << 10)] * 80)[0].stored
        assert node.metric('forebay_drive_full{drive="drive0"}') == 1
        with pytest.raises(NoSpace, match=str(drive)):
            fill(drive)
            admin.create_namespace("acme/late")
        assert not list((drive / "volumes").glob("*.new"))
        filler.unlink()
        eventually(lambda: node.metric('forebay_drive_full{drive="drive0"}') == 0, "there is room")
        admin.create_namespace("acme/late")
        before = node.metric('forebay_drive_reserved_bytes{drive="drive0"}')
        client.put([f"again{j}".encode() for j in range(300)], [os.urandom(256 << 10)] * 300)
        assert node.metric('forebay_drive_reserved_bytes{drive="drive0"}') > before


@pytest.mark.long
def test_a_drive_that_is_unmounted_and_mounted_again(start: Start, tmp_path: Path) -> None:
    drive, image = tmp_path / "b", tmp_path / "image"
    ext4(drive, image, 320 * MIB)
    node = start([tmp_path / "a", drive], capacity="128MiB")
    with node.client() as client:
        stock = Stock(client)
        assert stock.put("first", 300) == {"ok": 300}
        unmount(drive)
        eventually(lambda: "is the drive mounted?" in str(node.ready()[1]["problems"]), "the drive is missed")
        found = stock.get()
        assert found["ok"] and found["ok"] < 300
        assert stock.put("meanwhile", 20) == {"ok": 20}
        ext4(drive, image, 0)
        eventually(lambda: node.ready()[1]["problems"] == [], "the drive is back")
        eventually(stock.whole, "all of it is read")
