"""The control channel: gRPC with a token, and the one place where its errors become ours."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from forebay import request_id
from forebay.client.call_stream import CallStream, NotServed
from forebay.clock import Clock
from forebay.errors import (
    ERROR_TRAILER,
    Busy,
    DeadlineExceeded,
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
    Unavailable,
    from_code,
)
from forebay.proto import forebay_pb2 as pb
from forebay.proto import forebay_pb2_grpc as services

__all__ = ["DEFAULT_PORT", "NodeAddress", "Rpc", "find_token"]

_log = logging.getLogger(__name__)

DEFAULT_PORT = 7470
MAX_MESSAGE_BYTES = 64 << 20

_BY_STATUS: dict[grpc.StatusCode, type[ForebayError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Busy,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
}
_ATTEMPT_MS = 100
_MAX_RETRY_MS = 2_000
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A node that restarts is found again soon, and until then calls fail at once: they are misses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A connection that nothing comes from any more, without an end, is given up, and another one tried. The node takes
    # a ping every five seconds.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute else, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Two clients in one process must not share a connection that one of them closes.
    ("grpc.use_local_subchannel_pool", 1),
]

_Q = TypeVar("_Q")
_A = TypeVar("_A")


class _RanOut(Exception):
    """An attempt to connect ran out of time; ``error`` says so."""

    def __init__(self, error: ForebayError) -> None:
        self.error = error


class NodeAddress:
    """A node's control address, parsed from ``forebay://host[:port]``."""

    __slots__ = ("host", "port")

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"forebay://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        if parts.scheme != "forebay" or not parts.hostname or extra or port == -1:
            raise InvalidArgument(f"{url!r} is not forebay://host:port", field="url")
        self.host: str = parts.hostname
        self.port: int = DEFAULT_PORT if port is None else port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_token(token: str | None) -> str:
    """``token``, else FOREBAY_TOKEN, else the admin token of a node's data directory on this host.

    Raises `Unauthenticated` when there is none.
    """
    if token is None:
        token = os.environ.get("FOREBAY_TOKEN") or None  # set to nothing is not set
    if token is None:
        data = os.environ.get("FOREBAY_DATA") or "~/.local/share/forebay"
        path = Path(data).expanduser() / "admin.token"
        try:
            token = path.read_text()
        except OSError as e:
            raise Unauthenticated(
                f"no token was given, FOREBAY_TOKEN is not set, and {path} cannot be read: {e.strerror}", field="token"
            ) from e
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise Unauthenticated("the token is empty or not printable ASCII", field="token")
    return token


