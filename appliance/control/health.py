"""Whether the node can serve: its target, its metadata, its volumes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forebay.appliance.dataplane.interface import VolumeSpec
from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.store import Op
from forebay.errors import ForebayError, Unavailable

__all__ = ["Health", "Problem"]

_CHECK_S = 2.0
_FRESH_MS = 1_000


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps the node from serving: ``target``, ``metadata`` or ``volumes``, and why."""

    part: str
    reason: str


class Health:
    """Looks once a second at most, however often it is asked. ``target_serving`` is the supervisor's word."""

    def __init__(self, node: Node, target_serving: Callable[[], bool]) -> None:
        self._node = node
        self._target_serving = target_serving
        self._looking = asyncio.Lock()
        self._found: list[Problem] = []
        self._looked_ms: int | None = None
        self._files: asyncio.Future[None] | None = None

    async def problems(self) -> list[Problem]:
        """What is wrong; nothing when the node is ready."""
        async with self._looking:
            now_ms = self._node.engine.clock.monotonic_ms()
            if self._looked_ms is None or now_ms - self._looked_ms >= _FRESH_MS:
                checks = {"target": self._target, "metadata": self._metadata, "volumes": self._volumes}
                found = await asyncio.gather(*(_check(part, check) for part, check in checks.items()))
                self._found = [problem for problem in found if problem is not None]
                self._looked_ms = self._node.engine.clock.monotonic_ms()
            return self._found

    async def _target(self) -> None:
        if not self._target_serving():
            raise Unavailable("no target runs that knows what it should serve")
        await self._node.engine.target.info()

    async def _metadata(self) -> None:
        engine = self._node.engine
        await engine.store.write([Op("meta", b"probe", engine.clock.wall_ms().to_bytes(8, "big"))])

    async def _volumes(self) -> None:
        specs = list(self._node.engine.space.specs.values())
        for tenant in sorted({spec.tenant for spec in specs}):
            await self._node.engine.target.endpoint(tenant)
        if self._files is None or self._files.done():  # a thread that waits for a drive is not given company
            self._files = asyncio.ensure_future(asyncio.to_thread(_look_at_files, specs))
        await asyncio.shield(self._files)


def _look_at_files(specs: Sequence[VolumeSpec]) -> None:
    for spec in specs:
        try:
            size_bytes = os.stat(spec.path).st_size
        except OSError as error:
            raise Unavailable(f"volume {spec.volume}: {error.strerror}") from error
        if size_bytes < spec.size_bytes:
            raise Unavailable(f"volume {spec.volume} has {size_bytes} of {spec.size_bytes} bytes")


async def _check(part: str, check: Callable[[], Awaitable[None]]) -> Problem | None:
    try:
        async with asyncio.timeout(_CHECK_S):
            await check()
    except ForebayError as error:
        return Problem(part, error.message)
    except TimeoutError:
        return Problem(part, f"no answer within {_CHECK_S:g} s")
    return None
