"""How much may be under way at a node at a time, and how it is shared between principals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from forebay.errors import Busy

__all__ = ["Admission", "Place", "keep_place"]

_place: ContextVar[Place | None] = ContextVar("place", default=None)


class Place:
    """What one caller has under way, until everybody who holds it has let go."""

    __slots__ = ("_admission", "_holders", "_principal", "_weight")

    def __init__(self, admission: Admission, principal: str, weight: int) -> None:
        self._admission = admission
        self._principal = principal
        self._weight = weight
        self._holders = 1

    def hold(self) -> None:
        """One more holder."""
        self._holders += 1

    def leave(self) -> None:
        """One holder less; the last one gives the place back."""
        self._holders -= 1
        if not self._holders:
            self._admission._give_back(self._principal, self._weight)


class Admission:
    """Up to ``limit`` of something, of which nobody may have more than is left for others.

    A principal that takes all it can so gets half; of n that do, each gets an equal share and the same is left free for
    the next one. Nobody has to be told to give up what it has.
    """

    def __init__(self, limit: int, what: str, *, retry_after_ms: int) -> None:
        self._limit = limit
        self._what = what
        self._retry_after_ms = retry_after_ms
        self._total = 0
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._total

    def enter(self, principal: str, weight: int = 1, *, always: bool = False) -> Place:
        """A place for one caller. Raises `Busy`, unless it is ``always`` let in."""
        if not always and self._of[principal] + weight > self._limit - self._total:
            raise Busy(
                f"{principal} has as many {self._what} as the node takes now beside those of others "
                f"({self._of[principal]} of {self._total}): ask again later, with fewer at a time",
                limit=self._limit,
                retry_after_ms=self._retry_after_ms,
            )
        self._total += weight
        self._of[principal] += weight
        return Place(self, principal, weight)

    @contextmanager
    def place(self, principal: str, weight: int = 1, *, always: bool = False) -> Iterator[None]:
        """`enter` for as long as the block runs, and for what `keep_place` finds there to do after it."""
        place = self.enter(principal, weight, always=always)
        token = _place.set(place)
        try:
            yield
        finally:
            _place.reset(token)
            place.leave()

    def _give_back(self, principal: str, weight: int) -> None:
        self._total -= weight
        self._of[principal] -= weight
        if not self._of[principal]:
            del self._of[principal]


def keep_place(work: asyncio.Future[None]) -> None:
    """Work that outlives its call has the call's place for as long as it runs."""
    place = _place.get()
    if place is not None:
        place.hold()
        work.add_done_callback(lambda _: place.leave())
