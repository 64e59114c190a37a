"""The HTTP API: administration under ``/v1``, ``/metrics``, ``/healthz`` and ``/readyz``.

It only translates: `Administration` does the work, and every request passes `http_edge`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from forebay import __version__
from forebay.appliance.control import models
from forebay.appliance.control.administration import DEFAULT_DEADLINE_MS, Administration
from forebay.appliance.control.calls import MAX_DEADLINE_MS, Calls
from forebay.appliance.control.health import Health
from forebay.appliance.control.http_edge import HANDLERS, App, Edge, principal_of
from forebay.appliance.namespace.acl import Acl
from forebay.appliance.namespace.desired_state import Grant
from forebay.appliance.namespace.problems import reads_go_on, writes_go_on

__all__ = ["make_app"]

_OPEN = frozenset(("/healthz", "/readyz", "/openapi.json"))

_TEXTS = {
    400: "The request is wrong: `field` says where, `limit` what is allowed.",
    401: "The token is missing or not known.",
    403: "The token is not an administrator's.",
    404: "What the request names does not exist.",
    409: "It exists already, or what is asked for would go back behind what is.",
    429: "The node has as many requests as it takes; `retry_after_ms` says when to come again.",
    500: "An error of the node; its log says more.",
    502: "The target refused or failed.",
    503: "The target or metadata does not answer.",
    504: "Not done by the deadline; what was begun is finished all the same.",
    507: "There is no room.",
}


def _errors(*extra: int) -> dict[int | str, dict[str, Any]]:
    statuses = sorted({400, 401, 403, 429, 500, 502, 503, 504, *extra})
    return {status: {"model": models.Error, "description": _TEXTS[status]} for status in statuses}


# ---------------------------------------------------------------------------------------------------- the routes


class _Caller:
    """Who asks, as an administrator, and until when."""

    def __init__(
        self,
        request: Request,
        x_deadline_ms: Annotated[
            int, Header(ge=1, le=MAX_DEADLINE_MS, description="Milliseconds that the request may take.")
        ] = DEFAULT_DEADLINE_MS,
    ) -> None:
        self.principal = principal_of(request)
        self.deadline_ms = x_deadline_ms


_bearer = HTTPBearer(auto_error=False, description="A token, as for gRPC. Administration needs an administrator's.")
Caller = Annotated[_Caller, Depends(_Caller)]
Tenant = Annotated[models.Name, Path(description="Tenant of the namespace.")]
Space = Annotated[models.Name, Path(description="Its name within the tenant.")]
ScopeName = Annotated[models.Name, Path(description="The scope's name.")]
Who = Annotated[models.Name, Path(description="The principal's name.")]


def _routes(admin: Administration) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[Depends(_bearer)])
    space_path = "/namespaces/{tenant}/{name}"

    @router.get("/node", operation_id="GetNode", tags=["node"], responses=_errors())
    async def get_node(caller: Caller) -> models.Node:
        """How the node is: space, sessions, drives, target."""
        return models.Node.model_validate(await admin.run(caller.principal, admin.status, caller.deadline_ms))

    @router.get("/sessions", operation_id="ListSessions", tags=["node"], responses=_errors(404))
    async def list_sessions(
        caller: Caller,
        namespace: Annotated[models.NamespaceName | None, Query(description="Only those of this namespace.")] = None,
        principal: Annotated[models.Name | None, Query(description="Only those of this principal.")] = None,
        limit: Annotated[int, Query(ge=1, le=10_000, description="The most to list.")] = 1_000,
    ) -> list[models.Session]:
        """Sessions, oldest first."""
        found = await admin.run(
            caller.principal,
            lambda: admin.sessions(namespace=namespace or "", principal=principal or ""),
            caller.deadline_ms,
        )
        return [models.Session.model_validate(session) for session in found[:limit]]

    @router.get("/scrub", operation_id="ScrubStatus", tags=["node"], responses=_errors())
    async def scrub_status(caller: Caller) -> models.Scrub:
        """How the last scrub that was asked for stands."""
        return models.Scrub.model_validate(await admin.run(caller.principal, admin.scrub, caller.deadline_ms))

    @router.post("/scrub", operation_id="StartScrub", status_code=202, tags=["node"], responses=_errors(404))
    async def start_scrub(caller: Caller, spec: models.ScrubSpec | None = None) -> models.Scrub:
        """Begin to verify every block, or those of one namespace; 429 while a scrub runs."""
        spec = spec or models.ScrubSpec.model_validate({})
        started = await admin.run(
            caller.principal,
            lambda: admin.start_scrub(namespace=spec.namespace or "", rate_bytes_per_s=spec.rate_bytes_per_s),
            caller.deadline_ms,
        )
        return models.Scrub.model_validate(started)

    @router.delete("/scrub", operation_id="StopScrub", tags=["node"], responses=_errors())
    async def stop_scrub(caller: Caller) -> models.Scrub:
        """End the scrub that runs, if there is one."""
        return models.Scrub.model_validate(await admin.run(caller.principal, admin.stop_scrub, caller.deadline_ms))

    @router.get("/quarantine", operation_id="ListQuarantine", tags=["node"], responses=_errors())
    async def list_quarantine(caller: Caller) -> list[models.QuarantinedExtent]:
        """Extents that nobody gets because of their drive, by volume and offset."""
        found = await admin.run(caller.principal, admin.quarantine, caller.deadline_ms)
        return [models.QuarantinedExtent.model_validate(view) for view in found]

    @router.delete(
        "/quarantine/{volume}/{offset_bytes}", operation_id="ReleaseQuarantine", tags=["node"], responses=_errors(404)
    )
    async def release_quarantine(
        caller: Caller,
        volume: Annotated[int, Path(ge=1, lt=1 << 32, description="The volume's number.")],
        offset_bytes: Annotated[int, Path(ge=0, le=(1 << 53) - 1, description="Where the extent lies on it.")],
    ) -> models.QuarantinedExtent:
        """Let an extent be used again; 429 while it is still being read."""
        released = await admin.run(
            caller.principal, lambda: admin.release_quarantine(volume, offset_bytes), caller.deadline_ms
        )
        return models.QuarantinedExtent.model_validate(released)

    @router.get("/namespaces", operation_id="ListNamespaces", tags=["namespaces"], responses=_errors())
    async def list_namespaces(caller: Caller) -> list[models.Namespace]:
        """All namespaces, by name."""
        found = await admin.run(caller.principal, admin.namespaces, caller.deadline_ms)
        return [models.Namespace.model_validate(namespace) for namespace in found]

    @router.post(
        "/namespaces",
        operation_id="CreateNamespace",
        status_code=201,
        tags=["namespaces"],
        responses=_errors(409, 507),
    )
    async def create_namespace(caller: Caller, spec: models.NamespaceSpec) -> models.Namespace:
        """Create a namespace, with a volume on every drive."""
        policy = spec.model_dump(exclude={"name"})
        made = await admin.run(caller.principal, lambda: admin.create_namespace(spec.name, policy), caller.deadline_ms)
        return models.Namespace.model_validate(made)

    @router.get(space_path, operation_id="GetNamespace", tags=["namespaces"], responses=_errors(404))
    async def get_namespace(caller: Caller, tenant: Tenant, name: Space) -> models.Namespace:
        """One namespace."""
        found = await admin.run(caller.principal, lambda: admin.namespace(f"{tenant}/{name}"), caller.deadline_ms)
        return models.Namespace.model_validate(found)

    @router.patch(space_path, operation_id="UpdateNamespace", tags=["namespaces"], responses=_errors(404, 409))
    async def update_namespace(
        caller: Caller, tenant: Tenant, name: Space, policy: models.NamespacePolicy
    ) -> models.Namespace:
        """Change quota, policies or the minimum generation, which can only be raised (409)."""
        given = policy.model_dump(exclude_none=True)
        changed = await admin.run(
            caller.principal, lambda: admin.update_namespace(f"{tenant}/{name}", given), caller.deadline_ms
        )
        return models.Namespace.model_validate(changed)

    @router.delete(space_path, operation_id="DeleteNamespace", tags=["namespaces"], responses=_errors(404))
    async def delete_namespace(
        caller: Caller,
        tenant: Tenant,
        name: Space,
        force: Annotated[bool, Query(description="Delete it although there are blocks in it.")] = False,
    ) -> models.Deleted:
        """Delete a namespace; its sessions end. With blocks in it this needs `force`."""
        blocks, size = await admin.run(
            caller.principal, lambda: admin.delete_namespace(f"{tenant}/{name}", force=force), caller.deadline_ms
        )
        return models.Deleted(blocks=blocks, bytes=size)

    @router.put(
        space_path + "/scopes/{scope}", operation_id="SetScopeQuota", tags=["namespaces"], responses=_errors(404)
    )
    async def set_scope_quota(
        caller: Caller, tenant: Tenant, name: Space, scope: ScopeName, quota: models.ScopeQuota
    ) -> models.Namespace:
        """Bound what blocks of one scope may take in a namespace."""
        changed = await admin.run(
            caller.principal,
            lambda: admin.set_scope_quota(f"{tenant}/{name}", scope, quota.quota_bytes),
            caller.deadline_ms,
        )
        return models.Namespace.model_validate(changed)

    @router.get("/principals", operation_id="ListPrincipals", tags=["principals"], responses=_errors())
    async def list_principals(caller: Caller) -> list[models.Principal]:
        """All principals, by name."""
        found = await admin.run(caller.principal, admin.principals, caller.deadline_ms)
        return [models.Principal.model_validate(principal) for principal in found]

    @router.post(
        "/principals", operation_id="CreatePrincipal", status_code=201, tags=["principals"], responses=_errors(409)
    )
    async def create_principal(caller: Caller, spec: models.PrincipalSpec) -> models.PrincipalWithToken:
        """Create a principal; the answer has its token."""
        principal, token = await admin.run(
            caller.principal, lambda: admin.create_principal(spec.name, admin=spec.admin), caller.deadline_ms
        )
        return models.PrincipalWithToken(principal=models.Principal.model_validate(principal), token=token)

    @router.get("/principals/{principal}", operation_id="GetPrincipal", tags=["principals"], responses=_errors(404))
    async def get_principal(caller: Caller, principal: Who) -> models.Principal:
        """One principal."""
        found = await admin.run(caller.principal, lambda: admin.principal(principal), caller.deadline_ms)
        return models.Principal.model_validate(found)

    @router.delete(
        "/principals/{principal}",
        operation_id="DeletePrincipal",
        status_code=204,
        tags=["principals"],
        responses=_errors(404),
    )
    async def delete_principal(caller: Caller, principal: Who) -> None:
        """Delete a principal; its sessions end. The last administrator stays (400)."""
        await admin.run(caller.principal, lambda: admin.delete_principal(principal), caller.deadline_ms)

    @router.post(
        "/principals/{principal}/token", operation_id="RotateToken", tags=["principals"], responses=_errors(404)
    )
    async def rotate_token(caller: Caller, principal: Who) -> models.PrincipalWithToken:
        """Give a principal a new token; the old one is worth nothing from now on."""
        changed, token = await admin.run(caller.principal, lambda: admin.rotate_token(principal), caller.deadline_ms)
        return models.PrincipalWithToken(principal=models.Principal.model_validate(changed), token=token)

    @router.put("/principals/{principal}/grants", operation_id="SetGrant", tags=["principals"], responses=_errors(404))
    async def set_grant(caller: Caller, principal: Who, spec: models.GrantSpec) -> models.Principal:
        """Set, change or (without rights) take away what a principal may do in one namespace, or in all."""
        grant = Grant(spec.namespace, tuple(spec.rights), tuple(spec.scopes))
        changed = await admin.run(caller.principal, lambda: admin.set_grant(principal, grant), caller.deadline_ms)
        return models.Principal.model_validate(changed)

    return router


def _open_routes(health: Health, scrape: Callable[[], Awaitable[bytes]], open_metrics: bool) -> APIRouter:
    router = APIRouter(tags=["observation"])
    metrics_type = "text/plain; version=0.0.4; charset=utf-8"

    @router.get("/healthz", operation_id="Healthz")
    async def healthz() -> models.Health:
        """The process answers; no token."""
        return models.Health()

    @router.get("/readyz", operation_id="Readyz", responses={503: {"model": models.Ready, "description": "It cannot."}})
    async def readyz() -> JSONResponse:
        """Whether the node can serve, perhaps not all that it should: target, metadata, drives; no token."""
        found = await health.problems()
        problems = [models.Problem.model_validate(problem) for problem in found]
        reads, writes = reads_go_on(found), writes_go_on(found)
        ready = models.Ready(ready=reads, reads=reads, writes=writes, problems=problems)
        return JSONResponse(ready.model_dump(), 200 if ready.ready else 503)

    @router.get(
        "/metrics",
        operation_id="Metrics",
        response_class=Response,
        dependencies=[] if open_metrics else [Depends(_bearer)],
        responses={
            200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **({} if open_metrics else _errors()),
        },
    )
    async def metrics() -> Response:
        """Metrics (docs/metrics.md); a token is needed if `http.open_metrics` is off."""
        return Response(await scrape(), media_type=metrics_type)

    return router


def make_app(
    calls: Calls,
    acl: Acl,
    admin: Administration,
    health: Health,
    scrape: Callable[[], Awaitable[bytes]],
    *,
    open_metrics: bool,
) -> App:
    """The application, for an ASGI server. ``scrape`` makes the text of ``/metrics``."""
    app = FastAPI(
        title="Forebay administration",
        version=__version__,
        description="Administration of one node. Every answer has the header `x-request-id`: the request's own, or one "
        "that was made up; the node's log shows it.",
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
    )
    routers = (_routes(admin), _open_routes(health, scrape, open_metrics))
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]  # FastAPI's own way to change it
    open_paths = _OPEN | {"/metrics"} if open_metrics else _OPEN
    return Edge(app, calls, acl, routes, open_paths)


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without the framework's own form of a validation error: ours is 400."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        app.openapi_schema = json.loads(json.dumps(made))
    return app.openapi_schema
