"""`SharedLock`: who holds it, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from forebay.appliance.shared_lock import SharedLock
from tests.sim.running import steps


async def _in_order() -> None:
    lock, held, let_go = SharedLock(), set[str](), {name: asyncio.Event() for name in "abcd"}

    async def hold(name: str) -> None:
        async with lock.alone() if name == "c" else lock.together():
            held.add(name)
            await let_go[name].wait()
            held.remove(name)

    tasks = [asyncio.create_task(hold(name)) for name in "abcd"]
    for name, expected in (("", "ab"), ("a", "b"), ("b", "c"), ("c", "d"), ("d", "")):
        if name:
            let_go[name].set()
        await steps()
        assert held == set(expected)
    await asyncio.gather(*tasks)


async def _giving_up(first: str) -> None:
    lock = SharedLock()

    async def alone() -> str:
        async with lock.alone():
            return "had"

    async with getattr(lock, first)():
        waiting, other = asyncio.create_task(alone()), asyncio.create_task(alone())
        await steps()
        waiting.cancel()
        await steps()
        assert waiting.cancelled() and not other.done()
    assert await other == "had"
    async with lock.together(), lock.together():
        pass


async def _failing() -> None:
    lock = SharedLock()
    for way in (lock.together, lock.alone):
        with pytest.raises(ZeroDivisionError):
            async with way():
                raise ZeroDivisionError
    async with lock.alone():
        pass


def test_the_order_of_asking() -> None:
    """Two together, then one alone, then one of those who share, though it could have come in before."""
    asyncio.run(_in_order())


@pytest.mark.parametrize("first", ["together", "alone"])
def test_one_that_gives_up_waiting(first: str) -> None:
    """It leaves nothing behind: the next one gets the lock."""
    asyncio.run(_giving_up(first))


def test_an_error_lets_go() -> None:
    asyncio.run(_failing())
