"""The break-even guard: a prefix is loaded when that is expected to be faster than to compute it again.

Both sides are learned from what the engine does anyway. A load of ``n`` blocks, with ``q`` more under way, is expected
to take ``latency + (n + q) × seconds a block``, a line fitted through the last loads; computing takes what a line
through the last steps says, or ``tokens / rate``. Not thread-safe: it belongs to an engine's scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.clock import Clock

__all__ = ["Guard", "Line", "Verdict"]

Reason = Literal["unknown", "faster", "partial", "trial", "slower", "late"]

_FORGET = 0.9
"""What a measurement weighs after the next one."""
_AGAIN = 1.25
"""By how much loading must win to be taken up again, once it was refused for prefixes of that size."""
_TRIAL_MS = 10_000
"""Without a load for this long, one is made although it seems too slow: nothing else shows that it no longer is."""
_LEAST_TOKENS = 32
"""Steps with fewer tokens say nothing about the speed of prefill."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many blocks to load, from the first on, and why."""

    blocks: int
    reason: Reason


class Line:
    """A line through measurements, the older the lighter: ``y = base + slope × x``, neither negative."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Learn that at ``x`` it was ``y``."""
        self._n = self._n * _FORGET + 1
        self._x = self._x * _FORGET + x
        self._y = self._y * _FORGET + y
        self._xx = self._xx * _FORGET + x * x
        self._xy = self._xy * _FORGET + x * y

    def at(self, x: float) -> float | None:
        """What to expect at ``x``; None before anything is known."""
        if not self._n:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-9 * mean_x * mean_x:  # all of one size: as if there were no latency
            return mean_y * x / mean_x if mean_x else mean_y
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
        base = mean_y - slope * mean_x
        if base < 0:
            return mean_y * x / mean_x
        return base + slope * x


class Guard:
    """Decides for one engine. ``tokens_per_s`` is the rate of prefill, 0 to learn it; no load may take ``limit_ms``."""

    def __init__(self, clock: Clock, *, tokens_per_s: float, limit_ms: int) -> None:
        self._clock = clock
        self._given = tokens_per_s
        self._limit_s = limit_ms / 1000
        self._computing = Line()
        self._loads = Line()
        self._under_way: dict[str, tuple[int, int]] = {}
        self._queued = 0
        self._refused: set[int] = set()
        self._last_load_ms = clock.monotonic_ms()

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of the engine took ``seconds`` for ``tokens``."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self._computing.add(tokens, seconds)

    def began(self, request: str, blocks: int) -> None:
        """A load has begun."""
        self._queued += blocks
        self._under_way[request] = blocks, self._queued
        self._last_load_ms = self._clock.monotonic_ms()

    def ended(self, request: str, seconds: float | None) -> None:
        """It took ``seconds``; None where it failed, which says nothing about its speed."""
        blocks, in_flight = self._under_way.pop(request, (0, 0))
        self._queued -= blocks
        if blocks and seconds is not None:
            self._loads.add(in_flight, seconds)

    def verdict(self, blocks: int, block_tokens: int) -> Verdict:
        """Whether to load ``blocks`` that are there."""
        loading, computing = self._loads.at(self._queued + blocks), self._to_compute(blocks * block_tokens)
        if loading is None or computing is None:
            return Verdict(blocks, "unknown")
        size = blocks.bit_length()
        if loading * (_AGAIN if size in self._refused else 1.0) >= computing:
            if self._clock.monotonic_ms() - self._last_load_ms >= _TRIAL_MS:
                return Verdict(blocks, "trial")
            self._refused.add(size)
            return Verdict(0, "slower")
        self._refused.discard(size)
        if loading <= self._limit_s:
            return Verdict(blocks, "faster")
        fits = self._fitting(blocks)
        return Verdict(fits, "partial") if fits else Verdict(0, "late")

    def _to_compute(self, tokens: int) -> float | None:
        return tokens / self._given if self._given else self._computing.at(tokens)

    def _fitting(self, blocks: int) -> int:
        """The most blocks that are expected within the limit."""
        low, high = 0, blocks
        while low < high:
            middle = (low + high + 1) // 2
            expected = self._loads.at(self._queued + middle)
            if expected is not None and expected <= self._limit_s:
                low = middle
            else:
                high = middle - 1
        return low
