"""`Teardown`: looks at who is connected are shared by those who ask together, and never older than the question."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.dataplane.host_keys import HostKeys
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.teardown import Teardown
from forebay.errors import Unavailable
from tests.sim.running import steps


class Answers(JsonRpcClient):
    """Answers each look with its number as the name of the host that is there, when it may."""

    def __init__(self) -> None:
        super().__init__(Path("none"))
        self.looks = 0
        self.may = asyncio.Semaphore(0)

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        assert method == "nvmf_subsystem_get_controllers"
        self.looks += 1
        number = self.looks
        await self.may.acquire()
        if number == 3:
            raise Unavailable("it has gone")
        return [{"hostnqn": f"{number}"}]


async def test_who_asks_while_another_looks_shares_the_next() -> None:
    rpc = Answers()
    teardown = Teardown(rpc, HostKeys(rpc, "node", None))
    first = asyncio.create_task(teardown.connected("a"))
    await steps()
    others = [asyncio.create_task(teardown.connected("a")) for _ in range(5)]
    await steps()
    others[0].cancel()  # whoever began it may go: it is for the others as well
    rpc.may.release()
    await steps()
    assert first.done() and await first == {"1"}, "of a look that began before they asked the others learn nothing"
    assert not any(one.done() for one in others[1:])
    rpc.may.release()
    assert [await one for one in others[1:]] == [{"2"}] * 4 and rpc.looks == 2
    rpc.may.release()
    with pytest.raises(Unavailable):
        await teardown.connected("a")
    rpc.may.release()
    assert await teardown.connected("a") == {"4"}


async def test_a_look_that_fails_when_all_who_asked_have_gone_is_no_error_of_the_daemons() -> None:
    rpc = Answers()
    rpc.looks = 2
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    teardown = Teardown(rpc, HostKeys(rpc, "node", None))
    asking = asyncio.create_task(teardown.connected("a"))
    await steps()
    asking.cancel()
    rpc.may.release()
    await steps()
    assert rpc.looks == 3 and asking.cancelled()
    del asking, teardown
    gc.collect()
    assert not told
