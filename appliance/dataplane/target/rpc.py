"""The control socket: JSON-RPC 2.0 as SPDK speaks it, JSON objects one after the other on a UNIX socket.

Each connection has a thread. Methods that may wait (for media, for other threads) run in others, so that one slow
answer holds up neither the other requests of its connection nor those of another. Those threads are kept for the next
such request: to start one takes as long as a request that does not wait.

The daemon's ids are ``number/request id``; what is logged while a request is carried out names that request id.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from types import EllipsisType
from typing import Any, Final, NamedTuple

from forebay import request_id
from forebay.appliance.dataplane.json_stream import JsonStream
from forebay.appliance.log import fields
from forebay.errors import AlreadyExists, InvalidArgument, ProtocolError

__all__ = ["INTERNAL_ERROR", "INVALID_PARAMS", "Later", "Method", "Params", "RpcError", "RpcServer"]

log = logging.getLogger(__name__)

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

_MAX_REQUEST_BYTES: Final = 16 << 20
_MAX_WAITING: Final = 64
"""Requests of one connection whose answers are outstanding."""
_MAX_SESSIONS: Final = 32
_UNFINISHED_S: Final = 30.0
"""How long a request may take to come, and an answer to be taken."""
_SAY_AGAIN_S: Final = 10.0
_SLOW_S: Final = 1.0
"""What takes so long is logged."""


class RpcError(Exception):
    """An error answer: SPDK's code (a JSON-RPC code or a negative errno) and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def of_errno(cls, code: int) -> RpcError:
        """As SPDK reports an errno."""
        return cls(-code, os.strerror(code))

    @classmethod
    def invalid_params(cls) -> RpcError:
        """SPDK's one answer to parameters that do not decode."""
        return cls(INVALID_PARAMS, "Invalid parameters")


class Params:
    """Typed access to a request's parameters; like SPDK it refuses any that nobody asked for (`finish`)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def _take(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.pop(name, None)
        if value is None:
            if default is ...:
                raise RpcError.invalid_params()
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RpcError.invalid_params()
        return value

    def has(self, name: str) -> bool:
        """Whether the parameter was given and is not taken yet."""
        return self._values.get(name) is not None

    def text(self, name: str, default: str | EllipsisType = ...) -> str:
        """A string; required unless a default is given."""
        return str(self._take(name, str, default))

    def optional_text(self, name: str) -> str | None:
        """A string, or None if it is left out."""
        value: str | None = self._take(name, str, None)
        return value

    def integer(self, name: str, low: int, high: int, default: int | EllipsisType = ...) -> int:
        """An integer between `low` and `high`; required unless a default is given."""
        value: int = self._take(name, int, default)
        if not low <= value <= high:
            raise RpcError.invalid_params()
        return value

    def flag(self, name: str, default: bool | EllipsisType = ...) -> bool:
        """A boolean; required unless a default is given."""
        return bool(self._take(name, bool, default))

    def table(self, name: str) -> Params:
        """A required object."""
        return Params(self._take(name, dict, ...))

    def rows(self, name: str, width: int) -> list[tuple[int, ...]]:
        """A required list of lists of `width` non-negative integers below 2^63."""
        rows: list[Any] = self._take(name, list, ...)
        for row in rows:
            if not isinstance(row, list) or len(row) != width:
                raise RpcError.invalid_params()
            for value in row:
                if type(value) is not int or not 0 <= value < 1 << 63:
                    raise RpcError.invalid_params()
        return [tuple(row) for row in rows]

    def text_rows(self, name: str, width: int) -> list[tuple[str, ...]]:
        """A required list of lists of `width` strings."""
        rows: list[Any] = self._take(name, list, ...)
        for row in rows:
            if not isinstance(row, list) or len(row) != width or not all(isinstance(value, str) for value in row):
                raise RpcError.invalid_params()
        return [tuple(row) for row in rows]

    def integers(self, name: str) -> list[int]:
        """A required list of integers."""
        values: list[Any] = self._take(name, list, ...)
        if not all(type(value) is int for value in values):
            raise RpcError.invalid_params()
        return values

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or None if it is left out."""
        values: list[Any] | None = self._take(name, list, None)
        if values is not None and not all(isinstance(value, str) for value in values):
            raise RpcError.invalid_params()
        return values

    def ignore(self, *names: str) -> None:
        """Take parameters of SPDK's that have no meaning here."""
        for name in names:
            self._values.pop(name, None)

    def any_left(self) -> bool:
        """Whether there is a parameter that was not taken."""
        return bool(self._values)

    def finish(self) -> None:
        """Refuse what is left."""
        if self._values:
            raise RpcError.invalid_params()


