"""One process of the benchmark: a client, some threads, and the sides that they work for in turns."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forebay.cli.bench.movers import Memory, Mover, Work, forebay_mover, redis_mover, tcp_mover
from forebay.cli.demo.signals import ignored
from forebay.errors import ForebayError, Unavailable

if TYPE_CHECKING:
    from forebay.client import Client

__all__ = ["Slot", "Worker", "WorkerSettings"]

_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to begin; ``prefix`` begins its keys."""

    url: str
    token: str
    namespace: str
    prefix: bytes
    threads: int
    redis_port: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What a worker did in one slot: bytes of all threads, and seconds of each call."""

    bytes: int
    calls_s: list[float]


class _Bench:
    """The worker's own end: does what it is told."""

    def __init__(self, client: Client, settings: WorkerSettings) -> None:
        self._client = client
        self._settings = settings
        self._memories: list[Memory] = []
        self._movers: dict[str, list[Mover]] = {}
        self._pool = ThreadPoolExecutor(settings.threads)

    def begin(self, work: Work) -> None:
        """Make the memory for a comparison."""
        size = b"%d%b" % (work.block_bytes, work.operation[:1].encode())
        self._memories = [
            Memory(work, b"%b/%b/%d" % (self._settings.prefix, size, t)) for t in range(self._settings.threads)
        ]

    def open(self, side: str) -> tuple[int, ...]:
        """Prepare a side; the processes that serve it alone."""
        made: list[Mover] = []
        self._movers[side] = made
        for memory in self._memories:
            if side == "forebay":
                made.append(forebay_mover(memory, self._client))
            elif side == "tcp":
                made.append(tcp_mover(memory))
            else:
                made.append(redis_mover(memory, self._settings.redis_port))
        return tuple(pid for mover in made for pid in mover.servers)

    def prepare(self, side: str) -> None:
        for mover in self._movers[side]:
            mover.prepare()

    def slot(self, side: str) -> Slot:
        """All threads at once."""
        times = list(self._pool.map(_calls, self._movers[side], self._memories))
        return Slot(sum(m.work.slot_bytes for m in self._memories), [t for thread in times for t in thread])

    def close(self, side: str) -> None:
        for mover in self._movers.pop(side, []):
            mover.close()

    def end(self) -> None:
        for side in list(self._movers):
            with suppress(ForebayError, OSError):
                self.close(side)
        self._pool.shutdown()


def _calls(mover: Mover, memory: Memory) -> list[float]:
    took = []
    for _ in range(memory.work.calls):
        began = time.perf_counter()
        mover.move()
        took.append(time.perf_counter() - began)
    return took


def _main(pipe: Connection, settings: WorkerSettings) -> None:
    """Answers ``(what, argument)`` until the pipe closes; an error that ends it is sent as text."""
    from forebay.client import connect

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed the pipe, or ended
        try:
            with connect(settings.url, namespace=settings.namespace, token=settings.token) as client:
                bench = _Bench(client, settings)
                try:
                    pipe.send(None)
                    while True:
                        what, argument = pipe.recv()
                        pipe.send(getattr(bench, what)(argument))
                finally:
                    bench.end()
        except (ForebayError, OSError, EOFError) as e:
            if isinstance(e, EOFError | BrokenPipeError | ConnectionResetError):
                raise
            pipe.send(_Failed(e.message if isinstance(e, ForebayError) else str(e)))


@dataclass(frozen=True, slots=True)
class _Failed:
    message: str


class Worker:
    """A worker's process as the parent sees it."""

    def __init__(self, settings: WorkerSettings) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, settings), daemon=True)
        with ignored():  # signals are the parent's alone to handle; the end of the pipe ends the process
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, what: str, argument: object) -> None:
        """Tell it what to do."""
        try:
            self._pipe.send((what, argument))
        except OSError:
            raise Unavailable("a worker's process ended", field="bench") from None

    def answer(self) -> Any:
        """What it answered. Raises `Unavailable` if it failed."""
        try:
            told = self._pipe.recv()
        except (EOFError, OSError):
            raise Unavailable("a worker's process ended", field="bench") from None
        if isinstance(told, _Failed):
            raise Unavailable(told.message, field="bench")
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: cleanly, or at once if the run was broken off."""
        self._pipe.close()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
