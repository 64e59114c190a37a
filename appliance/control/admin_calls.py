"""The administrative calls of the control service: messages to `Administration` and back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf.message import Message

from forebay.appliance.control.administration import POLICY_FIELDS, Administration, NamespaceView, SessionView
from forebay.appliance.control.calls import Method
from forebay.appliance.namespace.desired_state import Grant, Principal
from forebay.appliance.namespace.scrub import ScrubReport
from forebay.proto import forebay_pb2 as pb

__all__ = ["AdminCalls"]

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


class AdminCalls:
    """The service `forebay.v1.Admin`; every call needs an administrator."""

    def __init__(self, administration: Administration) -> None:
        self._admin = administration

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
            self._method("ListSessions", pb.ListSessionsRequest, self.list_sessions),
            self._method("StartScrub", pb.StartScrubRequest, self.start_scrub),
            self._method("StopScrub", pb.StopScrubRequest, self.stop_scrub),
            self._method("ScrubStatus", pb.ScrubStatusRequest, self.scrub_status),
            self._method("ListQuarantine", pb.ListQuarantineRequest, self.list_quarantine),
            self._method("ReleaseQuarantine", pb.ReleaseQuarantineRequest, self.release_quarantine),
        ]

    def _method(
        self, name: str, request_class: type[Request], run: Callable[[Any], Coroutine[Any, Any, Reply]]
    ) -> Method[Request, Reply]:
        async def checked(principal: Principal, request: Request) -> Reply:
            deadline_ms = request.context.deadline_ms  # type: ignore[attr-defined]
            return await self._admin.run(principal, lambda: run(request), deadline_ms)

        return Method(name, request_class, checked)

    # ------------------------------------------------------------------------------------------------ namespaces

    async def create_namespace(self, request: pb.CreateNamespaceRequest) -> pb.NamespaceInfo:
        spec = request.spec
        policy = {field: getattr(spec, field) for field in POLICY_FIELDS if getattr(spec, field)}
        return _namespace(await self._admin.create_namespace(spec.name, policy))

    async def update_namespace(self, request: pb.UpdateNamespaceRequest) -> pb.NamespaceInfo:
        policy = {field: getattr(request.spec, field, "") for field in request.fields}
        return _namespace(await self._admin.update_namespace(request.spec.name, policy))

    async def delete_namespace(self, request: pb.DeleteNamespaceRequest) -> pb.DeleteNamespaceReply:
        blocks, size = await self._admin.delete_namespace(request.name, force=request.force)
        return pb.DeleteNamespaceReply(blocks=blocks, bytes=size)

    async def set_scope_quota(self, request: pb.SetScopeQuotaRequest) -> pb.NamespaceInfo:
        return _namespace(await self._admin.set_scope_quota(request.name, request.scope, request.quota_bytes))

    async def list_namespaces(self, request: pb.ListNamespacesRequest) -> pb.ListNamespacesReply:
        return pb.ListNamespacesReply(namespaces=[_namespace(n) for n in await self._admin.namespaces()])

    # ------------------------------------------------------------------------------------------------ principals

    async def create_principal(self, request: pb.CreatePrincipalRequest) -> pb.CreatePrincipalReply:
        principal, token = await self._admin.create_principal(request.name, admin=request.admin)
        return pb.CreatePrincipalReply(principal=_principal(principal), token=token)

    async def rotate_token(self, request: pb.RotateTokenRequest) -> pb.CreatePrincipalReply:
        principal, token = await self._admin.rotate_token(request.name)
        return pb.CreatePrincipalReply(principal=_principal(principal), token=token)

    async def delete_principal(self, request: pb.DeletePrincipalRequest) -> pb.DeletePrincipalReply:
        await self._admin.delete_principal(request.name)
        return pb.DeletePrincipalReply()

    async def list_principals(self, request: pb.ListPrincipalsRequest) -> pb.ListPrincipalsReply:
        return pb.ListPrincipalsReply(principals=[_principal(p) for p in await self._admin.principals()])

    async def set_grant(self, request: pb.SetGrantRequest) -> pb.PrincipalInfo:
        grant = Grant(request.grant.namespace, tuple(request.grant.rights), tuple(request.grant.scopes))
        return _principal(await self._admin.set_grant(request.principal, grant))

    # ------------------------------------------------------------------------------------------------ the node

    async def node_status(self, request: pb.NodeStatusRequest) -> pb.NodeStatusReply:
        found = await self._admin.status()
        return pb.NodeStatusReply(
            node=found.node,
            version=found.version,
            incarnation=found.incarnation,
            uptime_ms=found.uptime_ms,
            blocks=found.blocks,
            used_bytes=found.used_bytes,
            capacity_bytes=found.capacity_bytes,
            sessions=found.sessions,
            leases=found.leases,
            pending_writes=found.pending_writes,
            drives=[
                pb.DriveStatus(
                    name=d.name,
                    path=d.path,
                    capacity_bytes=d.capacity_bytes,
                    free_bytes=d.free_bytes,
                    io=d.io,
                    quarantined_bytes=d.quarantined_bytes,
                    state=d.state,
                    reason=d.reason,
                )
                for d in found.drives
            ],
            problems=[pb.NodeProblem(part=p.part, reason=p.reason, affects=p.affects) for p in found.problems],
            target_kind=found.target.kind,
            target_pid=found.target.pid,
            target_capabilities=found.target.capabilities,
            index_bytes=found.index_bytes,
            counters=found.counters,
            read_bytes=found.read_bytes,
            written_bytes=found.written_bytes,
            target_restarts=found.target.restarts,
        )

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
        found = await self._admin.sessions(namespace=request.namespace, principal=request.principal)
        return pb.ListSessionsReply(sessions=[_session(view) for view in found])

    async def start_scrub(self, request: pb.StartScrubRequest) -> pb.ScrubInfo:
        rate = request.rate_bytes_per_s
        return _scrub(await self._admin.start_scrub(namespace=request.namespace, rate_bytes_per_s=rate))

    async def stop_scrub(self, request: pb.StopScrubRequest) -> pb.ScrubInfo:
        return _scrub(await self._admin.stop_scrub())

    async def scrub_status(self, request: pb.ScrubStatusRequest) -> pb.ScrubInfo:
        return _scrub(await self._admin.scrub())

    async def list_quarantine(self, request: pb.ListQuarantineRequest) -> pb.ListQuarantineReply:
        found = await self._admin.quarantine()
        return pb.ListQuarantineReply(extents=[pb.QuarantinedExtent(**asdict(view)) for view in found])

    async def release_quarantine(self, request: pb.ReleaseQuarantineRequest) -> pb.QuarantinedExtent:
        released = await self._admin.release_quarantine(request.volume, request.offset_bytes)
        return pb.QuarantinedExtent(**asdict(released))


def _namespace(view: NamespaceView) -> pb.NamespaceInfo:
    return pb.NamespaceInfo(
        spec=pb.NamespaceSpec(name=view.name, **{field: getattr(view, field) for field in POLICY_FIELDS}),
        id=view.id,
        used_bytes=view.used_bytes,
        blocks=view.blocks,
        pinned_bytes=view.pinned_bytes,
        reserved_bytes=view.reserved_bytes,
        sessions=view.sessions,
        created_unix_ms=view.created_unix_ms,
        pending_bytes=view.pending_bytes,
        scopes=[pb.ScopeUsage(scope=s.scope, quota_bytes=s.quota_bytes, used_bytes=s.used_bytes) for s in view.scopes],
    )


def _principal(principal: Principal) -> pb.PrincipalInfo:
    return pb.PrincipalInfo(
        name=principal.name,
        admin=principal.admin,
        grants=[pb.Grant(namespace=g.namespace, rights=g.rights, scopes=g.scopes) for g in principal.grants],
        created_unix_ms=principal.created_ms,
    )


def _scrub(report: ScrubReport) -> pb.ScrubInfo:
    return pb.ScrubInfo(**asdict(report))


def _session(view: SessionView) -> pb.SessionInfo:
    return pb.SessionInfo(
        session=bytes.fromhex(view.session),
        principal=view.principal,
        namespace=view.namespace,
        client=view.client,
        generation=view.generation,
        state=view.state,
        age_ms=view.age_ms,
        idle_ms=view.idle_ms,
        hosts=view.hosts,
        leases=view.leases,
        pending_writes=view.pending_writes,
        pins=view.pins,
        transports=view.transports,
    )
