"""What one thread does: get, put or match, against Forebay or a reference, from and into the same memory."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from forebay.errors import Unavailable
from forebay.measure.redis_peer import BareRedis
from forebay.measure.tcp_peer import TcpPeer

if TYPE_CHECKING:
    from forebay.client import Client

__all__ = ["KEY_BYTES", "REMOVED", "Memory", "Mover", "Operation", "Work", "forebay_mover", "redis_mover", "tcp_mover"]

Operation = Literal["get", "put", "match"]
KEY_BYTES = 36
"""Of an engine: a variant of 4 bytes and a chained hash of 32."""
REMOVED = ("ok", "absent")
"""What a delete answers where nothing is left; a put that failed left nothing to remove."""
_DELETE_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """What every thread does: ``calls`` of ``batch`` keys in a slot, on ``count`` blocks of its own."""

    operation: Operation
    block_bytes: int
    batch: int
    count: int
    calls: int

    @property
    def slot_bytes(self) -> int:
        """Bytes that one thread moves in a slot; of keys, where only those travel."""
        return self.calls * self.batch * (KEY_BYTES if self.operation == "match" else self.block_bytes)


class Memory:
    """One thread's blocks of random bytes, and the buffers that reads end in; all touched before anything is timed."""

    def __init__(self, work: Work, prefix: bytes) -> None:
        self.work = work
        self._prefix = prefix
        size, values = work.block_bytes, 1 if work.operation == "match" else work.count
        source, target = mmap.mmap(-1, values * size), mmap.mmap(-1, work.batch * size)
        rng = np.random.default_rng(size)
        source[:] = rng.bytes(len(source))
        target[:] = bytes([1]) * len(target)
        self.values = [memoryview(source)[i * size : (i + 1) * size] for i in range(values)]
        self.buffers = [memoryview(target)[i * size : (i + 1) * size] for i in range(work.batch)]

    def keys(self, first: int, end: int) -> list[bytes]:
        """Keys of these numbers."""
        return [b"%b/%d" % (self._prefix, n) for n in range(first, end)]

    def batch_values(self, first: int) -> list[memoryview]:
        """The values of a batch, from number ``first`` on."""
        return [self.values[(first + i) % len(self.values)] for i in range(self.work.batch)]

    def check(self, first: int, who: str) -> None:
        """Whether the buffers hold the blocks from ``first`` on. Raises `Unavailable`: nothing is measured then."""
        for i, buffer in enumerate(self.buffers):
            if not np.array_equal(np.frombuffer(buffer, np.uint8), np.frombuffer(self.values[first + i], np.uint8)):
                raise Unavailable(f"{who} read other bytes than were written", field="bench")


