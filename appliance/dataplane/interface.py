"""The target interface: what the daemon needs of an NVMe-oF target, whichever one it is.

Two drivers stand behind it (the embedded target, SPDK). They differ in `Capabilities`, and the daemon acts by those,
never by the driver's name. Every method is a coroutine bounded by the driver's own RPC time-out in wall-clock time and
raises `Unavailable` when the target does not answer; nothing here is ever retried silently, since the caller decides.
All calls are idempotent: `attach` replays desired state against a target that may know all, part or none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from forebay.errors import ForebayError, TargetFailed
from forebay.ids import Extent, GrantId, HostIdentity, VolumeId

__all__ = [
    "Barrier",
    "Capabilities",
    "EndpointInfo",
    "HostView",
    "IoStats",
    "Target",
    "TargetInfo",
    "VolumeErrors",
    "VolumeSpec",
    "VolumesFailed",
    "WriteGrant",
]


class Barrier(Enum):
    """What a barrier achieved: everything written before it is on stable media, or nobody knows."""

    FLUSHED = "flushed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do; every False has a documented way around it (design §6)."""

    fencing: bool
    """Refuses writes outside live grants, and a revoke returns only when none can still reach media."""
    barrier: bool
    """`Target.barrier` can answer `Barrier.FLUSHED`."""
    per_host_visibility: bool
    qos: bool = False
    seal: bool = False
    """`Target.seal` is one exchange; without, it is `Target.revoke` and then `Target.barrier`."""
    ordered: bool = False
    """What was given up, or an earlier incarnation asked for, clears no region and opens none for writing any more."""


@dataclass(frozen=True, slots=True)
class VolumeSpec:
    """Desired state of one volume at the target.

    ``bdev`` and ``nguid`` are stable for the volume's life; ``path`` is its file or device; ``size_bytes`` its maximum
    (its size for hosts); ``fenced`` as in design §2.
    """

    volume: VolumeId
    tenant: str
    nsid: int
    bdev: str
    path: str
    size_bytes: int
    nguid: str
    fenced: bool = True


@dataclass(frozen=True, slots=True)
class WriteGrant:
    """The right of some hosts, at least one, to write one extent. A grant's hosts never change.

    Their commands must carry ``tag`` (32 bits, as the reference tag), which no other Allocate of this incarnation has
    had: so a command of an earlier write that arrives late is refused, though its host may write there again.
    """

    grant: GrantId
    hosts: tuple[HostIdentity, ...]
    extent: Extent
    tag: int = 0


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """Where hosts of a tenant connect. ``reads_fenced``: reads that no lease covers are refused there."""

    transport: str
    address: str
    port: int
    subsystem_nqn: str
    reads_fenced: bool = False


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a running target says of itself. ``boot_id`` changes when its process does."""

    kind: str
    version: str
    pid: int
    boot_id: str
    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class HostView:
    """What one host may see: the tenant whose subsystem it connects to, and the volumes."""

    tenant: str
    host: HostIdentity
    volumes: tuple[VolumeSpec, ...]


@dataclass(frozen=True, slots=True)
class IoStats:
    """Counters of all volumes since the target started: bytes, and microseconds that commands took in all."""

    read_bytes: int
    read_us: int
    write_bytes: int
    write_us: int


@dataclass(frozen=True, slots=True)
class VolumeErrors:
    """Errors of a volume's drive since the target opened it; ``no_space`` are those of them that say it is full."""

    failed: int
    no_space: int = 0


class VolumesFailed(TargetFailed):
    """Volumes that a target cannot open, by what is wrong with each; everything else that was asked for was done."""

    def __init__(self, failed: Mapping[VolumeId, ForebayError]) -> None:
        text = "; ".join(f"volume {volume}: {error.message}" for volume, error in failed.items())
        super().__init__(f"the target cannot open {text}", field="volumes")
        self.failed = dict(failed)


