"""What was acknowledged, and whether it is still there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.cli.demo.workload import Contents, block_key

if TYPE_CHECKING:
    from forebay.cli.demo.replica import Outcome
    from forebay.client import Client, WatchEvent

__all__ = ["Audit", "Ledger", "audit"]

BATCH_BLOCKS = 64
"""Blocks of one call: enough to keep every connection busy, few enough to bound memory."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome of reading blocks back: how many are ``good``, and why each ``missing`` one was a miss."""

    good: int
    wrong: tuple[int, ...]
    missing: dict[int, str]
    read_bytes: int


class Ledger:
    """Every block that the node acknowledged, and what its events say of those."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self.acknowledged: set[int] = set()
        self.evicted: set[int] = set()
        """Blocks whose last event says that they went."""
        self.bad: set[int] = set()
        """Blocks whose last event says that the node found their bytes damaged and dropped them."""
        self._blocks = {block_key(block): block for block in blocks}

    def acknowledge(self, outcome: Outcome) -> None:
        """The node answered that these are stored, by this request or before it."""
        self.acknowledged.update(outcome.stored, outcome.present)

    def note(self, event: WatchEvent) -> None:
        """Take over one event of the node."""
        block = self._blocks.get(event.key)
        if block is None:
            return
        if event.kind == "stored":
            self.evicted.discard(block)
            self.bad.discard(block)
        elif event.kind == "removed" and event.reason == "evicted":
            self.evicted.add(block)
        elif event.kind == "removed" and event.reason == "bad":
            self.bad.add(block)

    def lost(self, missing: Iterable[int], evictions: int) -> list[int]:
        """The missing blocks that were acknowledged and that no eviction accounts for.

        ``evictions`` is how many the node counted: those beyond the ones it named excuse as many more blocks.
        """
        unnamed = [block for block in missing if block in self.acknowledged and block not in self.evicted]
        return unnamed[max(0, evictions - len(self.evicted)) :]


def audit(client: Client, contents: Contents, blocks: Sequence[int]) -> Audit:
    """Read whole blocks and compare every byte."""
    size = contents.block_bytes
    memory = memoryview(bytearray(size * min(BATCH_BLOCKS, max(1, len(blocks)))))
    wrong: list[int] = []
    missing: dict[int, str] = {}
    for start in range(0, len(blocks), BATCH_BLOCKS):
        batch = blocks[start : start + BATCH_BLOCKS]
        buffers = [memory[i * size : (i + 1) * size] for i in range(len(batch))]
        results = client.get_into([block_key(b) for b in batch], buffers)
        for block, buffer, result in zip(batch, buffers, results, strict=True):
            if not result.hit:
                missing[block] = result.reason
            elif not contents.matches(block, buffer):
                wrong.append(block)
    found = len(blocks) - len(missing)
    return Audit(found - len(wrong), tuple(wrong), missing, found * size)
