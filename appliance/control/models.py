"""What the HTTP API takes and gives, with limits and meanings: the OpenAPI document is made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Deleted",
    "Drive",
    "Error",
    "Grant",
    "GrantSpec",
    "Health",
    "Name",
    "Namespace",
    "NamespaceName",
    "NamespacePolicy",
    "NamespaceSpec",
    "Node",
    "Principal",
    "PrincipalSpec",
    "PrincipalWithToken",
    "Problem",
    "Ready",
    "Scope",
    "ScopeQuota",
    "Session",
    "Target",
]

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
_MOST = (1 << 53) - 1  # what every JSON library keeps exactly

Name = Annotated[str, Field(pattern=rf"^{_NAME}$", min_length=1, max_length=64)]
NamespaceName = Annotated[
    str, Field(pattern=rf"^{_NAME}/{_NAME}$", max_length=129, description="`tenant/name`.", examples=["acme/chat"])
]
Count = Annotated[int, Field(ge=0)]
Bounded = Annotated[int, Field(ge=0, le=_MOST)]
Durability = Literal["flush", "verify", "volatile"]
Eviction = Literal["lru", "none"]
Right = Literal["read", "write", "delete", "pin"]

_DURABILITY = (
    "When a commit is answered. `flush`: the block is on stable media. `verify`: it may not be; after an unclean stop "
    "it is verified before it is served. `volatile`: it may vanish."
)
_EVICTION = "What goes when the namespace is full: `lru`, the least recently used blocks; `none`, nothing."
_MIN_GENERATION = "Blocks of older generations are no longer served. It can only be raised."
_RETENTION = "Blocks are kept at least so long if room can be had elsewhere; 0: no such promise."
_TTL = "Blocks are not found any more so long after they were stored; 0: for ever."
_QUOTA = "Bytes that blocks may take; 0: only the node's capacity."


class _Out(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(_Out):
    """Why a request was not carried out; the same numbers as everywhere in Forebay."""

    code: int = Field(ge=1, description="Stable number of the error.", examples=[2004])
    error: str = Field(description="Its name.", examples=["NamespaceNotFound"])
    message: str = Field(description="What happened, for people.")
    field: str = Field(description="The part of the request that is at fault, or empty.")
    limit: int | str | None = Field(description="The bound that it broke, or null.")
    retry_after_ms: Count = Field(description="When asking again can help; 0: nothing is known of that.")


class NamespaceSpec(_In):
    """A namespace to create."""

    name: NamespaceName
    quota_bytes: Bounded = Field(0, description=_QUOTA)
    durability: Durability = Field("flush", description=_DURABILITY)
    eviction: Eviction = Field("lru", description=_EVICTION)
    min_generation: Bounded = Field(0, description=_MIN_GENERATION)
    retention_ms: Bounded = Field(0, description=_RETENTION)
    ttl_ms: Bounded = Field(0, description=_TTL)


class NamespacePolicy(_In):
    """What to change of a namespace; what is absent or null stays as it is."""

    quota_bytes: Bounded | None = Field(None, description=_QUOTA)
    durability: Durability | None = Field(None, description=_DURABILITY + " Holds for blocks allocated from now on.")
    eviction: Eviction | None = Field(None, description=_EVICTION)
    min_generation: Bounded | None = Field(None, description=_MIN_GENERATION)
    retention_ms: Bounded | None = Field(None, description=_RETENTION)
    ttl_ms: Bounded | None = Field(None, description=_TTL)


class Scope(_Out):
    """A scope that uses space or has a quota."""

    scope: str = Field(description="Its name.")
    quota_bytes: Count = Field(description="The most that its blocks may take; 0: no bound of its own.")
    used_bytes: Count = Field(description="What they take.")


class Namespace(_Out):
    """A namespace: its policy and its use."""

    name: str = Field(description="`tenant/name`.")
    id: int = Field(ge=1, description="Number that no other namespace of the node ever has.")
    quota_bytes: Count = Field(description=_QUOTA)
    durability: Durability = Field(description=_DURABILITY)
    eviction: Eviction = Field(description=_EVICTION)
    min_generation: Count = Field(description=_MIN_GENERATION)
    retention_ms: Count = Field(description=_RETENTION)
    ttl_ms: Count = Field(description=_TTL)
    created_unix_ms: Count = Field(description="When it was created.")
    blocks: Count = Field(description="Blocks that can be found.")
    used_bytes: Count = Field(description="Bytes of extents that have an owner.")
    pinned_bytes: Count = Field(description="Bytes of blocks that are pinned.")
    reserved_bytes: Count = Field(description="Bytes of regions that it holds.")
    pending_bytes: Count = Field(description="Bytes of extents whose blocks are not visible yet.")
    sessions: Count = Field(description="Sessions that work in it.")
    scopes: list[Scope] = Field(description="Scopes that use space or have a quota.")


class Deleted(_Out):
    """What went with a namespace."""

    blocks: Count = Field(description="Blocks that it held.")
    bytes: Count = Field(description="Bytes of their extents.")


class ScopeQuota(_In):
    """A bound for one scope of a namespace."""

    quota_bytes: Bounded = Field(description="The most that its blocks may take; 0 lifts the bound.")


class GrantSpec(_In):
    """Rights of a principal in one namespace, or in all. It takes the place of what stood there for that namespace."""

    namespace: Annotated[str, Field(pattern=rf"^(\*|{_NAME}/{_NAME})$", max_length=129)] = Field(
        description="`tenant/name`, or `*` for all.", examples=["acme/chat"]
    )
    rights: list[Right] = Field(max_length=4, description="None: the grant is taken away.", examples=[["read"]])
    scopes: list[Annotated[str, Field(pattern=rf"^(\*|{_NAME})$", max_length=64)]] = Field(
        [], max_length=1024, description="End tenants that it may act for; `*` for any; none: the default scope."
    )


class Grant(_Out):
    """Rights of a principal in one namespace (`*`: in all) and the scopes that it may act for."""

    namespace: str
    rights: list[Right]
    scopes: list[str]


class PrincipalSpec(_In):
    """A principal to create."""

    name: Name
    admin: bool = Field(False, description="An administrator may do everything.")


class Principal(_Out):
    """Who a token belongs to."""

    name: str
    admin: bool
    grants: list[Grant]
    created_unix_ms: Count = Field(validation_alias="created_ms")


class PrincipalWithToken(_Out):
    """A principal with its new token."""

    principal: Principal
    token: str = Field(description="Shown this once: the node keeps a digest only.")


class Session(_Out):
    """One engine instance at work."""

    session: str = Field(description="Its id, in hexadecimal.", pattern="^[0-9a-f]{32}$")
    principal: str = Field(description="Who opened it.")
    namespace: str = Field(description="`tenant/name`.")
    client: str = Field(description="What the client says of itself.")
    generation: Count = Field(description="Generation of its weights.")
    state: Literal["open", "ending", "ended"]
    age_ms: Count = Field(description="Since it was opened.")
    idle_ms: Count = Field(description="Since it was last heard of.")
    hosts: Count = Field(description="Processes that joined it.")
    leases: Count = Field(description="Read leases that it holds.")
    pending_writes: Count = Field(description="Blocks that it was given extents for and has not committed.")
    pins: Count = Field(description="Blocks that it keeps from eviction.")
    transports: list[Literal["block", "rdma", "tcp"]] = Field(
        description="By which its processes say that they read; empty until they have said so."
    )


class ScrubSpec(_In):
    """What to verify."""

    namespace: NamespaceName | None = Field(None, description="`tenant/name`; absent: all.")
    rate_bytes_per_s: int = Field(
        0, ge=0, le=1 << 40, description="Bytes a second at most; 0: the configured rate, `scrub.rate`."
    )


class Scrub(_Out):
    """How a scrub stands."""

    state: Literal["none", "running", "done", "stopped"]
    namespace: str = Field(description="`tenant/name`; empty: all.")
    blocks: Count = Field(description="Blocks looked at.")
    blocks_total: Count = Field(description="Blocks that were there when it began.")
    bytes: Count = Field(description="Bytes looked at.")
    bytes_total: Count
    gone: Count = Field(description="Blocks that ended before their turn.")
    bad: Count = Field(description="Blocks that did not match their checksums and were dropped.")
    unread: Count = Field(description="Blocks that the drive did not give.")
    suspects_left: Count = Field(description="Blocks of the node to be verified before they are served.")
    rate_bytes_per_s: Count = Field(description="The limit that it runs under.")
    started_unix_ms: Count
    elapsed_ms: Count


class QuarantinedExtent(_Out):
    """An extent that nobody gets, because the drive did not give back what was written there."""

    volume: Count
    offset_bytes: Count
    length_bytes: Count
    namespace: str = Field(description="`tenant/name` that the volume belongs to.")
    drive: str
    reason: Literal["checksum", "read_error", "write_error"] = Field(
        description="Other bytes than were stored, none at all, or none could be stored."
    )
    since_unix_ms: Count


class Drive(_Out):
    """A drive of the node."""

    name: str
    path: str
    capacity_bytes: Count = Field(description="What it may hold, in whole regions.")
    free_bytes: Count = Field(description="Bytes of regions that nobody holds.")
    io: str = Field(description="How the target moves its bytes: `direct`, `buffered` or `mmap`; empty: not told.")
    quarantined_bytes: Count = Field(description="Not used any more: the drive did not give back what was written.")
    state: Literal["serving", "read_only", "away"]
    reason: str = Field(description="Why it is not serving, or empty.")


class Target(_Out):
    """The NVMe-oF target that serves the blocks."""

    kind: str
    version: str
    pid: Count
    restarts: Count = Field(description="How often it had to be replaced since the daemon started.")
    capabilities: list[str]


class Node(_Out):
    """How the node is."""

    node: str = Field(description="Its name.")
    version: str = Field(description="Of Forebay.")
    incarnation: Count = Field(description="Starts of its daemon so far.")
    uptime_ms: Count
    blocks: Count
    used_bytes: Count
    capacity_bytes: Count
    index_bytes: Count = Field(description="Memory of the index.")
    sessions: Count
    leases: Count
    pending_writes: Count
    drives: list[Drive]
    problems: list[Problem] = Field(description="What keeps it from doing all that it should.")
    target: Target
    read_bytes: Count = Field(description="What hosts read at the target since it started.")
    written_bytes: Count = Field(description="What hosts wrote at the target since it started.")
    counters: dict[str, int] = Field(description="Raw counters since the daemon started; `/metrics` has them in order.")


class Health(_Out):
    """The process answers."""

    ok: Literal[True] = True


class Problem(_Out):
    """Something that keeps the node from doing all that it should."""

    part: Literal["target", "metadata", "drives"]
    reason: str
    affects: Literal["all", "writes", "some"] = Field(
        description="`all`: nothing is read or written; `writes`: nothing new is stored; `some`: one drive's blocks."
    )


class Ready(_Out):
    """Whether the node can serve. It is ready while it reads; what is degraded stands in `problems`."""

    ready: bool
    reads: bool
    writes: bool
    problems: list[Problem]
