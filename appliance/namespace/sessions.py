"""Sessions, and what belongs to them: leases, pending writes, pins, host identities.

======== ======================================================= =====================================================
session  moved by                                                what ends it
======== ======================================================= =====================================================
open     OpenSession                                             CloseSession, silence beyond its expiry, its namespace
                                                                 deleted, the node's restart
ending   the engine: leases end, hosts are removed at the        the target's word that no command of those hosts can
         target, pending writes are taken back                   run any more
ended    the engine                                              —
======== ======================================================= =====================================================

A lease is ``held`` until Release, its session's end or its deadline; nothing else. A pending write goes
``allocating → writing → committing → visible`` or to ``fencing`` (aborted, expired, session ending) and from there its
extent is freed; the engine in `writes` moves it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from forebay.appliance.namespace.acl import Access
from forebay.appliance.namespace.records import Durability
from forebay.appliance.shared_lock import SharedLock
from forebay.clock import Clock
from forebay.errors import Busy, SessionExpired
from forebay.ids import (
    DEFAULT_SCOPE,
    BlockKey,
    Extent,
    GrantId,
    HostIdentity,
    LeaseId,
    SessionId,
    StoredKey,
    WriteId,
    stored_prefix,
)
from forebay.index import BlockIndex, Digests, Rows
from forebay.schema import Schema, TileLayout

__all__ = ["TRANSPORTS", "Lease", "PendingWrite", "Session", "SessionState", "SessionTable", "WriteState"]

TRANSPORTS = ("block", "rdma", "tcp")
"""Kinds by which hosts may say that they read (docs/transports.md)."""

_RECENT_WRITES = 8192
_NO_COLUMN = (-1, -1)


class WriteState(Enum):
    """Where a pending write is; see the module."""

    ALLOCATING = "allocating"
    WRITING = "writing"
    COMMITTING = "committing"
    FENCING = "fencing"


class SessionState(Enum):
    """Where a session is; see the module."""

    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(slots=True)
class Lease:
    """The right to read rows until a deadline (monotonic ms)."""

    id: LeaseId
    rows: Rows
    deadline_ms: int


@dataclass(slots=True)
class PendingWrite:
    """One attempt to write one block: nothing of it outlives the process."""

    write_id: WriteId
    stored_key: StoredKey
    digest: bytes
    session: Session
    layout: TileLayout
    policy: Durability
    deadline_ms: int
    scope: int = 0
    tail: bytes = b""
    retain_until_ms: int = 0
    expires_ms: int = 0
    extent: Extent | None = None
    hosts: tuple[HostIdentity, ...] = ()
    """Who may write: set once, with the grant."""
    grant: GrantId | None = None
    tag: int = 0
    checksums: dict[int, int] = field(default_factory=dict)
    told: set[HostIdentity] = field(default_factory=set)
    """Hosts that committed tiles, and so said that their commands have completed."""
    recorded: bool = False
    """A record of it may be in metadata: it must be deleted there before the extent is free."""
    doomed: bool = False
    """Its bytes are in doubt: it is never committed."""
    fenced: bool = False
    """No host can write to its extent any more."""
    failed: bool = False
    """The drive failed a write to its extent."""
    state: WriteState = WriteState.ALLOCATING
    done: asyncio.Future[int] | None = None
    """Result of the commit that is under way: 0 or an error code."""

    @property
    def complete(self) -> bool:
        return len(self.checksums) == self.layout.tiles


@dataclass(slots=True)
class Session:
    """One engine instance."""

    id: SessionId
    token: bytes
    principal: str
    access: Access
    schema: Schema
    generation: int
    scopes: dict[int, str]
    client: str
    opened_ms: int
    seen_ms: int
    expiry_ms: int
    state: SessionState = SessionState.OPEN
    hosts: dict[str, HostIdentity] = field(default_factory=dict)
    coming_and_going: SharedLock = field(default_factory=SharedLock, repr=False)
    """Held by hosts that join, and alone by whoever ends the session: none comes in behind."""
    transports: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By NQN of a host: how it says that it reads. For people alone."""
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    writes: dict[WriteId, PendingWrite] = field(default_factory=dict)
    recent: deque[tuple[WriteId, int]] = field(default_factory=lambda: deque(maxlen=_RECENT_WRITES))
    """Outcomes of late commits, so that a repeated Commit gets the same answer."""
    pins: dict[int, int] = field(default_factory=dict)
    """Row to the low half of its write id, since a row number may be used again."""
    _prefixes: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def namespace(self) -> int:
        return self.access.namespace.id

    def stored_keys(self, keys: Sequence[BlockKey]) -> list[StoredKey]:
        """The keys of metadata for a client's keys."""
        column, prefix = _NO_COLUMN, b""
        out = []
        for key, group, scope in keys:
            if (scope, group) != column:
                column = (scope, group)
                prefix = self._prefix(column)
            out.append(StoredKey(prefix + key))
        return out

    def digests(self, index: BlockIndex, keys: Sequence[BlockKey]) -> Digests:
        """The index's digests of `stored_keys`; what they have in common, which is most of them, is hashed once."""
        column = DEFAULT_SCOPE, 0
        copy = index.hash_of(self._prefix(column)).copy
        out = []
        for key, group, scope in keys:
            if (scope, group) != column:
                column = (scope, group)
                copy = index.hash_of(self._prefix(column)).copy
            digest = copy()
            digest.update(key)
            out.append(digest.digest())
        return index.packed(out)

    def plain_digests(self, index: BlockIndex, keys: Sequence[bytes]) -> Digests:
        """`digests` of keys in group 0 of the default scope."""
        copy = index.hash_of(self._prefix((DEFAULT_SCOPE, 0))).copy
        out = []
        for key in keys:
            digest = copy()
            digest.update(key)
            out.append(digest.digest())
        return index.packed(out)

    def _prefix(self, column: tuple[int, int]) -> bytes:
        """What stored keys of a scope and group begin with."""
        prefix = self._prefixes.get(column)
        if prefix is None:
            prefix = self._prefixes[column] = stored_prefix(
                self.namespace, self.schema.keyspace, self.generation, *column
            )
        return prefix


