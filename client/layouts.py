"""Which tiles of which blocks a call is about, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forebay.errors import GridInvalid, InvalidArgument
from forebay.ids import BlockKey, align_up
from forebay.schema import Group, Schema, TileLayout

__all__ = ["Piece", "Run", "check_tiles", "group_of", "runs", "selected_bytes"]


class Piece(NamedTuple):
    """A part of a run: a tile and where it begins in the caller's buffer, or bytes of no tile."""

    tile: int | None
    start: int
    length_bytes: int


class Run(NamedTuple):
    """One range of an extent, from ``offset_bytes`` on."""

    offset_bytes: int
    pieces: list[Piece]


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


def runs(layout: TileLayout, tiles: Sequence[int] | None, *, bridge_bytes: int = 0) -> list[Run]:
    """The ranges of an extent that hold ``tiles`` (None: all), in the order of the extent, as few as can be.

    In the caller's buffer the tiles stand back to back in the order given, whatever that is. Ranges that lie no further
    apart than ``bridge_bytes`` are one, with what lies between as a piece of no tile, as padding is.
    """
    order = range(layout.tiles) if tiles is None else tiles
    starts: dict[int, int] = {}
    at = 0
    for tile in order:
        starts[tile] = at
        at += layout.lengths[tile]
    out: list[Run] = []
    end = -1
    for tile in order if tiles is None else sorted(tiles):
        offset_bytes, length_bytes = layout.offsets[tile], layout.lengths[tile]
        if out and offset_bytes - end <= bridge_bytes:
            pieces = out[-1].pieces
            if offset_bytes > end:
                pieces.append(Piece(None, 0, offset_bytes - end))
        else:
            pieces = []
            out.append(Run(offset_bytes, pieces))
        pieces.append(Piece(tile, starts[tile], length_bytes))
        padding = align_up(length_bytes) - length_bytes
        if padding:
            pieces.append(Piece(None, 0, padding))
        end = offset_bytes + length_bytes + padding
    return out
