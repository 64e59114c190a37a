"""Redis with two clients: redis-py with hiredis, as applications use it, and bare sockets (`BareRedis`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from forebay.measure.redis_peer import BareRedis, RedisServer, missing_redis

__all__ = ["RedisPeer", "missing_redis"]


class RedisPeer:
    """A server of our own and its clients."""

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder)
        self._client = redis.Redis(port=self._server.port)
        bare = BareRedis(self._server.port)
        self.bare_get, self.bare_put, self._bare = bare.get, bare.put, bare

    @property
    def pid(self) -> int:
        """The serving process."""
        return self._server.pid

    @property
    def versions(self) -> dict[str, str]:
        """Of the server and of the client's packages."""
        return {"redis-server": self._server.version, "redis-py": version("redis"), "hiredis": version("hiredis")}

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

    def clear(self) -> None:
        """Drop everything."""
        self._bare.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bare.close()
        self._client.close()
        self._server.stop()
