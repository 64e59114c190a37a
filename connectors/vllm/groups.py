"""The KV cache groups of an engine, and what each needs of a prefix: all, a window of it, or the state at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.schema import GroupKind, Required

__all__ = ["CacheGroup", "CacheGroups", "Presence"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of vLLM's KV cache groups: layers that share a block table.

    ``window_tokens`` is how far back a ``sliding`` layer looks, or the size of the chunks of a ``chunked`` one. A block
    of a ``mamba`` group is the state after its last token.
    """

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0

    def first_needed(self, tokens: int) -> int:
        """The first block that is still looked at once ``tokens`` have been computed, as vLLM counts it.

        Blocks before it are null in the engine's block table.
        """
        match self.kind:
            case "sliding":
                skipped = max(0, tokens - self.window_tokens + 1)
            case "chunked":
                skipped = tokens // self.window_tokens * self.window_tokens
            case "mamba":
                skipped = max(0, tokens - 1)
            case _:
                skipped = 0
        return skipped // self.block_tokens

    @property
    def required(self) -> Required:
        """The same for the schema, as the most that it can be."""
        match self.kind:
            case "sliding":
                return Required("trailing", math.ceil((self.window_tokens - 1) / self.block_tokens))
            case "chunked":
                return Required("trailing", math.ceil(self.window_tokens / self.block_tokens))
            case "mamba":
                return Required("boundary")
            case _:
                return Required()


class Presence:
    """Which blocks of a row are there: made once, asked often."""

    __slots__ = ("_gaps",)

    def __init__(self, present: Sequence[bool]) -> None:
        gap = len(present)
        self._gaps = [gap] * (gap + 1)
        for block in range(gap - 1, -1, -1):
            if not present[block]:
                gap = block
            self._gaps[block] = gap

    def __len__(self) -> int:
        return len(self._gaps) - 1

    def gap(self, first: int) -> int:
        """The first block from ``first`` on that is not there."""
        return self._gaps[min(first, len(self))]

    def whole(self, first: int, end: int) -> bool:
        """Whether all blocks from ``first`` up to ``end`` are there."""
        return end <= len(self) and self.gap(first) >= end


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of an engine, by their numbers, and how many tokens its block hashes are over.

    A group's block is as long as one hashed block or a whole number of them; the hash of its last one names it, since
    hashes are chained. Of a prefix that is ``redrafted`` the last block is computed anew, though it is there.
    """

    groups: tuple[CacheGroup, ...]
    hash_tokens: int
    redrafted: bool = False

    @property
    def unit_tokens(self) -> int:
        """What a hit is a multiple of: whole blocks of every group."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def plain(self) -> bool:
        """Whether there is one group, of full attention.

        Only then can vLLM be told of a failure by block: the flat list of block numbers that it takes is of one group,
        and a prefix that is shorter by a block needs no block that the longer one did not. Only then, too, may a
        prompt's last token be computed again on top of its own block.
        """
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    def hashed(self, group: int, block: int) -> int:
        """Which of a request's hashes names a block."""
        return (block + 1) * self.groups[group].block_tokens // self.hash_tokens - 1

    def blocks(self, group: int, tokens: int) -> int:
        """How many whole blocks of a group ``tokens`` are."""
        return tokens // self.groups[group].block_tokens

    def rows(self, group: int, start_tokens: int, tokens: int) -> range:
        """The blocks of a group that are needed to go on after ``tokens``, when ``start_tokens`` are there already."""
        spec = self.groups[group]
        end = tokens // spec.block_tokens
        return range(min(end, max(start_tokens // spec.block_tokens, spec.first_needed(tokens))), end)

    def longest(self, present: Sequence[Presence], start_tokens: int, most_tokens: int) -> int:
        """The longest prefix, of at most ``most_tokens``, that every group has all it needs of.

        ``start_tokens`` are there already and whole; that many are the answer where nothing is to be had.
        """
        unit, end = self.unit_tokens, most_tokens
        for group, spec in enumerate(self.groups):
            if spec.kind == "full":
                end = min(end, present[group].gap(start_tokens // spec.block_tokens) * spec.block_tokens)
        for tokens in range(end // unit * unit, start_tokens, -unit):
            rows = [self.rows(group, start_tokens, tokens) for group in range(len(self.groups))]
            if all(present[group].whole(each.start, each.stop) for group, each in enumerate(rows)):
                return tokens
        return start_tokens
