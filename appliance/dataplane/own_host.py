"""The node as a host of its own target: the way to the bytes of bdevs that no kernel can reach.

Where a bdev is served, the node is one more host of that subsystem. Where it is not, the bdev is for that time in a
subsystem of the node's own, one bdev at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

from forebay.appliance.dataplane.host_keys import HostKeys
from forebay.appliance.dataplane.interface import EndpointInfo
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.node_host import NodeHost
from forebay.appliance.dataplane.spdk_subsystems import SpdkSubsystems
from forebay.appliance.dataplane.subsystems import TRANSPORT, hosts_of
from forebay.appliance.dataplane.teardown import Teardown
from forebay.appliance.shared_lock import SharedLock
from forebay.errors import ForebayError
from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret

__all__ = ["OwnHost"]


class OwnHost:
    """One identity for as long as the daemon runs. ``shape`` is the lock of who changes subsystems."""

    def __init__(
        self,
        rpc: JsonRpcClient,
        subsystems: SpdkSubsystems,
        keys: HostKeys,
        teardown: Teardown,
        *,
        shape: SharedLock,
        timeout_s: float,
        proven: bool,
    ) -> None:
        self._rpc = rpc
        self._subsystems = subsystems
        self._keys = keys
        self._teardown = teardown
        self._shape = shape
        self._timeout_s = timeout_s
        ident = str(uuid4())  # nobody else may know it: who does could connect as the node itself
        secrets = HostSecrets(Secret.generate(), Secret.generate()) if proven else None
        self.identity = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{ident}", ident, secrets)
        keys.learn(self.identity)
        self._unsettled: set[str] = set()
        self._private_use = asyncio.Lock()  # taken before `shape`

    @asynccontextmanager
    async def io(self, bdev: str) -> AsyncIterator[NodeHost]:
        """Reads and writes of a bdev, where it is served, or else in the node's own subsystem."""
        async with self._shape.alone():
            found = await self._let_in(bdev)
        if found is not None:
            async with self._connected(*found) as host:
                yield host
            return
        async with self._private_use:
            async with self._shape.alone():
                found = await self._let_in(bdev) or await self._open_private(bdev)
            nqn, nsid = found
            try:
                async with self._connected(nqn, nsid) as host:
                    yield host
            finally:
                if nqn == self._subsystems.private:
                    with suppress(ForebayError):  # what stays there is cleared before anything needs its bdev
                        await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid})

    @asynccontextmanager
    async def _connected(self, nqn: str, nsid: int) -> AsyncIterator[NodeHost]:
        where = EndpointInfo(TRANSPORT.lower(), self._subsystems.address, self._subsystems.port, nqn)
        try:
            async with NodeHost.connected(where, self.identity, nsid, self._timeout_s) as host:
                yield host
        except BaseException:
            self._unsettled.add(nqn)  # a deallocate may still be under way: it has to end before anything else begins
            raise

    async def _let_in(self, bdev: str) -> tuple[str, int] | None:
        """Where a bdev is served, and the node itself may use it; None if it is not served."""
        found = await self._subsystems.served_at(bdev)
        if found is None:
            return None
        nqn, nsid = found
        if nqn in self._unsettled:
            await self._teardown.expel(nqn, self.identity.nqn, allowed=True)
            self._unsettled.discard(nqn)
        subsystem = await self._subsystems.one(nqn)
        if subsystem is None or self.identity.nqn not in hosts_of(subsystem):
            await self._keys.allow(nqn, self.identity.nqn)
        await self._rpc.call("nvmf_ns_add_host", {"nqn": nqn, "nsid": nsid, "host": self.identity.nqn})
        return found

    async def _open_private(self, bdev: str) -> tuple[str, int]:
        """Have a bdev in the node's own subsystem, as where it is served."""
        nqn = self._subsystems.private
        await self.clear(bdev)
        if self.identity.nqn not in hosts_of(await self._subsystems.ensure(nqn)):
            await self._keys.allow(nqn, self.identity.nqn)
        wanted = {"bdev_name": bdev, "no_auto_visible": True}
        nsid = int(await self._rpc.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": wanted}))
        await self._rpc.call("nvmf_ns_add_host", {"nqn": nqn, "nsid": nsid, "host": self.identity.nqn})
        return nqn, nsid

    async def leave_alone(self, bdev: str) -> None:
        """Have a bdev that is about to be served not in the node's own subsystem, unless that is in use now."""
        if not self._private_use.locked():
            await self.clear(bdev)

    async def clear(self, bdev: str | None = None) -> None:
        """End what an earlier daemon, or a call that failed, left of a bdev, or at all, in the node's own subsystem.

        A bdev that is there cannot be served, and a command that is under way there would arrive late.
        """
        nqn = self._subsystems.private
        subsystem = await self._subsystems.one(nqn)
        if subsystem is None:
            return
        left = [one["nsid"] for one in subsystem["namespaces"] if bdev in (None, one["bdev_name"])]
        if bdev is not None and not left:
            return  # another may be stuck there: its drive does not answer
        allowed = hosts_of(subsystem)
        for name in sorted(allowed | await self._teardown.connected(nqn)):
            await self._teardown.expel(nqn, name, allowed=name in allowed)
        for nsid in left:
            await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid})

    async def leave(self) -> None:
        """Take the node's own subsystem away, and what the target knows of this host."""
        await self.clear()
        await self._subsystems.drop_if_empty(self._subsystems.private)
        await self._keys.forget(self.identity.nqn)
