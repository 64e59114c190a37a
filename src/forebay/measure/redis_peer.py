"""Redis as it is usually run for a cache in memory: no snapshots, no log; and the barest client that Python can be.

The client speaks the protocol (RESP 2) over a socket of its own and moves bytes straight from and into the caller's
buffers: the most that Redis can give a Python client.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.measure.tcp_peer import send_all

__all__ = ["BareRedis", "RedisServer", "missing_redis"]

_START_S = 10.0


def missing_redis() -> str | None:
    """Why there can be no comparison with Redis, or None."""
    return None if shutil.which("redis-server") else "redis-server is not installed (apt-get install redis-server)"


class RedisServer:
    """A server of our own on a free port of the loopback. Raises `ConnectionError` when it does not start."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                BareRedis(self.port).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The serving process."""
        return self._process.pid

    @property
    def version(self) -> str:
        """Of the server."""
        told = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
        return next((word[2:] for word in told.split() if word.startswith("v=")), told.strip())

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(_START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class BareRedis:
    """One connection. Raises `ConnectionError` for an answer that is not the one hoped for."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._sock.makefile("rb")
        self._ask(b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n")

    def _ask(self, request: bytes, expected: bytes) -> None:
        self._sock.sendall(request)
        answer = self._replies.readline()
        if answer != expected:
            raise ConnectionError(f"{request!r} was answered {answer!r}")

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
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

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """GETs sent together, each value read into its buffer."""
        self._sock.sendall(b"".join([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]))
        for buffer in buffers:
            answer = self._replies.readline()
            if answer != b"$%d\r\n" % len(buffer) or self._replies.readinto(buffer) != len(buffer):
                raise ConnectionError(f"GET was answered {answer!r}")
            self._replies.read(2)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are there: one EXISTS."""
        names = b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys])
        self._sock.sendall(b"*%d\r\n$6\r\nEXISTS\r\n" % (len(keys) + 1) + names)
        answer = self._replies.readline()
        if not answer.startswith(b":"):
            raise ConnectionError(f"EXISTS was answered {answer!r}")
        return int(answer[1:])

    def clear(self) -> None:
        """Drop everything."""
        self._ask(b"*1\r\n$8\r\nFLUSHALL\r\n", b"+OK\r\n")

    def close(self) -> None:
        """Disconnect."""
        self._replies.close()
        self._sock.close()
