"""Numbers that a test run ends with: faults injected, blocks verified, rounds survived.

A test adds to its `Count`; the run prints the sums, and with ``FOREBAY_TEST_RESULTS`` writes them to that file as JSON.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from pathlib import Path

__all__ = ["PROPERTY", "Count", "save"]

PROPERTY = "counted"


class Count:
    """What one test counted, kept in its report (``properties``), so that it comes back from a worker process too."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self._properties = properties

    def add(self, **numbers: int) -> None:
        """Add to numbers by name."""
        self._properties += [(f"{PROPERTY}.{name}", number) for name, number in numbers.items()]


def save(file: Path, numbers: Counter[str], profile: str) -> None:
    """Write the sums, and what they are of."""
    about = {"profile": profile, "python": platform.python_version(), "kernel": platform.release().partition("-")[0]}
    file.write_text(json.dumps({**about, **dict(sorted(numbers.items()))}, indent=2) + "\n")
