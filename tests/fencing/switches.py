"""What the processes of a scenario are told by the test: which defences are out, which faults are on, how late it is.

It stands in one JSON file, written whole by the test and read by the others whenever they would act on it, so that one
node serves many scenarios. None of this exists in the product: `undefended` patches its own process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VARIABLE", "Switches", "ahead_ms", "note", "on"]

VARIABLE = "FENCING_SWITCHES"


@dataclass
class Switches:
    """The test's side."""

    file: Path
    names: frozenset[str] = frozenset()
    ahead_ms: int = 0
    """How far the clocks of the node, and of clients that follow them, have been put forward; never back."""

    def __post_init__(self) -> None:
        self._write()

    def set(self, names: Iterable[str]) -> None:
        """These are on now, and no others."""
        self.names = frozenset(names)
        self._write()

    def drop(self, name: str) -> None:
        """This one is on no longer."""
        self.set(self.names - {name})

    def pass_time(self, duration_ms: int) -> None:
        """So much time passes at once."""
        self.ahead_ms += duration_ms
        self._write()

    def noted(self, what: str) -> int:
        """How often a process has noted that."""
        return self.file.with_suffix(f".{what}").stat().st_size if self.file.with_suffix(f".{what}").exists() else 0

    def _write(self) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"names": sorted(self.names), "ahead_ms": self.ahead_ms}))
        fresh.rename(self.file)


def _read() -> tuple[list[str], int]:
    found = json.loads(Path(os.environ[VARIABLE]).read_text())
    return found["names"], found["ahead_ms"]


def on(name: str) -> bool:
    """Whether a switch is on; asked by the other processes."""
    return name in _read()[0]


def ahead_ms() -> int:
    """How far clocks are put forward; asked by the other processes."""
    return _read()[1]


def note(what: str) -> None:
    """Something happened that the test waits for."""
    with Path(os.environ[VARIABLE]).with_suffix(f".{what}").open("ab") as file:
        file.write(b".")
