"""SIGINT and SIGTERM in a program that has processes to end before it goes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred", "ignored", "interrupting"]

_BOTH = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _handled(handler: object) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in _BOTH]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in zip(_BOTH, before, strict=True):
            signal.signal(number, old)


@contextmanager
def interrupting() -> Iterator[None]:
    """Both raise `KeyboardInterrupt`, so that clean-up is the same."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def ignored() -> Iterator[None]:
    """Neither does anything, nor in processes started meanwhile."""
    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Both take effect at the end: what happens inside goes to its end. Processes started inside take them at once."""
    seen: list[int] = []
    with _handled(lambda number, frame: seen.append(number)):
        yield
    if seen:
        signal.raise_signal(seen[0])
