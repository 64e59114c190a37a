"""A client that does what some initiators do: commands whose connection breaks are sent again on another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from forebay.client.transports.base import Outcome, ReadOp, Transport, TransportState, WriteOp
from forebay.clock import Clock
from forebay.errors import ConnectionLost

__all__ = ["Replaying"]

_PATIENCE_S = 60.0
_Op = TypeVar("_Op", ReadOp, WriteOp)


class Replaying(Transport):
    """``inner``; the first call whose connection breaks waits for `again` and is then made once more."""

    def __init__(self, inner: Transport, clock: Clock) -> None:
        self.capabilities = inner.capabilities
        self.broken = threading.Event()
        self.again = threading.Event()
        self._inner = inner
        self._clock = clock

    def connect(self, deadline_ms: int) -> None:
        self._inner.connect(deadline_ms)

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        return self._run(self._inner.read, ops, deadline_ms)

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        return self._run(self._inner.write, ops, deadline_ms)

    def _run(
        self, call: Callable[[Sequence[_Op], int], list[Outcome]], ops: Sequence[_Op], deadline_ms: int
    ) -> list[Outcome]:
        outcomes = call(ops, deadline_ms)
        if self.broken.is_set() or not any(isinstance(outcome.error, ConnectionLost) for outcome in outcomes):
            return outcomes
        self.broken.set()
        assert self.again.wait(_PATIENCE_S)
        return call(ops, self._clock.monotonic_ms() + int(_PATIENCE_S * 1000))  # it minds no deadline but its own

    def state(self) -> TransportState:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()
