"""The edge of the control service: every call passes through here, once.

Who calls (token in the connection's metadata), how long it may take, how an error looks on the wire, and what becomes
of work whose caller has gone. Methods behind it raise errors of `forebay.errors` and return messages.

An error travels as its gRPC status plus one trailer, ``forebay-error-bin``: JSON of `ForebayError.to_dict`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from forebay.appliance.namespace.acl import Acl
from forebay.appliance.namespace.desired_state import Principal
from forebay.errors import (
    GRPC_STATUS,
    Busy,
    DeadlineExceeded,
    ForebayError,
    InvalidArgument,
    reason,
)

__all__ = ["ERROR_TRAILER", "MAX_DEADLINE_MS", "Calls", "Late", "Method", "Stream", "finish", "handler"]

_log = logging.getLogger(__name__)

ERROR_TRAILER = "forebay-error-bin"
MAX_DEADLINE_MS = 600_000
_MAX_IN_FLIGHT = 1024
_RETRY_MS = 50

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


@dataclass(frozen=True, slots=True)
class Stream(Generic[Request, Reply]):
    """A call that answers with a stream."""

    name: str
    request: type[Request]
    run: Callable[[Principal, Request], AsyncIterator[Reply]]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """What a request that did not parse becomes, so that its caller gets a coded answer."""

    message: str


async def finish(work: Coroutine[Any, Any, T], deadline_ms: int, late: Late[T] | None = None) -> T:
    """Run work that must not stop half-way, and answer in time all the same.

    Past the deadline, or when the caller goes away, the work runs on; ``late`` then undoes its result, which nobody
    will ever hear of. Raises `DeadlineExceeded`.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=deadline_ms / 1000)
    finally:
        if not task.done():
            undoing = asyncio.ensure_future(_undo(task, late))
            _undoing.add(undoing)
            undoing.add_done_callback(_undoing.discard)
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


class Calls:
    """What is shared by all calls of a node."""

    def __init__(self, acl: Acl, counters: Counter[str]) -> None:
        self._acl = acl
        self._counters = counters
        self._in_flight = 0

    def principal(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal:
        """Who calls. Raises `Unauthenticated`."""
        for name, value in context.invocation_metadata() or ():
            if name == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
                return self._acl.authenticate(value.removeprefix("Bearer "))
        return self._acl.authenticate(None)

    def enter(self) -> None:
        """Count a call in. Raises `Busy` beyond the node's limit."""
        if self._in_flight >= _MAX_IN_FLIGHT:
            raise Busy(
                "the node has as many calls in flight as it takes", limit=_MAX_IN_FLIGHT, retry_after_ms=_RETRY_MS
            )
        self._in_flight += 1

    def leave(self) -> None:
        """Count a call out."""
        self._in_flight -= 1

    def failed(self, method: str, error: Exception) -> ForebayError:
        """The error as it goes out; what is not ours is logged and becomes internal."""
        if not isinstance(error, ForebayError):
            _log.error("%s failed", method, exc_info=error)
            error = ForebayError("internal error: the node's log says more")
        self._counters[f"errors_{reason(error.code)}"] += 1
        return error


def _parse(cls: type[Message]) -> Callable[[bytes], Message | _Malformed]:
    def parse(data: bytes) -> Message | _Malformed:
        try:
            return cls.FromString(data)
        except DecodeError as e:
            return _Malformed(str(e))

    return parse


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise InvalidArgument(f"the request does not parse: {request.message}", field="request")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ForebayError) -> None:
    status = next(GRPC_STATUS[cls] for cls in type(error).__mro__ if cls in GRPC_STATUS)
    trailer = ((ERROR_TRAILER, json.dumps(error.to_dict()).encode()),)
    await context.abort(grpc.StatusCode[status], error.message[:512], trailing_metadata=trailer)


def handler(calls: Calls, method: Method[Any, Any] | Stream[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The gRPC handler of a call."""

    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            _check(request)
            principal = calls.principal(context)
            calls.enter()
            try:
                return await method.run(principal, request)  # type: ignore[misc]  # unary, see below
            finally:
                calls.leave()
        except Exception as e:  # one place turns every error into a status
            error = calls.failed(method.name, e)
        await _abort(context, error)
        return None

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            _check(request)
            principal = calls.principal(context)
            async for reply in method.run(principal, request):  # type: ignore[union-attr]
                yield reply
            return
        except Exception as e:  # one place turns every error into a status
            error = calls.failed(method.name, e)
        await _abort(context, error)

    parse, encode = _parse(method.request), Message.SerializeToString
    if isinstance(method, Stream):
        return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=parse, response_serializer=encode)
    return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=parse, response_serializer=encode)
