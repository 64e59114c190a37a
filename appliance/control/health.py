"""Whether the node can serve: its target, its metadata, its drives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.problems import Affects, Problem, problems_of
from forebay.appliance.namespace.store import Op
from forebay.errors import ForebayError, Unavailable

__all__ = ["Health"]

_CHECK_S = 2.0
_FRESH_MS = 1_000


class Health:
    """Looks once a second at most, however often it is asked. ``target_serving`` is the supervisor's word."""

    def __init__(self, node: Node, target_serving: Callable[[], bool]) -> None:
        self._node = node
        self._target_serving = target_serving
        self._looking = asyncio.Lock()
        self._found: list[Problem] = []
        self._looked_ms: int | None = None

    async def problems(self) -> list[Problem]:
        """What is wrong; nothing when all is well."""
        async with self._looking:
            now_ms = self._node.engine.clock.monotonic_ms()
            if self._looked_ms is None or now_ms - self._looked_ms >= _FRESH_MS:
                checks = (_check("target", self._target, "all"), _check("metadata", self._metadata, "writes"))
                found = [problem for problem in await asyncio.gather(*checks) if problem is not None]
                known = problems_of(self._node.engine)
                self._found = found + [one for one in known if one not in found]
                self._looked_ms = self._node.engine.clock.monotonic_ms()
            return self._found

    async def _target(self) -> None:
        if not self._target_serving():
            raise Unavailable("no target runs that knows what it should serve")
        await self._node.engine.target.info()

    async def _metadata(self) -> None:
        engine = self._node.engine
        await engine.store.write([Op("meta", b"probe", engine.clock.wall_ms().to_bytes(8, "big"))])


async def _check(part: str, check: Callable[[], Awaitable[None]], affects: Affects) -> Problem | None:
    try:
        async with asyncio.timeout(_CHECK_S):
            await check()
    except ForebayError as error:
        return Problem(part, error.message, affects)
    except TimeoutError:
        return Problem(part, f"no answer within {_CHECK_S:g} s", affects)
    return None
