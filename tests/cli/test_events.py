"""`forebay events` against a running node."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import ABSENT, INTERRUPTED, OK, USAGE
from forebay.cli.main import run
from tests.cli.shell import Shell


def put(forebay: Shell, tmp_path: Path, *keys: str) -> None:
    (tmp_path / "value").write_bytes(b"value")
    for key in keys:
        forebay("put", key, str(tmp_path / "value"))


def events(forebay: Shell, *argv: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in forebay("events", *argv, "--json").splitlines()]


def test_what_happened_is_told_from_the_start(forebay: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forebay("namespace", "create", "t/told")
    monkeypatch.setenv("FOREBAY_NAMESPACE", "t/told")
    put(forebay, tmp_path, "e/1", "e/2")
    forebay("rm", "e/1")
    first, second, third = events(forebay, "--since", "0", "--count", "3")
    assert [(e["kind"], e["key"], e["reason"]) for e in (first, second, third)] == [
        ("stored", "e/1", ""),
        ("stored", "e/2", ""),
        ("removed", "e/1", "deleted"),
    ]
    assert first["length_bytes"] == 5 and len(first["keyspace"]) == 64 and first["key_hex"] == b"e/1".hex()
    assert first["sequence"] < second["sequence"] < third["sequence"]
    later = events(forebay, "--since", str(second["sequence"]), "--count", "1")
    assert later == [third]
    assert events(forebay, "--since", f"{second['log']}:{second['sequence']}", "--count", "1") == [third]
    text = forebay("events", "--since", "0", "--count", "3").splitlines()
    assert "stored" in text[0] and "e/1" in text[0] and "5 B" in text[0] and "deleted" in text[2]


def test_events_of_another_start_are_a_resync(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "r")
    (found,) = events(forebay, "--since", "4294967296:7", "--count", "1")
    assert found["kind"] == "resync" and found["key"] is None
    assert "forebay ls" in forebay("events", "--since", "4294967296:7", "--count", "1")


def test_it_follows_until_it_is_interrupted(node: DemoNode, forebay: Shell, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay.cli.main", "--data", str(node.data), "events", "--json", "--since", "0"]
    put(forebay, tmp_path, "f/0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as follower:
        try:
            assert follower.stdout is not None
            keys = iter(lambda: json.loads(follower.stdout.readline())["key"], None)  # type: ignore[union-attr]
            assert "f/0" in keys
            put(forebay, tmp_path, "f/1")  # after it has begun to follow
            assert "f/1" in keys
            follower.send_signal(signal.SIGINT)
            assert follower.wait(30) == INTERRUPTED
        finally:
            follower.kill()


@pytest.mark.parametrize("since", ["-1", "x", "1:", ":1", "1:2:3"])
def test_positions_that_are_none(since: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", f"--since={since}"]) == USAGE
    assert "SEQUENCE" in capsys.readouterr().err


def test_unknown_namespace(forebay: Shell) -> None:
    forebay("events", "-n", "no/such", "--count", "1", code=ABSENT)
    assert run(["events", "--help"]) == OK
