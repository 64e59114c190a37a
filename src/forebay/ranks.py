"""Which tiles of a block each rank of a tensor-parallel group holds, and which of them it writes.

A rank reads what it holds. It writes that too, except for tiles that several ranks hold alike: replicated groups (no
head axis, as in MLA) and models with fewer KV heads than ranks. Those have one writer, so that no tile is written
twice; ``turn``, any number that all ranks know (the block's position, say), passes the work around.

Pipeline stages are ranges of ``layers``, positions in the group's list of layers: the ranks of one stage call with the
same range.
"""

from __future__ import annotations

from forebay.errors import GridInvalid, InvalidArgument
from forebay.schema import Group

__all__ = ["held_tiles", "written_tiles"]


def held_tiles(group: Group, rank: int, ranks: int, *, layers: range | None = None) -> tuple[int, ...]:
    """The tiles whose heads (and layers) ``rank`` of ``ranks`` computes and attends to, ascending.

    Raises `GridInvalid` where the ranks' heads do not tile the grid, saying what to change.
    """
    heads, _ = _share(group, rank, ranks)
    try:
        return group.tiles_of(heads, layers)
    except GridInvalid as e:
        raise GridInvalid(f"rank {rank} of {ranks}: {e.message}", field=e.field, limit=e.limit) from None


def written_tiles(
    group: Group, rank: int, ranks: int, *, layers: range | None = None, turn: int = 0
) -> tuple[int, ...]:
    """The tiles that ``rank`` of ``ranks`` writes, ascending; none if another's turn it is. Raises as `held_tiles`.

    Over all ranks (and stages) these are the tiles of the grid, each once.
    """
    held = held_tiles(group, rank, ranks, layers=layers)
    _, sharing = _share(group, rank, ranks)
    return held if rank % sharing == turn % sharing else ()


def _share(group: Group, rank: int, ranks: int) -> tuple[range | None, int]:
    """The heads that a rank holds (None: there is no head axis), and how many neighbouring ranks hold the same."""
    if not 0 <= rank < ranks:
        raise InvalidArgument(f"rank {rank} of {ranks}", field="rank", limit=f"0 to {ranks - 1}")
    heads = group.kv_heads
    if not heads:
        return None, ranks
    if heads % ranks == 0:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each), 1
    if ranks % heads == 0:
        sharing = ranks // heads
        return range(rank // sharing, rank // sharing + 1), sharing
    raise GridInvalid(
        f"{heads} KV heads do not divide among {ranks} ranks, nor ranks among heads: ranks that hold parts of heads "
        "need a schema of their own topology, whose blocks no other number of ranks can read",
        field="ranks",
        limit=f"a divisor or a multiple of {heads}",
    )
