"""Runs an async test on a loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

__all__ = ["TIMEOUT_S", "on_loop", "steps", "until"]

TIMEOUT_S = 60.0
P = ParamSpec("P")


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test as a plain function that pytest can call; one that hangs fails."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


async def steps() -> None:
    """Let all that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Let others run until the condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)
    assert condition(), what
