"""A simulated target: media in memory, everything else as a real one promises it, and faults on demand.

For tests of the engine only. Hosts act on it through `SimHost`: their writes meet grants, teardown and visibility as
they would at a target, and a write can be held in flight while the engine does something else.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.appliance.dataplane.interface import (
    Barrier,
    Capabilities,
    EndpointInfo,
    HostView,
    IoStats,
    Target,
    TargetInfo,
    VolumesFailed,
    VolumeSpec,
    WriteGrant,
)
from forebay.checksum import crc32c
from forebay.errors import ConnectionLost, ForebayError, TargetFailed, TargetRefused, Unavailable, WriteFenced
from forebay.ids import LBA_BYTES, Extent, GrantId, HostIdentity, VolumeId

__all__ = ["Gate", "SimHost", "SimTarget", "SimWrite"]


@dataclass(slots=True)
class SimWrite:
    """A write command on its way: it touches media when `SimTarget.land` is called, if it still may."""

    host: HostIdentity
    controller: int
    volume: VolumeId
    offset_bytes: int
    data: bytes
    tag: int | None = None
    """None: whatever the grant says, for tests that are about something else."""
    landed: bool = False


class Gate:
    """Holds the next call of one method: `reached` is set when it is there, it goes on when `open` is set."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()


class SimHost:
    """An NVMe host with one controller at a time."""

    def __init__(self, target: SimTarget, tenant: str, host: HostIdentity) -> None:
        self.target = target
        self.tenant = tenant
        self.host = host
        self.controller = target.connect(tenant, host)

    def submit(self, volume: VolumeId, offset_bytes: int, data: bytes, tag: int | None = None) -> SimWrite:
        """Send a write and leave it in flight."""
        write = SimWrite(self.host, self.controller, volume, offset_bytes, data, tag)
        self.target.in_flight.append(write)
        return write

    def write(self, volume: VolumeId, offset_bytes: int, data: bytes, tag: int | None = None) -> None:
        """Write and wait. Raises `ConnectionLost` or `WriteFenced`."""
        self.target.land(self.submit(volume, offset_bytes, data, tag))

    def read(self, volume: VolumeId, offset_bytes: int, length_bytes: int) -> bytes:
        """Read. Raises `ConnectionLost`, or `TargetRefused` for a volume that this host may not see."""
        self.target.require_controller(self.host, self.controller)
        if volume not in self.target.hosts[self.tenant, self.host.nqn]:
            raise TargetRefused(f"{self.host.nqn} does not see volume {volume}")
        return self.target.read(volume, offset_bytes, length_bytes)


