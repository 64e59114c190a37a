"""What the drivers of both targets have in common: volumes in subsystems, the hosts let in, and who sees which volume.

Every call first asks what the target has and adds or takes away the difference, so that replaying desired state is the
same code whether the target knows all of it, part of it or (after its restart) nothing.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from forebay.appliance.dataplane.host_keys import HostKeys
from forebay.appliance.dataplane.interface import EndpointInfo, HostView, Target, VolumesFailed, VolumeSpec
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.subsystems import Subsystems, hosts_of, namespace_of
from forebay.appliance.shared_lock import SharedLock
from forebay.errors import AlreadyExists, ForebayError, NotFound, Unavailable
from forebay.ids import HostIdentity, VolumeId

__all__ = ["Bdev", "NvmfTarget"]

_REPLAY_MS = 100
"""When to ask again for what a target that was started anew does not know yet."""
_ABREAST = 128
"""Hosts that are looked after side by side: what a target answers at fixed times it answers for many at once."""


@dataclass(frozen=True, slots=True)
class Bdev:
    """What a target has open for a volume: ``path`` as in the volume's spec, ``mode`` as the driver wants it."""

    path: str
    mode: str = ""
    stays: bool = False
    """It is there whether it is served or not."""


@dataclass(slots=True)
class _Look:
    """A subsystem as the target showed it, and as it was changed from here since."""

    endpoint: EndpointInfo | None
    hosts: set[str]
    seen_by: dict[int, set[str]]
    """NSID to the hosts that see it."""