class Mover(ABC):
    """Does one call at a time; ``prepare`` is not timed."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._work = memory.work
        self._next = 0

    @property
    def servers(self) -> tuple[int, ...]:
        """Processes of its own that serve it."""
        return ()

    def _advance(self) -> int:
        """The first block of the next batch of a get."""
        first = self._next
        self._next = (first + self._work.batch) % self._work.count
        return first

    def prepare(self) -> None:  # noqa: B027  # most have nothing to do
        """Ahead of each slot."""

    @abstractmethod
    def move(self) -> None:
        """One call. Raises when it did not do its work."""

    def close(self) -> None:  # noqa: B027
        """Leave nothing behind."""


class _ForebayGet(Mover):
    def __init__(self, memory: Memory, client: Client) -> None:
        super().__init__(memory)
        self._client = client
        self._keys = memory.keys(0, self._work.count)
        for first in range(0, self._work.count, self._work.batch):
            _store(client, self._keys[first : first + self._work.batch], memory.batch_values(first))
        self.move()
        memory.check(0, "forebay")

    def move(self) -> None:
        first = self._advance()
        for result in self._client.get_into(self._keys[first : first + self._work.batch], self._memory.buffers):
            if not result.hit:
                raise Unavailable(f"get_into answered {result.reason}", field="bench")

    def close(self) -> None:
        _delete(self._client, self._keys)


class _ForebayPut(Mover):
    def __init__(self, memory: Memory, client: Client) -> None:
        super().__init__(memory)
        self._client = client
        self._stored: list[bytes] = []

    def prepare(self) -> None:
        _delete(self._client, self._stored)
        self._stored.clear()

    def move(self) -> None:
        keys = self._memory.keys(self._next, self._next + self._work.batch)
        _store(self._client, keys, self._memory.batch_values(self._next))
        self._stored += keys
        self._next += self._work.batch  # new keys in every call

    close = prepare


class _ForebayMatch(Mover):
    """Three of four keys asked for are there."""

    def __init__(self, memory: Memory, client: Client) -> None:
        super().__init__(memory)
        self._client = client
        self._keys, self._stored = _question(memory)
        _store(client, self._stored, [memory.values[0]] * len(self._stored))

    def move(self) -> None:
        if sum(self._client.match(self._keys).present) != len(self._stored):
            raise Unavailable("match did not find what was stored", field="bench")

    def close(self) -> None:
        _delete(self._client, self._stored)


def _question(memory: Memory) -> tuple[list[bytes], list[bytes]]:
    keys = memory.keys(0, memory.work.batch)
    return keys, keys[: max(1, len(keys) * 3 // 4)]


def _store(client: Client, keys: list[bytes], values: list[memoryview]) -> None:
    for result in client.put(keys, values):
        if not result.stored:
            raise Unavailable(f"put answered {result.reason}", field="bench")


def _delete(client: Client, keys: list[bytes]) -> None:
    for first in range(0, len(keys), _DELETE_KEYS):
        for reason in client.delete(keys[first : first + _DELETE_KEYS]):
            if reason not in REMOVED:
                raise Unavailable(f"delete answered {reason}", field="bench")


class _Tcp(Mover):
    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        work = self._work
        self._peer = TcpPeer(work.batch * KEY_BYTES if work.operation == "match" else work.count * work.block_bytes)
        if work.operation == "get":
            for first in range(0, work.count, work.batch):
                self._peer.put(first, memory.batch_values(first))
            self.move()
            memory.check(0, "tcp")
        self._question = memoryview(b"".join(memory.keys(0, work.batch)).ljust(work.batch * KEY_BYTES))

    @property
    def servers(self) -> tuple[int, ...]:
        return (self._peer.pid,)

    def move(self) -> None:
        work = self._work
        if work.operation == "match":  # as many bytes as the keys have, and a short answer
            self._peer.put(0, [self._question[: work.batch * KEY_BYTES]])
            return
        first = self._advance()
        if work.operation == "get":
            self._peer.get(first, self._memory.buffers)
        else:
            self._peer.put(first, self._memory.batch_values(first))

    def close(self) -> None:
        self._peer.__exit__(None, None, None)


class _Redis(Mover):
    def __init__(self, memory: Memory, port: int) -> None:
        super().__init__(memory)
        work = self._work
        self._redis = BareRedis(port)
        self._keys = memory.keys(0, work.count)
        self._question, self._present = _question(memory)
        if work.operation == "match":
            self._redis.put(self._present, [memory.values[0]] * len(self._present))
        elif work.operation == "get":
            for first in range(0, work.count, work.batch):
                self._redis.put(self._keys[first : first + work.batch], memory.batch_values(first))
            self.move()
            memory.check(0, "redis")

    def move(self) -> None:
        work = self._work
        if work.operation == "match":
            if self._redis.count(self._question) != len(self._present):
                raise Unavailable("redis did not find what was stored", field="bench")
            return
        first = self._advance()
        keys = self._keys[first : first + work.batch]
        if work.operation == "get":
            self._redis.get(keys, self._memory.buffers)
        else:
            self._redis.put(keys, self._memory.batch_values(first))

    def close(self) -> None:
        self._redis.clear()
        self._redis.close()


def forebay_mover(memory: Memory, client: Client) -> Mover:
    """Ours."""
    kinds: dict[Operation, type[_ForebayGet | _ForebayPut | _ForebayMatch]] = {
        "get": _ForebayGet,
        "put": _ForebayPut,
        "match": _ForebayMatch,
    }
    return kinds[memory.work.operation](memory, client)


def tcp_mover(memory: Memory) -> Mover:
    """The same bytes over a bare TCP connection, with a serving process for each thread."""
    return _Tcp(memory)


def redis_mover(memory: Memory, port: int) -> Mover:
    """The same over the barest Redis client; all threads share one server, which is not durable."""
    return _Redis(memory, port)
