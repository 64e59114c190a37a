"""`forebay scrub` on a node whose drive lies."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest

from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import ABSENT, OK, UNAVAILABLE, USAGE, WRONG_BYTES
from forebay.cli.main import run
from forebay.client import connect
from tests.cli.shell import Shell
from tests.client.conftest import patient

BLOCKS = 12


def value(i: int) -> bytes:
    return (b"block %04d of the scrub." % i) * 1000


def flip(volumes: Path, content: bytes) -> None:
    """Flip a bit in the middle of what lies on the drive."""
    for path in volumes.glob("*.vol"):
        at = path.read_bytes().find(content)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(content) // 2)
                byte = file.read(1)[0] ^ 0x10
                file.seek(at + len(content) // 2)
                file.write(bytes([byte]))
                file.flush()
                os.fsync(file.fileno())
            return
    raise AssertionError("the block is on no volume")


def test_a_scrub_drops_what_is_bad_and_nothing_else(
    forebay: Shell, node: DemoNode, capsys: pytest.CaptureFixture[str]
) -> None:
    forebay("namespace", "create", "t/scrub")
    keys = [b"key %d" % i for i in range(BLOCKS)]
    with connect(node.url, namespace="t/scrub", token=node.token, options=patient()) as client:
        assert all(block.stored for block in client.put(keys, [value(i) for i in range(BLOCKS)]))
        clean = forebay.json("scrub", "t/scrub")
        assert (clean["state"], clean["blocks"], clean["bad"], clean["unread"]) == ("done", BLOCKS, 0, 0)
        for i in (3, 8):
            flip(node.data / "drive0" / "volumes", value(i))
        assert run(["scrub", "t/scrub", "--json"]) == WRONG_BYTES
        found = json.loads(capsys.readouterr().out)
        assert (found["blocks"], found["blocks_total"], found["bad"]) == (BLOCKS, BLOCKS, 2)
        removed = [e for e in islice(client.watch(0, client.incarnation), BLOCKS + 2) if e.kind == "removed"]
        assert sorted((e.key, e.reason) for e in removed) == [(keys[3], "bad"), (keys[8], "bad")]
        assert client.match(keys).present == tuple(i not in (3, 8) for i in range(BLOCKS))
        for i, block in enumerate(client.get(keys)):
            assert block.reason == "absent" if i in (3, 8) else bytes(block.value or b"") == value(i)
    assert forebay.json("scrub", "t/scrub")["bad"] == 0
    kept = forebay.json("quarantine", "ls")["extents"]
    assert [(e["namespace"], e["drive"], e["reason"]) for e in kept] == [("t/scrub", "drive0", "checksum")] * 2
    size = sum(e["length_bytes"] for e in kept)
    assert forebay.json("status")["drives"][0]["quarantined_bytes"] == size
    assert "in quarantine" in forebay("status")
    one = (str(kept[0]["volume"]), str(kept[0]["offset_bytes"]))
    assert "used again" in forebay("quarantine", "release", *one)
    forebay("quarantine", "release", *one, code=ABSENT)
    assert forebay.json("quarantine", "ls")["extents"] == kept[1:]
    assert forebay.json("status")["counters"]["blocks_bad"] == 2


def test_one_scrub_at_a_time(forebay: Shell) -> None:
    forebay("namespace", "create", "t/slow")
    for i in range(3):
        forebay("put", "-n", "t/slow", f"k{i}", __file__)
    assert forebay.json("scrub", "t/slow", "--rate", "4096B", "--background")["state"] == "running"
    assert "scrub is running" in forebay("scrub", code=UNAVAILABLE)
    assert forebay.json("scrub", "--status")["namespace"] == "t/slow"
    assert forebay.json("scrub", "--stop")["state"] == "stopped"
    assert "stopped" in forebay("scrub", "--status")
    assert forebay.json("scrub")["state"] == "done"


def test_options_that_exclude_each_other(forebay: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scrub", "--stop", "--status"]) == USAGE
    assert "one of" in capsys.readouterr().err
    assert run(["scrub", "--help"]) == OK
