"""The edge of the control service: every call passes through here, once.

Who calls (token in the connection's metadata), under which request id, how long it may take, how an error looks on the
wire, what is counted, and what becomes of work whose caller has gone. Methods behind it raise errors of
`forebay.errors` and return messages.

An error travels as its gRPC status plus one trailer, ``forebay-error-bin``: `ForebayError.to_json`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from forebay import request_id
from forebay.appliance.control.accounting import CANCELLED, Account, Accounts
from forebay.appliance.control.admission import Admission, keep_place
from forebay.appliance.log import fields
from forebay.appliance.namespace.acl import Acl
from forebay.appliance.namespace.desired_state import Principal
from forebay.appliance.trace import Span, Tracer
from forebay.errors import (
    ERROR_TRAILER,
    GRPC_STATUS,
    OK,
    DeadlineExceeded,
    ForebayError,
    InvalidArgument,
    Unavailable,
    reason,
)

__all__ = [
    "MAX_DEADLINE_MS",
    "Call",
    "Calls",
    "Late",
    "Malformed",
    "Method",
    "Stream",
    "abort",
    "encode",
    "finish",
    "handler",
    "parser",
    "taken",
    "with_context",
]

_log = logging.getLogger(__name__)

MAX_DEADLINE_MS = 600_000
_MAX_IN_FLIGHT = 2048
_MAX_STREAMS = 16_384
_RETRY_MS = 50
_STREAM_RETRY_MS = 500
_TAKEN_S = 10.0

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")
Late = Callable[[T], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """A unary call: name, request class, and the coroutine that answers."""

    name: str
    request: type[Request]
    run: Callable[[Principal, Request], Awaitable[Reply]]
    relieves: bool = False
    """It keeps a session alive or gives something back: to turn it away would make things worse."""


@dataclass(frozen=True, slots=True)
class Stream(Generic[Request, Reply]):
    """A call that answers with a stream."""

    name: str
    request: type[Request]
    run: Callable[[Principal, Request], AsyncGenerator[Reply, None]]


@dataclass(frozen=True, slots=True)
class Malformed:
    """What a request that did not parse becomes, so that its caller gets a coded answer."""

    message: str


async def finish(work: Coroutine[Any, Any, T], deadline_ms: int, late: Late[T] | None = None) -> T:
    """Run work that must not stop half-way, and answer in time all the same.

    Past the deadline, or when the caller goes away, the work runs on; ``late`` then undoes its result, which nobody
    will ever hear of. Raises `DeadlineExceeded`.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.sleep(0)  # the task takes its first step, mostly its last: no timer is needed then
        if not task.done():
            await asyncio.wait({task}, timeout=deadline_ms / 1000)
    finally:
        if not task.done():
            undoing = asyncio.ensure_future(_undo(task, late))
            _undoing.add(undoing)
            undoing.add_done_callback(_undoing.discard)
            keep_place(undoing)
    if not task.done():
        raise DeadlineExceeded(field="deadline_ms", limit=deadline_ms)
    return task.result()


_undoing: set[asyncio.Future[None]] = set()  # the loop itself keeps only weak references


async def _undo(task: asyncio.Future[T], late: Late[T] | None) -> None:
    try:
        result = await task
        if late is not None:
            await late(result)
    except ForebayError as error:
        _log.info("work whose caller had gone ended with: %s", error)
    except Exception:  # nobody else would ever see it
        _log.exception("work whose caller had gone failed")


class Call:
    """One call under way, from `Calls.begin` to `Calls.end`."""

    __slots__ = ("account", "principal", "span", "started_s")

    def __init__(self, account: Account, span: Span | None) -> None:
        self.account = account
        self.span = span
        self.principal = ""
        self.started_s = time.perf_counter()