class NvmfTarget(Target):
    """A target behind a control socket that speaks SPDK's RPC: one subsystem per tenant, one bdev per volume.

    Calls about different hosts run side by side, in one request's time; what changes a subsystem runs alone.
    """

    def __init__(self, rpc: JsonRpcClient, subsystems: Subsystems, keys: HostKeys) -> None:
        self._rpc = rpc
        self._subsystems = subsystems
        self._keys = keys
        self._volumes: dict[VolumeId, VolumeSpec] = {}
        self._own_hosts: frozenset[str] = frozenset()  # hosts that are of the driver itself
        self._looks: dict[str, _Look] = {}
        # Each change is a look followed by an act: of hosts, one at a time of each; of subsystems, one at a time.
        self._shape = SharedLock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- what differs between targets ---------------------------------------------------------------------------------

    @abstractmethod
    async def _bdevs(self) -> dict[str, Bdev]:
        """All that the target has open for this node's volumes, by name."""

    @abstractmethod
    async def _add_bdev(self, spec: VolumeSpec) -> None:
        """Open a volume, or find that it is open. Raises `VolumeMismatch` if another is under its name."""

    @abstractmethod
    async def _delete_bdev(self, name: str) -> None:
        """Close a volume; one that is not open is no error."""

    @abstractmethod
    async def _shut_out(self, nqn: str, name: str, *, allowed: bool) -> None:
        """Take a host's right to connect to a subsystem, if it has it, and tear down its controllers there.

        When this returns none of its commands can run; a host is of one tenant.
        """

    def _bdev_name(self, spec: VolumeSpec) -> str:
        return spec.bdev

    def _mode(self, spec: VolumeSpec) -> str:
        return ""

    def _holds(self, spec: VolumeSpec) -> bool:
        """Whether the driver itself has what it needs of a volume that the target serves."""
        return True

    # --- volumes ------------------------------------------------------------------------------------------------------

    def subsystem_nqn(self, tenant: str) -> str:
        """The tenant's subsystem."""
        return self._subsystems.nqn(tenant)

    async def add_volume(self, spec: VolumeSpec) -> None:
        async with self._shape.alone():
            await self._add_bdev(spec)
            await self._add_namespace(spec)

    async def _add_namespace(self, spec: VolumeSpec) -> None:
        """Have an open volume in its tenant's subsystem."""
        nqn, bdev = self.subsystem_nqn(spec.tenant), self._bdev_name(spec)
        subsystem = await self._subsystems.ensure(nqn)
        namespace = namespace_of(subsystem, spec.nsid)
        if namespace is None:
            wanted = {
                "bdev_name": bdev,
                "nsid": spec.nsid,
                "nguid": UUID(spec.nguid).hex.upper(),  # SPDK takes and shows 32 hex digits
                "uuid": str(UUID(spec.nguid)),
                "no_auto_visible": True,
            }
            await self._rpc.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": wanted})
        elif namespace["bdev_name"] != bdev:
            raise AlreadyExists(f"NSID {spec.nsid} of {nqn} is {namespace['bdev_name']}, not {bdev}", field="nsid")
        self._volumes[spec.volume] = spec
        self._looks.pop(nqn, None)

    async def remove_volume(self, spec: VolumeSpec) -> None:
        nqn = self.subsystem_nqn(spec.tenant)
        async with self._shape.alone():
            subsystem = await self._subsystems.one(nqn)
            if subsystem is not None and namespace_of(subsystem, spec.nsid) is not None:
                await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": spec.nsid})
            await self._delete_bdev(self._bdev_name(spec))
            self._volumes.pop(spec.volume, None)
            self._looks.pop(nqn, None)
            await self._subsystems.drop_if_empty(nqn, self._own_hosts)

    async def endpoint(self, tenant: str) -> EndpointInfo:
        nqn = self.subsystem_nqn(tenant)
        if (known := self._looks.get(nqn)) is not None and known.endpoint is not None:
            return known.endpoint
        found = self._subsystems.endpoint_of(await self._subsystems.one(nqn))
        if found is None:
            mine = [spec for spec in self._volumes.values() if spec.tenant == tenant]
            raise self._missing(NotFound(f"the target has no subsystem for tenant {tenant}", field="tenant"), mine)
        return found

    async def endpoints(self, tenant: str) -> list[EndpointInfo]:
        first = await self.endpoint(tenant)
        others = self._subsystems.listeners
        return [first, *(EndpointInfo(o.transport.lower(), o.address, o.port, first.subsystem_nqn) for o in others)]

    def _missing(self, error: NotFound, volumes: Sequence[VolumeSpec]) -> ForebayError:
        """What it means that volumes are not found: the target had those that it was given, and was started anew since.

        Then they are back as soon as the supervisor has replayed the state, and whoever asks again gets them.
        """
        if volumes and all(self._volumes.get(spec.volume) == spec for spec in volumes):
            text = f"the target was started anew and does not serve all of its volumes yet: {error.message}"
            return Unavailable(text, field="target", retry_after_ms=_REPLAY_MS)
        return error

    # --- hosts --------------------------------------------------------------------------------------------------------

    async def add_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        nqn = self.subsystem_nqn(tenant)
        async with self._turn(host.nqn):
            known = host.nqn in self._keys
            self._keys.learn(host)
            try:
                await self._by_look(nqn, partial(self._admit, nqn, host.nqn, volumes), make=True)
            except BaseException:
                if not known:
                    self._keys.unlearn(host.nqn)
                raise

    async def _admit(self, nqn: str, name: str, volumes: Sequence[VolumeSpec], look: _Look) -> None:
        """Have a host in a subsystem that sees these volumes there and no others."""
        wanted = {spec.nsid for spec in volumes}
        shown = [partial(self._show, nqn, look, nsid, name, nsid in wanted) for nsid in look.seen_by]
        await _all([partial(self._let_in, nqn, look, name), *shown])
        if missing := wanted - look.seen_by.keys():
            error = NotFound(f"{nqn} has no NSID {min(missing)}: add its volume first", field="volumes")
            raise self._missing(error, volumes)

    async def _let_in(self, nqn: str, look: _Look, name: str) -> None:
        if name not in look.hosts:
            await self._keys.allow(nqn, name)
            look.hosts.add(name)

    async def _show(self, nqn: str, look: _Look, nsid: int, name: str, wanted: bool) -> None:
        """Let a host see a namespace, or not."""
        seen_by = look.seen_by[nsid]
        values = {"nqn": nqn, "nsid": nsid, "host": name}
        if wanted and name not in seen_by:
            await self._rpc.call("nvmf_ns_add_host", values)
            seen_by.add(name)
        elif not wanted and name in seen_by:
            await self._rpc.call("nvmf_ns_remove_host", values)
            seen_by.discard(name)

    async def remove_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        nqn = self.subsystem_nqn(tenant)
        async with self._turn(host.nqn):
            await self._by_look(nqn, partial(self._dismiss, nqn, host.nqn))
            await self._keys.forget(host.nqn)
        look = self._looks.get(nqn)
        if look is None or not (look.hosts or look.seen_by):
            async with self._shape.alone():
                self._looks.pop(nqn, None)
                await self._subsystems.drop_if_empty(nqn, self._own_hosts)

    async def _dismiss(self, nqn: str, name: str, look: _Look) -> None:
        """Have a host neither in a subsystem nor in sight of anything there, and no command of it under way."""
        hidden = [partial(self._show, nqn, look, nsid, name, False) for nsid in look.seen_by]
        await _all([partial(self._shut_out, nqn, name, allowed=name in look.hosts), *hidden])
        look.hosts.discard(name)

    async def _dismiss_all(
        self, subsystem: dict[str, Any], *, beside: Collection[str] = (), keep: Collection[str] = ()
    ) -> list[str]:
        """Dismiss all hosts that a subsystem as it was shown knows, and those ``beside``; who they were."""
        look = _seen(subsystem)
        names = sorted(look.hosts.union(beside, *look.seen_by.values()).difference(keep))
        await _all([partial(self._dismiss, subsystem["nqn"], name, look) for name in names])
        return names

    def _turn(self, name: str) -> asyncio.Lock:
        """One call about a host at a time, in the order of asking; there for as long as anybody has it."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def _by_look(self, nqn: str, act: Callable[[_Look], Awaitable[None]], *, make: bool = False) -> None:
        """Act by what is known of a subsystem, and once more by a fresh look if that fails: it may be another target's.

        Nobody else changes subsystems, and a look costs by the number of hosts: with one for each host that comes and
        each heartbeat, thousands of sessions would do nothing else. With ``make`` there is one in the end.
        """
        last = False
        while True:
            async with self._shape.together():
                look = self._looks.get(nqn)
                if look is not None:
                    try:
                        return await act(look)
                    except BaseException as error:  # what of it was done, nobody knows
                        if self._looks.get(nqn) is look:
                            del self._looks[nqn]
                        again = isinstance(error, ForebayError) and not isinstance(error, Unavailable)
                        if last or not again:
                            raise
                        last = True
            async with self._shape.alone():
                if nqn not in self._looks:
                    look, last = await self._look(nqn, make=make), True
                    if nqn not in self._looks:
                        return await act(look)

    async def _look(self, nqn: str, *, make: bool = False) -> _Look:
        """A look at a subsystem, kept if it listens where it should; of one that is not there nothing is seen."""
        subsystem = await (self._subsystems.ensure(nqn) if make else self._subsystems.one(nqn))
        look = _seen(subsystem or {"namespaces": ()}, self._subsystems.endpoint_of(subsystem))
        if look.endpoint is not None:
            self._looks[nqn] = look
        return look

    # --- all of it ----------------------------------------------------------------------------------------------------

    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        """See `Target.reconcile`. A volume that cannot be served keeps no other from being: errors come last."""
        # One look at everything, then calls for the differences alone: thousands of hosts cost what few do.
        wanted = {(self.subsystem_nqn(spec.tenant), spec.nsid): spec for spec in volumes}
        views = {(self.subsystem_nqn(view.tenant), view.host.nqn): view for view in hosts}
        async with self._shape.alone():
            self._looks.clear()
            reported = [one for one in await self._subsystems.look_at() if "namespaces" in one]
            subsystems = {one["nqn"]: one for one in reported if self._subsystems.is_mine(one["nqn"])}
            bdevs = await self._bdevs()
            for nqn, subsystem in subsystems.items():
                for one in subsystem["namespaces"]:
                    spec, there = wanted.get((nqn, one["nsid"])), bdevs.get(one["bdev_name"])
                    one["wanted"] = (
                        spec is not None
                        and there is not None
                        and (one["bdev_name"], there.path) == (self._bdev_name(spec), spec.path)
                    )
            found = await self._take_away(subsystems, views)
            await self._keys.forget_all_but({view.host.nqn for view in hosts} | self._own_hosts)
            kept = {one["bdev_name"] for each in subsystems.values() for one in each["namespaces"] if one["wanted"]}
            others = {
                one["bdev_name"] for each in reported if each["nqn"] not in subsystems for one in each["namespaces"]
            }
            for name in sorted(name for name in bdevs.keys() - kept - others if not bdevs[name].stays):
                found.append(f"{bdevs[name].path} is open and is not served")
                await self._delete_bdev(name)
            failed: dict[VolumeId, ForebayError] = {}  # that cannot be opened, and
            unserved: dict[VolumeId, ForebayError] = {}  # that are open, but their subsystems are not as they should be
            for (nqn, _nsid), spec in wanted.items():
                self._volumes[spec.volume] = spec
                listens = self._subsystems.listens(subsystems.get(nqn, {}))
                name = self._bdev_name(spec)
                served = name in kept and listens and bdevs[name].mode == self._mode(spec)
                if not served or not self._holds(spec):
                    found.append(f"volume {spec.volume} is not served as it should be")
                    errors = failed
                    try:
                        await self._add_bdev(spec)
                        errors = unserved
                        await self._add_namespace(spec)
                    except Unavailable:
                        raise
                    except ForebayError as error:
                        errors[spec.volume] = error
            await self._admit_all(subsystems, views, failed.keys() | unserved.keys(), found)
        if failed:
            raise VolumesFailed(failed)
        if unserved:
            raise next(iter(unserved.values()))
        return found

    async def _admit_all(
        self,
        subsystems: dict[str, dict[str, Any]],
        views: dict[tuple[str, str], HostView],
        failed: Collection[VolumeId],
        found: list[str],
    ) -> None:
        """Hosts that do not see what they should, of the volumes that are served."""
        allowed = {(nqn, name) for nqn, subsystem in subsystems.items() for name in hosts_of(subsystem)}
        sees: dict[tuple[str, str], set[int]] = {}
        for nqn, subsystem in subsystems.items():
            for one in subsystem["namespaces"]:
                for name in hosts_of(one) if one["wanted"] else ():
                    sees.setdefault((nqn, name), set()).add(one["nsid"])
        late = []
        for (nqn, name), view in views.items():
            served = tuple(spec for spec in view.volumes if spec.volume not in failed)
            if (nqn, name) not in allowed or sees.get((nqn, name), set()) != {spec.nsid for spec in served}:
                found.append(f"host {name} does not see what it should")
                self._keys.learn(view.host)
                look = self._looks.get(nqn) or await self._look(nqn, make=True)
                late.append(partial(self._admit, nqn, name, served, look))
        try:
            await _all(late)
        except BaseException:
            self._looks.clear()
            raise

    async def _take_away(
        self, subsystems: dict[str, dict[str, Any]], views: dict[tuple[str, str], HostView]
    ) -> list[str]:
        """Hosts without a view, then namespaces that are not ``wanted``; says which there were."""
        found: list[str] = []
        for nqn, subsystem in subsystems.items():
            keep = self._own_hosts.union(name for where, name in views if where == nqn)
            gone = await self._dismiss_all(subsystem, keep=keep)
            found += [f"host {name} is not of a live session" for name in gone]
            await _all([partial(self._keys.forget, name) for name in gone])
            for one in subsystem["namespaces"]:
                if not one["wanted"]:
                    found.append(f"NSID {one['nsid']} of {nqn} is not a volume of this node")
                    await self._rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": one["nsid"]})
            if not any(one["wanted"] for one in subsystem["namespaces"]):  # asking costs a look at all of the target
                await self._subsystems.drop_if_empty(nqn, self._own_hosts)
        return found

    async def leave(self) -> None:
        """Take all that is this node's away from a target that goes on for others."""
        await self.reconcile([], [])

    async def close(self) -> None:
        await self._rpc.close()


def _seen(subsystem: dict[str, Any], endpoint: EndpointInfo | None = None) -> _Look:
    return _Look(endpoint, hosts_of(subsystem), {one["nsid"]: hosts_of(one) for one in subsystem["namespaces"]})


async def _all(acts: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Let all of these end, many at a time, unless one fails: then raise that, and begin no more."""
    for at in range(0, len(acts), _ABREAST):
        for error in await asyncio.gather(*(act() for act in acts[at : at + _ABREAST]), return_exceptions=True):
            if error is not None:
                raise error
