"""The administrative calls of the control service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from google.protobuf.message import Message

from forebay.appliance.control.calls import MAX_DEADLINE_MS, Method, finish
from forebay.appliance.namespace.acl import Acl, check_rights, hash_token, new_token
from forebay.appliance.namespace.desired_state import Grant, Namespace, Principal, check_name
from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.records import Durability
from forebay.errors import InvalidArgument, NotFound
from forebay.index import RowState
from forebay.proto import forebay_pb2 as pb

__all__ = ["AdminCalls"]

_FIELDS = ("quota_bytes", "durability", "eviction", "min_generation", "retention_ms", "ttl_ms")
_DEFAULT_DEADLINE_MS = 60_000

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


class AdminCalls:
    """The service `forebay.v1.Admin`; every call needs an administrator."""

    def __init__(self, node: Node, status: Callable[[], Awaitable[pb.NodeStatusReply]]) -> None:
        self._node = node
        self._status = status

    def methods(self) -> list[Method[Any, Any]]:
        """All calls of the service."""
        return [
            self._method("CreateNamespace", pb.CreateNamespaceRequest, self.create_namespace),
            self._method("UpdateNamespace", pb.UpdateNamespaceRequest, self.update_namespace),
            self._method("DeleteNamespace", pb.DeleteNamespaceRequest, self.delete_namespace),
            self._method("SetScopeQuota", pb.SetScopeQuotaRequest, self.set_scope_quota),
            self._method("ListNamespaces", pb.ListNamespacesRequest, self.list_namespaces),
            self._method("CreatePrincipal", pb.CreatePrincipalRequest, self.create_principal),
            self._method("RotateToken", pb.RotateTokenRequest, self.rotate_token),
            self._method("DeletePrincipal", pb.DeletePrincipalRequest, self.delete_principal),
            self._method("ListPrincipals", pb.ListPrincipalsRequest, self.list_principals),
            self._method("SetGrant", pb.SetGrantRequest, self.set_grant),
            self._method("NodeStatus", pb.NodeStatusRequest, self.node_status),
        ]

    def _method(
        self, name: str, request_class: type[Request], run: Callable[[Any], Awaitable[Reply]]
    ) -> Method[Request, Reply]:
        async def checked(principal: Principal, request: Request) -> Reply:
            self._node.acl.need_admin(principal)
            deadline_ms = request.context.deadline_ms or _DEFAULT_DEADLINE_MS  # type: ignore[attr-defined]
            if deadline_ms > MAX_DEADLINE_MS:
                raise InvalidArgument(
                    f"deadline_ms is {deadline_ms}", field="context.deadline_ms", limit=f"1 to {MAX_DEADLINE_MS}"
                )
            return await finish(_coroutine(run(request)), deadline_ms)

        return Method(name, request_class, checked)

    # ------------------------------------------------------------------------------------------------ namespaces

    async def create_namespace(self, request: pb.CreateNamespaceRequest) -> pb.NamespaceInfo:
        spec = request.spec
        fields = [f for f in _FIELDS if getattr(spec, f)]
        return self._info(await self._node.create_namespace(spec.name, **_options(spec, fields)))

    async def update_namespace(self, request: pb.UpdateNamespaceRequest) -> pb.NamespaceInfo:
        for field in request.fields:
            if field not in _FIELDS:
                raise InvalidArgument(f"{field!r} cannot be set", field="fields", limit=", ".join(_FIELDS))
        return self._info(
            await self._node.update_namespace(request.spec.name, **_options(request.spec, request.fields))
        )

    async def delete_namespace(self, request: pb.DeleteNamespaceRequest) -> pb.DeleteNamespaceReply:
        blocks, size = await self._node.delete_namespace(request.name, force=request.force)
        return pb.DeleteNamespaceReply(blocks=blocks, bytes=size)

    async def set_scope_quota(self, request: pb.SetScopeQuotaRequest) -> pb.NamespaceInfo:
        return self._info(await self._node.set_scope_quota(request.name, request.scope, request.quota_bytes))

    async def list_namespaces(self, request: pb.ListNamespacesRequest) -> pb.ListNamespacesReply:
        shown = sorted((n for n in self._node.state.namespaces if not n.deleting), key=lambda n: n.full_name)
        return pb.ListNamespacesReply(namespaces=[self._info(n) for n in shown])

    def _info(self, namespace: Namespace) -> pb.NamespaceInfo:
        index, space = self._node.engine.index, self._node.engine.space
        mine = index.namespace[: index.high] == namespace.id
        state = index.state[: index.high]
        found = mine & ((state == RowState.VISIBLE) | (state == RowState.SUSPECT))
        pinned = found & ((index.pins[: index.high] > 0) | (index.flags[: index.high] & 2 > 0))
        return pb.NamespaceInfo(
            spec=pb.NamespaceSpec(
                name=namespace.full_name,
                quota_bytes=namespace.quota_bytes,
                durability=Durability(namespace.durability).name.lower(),
                eviction=namespace.eviction,
                min_generation=namespace.min_generation,
                retention_ms=namespace.retention_ms,
                ttl_ms=namespace.ttl_ms,
            ),
            id=namespace.id,
            used_bytes=space.used_bytes(namespace.id),
            blocks=int(found.sum()),
            pinned_bytes=int(index.length[: index.high][pinned].sum(dtype="u8")),
            reserved_bytes=space.reserved_bytes(namespace.id),
            sessions=sum(s.namespace == namespace.id for s in self._node.sessions),
            created_unix_ms=namespace.created_ms,
            pending_bytes=self._node.writes.pending_bytes(namespace.id),
            scopes=[
                pb.ScopeUsage(scope=name, quota_bytes=quota, used_bytes=used)
                for name, quota, used in self._node.scope_usage(namespace.id)
            ],
        )

    # ------------------------------------------------------------------------------------------------ principals

    async def create_principal(self, request: pb.CreatePrincipalRequest) -> pb.CreatePrincipalReply:
        token = new_token()
        principal = Principal(
            check_name(request.name, "name"),
            hash_token(token),
            self._node.engine.clock.wall_ms(),
            request.admin,
        )
        await self._node.state.add_principal(principal)
        return pb.CreatePrincipalReply(principal=_principal(principal), token=token)

    async def rotate_token(self, request: pb.RotateTokenRequest) -> pb.CreatePrincipalReply:
        token = new_token()
        principal = await self._node.state.change_principal(request.name, token_sha256=hash_token(token))
        return pb.CreatePrincipalReply(principal=_principal(principal), token=token)

    async def delete_principal(self, request: pb.DeletePrincipalRequest) -> pb.DeletePrincipalReply:
        principals = self._node.state.principals
        victim = principals.get(request.name)
        if victim is None:
            raise NotFound(f"there is no principal {request.name!r}", field="name")
        if victim.admin and sum(p.admin for p in principals) == 1:
            raise InvalidArgument("the last administrator cannot be deleted", field="name")
        await principals.remove(request.name)
        await self._node.refresh_access(request.name)
        return pb.DeletePrincipalReply()

    async def list_principals(self, request: pb.ListPrincipalsRequest) -> pb.ListPrincipalsReply:
        shown = sorted(self._node.state.principals, key=lambda p: p.name)
        return pb.ListPrincipalsReply(principals=[_principal(p) for p in shown])

    async def set_grant(self, request: pb.SetGrantRequest) -> pb.PrincipalInfo:
        state = self._node.state
        grant = Grant(request.grant.namespace, tuple(request.grant.rights), tuple(request.grant.scopes))
        check_rights(grant.rights)
        if grant.namespace != "*" and state.namespace(grant.namespace) is None and grant.rights:
            raise NotFound(f"there is no namespace {grant.namespace!r}", field="grant.namespace")
        for scope in grant.scopes:
            if scope != "*":
                check_name(scope, "grant.scopes")
        old = state.principals.get(request.principal)
        if old is None:
            raise NotFound(f"there is no principal {request.principal!r}", field="principal")
        new = await state.change_principal(old.name, grants=Acl.merge(old.grants, grant))
        await self._node.refresh_access(new.name)
        return _principal(new)

    async def node_status(self, request: pb.NodeStatusRequest) -> pb.NodeStatusReply:
        return await self._status()


async def _coroutine(work: Awaitable[Reply]) -> Reply:
    return await asyncio.ensure_future(work)


def _options(spec: pb.NamespaceSpec, fields: Iterable[str]) -> dict[str, int | str]:
    options: dict[str, int | str] = {f: getattr(spec, f) for f in fields}
    if "durability" in options:
        try:
            options["durability"] = int(Durability[str(options["durability"]).upper()])
        except KeyError:
            raise InvalidArgument(
                f"durability {options['durability']!r}", field="durability", limit="flush, verify, volatile"
            ) from None
    return options


def _principal(principal: Principal) -> pb.PrincipalInfo:
    return pb.PrincipalInfo(
        name=principal.name,
        admin=principal.admin,
        grants=[pb.Grant(namespace=g.namespace, rights=g.rights, scopes=g.scopes) for g in principal.grants],
        created_unix_ms=principal.created_ms,
    )
