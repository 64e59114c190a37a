"""Desired state: namespaces, volumes, principals and scope ids, as an administrator or the node itself set them.

Small, kept in memory, written through to the store; every change raises `DesiredState.version`. What a target should
serve follows from it and is replayed against the target whenever that restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar, get_origin, get_type_hints
from uuid import UUID

import cbor2

from forebay.appliance.namespace.cbor_map import load_map
from forebay.appliance.namespace.records import Durability
from forebay.appliance.namespace.store import Op, Store
from forebay.errors import AlreadyExists, InvalidArgument, MetadataCorrupt, NotFound
from forebay.ids import VolumeId

__all__ = ["DesiredState", "Eviction", "Grant", "Namespace", "Principal", "Scope", "ScopeQuota", "Volume", "check_name"]

_NAME_LIMIT = 64
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class Eviction(StrEnum):
    """What happens when a namespace is full."""

    LRU = "lru"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Namespace:
    """A KV namespace. ``id`` is never used again; ``quota_bytes`` 0 means only the node's capacity."""

    id: int
    tenant: str
    name: str
    created_ms: int
    quota_bytes: int = 0
    durability: int = Durability.FLUSH
    eviction: str = Eviction.LRU
    min_generation: int = 0
    retention_ms: int = 0
    ttl_ms: int = 0
    deleting: bool = False

    @property
    def key(self) -> str:
        return str(self.id)

    @property
    def full_name(self) -> str:
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True)
class Volume:
    """One namespace's volume on one drive; ids, NSID, UUID and NGUID never change."""

    id: VolumeId
    namespace: int
    drive: str
    nsid: int
    uuid: str
    nguid: str
    regions: int
    """Regions of its address space, the label's not counted; never changes."""

    @property
    def key(self) -> str:
        return str(self.id)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a principal may do in one namespace (``*`` for all), and for which scopes (``*`` for all)."""

    namespace: str
    rights: tuple[str, ...]
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a connection can belong to. The token is kept as a SHA-256 digest."""

    name: str
    token_sha256: bytes
    created_ms: int
    admin: bool = False
    grants: tuple[Grant, ...] = ()

    @property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Scope:
    """A scope's name and its id in stored keys; 0 is the default scope and never in this table."""

    name: str
    id: int

    @property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class ScopeQuota:
    """The most bytes that blocks of one scope may take in one namespace."""

    namespace: int
    scope: int
    quota_bytes: int

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.scope}"


class _Row(Protocol):
    @property
    def key(self) -> str: ...


_R = TypeVar("_R", bound=_Row)
_T = TypeVar("_T")


class _Table(Generic[_R]):
    """Rows of one kind, by key, written through to the store."""

    def __init__(self, store: Store, prefix: str, row: type[_R]) -> None:
        self._store = store
        self._prefix = prefix.encode() + b"/"
        self._row = row
        self._rows: dict[str, _R] = {}
        for key, value in store.scan("state", prefix=self._prefix):
            loaded = self._decode(key, value)
            self._rows[loaded.key] = loaded

    def get(self, key: str) -> _R | None:
        return self._rows.get(key)

    def __iter__(self) -> Iterator[_R]:
        return iter(list(self._rows.values()))

    def __len__(self) -> int:
        return len(self._rows)

    async def put(self, row: _R) -> None:
        await self._store.write([Op("state", self._prefix + row.key.encode(), self._encode(row))])
        self._rows[row.key] = row

    async def remove(self, key: str) -> None:
        await self._store.write([Op("state", self._prefix + key.encode(), None)])
        self._rows.pop(key, None)

    @staticmethod
    def _encode(row: _R) -> bytes:
        return cbor2.dumps({"v": 1, **asdict(row)}, canonical=True)  # type: ignore[call-overload]  # a dataclass

    def _decode(self, key: bytes, value: bytes) -> _R:
        try:
            raw = load_map(value, "state")
            known = {f.name for f in fields(self._row)}  # type: ignore[arg-type]  # a dataclass
            values = {name: _frozen(cell) for name, cell in raw.items() if name in known}
            if self._row is Principal:
                grants = [{k: _frozen(c) for k, c in g.items()} for g in raw.get("grants", ())]
                values["grants"] = tuple(_typed(Grant(**g)) for g in grants)
            row = _typed(self._row(**values))
            if isinstance(row, Volume) and not (UUID(row.uuid) and row.regions):
                raise ValueError(f"a volume of {row.regions} regions")
            if self._prefix + row.key.encode() != key:
                raise ValueError(f"it is the record of {row.key!r}")
            return row
        except Exception as e:
            raise MetadataCorrupt(f"state record {key!r} does not decode: {e}", field="state") from e


