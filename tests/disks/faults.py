"""Errors of drives on demand: the table that `tests/shims/failing_io.c` reads, and its environment."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path

from tests.shims.building import build

__all__ = ["EVERYTHING", "Faults", "Operation"]

_RULE = struct.Struct("<IIiIIII484s")
_RULES = 16
_SOURCE = Path(__file__).parents[1] / "shims" / "failing_io.c"
assert _RULE.size == 512


class Operation(IntFlag):
    """What fails; as in the shim."""

    OPEN = 1
    CREATE = 2
    READ = 4
    WRITE = 8
    SYNC = 16
    ALLOCATE = 32
    STAT = 64


EVERYTHING = Operation(127)


class Faults:
    """Rules for all processes that run with `environment`, from the moment they are set."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "failing-io"
        self._file.write_bytes(bytes(_RULE.size * _RULES))
        handle = os.open(self._file, os.O_RDWR)
        try:
            self._table = mmap.mmap(handle, _RULE.size * _RULES)
        finally:
            os.close(handle)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to run under the shim."""
        return {"LD_PRELOAD": str(build(_SOURCE)), "FOREBAY_FAILING_IO": str(self._file)}

    def set(
        self,
        pattern: str | Path,
        operations: Operation,
        error: int = errno.EIO,
        *,
        after: int = 0,
        times: int = 0,
    ) -> int:
        """Let calls on paths like ``pattern`` (fnmatch) fail, the first ``after`` not; the number of the rule."""
        number = next(n for n in range(_RULES) if not self._cells(n)[0])
        at = number * _RULE.size
        cells = _RULE.pack(0, int(operations), error, after, times, 0, 0, os.fsencode(pattern))
        self._table[at : at + _RULE.size] = cells
        self._table[at : at + 4] = (1).to_bytes(4, "little")
        return number

    def failed(self, number: int) -> int:
        """How many calls a rule has let fail."""
        return int(self._cells(number)[6])

    def clear(self) -> None:
        """No rule is left: the drives are well again."""
        for number in range(_RULES):
            self._table[number * _RULE.size : number * _RULE.size + 4] = bytes(4)

    @contextmanager
    def during(self, pattern: str | Path, operations: Operation, error: int = errno.EIO) -> Iterator[int]:
        """A rule for as long as the block runs; that it was of some effect is the caller's to check."""
        number = self.set(pattern, operations, error)
        try:
            yield number
        finally:
            self._table[number * _RULE.size : number * _RULE.size + 4] = bytes(4)

    def _cells(self, number: int) -> tuple[int, ...]:
        return _RULE.unpack_from(self._table, number * _RULE.size)
