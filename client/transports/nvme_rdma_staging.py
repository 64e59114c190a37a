"""Room in a piece of registered memory: where the bytes of commands lie that the caller's memory cannot take itself."""

from __future__ import annotations

from bisect import bisect_left

from forebay.ids import LBA_BYTES

__all__ = ["Room"]


class Room:
    """Ranges of ``[0, length_bytes)`` in multiples of 4 KiB: first fit, neighbours joined when they come back."""

    def __init__(self, length_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, length_bytes)]  # start, end; ascending, never touching

    @staticmethod
    def _whole(length_bytes: int) -> int:
        return -(-length_bytes // LBA_BYTES) * LBA_BYTES

    def fits(self, length_bytes: int) -> bool:
        """Whether `take` would find room."""
        size = self._whole(length_bytes)
        return any(end - start >= size for start, end in self._free)

    def take(self, length_bytes: int) -> int | None:
        """The start of a range that is the taker's until it is given back; None when there is no room."""
        size = self._whole(length_bytes)
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, end)
                return start
        return None

    def give(self, start: int, length_bytes: int) -> None:
        """Give back what `take` answered for that length."""
        end = start + self._whole(length_bytes)
        i = bisect_left(self._free, (start, end))
        assert (i == 0 or self._free[i - 1][1] <= start) and (i == len(self._free) or end <= self._free[i][0]), (
            f"[{start}, {end}) is given back twice: {self._free}"
        )
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))
