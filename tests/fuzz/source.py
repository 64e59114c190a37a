"""Choices drawn from bytes, so that one input serves Hypothesis, a coverage-guided fuzzer and a file of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Source"]

T = TypeVar("T")


class Source:
    """The same bytes always make the same choices; when they run out every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that no choice took yet."""
        return len(self._data) - self._at

    def take(self, most: int) -> bytes:
        """The next bytes as they are, fewer where there are no more."""
        found = self._data[self._at : self._at + most]
        self._at += len(found)
        return found

    def below(self, limit: int) -> int:
        """A number from 0 to ``limit`` - 1."""
        size = max(1, ((limit - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(size), "little") % limit

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        """True about once in so many times, never when the bytes have run out."""
        return self.below(one_in) == one_in - 1

    def number(self, bits: int) -> int:
        """A field of so many bits: small, at an edge, a multiple of a block, or anything."""
        top = (1 << bits) - 1
        kind = self.below(6)
        if kind == 0:
            return self.below(4)
        if kind == 1:
            return top - self.below(4)
        if kind == 2:
            return 1 << self.below(bits)
        if kind == 3:
            return self.below(256) * 4096 & top
        return int.from_bytes(self.take((bits + 7) // 8), "little") & top
