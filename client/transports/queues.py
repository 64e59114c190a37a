"""What `Controller` and `FabricsTransport` need of a queue, whatever the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from forebay.client.transports.requests import Request
from forebay.errors import ConnectionLost, ForebayError
from forebay.nvmetcp.command import Command, Completion

__all__ = ["Dial", "IoQueue"]


class IoQueue(ABC):
    """A connected queue. Not thread-safe, `cut` aside: it is held by one thread at a time.

    Every method that touches the wire raises `ConnectionLost` or `ProtocolError` when the connection is no good any
    more; the holder then calls `close`. Once that has returned, nothing of the queue can write to a caller's memory.
    """

    fd: int
    """Readable when `receive` has something to do."""
    queue_id: int
    in_capsule_bytes: int
    """What a write may carry in its command capsule."""
    bytes_in_flight: int
    closed: bool

    @abstractmethod
    def set_depth(self, commands: int) -> None:
        """How many commands may be in flight: one less than the queue has entries. Base §3.3.1.5."""

    @abstractmethod
    def execute(
        self, command: Command, deadline_ms: int, *, data: bytes | None = None, read_bytes: int = 0
    ) -> tuple[Completion, bytearray]:
        """Run one command to its end; ``command.cid`` is replaced. Returns the completion and the data it read.

        Raises what `error_of` makes of a bad status, and the connection is good after that; every other error closes
        it, one that came right behind the answer too.
        """

    @abstractmethod
    def _drive(self, deadline_ms: int, done: Callable[[], bool]) -> None:
        """Send and receive until ``done``. Raises `DeadlineExceeded`, and what `receive` does."""

    def _finish(self, request: Request, done: Callable[[], bool], deadline_ms: int) -> None:
        """The end of `execute`: its one command is driven until it is ``done``."""
        try:
            self._drive(deadline_ms, done)
        except ForebayError as e:
            self.close()
            # A refusal may have its end right behind it: why is worth more than that.
            if request.error is None or not isinstance(e, ConnectionLost):
                raise
        if request.error is not None:
            raise request.error

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Commands sent and not completed."""

    @property
    @abstractmethod
    def wants_to_send(self) -> bool:
        """Whether `flush` has something to do."""

    @abstractmethod
    def takes(self, request: Request) -> bool:
        """Whether the command can be submitted now; one that has nothing in flight takes every command."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a command; `flush` sends it."""

    @abstractmethod
    def flush(self) -> None:
        """Send what is queued, as far as the wire takes it."""

    @abstractmethod
    def receive(self, budget_bytes: int) -> bool:
        """Take what has arrived, about ``budget_bytes`` at most. Returns whether more may be there."""

    @abstractmethod
    def usable(self) -> bool:
        """Whether an idle queue is still connected: nothing may have arrived on it."""

    @abstractmethod
    def fail(self, error: ForebayError) -> None:
        """Close the connection and give every command in flight this end."""

    @abstractmethod
    def cut(self) -> None:
        """End the connection, from any thread: whoever waits in it wakes up, and closes it."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; nothing arrives after this. Idempotent."""


class Dial(Protocol):
    """Connects a queue's transport connection; the Connect command is the caller's."""

    def __call__(self, queue_id: int, entries: int, controller_id: int, deadline_ms: int) -> IoQueue:
        """Raises `ConnectionLost` and its kin, `DeadlineExceeded`, `TargetRefused`."""
        ...
