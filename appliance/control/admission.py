"""How much may be under way at a node at a time, and how it is shared between principals."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, Token
from typing import Self

from forebay.errors import Busy

__all__ = ["Admission", "Place", "keep_place"]

_place: ContextVar[Place | None] = ContextVar("place", default=None)


class Place:
    """What one caller has under way, until everybody who holds it has let go.

    As a context manager it is left in the end, and held by what `keep_place` finds there to do after that.
    """

    __slots__ = ("_admission", "_around", "_holders", "_principal", "_weight")

    def __init__(self, admission: Admission, principal: str, weight: int) -> None:
        self._admission = admission
        self._principal = principal
        self._weight = weight
        self._holders = 1
        self._around: Token[Place | None] | None = None

    def __enter__(self) -> Self:
        self._around = _place.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._around is not None:
            _place.reset(self._around)
        self.leave()

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
        self._of: dict[str, int] = {}

    def __len__(self) -> int:
        return self._total

    def enter(self, principal: str, weight: int = 1, *, always: bool = False) -> Place:
        """A place for one caller. Raises `Busy`, unless it is ``always`` let in."""
        held = self._of.get(principal, 0)
        if not always and held + weight > self._limit - self._total:
            raise Busy(
                f"{principal} has as many {self._what} as the node takes now beside those of others "
                f"({held} of {self._total}): ask again later, with fewer at a time",
                limit=self._limit,
                retry_after_ms=self._retry_after_ms,
            )
        self._total += weight
        self._of[principal] = held + weight
        return Place(self, principal, weight)

    def _give_back(self, principal: str, weight: int) -> None:
        self._total -= weight
        left = self._of.pop(principal) - weight
        if left:
            self._of[principal] = left


def keep_place(work: asyncio.Future[None]) -> None:
    """Work that outlives its call has the call's place for as long as it runs."""
    place = _place.get()
    if place is not None:
        place.hold()
        work.add_done_callback(lambda _: place.leave())
