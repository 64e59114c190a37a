"""How hosts of SPDK's target lose their connections: what is said to have ended is seen to have ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from forebay.appliance.dataplane.host_keys import HostKeys
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.errors import ProtocolError, TargetFailed, TargetRefused, Unavailable

__all__ = ["Teardown"]

_DRAIN_S = 5.0
"""How long commands of a host that is torn down may take to end before the caller is told that they did not."""
_AGAIN_S = 0.02


class Teardown:
    """Takes hosts the right to connect, and has their controllers go: one goes when its commands have ended."""

    def __init__(self, rpc: JsonRpcClient, keys: HostKeys) -> None:
        self._rpc = rpc
        self._keys = keys
        self._looking = asyncio.Lock()
        self._next: dict[str, asyncio.Task[set[str]]] = {}

    async def expel(self, nqn: str, name: str, *, allowed: bool) -> None:
        """See to it that a host has no controller in a subsystem, and gets none; ``allowed`` says whether it could.

        Raises `Unavailable` if they do not end, and then nobody knows what their commands still write.
        """
        end_s = asyncio.get_running_loop().time() + _DRAIN_S
        while True:
            if allowed:
                values = {"nqn": nqn, "host": name, "timeout_ms": int(_DRAIN_S * 1000)}
                with suppress(TargetFailed):  # they had no end in that time: the controllers say so
                    await self._rpc.call("nvmf_subsystem_remove_host", values)
            if name not in await self.connected(nqn):
                return
            if asyncio.get_running_loop().time() >= end_s:
                raise Unavailable(f"commands of host {name} do not end", field="target")
            await asyncio.sleep(_AGAIN_S)
            if not allowed:  # it was connecting meanwhile, or lost its right without its connections
                await self._keys.allow(nqn, name, stranger=True)
            allowed = True

    async def connected(self, nqn: str) -> set[str]:
        """Hosts that have a controller in a subsystem.

        One look at a time: hosts that go together share the next, which begins after them.
        """
        look = self._next.get(nqn)
        if look is None:
            look = self._next[nqn] = asyncio.ensure_future(self._look(nqn))
            # whoever asked may be gone by then: that it failed is no news to anybody else
            look.add_done_callback(lambda one: None if one.cancelled() else one.exception())
        return await asyncio.shield(look)

    async def _look(self, nqn: str) -> set[str]:
        async with self._looking:
            del self._next[nqn]  # who comes from here on needs a later one
            try:
                return {one["hostnqn"] for one in await self._rpc.call("nvmf_subsystem_get_controllers", {"nqn": nqn})}
            except TargetRefused:
                return set()  # there is no such subsystem
            except (KeyError, TypeError) as error:
                raise ProtocolError(f"nvmf_subsystem_get_controllers: {error!r} in the answer") from error