def _frozen(cell: Any) -> Any:
    return tuple(cell) if isinstance(cell, list) else cell


def _typed(row: _T) -> _T:
    """A decoded row whose fields have the types that they are declared with. Raises ValueError."""
    for name, declared in get_type_hints(type(row)).items():
        kind = get_origin(declared) or getattr(declared, "__supertype__", declared)
        cell = getattr(row, name)
        if not isinstance(cell, kind) or (kind is int and (isinstance(cell, bool) or not 0 <= cell < 1 << 64)):
            raise ValueError(f"{name} is {cell!r}")
    return row


def check_name(name: str, field: str) -> str:
    """A tenant's, namespace's or principal's name: 1 to 64 of letters, digits, ``-``, ``_``, ``.``."""
    if not 1 <= len(name) <= _NAME_LIMIT or not _NAME_CHARS.issuperset(name) or name.startswith("."):
        raise InvalidArgument(
            f"{field} {name[:80]!r} is not a name: letters, digits, '-', '_', '.', not starting with '.'",
            field=field,
            limit=f"1 to {_NAME_LIMIT} characters",
        )
    return name


class DesiredState:
    """All of it; loaded at start. Raises `MetadataCorrupt`."""

    def __init__(self, store: Store) -> None:
        self.namespaces = _Table(store, "namespace", Namespace)
        self.volumes = _Table(store, "volume", Volume)
        self.principals = _Table(store, "principal", Principal)
        self.scopes = _Table(store, "scope", Scope)
        self.scope_quotas = _Table(store, "scope_quota", ScopeQuota)
        self._store = store
        self._naming = asyncio.Lock()
        self._next_id = int.from_bytes(store.get("meta", b"next_id") or b"\x01", "big")

    async def new_id(self) -> int:
        """A number that was never given out: for namespaces, volumes and scopes."""
        taken = self._next_id
        self._next_id = taken + 1
        await self._store.write([Op("meta", b"next_id", self._next_id.to_bytes(4, "big"))])
        return taken

    def namespace(self, full_name: str) -> Namespace | None:
        """The namespace called ``tenant/name``."""
        return next((n for n in self.namespaces if n.full_name == full_name and not n.deleting), None)

    def volumes_of(self, namespace: int) -> Sequence[Volume]:
        """The volumes of a namespace."""
        return [v for v in self.volumes if v.namespace == namespace]

    async def scope_id(self, name: str) -> int:
        """The id of a scope, given out on first use; 0 for ``default``."""
        if name in ("", "default"):
            return 0
        check_name(name, "scope")
        async with self._naming:  # or two that use a new scope at once would store under two ids
            scope = self.scopes.get(name)
            if scope is None:
                scope = Scope(name, await self.new_id())
                await self.scopes.put(scope)
        return scope.id

    async def add_principal(self, principal: Principal) -> None:
        """Add one. Raises `AlreadyExists`."""
        check_name(principal.name, "principal")
        if self.principals.get(principal.name) is not None:
            raise AlreadyExists(f"principal {principal.name!r} exists", field="principal")
        await self.principals.put(principal)

    async def change_principal(self, name: str, **changes: Any) -> Principal:
        """Replace fields of one. Raises `NotFound`."""
        principal = self.principals.get(name)
        if principal is None:
            raise NotFound(f"there is no principal {name!r}", field="principal")
        principal = replace(principal, **changes)
        await self.principals.put(principal)
        return principal
