"""A user-space NVMe-oF initiator, whatever the wire: a pool of queues to a subsystem, driven by the threads that call.

A call takes queues out of the pool, sends many commands on each, receives into the caller's memory and puts the queues
back. There is no thread between the wire and the caller, and no queue with a command in flight is ever given back: at a
deadline or a failure it is closed, which keeps the caller's buffers safe (docs/design.md §6.5).
"""

from __future__ import annotations

import logging
import random
import select
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay.client.transports.base import Outcome, ReadOp, Transport, TransportState, WriteOp, op_bytes
from forebay.client.transports.controller import Controller, SubsystemAddress
from forebay.client.transports.options import FabricsOptions
from forebay.client.transports.queues import IoQueue
from forebay.client.transports.requests import Request, outcomes, plan
from forebay.clock import Clock, SystemClock
from forebay.errors import (
    Busy,
    ConnectionLost,
    DeadlineExceeded,
    ForebayError,
    ProtocolError,
    Unavailable,
    VolumeMismatch,
)
from forebay.ids import LBA_BYTES, HostIdentity

__all__ = ["FabricsTransport"]

_log = logging.getLogger(__name__)

_QUEUE_IDS = 4
"""Queue ids to ask for, a connection: one that broke is not used again soon."""
_TURN_BYTES = 1 << 20
"""Bytes received from one queue before the next one has its turn and the clock is read."""
_MAX_POLL_MS = 250
"""A waiting call looks this often whether the transport was closed, whatever its deadline."""


@dataclass(slots=True, eq=False)
class _Association:
    """A controller and its I/O queues: ``open`` are the ids of all, ``idle`` those that nobody holds."""

    controller: Controller
    idle: list[IoQueue] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    opening: int = 0
    full_until_ms: int = 0
    """The target takes no further connection now: those that are open have to do."""


