"""KV cache tensors of a worker as blocks of the schema: which bytes of which layers make up its tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.ranks import held_tiles, written_tiles
from forebay.schema import Group

__all__ = ["BlockTensors", "HeldGroup", "Part"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class BlockTensors:
    """The caches of some of a worker's layers of one group, one tensor a layer, each ``[blocks, heads, …, content]``.

    A value is the tiles that this worker holds, back to back, in the order of their numbers: of each of its head
    groups all layers, and inside a layer ``[head][token][content]``; a state is one head. Any strides will do, as long
    as the last axis is contiguous. Copies go through host memory and are complete when a call returns.
    """

    def __init__(self, layers: Sequence[Any], group: Group, heads: int) -> None:
        """``layers`` are in the order of the group's; ``heads`` are here of its KV heads, whole head groups."""
        caches = [cache.view(torch.uint8) for cache in layers]
        # Rows are picked element by element: eight bytes at a time takes a fifth of the CPU that single ones do.
        size = next(size for size in _WORDS if all(_made_of(cache, size) for cache in caches))
        self._word = _WORDS[size]
        self._head_groups = heads * group.head_groups // group.kv_heads if group.kv_heads else 1
        self._caches = [cache.view(self._word).unflatten(1, (self._head_groups, -1)) for cache in caches]
        self._arrays = [cache.numpy() for cache in self._caches if cache.device.type == "cpu"]
        """The caches in host memory, where numpy copies whole rows at about the speed of memory, and torch their words
        one after the other."""
        self._spans: list[slice] = []
        at = 0
        for cache in self._caches:
            self._spans.append(slice(at, at + math.prod(cache.shape[2:])))
            at = self._spans[-1].stop
        self.value_bytes = self._head_groups * at * size
        """Of one block here."""

    def gather(self, blocks: Sequence[int], values: Any) -> None:
        """Copy the engine's ``blocks`` into ``values``, a host tensor of bytes, ``[len(blocks), value_bytes]``."""
        if self._arrays:
            rows = np.array(blocks, np.int64)
            for array, part in zip(self._arrays, self._parts(values), strict=True):
                part.numpy()[...] = array[rows]
        else:
            index = self._index(blocks)
            for cache, part in zip(self._caches, self._parts(values), strict=True):
                part.copy_(cache[index])

    def scatter(self, blocks: Sequence[int], values: Any) -> None:
        """The other way round."""
        if self._arrays:
            rows = np.array(blocks, np.int64)
            for array, part in zip(self._arrays, self._parts(values), strict=True):
                array[rows] = part.numpy()
            return
        with torch.inference_mode():  # the engine's caches are tensors of that mode, and threads start outside of it
            index = self._index(blocks)
            for cache, part in zip(self._caches, self._parts(values), strict=True):
                cache[index] = part.to(cache.device)
            if cache.device.type != "cpu":  # what follows is computed on another stream
                torch.accelerator.current_stream(cache.device).synchronize()

    def _index(self, blocks: Sequence[int]) -> Any:
        return torch.tensor(list(blocks), dtype=torch.int64, device=self._caches[0].device)

    def _parts(self, values: Any) -> Iterator[Any]:
        """Each layer's part of ``values``, in the shape of so many rows of its cache."""
        by_head_group = values.view(self._word).view(len(values), self._head_groups, -1)
        for cache, span in zip(self._caches, self._spans, strict=True):
            yield by_head_group[:, :, span].view(len(values), *cache.shape[1:])


def _made_of(cache: Any, size: int) -> bool:
    """Whether a tensor of bytes can be seen as one of words of so many."""
    return not any(number % size for number in (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1]))


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a group as a rank holds them: the tiles, and the tensors that they are of."""

    tiles: tuple[int, ...]
    tensors: BlockTensors


class HeldGroup:
    """One group as a rank holds it: as a whole, and by its layer groups."""

    def __init__(self, group: Group, layers: Sequence[Any], heads: int, rank: int, ranks: int) -> None:
        """``layers`` are the caches of the group's layers; ``heads`` are here of its KV heads."""
        self.group = group
        self._place = rank, ranks
        self.whole = Part(held_tiles(group, rank, ranks), BlockTensors(layers, group, heads))
        self.parts: list[Part] = []
        for each in range(group.layer_groups):
            within = group.layer_range(each)
            tiles = held_tiles(group, rank, ranks, layers=within)
            self.parts.append(Part(tiles, BlockTensors(layers[within.start : within.stop], group, heads)))

    @property
    def value_bytes(self) -> int:
        """Of one block here."""
        return self.whole.tensors.value_bytes

    def writes(self, turn: int) -> bool:
        """Whether it is this rank that writes what it holds: of ranks that hold the same, one does."""
        rank, ranks = self._place
        return bool(written_tiles(self.group, rank, ranks, turn=turn))
