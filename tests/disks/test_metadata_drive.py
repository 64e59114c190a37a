"""The metadata's drive is full or fails: writes say so, reads go on, nothing acknowledged is lost, and it passes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks.faults import Faults, Operation
from tests.disks.node import eventually

pytestmark = pytest.mark.compiler

CAUSES = [
    ("log full", "*.log", Operation.WRITE, errno.ENOSPC, False),
    ("log cannot be written", "*.log", Operation.WRITE, errno.EIO, False),
    ("log cannot be flushed", "*.log", Operation.SYNC, errno.EIO, False),
    ("log full at the flush", "*.log", Operation.SYNC, errno.ENOSPC, False),
    ("table full", "*.sst", Operation.WRITE, errno.ENOSPC, True),
    ("table cannot be written", "*.sst", Operation.WRITE, errno.EIO, True),
    ("table cannot be made", "*.sst", Operation.CREATE, errno.EROFS, True),
    ("manifest cannot be written", "*MANIFEST*", Operation.WRITE | Operation.SYNC, errno.EIO, True),
]
"""What fails, where, how, and whether it does so behind the back of a write."""


class StoreProcess:
    """See `store_process`."""

    def __init__(self, folder: Path, faults: Faults) -> None:
        command = [sys.executable, "-m", "tests.disks.store_process", str(folder / "rocksdb")]
        environment = {**os.environ, **faults.environment}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.opened = self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, call: str, key: str = "", value: str | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, "key": key, "value": value}) + "\n")
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path)


@pytest.fixture
def start(tmp_path: Path, faults: Faults) -> Iterator[Callable[[], StoreProcess]]:
    started: list[StoreProcess] = []

    def make() -> StoreProcess:
        started.append(StoreProcess(tmp_path, faults))
        return started[-1]

    yield make
    for one in started:
        one.kill()


def test_whatever_cannot_be_written_is_refused_with_the_reason_and_passes_by_itself(
    start: Callable[[], StoreProcess], faults: Faults
) -> None:
    """One store gets over all of it, one after the other; what it acknowledged is there after a kill."""
    store, acknowledged = start(), set[str]()

    def write(key: str) -> dict[str, Any]:
        answer = store.ask("write", key, "1")
        if answer == {"ok": True}:
            acknowledged.add(key)
        return answer

    for what, pattern, operation, error, background in CAUSES:
        assert write(f"{what}: before") == {"ok": True}
        reopened = store.ask("problem")["reopened"]
        with faults.during(pattern, operation, error) as number:
            if background:
                assert "error" in store.ask("flush")
            refused = write(f"{what}: refused")
            assert refused["error"] == ("NoSpace" if error == errno.ENOSPC else "Unavailable"), (what, refused)
            assert "rocksdb" in refused["message"] and "by themselves" in refused["message"]
            assert faults.failed(number), what
            # while it is opened again it is out of reach as well, but nothing is ever said to be gone
            read = store.ask("read", f"{what}: before")
            assert read == {"value": "1"} or "error" in read, what
            assert "error" in write(f"{what}: also refused")
        eventually(lambda: store.ask("problem")["problem"] is None, f"{what}: the store writes again")
        assert store.ask("problem")["reopened"] > reopened
        assert write(f"{what}: after") == {"ok": True}
    store.kill()
    found = set(start().ask("all")["keys"])
    assert acknowledged <= found, "nothing that was acknowledged is lost"
    assert not {key for key in found if key.endswith("also refused")}, "it never came near the log"


def test_an_error_that_passes_by_itself_does_not_leave_a_gap_in_the_log(
    start: Callable[[], StoreProcess], faults: Faults
) -> None:
    """One flush fails, the next would not: what comes after must not stand behind a hole that recovery stops at."""
    store = start()
    assert store.ask("write", "a", "1") == {"ok": True}
    number = faults.set("*.log", Operation.SYNC, errno.EIO, times=1)
    assert store.ask("write", "b", "2")["error"] == "Unavailable"
    assert faults.failed(number) == 1
    eventually(lambda: store.ask("write", "c", "3") == {"ok": True}, "the store writes again")
    assert store.ask("problem")["reopened"] == 1
    store.kill()
    assert {"a", "c"} <= set(start().ask("all")["keys"])


def test_a_store_that_cannot_open_says_whether_its_drive_is_full_or_fails(
    start: Callable[[], StoreProcess], faults: Faults
) -> None:
    first = start()
    assert first.ask("write", "a", "1") == {"ok": True}
    first.kill()
    for error, name in ((errno.ENOSPC, "NoSpace"), (errno.EIO, "Unavailable")):
        with faults.during("*/rocksdb/*", Operation.CREATE | Operation.WRITE, error):
            refused = start().opened
        assert refused["error"] == name and "rocksdb" in refused["message"]
    again = start()
    assert again.opened == {"open": True}
    assert again.ask("read", "a") == {"value": "1"}
