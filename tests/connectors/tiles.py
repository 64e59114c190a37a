"""The copies between KV caches and values, byte by byte: `python -m tests.connectors.tiles`, where torch is installed.

What `BlockTensors` makes of caches of several memory layouts is compared with a value that loops over tiles, layers and
heads as docs/adr/0006-data-model.md has them. Prints how many cases were right; an assertion ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from forebay.connectors.keys import tiled
from forebay.connectors.vllm.blocks import BlockTensors
from forebay.ranks import held_tiles
from forebay.schema import Group

BLOCKS, TOKENS = 7, 4
ROWS = [5, 0, 3]


def caches(layout: str, layers: int, heads: int, content: int, dtype: Any) -> list[Any]:
    """Views ``[blocks, heads, tokens, content]`` of memory in that order, with random bytes."""
    sizes = {"L": layers, "B": BLOCKS, "H": heads, "N": TOKENS, "C": content}
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    shape = [sizes[axis] for axis in layout]
    memory = torch.randint(0, 256, (*shape[:-1], shape[-1] * item_bytes), dtype=torch.uint8).view(dtype)
    ordered = memory.permute(*(layout.index(axis) for axis in "LBHNC"))
    return [ordered[layer] for layer in range(layers)]


def expected(views: list[Any], group: Group, tiles: tuple[int, ...], block: int, first_head: int) -> bytes:
    """A value as the data model describes it."""
    out = b""
    for tile in tiles:
        head_group, layer_group = divmod(tile, group.layer_groups)
        for layer in group.layer_range(layer_group):
            for head in group.head_range(head_group):
                rows = views[layer][block, head - first_head].contiguous()
                out += bytes(rows.view(torch.uint8).flatten().tolist())
    return out


def cases() -> Iterator[tuple[str, Any, int, int, int]]:
    for layout, dtype in product(("LBHNC", "LBNHC", "BLHNC", "LHBNC"), (torch.float32, torch.bfloat16, torch.uint8)):
        for heads, most, layer_groups in ((1, 8, 1), (4, 4, 2), (6, 3, 1), (8, 8, 3)):
            yield layout, dtype, heads, most, layer_groups


def tensors_of(views: list[Any], group: Group, heads: int, *, on_host: bool) -> BlockTensors:
    """With the copies of caches in host memory, or those of caches that are not."""
    tensors = BlockTensors(views, group, heads)
    assert len(tensors._arrays) == len(views)
    if not on_host:
        tensors._arrays.clear()
    return tensors


def check(layout: str, dtype: Any, heads: int, most: int, layer_groups: int, *, on_host: bool) -> int:
    layers, content = 3, 6
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    plain = Group("full", tuple(range(layers)), TOKENS, heads, content * item_bytes, str(dtype), "test")
    group = tiled(plain, max_ranks=most, layer_groups=layer_groups)
    whole = caches(layout, layers, heads, content, dtype)
    done = 0
    for ranks in range(1, most + 1):
        if heads % ranks and ranks % heads:
            continue
        for rank in range(ranks):
            mine = max(1, heads // ranks)
            first = rank * heads // ranks
            views = [view[:, first : first + mine] for view in whole]
            tiles = held_tiles(group, rank, ranks)
            tensors = tensors_of(views, group, mine, on_host=on_host)
            values = torch.empty((len(ROWS), tensors.value_bytes), dtype=torch.uint8)
            tensors.gather(ROWS, values)
            for row, block in enumerate(ROWS):
                assert bytes(values[row].tolist()) == expected(views, group, tiles, block, first)
            others = [view[:, first : first + mine] for view in caches(layout, layers, heads, content, dtype)]
            before = [other.clone() for other in others]
            tensors_of(others, group, mine, on_host=on_host).scatter(ROWS, values)
            for view, other, old in zip(views, others, before, strict=True):
                for block in range(BLOCKS):
                    want = view if block in ROWS else old
                    same = other[block].contiguous().view(torch.uint8) == want[block].contiguous().view(torch.uint8)
                    assert bool(same.all()), (layout, dtype, heads, ranks, rank, block)
            done += 1
    return done


def smaller_blocks(heads: int, parts: int) -> int:
    """Blocks that the backend cuts into smaller ones are ``[head][part][token]``, wherever the parts lie."""
    content = 6
    memory = torch.rand(BLOCKS * parts, heads, TOKENS, content)
    group = tiled(Group("full", (0,), TOKENS * parts, heads, content * 4, "float32", "test"), max_ranks=heads)
    tensors = BlockTensors([memory.unflatten(0, (BLOCKS, parts)).transpose(1, 2)], group, heads)
    values = torch.empty((len(ROWS), tensors.value_bytes), dtype=torch.uint8)
    tensors.gather(ROWS, values)
    for value, row in zip(values, ROWS, strict=True):
        want = [memory[row * parts + part, head] for head in range(heads) for part in range(parts)]
        assert bool((value == torch.stack(want).view(torch.uint8).flatten()).all())
    before = memory.clone()
    memory.unflatten(0, (BLOCKS, parts))[ROWS] = 0
    tensors.scatter(ROWS, values)
    assert bool((memory == before).all())
    return 1


def states() -> int:
    """A layer's state is bytes of one head, in pages that are longer than it; several ranks' are tiles of one block."""
    pages = torch.randint(0, 256, (2, BLOCKS, 1, 1, 48), dtype=torch.uint8)
    group = Group("mamba", (0, 2), 64, 2, 40, "bfloat16+float32", "test", head_groups=2)
    tensors = BlockTensors(list(pages[..., :40]), group, 1)
    values = torch.empty((len(ROWS), tensors.value_bytes), dtype=torch.uint8)
    tensors.gather(ROWS, values)
    assert held_tiles(group, 1, 2) == (1,) and group.layout().lengths == (80, 80)
    assert bool((values == torch.cat([page[ROWS, 0, 0, :40] for page in pages], 1)).all())
    return 1


def main() -> None:
    torch.manual_seed(0)
    split = sum(smaller_blocks(heads, parts) for heads, parts in ((1, 2), (4, 3)))
    print(sum(check(*case, on_host=on_host) for case in cases() for on_host in (True, False)) + split + states())


if __name__ == "__main__":
    main()
