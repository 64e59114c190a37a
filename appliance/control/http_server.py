"""The HTTP server of a node: uvicorn in the daemon's event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forebay.appliance.control.http_edge import App
from forebay.appliance.settings import Endpoint
from forebay.errors import ConfigInvalid

__all__ = ["HttpServer"]

_GRACE_S = 2
_MAX_CONNECTIONS = 512
_KEEP_ALIVE_S = 15
_BACKLOG = 128
_HEADER_S = 10.0
_TAKEN_MS = 20_000
_END = b"connection: close\r\ncontent-length: 0\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n" + _END + b"\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _END + b"\r\n"


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: the daemon has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """uvicorn's connection, and what it lacks: a time by which a request's header must be here, and a last place."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base does
        super().connection_made(transport)
        if len(self.connections) > 2 * _MAX_CONNECTIONS:  # before that the application answers 503
            transport.write(_FULL)
            transport.close()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        if self._waiting is None and self.conn.their_state is h11.IDLE:
            self._wait()  # for the whole of a further request, which begins here
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(_HEADER_S, self._too_late)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        self._waiting = None
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()


class HttpServer:
    """Serves an application on one address."""

    def __init__(self, app: App) -> None:
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Uvicorn(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self, listen: Endpoint) -> int:
        """Listen and serve; the port, chosen by the system for 0. Raises `ConfigInvalid` if it cannot be had."""
        try:
            found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            sock = socket.create_server(found[0][4][:2], family=found[0][0], backlog=_BACKLOG)
            # Handed on to connections: one whose peer takes nothing ends by it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TAKEN_MS)
        except OSError as e:
            why = os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror
            raise ConfigInvalid(f"cannot listen on {listen}: {why}", field="http.listen") from e
        self._serving = asyncio.create_task(self._server.serve([sock]), name="http server")
        return int(sock.getsockname()[1])

    async def stop(self) -> None:
        """Refuse new requests, let running ones end within two seconds."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
