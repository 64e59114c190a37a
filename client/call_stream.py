"""Data calls as messages of one long-lived stream (docs/adr/0008-call-stream.md).

A unary call costs more to set up and to end than to answer; a message costs half of it. Callers' threads wait each for
the answer to their own message; one thread of the stream reads the answers. A stream is opened by the first call and,
after it broke, by the next one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

import grpc

from forebay.client.threads import begin
from forebay.errors import Busy, DeadlineExceeded, ForebayError, Unavailable
from forebay.proto import forebay_pb2 as pb

__all__ = ["CallStream", "NotServed"]

_MAX_CALLS = 256
"""Calls of one stream that may be under way; the node has the same bound."""
_RETRY_MS = 20


class Replies(Protocol):
    """What gRPC gives for a stream."""

    def __iter__(self) -> Iterator[pb.CallReply]: ...

    def cancel(self) -> object: ...


Open = Callable[[Iterator[pb.CallRequest]], Replies]
Translate = Callable[[grpc.RpcError], ForebayError]


class NotServed(Exception):
    """The node knows no such stream, and has not looked at the call."""


class CallStream:
    """The stream of one channel, opened and opened again as calls need it. Thread-safe.

    ``open`` starts the gRPC call for an iterator of messages; ``translate`` makes our error of what ended it.
    """

    def __init__(self, open: Open, translate: Translate) -> None:
        self._open = open
        self._translate = translate
        self._changing = threading.Lock()
        self._current: _Stream | None = None
        self._closed = False

    def call(self, method: str, request: bytes, timeout_s: float, request_id: str) -> pb.CallReply:
        """Send one message and wait for its answer, whatever that says.

        Raises what ended the stream meanwhile, `Unavailable` mostly; `DeadlineExceeded`; `Busy` when too many calls are
        under way; `NotServed`.
        """
        waiting = _Waiting(method, request, request_id)
        while not (stream := self._stream()).enter(waiting):
            pass  # it ended just now
        try:
            answered = waiting.answered.acquire(timeout=timeout_s)
        except BaseException:
            stream.give_up(waiting)
            raise
        if not answered:
            if stream.give_up(waiting):
                raise DeadlineExceeded("no answer in time")
            waiting.answered.acquire()  # it comes just now
        if waiting.reply is None:
            raise self._error(waiting.failure)
        return waiting.reply

    def close(self) -> None:
        """End the stream; calls under way end as `Unavailable`. No call opens another one."""
        with self._changing:
            self._closed = True
            stream, self._current = self._current, None
        if stream is not None:
            stream.close()

    def _error(self, failure: grpc.RpcError | None) -> Exception:
        if failure is None:
            return Unavailable("the stream of calls ended")
        if isinstance(failure, grpc.Call) and failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return NotServed()
        return self._translate(failure)

    def _stream(self) -> _Stream:
        with self._changing:
            if self._closed:
                raise Unavailable("the channel is closed")
            if self._current is None or self._current.ended:
                self._current = _Stream(self._open)
            return self._current


class _Waiting:
    """A call under way and, in the end, what became of it. ``answered`` is released once that is there."""

    __slots__ = ("answered", "failure", "id", "method", "reply", "request", "request_id", "sent")

    def __init__(self, method: str, request: bytes, request_id: str) -> None:
        self.method = method
        self.request = request
        self.request_id = request_id
        self.id = 0
        self.sent = False
        self.answered = threading.Lock()
        self.answered.acquire()
        self.reply: pb.CallReply | None = None
        self.failure: grpc.RpcError | None = None


class _Stream:
    """One stream, from its first call to its end."""

    def __init__(self, open: Open) -> None:
        self.ended = False
        self._open = open
        self._call: Replies | None = None
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._outbox: SimpleQueue[int] = SimpleQueue()
        """Ids in the order of sending: 0 ends the stream; negative, nobody waits for the answer any more."""

    def enter(self, waiting: _Waiting) -> bool:
        """Have a message sent; False if the stream has ended. Raises `Busy`, and what opening raises.

        Who comes first opens the stream, and so hears why it could not be opened.
        """
        with self._lock:
            if self.ended:
                return False
            # What nobody waits for any more counts until gRPC has taken it, which it may not for a node that stands.
            if len(self._waiting) >= _MAX_CALLS or self._outbox.qsize() >= _MAX_CALLS:
                raise Busy("too many calls are under way", limit=_MAX_CALLS, retry_after_ms=_RETRY_MS)
            if self._call is None:
                self._call = self._begun()
            waiting.id = next(self._ids)
            self._waiting[waiting.id] = waiting
        self._outbox.put(waiting.id)
        return True

    def _begun(self) -> Replies:
        """The stream, opened, with a thread that reads from it; where the process may have none, it has ended.

        Raises `Unavailable` then: a stream that nobody reads would keep each call until its deadline.
        """
        call = self._open(self._messages())
        try:
            begin(lambda: self._read(call), "forebay-calls")
        except Unavailable:
            self.ended = True
            self._outbox.put(0)
            call.cancel()
            raise
        return call

    def give_up(self, waiting: _Waiting) -> bool:
        """Nobody waits any more; False if the answer is there already."""
        with self._lock:
            if self._waiting.pop(waiting.id, None) is None:
                return False
            if waiting.sent:
                self._outbox.put(-waiting.id)
            return True

    def close(self) -> None:
        self._end(None)
        if self._call is not None:
            self._call.cancel()

    def _messages(self) -> Iterator[pb.CallRequest]:
        """What gRPC sends, in a thread of its own."""
        while ident := self._outbox.get():
            if ident < 0:
                yield pb.CallRequest(id=-ident, cancel=True)
                continue
            with self._lock:
                waiting = self._waiting.get(ident)
                if waiting is None:
                    continue
                waiting.sent = True
            yield pb.CallRequest(
                id=ident, method=waiting.method, request=waiting.request, request_id=waiting.request_id
            )

    def _read(self, call: Replies) -> None:
        failure: grpc.RpcError | None = None
        try:
            for reply in call:
                with self._lock:
                    waiting = self._waiting.pop(reply.id, None)
                if waiting is not None:  # else it was given up
                    waiting.reply = reply
                    waiting.answered.release()
        except grpc.RpcError as e:
            failure = e
        finally:
            self._end(failure)

    def _end(self, failure: grpc.RpcError | None) -> None:
        with self._lock:
            self.ended = True
            waiting, self._waiting = list(self._waiting.values()), {}
        self._outbox.put(0)
        for one in waiting:
            one.failure = failure
            one.answered.release()
