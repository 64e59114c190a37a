"""The HTTP server of a node: uvicorn in the daemon's event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from forebay.appliance.control.http_edge import App
from forebay.appliance.settings import Endpoint
from forebay.errors import ConfigInvalid

__all__ = ["HttpServer"]

_GRACE_S = 2
_MAX_CONNECTIONS = 512
_KEEP_ALIVE_S = 15
_BACKLOG = 128


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: the daemon has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on one address."""

    def __init__(self, app: App) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
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
