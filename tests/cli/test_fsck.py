"""`forebay fsck` on the directories of a real node."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.namespace.fsck import Finding
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import Op
from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import ABSENT, OK, REFUSED, WRONG_BYTES
from forebay.cli.main import run
from forebay.client import connect
from forebay.errors import Unavailable
from tests.cli.shell import Shell
from tests.cli.test_docs import row_of
from tests.client.conftest import patient
from tests.sim.running import on_loop

FILE = (b"a block that will be spoilt " * 200)[:5000]


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[DemoNode]:
    """A node that was killed while writers were at work, its target with it."""
    node = DemoNode(tmp_path / "data", 512 << 20, tmp_path / "node.log")
    try:
        node.start()
        with connect(node.url, token=node.token, options=patient()) as client:
            assert client.put([b"spoilt", b"sound"], [FILE, FILE[::-1]])[0].stored
        threads = [threading.Thread(target=write, args=(node, i)) for i in range(2)]
        for thread in threads:
            thread.start()
        with node.admin() as admin:
            while admin.status().blocks < 60:
                pass
        node.kill()
        for thread in threads:
            thread.join()
        yield node
    finally:
        node.stop()


def write(node: DemoNode, number: int) -> None:
    """Put blocks until the node is gone."""
    with connect(node.url, token=node.token, options=patient()) as client:
        for i in range(100_000):
            if not client.put([b"%d/%d" % (number, i)], [os.urandom(20_000)])[0].stored:
                return


def found(node: DemoNode, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = run(["fsck", "--data", str(node.data), "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_a_killed_node_is_clean_until_it_is_damaged(stopped: DemoNode, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = found(stopped, capsys, "--media")
    assert (code, report["clean"], report["dropped"]) == (OK, True, None), report
    counts = report["checked"]
    assert counts["records"] == counts["owners"] == counts["media_blocks"] >= 60
    for path in (stopped.data / "drive0" / "volumes").glob("*.vol"):
        at = path.read_bytes().find(FILE)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 4500)
                file.write(b"?")
    assert found(stopped, capsys)[0] == OK  # media were not asked for
    code, report = found(stopped, capsys, "--media")
    assert (code, [f["part"] for f in report["findings"] if f["wrong"]]) == (WRONG_BYTES, ["media"])
    assert "'spoilt'" in next(f["what"] for f in report["findings"] if f["wrong"])
    spoil_record(stopped)
    before = contents(stopped)
    assert run(["fsck", "--data", str(stopped.data)]) == WRONG_BYTES
    text = capsys.readouterr().out
    assert "WRONG" in text and "CRC" in text and "records of blocks" in text
    assert contents(stopped) == before
    code, report = found(stopped, capsys, "--repair")
    assert (code, report["dropped"]) == (WRONG_BYTES, 1)
    assert found(stopped, capsys)[0] == OK
    stopped.start()
    with connect(stopped.url, token=stopped.token, options=patient()) as client:
        dropped, spoilt, sound = client.get([b"0/0", b"spoilt", b"sound"])
        assert dropped.reason == "absent"
        assert spoilt.reason in ("absent", "checksum_mismatch")  # the node may have looked first
        assert bytes(sound.value or b"") == FILE[::-1]


def test_drives_that_lie_elsewhere_are_named_by_the_configuration(
    stopped: DemoNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive, config = tmp_path / "elsewhere", tmp_path / "forebay.toml"
    (stopped.data / "drive0").rename(drive)
    config.write_text(f'[[drives]]\npath = "{drive}"\n')
    assert run(["fsck", "--data", str(stopped.data), "--config", str(config)]) == OK
    assert "--config" not in capsys.readouterr().err
    assert run(["fsck", "--data", str(stopped.data)]) == WRONG_BYTES
    assert "no --config was given" in capsys.readouterr().err


def contents(node: DemoNode) -> dict[str, bytes]:
    """All of a node's metadata, except RocksDB's own log of what it did."""
    files = (path for path in (node.data / "metadata").rglob("*") if path.is_file() and not path.name.startswith("LOG"))
    return {path.name: path.read_bytes() for path in files}


@on_loop
async def damage(path: Path) -> None:
    store = RocksStore(path)
    key, value = next(store.scan("blocks"))
    await store.write([Op("blocks", key, value[:-1] + bytes([value[-1] ^ 1]))])
    store.close()


def spoil_record(node: DemoNode) -> None:
    damage(node.data / "metadata" / "rocksdb")


def test_a_running_node_and_none_are_refused(forebay: Shell, node: DemoNode, tmp_path: Path) -> None:
    assert "forebay scrub" in forebay("fsck", code=REFUSED)
    assert run(["fsck", "--data", str(tmp_path)]) == ABSENT
    assert not any(tmp_path.iterdir())


@on_loop
async def test_a_store_opened_to_be_read_is_not_written(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "db")
    await store.write([Op("meta", b"k", b"v")])
    store.close()
    store = RocksStore(tmp_path / "db", read_only=True)
    assert store.get("meta", b"k") == b"v"
    with pytest.raises(Unavailable):
        await store.write([Op("meta", b"k", b"w")])
    store.close()


def test_the_fields_are_documented() -> None:
    assert {"clean", "checked", "findings", "dropped", *Finding.__dataclass_fields__} <= row_of("fsck")
