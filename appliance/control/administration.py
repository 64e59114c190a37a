"""What administrators can do to a node, once: gRPC (`admin_calls`) and HTTP (`http`) only translate.

Values go in and out as plain Python; errors are those of `forebay.errors`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from forebay import __version__
from forebay.appliance.control.calls import MAX_DEADLINE_MS, finish
from forebay.appliance.dataplane.interface import IoStats
from forebay.appliance.namespace.acl import Acl, check_rights, hash_token, new_token
from forebay.appliance.namespace.desired_state import Grant, Namespace, Principal, check_name
from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.problems import Problem, problems_of
from forebay.appliance.namespace.quarantine import Quarantined
from forebay.appliance.namespace.records import PINNED, Durability
from forebay.appliance.namespace.scrub import ScrubReport
from forebay.appliance.namespace.sessions import Session
from forebay.errors import InvalidArgument, NotFound, Unavailable
from forebay.index import findable

__all__ = [
    "DEFAULT_DEADLINE_MS",
    "MAX_SCRUB_RATE",
    "NOT_ANSWERING",
    "POLICY_FIELDS",
    "Administration",
    "DriveView",
    "NamespaceView",
    "NodeView",
    "QuarantineView",
    "ScopeView",
    "SessionView",
    "TargetView",
]

_log = logging.getLogger(__name__)

NOT_ANSWERING = "not answering"

POLICY_FIELDS = ("quota_bytes", "durability", "eviction", "min_generation", "retention_ms", "ttl_ms")
"""What can be set of a namespace."""
MAX_SCRUB_RATE = 1 << 40
"""Bytes a second."""
DEFAULT_DEADLINE_MS = 60_000
"""Of a call that names none."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScopeView:
    """A scope of a namespace that uses space or has a quota (0: none of its own)."""

    scope: str
    quota_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace: its policy and its use."""

    name: str
    id: int
    quota_bytes: int
    durability: str
    eviction: str
    min_generation: int
    retention_ms: int
    ttl_ms: int
    created_unix_ms: int
    blocks: int
    used_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    pending_bytes: int
    sessions: int
    scopes: tuple[ScopeView, ...]


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as an administrator sees it; ``age_ms`` since it was opened, ``idle_ms`` since it was last heard of."""

    session: str
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
    transports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuarantineView:
    """An extent that nobody gets: ``reason`` is ``checksum``, ``read_error`` or ``write_error``."""

    volume: int
    offset_bytes: int
    length_bytes: int
    namespace: str
    drive: str
    reason: str
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class DriveView:
    """A drive; ``free_bytes`` are in free regions. ``io``: how the target moves its bytes, empty where unknown.

    ``quarantined_bytes`` are not used any more, since the drive did not give back what was written there. ``state`` is
    ``serving``, ``read_only`` or ``away``, and ``reason`` says why it is not the first, or what on it is not served.
    """

    name: str
    path: str
    capacity_bytes: int
    free_bytes: int
    io: str
    quarantined_bytes: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class TargetView:
    """The target as it describes itself; ``kind`` is `NOT_ANSWERING` while it does not."""

    kind: str
    version: str
    pid: int
    restarts: int
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeView:
    """How the node is."""

    node: str
    version: str
    incarnation: int
    uptime_ms: int
    blocks: int
    used_bytes: int
    capacity_bytes: int
    index_bytes: int
    sessions: int
    leases: int
    pending_writes: int
    drives: tuple[DriveView, ...]
    problems: tuple[Problem, ...]
    target: TargetView
    read_bytes: int
    written_bytes: int
    counters: dict[str, int]


