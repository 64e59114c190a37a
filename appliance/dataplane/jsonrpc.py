"""JSON-RPC 2.0 over a UNIX socket in SPDK's framing: JSON values one after the other, nothing between them.

Several requests travel on one connection at a time and may be answered in any order. A request's ``id`` is a number;
while a client's request is worked on that request's id follows (``17/3f2a...``), so that the target's log shows it.
What the target reports as an error becomes one of `forebay.errors` here and nowhere else (`translate`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import Any

from forebay import request_id
from forebay.appliance.dataplane.json_stream import JsonStream
from forebay.appliance.dataplane.process import ProcessName
from forebay.appliance.trace import Tracer
from forebay.errors import (
    AlreadyExists,
    Busy,
    ForebayError,
    NoSpace,
    NotFound,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
)

__all__ = ["JsonRpcClient", "translate"]

MAX_MESSAGE_BYTES = 64 << 20
MAX_UNSENT_BYTES = 64 << 20
"""A target that reads nothing must not make the daemon hold requests without end."""
MAX_OUTSTANDING = 48
"""Requests on the connection at a time; more wait for their turn. The embedded target takes 64 slow ones."""
READ_BYTES = 256 << 10

METHOD_NOT_FOUND = -32601
_UCRED = struct.Struct("iII")
"""Pid, user and group of a peer, unix(7)."""

# Errors of SPDK are negative errno values or JSON-RPC's own -32xxx codes. Anything else is the target's own failure.
ERRORS: dict[int, type[ForebayError]] = {
    -errno.ENOSPC: NoSpace,
    -errno.EDQUOT: NoSpace,
    -errno.EEXIST: AlreadyExists,
    -errno.ENOENT: NotFound,
    -errno.ENODEV: NotFound,
    -errno.ENXIO: NotFound,
    -errno.ENOKEY: NotFound,
    -errno.EBUSY: Busy,
    -errno.EAGAIN: Busy,
    -errno.ETIMEDOUT: Unavailable,
    -errno.ESHUTDOWN: Unavailable,
    -errno.ESTALE: TargetRefused,
    -errno.EPERM: TargetRefused,
    -errno.EACCES: TargetRefused,
    -errno.EINVAL: TargetRefused,
    -errno.EADDRINUSE: TargetRefused,
    -errno.EADDRNOTAVAIL: TargetRefused,
    -32700: TargetRefused,
    -32600: TargetRefused,
    METHOD_NOT_FOUND: TargetRefused,
    -32602: TargetRefused,
}


def translate(method: str, error: Any) -> ForebayError:
    """The error object of a response as one of ours."""
    if not isinstance(error, dict) or not isinstance(error.get("code"), int):
        return ProtocolError(f"{method}: the target's error object is malformed")
    code: int = error["code"]
    name = errno.errorcode.get(-code, str(code))
    return ERRORS.get(code, TargetFailed)(f"{method}: {error.get('message', 'no message')} ({name})", field=method)


class JsonRpcClient:
    """One connection to a target's control socket, opened when first needed and again after it was lost.

    A call raises `Unavailable` when nobody listens, when the connection ends before the answer or when the answer does
    not come in time (wall-clock seconds); whether the target carried the request out is then unknown, and nothing is
    sent twice. Not for use from several event loops.
    """

    def __init__(self, path: Path, *, timeout_s: float = 10.0, tracer: Tracer | None = None) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._tracer = tracer
        self._next_id = 0
        self._waiting: dict[int | str, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._peer: ProcessName | None = None
        self._heard_s = 0.0
        self._connecting = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_OUTSTANDING)

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """The ``result`` of one request; parameters that are None are left out."""
        with self._tracer.request(method) if self._tracer is not None else nullcontext():
            return await self._call(method, params, timeout_s)

    async def _call(self, method: str, params: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        request: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "id": self._new_id()}
        if params:
            request["params"] = {name: value for name, value in params.items() if value is not None}
        data = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        writer, began_s = None, loop.time()
        try:
            async with asyncio.timeout(limit_s), self._turns:
                writer = await self._connected()
                if writer.transport.get_write_buffer_size() + len(data) > MAX_UNSENT_BYTES:
                    raise Unavailable(f"{method}: the target does not read its requests", field=str(self.path))
                self._waiting[request["id"]] = answer
                began_s = loop.time()
                writer.write(data)
                await writer.drain()
                response = await answer
        except TimeoutError:
            problem = Unavailable(f"{method}: no answer within {limit_s:g} s", field=str(self.path))
            if writer is not None and writer is self._writer and self._heard_s < began_s:
                self._drop(problem)  # nothing at all came: it may be the connection that stands, and not the target
            raise problem from None
        except OSError as error:
            raise Unavailable(f"{method}: {error.strerror or error}", field=str(self.path)) from error
        finally:
            self._waiting.pop(request["id"], None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, should the write have failed first
        if "error" in response:
            raise translate(method, response["error"])
        if "result" not in response:
            raise ProtocolError(f"{method}: an answer with neither result nor error")
        return response["result"]

    @property
    def peer(self) -> ProcessName | None:
        """The process that listened when we connected, as the kernel noted it; None without a connection."""
        if self._writer is None:
            return None
        if self._peer is None:
            self._peer = _peer(self._writer.get_extra_info("socket"), self.path)
        return self._peer

    async def close(self) -> None:
        """End the connection; calls that wait raise `Unavailable`. The next call opens a new one."""
        reading, self._reading = self._reading, None
        self._drop(Unavailable("the control connection was closed", field=str(self.path)))
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _new_id(self) -> int | str:
        self._next_id += 1
        ident = request_id.current()
        return f"{self._next_id}/{ident}" if ident else self._next_id

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(str(self.path))
                self._peer = None
                self._reading = asyncio.create_task(self._read(reader, self._writer), name=f"jsonrpc {self.path}")
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = JsonStream(MAX_MESSAGE_BYTES)
        problem: ForebayError = Unavailable("the target closed its control connection", field=str(self.path))
        try:
            while data := await reader.read(READ_BYTES):
                self._heard_s = asyncio.get_running_loop().time()
                for message in stream.feed(data):
                    if not isinstance(message, dict):
                        raise ProtocolError("the target sent something that is not a JSON object")
                    # An answer to a call that gave up finds nobody and is dropped.
                    ident = message.get("id")
                    answer = self._waiting.pop(ident, None) if isinstance(ident, int | str) else None
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        except OSError as error:
            problem = Unavailable(f"the control connection failed: {error}", field=str(self.path))
        except ProtocolError as error:
            problem = error
        finally:
            if self._writer is writer:
                self._drop(problem)

    def _drop(self, problem: ForebayError) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(copy(problem))


def _peer(connection: socket.socket, path: Path) -> ProcessName | None:
    """Who is at the other end; None if this process lacks a descriptor to look it up, or it is gone."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid = int(_UCRED.unpack(credentials)[0])
    try:
        return ProcessName.of(pid, path) if pid else None
    except OSError:
        return None
