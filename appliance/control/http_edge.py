"""The edge of the HTTP API: what `calls.handler` is to gRPC.

Every request passes here once: token, request id, limits, accounting; and every error becomes JSON of
`ForebayError.to_dict` with the status that `HTTP_STATUS` has for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from forebay import request_id
from forebay.appliance.control.accounting import CANCELLED, Account
from forebay.appliance.control.calls import Calls
from forebay.appliance.namespace.acl import Acl
from forebay.appliance.namespace.desired_state import Principal
from forebay.errors import OK, DeadlineExceeded, ForebayError, InvalidArgument, NotFound, http_status

__all__ = ["HANDLERS", "MAX_BODY_BYTES", "App", "Edge", "principal_of"]

MAX_BODY_BYTES = 256 << 10
_BODY_S = 10.0
_STATE = "forebay"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class _State:
    """What the edge and the handlers tell each other of one request."""

    __slots__ = ("allowed", "error", "principal")

    def __init__(self, allowed: str) -> None:
        self.allowed = allowed
        """Methods of the path."""
        self.principal: Principal | None = None
        self.error: Exception | None = None


def _answer(error: ForebayError, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    extra = dict(headers or {})
    status = status or http_status(error)
    if status == 401:
        extra["www-authenticate"] = "Bearer"
    if error.retry_after_ms:
        extra["retry-after"] = str(-(-error.retry_after_ms // 1000))
    return JSONResponse(error.to_dict(), status, extra)


class Edge:
    """The outermost layer: see the module. ``routes`` say what a request is called; ``open_paths`` need no token."""

    def __init__(
        self, app: App, calls: Calls, acl: Acl, routes: Iterable[APIRoute], open_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._calls = calls
        self._acl = acl
        self._open = open_paths
        self._routes = [(route, calls.accounts.of("http", str(route.operation_id))) for route in routes]
        self._other = calls.accounts.of("http", "other")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a server that is set up for HTTP alone passed on {scope['type']}")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        route, account, allowed = self._routed(scope)
        call, code = self._calls.begin(account, headers), CANCELLED
        state = scope[_STATE] = _State(allowed)
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (request_id.HEADER.encode(), request_id.current().encode()),
                    (b"cache-control", b"no-store"),
                ]
            await send(message)

        try:
            if scope["path"] in self._open:
                await self._app(scope, receive, sending)
            else:
                state.principal = self._calls.authenticate(call, headers.get("authorization"))
                self._acl.need_admin(state.principal)
                with self._calls.calls.enter(state.principal.name):
                    if scope["path"] != "/metrics":  # scrapers have parameters of their own
                        _check_query(scope, route)
                    body = await _body(headers, receive)
                    await self._app(scope, _replayed(body, receive), sending)
            if state.error is not None:
                code = self._calls.failed(account.method, state.error).code
            else:
                code = OK
        except Exception as e:  # one place turns every error into a status
            error = self._calls.failed(account.method, e)
            code = error.code
            if not begun:
                await _answer(error)(scope, receive, sending)
        finally:
            self._calls.end(call, code)

    def _routed(self, scope: Scope) -> tuple[APIRoute | None, Account, str]:
        """A request's route and where it is counted, and the methods that its path has."""
        found, account, allowed = None, self._other, set[str]()
        for route, own in self._routes:
            match = route.matches(scope)[0]
            if match is not Match.NONE:
                allowed |= route.methods or set()
            if match is Match.FULL:
                found, account = route, own
        return found, account, ", ".join(sorted(allowed))


def _check_query(scope: Scope, route: APIRoute | None) -> None:
    """Refuse parameters that a route does not have, since a misspelt one would silently mean nothing."""
    known = {parameter.alias for parameter in route.dependant.query_params} if route is not None else set[str]()
    for name, _ in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if route is not None and name not in known:
            limit = ", ".join(sorted(known)) or "none"
            raise InvalidArgument(f"there is no parameter {name[:80]!r}", field=name[:80], limit=limit)


async def _body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The whole body, which is short and comes soon. Raises `InvalidArgument`, `DeadlineExceeded`."""
    declared = headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            more = True
            while more:
                if len(body) > MAX_BODY_BYTES or (declared.isdecimal() and int(declared) > MAX_BODY_BYTES):
                    raise InvalidArgument("the body is too long", field="body", limit=MAX_BODY_BYTES)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise InvalidArgument("the body ended early", field="body")
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise DeadlineExceeded("the body did not come in time", field="body", limit=f"{_BODY_S:g} s") from None
    return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then what the connection says."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _on_error(request: Request, error: Exception) -> Response:
    """Errors that a handler raised, and those of the framework, as ours."""
    state: _State = request.scope[_STATE]
    status, headers = None, None
    if isinstance(error, RequestValidationError):
        ours: ForebayError = _invalid(error)
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        if status == 405:
            headers["Allow"] = state.allowed  # the framework names those of one route only
        kind = NotFound if status == 404 else InvalidArgument
        ours = kind(f"{request.method} {request.url.path[:200]}: {error.detail}", field="path")
    elif isinstance(error, ForebayError):
        ours = error
    else:
        state.error = error
        return _answer(ForebayError("internal error: the node's log says more"))
    state.error = ours
    return _answer(ours, status, headers)


_LIMITS = frozenset(("ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "expected"))
"""Under these names the framework's errors have what is allowed."""


def _invalid(error: RequestValidationError) -> InvalidArgument:
    first = error.errors()[0]
    loc, context = first.get("loc", ()), first.get("ctx", {})
    if first.get("type") == "json_invalid":
        return InvalidArgument(f"the body is no JSON: {context.get('error')} at character {loc[-1]}", field="body")
    if loc == ("body",):
        return InvalidArgument("no JSON object came: is `Content-Type: application/json` set?", field="body")
    field = ".".join(str(part) for part in loc if part not in ("body", "query", "path", "header"))
    limit = next((value for name, value in context.items() if name in _LIMITS), None)
    return InvalidArgument(f"{field}: {first.get('msg', 'not valid')}", field=field, limit=limit)


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = dict.fromkeys(
    (ForebayError, RequestValidationError, HTTPException, Exception), _on_error
)
"""For the application behind the edge."""


def principal_of(request: Request) -> Principal:
    """Who asks: an administrator, by the edge's word."""
    principal: Principal = request.scope[_STATE].principal
    return principal
