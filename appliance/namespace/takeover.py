"""Space as a start takes it over: extents are given to the blocks that metadata says own them, by the million."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from forebay.appliance.dataplane.extents import Adoption
from forebay.appliance.namespace.space import Space

__all__ = ["Takeover"]

_Column = npt.NDArray[np.unsignedinteger]


class Takeover:
    """Extents of a space in which nothing is owned yet but what is in quarantine; nothing else changes it meanwhile.

    The space learns of them by `finish`, and of nothing if that is never called.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._adoption = Adoption(list(space.maps.values()), space.region_bytes)
        self._owners = np.array([space.volumes[v].namespace for v in sorted(space.maps)], np.uint32)
        self._scoped: Counter[tuple[int, int]] = Counter()

    def own(
        self, namespaces: _Column, scopes: _Column, volumes: _Column, offsets: _Column, lengths: _Column
    ) -> npt.NDArray[np.bool_]:
        """Give extents to blocks of these; which of them could be.

        No other block, here or earlier, has such an extent; its volume is of the block's namespace.
        """
        maps, mine = self._adoption.maps_of(volumes)
        if mine.any():
            mine &= self._owners.take(maps) == namespaces
        mine &= self._adoption.take(maps, offsets, lengths, mine)
        if mine.any():
            maps, scopes, lengths = maps[mine], scopes[mine], lengths[mine]
            known = np.unique(scopes)
            sums = np.bincount(maps * len(known) + np.searchsorted(known, scopes), weights=lengths)
            for at in np.flatnonzero(sums).tolist():
                where, scope = divmod(at, len(known))
                self._scoped[int(self._owners[where]), int(known[scope])] += int(sums[at])
        return mine

    def finish(self) -> None:
        """Let the space know."""
        self._adoption.finish()
        self._space.add_scoped(self._scoped)
