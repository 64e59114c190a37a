"""What Python in a guest has the other side do, as `ask` of guest.sh."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["SHARE", "ask", "until"]

SHARE = Path("/share")


def until(condition: Callable[[], object], what: str, seconds: float = 90.0) -> None:
    """Wait for a condition; fails the test when it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def ask(word: str) -> None:
    """Have the other side do something, and wait until it is done."""
    (SHARE / "asking").touch()
    (SHARE / "asking").rename(SHARE / f"ask.{word}")  # all at once: the other side removes it when it sees it
    until((SHARE / f"done.{word}").exists, f"{word} is done")
    (SHARE / f"done.{word}").unlink()
