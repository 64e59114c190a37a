"""Faults as a wrapper: a transport that fails now and then, the same way for the same seed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.checksum import crc32c
from forebay.client.transports.base import Outcome, ReadOp, Segment, Transport, TransportState, WriteOp
from forebay.errors import ConnectionLost, DeadlineExceeded, TargetFailed

__all__ = ["FaultRates", "Faulty"]


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each fault comes, of 1.0, for each operation.

    ``corrupt``: a read succeeds with one bit wrong. ``lost``: the connection breaks. ``late``: nothing comes before the
    deadline. ``media``: the target reports an error. A write that is lost or late is not quiesced, and may or may not
    have reached media.
    """

    corrupt: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    media: float = 0.0


class Faulty(Transport):
    """``inner`` with faults. ``injected`` counts them by name; thread-safe, but only single-threaded use repeats."""

    def __init__(self, inner: Transport, seed: int, rates: FaultRates) -> None:
        self.capabilities = inner.capabilities
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._rates = rates
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def connect(self, deadline_ms: int) -> None:
        self._inner.connect(deadline_ms)

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        outcomes = self._inner.read(ops, deadline_ms)
        return [self._read_fault(op, outcome) for op, outcome in zip(ops, outcomes, strict=True)]

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        faults = [self._draw(reads=False) for _ in ops]
        # Half of what fails was never written, the other half was: nobody can tell from outside.
        kept = [i for i, fault in enumerate(faults) if fault is None or self._flip()]
        done = dict(zip(kept, self._inner.write([ops[i] for i in kept], deadline_ms), strict=True))
        return [
            done[i] if fault is None else _failed(fault, len(op.segments))
            for i, (op, fault) in enumerate(zip(ops, faults, strict=True))
        ]

    def state(self) -> TransportState:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()

    def _read_fault(self, op: ReadOp, outcome: Outcome) -> Outcome:
        fault = self._draw(reads=True) if outcome.error is None else None
        if fault is None:
            return outcome
        if fault != "corrupt":
            return _failed(fault, len(op.segments))
        views = [i for i, segment in enumerate(op.segments) if segment.view is not None]
        if not views:
            return outcome
        with self._lock:
            index = self._random.choice(views)
            bit = self._random.randrange(op.segments[index].length_bytes * 8)
        return Outcome(None, _flip_bit(op.segments[index], index, bit, outcome.checksums))

    def _draw(self, *, reads: bool) -> str | None:
        rates = self._rates
        with self._lock:
            at = self._random.random()
            for name, rate in (
                ("corrupt", rates.corrupt if reads else 0.0),
                ("lost", rates.lost),
                ("late", rates.late),
                ("media", rates.media),
            ):
                if at < rate:
                    self.injected[name] += 1
                    return name
                at -= rate
        return None

    def _flip(self) -> bool:
        with self._lock:
            return self._random.random() < 0.5


def _failed(fault: str, segments: int) -> Outcome:
    error = {
        "lost": ConnectionLost("injected: connection lost"),
        "late": DeadlineExceeded("injected: late"),
        "media": TargetFailed("injected: media error"),
    }[fault]
    return Outcome(error, (None,) * segments, quiesced=fault == "media")


def _flip_bit(segment: Segment, index: int, bit: int, checksums: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Change one bit where the caller will look, and say what a checksum of those bytes is."""
    view, _, seed = segment
    assert view is not None
    view[bit // 8] ^= 1 << bit % 8
    changed = list(checksums)
    if seed is not None:
        changed[index] = crc32c(view, seed)
    return tuple(changed)
