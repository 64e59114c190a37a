"""The node: namespaces, volumes and sessions around the engine, and what has to happen from time to time.

One event loop owns it. The control service translates calls into these methods; nothing here knows gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from forebay.appliance.dataplane.interface import Barrier, EndpointInfo, HostView, Target, VolumesFailed, VolumeSpec
from forebay.appliance.dataplane.labels import translated
from forebay.appliance.namespace.acl import Access, Acl
from forebay.appliance.namespace.blocks import Blocks
from forebay.appliance.namespace.changes import ChangeLog
from forebay.appliance.namespace.checkpoint import drop_unfinished, save_checkpoint
from forebay.appliance.namespace.desired_state import (
    DesiredState,
    Eviction,
    Namespace,
    Principal,
    ScopeQuota,
    check_name,
)
from forebay.appliance.namespace.drives import NodeDrives
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import Lru
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.misses import Place
from forebay.appliance.namespace.recovery import Recovered, recover
from forebay.appliance.namespace.reserve import Reserve
from forebay.appliance.namespace.retirement import Retirement
from forebay.appliance.namespace.room import Room, Watermarks
from forebay.appliance.namespace.scrub import Scrubber, ScrubLimits
from forebay.appliance.namespace.sessions import Session, SessionState, SessionTable
from forebay.appliance.namespace.space import Drive, Space
from forebay.appliance.namespace.store import Op, Store
from forebay.appliance.namespace.verification import Verification
from forebay.appliance.namespace.writes import Writes
from forebay.appliance.shared_lock import SharedLock
from forebay.clock import Clock
from forebay.crashpoints import crash_point
from forebay.errors import (
    AlreadyExists,
    Busy,
    ForebayError,
    InvalidArgument,
    NamespaceNotFound,
    SessionExpired,
    StaleGeneration,
    Unavailable,
    WriteExpired,
)
from forebay.ids import HostIdentity
from forebay.index import BlockIndex, RowState, findable
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.schema import Schema

if TYPE_CHECKING:
    from forebay.appliance.dataplane.store_volumes import StoreVolumes

__all__ = ["Node", "NodeLimits"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)
_NQN = "nqn.2014-08.org.nvmexpress:uuid:"
_MAX_HOSTS = 1024  # processes of one session
_DELETE_BATCH = 1024


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Bounds and times that configuration sets."""

    region_bytes: int
    heartbeat_ms: int = 2_000
    expiry_ms: int = 10_000
    lease_ttl_ms: int = 10_000
    write_ttl_ms: int = 30_000
    max_sessions: int = 4_096
    max_blocks: int = 1 << 24
    reclaim_bytes_per_s: int = 1 << 30
    watermarks: Watermarks = field(default_factory=Watermarks)
    scrub: ScrubLimits = field(default_factory=ScrubLimits)
    attached_hosts: tuple[tuple[str, str], ...] = ()
    """Hosts that belong to no session and see all volumes of a tenant: (tenant, NQN)."""
    authentication: bool = False
    """Hosts of sessions prove to the target who they are, and the target to them."""


