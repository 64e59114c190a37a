"""Loads that the step under way computes with: read layer group by layer group, and waited for layer by layer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay.clock import Clock
from forebay.connectors.vllm.messages import Load, Rows

__all__ = ["Piece", "StepLoads"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some blocks of a load, from its ``first`` on, in one layer group."""

    request: str
    layer_group: int
    first: int
    rows: Rows


@dataclass(slots=True)
class _Loading:
    """A load: its engine's blocks, and from which of them on it is lost, and why."""

    blocks: tuple[int, ...]
    intact: int
    why: str = ""
    left: set[Piece] = field(default_factory=set)
    write_ids: dict[int, bytes] = field(default_factory=dict)

    def lose(self, first: int, why: str) -> None:
        # What one reader finds bad is dropped, and may be gone before another reader comes to it: tell of the cause.
        if first < self.intact or (first == self.intact and self.why == "evicted"):
            self.intact, self.why = first, why


class StepLoads:
    """The loads of one step, whose pieces are read by threads while the engine's thread computes layer after layer.

    Each piece that a thread takes it ends by `done`; into the cache it copies within `copying`. After `end` nothing
    is copied any more.
    """

    def __init__(self, loads: Iterable[Load], layer_groups: int, part: int, until_ms: int, clock: Clock) -> None:
        """``part`` is how many blocks a piece has, ``until_ms`` until when the engine waits at most."""
        self._clock = clock
        self._began_ms = self._last_ms = clock.monotonic_ms()
        self._until_ms = until_ms
        self._changed = threading.Condition()
        self._copying = 0
        self._ended = False
        self._seen: set[int] = set()
        self._loads: dict[str, _Loading] = {}
        self.pieces: list[Piece] = []
        """What is to be read, in this order."""
        loads = tuple(loads)
        for load in loads:
            (rows,) = load.rows
            self._loads[load.request] = _Loading(rows.blocks, len(rows.blocks))
        for layer_group in range(layer_groups):
            for load in loads:
                (rows,) = load.rows
                for number, some in enumerate(rows.cut(part)):
                    self.pieces.append(Piece(load.request, layer_group, number * part, some))
        for piece in self.pieces:
            self._loads[piece.request].left.add(piece)

    # --- in threads that read ---------------------------------------------------------------------------------------

    def left_ms(self) -> int:
        """How long a read may still take."""
        return self._until_ms - self._clock.monotonic_ms()

    def useful(self, piece: Piece) -> int:
        """How many of a piece's blocks are of use: none after one that is lost, nor when the step is over."""
        with self._changed:
            intact = 0 if self._ended else self._loads[piece.request].intact
            return max(0, min(len(piece.rows.keys), intact - piece.first))

    def alike(self, piece: Piece, write_ids: Sequence[bytes]) -> int:
        """How many of a piece's blocks, as they were read, are of the same write as in the other layer groups."""
        with self._changed:
            known = self._loads[piece.request].write_ids
            for row, write_id in enumerate(write_ids):
                if known.setdefault(piece.first + row, write_id) != write_id:
                    return row
        return len(write_ids)

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """While something is copied into the cache; whether that may still be done."""
        with self._changed:
            may = not self._ended
            self._copying += may
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._copying -= 1
                    self._changed.notify_all()

    def done(self, piece: Piece, lost: int | None, why: str) -> None:
        """A piece has been read and copied, up to the first block that is ``lost``; None if all are there."""
        with self._changed:
            load = self._loads[piece.request]
            if lost is not None:
                load.lose(piece.first + lost, why)
            load.left.discard(piece)
            self._last_ms = self._clock.monotonic_ms()
            self._changed.notify_all()

    @property
    def seconds(self) -> float:
        """How long it took until the last piece was done."""
        with self._changed:
            return (self._last_ms - self._began_ms) / 1000

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def wait(self, layer_group: int) -> None:
        """Wait until a layer group is there, of all loads, or it is too late for that."""
        with self._changed:
            self._seen.add(layer_group)
            waits = max(0, self.left_ms()) / 1000
            if not self._changed.wait_for(lambda: self._there(layer_group), waits):
                self._end("late")

    def _there(self, layer_group: int) -> bool:
        if self._ended:
            return True
        for load in self._loads.values():
            for piece in load.left:
                if piece.layer_group == layer_group and piece.first < load.intact:
                    return False
        return True

    def end(self) -> dict[str, tuple[int, tuple[int, ...], Counter[str]]]:
        """The step has been computed: of each load how many blocks it had, which are lost, and to what.

        A layer group that nobody waited for may have been there too late for its layers: nothing of any load counts.
        """
        with self._changed:
            unseen = {piece.layer_group for piece in self.pieces} - self._seen
            self._end("late")
            if unseen:
                for load in self._loads.values():
                    load.lose(0, "not_waited_for")
        return {
            request: (len(load.blocks), load.blocks[load.intact :], _reasons(load))
            for request, load in self._loads.items()
        }

    def _end(self, why: str) -> None:
        """With the lock: no further copy; what has not been read is lost."""
        self._ended = True
        self._changed.wait_for(lambda: not self._copying)
        for load in self._loads.values():
            for piece in load.left:
                load.lose(piece.first, why)


def _reasons(load: _Loading) -> Counter[str]:
    """One block is lost to whatever it was, and those after it since they come after it."""
    lost = len(load.blocks) - load.intact
    if not lost:
        return Counter()
    if load.why in ("late", "not_waited_for", "unavailable"):
        return Counter({load.why: lost})
    return Counter({load.why: 1}) + Counter({"behind_gap": lost - 1})