class Administration:
    """The administrative side of a node. ``target_restarts`` says how often its target was replaced."""

    def __init__(
        self,
        node: Node,
        name: str,
        target_restarts: Callable[[], int],
        token_changed: Callable[[str, str], None] = lambda name, token: None,
    ) -> None:
        self._token_changed = token_changed
        self._node = node
        self._name = name
        self._target_restarts = target_restarts
        self._started_ms = node.engine.clock.monotonic_ms()
        self._changing = asyncio.Lock()  # principals: what is looked at is what is changed

    async def run(self, principal: Principal, work: Callable[[], Coroutine[Any, Any, T]], deadline_ms: int) -> T:
        """Do something as an administrator, in time; what was begun is finished all the same. 0 ms: a minute.

        Raises `PermissionDenied`, `DeadlineExceeded`, and what the work raises.
        """
        self._node.acl.need_admin(principal)
        if not 0 <= deadline_ms <= MAX_DEADLINE_MS:
            raise InvalidArgument(f"deadline_ms is {deadline_ms}", field="deadline_ms", limit=f"1 to {MAX_DEADLINE_MS}")
        return await finish(work(), deadline_ms or DEFAULT_DEADLINE_MS)

    # ------------------------------------------------------------------------------------------------ namespaces

    async def create_namespace(self, name: str, policy: Mapping[str, int | str]) -> NamespaceView:
        """A new namespace ``tenant/name``; ``policy`` as in `POLICY_FIELDS`."""
        return self._namespace_view(await self._node.create_namespace(name, **_options(policy)))

    async def update_namespace(self, name: str, policy: Mapping[str, int | str]) -> NamespaceView:
        """Set fields of `POLICY_FIELDS`. Raises `NamespaceNotFound`; `StaleGeneration` if a minimum would fall."""
        return self._namespace_view(await self._node.update_namespace(name, **_options(policy)))

    async def delete_namespace(self, name: str, *, force: bool) -> tuple[int, int]:
        """Delete a namespace, with blocks in it only by ``force``; the blocks and bytes that went with it."""
        return await self._node.delete_namespace(name, force=force)

    async def set_scope_quota(self, name: str, scope: str, quota_bytes: int) -> NamespaceView:
        """Bound what one scope may take in a namespace; 0 lifts the bound."""
        return self._namespace_view(await self._node.set_scope_quota(name, scope, quota_bytes))

    async def namespace(self, name: str) -> NamespaceView:
        """One namespace. Raises `NamespaceNotFound`."""
        return self._namespace_view(self._node.namespace(name))

    async def namespaces(self) -> list[NamespaceView]:
        """All of them, by name."""
        shown = sorted((n for n in self._node.state.namespaces if not n.deleting), key=lambda n: n.full_name)
        return self._namespace_views(shown)

    def _namespace_view(self, namespace: Namespace) -> NamespaceView:
        return self._namespace_views([namespace])[0]

    def _namespace_views(self, namespaces: Iterable[Namespace]) -> list[NamespaceView]:
        space, writes = self._node.engine.space, self._node.writes
        blocks, pinned_bytes = self._count_blocks()
        sessions = Counter(s.namespace for s in self._node.sessions)
        return [
            NamespaceView(
                name=n.full_name,
                id=n.id,
                quota_bytes=n.quota_bytes,
                durability=Durability(n.durability).name.lower(),
                eviction=str(n.eviction),
                min_generation=n.min_generation,
                retention_ms=n.retention_ms,
                ttl_ms=n.ttl_ms,
                created_unix_ms=n.created_ms,
                blocks=blocks.get(n.id, 0),
                used_bytes=space.used_bytes(n.id),
                pinned_bytes=pinned_bytes.get(n.id, 0),
                reserved_bytes=space.reserved_bytes(n.id),
                pending_bytes=writes.pending_bytes(n.id),
                sessions=sessions[n.id],
                scopes=tuple(ScopeView(*row) for row in self._node.scope_usage(n.id)),
            )
            for n in namespaces
        ]

    def _count_blocks(self) -> tuple[dict[int, int], dict[int, int]]:
        """Blocks of each namespace and the bytes of those that are pinned, in one pass over the index."""
        index = self._node.engine.index
        high = index.high
        state = index.state[:high]
        rows = np.flatnonzero(findable(state))
        owners = index.namespace[rows]
        pinned = (index.pins[rows] > 0) | (index.flags[rows] & PINNED > 0)
        sizes = np.bincount(owners[pinned], weights=index.length[rows[pinned]])
        return _by_number(np.bincount(owners)), _by_number(sizes)

    # ------------------------------------------------------------------------------------------------ principals

    async def create_principal(self, name: str, *, admin: bool) -> tuple[Principal, str]:
        """A new principal and its token, which is kept as a digest only. Raises `AlreadyExists`."""
        token = new_token()
        principal = Principal(check_name(name, "name"), hash_token(token), self._node.engine.clock.wall_ms(), admin)
        async with self._changing:
            await self._node.state.add_principal(principal)
        return principal, token

    async def rotate_token(self, name: str) -> tuple[Principal, str]:
        """A new token for a principal; the old one is worth nothing from now on."""
        token = new_token()
        async with self._changing:
            principal = await self._node.state.change_principal(name, token_sha256=hash_token(token))
            self._token_changed(name, token)
        return principal, token

    async def delete_principal(self, name: str) -> None:
        """Delete a principal; its sessions end. Raises `NotFound`, `InvalidArgument` for the last administrator."""
        principals = self._node.state.principals
        async with self._changing:
            victim = await self.principal(name)
            if victim.admin and sum(p.admin for p in principals) == 1:
                raise InvalidArgument("the last administrator cannot be deleted", field="name")
            await principals.remove(name)
        await self._node.refresh_access(name)

    async def principal(self, name: str) -> Principal:
        """One principal. Raises `NotFound`."""
        found = self._node.state.principals.get(name)
        if found is None:
            raise NotFound(f"there is no principal {name!r}", field="principal")
        return found

    async def principals(self) -> list[Principal]:
        """All of them, by name."""
        return sorted(self._node.state.principals, key=lambda p: p.name)

    async def set_grant(self, name: str, grant: Grant) -> Principal:
        """Set a principal's rights in one namespace, or in all (``*``); without rights they are taken away."""
        state = self._node.state
        check_rights(grant.rights)
        if grant.namespace != "*" and grant.rights:
            self._node.namespace(grant.namespace, "grant.namespace")
        for scope in grant.scopes:
            if scope != "*":
                check_name(scope, "grant.scopes")
        async with self._changing:
            old = await self.principal(name)
            new = await state.change_principal(old.name, grants=Acl.merge(old.grants, grant))
        await self._node.refresh_access(new.name)
        return new

    # ------------------------------------------------------------------------------------------------ the node

    async def sessions(self, *, namespace: str = "", principal: str = "") -> list[SessionView]:
        """Sessions, oldest first; those of one namespace or one principal if it is named.

        Raises `NamespaceNotFound`, `NotFound`: a name that is misspelt is no idle engine.
        """
        if namespace:
            self._node.namespace(namespace, "namespace")
        if principal:
            await self.principal(principal)
        now_ms = self._node.engine.clock.monotonic_ms()
        chosen = [
            s
            for s in self._node.sessions
            if namespace in ("", s.access.namespace.full_name) and principal in ("", s.principal)
        ]
        return [_session_view(s, now_ms) for s in sorted(chosen, key=lambda s: s.opened_ms)]

    async def start_scrub(self, *, namespace: str = "", rate_bytes_per_s: int = 0) -> ScrubReport:
        """Begin to verify every block, or those of one namespace; rate 0 is the configured one.

        Raises `Busy` while another runs, `NamespaceNotFound`, `InvalidArgument`.
        """
        if not 0 <= rate_bytes_per_s <= MAX_SCRUB_RATE:
            raise InvalidArgument(
                f"a rate of {rate_bytes_per_s} bytes a second", field="rate_bytes_per_s", limit=MAX_SCRUB_RATE
            )
        number = self._node.namespace(namespace, "namespace").id if namespace else None
        return self._node.scrubber.start(number, namespace, rate_bytes_per_s)

    async def scrub(self) -> ScrubReport:
        """How the last scrub that was asked for stands."""
        return self._node.scrubber.report()

    async def stop_scrub(self) -> ScrubReport:
        """End it, if it runs."""
        return self._node.scrubber.stop()

    async def quarantine(self) -> list[QuarantineView]:
        """Extents that nobody gets because the drive did not give back what was written there."""
        space = self._node.engine.space
        return [self._quarantine_view(entry) for entry in space.quarantine]

    async def release_quarantine(self, volume: int, offset_bytes: int) -> QuarantineView:
        """Let one be used again. Raises `NotFound`, or `Busy` while it is still being read."""
        return self._quarantine_view(await self._node.engine.space.release_quarantined(volume, offset_bytes))

    def _quarantine_view(self, entry: Quarantined) -> QuarantineView:
        volume = self._node.engine.space.volumes.get(entry.extent.volume)
        namespace = self._node.state.namespaces.get(str(volume.namespace)) if volume is not None else None
        return QuarantineView(
            volume=entry.extent.volume,
            offset_bytes=entry.extent.offset_bytes,
            length_bytes=entry.extent.length_bytes,
            namespace=namespace.full_name if namespace is not None else "",
            drive=volume.drive if volume is not None else "",
            reason=entry.reason,
            since_unix_ms=entry.since_ms,
        )

    async def status(self) -> NodeView:
        """How the node is; also while its target does not answer, which is when somebody looks.

        Bytes read and written are those of hosts since the target started.
        """
        node, engine, space = self._node, self._node.engine, self._node.engine.space
        restarts = self._target_restarts()
        target, traffic, moves = TargetView(NOT_ANSWERING, "", 0, restarts, ()), IoStats(0, 0, 0, 0), {}
        try:
            info = await engine.target.info()
            flags = info.capabilities
            named = {
                "fencing": flags.fencing,
                "barrier": flags.barrier,
                "per_host_visibility": flags.per_host_visibility,
                "qos": flags.qos,
                "seal": flags.seal,
                "ordered": flags.ordered,
            }
            can = tuple(name for name, there in named.items() if there)
            traffic, moves = await engine.target.io_stats(), await engine.target.volume_io()
            target = TargetView(info.kind, info.version, info.pid, restarts, can)
        except Unavailable as error:
            _log.info("status: %s", error)
        io: dict[str, set[str]] = {}
        for volume in space.volumes.values():
            if volume.id in moves:
                io.setdefault(volume.drive, set()).add(moves[volume.id])
        return NodeView(
            node=self._name,
            version=__version__,
            incarnation=node.meta.incarnation,
            uptime_ms=engine.clock.monotonic_ms() - self._started_ms,
            blocks=engine.index.count,
            used_bytes=sum(m.used_bytes for m in space.maps.values()),
            capacity_bytes=sum(d.capacity_regions for d in space.drives.values()) * space.region_bytes,
            index_bytes=engine.index.memory_bytes(),
            sessions=len(node.sessions),
            leases=sum(len(s.leases) for s in node.sessions),
            pending_writes=len(node.writes),
            drives=tuple(
                DriveView(
                    d.name,
                    d.path,
                    d.capacity_regions * space.region_bytes,
                    d.free_regions * space.region_bytes,
                    ", ".join(sorted(io.get(d.name, ()))),
                    space.quarantined_bytes(d.name),
                    d.state.value,
                    d.reason or space.lost_on(d.name),
                )
                for d in space.drives.values()
            ),
            problems=tuple(problems_of(engine)),
            target=target,
            read_bytes=traffic.read_bytes,
            written_bytes=traffic.write_bytes,
            counters=dict(engine.counters) | {"target_restarts": restarts},
        )


