"""Which tiles of which blocks a call is about, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import GridInvalid, InvalidArgument
from forebay.ids import BlockKey, align_up
from forebay.schema import Group, Schema, TileLayout

__all__ = ["check_tiles", "group_of", "runs", "selected_bytes"]


def group_of(schema: Schema, block: BlockKey) -> Group:
    """The group of a block. Raises `InvalidArgument`."""
    if not 0 <= block.group < len(schema.groups):
        raise InvalidArgument(
            f"group {block.group} of a schema with {len(schema.groups)}", field="group", limit=len(schema.groups) - 1
        )
    return schema.groups[block.group]


def check_tiles(group: Group, tiles: Sequence[int] | None) -> None:
    """Refuse tile numbers that are not of the grid, or stand twice. Raises `GridInvalid`."""
    if tiles is None:
        return
    if not tiles:
        raise GridInvalid("no tiles are asked for", field="tiles", limit="at least one, or None for all")
    seen: set[int] = set()
    for tile in tiles:
        if not 0 <= tile < group.tiles or tile in seen:
            raise GridInvalid(
                f"tile {tile} is not one of the grid's {group.tiles}, or stands twice", field="tiles", limit=group.tiles
            )
        seen.add(tile)


def selected_bytes(layout: TileLayout, tiles: Sequence[int] | None) -> int:
    """Exact bytes of the tiles, back to back."""
    return layout.value_bytes if tiles is None else sum(layout.lengths[tile] for tile in tiles)


def runs(layout: TileLayout, tiles: Sequence[int]) -> list[list[int]]:
    """``tiles`` cut where they stop following one another on media: each run is one range of the extent."""
    out: list[list[int]] = []
    for tile in tiles:
        if out and out[-1][-1] + 1 == tile and layout.offsets[tile] == _end(layout, out[-1][-1]):
            out[-1].append(tile)
        else:
            out.append([tile])
    return out


def _end(layout: TileLayout, tile: int) -> int:
    return layout.offsets[tile] + align_up(layout.lengths[tile])