class SessionTable:
    """Sessions of this incarnation, by id and by token."""

    def __init__(self, clock: Clock, random: Callable[[int], bytes], max_sessions: int) -> None:
        self._clock = clock
        self._random = random
        self._max_sessions = max_sessions
        self._by_id: dict[SessionId, Session] = {}
        self._by_token: dict[bytes, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self,
        *,
        principal: str,
        access: Access,
        schema: Schema,
        generation: int,
        scopes: dict[int, str],
        client: str,
        expiry_ms: int,
    ) -> Session:
        """A new session. Raises `Busy` at the node's limit."""
        if len(self._by_id) >= self._max_sessions:
            raise Busy("the node has as many sessions as it takes", limit=self._max_sessions, retry_after_ms=1000)
        now_ms = self._clock.monotonic_ms()
        session = Session(
            id=SessionId(self._random(16)),
            token=self._random(32),
            principal=principal,
            access=access,
            schema=schema,
            generation=generation,
            scopes=scopes,
            client=client,
            opened_ms=now_ms,
            seen_ms=now_ms,
            expiry_ms=expiry_ms,
        )
        self._by_id[session.id] = session
        self._by_token[session.token] = session
        return session

    def get(self, session_id: bytes, principal: str) -> Session:
        """An open session of this principal, now seen. Raises `SessionExpired`."""
        session = self._by_id.get(SessionId(session_id))
        return self._seen(session, principal)

    def by_token(self, token: bytes, principal: str) -> Session:
        """The open session that a token joins. Raises `SessionExpired`."""
        return self._seen(self._by_token.get(token), principal)

    def _seen(self, session: Session | None, principal: str) -> Session:
        now_ms = self._clock.monotonic_ms()
        if (
            session is None
            or session.principal != principal
            or session.state is not SessionState.OPEN
            or now_ms - session.seen_ms > session.expiry_ms
        ):
            raise SessionExpired("the session is unknown or has ended: open a new one", field="context.session")
        session.seen_ms = now_ms
        return session

    def expired(self) -> list[Session]:
        """Open sessions that were silent for too long."""
        now_ms = self._clock.monotonic_ms()
        return [s for s in self if s.state is SessionState.OPEN and now_ms - s.seen_ms > s.expiry_ms]

    def remove(self, session: Session) -> None:
        """Forget an ended session."""
        self._by_id.pop(session.id, None)
        self._by_token.pop(session.token, None)