class Rpc:
    """A channel to one node; thread-safe. Every call has a deadline on the clock's monotonic scale.

    ``attempt_ms`` is how long one attempt to connect may take at least: calls wait for it. Data calls go by one stream
    (`CallStream`) if the node knows it and ``streams`` says so. Raises what the node answered, or `Unavailable`,
    `DeadlineExceeded`, `ProtocolError`.
    """

    def __init__(
        self, address: NodeAddress, token: str, clock: Clock, attempt_ms: int = _ATTEMPT_MS, *, streams: bool = True
    ) -> None:
        self.address = address
        self._clock = clock
        self._process = os.getpid()
        self._attempt_ms = attempt_ms
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel = grpc.insecure_channel(
            str(address), options=[*_OPTIONS, ("grpc.min_reconnect_backoff_ms", attempt_ms)]
        )
        self.blocks = services.BlocksStub(self._channel)
        self.admin = services.AdminStub(self._channel)
        self._stream = CallStream(
            lambda messages: self.blocks.Calls(messages, metadata=self._metadata), lambda e: self._translate(e, None)
        )
        self._streamed = _streamed(self.blocks) if streams else {}
        self._changing = threading.Lock()
        self._closed = threading.Event()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that it belongs to: the connections and threads are that one's."""
        return os.getpid() != self._process

    def left_ms(self, deadline_ms: int) -> int:
        """Milliseconds to a deadline. Raises `DeadlineExceeded` when none are left."""
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise DeadlineExceeded("the deadline passed before the call was sent")
        return left_ms

    def call(
        self, method: grpc.UnaryUnaryMultiCallable[_Q, _A], request: _Q, deadline_ms: int, *, patient: bool = False
    ) -> _A:
        """One request, one answer; asked again when a node that is busy says so, if that is before the deadline.

        A ``patient`` one is asked again, too, when an attempt to connect runs out of time, as it may on a busy machine.
        When the last try has less time left than an attempt may take, what the one before it met is raised.
        """
        attempt = 0
        met: ForebayError | None = None
        while True:
            left_ms = deadline_ms - self._clock.monotonic_ms()
            try:
                if met is not None:
                    _set_deadline(request, self.left_ms(deadline_ms))
                return self._once(method, request, deadline_ms)
            except _RanOut as e:
                met, wait_ms = e.error, self._attempt_ms
                if not patient or self._clock.monotonic_ms() + wait_ms >= deadline_ms:
                    raise met from None
            except DeadlineExceeded:
                if met is None or left_ms >= self._attempt_ms:  # it had its time, and what it asked for may be done
                    raise
                raise met from None
            except Busy as e:
                met = e
                # Longer each time, so that those who are turned away do not keep the node from its work.
                wait_ms = min(e.retry_after_ms << min(attempt, 8), max(e.retry_after_ms, _MAX_RETRY_MS))
                wait_ms = int(wait_ms * random.uniform(1.0, 1.5))
                if not wait_ms or self._clock.monotonic_ms() + wait_ms >= deadline_ms:
                    raise
            attempt += 1
            if self._closed.wait(wait_ms / 1000):
                raise self._is_closed()

    def _once(self, method: grpc.UnaryUnaryMultiCallable[_Q, _A], request: _Q, deadline_ms: int) -> _A:
        self._check_process()
        timeout_s = self.left_ms(deadline_ms) / 1000
        streamed = self._streamed.get(method)
        if streamed is not None:
            try:
                return cast(_A, self._by_stream(*streamed, request, timeout_s))
            except NotServed:
                with self._changing:
                    if self._streamed:
                        _log.info("the node at %s takes no stream of calls: each goes by itself", self.address)
                    self._streamed = {}
            timeout_s = self.left_ms(deadline_ms) / 1000
        try:
            reply = method(request, timeout=timeout_s, metadata=self._named())
        except grpc.RpcError as e:
            error = self._translate(e, timeout_s)
            raise (_RanOut(error) if _ran_out(e) else error) from None
        except ValueError as e:  # what grpc raises on a closed channel
            raise self._is_closed() from e
        if reply is None:  # a good status without a message, as gRPC gives it
            raise ProtocolError("the node's answer lacks its message")
        return reply

    def _by_stream(self, name: str, reply: type[Any], request: Any, timeout_s: float) -> Any:
        try:
            answer = self._stream.call(name, request.SerializeToString(), timeout_s, request_id.current())
        except DeadlineExceeded:
            raise self._too_late(timeout_s) from None
        except ValueError as e:
            raise self._is_closed() from e
        if answer.error:
            raise _known(answer.error) or ProtocolError("the node answered an error that does not parse")
        try:
            return reply.FromString(answer.reply)
        except DecodeError as e:
            raise ProtocolError(f"the node's answer to {name} does not parse: {e}") from e

    def stream(
        self,
        method: grpc.UnaryStreamMultiCallable[_Q, _A],
        request: _Q,
        deadline_ms: int | None,
        started: Callable[[Callable[[], object]], None] = lambda cancel: None,
    ) -> Iterator[_A]:
        """One request, many answers; ``started`` is given what cancels it."""
        self._check_process()
        timeout_s = None if deadline_ms is None else self.left_ms(deadline_ms) / 1000
        try:
            replies = method(request, timeout=timeout_s, metadata=self._named())
            started(replies.cancel)
            try:
                yield from replies
            finally:
                replies.cancel()
        except grpc.RpcError as e:
            raise self._translate(e, timeout_s) from None
        except ValueError as e:
            raise self._is_closed() from e

    def _named(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call: the token, and the id of the request that it belongs to, if there is one."""
        ident = request_id.current()
        return (*self._metadata, (request_id.HEADER, ident)) if ident else self._metadata

    def _translate(self, error: grpc.RpcError, timeout_s: float | None) -> ForebayError:
        if not isinstance(error, grpc.Call):
            return Unavailable(f"the control channel failed: {error}")
        for key, value in error.trailing_metadata() or ():
            if key == ERROR_TRAILER:
                known = _known(value)
                if known is not None:
                    return known
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            return self._too_late(timeout_s)
        if code is grpc.StatusCode.UNAVAILABLE:
            why = details.rpartition(": ")[2].rstrip("]")  # the innermost of what gRPC strings together
            if _ran_out(error):
                return Unavailable(f"the node at {self.address} did not answer within {self._attempt_ms / 1000:.1f} s")
            return Unavailable(f"the node at {self.address} does not answer" + (f" ({why})" if why else ""))
        return _BY_STATUS.get(code, ForebayError)(details or f"the node answered {code.name}")

    def _too_late(self, timeout_s: float) -> ForebayError:
        return DeadlineExceeded(f"the node at {self.address} did not answer within {timeout_s:.1f} s")

    def _check_process(self) -> None:
        if self.forked:
            raise Unavailable("this client belongs to the process that was forked: make one here, or join its session")

    def _is_closed(self) -> ForebayError:
        return Unavailable(f"the channel to {self.address} is closed")

    def close(self) -> None:
        """Close the channel; calls under way end as `Unavailable`. In a forked process it does nothing."""
        if self.forked:
            return
        self._closed.set()
        self._stream.close()
        self._channel.close()


def _streamed(blocks: services.BlocksStub) -> dict[object, tuple[str, type[Message]]]:
    """Name and class of the reply for each method that goes by the stream: those of one answer, with a context.

    But for heartbeats: a stream that is full of calls would turn them away, and with them goes the session.
    """
    return {
        getattr(blocks, method.name): (method.name, GetMessageClass(method.output_type))
        for method in pb.DESCRIPTOR.services_by_name["Blocks"].methods
        if "context" in method.input_type.fields_by_name and not method.server_streaming and method.name != "Heartbeat"
    }


def _ran_out(error: grpc.RpcError) -> bool:
    """Whether an attempt to connect took longer than it may; the words are gRPC's, which has no code for it."""
    if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return "timed out" in details or "handshaker shutdown" in details


def _set_deadline(request: object, left_ms: int) -> None:
    """Have a request say how long there is now."""
    named = getattr(request, "context", request)
    if hasattr(named, "deadline_ms"):
        named.deadline_ms = min(left_ms, named.deadline_ms)


def _known(value: str | bytes) -> ForebayError | None:
    try:
        fields: dict[str, Any] = json.loads(value)
        limit = fields.get("limit")
        return from_code(
            int(fields["code"]),
            str(fields.get("message", "")),
            field=str(fields.get("field", "")),
            limit=limit if limit is None or isinstance(limit, int) else str(limit),
            retry_after_ms=int(fields.get("retry_after_ms", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
