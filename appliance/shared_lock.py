"""A lock that many hold together or one alone: what touches one thing of many is not held up, what touches all is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["SharedLock"]


class SharedLock:
    """Had in the order of asking, so that neither kind keeps the other waiting for ever. Not reentrant."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()  # whoever wants it alone holds this, while waiting for the others to leave, too
        self._sharing = 0
        self._left = asyncio.Event()
        self._left.set()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Hold it with others who do the same."""
        async with self._next:
            self._sharing += 1
            self._left.clear()
        try:
            yield
        finally:
            self._sharing -= 1
            if not self._sharing:
                self._left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold it with nobody else."""
        async with self._next:
            await self._left.wait()
            yield
