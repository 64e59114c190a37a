"""Eviction policies: which block goes when a namespace needs room.

A policy sees columns of the index, not objects, and may keep what a writer described or hinted at. The engine asks
for victims among rows it has found evictable (visible, not leased, not pinned) and checks each again before it goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from forebay.index import BlockIndex, Rows

__all__ = ["EvictionPolicy", "Lru"]


class EvictionPolicy(ABC):
    """The interface; one object a node."""

    @abstractmethod
    def committed(self, index: BlockIndex, rows: Rows, tail: Mapping[str, Any]) -> None:
        """Rows became visible; ``tail`` holds ``d`` (describe) and ``h`` (hints) of their writer."""

    @abstractmethod
    def used(self, index: BlockIndex, rows: Rows) -> None:
        """Rows were read or touched."""

    @abstractmethod
    def loaded(self, index: BlockIndex) -> None:
        """The index was filled from a checkpoint, its ``tick`` column as the policy had set it."""

    @abstractmethod
    def victims(self, index: BlockIndex, candidates: Rows, count: int, now_s: int) -> Rows:
        """Up to ``count`` of ``candidates``, first to go first."""


class Lru(EvictionPolicy):
    """Least recently used first; blocks with a retention that still runs go last, whatever their age."""

    def __init__(self) -> None:
        self._tick = 0

    def _stamp(self, index: BlockIndex, rows: Rows) -> None:
        index.tick[rows] = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        self._tick += len(rows)

    def committed(self, index: BlockIndex, rows: Rows, tail: Mapping[str, Any]) -> None:
        self._stamp(index, rows)

    def used(self, index: BlockIndex, rows: Rows) -> None:
        self._stamp(index, rows)

    def loaded(self, index: BlockIndex) -> None:
        self._tick = int(index.tick[: index.high].max(initial=0))

    def victims(self, index: BlockIndex, candidates: Rows, count: int, now_s: int) -> Rows:
        kept = index.retain_until_s[candidates] > now_s
        age = index.tick[candidates]
        if count < len(candidates) // 4:
            # a partial sort first: only the oldest need an order
            order_key = age + kept.astype(np.uint64) * np.uint64(1 << 62)
            candidates = candidates[np.argpartition(order_key, count)[:count]]
            kept, age = index.retain_until_s[candidates] > now_s, index.tick[candidates]
        return candidates[np.lexsort((age, kept))[:count]]