class Method(NamedTuple):
    """A method: `run` takes parameters and gives the result, or what is `Later`; `waits` says that it may take long."""

    run: Callable[[Params], Any]
    waits: bool = False


class Later(NamedTuple):
    """What a method that began without waiting has still to do, and may wait for; it gives the result."""

    run: Callable[[], Any]


class _Workers:
    """Threads of one connection; as many as there were jobs at a time."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._count = 0

    def start(self, job: Callable[[], None]) -> None:
        """Run it in a thread that has nothing to do, or in a new one. For the connection's thread alone.

        Raises RuntimeError if there can be no new one; the job is not run then, and not later either.
        """
        if not self._idle.acquire(blocking=False):
            Thread(target=self._run, name="rpc call", daemon=True).start()
            self._count += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._idle.release()

    def close(self) -> None:
        """Let the threads end, after what they have begun."""
        for _ in range(self._count):
            self._jobs.put(None)


class _Session:
    """One connection of a controlling process."""

    def __init__(self, sock: socket.socket, methods: Mapping[str, Method]) -> None:
        self._sock = sock
        limit = struct.pack("@ll", int(_UNFINISHED_S), int(_UNFINISHED_S % 1 * 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.heard_s = time.monotonic()
        """When something came last."""
        self._methods = methods
        self._sending = Lock()
        self._waiting = 0
        self._workers = _Workers()

    def run(self) -> None:
        """Read and answer until the peer closes."""
        stream = JsonStream(_MAX_REQUEST_BYTES)
        began_s = time.monotonic()
        try:
            while data := self._receive(stream):
                self.heard_s = time.monotonic()
                if not stream.unfinished:
                    began_s = self.heard_s
                for request in stream.feed(data):
                    self._request(request)
                    began_s = time.monotonic()
                if stream.unfinished and time.monotonic() - began_s > _UNFINISHED_S:
                    raise ProtocolError(f"a request did not end within {_UNFINISHED_S:g} s")
        except ProtocolError as error:
            log.warning("control connection: %s", error.message)
            self._answer(None, error=RpcError(PARSE_ERROR, "Parse error"))
        except OSError as error:
            log.info("control connection: %s", error)
        finally:
            self._workers.close()
            self._sock.close()

    def _receive(self, stream: JsonStream) -> bytes:
        """What comes next, however long that takes between requests."""
        while True:
            try:
                return self._sock.recv(1 << 18)
            except BlockingIOError:
                if stream.unfinished:
                    raise ProtocolError(f"a request did not end within {_UNFINISHED_S:g} s") from None

    def cut(self) -> None:
        """End the connection, from any thread."""
        with suppress(OSError):  # it may have ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)

    def _request(self, request: Any) -> None:
        if (
            not isinstance(request, dict)
            or not isinstance(request.get("method"), str)
            or not isinstance(request.get("id"), int | str | None)
        ):
            self._answer(None, error=RpcError(INVALID_REQUEST, "Invalid request"))
            return
        name, ident = request["method"], request.get("id")
        params = request.get("params") or {}
        method = self._methods.get(name)
        if method is None:
            self._answer(ident, error=RpcError(METHOD_NOT_FOUND, "Method not found"))
        elif not isinstance(params, dict):
            self._answer(ident, error=RpcError.invalid_params())
        elif method.waits:
            self._wait(ident, name, lambda: method.run(Params(params)))
        else:
            self._call(ident, name, lambda: method.run(Params(params)))

    def _wait(self, ident: Any, name: str, run: Callable[[], Any]) -> None:
        with self._sending:
            self._waiting += 1
            busy = self._waiting > _MAX_WAITING
            self._waiting -= busy
        if not busy:
            try:
                self._workers.start(lambda: self._call_waiting(ident, name, run))
            except RuntimeError as error:
                log.error("no thread for a control request: %s", error)
                busy = True
                with self._sending:
                    self._waiting -= 1
        if busy:
            self._answer(ident, error=RpcError.of_errno(errno.EBUSY))

    def _call_waiting(self, ident: Any, name: str, run: Callable[[], Any]) -> None:
        try:
            self._call(ident, name, run)
        finally:
            with self._sending:
                self._waiting -= 1

    def _call(self, ident: Any, name: str, run: Callable[[], Any]) -> None:
        request_id.follow(ident.partition("/")[2] if isinstance(ident, str) else "")
        began_s = time.monotonic()
        result, error = None, None
        try:
            result = run()
            if isinstance(result, Later):
                self._wait(ident, name, result.run)
                return
        except RpcError as failure:
            error = failure
        except (InvalidArgument, UnicodeError) as failure:  # a text with half a surrogate pair names nothing
            log.warning("%s", failure)
            error = RpcError.invalid_params()
        except AlreadyExists as failure:
            log.warning("%s", failure)
            error = RpcError.of_errno(errno.EEXIST)
        except OSError as failure:
            error = RpcError.of_errno(failure.errno or errno.EIO)
        except Exception:
            # A fault in one method must not end the process that serves the data.
            log.exception("a control method failed")
            error = RpcError(INTERNAL_ERROR, "Internal error")
        took_s = time.monotonic() - began_s
        level = logging.WARNING if took_s >= _SLOW_S else logging.INFO if error is not None else logging.DEBUG
        log.log(level, "%s: %s", name, error or "done", extra=fields(ms=round(took_s * 1e3, 3)))
        self._answer(ident, result=result, error=error)

    def _answer(self, ident: Any, *, result: Any = None, error: RpcError | None = None) -> None:
        body: dict[str, Any] = {"jsonrpc": "2.0", "id": ident}
        if error is None:
            body["result"] = result
        else:
            body["error"] = {"code": error.code, "message": error.message}
        try:
            with self._sending:
                self._sock.sendall(json.dumps(body, separators=(",", ":")).encode())
        except OSError as failure:
            log.info("control connection: an answer was not taken: %s", failure)
            self.cut()  # part of it may have gone: nothing that follows would be understood


class RpcServer:
    """Listens on a UNIX socket that only its owner may use."""

    def __init__(self, path: Path, methods: Mapping[str, Method]) -> None:
        """Raises OSError, EADDRINUSE if another process answers there."""
        self._path = path
        self._methods = methods
        _remove_stale(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._sock.bind(str(path))
        finally:
            os.umask(mask)
        self._sock.listen(64)
        self._closed = False
        self._sessions: set[_Session] = set()
        self._changing = Lock()
        self._thread = Thread(target=self._run, name="rpc", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def _run(self) -> None:
        said_s = -_SAY_AGAIN_S
        while True:
            sock: socket.socket | None = None
            try:
                sock, _ = self._sock.accept()
                self._begin(_Session(sock, self._methods))
            except (OSError, RuntimeError) as error:
                if self._closed:
                    return
                if sock is not None:
                    sock.close()
                if time.monotonic() - said_s >= _SAY_AGAIN_S:
                    log.error("accept on the control socket: %s", error)
                    said_s = time.monotonic()
                time.sleep(0.05)  # out of descriptors or threads, most likely

    def _begin(self, session: _Session) -> None:
        """Serve a connection; where there are as many as there may be, that which was silent longest ends for it."""

        def run() -> None:
            try:
                session.run()
            finally:
                with self._changing:
                    self._sessions.discard(session)

        with self._changing:
            if len(self._sessions) >= _MAX_SESSIONS:
                silent = min(self._sessions, key=lambda one: one.heard_s)
                log.warning("more than %d control connections: the most silent one ends", _MAX_SESSIONS)
                self._sessions.discard(silent)
                silent.cut()
            Thread(target=run, name="rpc session", daemon=True).start()
            self._sessions.add(session)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._closed = True
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        self._path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove a socket that a killed process left behind; EADDRINUSE if someone listens on it."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # as many wait for an answer as may
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
