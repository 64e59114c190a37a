"""What makes written blocks stable: flushes of a volume that many commits share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forebay.appliance.dataplane.interface import Barrier, Target, VolumeSpec
from forebay.errors import NoSpace, TargetFailed
from forebay.ids import GrantId

__all__ = ["SharedSeal"]


class SharedSeal:
    """One seal of a volume runs at a time; those who come meanwhile share the next, which starts after them."""

    def __init__(self, target: Target, volume: VolumeSpec) -> None:
        self._target = target
        self.volume = volume
        self._grants: list[GrantId] = []
        self._next: asyncio.Task[Barrier] | None = None
        self._lock = asyncio.Lock()
        self._unanswered = False

    def take_unanswered(self) -> bool:
        """Whether the target was asked and did not answer since. It counts once."""
        found, self._unanswered = self._unanswered, False
        return found

    async def wait(self, grants: Sequence[GrantId]) -> Barrier:
        """Seal these with those of others; raises what the target raised, for all of them."""
        self._grants += grants
        if self._next is None:
            if not self._lock.locked():
                return await self._locked()
            self._next = asyncio.ensure_future(self._locked())
        return await asyncio.shield(self._next)

    async def _locked(self) -> Barrier:
        async with self._lock:
            self._next = None  # who comes from here on needs a later one
            grants, self._grants = self._grants, []
            self._unanswered = True
            try:
                found = await self._target.seal(grants, self.volume)
            except (NoSpace, TargetFailed):
                self._unanswered = False
                raise
            self._unanswered = False
            return found
