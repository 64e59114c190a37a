"""Why a block that was asked for is not there: it was evicted, or lies under another keyspace or generation.

What is known is bounded, and costs nothing where it says nothing: the last million evictions, as one cell each, and
the keyspaces and generations that a namespace's blocks were lately stored under. Of these the first absent key of a
call is looked up in a few: blocks hash all tokens before them, so what holds for it holds for those behind it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.appliance.namespace.sessions import Session
from forebay.appliance.namespace.store import Store
from forebay.errors import ForebayError
from forebay.ids import BlockKey, Keyspace, split_stored_key, stored_prefix
from forebay.index import BlockIndex, Digests

__all__ = ["Evictions", "Place", "Places"]

_log = logging.getLogger(__name__)

_CELLS = 1 << 20
_KEPT = 16
"""Places that are remembered of a namespace, the last used."""
_ASKED = 8
"""Of these, how many one call looks at."""
_FOUND_AT_START = 4096
"""Of all namespaces together: a start waits for no more."""
_NAMESPACE_BYTES, _PLACE_BYTES = 4, 4 + 32 + 8
"""Of a stored key's beginning."""


class Place(NamedTuple):
    """What blocks are stored under, beside the scope and group."""

    keyspace: Keyspace
    generation: int


class Evictions:
    """Digests of blocks that were evicted: each has one cell, and the later one keeps it."""

    def __init__(self) -> None:
        self._cells = np.zeros(_CELLS, np.uint64)  # memory once touched
        self._any = False

    def __bool__(self) -> bool:
        """Whether there have been any."""
        return self._any

    def add(self, digests: Digests) -> None:
        """These were evicted."""
        self._cells[self._at(digests)] = digests[:, 1]
        self._any = True

    def has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Which of these were, as far as is remembered; by 64 bits of a keyed digest, and so without chance hits."""
        found: npt.NDArray[np.bool_] = self._cells.take(self._at(digests)) == digests[:, 1]
        return found

    def drop(self, digests: Digests) -> None:
        """These ended in another way since."""
        at = self._at(digests)[self.has(digests)]
        self._cells[at] = 0

    @staticmethod
    def _at(digests: Digests) -> npt.NDArray[np.int64]:
        return (digests[:, 0] & np.uint64(_CELLS - 1)).astype(np.int64)


class Places:
    """Keyspaces and generations of each namespace, by its id."""

    def __init__(self) -> None:
        self._by_namespace: dict[int, OrderedDict[Place, None]] = {}

    def learn(self, store: Store) -> None:
        """Find those that there are blocks of, at a start. What cannot be read is not known, and no more."""
        try:
            start = b""
            for _ in range(_FOUND_AT_START):
                pair = next(store.scan("blocks", start), None)
                if pair is None:
                    return
                namespace, keyspace, generation, _ = split_stored_key(pair[0])
                self.used(namespace, Place(keyspace, generation))
                enough = len(self._by_namespace[namespace]) == _KEPT
                start = _after(pair[0][: _NAMESPACE_BYTES if enough else _PLACE_BYTES])
        except ForebayError as error:
            _log.warning("which keyspaces there are is not known: %s", error)

    def used(self, namespace: int, place: Place) -> None:
        """A session of that namespace stores under this, or has."""
        known = self._by_namespace.setdefault(namespace, OrderedDict())
        known[place] = None
        known.move_to_end(place)
        if len(known) > _KEPT:
            known.popitem(last=False)

    def forget(self, namespace: int) -> None:
        """A namespace is gone."""
        self._by_namespace.pop(namespace, None)

    def of(self, namespace: int) -> list[Place]:
        """Those of a namespace, the last used first."""
        return list(reversed(self._by_namespace.get(namespace, ())))

    def others(self, session: Session) -> Sequence[Place]:
        """Where else a session's blocks may be, likely ones first: those of its own keyspace, then by last use."""
        known = self._by_namespace.get(session.namespace)
        if known is None or len(known) < 2:  # as mostly
            return ()
        mine = Place(session.schema.keyspace, session.generation)
        found = [place for place in reversed(known) if place != mine]
        return sorted(found, key=lambda place: place.keyspace != mine.keyspace)[:_ASKED]

    @staticmethod
    def digests(index: BlockIndex, namespace: int, places: Sequence[Place], key: BlockKey) -> Digests:
        """A key's digests, one a place."""
        prefixes = [stored_prefix(namespace, *place, key.scope, key.group) for place in places]
        return index.digests([prefix + key.key for prefix in prefixes])


def _after(beginning: bytes) -> bytes:
    """The lowest key behind all that begin so."""
    return (int.from_bytes(beginning) + 1).to_bytes(len(beginning))
