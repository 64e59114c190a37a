"""Waiting for conditions, and for processes that are stopped; also where there is no pytest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["eventually", "halted", "stop"]


def eventually(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """SIGSTOP, and wait for it: on a busy machine some threads of a process go on for a while after it was sent."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        with suppress(OSError):  # a thread has ended meanwhile
            threads = Path(f"/proc/{pid}/task").glob("*/stat")
            return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
        return False

    eventually(stopped, "every thread of it has stopped")


@contextmanager
def halted(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile. Whoever watches it may have given it up before it can go on."""
    stop(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
