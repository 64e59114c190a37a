"""Administration of a node: namespaces, principals, grants, status. Unlike data calls, these raise what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

from forebay.client.rpc import NodeAddress, Rpc, find_token
from forebay.clock import SystemClock
from forebay.errors import InvalidArgument
from forebay.proto import forebay_pb2 as pb

__all__ = [
    "Admin",
    "CreatedPrincipal",
    "DeletedNamespace",
    "DriveStatus",
    "GrantInfo",
    "NamespaceInfo",
    "NodeProblem",
    "NodeStatus",
    "PrincipalInfo",
    "QuarantinedExtent",
    "ScopeInfo",
    "ScrubStatus",
    "SessionInfo",
]


@dataclass(frozen=True, slots=True)
class ScopeInfo:
    """A scope of a namespace that uses space or has a quota (0: none of its own)."""

    scope: str
    quota_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace: its policy and its use."""

    name: str
    id: int
    quota_bytes: int
    durability: str
    eviction: str
    min_generation: int
    retention_ms: int
    used_bytes: int
    pending_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    blocks: int
    sessions: int
    created_unix_ms: int
    ttl_ms: int = 0
    scopes: tuple[ScopeInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class DeletedNamespace:
    """What went with a namespace."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GrantInfo:
    """Rights of a principal on a namespace."""

    namespace: str
    rights: tuple[str, ...]
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrincipalInfo:
    """A principal and its grants."""

    name: str
    admin: bool
    grants: tuple[GrantInfo, ...]
    created_unix_ms: int


@dataclass(frozen=True, slots=True)
class CreatedPrincipal:
    """A principal with its token, which is shown this once."""

    principal: PrincipalInfo
    token: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at work; ``age_ms`` since it was opened, ``idle_ms`` since the node last heard of it."""

    session: bytes
    principal: str
    namespace: str
    client: str
    generation: int
    state: str
    age_ms: int
    idle_ms: int
    hosts: int
    leases: int
    pending_writes: int
    pins: int
    transports: tuple[str, ...] = ()
    """By which its processes say that they read: block, rdma, tcp."""


@dataclass(frozen=True, slots=True)
class DriveStatus:
    """A drive of the node; ``free_bytes`` are in free regions. ``io``: direct, buffered or mmap, empty if untold.

    ``state`` is serving, read_only or away, and ``reason`` says why it is not the first.
    """

    name: str
    path: str
    capacity_bytes: int
    free_bytes: int
    io: str
    quarantined_bytes: int = 0
    state: str = "serving"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """What keeps a node from doing all that it should: of ``metadata`` or ``drives``.

    It ``affects`` all (nothing is read or written), writes (nothing new is stored) or some (what lies on one drive).
    """

    part: str
    reason: str
    affects: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How a node is. ``read_bytes`` and ``written_bytes`` are those of hosts since the target started."""

    node: str
    version: str
    incarnation: int
    uptime_ms: int
    blocks: int
    used_bytes: int
    capacity_bytes: int
    sessions: int
    leases: int
    pending_writes: int
    drives: tuple[DriveStatus, ...]
    target_kind: str
    target_pid: int
    target_capabilities: tuple[str, ...]
    index_bytes: int
    counters: dict[str, int]
    read_bytes: int = 0
    written_bytes: int = 0
    target_restarts: int = 0
    problems: tuple[NodeProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """How a scrub that was asked for stands: ``state`` is ``none``, ``running``, ``done`` or ``stopped``.

    ``blocks`` and ``bytes`` were looked at, of those there when it began (``gone`` ones ended before their turn);
    ``bad`` blocks did not match their checksums and were dropped, ``unread`` ones the drive did not give.
    ``suspects_left`` are the whole node's; ``rate_bytes_per_s`` is the limit.
    """

    state: str
    namespace: str
    blocks: int
    blocks_total: int
    bytes: int
    bytes_total: int
    gone: int
    bad: int
    unread: int
    suspects_left: int
    rate_bytes_per_s: int
    started_unix_ms: int
    elapsed_ms: int


@dataclass(frozen=True, slots=True)
class QuarantinedExtent:
    """An extent that nobody gets: the drive did not give back what was written there, or did not take it.

    ``reason`` is ``checksum`` (other bytes), ``read_error`` (none at all) or ``write_error``.
    """

    volume: int
    offset_bytes: int
    length_bytes: int
    namespace: str
    drive: str
    reason: str
    since_unix_ms: int


class Admin:
    """An administrator's connection to a node; a context manager. Tokens are found as `connect` finds them.

    Every call raises what the node answered (`PermissionDenied`, `NamespaceNotFound`, `AlreadyExists`, ...) or
    `Unavailable` and `DeadlineExceeded`. ``attempt_ms`` is how long one attempt to reach the node may take at least:
    longer than an engine's, since nobody computes what an administrator asks.
    """

    def __init__(
        self,
        url: str = "forebay://127.0.0.1:7470",
        *,
        token: str | None = None,
        deadline_ms: int = 10_000,
        attempt_ms: int = 5_000,
    ) -> None:
        if not 1 <= deadline_ms <= 600_000:
            raise InvalidArgument(f"deadline_ms is {deadline_ms}", field="deadline_ms", limit="1 to 600000")
        self._clock = SystemClock()
        self._deadline_ms = deadline_ms
        self._rpc = Rpc(NodeAddress(url), find_token(token), self._clock, attempt_ms)

    def _call(self, method: str, request: Any) -> Any:
        request.context.deadline_ms = self._deadline_ms
        deadline_ms = self._clock.monotonic_ms() + self._deadline_ms
        return self._rpc.call(getattr(self._rpc.admin, method), request, deadline_ms)

    # --- namespaces -------------------------------------------------------------------------------------------------

    def create_namespace(
        self,
        name: str,
        *,
        quota_bytes: int = 0,
        durability: str = "flush",
        eviction: str = "lru",
        min_generation: int = 0,
        retention_ms: int = 0,
        ttl_ms: int = 0,
    ) -> NamespaceInfo:
        """Create ``tenant/name``. ``quota_bytes`` 0: no limit but the node's capacity; ``ttl_ms`` 0: for ever."""
        spec = _spec(
            name,
            quota_bytes=quota_bytes,
            durability=durability,
            eviction=eviction,
            min_generation=min_generation,
            retention_ms=retention_ms,
            ttl_ms=ttl_ms,
        )
        return _namespace(self._call("CreateNamespace", pb.CreateNamespaceRequest(spec=spec)))

    def update_namespace(
        self,
        name: str,
        *,
        quota_bytes: int | None = None,
        durability: str | None = None,
        eviction: str | None = None,
        min_generation: int | None = None,
        retention_ms: int | None = None,
        ttl_ms: int | None = None,
    ) -> NamespaceInfo:
        """Change what is given; `min_generation` can only be raised."""
        given = {
            "quota_bytes": quota_bytes,
            "durability": durability,
            "eviction": eviction,
            "min_generation": min_generation,
            "retention_ms": retention_ms,
            "ttl_ms": ttl_ms,
        }
        changes = {field: value for field, value in given.items() if value is not None}
        if not changes:
            raise InvalidArgument("nothing to change is given", field="fields")
        request = pb.UpdateNamespaceRequest(spec=_spec(name, **changes), fields=list(changes))
        return _namespace(self._call("UpdateNamespace", request))

    def delete_namespace(self, name: str, *, force: bool = False) -> DeletedNamespace:
        """Delete a namespace; with blocks in it only by ``force``."""
        reply = self._call("DeleteNamespace", pb.DeleteNamespaceRequest(name=name, force=force))
        return DeletedNamespace(reply.blocks, reply.bytes)

    def set_scope_quota(self, name: str, scope: str, quota_bytes: int) -> NamespaceInfo:
        """Bound what blocks of one scope may take in a namespace; 0 lifts the bound."""
        try:
            request = pb.SetScopeQuotaRequest(name=name, scope=scope, quota_bytes=quota_bytes)
        except (ValueError, TypeError) as e:
            raise InvalidArgument(f"a quota of {quota_bytes}: {e}", field="quota_bytes") from e
        return _namespace(self._call("SetScopeQuota", request))

    def list_namespaces(self) -> list[NamespaceInfo]:
        """Every namespace."""
        return [_namespace(info) for info in self._call("ListNamespaces", pb.ListNamespacesRequest()).namespaces]

    # --- principals -------------------------------------------------------------------------------------------------

    def create_principal(self, name: str, *, admin: bool = False) -> CreatedPrincipal:
        """Create a principal, without grants."""
        reply = self._call("CreatePrincipal", pb.CreatePrincipalRequest(name=name, admin=admin))
        return CreatedPrincipal(_principal(reply.principal), reply.token)

    def rotate_token(self, name: str) -> CreatedPrincipal:
        """A new token in place of the old one."""
        reply = self._call("RotateToken", pb.RotateTokenRequest(name=name))
        return CreatedPrincipal(_principal(reply.principal), reply.token)

    def delete_principal(self, name: str) -> None:
        """Delete a principal; its sessions end."""
        self._call("DeletePrincipal", pb.DeletePrincipalRequest(name=name))

    def list_principals(self) -> list[PrincipalInfo]:
        """Every principal."""
        return [_principal(info) for info in self._call("ListPrincipals", pb.ListPrincipalsRequest()).principals]

    def set_grant(
        self, principal: str, namespace: str, rights: Iterable[str], *, scopes: Sequence[str] = ()
    ) -> PrincipalInfo:
        """Set a principal's rights on a namespace in place of the old ones; none revokes."""
        grant = pb.Grant(namespace=namespace, rights=list(rights), scopes=scopes)
        return _principal(self._call("SetGrant", pb.SetGrantRequest(principal=principal, grant=grant)))

    # --- the node ---------------------------------------------------------------------------------------------------

    def status(self) -> NodeStatus:
        """How the node is."""
        reply = self._call("NodeStatus", pb.NodeStatusRequest())
        drives = tuple(
            DriveStatus(
                *(d.name, d.path, d.capacity_bytes, d.free_bytes, d.io, d.quarantined_bytes),
                *(d.state or "serving", d.reason),
            )
            for d in reply.drives
        )
        return NodeStatus(
            node=reply.node,
            version=reply.version,
            incarnation=reply.incarnation,
            uptime_ms=reply.uptime_ms,
            blocks=reply.blocks,
            used_bytes=reply.used_bytes,
            capacity_bytes=reply.capacity_bytes,
            sessions=reply.sessions,
            leases=reply.leases,
            pending_writes=reply.pending_writes,
            drives=drives,
            target_kind=reply.target_kind,
            target_pid=reply.target_pid,
            target_capabilities=tuple(reply.target_capabilities),
            index_bytes=reply.index_bytes,
            counters=dict(reply.counters),
            read_bytes=reply.read_bytes,
            written_bytes=reply.written_bytes,
            target_restarts=reply.target_restarts,
            problems=tuple(NodeProblem(p.part, p.reason, p.affects) for p in reply.problems),
        )

    def list_sessions(self, *, namespace: str = "", principal: str = "") -> list[SessionInfo]:
        """Sessions, oldest first; those of one namespace or one principal if it is named."""
        reply = self._call("ListSessions", pb.ListSessionsRequest(namespace=namespace, principal=principal))
        return [
            SessionInfo(
                session=s.session,
                principal=s.principal,
                namespace=s.namespace,
                client=s.client,
                generation=s.generation,
                state=s.state,
                age_ms=s.age_ms,
                idle_ms=s.idle_ms,
                hosts=s.hosts,
                leases=s.leases,
                pending_writes=s.pending_writes,
                pins=s.pins,
                transports=tuple(s.transports),
            )
            for s in reply.sessions
        ]

    def start_scrub(self, *, namespace: str = "", rate_bytes_per_s: int = 0) -> ScrubStatus:
        """Have the node verify every block, or those of one namespace; rate 0 is the one that it is configured with.

        Raises `Busy` while another scrub runs.
        """
        try:
            request = pb.StartScrubRequest(namespace=namespace, rate_bytes_per_s=rate_bytes_per_s)
        except (ValueError, TypeError) as e:
            raise InvalidArgument(f"a rate of {rate_bytes_per_s}: {e}", field="rate_bytes_per_s") from e
        return _scrub(self._call("StartScrub", request))

    def stop_scrub(self) -> ScrubStatus:
        """End the scrub that runs, if there is one."""
        return _scrub(self._call("StopScrub", pb.StopScrubRequest()))

    def scrub_status(self) -> ScrubStatus:
        """How the last scrub that was asked for stands."""
        return _scrub(self._call("ScrubStatus", pb.ScrubStatusRequest()))

    def list_quarantine(self) -> list[QuarantinedExtent]:
        """Extents that nobody gets, by volume and offset."""
        return [_quarantined(e) for e in self._call("ListQuarantine", pb.ListQuarantineRequest()).extents]

    def release_quarantine(self, volume: int, offset_bytes: int) -> QuarantinedExtent:
        """Let one be used again. Raises `NotFound`, or `Busy` while it is still being read."""
        try:
            request = pb.ReleaseQuarantineRequest(volume=volume, offset_bytes=offset_bytes)
        except (ValueError, TypeError) as e:
            raise InvalidArgument(f"volume {volume} at {offset_bytes}: {e}", field="offset_bytes") from e
        return _quarantined(self._call("ReleaseQuarantine", request))

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._rpc.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _spec(name: str, **fields: Any) -> pb.NamespaceSpec:
    try:
        return pb.NamespaceSpec(name=name, **fields)
    except (ValueError, TypeError) as e:
        raise InvalidArgument(f"namespace {name}: {e}", field="spec") from e


def _namespace(info: pb.NamespaceInfo) -> NamespaceInfo:
    spec = info.spec
    return NamespaceInfo(
        name=spec.name,
        id=info.id,
        quota_bytes=spec.quota_bytes,
        durability=spec.durability,
        eviction=spec.eviction,
        min_generation=spec.min_generation,
        retention_ms=spec.retention_ms,
        used_bytes=info.used_bytes,
        pending_bytes=info.pending_bytes,
        pinned_bytes=info.pinned_bytes,
        reserved_bytes=info.reserved_bytes,
        blocks=info.blocks,
        sessions=info.sessions,
        created_unix_ms=info.created_unix_ms,
        ttl_ms=spec.ttl_ms,
        scopes=tuple(ScopeInfo(s.scope, s.quota_bytes, s.used_bytes) for s in info.scopes),
    )


def _principal(info: pb.PrincipalInfo) -> PrincipalInfo:
    grants = tuple(GrantInfo(g.namespace, tuple(g.rights), tuple(g.scopes)) for g in info.grants)
    return PrincipalInfo(info.name, info.admin, grants, info.created_unix_ms)


def _scrub(info: pb.ScrubInfo) -> ScrubStatus:
    return ScrubStatus(**{field.name: getattr(info, field.name) for field in fields(ScrubStatus)})


def _quarantined(extent: pb.QuarantinedExtent) -> QuarantinedExtent:
    return QuarantinedExtent(**{field.name: getattr(extent, field.name) for field in fields(QuarantinedExtent)})
