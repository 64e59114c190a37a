"""Redis as it is usually run for a cache in memory: no snapshots, no log. Two clients of one server.

`RedisPeer.get` and `put` go through redis-py with hiredis, as applications do. `bare_get` and `bare_put` speak the
protocol over a socket of their own and move bytes straight from and into the caller's buffers: the most that Redis can
give a Python client, and the harder one to compare with.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from perf.tcp_peer import send_all

__all__ = ["RedisPeer", "missing_redis"]

_START_S = 10.0


def missing_redis() -> str | None:
    """Why there can be no comparison with Redis, or None."""
    return None if shutil.which("redis-server") else "redis-server is not installed (apt-get install redis-server)"


class RedisPeer:
    """A server of our own on a free port of the loopback, and its clients."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._server = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=port)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self._client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._server.poll() is not None:
                    self._stop()
                    raise
                time.sleep(0.01)
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._sock.makefile("rb")

    @property
    def pid(self) -> int:
        """The serving process."""
        return self._server.pid

    @property
    def versions(self) -> dict[str, str]:
        """Of the server and of the client's packages."""
        told = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
        server = next((word[2:] for word in told.split() if word.startswith("v=")), told.strip())
        return {"redis-server": server, "redis-py": version("redis"), "hiredis": version("hiredis")}

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """SET, in one pipeline where there are several."""
        if len(keys) == 1:
            self._client.set(keys[0], values[0])
            return
        with self._client.pipeline(transaction=False) as pipeline:
            for key, value in zip(keys, values, strict=True):
                pipeline.set(key, value)
            pipeline.execute()

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """GET or MGET, and the values copied to where the caller wants them."""
        values = [self._client.get(keys[0])] if len(keys) == 1 else self._client.mget(keys)
        for value, buffer in zip(values, buffers, strict=True):
            if not isinstance(value, bytes) or len(value) != len(buffer):
                raise ConnectionError("GET did not answer the value that was set")
            buffer[:] = value

    def bare_put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """SETs in one `sendmsg`, then their answers."""
        pieces: list[bytes | memoryview] = []
        for key, value in zip(keys, values, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
            pieces += [head, value, b"\r\n"]
        send_all(self._sock, pieces)
        for _ in keys:
            answer = self._replies.readline()
            if answer != b"+OK\r\n":
                raise ConnectionError(f"SET was answered {answer!r}")

    def bare_get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """GETs sent together, each value read into its buffer."""
        self._sock.sendall(b"".join([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]))
        for buffer in buffers:
            answer = self._replies.readline()
            if answer != b"$%d\r\n" % len(buffer) or self._replies.readinto(buffer) != len(buffer):
                raise ConnectionError(f"GET was answered {answer!r}")
            self._replies.read(2)

    def clear(self) -> None:
        """Drop everything."""
        self._client.flushall()

    def _stop(self) -> None:
        self._client.close()
        self._server.terminate()
        self._server.wait(_START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replies.close()
        self._sock.close()
        self._stop()
