"""The stream ``Calls`` (docs/adr/0008-call-stream.md): data calls as messages, for the price of messages.

Each message is a call of its own, a task of its own, served by the same method and counted in the same account as its
unary twin. The stream adds what gRPC does for unary calls: ids, cancellation, and a bound on what is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf.message import Message

from forebay import request_id
from forebay.appliance.control.accounting import CANCELLED, Account
from forebay.appliance.control.calls import (
    Calls,
    Malformed,
    Method,
    Stream,
    abort,
    encode,
    parser,
    taken,
    with_context,
)
from forebay.errors import OK, Busy, ForebayError, InvalidArgument, Unavailable
from forebay.proto import forebay_pb2 as pb

__all__ = ["CallStreams"]

_log = logging.getLogger(__name__)

_NAME = "Calls"
_MAX_CALLS = 256
_MAX_BYTES = 64 << 20
"""Of one stream: messages that may be under way, from being read to being answered, and the bytes of their requests."""
_RETRY_MS = 20


class CallStreams:
    """The handler of ``Calls``, for those of a service's methods that can go by it."""

    def __init__(self, calls: Calls, methods: Iterable[Method[Any, Any] | Stream[Any, Any]]) -> None:
        self._calls = calls
        self._account = calls.accounts.of("grpc", _NAME)
        self._served: dict[str, tuple[Method[Any, Any], Account]] = {
            method.name: (method, calls.accounts.of("grpc", method.name))
            for method in methods
            if isinstance(method, Method) and with_context(method)
        }
        self._streams: set[_CallStream] = set()
        self._ending = False

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The gRPC handler, by the method's name."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve, request_deserializer=parser(pb.CallRequest), response_serializer=encode
        )
        return {_NAME: handler}

    def drain(self) -> None:
        """Read no further messages: each stream ends once those under way are answered."""
        self._ending = True
        for stream in self._streams:
            stream.drain()

    async def _serve(self, _: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        headers = {key: value for key, value in context.invocation_metadata() or () if key != request_id.HEADER}
        call, code = self._calls.begin(self._account, headers), CANCELLED
        stream = _CallStream(self._calls, self._served, headers, context)
        try:
            try:
                principal = self._calls.authenticate(call, headers.get("authorization"))
                if self._ending:
                    raise _stopping()
                self._streams.add(stream)
                with self._calls.streams.enter(principal.name):
                    await stream.serve()
                code = OK
                return
            except Exception as e:  # one place turns every error into a status
                error = self._calls.failed(_NAME, e)
                code = error.code
        finally:
            self._streams.discard(stream)
            self._calls.end(call, code, lasting=True)
        await abort(context, error)


class _CallStream:
    """One stream of one client."""

    def __init__(
        self,
        calls: Calls,
        served: dict[str, tuple[Method[Any, Any], Account]],
        headers: dict[str, Any],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        self._calls = calls
        self._served = served
        self._headers = headers
        self._context = context
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._working: dict[int, asyncio.Task[None]] = {}  # those that have no answer yet
        self._bytes = 0
        self._draining = False
        self._stuck: Unavailable | None = None
        """The client takes no answers: there is no use in further ones."""

    async def serve(self) -> None:
        """Answer messages until the client sends no more. Raises `InvalidArgument` for what names no call."""
        self._reading = asyncio.create_task(self._read())
        try:
            try:
                await self._reading
            except asyncio.CancelledError:
                if not self._draining:
                    raise
            while self._tasks:
                await asyncio.wait(self._tasks)
            if self._draining:
                raise self._stuck or _stopping()
        finally:  # the client went away, or broke the protocol: nobody waits for the rest
            for task in self._tasks:
                task.cancel()

    def drain(self) -> None:
        """Read no more; `serve` ends with `Unavailable` once all is answered."""
        self._draining = True
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        while True:
            message = await self._context.read()
            if message is grpc.aio.EOF:
                return
            if isinstance(message, Malformed):
                raise InvalidArgument(f"a message of the stream does not parse: {message.message}", field="request")
            if message.cancel:
                task = self._working.pop(message.id, None)
                if task is not None:
                    task.cancel()
            elif message.id in self._working:
                raise InvalidArgument(f"call {message.id} is under way already", field="id")
            elif len(self._tasks) >= _MAX_CALLS or (self._bytes and self._bytes + len(message.request) > _MAX_BYTES):
                # Answered here, so that a client that does not read what it is told is not read from either.
                busy = pb.CallReply(id=message.id, error=self._busy(message.method).to_json())
                writing = asyncio.create_task(self._write(busy))
                self._tasks.add(writing)
                writing.add_done_callback(self._ended)
                await asyncio.shield(writing)
            else:
                self._begin(message)

    def _begin(self, message: pb.CallRequest) -> None:
        size = len(message.request)
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        self._bytes += size
        self._working[message.id] = task

        def done(task: asyncio.Task[None]) -> None:
            self._bytes -= size
            if self._working.get(message.id) is task:  # it was ended before it began
                del self._working[message.id]
            self._ended(task)

        task.add_done_callback(done)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("an answer was not sent: %s", error)

    async def _answer(self, message: pb.CallRequest) -> None:
        try:
            reply = pb.CallReply(id=message.id, reply=encode(await self._perform(message)))
        except ForebayError as error:
            reply = pb.CallReply(id=message.id, error=error.to_json())
        self._working.pop(message.id, None)  # from here on a cancellation would leave half a write
        await self._write(reply)

    async def _perform(self, message: pb.CallRequest) -> Message:
        try:
            method, account = self._served[message.method]
        except KeyError:
            error = InvalidArgument(f"{message.method[:80]!r} is no call that goes by this stream", field="method")
            raise self._calls.failed(_NAME, error) from None
        headers = {**self._headers, request_id.HEADER: message.request_id, "traceparent": message.traceparent}
        request = parser(method.request)(message.request)
        reply: Message = await self._calls.perform(method, account, request, headers)
        return reply

    def _busy(self, method: str) -> ForebayError:
        error = Busy("the stream has as many calls in flight as it takes", limit=_MAX_CALLS, retry_after_ms=_RETRY_MS)
        if method in self._served:
            self._served[method][1].outcomes[error.code] += 1
        return self._calls.failed(method, error)

    async def _write(self, reply: pb.CallReply) -> None:
        async with self._writing:
            if self._stuck is not None:
                raise self._stuck
            try:
                await taken(self._context.write(reply))
            except Unavailable as error:
                self._stuck = error
                self.drain()
                raise


def _stopping() -> ForebayError:
    return Unavailable("the node is stopping")
