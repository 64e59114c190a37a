"""The metadata's drive is full or fails: writes say so, reads go on, nothing acknowledged is lost, and it passes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks.faults import Faults, Operation

pytestmark = pytest.mark.compiler

CAUSES = [
    pytest.param("*.log", Operation.WRITE, errno.ENOSPC, id="log full"),
    pytest.param("*.log", Operation.WRITE, errno.EIO, id="log cannot be written"),
    pytest.param("*.log", Operation.SYNC, errno.EIO, id="log cannot be flushed"),
    pytest.param("*.log", Operation.SYNC, errno.ENOSPC, id="log full at the flush"),
]
BACKGROUND = [
    pytest.param("*.sst", Operation.WRITE, errno.ENOSPC, id="table full"),
    pytest.param("*.sst", Operation.WRITE, errno.EIO, id="table cannot be written"),
    pytest.param("*.sst", Operation.CREATE, errno.EROFS, id="table cannot be made"),
    pytest.param("*MANIFEST*", Operation.WRITE | Operation.SYNC, errno.EIO, id="manifest cannot be written"),
]


def eventually(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


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


@pytest.mark.parametrize(("pattern", "operation", "error"), CAUSES)
def test_writes_are_refused_with_the_reason_and_pass_by_themselves(
    start: Callable[[], StoreProcess], faults: Faults, pattern: str, operation: Operation, error: int
) -> None:
    store = start()
    assert store.ask("write", "a", "1") == {"ok": True}
    with faults.during(pattern, operation, error) as number:
        refused = store.ask("write", "b", "2")
        assert refused["error"] == ("NoSpace" if error == errno.ENOSPC else "Unavailable")
        assert "rocksdb" in refused["message"] and "by themselves" in refused["message"]
        assert faults.failed(number)
        assert store.ask("read", "a") == {"value": "1"}  # reads go on
        assert "error" in store.ask("write", "c", "3")
    eventually(lambda: store.ask("problem")["problem"] is None, "the store writes again")
    assert store.ask("write", "d", "4") == {"ok": True}
    store.kill()
    again = start()
    found = again.ask("all")["keys"]
    assert {"a", "d"} <= set(found)  # nothing that was acknowledged is lost
    assert "c" not in found  # it never came near the log


@pytest.mark.parametrize(("pattern", "operation", "error"), BACKGROUND)
def test_what_fails_in_the_background_is_got_over_too(
    start: Callable[[], StoreProcess], faults: Faults, pattern: str, operation: Operation, error: int
) -> None:
    store = start()
    for i in range(20):
        assert store.ask("write", f"a{i}", "1") == {"ok": True}
    with faults.during(pattern, operation, error) as number:
        assert "error" in store.ask("flush")
        assert faults.failed(number)
        refused = store.ask("write", "b", "2")
        assert refused["error"] == ("NoSpace" if error == errno.ENOSPC else "Unavailable"), refused
        # once reopening begins the tables are out of reach as well, but nothing is ever said to be gone
        assert store.ask("read", "a7") == {"value": "1"} or "error" in store.ask("read", "a7")
    eventually(lambda: store.ask("problem")["problem"] is None, "the store writes again")
    assert store.ask("problem")["reopened"] >= 1
    assert store.ask("write", "d", "4") == {"ok": True}
    assert {f"a{i}" for i in range(20)} | {"d"} <= set(store.ask("all")["keys"])
    store.kill()
    assert {f"a{i}" for i in range(20)} | {"d"} <= set(start().ask("all")["keys"])


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


@pytest.mark.parametrize(
    ("error", "name"), [(errno.ENOSPC, "NoSpace"), (errno.EIO, "Unavailable"), (errno.EROFS, "Unavailable")]
)
def test_a_store_that_cannot_open_says_whether_its_drive_is_full_or_fails(
    start: Callable[[], StoreProcess], faults: Faults, error: int, name: str
) -> None:
    first = start()
    assert first.ask("write", "a", "1") == {"ok": True}
    first.kill()
    with faults.during("*/rocksdb/*", Operation.CREATE | Operation.WRITE, error):
        refused = start().opened
    assert refused["error"] == name and "rocksdb" in refused["message"]
    again = start()
    assert again.opened == {"open": True}
    assert again.ask("read", "a") == {"value": "1"}