class SimTarget(Target):
    """See the module. ``attempts`` counts writes by host and outcome: ``written | fenced | lost``."""

    def __init__(self, *, fencing: bool = True, barrier: Barrier = Barrier.FLUSHED, seal: bool = True) -> None:
        self.capabilities = Capabilities(fencing=fencing, barrier=True, per_host_visibility=True, seal=seal)
        self.barrier_result = barrier
        self.media: dict[VolumeId, mmap.mmap] = {}
        self.strict = True
        """Two grants for one place are an error, as at a real target; without, a second mistake can be seen."""
        self.on_files = False
        """Keep media in the volumes' files, so that they survive the process as they would a daemon's end."""
        self.journal = False
        """Keep what each write replaces, so that `lose_power` can take it back."""
        self.unreadable: set[tuple[VolumeId, int]] = set()
        """Places that the drive does not give."""
        self.unopenable: dict[VolumeId, ForebayError] = {}
        """Volumes that a reconcile cannot open."""
        self.volumes: dict[VolumeId, VolumeSpec] = {}
        self.hosts: dict[tuple[str, str], set[VolumeId]] = defaultdict(set)
        self.allowed: set[tuple[str, str]] = set()
        self.grants: dict[GrantId, WriteGrant] = {}
        self.prepared: set[tuple[VolumeId, int]] = set()
        self.in_flight: list[SimWrite] = []
        self.attempts: dict[str, Counter[str]] = defaultdict(Counter)
        self.calls: Counter[str] = Counter()
        self.boot = 1
        self._controllers: dict[int, HostIdentity] = {}
        self._next_controller = 1
        self._unstable: list[tuple[VolumeId, int, bytes]] = []
        self._faults: dict[str, deque[tuple[Exception, bool]]] = defaultdict(deque)
        self._gates: dict[str, deque[Gate]] = defaultdict(deque)

    # ------------------------------------------------------------------------------------------------ for tests

    def fail(self, method: str, error: Exception | None = None, *, times: int = 1, done: bool = False) -> None:
        """Let the next calls of a method raise; with ``done`` after they did what they were asked (answer lost)."""
        for _ in range(times):
            self._faults[method].append((error or Unavailable("the simulated target does not answer"), done))

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()

    def hold(self, method: str) -> Gate:
        """Stop the next call of a method until the gate is opened."""
        gate = Gate()
        self._gates[method].append(gate)
        return gate

    def connect(self, tenant: str, host: HostIdentity) -> int:
        """A new controller. Raises `TargetRefused` for a host that is not allowed."""
        if (tenant, host.nqn) not in self.allowed:
            raise TargetRefused(f"{host.nqn} may not connect")
        number = self._next_controller
        self._next_controller += 1
        self._controllers[number] = host
        return number

    def require_controller(self, host: HostIdentity, controller: int) -> None:
        """Raise `ConnectionLost` if the controller was torn down."""
        if self._controllers.get(controller) != host:
            raise ConnectionLost("the controller was torn down")

    def controllers(self, host: HostIdentity) -> int:
        """Live controllers of a host."""
        return sum(one == host for one in self._controllers.values())

    def land(self, write: SimWrite) -> None:
        """Let a write reach media, if it may."""
        assert not write.landed
        write.landed = True
        if write in self.in_flight:
            self.in_flight.remove(write)
        outcomes = self.attempts[write.host.nqn]
        if self._controllers.get(write.controller) != write.host:
            outcomes["lost"] += 1
            raise ConnectionLost("the controller was torn down")
        if write.volume not in self.volumes:
            outcomes["lost"] += 1
            raise TargetRefused(f"volume {write.volume} is not served")
        if self.capabilities.fencing and not self._granted(write):
            outcomes["fenced"] += 1
            raise WriteFenced(f"no grant covers {len(write.data)} bytes at {write.offset_bytes}")
        outcomes["written"] += 1
        self._store(write.volume, write.offset_bytes, write.data)

    def read(self, volume: VolumeId, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes of media."""
        return self.media[volume][offset_bytes : offset_bytes + length_bytes]

    def corrupt(self, volume: VolumeId, offset_bytes: int) -> None:
        """Flip a bit on media."""
        self.media[volume][offset_bytes] ^= 1

    def lose_power(self) -> None:
        """Forget what was written since the last barrier of each volume, and restart."""
        for volume, offset_bytes, before in reversed(self._unstable):
            self.media[volume][offset_bytes : offset_bytes + len(before)] = before
        self._unstable.clear()
        self.restart()

    def restart(self) -> None:
        """What a restart of the process forgets: volumes served, hosts, controllers, grants."""
        self.boot += 1
        self.volumes.clear()
        self.hosts.clear()
        self.allowed.clear()
        self.grants.clear()
        self.in_flight.clear()
        self._controllers.clear()

    def _granted(self, write: SimWrite) -> bool:
        end = write.offset_bytes + len(write.data)
        return any(
            write.host in g.hosts
            and write.tag in (None, g.tag)
            and g.extent.volume == write.volume
            and g.extent.offset_bytes <= write.offset_bytes
            and end <= g.extent.end_bytes
            for g in self.grants.values()
        )

    def _store(self, volume: VolumeId, offset_bytes: int, data: bytes) -> None:
        assert offset_bytes % LBA_BYTES == 0 and len(data) % LBA_BYTES == 0
        if self.journal:
            self._unstable.append((volume, offset_bytes, self.read(volume, offset_bytes, len(data))))
        self.media[volume][offset_bytes : offset_bytes + len(data)] = data

    async def _enter(self, method: str) -> None:
        self.calls[method] += 1
        await asyncio.sleep(0)  # every call of a real target gives others the chance to run
        if self._gates[method]:
            gate = self._gates[method].popleft()
            gate.reached.set()
            await gate.open.wait()
        if self._faults[method] and not self._faults[method][0][1]:
            raise self._faults[method].popleft()[0]

    def _leave(self, method: str) -> None:
        if self._faults[method] and self._faults[method][0][1]:
            raise self._faults[method].popleft()[0]

    def _served(self, volume: VolumeSpec) -> None:
        if volume.volume not in self.volumes:
            raise TargetFailed(f"volume {volume.volume} is not served")

    # ------------------------------------------------------------------------------------------------ the interface

    async def info(self) -> TargetInfo:
        await self._enter("info")
        return TargetInfo("sim", "0", 0, str(self.boot), self.capabilities)

    async def able(self) -> Capabilities:
        return self.capabilities

    async def add_volume(self, spec: VolumeSpec) -> None:
        await self._enter("add_volume")
        self._serve(spec)
        self._leave("add_volume")

    def _serve(self, spec: VolumeSpec) -> None:
        self.volumes[spec.volume] = spec
        if spec.volume in self.media:
            return
        if self.on_files:
            with open(spec.path, "r+b") as file:
                self.media[spec.volume] = mmap.mmap(file.fileno(), spec.size_bytes)
        else:
            self.media[spec.volume] = mmap.mmap(-1, spec.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    async def remove_volume(self, spec: VolumeSpec) -> None:
        await self._enter("remove_volume")
        self.volumes.pop(spec.volume, None)
        for volumes in self.hosts.values():
            volumes.discard(spec.volume)
        self.media.pop(spec.volume, None)
        self.prepared = {p for p in self.prepared if p[0] != spec.volume}
        self._leave("remove_volume")

    async def endpoint(self, tenant: str) -> EndpointInfo:
        await self._enter("endpoint")
        return EndpointInfo("tcp", "127.0.0.1", 4420, f"nqn.sim:{tenant}")

    async def add_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        await self._enter("add_host")
        self.allowed.add((tenant, host.nqn))
        self.hosts[tenant, host.nqn] = {v.volume for v in volumes}
        self._leave("add_host")

    async def remove_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        await self._enter("remove_host")
        self.allowed.discard((tenant, host.nqn))
        self.hosts.pop((tenant, host.nqn), None)
        self._tear_down(host)
        self._leave("remove_host")

    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        await self._enter("reconcile")
        wanted = {v.volume: v for v in volumes}
        views = {(view.tenant, view.host.nqn): {v.volume for v in view.volumes} for view in hosts}
        found = [f"volume {v}" for v in self.volumes.keys() ^ wanted.keys()]
        found += [f"host {nqn}" for _, nqn in self.allowed ^ views.keys()]
        for _, nqn in self.allowed - views.keys():
            for number in [n for n, one in self._controllers.items() if one.nqn == nqn]:
                del self._controllers[number]
        self.volumes.clear()
        failed = {volume: error for volume, error in self.unopenable.items() if volume in wanted}
        for spec in volumes:
            if spec.volume not in failed:
                self._serve(spec)
        self.allowed = set(views)
        self.hosts = defaultdict(set, {host: seen - failed.keys() for host, seen in views.items()})
        self._leave("reconcile")
        if failed:
            raise VolumesFailed(failed)
        return found

    async def teardown_host(self, host: HostIdentity) -> None:
        await self._enter("teardown_host")
        self._tear_down(host)
        self._leave("teardown_host")

    async def teardown_all(self, incarnation: int) -> None:
        await self._enter("teardown_all")
        self._controllers.clear()
        self.grants.clear()
        self._leave("teardown_all")

    def _tear_down(self, host: HostIdentity) -> None:
        for number in [n for n, one in self._controllers.items() if one == host]:
            del self._controllers[number]

    async def grant(self, grants: Sequence[WriteGrant]) -> None:
        await self._enter("grant")
        if not self.capabilities.fencing:
            return
        for new in grants if self.strict else ():
            for old in self.grants.values():
                assert new == old or not _overlap(new.extent, old.extent), f"{new} overlaps {old}"
            self._served_extent(new.extent)
        for new in grants:
            self.grants[new.grant] = new
        self._leave("grant")

    def _served_extent(self, extent: Extent) -> None:
        if extent.volume not in self.volumes:
            raise TargetFailed(f"volume {extent.volume} is not served")

    async def revoke(self, grants: Sequence[GrantId]) -> None:
        await self._enter("revoke")
        for grant in grants:
            self.grants.pop(grant, None)
        self._leave("revoke")

    async def barrier(self, volume: VolumeSpec) -> Barrier:
        await self._enter("barrier")
        self._served(volume)
        if self.barrier_result is Barrier.FLUSHED:
            self._unstable = [one for one in self._unstable if one[0] != volume.volume]
        self._leave("barrier")
        return self.barrier_result

    async def seal(self, grants: Sequence[GrantId], volume: VolumeSpec) -> Barrier:
        if not self.capabilities.seal:
            return await super().seal(grants, volume)
        await self._enter("seal")
        found = await super().seal(grants, volume)  # so that it can be held, or fail, half-way
        self._leave("seal")
        return found

    async def prepare_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        await self._enter("prepare_region")
        self._served(volume)
        self._forget(volume.volume, offset_bytes, length_bytes)
        self.prepared.add((volume.volume, offset_bytes))
        self._leave("prepare_region")

    async def release_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        await self._enter("release_region")
        self._served(volume)
        self._forget(volume.volume, offset_bytes, length_bytes)
        self.prepared.discard((volume.volume, offset_bytes))
        self._leave("release_region")

    def _forget(self, volume: VolumeId, offset_bytes: int, length_bytes: int) -> None:
        # both read as zeros then: private memory that is not needed, and a file with a hole
        advice = mmap.MADV_REMOVE if self.on_files else mmap.MADV_DONTNEED
        self.media[volume].madvise(advice, offset_bytes, length_bytes)
        end_bytes = offset_bytes + length_bytes
        self._unstable = [u for u in self._unstable if u[0] != volume or not offset_bytes <= u[1] < end_bytes]

    async def checksums(self, volume: VolumeSpec, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        await self._enter("checksums")
        self._served(volume)
        for place in self.unreadable:
            if any(place[0] == volume.volume and o <= place[1] < o + n for o, n, _ in ranges):
                raise TargetFailed("EIO")
        found = [crc32c(self.read(volume.volume, offset, length), seed) for offset, length, seed in ranges]
        self._leave("checksums")
        return found

    async def io_stats(self) -> IoStats:
        await self._enter("io_stats")
        return IoStats(0, 0, 0, 0)

    async def close(self) -> None:
        pass


def _overlap(one: Extent, other: Extent) -> bool:
    return one.volume == other.volume and one.offset_bytes < other.end_bytes and other.offset_bytes < one.end_bytes
