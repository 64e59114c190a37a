"""Control requests that must not be carried out late, and how the target tells.

A request may come to its volume long after whoever sent it gave it up: its thread did not run, the drive hung, or the
daemon was killed and its last words still lie in the socket. A deallocate that is carried out then destroys what
another owner of the place has stored since (docs/design.md §6.4). So a request that clears a region, opens it for
writing or closes it carries its order, ``[incarnation, number]``:

* nothing of an incarnation is carried out once a later one has taken the target over, and where something of an earlier
  one is under way still, on a drive that hangs perhaps, nothing is opened until it has ended;
* regions of one volume are cleared one by one, and none after a later one;
* no grant is opened after a later request that revoked it (see `GrantTable`): on another connection that may have come
  first.

A request without an order comes from a person's hand, and is believed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Final
from weakref import WeakKeyDictionary

from forebay.appliance.dataplane.target.volume import Volume

__all__ = ["Order", "Precedence"]

Order = tuple[int, int]
"""Incarnation of the daemon, and a number that grows with each request."""


_PATIENCE_S: Final = 5.0
"""How long a request waits for its turn: behind a drive that hangs none must pile up."""


@dataclass(slots=True)
class _Turns:
    """Of one volume: whoever holds the lock has its turn; ``last`` is the order of the latest that had one."""

    lock: Lock = field(default_factory=Lock)
    last: Order = (0, 0)
    incarnation: int | None = None
    """Whose turn it is, if anyone's. Guarded by `Precedence`'s lock."""


class Precedence:
    """What the target still carries out. Methods raise OSError: ESTALE for what comes too late, else to try later."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._incarnation = 0
        self._turns: WeakKeyDictionary[Volume, _Turns] = WeakKeyDictionary()

    def obey(self, incarnation: int) -> None:
        """From now on no earlier incarnation is obeyed; nor is this one, if a later one was."""
        with self._lock:
            self._require(incarnation)

    @contextmanager
    def standing(self, volume: Volume, order: Order | None) -> Iterator[None]:
        """For something that takes no time: its incarnation is not over before it is done.

        EAGAIN while on the volume something of an earlier one is under way.
        """
        with self._lock:
            if order is not None:
                self._require(order[0])
                whose = self._of(volume).incarnation
                if whose is not None and whose < self._incarnation:
                    raise _error(errno.EAGAIN)
            yield

    @contextmanager
    def turn(self, volume: Volume, order: Order | None) -> Iterator[None]:
        """For something that a volume's drive may hold up: waits for what came before, or ETIMEDOUT."""
        with self._lock:
            turns = self._of(volume)
        if not turns.lock.acquire(timeout=_PATIENCE_S):
            raise _error(errno.ETIMEDOUT)
        try:
            with self._lock:
                if order is not None:
                    self._require(order[0])
                    if order < turns.last:
                        raise _error(errno.ESTALE)
                    turns.last = order
                turns.incarnation = self._incarnation
            yield
        finally:
            with self._lock:
                turns.incarnation = None
            turns.lock.release()

    def _of(self, volume: Volume) -> _Turns:
        return self._turns.setdefault(volume, _Turns())

    def _require(self, incarnation: int) -> None:
        if incarnation < self._incarnation:
            raise _error(errno.ESTALE)
        self._incarnation = incarnation


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
