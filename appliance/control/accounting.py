"""What is counted of calls: outcomes, latency and how many are under way, by protocol and method.

Methods are those that a server registered, so that no caller's words become a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forebay.appliance.histogram import Histogram
from forebay.errors import reason

__all__ = ["CANCELLED", "Account", "Accounts", "outcome"]

CANCELLED = -1
"""Outcome of a call whose caller went away before the answer."""


def outcome(code: int) -> str:
    """An outcome as one word: ``ok``, ``cancelled`` or the error's name in snake case."""
    return "cancelled" if code == CANCELLED else reason(code)


class Account:
    """The calls of one method. ``outcomes`` go by error code (0 for success) or `CANCELLED`."""

    __slots__ = ("in_flight", "latency_s", "method", "outcomes", "protocol")

    def __init__(self, protocol: str, method: str) -> None:
        self.protocol = protocol
        self.method = method
        self.outcomes: Counter[int] = Counter()
        self.latency_s = Histogram()
        self.in_flight = 0


class Accounts:
    """One `Account` for each method."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Account] = {}

    def of(self, protocol: str, method: str) -> Account:
        """The account of a method, opened when it is first asked for: at start, not by a call."""
        return self._known.setdefault((protocol, method), Account(protocol, method))

    def __iter__(self) -> Iterator[Account]:
        return iter(list(self._known.values()))
