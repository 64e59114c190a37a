"""Ranks and the grid: whatever the split, each tile is held where it is needed and written once."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.errors import GridInvalid, InvalidArgument
from forebay.ranks import held_tiles, written_tiles
from forebay.schema import Group, Schema


def group(kv_heads: int = 8, layers: int = 6, head_groups: int = 8, layer_groups: int = 3) -> Group:
    return Group(
        "full" if kv_heads else "mla",
        tuple(range(layers)),
        block_tokens=16,
        kv_heads=kv_heads,
        bytes_per_head=64,
        dtype="bf16",
        format="plain",
        layer_groups=layer_groups,
        head_groups=head_groups if kv_heads else 1,
    )


def test_tiles_are_numbered_by_head_group_then_layer_group() -> None:
    grid = group(kv_heads=4, layers=4, head_groups=2, layer_groups=2)
    assert grid.tiles_of() == (0, 1, 2, 3)
    assert grid.tiles_of(heads=range(2, 4)) == (2, 3)
    assert grid.tiles_of(layers=range(2)) == (0, 2)
    assert grid.tiles_of(range(2), range(2, 4)) == (1,)


@pytest.mark.parametrize(
    ("heads", "layers", "message"),
    [
        (range(1), None, "heads 0 to 0 end inside the tile of heads 0 to 1: a schema with more head_groups than 2"),
        (range(1, 4), None, "end inside the tile of heads 0 to 1"),
        (range(3), None, "end inside the tile of heads 2 to 3"),
        (None, range(3), "layers 0 to 2 end inside the tile of layers 2 to 3: a schema with more layer_groups"),
        (range(2, 5), None, "of 4 heads"),
        (range(2, 2), None, "of 4 heads"),
        (range(0, 4, 2), None, "of 4 heads"),
        (range(-2, 2), None, "of 4 heads"),
    ],
)
def test_ranges_that_are_not_of_the_grid_are_refused_in_words(
    heads: range | None, layers: range | None, message: str
) -> None:
    with pytest.raises(GridInvalid, match=message):
        group(kv_heads=4, layers=4, head_groups=2, layer_groups=2).tiles_of(heads, layers)


def test_ranks_hold_their_heads() -> None:
    grid = group(kv_heads=4, layers=4, head_groups=4, layer_groups=2)
    assert [held_tiles(grid, rank, 2) for rank in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert held_tiles(grid, 0, 1) == written_tiles(grid, 0, 1) == tuple(range(8))
    assert [held_tiles(grid, rank, 2, layers=range(2, 4)) for rank in range(2)] == [(1, 3), (5, 7)]


def test_fewer_heads_than_ranks_share_them_and_take_turns_to_write() -> None:
    grid = group(kv_heads=2, layers=2, head_groups=2, layer_groups=1)
    assert [held_tiles(grid, rank, 4) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [written_tiles(grid, rank, 4) for rank in range(4)] == [(0,), (), (1,), ()]
    assert [written_tiles(grid, rank, 4, turn=5) for rank in range(4)] == [(), (0,), (), (1,)]


@pytest.mark.parametrize("grid", [group(kv_heads=0), Schema.opaque().groups[0]], ids=["no head axis", "opaque"])
def test_what_is_replicated_has_one_writer(grid: Group) -> None:
    every = tuple(range(grid.tiles))
    assert [held_tiles(grid, rank, 3) for rank in range(3)] == [every] * 3
    for turn in range(6):
        assert [written_tiles(grid, rank, 3, turn=turn) for rank in range(3)] == [
            every if rank == turn % 3 else () for rank in range(3)
        ]
    with pytest.raises(GridInvalid, match="no head axis"):
        grid.tiles_of(heads=range(1))


def test_ranks_that_do_not_tile_the_grid_are_told_what_to_change() -> None:
    with pytest.raises(GridInvalid, match=r"8 KV heads do not divide among 3 ranks.*topology"):
        held_tiles(group(), 0, 3)
    with pytest.raises(GridInvalid, match=r"rank 1 of 4: heads 2 to 3 end inside .* more head_groups than 2"):
        written_tiles(group(head_groups=2), 1, 4)
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InvalidArgument):
            held_tiles(group(), rank, ranks)


@given(st.data())
def test_together_the_ranks_of_any_split_write_each_tile_once(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 6))
    heads = data.draw(st.integers(0, 8))
    grid = group(heads, layers, data.draw(st.integers(1, max(1, heads))), data.draw(st.integers(1, layers)))
    ranks, turn = data.draw(st.integers(1, 16)), data.draw(st.integers(0, 40))
    stages = [grid.layer_range(row) for row in range(grid.layer_groups)] if data.draw(st.booleans()) else [None]
    try:
        held = [held_tiles(grid, rank, ranks, layers=stage) for stage in stages for rank in range(ranks)]
    except GridInvalid:
        assume(False)
    written = [written_tiles(grid, rank, ranks, layers=stage, turn=turn) for stage in stages for rank in range(ranks)]
    assert sorted(tile for tiles in written for tile in tiles) == list(range(grid.tiles))
    assert all(set(some) <= set(every) for some, every in zip(written, held, strict=True))
    assert all(held)
    if heads and grid.head_groups == heads and (heads % ranks == 0 or ranks % heads == 0):
        size = max(1, heads // ranks) * grid.layer_groups // len(stages)
        assert all(len(tiles) == size for tiles in held)
