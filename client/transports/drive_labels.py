"""What drives of this machine were seen to be labelled, so that a look for a volume opens no drive of others again."""

from __future__ import annotations

from typing import NamedTuple

from forebay.clock import Clock

__all__ = ["DriveLabels"]

_FORGET_MS = 60_000
"""A label may be written to a disk that had none, which the kernel does not tell."""


class _Seen(NamedTuple):
    disk: str
    label: str
    until_ms: int


class DriveLabels:
    """By name of a drive: its label (the volume's UUID in hexadecimal digits, "" for none) when it was last read.

    It is forgotten after a minute, and when the kernel has another disk under that name. Thread-safe, as a dict is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def of(self, name: str, disk: str) -> str | None:
        """The label, None where it has to be read. ``disk`` is whatever tells the kernel's disks apart."""
        seen = self._seen.get(name)
        if seen is None or seen.disk != disk or self._clock.monotonic_ms() >= seen.until_ms:
            return None
        return seen.label

    def note(self, name: str, disk: str, label: str) -> None:
        """Remember what was read, or that nothing could be."""
        self._seen[name] = _Seen(disk, label, self._clock.monotonic_ms() + _FORGET_MS)

    def forget(self) -> None:
        """Let every drive be looked at again."""
        self._seen.clear()