def _by_number(column: np.ndarray[tuple[int], np.dtype[np.generic]]) -> dict[int, int]:
    return {number: int(column[number]) for number in np.flatnonzero(column).tolist()}


def _options(policy: Mapping[str, int | str]) -> dict[str, int | str]:
    """A policy as the node keeps it. Raises `InvalidArgument` naming the field."""
    options = dict(policy)
    for field in options:
        if field not in POLICY_FIELDS:
            raise InvalidArgument(f"{field!r} cannot be set", field="fields", limit=", ".join(POLICY_FIELDS))
    if "durability" in options:
        try:
            options["durability"] = int(Durability[str(options["durability"]).upper()])
        except KeyError:
            raise InvalidArgument(
                f"durability {options['durability']!r}", field="durability", limit="flush, verify, volatile"
            ) from None
    return options


def _session_view(session: Session, now_ms: int) -> SessionView:
    return SessionView(
        session=session.id.hex(),
        principal=session.principal,
        namespace=session.access.namespace.full_name,
        client=session.client,
        generation=session.generation,
        state=session.state.value,
        age_ms=now_ms - session.opened_ms,
        idle_ms=now_ms - session.seen_ms,
        hosts=len(session.hosts),
        leases=len(session.leases),
        pending_writes=len(session.writes),
        pins=len(session.pins),
        transports=tuple(sorted({name for names in session.transports.values() for name in names})),
    )