class Target(ABC):
    """One running target process."""

    @abstractmethod
    async def info(self) -> TargetInfo:
        """Who answers; raises `Unavailable` when nobody does."""

    async def able(self) -> Capabilities:
        """What the process that answers now can do; drivers keep it, so that asking costs no call each time."""
        return (await self.info()).capabilities

    @abstractmethod
    async def add_volume(self, spec: VolumeSpec) -> None:
        """Serve a volume to the hosts of its tenant that `add_host` names; creates the tenant's subsystem if needed."""

    @abstractmethod
    async def remove_volume(self, spec: VolumeSpec) -> None:
        """Stop serving a volume; open commands on it have ended when this returns."""

    @abstractmethod
    async def endpoint(self, tenant: str) -> EndpointInfo:
        """Where the tenant's subsystem listens."""

    async def endpoints(self, tenant: str) -> list[EndpointInfo]:
        """All places where it listens, that of `endpoint` first."""
        return [await self.endpoint(tenant)]

    @abstractmethod
    async def add_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        """Let a host connect to the tenant's subsystem and see these volumes, and no others."""

    @abstractmethod
    async def remove_host(self, tenant: str, host: HostIdentity, volumes: Sequence[VolumeSpec]) -> None:
        """Take that back and tear down the host's controllers: when this returns none of its commands can run."""

    @abstractmethod
    async def reconcile(self, volumes: Sequence[VolumeSpec], hosts: Sequence[HostView]) -> list[str]:
        """Make the target serve exactly these volumes to exactly these hosts, and nothing else of this node's.

        Compares what it reports with what it should have and replays the difference: what is missing is added, what
        is there and not wanted is taken away. The differences found, a line each, empty when there were none.
        Raises `VolumesFailed` when all of that was done but for volumes that cannot be opened.
        """

    @abstractmethod
    async def teardown_host(self, host: HostIdentity) -> None:
        """Tear down every controller of the host; it may connect again. None of its earlier commands can run after."""

    @abstractmethod
    async def teardown_all(self, incarnation: int) -> None:
        """Take the target over: tear down every controller of every host and drop all grants.

        Of an earlier incarnation nothing clears a region or opens one for writing any more, though it asked for that
        and its request is on the way still.
        """

    @abstractmethod
    async def grant(self, grants: Sequence[WriteGrant]) -> None:
        """Open extents for writing; all or none. Without `Capabilities.fencing` this does nothing."""

    @abstractmethod
    async def revoke(self, grants: Sequence[GrantId]) -> None:
        """Close them: when this returns no write under them can still reach media. Unknown ids are no error."""

    @abstractmethod
    async def barrier(self, volume: VolumeSpec) -> Barrier:
        """Make what was written to the volume so far stable."""

    async def seal(self, grants: Sequence[GrantId], volume: VolumeSpec) -> Barrier:
        """`revoke`, and when no write under the grants can reach media any more, `barrier` of their volume.

        After an error nobody knows which of the two was done.
        """
        await self.revoke(grants)
        return await self.barrier(volume)

    @abstractmethod
    async def prepare_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        """Reserve a region and make it read as zeros. Raises `NoSpace`."""

    @abstractmethod
    async def release_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        """Give a region's space back; the deallocate has completed when this returns."""

    @abstractmethod
    async def checksums(self, volume: VolumeSpec, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        """CRC-32C of ``(offset_bytes, length_bytes, seed)`` ranges, computed at the target (see `forebay.checksum`)."""

    @abstractmethod
    async def io_stats(self) -> IoStats:
        """What the target has read and written so far."""

    async def volume_errors(self) -> dict[VolumeId, VolumeErrors]:
        """How often each volume's drive refused or failed something. Empty if a target does not tell."""
        return {}

    async def failed_writes(self, grants: Sequence[GrantId]) -> set[GrantId]:
        """Those of the grants, revoked or not, under which the drive failed a write, each told once.

        Not for want of space. Empty if a target does not tell.
        """
        return set()

    async def volume_io(self) -> dict[VolumeId, str]:
        """How each volume's bytes are moved: ``direct``, ``buffered`` or ``mmap``, by SPDK the kind of its bdev.

        Empty if a target does not tell.
        """
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Let go of the target, which goes on running."""
