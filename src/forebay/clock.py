"""Time as something passed in, so that leases, sessions and deadlines can be tested without waiting."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(ABC):
    """A source of time. Leases and deadlines use `monotonic_ms`; only records and logs use `wall_ms`."""

    @abstractmethod
    def monotonic_ms(self) -> int:
        """Milliseconds from an arbitrary start; never goes back."""

    @abstractmethod
    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch; may jump."""


class SystemClock(Clock):
    """The machine's clocks."""

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock(Clock):
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms

    def advance(self, ms: int) -> None:
        """Move time forward by ``ms``."""
        self._now_ms += ms

    def monotonic_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._now_ms