class FabricsTransport(Transport):
    """NVMe-oF to one subsystem as one host; what the wire is, a subclass says.

    ``nguids`` maps NSIDs to the NGUID (hex) that each must have; a volume that was swapped is `VolumeMismatch`. It is
    looked at whenever it is needed, so its owner may add to it.
    Connects when first used.
    """

    def __init__(
        self,
        subsystem: SubsystemAddress,
        host: HostIdentity,
        *,
        options: FabricsOptions,
        nguids: Mapping[int, str] | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self._subsystem = subsystem
        self._host = host
        self._nguids: Mapping[int, str] = {} if nguids is None else nguids  # its owner adds to an empty one, too
        self._options = options
        self._clock = clock or SystemClock()
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._dialling = threading.Lock()
        self._association: _Association | None = None
        self._closed = False
        self._associations = 0
        self._failures = 0
        self._not_before_ms = 0
        self._busy = False
        """The last failure was the target's word that it has as many connections as it takes."""

    # --- what the wire is -------------------------------------------------------------------------------------------

    @abstractmethod
    def _open_controller(self, queues: int, deadline_ms: int) -> Controller:
        """A controller of the subsystem, open and ready for ``queues`` I/O queues."""

    def _plan(
        self, ops: Sequence[ReadOp | WriteOp], which: Sequence[int], sizes: Sequence[int], max_bytes: int
    ) -> list[Request]:
        """The commands of ``ops[i] for i in which``."""
        return plan(ops, which, sizes, max_bytes)

    # --- the interface ----------------------------------------------------------------------------------------------

    def connect(self, deadline_ms: int) -> None:
        self._connected(deadline_ms)

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        return self._run(ops, [op_bytes(op, writable=True) for op in ops], deadline_ms)

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        return self._run(ops, [op_bytes(op, writable=False) for op in ops], deadline_ms)

    def state(self) -> TransportState:
        with self._changed:
            left_ms = max(0, self._not_before_ms - self._clock.monotonic_ms()) if self._failures else 0
            # One whose keep-alive failed is only replaced by who needs it next.
            standing = self._association is not None and self._association.controller.alive
            return TransportState(
                connected=standing,
                connections=len(self._association.open) if self._association and standing else 0,
                reconnects=max(0, self._associations - 1),
                failures=self._failures,
                breaker_open=left_ms > 0,
                retry_after_ms=left_ms,
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            association, self._association = self._association, None
            self._changed.notify_all()
        if association is not None:
            self._end(association)

    # --- one call ---------------------------------------------------------------------------------------------------

    def _run(self, ops: Sequence[ReadOp | WriteOp], sizes: Sequence[int], deadline_ms: int) -> list[Outcome]:
        results: dict[int, Outcome] = {}
        if ops:
            try:
                self._run_connected(ops, sizes, deadline_ms, results)
            except ForebayError as e:
                for i, op in enumerate(ops):
                    if i not in results:
                        results[i] = Outcome(e, (None,) * len(op.segments))
        return [results[i] for i in range(len(ops))]

    def _run_connected(
        self, ops: Sequence[ReadOp | WriteOp], sizes: Sequence[int], deadline_ms: int, results: dict[int, Outcome]
    ) -> None:
        options = self._options
        wanted = min(options.connections, options.call_connections, -(-sum(sizes) // options.queue_bytes))
        association, held = self._admitted(wanted, deadline_ms)
        try:
            controller = association.controller
            self._check_volumes(controller, ops, sizes, deadline_ms, results)
            limit = controller.max_transfer_bytes or options.max_command_bytes
            max_bytes = min(limit, options.max_command_bytes)
            requests = self._plan(ops, [i for i in range(len(ops)) if i not in results], sizes, max_bytes)
            pairs = list(held)
            self._drive(pairs, requests, deadline_ms)
            # A status concerns the command as a whole: ask again for each neighbour by itself.
            merged = [r for r in requests if r.error is not None and r.quiesced and len(r.parts) > 1]
            if merged and pairs:
                alone = [one for r in merged for i, _, _ in r.parts for one in self._plan(ops, [i], sizes, max_bytes)]
                self._drive(pairs, alone, deadline_ms)
                requests = [r for r in requests if r not in merged] + alone
            outcomes(ops, requests, results)
        finally:
            self._check_in(association, held)

    def _check_volumes(
        self,
        controller: Controller,
        ops: Sequence[ReadOp | WriteOp],
        sizes: Sequence[int],
        deadline_ms: int,
        results: dict[int, Outcome],
    ) -> None:
        bounds: dict[int, int | ForebayError] = {}
        for i, op in enumerate(ops):
            bound = bounds.get(op.nsid)
            if bound is None:
                bound = bounds[op.nsid] = self._volume_bytes(controller, op.nsid, deadline_ms)
            if isinstance(bound, ForebayError):
                results[i] = Outcome(bound, (None,) * len(op.segments))
            elif op.offset_bytes + sizes[i] > bound:
                error = ProtocolError(f"{sizes[i]} bytes at {op.offset_bytes} of a volume of {bound}")
                results[i] = Outcome(error, (None,) * len(op.segments))

    def _volume_bytes(self, controller: Controller, nsid: int, deadline_ms: int) -> int | ForebayError:
        try:
            identity = controller.namespace(nsid, deadline_ms)
        except ForebayError as e:
            return e
        expected = self._nguids.get(nsid)
        if expected and expected.replace("-", "").lower() != identity.nguid.hex():
            return VolumeMismatch(f"NVMe namespace {nsid} is {identity.nguid.hex()} where {expected} is expected")
        return identity.lba_count * LBA_BYTES

    def _drive(self, pairs: list[IoQueue], requests: Sequence[Request], deadline_ms: int) -> None:
        """Run ``requests`` to their ends on ``pairs``; a queue that fails is closed and taken out of the list."""
        pending = deque(requests)
        by_fd = {pair.fd: pair for pair in pairs}
        poller = select.poll()
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        blocked: set[int] = set()  # queues whose socket took no more; they wait for POLLOUT
        ready: list[tuple[int, int]] = []

        def lose(pair: IoQueue, error: ForebayError) -> None:
            poller.unregister(pair.fd)
            pairs.remove(pair)
            pair.fail(error)

        while pairs:
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0 or self._closed:
                break
            self._feed(pairs, pending)
            for pair in list(pairs):
                fd = pair.fd
                if pair.wants_to_send and fd not in blocked:
                    try:
                        pair.flush()
                    except ForebayError as e:
                        lose(pair, e)
                        continue
                if pair.wants_to_send != (fd in blocked):
                    blocked ^= {fd}
                    poller.modify(fd, select.POLLIN | (select.POLLOUT if fd in blocked else 0))
            if not any(pair.in_flight for pair in pairs):
                if pending and pairs:
                    continue
                break
            if not ready:
                ready = poller.poll(min(left_ms, _MAX_POLL_MS))
            more: list[tuple[int, int]] = []
            for fd, event in ready:
                pair = by_fd[fd]
                try:
                    if event & select.POLLOUT:
                        pair.flush()
                    if event & ~select.POLLOUT and pair.receive(_TURN_BYTES):
                        more.append((fd, select.POLLIN))
                except ForebayError as e:
                    lose(pair, e)
            ready = more if len(pairs) == 1 else []
        for pair in [p for p in pairs if p.in_flight]:
            lose(pair, self._ended("the target did not finish in time"))
        for request in pending:
            if pairs:
                request.error = self._ended("the deadline passed before the command was sent")
            else:
                request.error = ConnectionLost("every connection to the target was lost")

    def _ended(self, late: str) -> ForebayError:
        return Unavailable("the transport is closed") if self._closed else DeadlineExceeded(late)

    def _feed(self, pairs: Sequence[IoQueue], pending: deque[Request]) -> None:
        """Give each queue commands, the emptiest first, up to `FabricsOptions.queue_bytes`."""
        while pending:
            pair = min(pairs, key=lambda one: one.bytes_in_flight)
            if not pair.takes(pending[0]) or (pair.in_flight and pair.bytes_in_flight >= self._options.queue_bytes):
                return
            pair.submit(pending.popleft())

    # --- the pool ---------------------------------------------------------------------------------------------------

    def _admitted(self, wanted: int, deadline_ms: int) -> tuple[_Association, list[IoQueue]]:
        """`_check_out`, again when the target says that it is worth it, if that is before the deadline."""
        while True:
            try:
                return self._check_out(wanted, deadline_ms)
            except Busy as e:
                wait_ms = int(e.retry_after_ms * self._random.uniform(1.0, 1.5))
                if self._clock.monotonic_ms() + wait_ms >= deadline_ms:
                    raise
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, wait_ms / 1000)

    def _check_out(self, wanted: int, deadline_ms: int) -> tuple[_Association, list[IoQueue]]:
        """Take 1 to ``wanted`` queues: idle ones, and new ones while there are fewer than allowed.

        Waits, up to the deadline, only when every queue is out.
        """
        while True:
            association = self._connected(deadline_ms)
            pairs: list[IoQueue] = []
            try:
                if self._gather(pairs, association, wanted, deadline_ms):
                    return association, pairs
            except BaseException:  # an interrupt: they are nobody's else, and would count for ever
                self._check_in(association, pairs)
                raise

    def _gather(self, pairs: list[IoQueue], association: _Association, wanted: int, deadline_ms: int) -> bool:
        """Add queues to ``pairs``; whether there are any, else it is worth another try."""
        if not self._take_idle(pairs, association, wanted):
            return False
        with self._changed:
            if not pairs and association is not self._association:
                return False
            limit = min(self._options.connections, association.controller.queues)
            if association.open and self._clock.monotonic_ms() < association.full_until_ms:
                limit = 0
            room = limit - len(association.open) - association.opening
            missing = max(0, min(wanted - len(pairs), room))
            if not pairs and not missing:
                if association.idle:
                    return False  # one came back just now
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    raise DeadlineExceeded("every connection to the target was in use until the deadline")
                self._changed.wait(min(left_ms, _MAX_POLL_MS) / 1000)
                return False
            association.opening += missing
        try:
            for _ in range(missing):
                pairs.append(self._open_queue(association, deadline_ms))
        except ForebayError as e:
            if isinstance(e, Busy) and association.open:
                association.full_until_ms = self._clock.monotonic_ms() + e.retry_after_ms
                return bool(pairs)  # others have queues, and will give them back
            if not pairs:
                with self._changed:
                    others = association.open or association.opening > missing
                # That this call had too little time takes no connection from those that have or make one.
                if not (others and isinstance(e, DeadlineExceeded)):
                    self._failed(association, e)
                raise
        finally:
            with self._changed:
                association.opening -= missing
                self._changed.notify_all()
        return True

    def _take_idle(self, pairs: list[IoQueue], association: _Association, wanted: int) -> bool:
        """Add idle queues that are usable to ``pairs``, and close the others; False where the association is over."""
        broken: list[IoQueue] = []
        try:
            with self._changed:
                if association is not self._association:
                    return False
                while association.idle and len(pairs) < wanted:
                    pair = association.idle.pop()
                    (pairs if pair.usable() else broken).append(pair)
        finally:
            self._drop(association, broken)
        return True

    def _drop(self, association: _Association, pairs: Sequence[IoQueue]) -> None:
        """Close queues that nobody holds. That may take a while, so not under the lock, which others need."""
        for pair in pairs:
            pair.close()
        if pairs:
            with self._changed:
                association.open.difference_update(pair.queue_id for pair in pairs)
                self._changed.notify_all()

    def _open_queue(self, association: _Association, deadline_ms: int) -> IoQueue:
        with self._dialling_until(deadline_ms):
            pair = association.controller.open_queue(association.open, deadline_ms)
            with self._changed:
                association.open.add(pair.queue_id)
                self._failures = 0  # not before: a target may take a controller, and no queue of it
        return pair

    def _check_in(self, association: _Association, held: Sequence[IoQueue]) -> None:
        """Give queues back; one that has a command in flight, whatever the reason, is closed."""
        for pair in held:
            if pair.in_flight:
                pair.close()
        with self._changed:
            current = association is self._association
            good = [pair for pair in held if current and not pair.closed]
            association.idle += good
            self._changed.notify_all()
        self._drop(association, [pair for pair in held if pair not in good])

    def _connected(self, deadline_ms: int) -> _Association:
        """The association, made anew if there is none that stands."""
        association = self._standing()
        if association is not None:
            return association
        with self._dialling_until(deadline_ms):
            association = self._standing()  # another thread may have been here
            if association is not None:
                return association
            with self._changed:
                left_ms = self._not_before_ms - self._clock.monotonic_ms()
                if self._failures and left_ms > 0:
                    if self._busy:
                        raise Busy("the target has as many connections as it takes", retry_after_ms=left_ms)
                    raise Unavailable(
                        f"connecting to the target failed {self._failures} times; not tried again yet",
                        retry_after_ms=left_ms,
                    )
            try:
                controller = self._open_controller(self._options.connections * _QUEUE_IDS, deadline_ms)
            except ForebayError as e:
                self._failed(None, e)
                raise
            association = _Association(controller)
            with self._changed:
                if self._closed:
                    controller.close()
                    raise Unavailable("the transport is closed")
                self._association = association
                self._associations += 1
            return association

    def _standing(self) -> _Association | None:
        with self._changed:
            if self._closed:
                raise Unavailable("the transport is closed")
            association = self._association
        if association is None or association.controller.alive:
            return association
        with self._changed:
            if self._association is association:
                self._association = None
            self._changed.notify_all()
        self._end(association)
        return None

    def _end(self, association: _Association) -> None:
        association.controller.close()
        with self._changed:
            idle, association.idle = association.idle, []
        self._drop(association, idle)

    def _failed(self, association: _Association | None, error: ForebayError) -> None:
        """Connecting failed: wait longer each time, with jitter so that clients do not come back in step."""
        first_ms, longest_ms = self._options.backoff_ms
        with self._changed:
            self._failures += 1
            self._busy = isinstance(error, Busy)
            wait_ms = int(min(longest_ms, first_ms << min(self._failures - 1, 16)) * self._random.uniform(0.5, 1.0))
            self._not_before_ms = self._clock.monotonic_ms() + max(wait_ms, error.retry_after_ms)
            if association is not None and self._association is association:
                self._association = None
        if association is not None:
            self._end(association)
        _log.info("connecting to %s failed (%d in a row): %s", self._subsystem.nqn, self._failures, error)

    @contextmanager
    def _dialling_until(self, deadline_ms: int) -> Iterator[None]:
        """One thread connects at a time; the others wait for it, up to their deadlines."""
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or not self._dialling.acquire(timeout=left_ms / 1000):
            raise DeadlineExceeded("no connection to the target before the deadline")
        try:
            yield
        finally:
            self._dialling.release()
