"""How long a load would take: learned from what the target reports of its reads."""

from __future__ import annotations

from forebay.appliance.dataplane.interface import IoStats

__all__ = ["LoadEstimate"]

_START_BYTES_PER_S = 1e9
_COMMAND_US = 500
_WEIGHT = 0.3
_LEAST_BYTES = 1 << 20


class LoadEstimate:
    """Exponentially weighted rate of one queue's reads, from the counters of the target.

    Before anything was read it assumes 1 GB/s; an engine that wants better measures its own loads.
    """

    def __init__(self) -> None:
        self._bytes_per_s = _START_BYTES_PER_S
        self._last = IoStats(0, 0, 0, 0)

    def update(self, stats: IoStats) -> None:
        """Learn from the target's counters, which start anew when it does."""
        read_bytes, read_us = stats.read_bytes - self._last.read_bytes, stats.read_us - self._last.read_us
        self._last = stats
        if read_bytes >= _LEAST_BYTES and read_us > 0:
            self._bytes_per_s += _WEIGHT * (read_bytes * 1e6 / read_us - self._bytes_per_s)

    def load_us(self, size_bytes: int) -> int:
        """Microseconds to load that much over one queue."""
        return int(_COMMAND_US + size_bytes * 1e6 / self._bytes_per_s) if size_bytes else 0
