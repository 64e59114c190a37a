"""What the parts of the namespace engine share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forebay.appliance.dataplane.interface import Target
from forebay.appliance.namespace.changes import ChangeLog
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import EvictionPolicy
from forebay.appliance.namespace.misses import Evictions, Places
from forebay.appliance.namespace.records import owner_key
from forebay.appliance.namespace.reserve import Reserve
from forebay.appliance.namespace.space import Space
from forebay.appliance.namespace.store import Store
from forebay.clock import Clock
from forebay.errors import MetadataCorrupt
from forebay.ids import StoredKey
from forebay.index import BlockIndex, Rows

__all__ = ["Engine"]


@dataclass(slots=True)
class Engine:
    """What every part of the namespace engine works with; passed in, so that all of it can be simulated."""

    store: Store
    target: Target
    space: Space
    index: BlockIndex
    changes: ChangeLog
    clock: Clock
    random: Callable[[int], bytes]
    policy: EvictionPolicy
    events: EventLog
    waiters: Waiters
    counters: Counter[str]
    reserve: Reserve = field(default_factory=Reserve)
    evictions: Evictions = field(default_factory=Evictions)
    places: Places = field(default_factory=Places)

    def away(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of ``rows``, some of them perhaps `ABSENT`, lie on a drive that is away."""
        if not self.space.away.size:
            return np.zeros(len(rows), bool)
        return (rows >= 0) & self.space.is_away(self.index.volume[rows])

    def keys_of(self, rows: Rows) -> list[StoredKey]:
        """Stored keys of visible rows, from the owners family. Raises `MetadataCorrupt`."""
        keys = [key for key in self.owners(rows) if key is not None]
        if len(keys) != len(rows):
            raise MetadataCorrupt("an extent of the index has no owner in metadata", field="owners")
        return keys

    def owners(self, rows: Rows) -> list[StoredKey | None]:
        """Whom metadata say the extents of visible rows belong to. Raises `MetadataCorrupt`, `Unavailable`."""
        places = zip(self.index.volume[rows].tolist(), self.index.offset[rows].tolist(), strict=True)
        found = self.store.multi_get("owners", [owner_key(v, o) for v, o in places])
        return [None if key is None else StoredKey(key) for key in found]
