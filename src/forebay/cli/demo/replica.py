"""One engine replica: a process that serves requests, and keeps its KV blocks in Forebay."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from forebay.cli.demo.ledger import BATCH_BLOCKS
from forebay.cli.demo.trace import BLOCK_TOKENS, Request
from forebay.cli.demo.workload import Contents, Scale, block_key, block_schema
from forebay.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ForebayError,
    SessionExpired,
    StaleIncarnation,
    Unavailable,
    reason,
)

if TYPE_CHECKING:
    from forebay.client import Client

__all__ = ["Outcome", "Replica", "ReplicaSettings", "replica_main"]

_AWAY = {reason(cls.code) for cls in (Unavailable, ConnectionLost, DeadlineExceeded, SessionExpired, StaleIncarnation)}
_AWAY_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica needs to begin."""

    url: str
    token: str
    scale: Scale
    seed: int


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are what the replica waited for Forebay."""

    request: int
    input_tokens: int
    hit_tokens: int = 0
    """Tokens of the leading blocks that were read and compared: these need no computing."""
    match_ms: float = 0.0
    read_ms: float = 0.0
    read_bytes: int = 0
    write_ms: float = 0.0
    written_bytes: int = 0
    stored: list[int] = field(default_factory=list)
    """Blocks that this request stored."""
    present: list[int] = field(default_factory=list)
    """Blocks that turned out to be stored already when it wanted to."""
    wrong: list[int] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    """Reasons of blocks that a probe promised and a read did not give, and of blocks that were not stored."""


class Replica:
    """Serves requests against a connected client; holds the memory that blocks pass through."""

    def __init__(self, client: Client, contents: Contents) -> None:
        self._client = client
        self._contents = contents
        size = contents.block_bytes
        memory = memoryview(bytearray(size * BATCH_BLOCKS))
        self._buffers = [memory[i * size : (i + 1) * size] for i in range(BATCH_BLOCKS)]

    def serve(self, number: int, request: Request) -> Outcome:
        """Probe for the prefix, load and compare it, "compute" the rest, store what is new."""
        outcome = Outcome(number, request.input_tokens)
        if not request.blocks:
            return outcome
        keys = [block_key(block) for block in request.blocks]
        start = time.perf_counter()
        prefix = self._client.match(keys).prefix.get(0, 0)
        outcome.match_ms = (time.perf_counter() - start) * 1e3
        loaded = self._load(outcome, request.blocks[:prefix], keys[:prefix])
        outcome.hit_tokens = loaded * BLOCK_TOKENS
        self._store(outcome, request.blocks[loaded:], keys[loaded:])
        return outcome

    def resume(self, outcome: Outcome, request: Request) -> None:
        """If the node was away during this request, store what it could not when the node is back.

        So an outage costs the requests under way, and no later ones. (An engine would compute on meanwhile; that is no
        news about Forebay.)
        """
        if not outcome.misses.keys() & _AWAY:
            return
        keys = [block_key(block) for block in request.blocks]
        give_up = time.monotonic() + _AWAY_S
        while time.monotonic() < give_up:
            again = Outcome(outcome.request, 0)
            self._store(again, request.blocks, keys)
            outcome.stored += again.stored
            outcome.present += again.present
            outcome.written_bytes += again.written_bytes
            outcome.write_ms += again.write_ms
            if not again.misses.keys() & _AWAY:
                return
            time.sleep(_POLL_S)

    def _load(self, outcome: Outcome, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        """Read blocks and compare them; how many of the leading ones can be used."""
        for at in range(0, len(blocks), BATCH_BLOCKS):
            batch = blocks[at : at + BATCH_BLOCKS]
            buffers = self._buffers[: len(batch)]
            start = time.perf_counter()
            results = self._client.get_into(keys[at : at + len(batch)], buffers)
            outcome.read_ms += (time.perf_counter() - start) * 1e3
            usable = 0
            for block, buffer, result in zip(batch, buffers, results, strict=True):
                if not result.hit:
                    outcome.misses[result.reason] += 1
                    continue
                outcome.read_bytes += len(buffer)
                if not self._contents.matches(block, buffer):
                    outcome.wrong.append(block)
                elif block == batch[usable]:
                    usable += 1
            if usable < len(batch):
                return at + usable
        return len(blocks)

    def _store(self, outcome: Outcome, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        for at in range(0, len(blocks), BATCH_BLOCKS):
            batch = blocks[at : at + BATCH_BLOCKS]
            buffers = self._buffers[: len(batch)]
            for block, buffer in zip(batch, buffers, strict=True):
                self._contents.fill(block, buffer)
            start = time.perf_counter()
            results = self._client.put(keys[at : at + len(batch)], buffers)
            outcome.write_ms += (time.perf_counter() - start) * 1e3
            for block, buffer, result in zip(batch, buffers, results, strict=True):
                if result.stored:
                    outcome.stored.append(block)
                    outcome.written_bytes += len(buffer)
                elif result.present:
                    outcome.present.append(block)
                else:
                    outcome.misses[result.reason] += 1


def replica_main(pipe: Connection, settings: ReplicaSettings) -> None:
    """A replica's process: answers ``(number, request)`` with an `Outcome`, until the pipe closes.

    An error that ends it is sent instead.
    """
    from forebay.client import connect

    contents = Contents(settings.scale.block_bytes, settings.seed)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed the pipe, or ended
        try:
            with connect(settings.url, schema=block_schema(settings.scale), token=settings.token) as client:
                replica = Replica(client, contents)
                pipe.send(None)  # ready
                while True:
                    number, request = pipe.recv()
                    outcome = replica.serve(number, request)
                    replica.resume(outcome, request)
                    pipe.send(outcome)
        except ForebayError as e:
            pipe.send(str(e))
