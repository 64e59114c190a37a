"""Threads that each do one command at a time into memory of their own, so that a call can leave a stuck one behind.

What a thread has begun nobody can take back: a read in the kernel, or one by cuFile. So it never gets the caller's
memory. It fills a buffer of the pool; the calling thread takes the bytes from there, as long as its call lasts. A
buffer whose command outlives its call stays with the command, and serves again when that has ended (ADR 15).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from forebay.client.threads import begin
from forebay.clock import Clock
from forebay.errors import DeadlineExceeded, ForebayError, Unavailable

__all__ = ["BouncePool", "Job"]

_B = TypeVar("_B")
_MAX_WAIT_S = 0.25


class Job(Generic[_B]):
    """One command: ``work`` is done in a thread, on one of the pool's buffers, and raises `OSError` or our errors.

    ``fill``, if there is one, is called before and reads the caller's memory: a call does not end during it. After
    `BouncePool.run` an ``error`` tells what went wrong, and ``begun`` with an error of the deadline that the command
    is still under way. ``translate`` makes errors of what the system raised.
    """

    __slots__ = ("_abandoned", "_buffer", "_filling", "begun", "done", "error", "fill", "translate", "work")

    def __init__(
        self,
        work: Callable[[_B], None],
        translate: Callable[[OSError], ForebayError],
        fill: Callable[[_B], None] | None = None,
    ) -> None:
        self.work = work
        self.translate = translate
        self.fill = fill
        self.error: ForebayError | None = None
        self.begun = False
        self.done = False
        self._filling = False
        self._abandoned = False
        self._buffer: _B | None = None


class _Call(Generic[_B]):
    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.finished: deque[Job[_B]] = deque()


class BouncePool(Generic[_B]):
    """``depth`` threads and as many buffers, made by ``make`` when they are first needed. Thread-safe.

    With more than ``max_stuck`` commands left behind it takes no others until one has come back.
    """

    def __init__(
        self,
        make: Callable[[], _B],
        depth: int,
        max_stuck: int,
        clock: Clock,
        name: str,
        *,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """``end`` is called once, when the pool is closed and no thread is at work in a buffer any more."""
        self._make = make
        self._end = end
        self._depth = depth
        self._max_stuck = max_stuck
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[tuple[_Call[_B], Job[_B]]] = deque()
        self._idle: list[_B] = []
        self._buffers = 0
        self._threads = 0
        self._waiting = 0
        self._working = 0
        self._stuck = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        """Commands that outlived their call and have not come back."""
        with self._lock:
            return self._stuck

    def run(self, jobs: Sequence[Job[_B]], take: Callable[[Job[_B], _B], None], deadline_ms: int) -> None:
        """Do all ``jobs`` by the deadline. ``take`` is called here for each that worked, with its buffer.

        Raises `Unavailable` when closed or with too many stuck, before anything is begun.
        """
        call: _Call[_B] = _Call(self._lock)
        try:
            self._begin(call, jobs)
            left = len(jobs)
            while left:
                job = self._next(call, deadline_ms)
                if job is None:
                    self._abandon(call, jobs)
                    return
                left -= 1
                if job.error is None and job._buffer is not None:
                    take(job, job._buffer)
                self._give_back(job)
        except BaseException:  # an interrupt while it waits, too: nobody would take what comes, and so its buffer
            self._abandon(call, jobs)
            raise

    def _begin(self, call: _Call[_B], jobs: Sequence[Job[_B]]) -> None:
        with self._lock:
            if self._closed:
                raise Unavailable("the transport is closed")
            if self._stuck > self._max_stuck:
                raise Unavailable(f"{self._stuck} earlier commands have not come back from the device")
            self._queue.extend((call, job) for job in jobs)
            # Threads that wait may have been woken for jobs of others, which are in the queue until they are taken.
            for _ in range(min(len(self._queue) - self._waiting, self._depth - self._threads)):
                try:
                    begin(self._serve, self._name)
                except Unavailable:
                    if not self._threads:
                        raise
                    break
                self._threads += 1
            self._work.notify(len(jobs))

    def _next(self, call: _Call[_B], deadline_ms: int) -> Job[_B] | None:
        with self._lock:
            while True:
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0 or self._closed:
                    return None
                if call.finished:
                    return call.finished.popleft()
                call.changed.wait(min(left_ms / 1000, _MAX_WAIT_S))

    def _abandon(self, call: _Call[_B], jobs: Sequence[Job[_B]]) -> None:
        """End a call whose time is over: nothing of it touches the caller's memory after this."""
        error: ForebayError = DeadlineExceeded("the device did not finish in time")
        with self._lock:
            if self._closed:
                error = Unavailable("the transport is closed")
            self._queue = deque(item for item in self._queue if item[0] is not call)
            while any(job._filling for job in jobs):
                call.changed.wait(_MAX_WAIT_S)
            for job in jobs:
                if not job.begun or not job.done:
                    job.error = job.error or error
                if job.begun and not job.done:
                    job._abandoned = True
                    self._stuck += 1
            for job in call.finished:  # what came just now: it was too late
                job.error = job.error or error
            call.finished.clear()
            for job in jobs:
                self._recover(job)
            self._work.notify_all()

    def _give_back(self, job: Job[_B]) -> None:
        with self._lock:
            self._recover(job)
            self._work.notify()

    def _recover(self, job: Job[_B]) -> None:
        """The buffer of a job that is done serves others, if it had one still."""
        if job._buffer is not None:
            self._idle.append(job._buffer)
            job._buffer = None

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._waiting += 1
                while not self._closed and not (self._queue and (self._idle or self._buffers < self._depth)):
                    self._work.wait()
                self._waiting -= 1
                if self._closed:
                    self._threads -= 1
                    return
                call, job = self._queue.popleft()
                self._working += 1
                job.begun, job._filling = True, job.fill is not None
                buffer = self._idle.pop() if self._idle else None
                self._buffers += buffer is None
            error: ForebayError | None = None
            try:
                if buffer is None:
                    buffer = self._make()
                if job.fill is not None:
                    job.fill(buffer)
                    with self._lock:
                        job._filling = False
                        call.changed.notify()
                job.work(buffer)
            except OSError as e:
                error = job.translate(e)
            except ForebayError as e:
                error = e
            except Exception as e:  # a library's own: it must end neither the thread nor the buffer
                error = Unavailable(f"{type(e).__name__}: {e}")
            self._ended(call, job, buffer, error)
            with self._lock:
                self._working -= 1
                last = self._closed and not self._working
            if last:
                self._end()

    def _ended(self, call: _Call[_B], job: Job[_B], buffer: _B | None, error: ForebayError | None) -> None:
        with self._lock:
            job.done, job._filling = True, False
            if buffer is None:
                self._buffers -= 1  # it could not be made
            if job._abandoned:
                self._stuck -= 1
                if buffer is not None:
                    self._idle.append(buffer)
                return
            job.error, job._buffer = error, buffer
            call.finished.append(job)
            call.changed.notify()

    def close(self) -> None:
        """Take no more work; calls under way end early. Threads end when their commands do. Idempotent."""
        with self._lock:
            nobody = not self._working and not self._closed
            self._closed = True
            self._work.notify_all()
            for call, _ in self._queue:
                call.changed.notify()
            self._queue.clear()
            self._idle.clear()
        if nobody:
            self._end()