class Calls:
    """What is shared by all calls of a node, whatever the protocol."""

    def __init__(
        self, acl: Acl, counters: Counter[str], accounts: Accounts | None = None, tracer: Tracer | None = None
    ) -> None:
        self.accounts = accounts or Accounts()
        self._acl = acl
        self._counters = counters
        self._tracer = tracer
        self.calls = Admission(_MAX_IN_FLIGHT, "calls under way", retry_after_ms=_RETRY_MS)
        self.streams = Admission(_MAX_STREAMS, "streams open", retry_after_ms=_STREAM_RETRY_MS)

    def begin(self, account: Account, headers: Mapping[str, Any], given_id: str = "") -> Call:
        """A call comes in; the task is its own. ``given_id`` is the request id that the request itself names."""
        request_id.bind(given_id or str(headers.get(request_id.HEADER, "")))
        account.in_flight += 1
        span = self._tracer.call(f"{account.protocol} {account.method}", headers) if self._tracer else None
        return Call(account, span)

    def end(self, call: Call, code: int, *, lasting: bool = False) -> None:
        """The call is over; ``lasting`` ones (streams) say nothing about how long an answer takes."""
        took_s = time.perf_counter() - call.started_s
        account = call.account
        account.in_flight -= 1
        account.outcomes[code] += 1
        if not lasting:
            account.latency_s.add(took_s)
        if call.span is not None:
            call.span.end(code, call.principal)
        if _log.isEnabledFor(logging.DEBUG):
            named = fields(protocol=account.protocol, code=code, ms=round(took_s * 1e3, 3), principal=call.principal)
            _log.debug("%s", account.method, extra=named)

    def authenticate(self, call: Call, authorization: object) -> Principal:
        """Who calls, by the value of the header ``authorization``. Raises `Unauthenticated`."""
        known = isinstance(authorization, str) and authorization.startswith("Bearer ")
        principal = self._acl.authenticate(str(authorization).removeprefix("Bearer ") if known else None)
        call.principal = principal.name
        return principal

    async def perform(
        self, method: Method[Any, Any], account: Account, request: Any, headers: Mapping[str, Any]
    ) -> Any:
        """One call from its request to its reply; the task is its own. Raises `ForebayError` and nothing else."""
        named = with_context(method) and not isinstance(request, Malformed)
        call, code = self.begin(account, headers, request.context.request_id if named else ""), CANCELLED
        try:
            _check(request)
            principal = self.authenticate(call, headers.get("authorization"))
            with self.calls.enter(principal.name, always=method.relieves):
                reply = await method.run(principal, request)
            code = OK
            return reply
        except Exception as e:  # one place turns every error into a coded one
            error = self.failed(method.name, e)
            code = error.code
            raise error from None
        finally:
            self.end(call, code)

    def failed(self, method: str, error: Exception) -> ForebayError:
        """The error as it goes out; what is not ours is logged and becomes internal."""
        if not isinstance(error, ForebayError):
            _log.error("%s failed", method, exc_info=error)
            error = ForebayError("internal error: the node's log says more")
        self._counters[f"errors_{reason(error.code)}"] += 1
        return error


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return message.SerializeToString()


def parser(cls: type[Message]) -> Callable[[bytes], Any]:
    """What makes a message of bytes, or `Malformed`."""

    def parse(data: bytes) -> Message | Malformed:
        try:
            return cls.FromString(data)
        except DecodeError as e:
            return Malformed(str(e))

    return parse


def with_context(method: Method[Any, Any] | Stream[Any, Any]) -> bool:
    """Whether it is a data call: its request says in which session and by when."""
    return "context" in method.request.DESCRIPTOR.fields_by_name


def _check(request: Any) -> None:
    if isinstance(request, Malformed):
        raise InvalidArgument(f"the request does not parse: {request.message}", field="request")


async def taken(write: Awaitable[None]) -> None:
    """Wait until gRPC has taken an answer. Raises `Unavailable` for a client that takes none, and so ends with it."""
    try:
        async with asyncio.timeout(_TAKEN_S):
            await write
    except TimeoutError:
        raise Unavailable(f"the client took no answer for {_TAKEN_S:g} s") from None
    except grpc.aio.BaseError:
        raise Unavailable("the client went away while it was answered") from None


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ForebayError) -> None:
    """End a gRPC call with an error."""
    status = next(GRPC_STATUS[cls] for cls in type(error).__mro__ if cls in GRPC_STATUS)
    trailer = ((ERROR_TRAILER, error.to_json()),)
    await context.abort(grpc.StatusCode[status], error.message[:512], trailing_metadata=trailer)


def handler(calls: Calls, method: Method[Any, Any] | Stream[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The gRPC handler of a call."""
    account = calls.accounts.of("grpc", method.name)
    parse = parser(method.request)
    if isinstance(method, Method):
        unary_method = method

        async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await calls.perform(unary_method, account, request, dict(context.invocation_metadata() or ()))
            except ForebayError as error:
                await abort(context, error)

        return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=parse, response_serializer=encode)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        headers = dict(context.invocation_metadata() or ())
        named = in_context and not isinstance(request, Malformed)
        call, code = calls.begin(account, headers, request.context.request_id if named else ""), CANCELLED
        try:
            try:
                _check(request)
                principal = calls.authenticate(call, headers.get("authorization"))
                with calls.streams.enter(principal.name):
                    async with aclosing(method.run(principal, request)) as replies:
                        async for reply in replies:
                            await taken(context.write(reply))
                code = OK
                return
            except Exception as e:  # one place turns every error into a status
                error = calls.failed(method.name, e)
                code = error.code
        finally:
            calls.end(call, code, lasting=True)
        await abort(context, error)

    in_context = with_context(method)
    return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=parse, response_serializer=encode)