class Node:
    """A node that serves; made by `Node.open`."""

    def __init__(
        self,
        meta: NodeMeta,
        engine: Engine,
        state: DesiredState,
        *,
        limits: NodeLimits,
        checkpoint: Path | None,
        stores: Mapping[str, StoreVolumes] | None = None,
    ) -> None:
        self.meta = meta
        self.engine = engine
        self.state = state
        self.limits = limits
        self.acl = Acl(state)
        self.sessions = SessionTable(engine.clock, engine.random, limits.max_sessions)
        self.retirement = Retirement(engine)
        self.verification = Verification(engine, self.retirement)
        self.blocks = Blocks(engine, self.retirement, self.verification)
        self.room = Room(engine, self.retirement, state, limits.watermarks)
        self.writes = Writes(engine, self.blocks, self.retirement, self.room)
        self.scrubber = Scrubber(engine, self.verification, limits.scrub)
        self.recovered = Recovered(0, 0, 0)
        self._checkpoint = checkpoint
        self._checkpointed = 0
        self._admin = asyncio.Lock()
        self.drives = NodeDrives(engine, state, meta, limits.region_bytes, self._admin, stores=stores)
        self._hosts_changing = SharedLock()  # so that a host on its way in is not taken for one that should go
        self._reclaimed_ms = engine.clock.monotonic_ms()
        self._reclaim_budget = 0

    @classmethod
    async def open(
        cls,
        store: Store,
        meta: NodeMeta,
        target: Target,
        *,
        drives: Sequence[Drive],
        limits: NodeLimits,
        clock: Clock,
        random: Callable[[int], bytes],
        checkpoint: Path | None = None,
        reserve: Reserve | None = None,
        stores: Mapping[str, StoreVolumes] | None = None,
    ) -> Node:
        """Bring a node up: a new incarnation, hosts of earlier ones torn down, volumes checked, the index built.

        ``stores`` are the volumes of drives that only the target can reach, by drive.

        Raises `VolumeMismatch` (a volume is not the one that metadata names), `MetadataCorrupt`, `Unavailable`.
        """
        await meta.begin_incarnation()
        # design §6.4: whoever wrote under an earlier incarnation can do so no more, before anything is allocated
        await target.teardown_all(meta.incarnation)
        engine = Engine(
            store=store,
            target=target,
            space=Space(store, target, drives, limits.region_bytes, reserve),
            index=BlockIndex(meta.secret, limits.max_blocks),
            changes=ChangeLog(store),
            clock=clock,
            random=random,
            policy=Lru(),
            events=EventLog(meta.incarnation),
            waiters=Waiters(),
            counters=Counter(),
            reserve=reserve or Reserve(),
        )
        node = cls(meta, engine, DesiredState(store), limits=limits, checkpoint=checkpoint, stores=stores)
        await node.drives.start()
        node.drives.reconcile, node.drives.doom = node._reconcile, node.writes.doom_volumes
        node.recovered = await recover(
            engine, node.state, was_clean=meta.was_clean, checkpoint=checkpoint, node_id=meta.node_id
        )
        await node._admit_attached()
        for namespace in node.state.namespaces:
            if namespace.deleting and node.drives.all_there(namespace.id):
                await node._finish_delete(namespace)
        engine.places.learn(store)
        return node

    # ------------------------------------------------------------------------------------------------ the target

    async def replay(self) -> None:
        """Make a target that restarted know again what it should: volumes, hosts of live sessions, live grants."""
        self.writes.target_ended()  # before any flush can reach the new one
        async with self._admin:
            await self.drives.prove_volumes()
            await self._reconcile()
        await self.writes.replay_grants()

    async def reconcile(self) -> list[str]:
        """Compare what the target has with what it should have and replay the difference; what differed."""
        async with self._admin:
            return await self._reconcile()

    async def _reconcile(self) -> list[str]:
        """`reconcile` for those who change the desired state and hold its lock."""
        async with self._hosts_changing.alone():
            while True:
                try:
                    specs = list(self.engine.space.specs.values())
                    differences = await self.engine.target.reconcile(specs, self._views())
                    break
                except VolumesFailed as error:
                    self.drives.give_up(error.failed)  # and those are fewer each time
        self.engine.counters["target_differences"] += len(differences)
        return differences

    def _views(self) -> list[HostView]:
        """What each host should see."""
        views = [
            HostView(session.access.namespace.tenant, host, tuple(self._specs(session.namespace)))
            for session in self.sessions
            if session.state is SessionState.OPEN
            for host in session.hosts.values()
        ]
        return views + self._attached()

    def _attached(self) -> list[HostView]:
        """What hosts that belong to no session see: they are in no grant, and only read where the target fences."""
        seen = []
        for tenant, nqn in self.limits.attached_hosts:
            volumes = tuple([spec for spec in self.engine.space.specs.values() if spec.tenant == tenant])
            if volumes:
                seen.append(HostView(tenant, HostIdentity(nqn, ""), volumes))
        return seen

    async def _admit_attached(self) -> None:
        """Let attached hosts see volumes that are new. What does not work now is put right by `reconcile`."""
        for view in self._attached():
            try:
                await self.engine.target.add_host(view.tenant, view.host, view.volumes)
            except ForebayError as e:
                _log.warning("%s does not see all volumes of %s yet: %s", view.host.nqn, view.tenant, e)

    def _specs(self, namespace: int) -> list[VolumeSpec]:
        specs = self.engine.space.specs
        return [specs[v.id] for v in self.engine.space.volumes_of(namespace) if v.id in specs]

    # ------------------------------------------------------------------------------------------------ namespaces

    async def create_namespace(self, full_name: str, **options: int | str) -> Namespace:
        """A new namespace with a volume on every drive that takes one.

        Raises `AlreadyExists`, `InvalidArgument`, `CapacityShort`, `NoSpace`, `Unavailable`.
        """
        tenant, _, name = full_name.partition("/")
        check_name(tenant, "name")
        check_name(name, "name")
        async with self._admin:
            if self.state.namespace(full_name) is not None:
                raise AlreadyExists(f"namespace {full_name!r} exists", field="name")
            namespace = Namespace(await self.state.new_id(), tenant, name, self.engine.clock.wall_ms())
            namespace = _checked(replace(namespace, **options))  # type: ignore[arg-type]  # checked by _checked
            # created as "deleting", so that a stop half-way leaves something that the next start clears away
            await self.state.namespaces.put(replace(namespace, deleting=True))
            crash_point("namespace.after_mark_before_volumes")
            try:
                await self.drives.create_volumes(namespace)
            except ForebayError:
                with suppress(ForebayError):
                    await self._finish_delete(namespace)
                raise
            crash_point("namespace.after_volumes_before_live")
            await self.state.namespaces.put(namespace)
            await self._admit_attached()
        return namespace

    async def update_namespace(self, full_name: str, **options: int | str) -> Namespace:
        """Change quota, policies or the minimum generation, which only ever rises. Raises `NamespaceNotFound`."""
        async with self._admin:
            old = self.namespace(full_name)
            new = _checked(replace(old, **options))  # type: ignore[arg-type]  # checked by _checked
            if new.min_generation < old.min_generation:
                raise StaleGeneration(
                    f"min_generation of {full_name} is {old.min_generation} and cannot be lowered",
                    field="min_generation",
                    limit=old.min_generation,
                )
            await self.state.namespaces.put(new)
            for session in self.sessions:
                if session.namespace == new.id:
                    session.access = replace(session.access, namespace=new)
            if new.min_generation > old.min_generation:
                self.engine.events.add("generation", new.id, generation=new.min_generation)
        return new

    async def delete_namespace(self, full_name: str, *, force: bool) -> tuple[int, int]:
        """Delete a namespace; with blocks in it only by ``force``. Blocks and bytes that it had."""
        async with self._admin:
            namespace = self.namespace(full_name)
            index = self.engine.index
            mine = index.namespace[: index.high] == namespace.id
            found = mine & findable(index.state[: index.high])
            blocks, size = int(found.sum()), int(index.length[: index.high][found].sum(dtype=np.uint64))
            if blocks and not force:
                raise InvalidArgument(f"{full_name} holds {blocks} blocks: delete it with force", field="force")
            namespace = replace(namespace, deleting=True)
            await self.state.namespaces.put(namespace)
            mine = [session for session in self.sessions if session.namespace == namespace.id]
            for session in mine:
                session.state = SessionState.ENDING  # all of them, should the target not answer half-way
            for session in mine:
                await self.end_session(session)
            await self._finish_delete(namespace)
            self.engine.events.add("cleared", namespace.id)
        return blocks, size

    async def _finish_delete(self, namespace: Namespace) -> None:
        """Everything of a namespace that is marked as deleting; may run again after a stop.

        What lies on a drive that is not there goes when it is back, and with it the last trace of the namespace.
        """
        e = self.engine
        while True:
            high = e.index.high
            mine = e.index.namespace[:high] == namespace.id
            rows = np.flatnonzero(mine & findable(e.index.state[:high]))
            if not rows.size:
                break
            rows = rows[:_DELETE_BATCH]
            await self.retirement.retire(rows, e.keys_of(rows), "cleared")
        ops = e.store.deletes("blocks", namespace.id.to_bytes(4, "big"))
        for volume in self.state.volumes_of(namespace.id):
            ops += e.store.deletes("owners", volume.id.to_bytes(4, "big"))
        if ops:
            await e.store.write(ops)
        e.places.forget(namespace.id)
        for volume in self.state.volumes_of(namespace.id):
            if self.drives.is_there(volume):
                await self.drives.remove_volume(volume)
        if self.state.namespace(namespace.full_name) is None:
            for principal in self.state.principals:  # a later namespace of this name is another one
                kept = tuple(g for g in principal.grants if g.namespace != namespace.full_name)
                if kept != principal.grants:
                    await self.state.change_principal(principal.name, grants=kept)
        if self.state.volumes_of(namespace.id):
            _log.warning("namespace %s keeps a volume on a drive that is not there", namespace.full_name)
            return
        for quota in self.state.scope_quotas:
            if quota.namespace == namespace.id:
                await self.state.scope_quotas.remove(quota.key)
        await self.state.namespaces.remove(namespace.key)

    async def set_scope_quota(self, full_name: str, scope: str, quota_bytes: int) -> Namespace:
        """Bound what blocks of one scope may take; 0 lifts the bound."""
        async with self._admin:
            namespace = self.namespace(full_name)
            if quota_bytes >= 1 << 62:
                raise InvalidArgument(f"quota_bytes {quota_bytes}", field="quota_bytes", limit="0 to 2^62")
            quota = ScopeQuota(namespace.id, await self.state.scope_id(scope), quota_bytes)
            if quota_bytes:
                await self.state.scope_quotas.put(quota)
            else:
                await self.state.scope_quotas.remove(quota.key)
        return namespace

    def scope_usage(self, namespace: int) -> list[tuple[str, int, int]]:
        """Scopes of a namespace that use space or have a quota: name, quota in bytes (0: none), bytes in use."""
        quotas = {q.scope: q.quota_bytes for q in self.state.scope_quotas if q.namespace == namespace}
        used = self.engine.space.scopes_of(namespace)
        names = {s.id: s.name for s in self.state.scopes} | {0: "default"}
        return [(names.get(s, str(s)), quotas.get(s, 0), used.get(s, 0)) for s in sorted(quotas.keys() | used.keys())]

    def namespace(self, full_name: str, field: str = "name") -> Namespace:
        """The namespace that a request names in its ``field``. Raises `NamespaceNotFound`."""
        namespace = self.state.namespace(full_name)
        if namespace is None:
            raise NamespaceNotFound(f"there is no namespace {full_name!r}", field=field)
        return namespace

    # ------------------------------------------------------------------------------------------------ sessions

    async def open_session(
        self,
        principal: Principal,
        full_name: str,
        *,
        schema_cbor: bytes,
        generation: int,
        scopes: Sequence[str],
        client: str,
    ) -> tuple[Session, HostIdentity, list[int]]:
        """A session, the calling process's host identity and the ids of the scopes it named."""
        self._admitted(principal, full_name, scopes, generation)
        schema = Schema.from_cbor(schema_cbor)
        ids = [await self.state.scope_id(name) for name in scopes]
        if self.engine.store.get("keyspaces", schema.keyspace) is None:
            await self.engine.store.write([Op("keyspaces", schema.keyspace, schema.cbor)])
        session = self.sessions.open(
            principal=principal.name,
            # asked again: the namespace, the rights or the minimum may have gone while the store wrote
            access=self._admitted(principal, full_name, scopes, generation),
            schema=schema,
            generation=generation,
            scopes=dict(zip(ids, scopes, strict=True)) if scopes else {0: "default"},
            client=client[:256],
            expiry_ms=self.limits.expiry_ms,
        )
        try:
            host = await self._new_host(session)
        except BaseException:
            self.sessions.remove(session)
            raise
        self.engine.counters["sessions_opened"] += 1
        self.engine.places.used(session.namespace, Place(schema.keyspace, generation))
        return session, host, ids

    def _admitted(self, principal: Principal, full_name: str, scopes: Sequence[str], generation: int) -> Access:
        """What a session may do. Raises what keeps it out."""
        access = self.acl.access(self.state.principals.get(principal.name) or principal, full_name)
        for name in scopes or ("default",):
            access.need_scope(name)
        if generation < access.namespace.min_generation:
            raise StaleGeneration(
                f"generation {generation} is below the minimum of {full_name}",
                field="generation",
                limit=access.namespace.min_generation,
            )
        return access.within(scopes or ("default",))

    async def join_session(self, principal: Principal, token: bytes) -> tuple[Session, HostIdentity]:
        """Another process of a session. Raises `Busy` when it has as many as it can have."""
        session = self.sessions.by_token(token, principal.name)
        if len(session.hosts) >= _MAX_HOSTS:
            raise Busy("the session has as many processes as it takes", limit=_MAX_HOSTS, retry_after_ms=1000)
        return session, await self._new_host(session)

    async def _new_host(self, session: Session) -> HostIdentity:
        fresh = str(uuid.UUID(bytes=self.engine.random(16), version=4))
        random = self.engine.random
        secrets = HostSecrets(Secret.generate(random), Secret.generate(random)) if self.limits.authentication else None
        host = HostIdentity(_NQN + fresh, fresh, secrets)
        async with self._hosts_changing.together(), session.coming_and_going.together():
            if session.state is not SessionState.OPEN:
                raise SessionExpired("the session ended while the call ran", field="context.session")
            await self.engine.target.add_host(session.access.namespace.tenant, host, self._specs(session.namespace))
            session.hosts[host.nqn] = host
        return host

    async def end_session(self, session: Session) -> None:
        """End a session: leases and pins at once, its writes when the target has torn its hosts down.

        If the target does not answer the session stays ``ending`` and the next sweep goes on.
        """
        session.state = SessionState.ENDING
        self.blocks.release(session, list(session.leases))
        self.blocks.unpin_all(session)
        specs = self._specs(session.namespace)

        async def remove(host: HostIdentity) -> None:
            await self.engine.target.remove_host(session.access.namespace.tenant, host, specs)
            session.hosts.pop(host.nqn, None)

        async with self._hosts_changing.together(), session.coming_and_going.alone():
            for error in await asyncio.gather(*map(remove, session.hosts.values()), return_exceptions=True):
                if error is not None:
                    raise error
        await self.writes.drop_session(session)
        session.state = SessionState.ENDED
        self.sessions.remove(session)

    async def refresh_access(self, name: str) -> None:
        """After a principal's rights changed: its sessions get the new ones, or end."""
        principal = self.state.principals.get(name)
        for session in self.sessions:
            if session.principal != name or session.state is not SessionState.OPEN:
                continue
            try:
                if principal is None:
                    raise NamespaceNotFound
                access = self.acl.access(principal, session.access.namespace.full_name)
                for scope in session.scopes.values():
                    access.need_scope(scope)
                session.access = access.within(session.scopes.values())
            except ForebayError:
                await self.end_session(session)

    async def endpoints(self, session: Session) -> list[EndpointInfo]:
        """Where the session's volumes are served, by each transport."""
        return await self.engine.target.endpoints(session.access.namespace.tenant)

    def volumes(self, session: Session) -> list[VolumeSpec]:
        """The volumes of a session's namespace."""
        return self._specs(session.namespace)

    # ------------------------------------------------------------------------------------------------ from time to time

    async def sweep(self) -> None:
        """End what is over: leases, writes, sessions. Called every few hundred ms; errors are left for the next."""
        for session in self.sessions:
            self.blocks.expire_leases(session)
        for session in self.sessions:
            if session.state is SessionState.ENDING:
                await self._attempt(self.end_session(session))
        for session in self.sessions.expired():
            client = f" ({session.client})" if session.client else ""
            _log.info("session of %s%s ended: nothing heard of it", session.principal, client)
            self.engine.counters["sessions_expired"] += 1
            await self._attempt(self.end_session(session))
        await self._attempt(self.writes.sweep())
        await self._attempt(self.retirement.finish_deletes())

    async def background(self) -> bool:
        """A bit of work that can wait: suspects to verify, deletions to finish. True if there may be more."""
        async with self._admin:  # a creation under way looks like a deletion
            for namespace in self.state.namespaces:
                if namespace.deleting and self._drained(namespace.id) and self.drives.all_there(namespace.id):
                    await self._attempt(self._finish_delete(namespace))
        await self._attempt(self._reclaim())
        return bool(await self._attempt(self.verification.verify_some()))

    def _drained(self, namespace: int) -> bool:
        """Whether no session has anything of a namespace under way: a commit would bring back what was cleared."""
        busy = any(session.namespace == namespace for session in self.sessions)
        return not busy and not self.writes.pending_bytes(namespace)

    async def _reclaim(self) -> None:
        """Give back blocks that nobody can ask for any more, no faster than the configured rate."""
        namespaces = list(self.state.namespaces)
        minimum = {n.id: n.min_generation for n in namespaces if n.min_generation}
        now_ms = self.engine.clock.monotonic_ms()
        elapsed_ms, self._reclaimed_ms = now_ms - self._reclaimed_ms, now_ms
        if minimum or any(n.ttl_ms for n in namespaces):
            rate = self.limits.reclaim_bytes_per_s
            # unused budget is kept for a second, so that a block larger than one round's share goes too
            self._reclaim_budget = min(self._reclaim_budget + rate * elapsed_ms // 1000, rate)
            taken = -1
            while taken and self._reclaim_budget > 0:
                taken = await self.retirement.reclaim(minimum, self._reclaim_budget)
                self._reclaim_budget -= taken

    async def checkpoint(self, *, least_changes: int = 1) -> bool:
        """Save the index for the next start if so much changed since the last time; whether it was saved."""
        changes = self.engine.changes
        if self._checkpoint is None or changes.settled - self._checkpointed < least_changes:
            return False
        at = changes.settled
        saved = False
        try:
            with translated(f"checkpoint {self._checkpoint}"):
                saved = await save_checkpoint(
                    self.engine, self._checkpoint, self.meta.node_id, lambda: self.retirement.delete_failed
                )
        except ForebayError:
            drop_unfinished(self._checkpoint)  # it may be what fills the drive
            raise
        if saved:
            self._checkpointed = at
        return saved

    async def release_empty_regions(self) -> None:
        """Give regions without blocks back: what an earlier stop left, and what deletes emptied."""
        for extents in list(self.engine.space.maps.values()):
            for region in list(extents.empty_regions()):
                await self.engine.space.release(region)

    @staticmethod
    async def _attempt(call: Awaitable[_T]) -> _T | None:
        try:
            return await call
        except Unavailable as error:
            _log.warning("left for the next sweep: %s", error)
        except ForebayError as error:
            _log.error("left for the next sweep: %s", error)
        return None

    async def close(self) -> None:
        """A clean stop: sessions ended, volumes flushed, and only then the mark that says so."""
        for session in self.sessions:
            await self._attempt(self.end_session(session))
        # what an earlier stop left in doubt is still in doubt
        clean = not (self.engine.index.state[: self.engine.index.high] == RowState.SUSPECT).any()
        clean &= not self.engine.space.away.size
        for spec in self.engine.space.specs.values():
            try:
                clean &= await self.engine.target.barrier(spec) is Barrier.FLUSHED
            except ForebayError as error:
                _log.warning("volume %d was not flushed: %s", spec.volume, error)
                clean = False
        try:
            await self.checkpoint()
            crash_point("stop.before_clean")
            if clean:
                await self.meta.mark_clean()
            crash_point("stop.after_clean")
        except (ForebayError, OSError) as error:
            _log.error("the stop is not a clean one: %s", error)
        self.drives.close()
        self.engine.waiters.wake([], WriteExpired.code)


def _checked(namespace: Namespace) -> Namespace:
    """Refuse options out of range, naming the field."""
    if namespace.eviction not in tuple(Eviction):
        raise InvalidArgument(f"eviction {namespace.eviction!r}", field="eviction", limit=", ".join(Eviction))
    for name in ("quota_bytes", "min_generation", "retention_ms", "ttl_ms"):
        if not 0 <= getattr(namespace, name) < 1 << 62:
            raise InvalidArgument(f"{name} {getattr(namespace, name)}", field=name, limit="0 to 2^62")
    if namespace.durability not in (0, 1, 2):
        raise InvalidArgument("no such durability", field="durability", limit="flush, verify, volatile")
    return namespace
