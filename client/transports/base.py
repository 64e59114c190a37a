"""The transport interface: reads and writes of volume ranges, straight between a target and the caller's memory.

A transport is bound to one endpoint and one NVMe host identity and is safe to use from many threads. Its calls answer
one `Outcome` an operation and raise only for mistakes of the caller. What every transport must do is written as tests
in `forebay.testing.transport_suite`. The rule that matters most (docs/design.md §6.5): when a call returns, nothing can
write to the views that were given to it any more, whatever happened to the operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forebay.client.device import DeviceView
from forebay.errors import ForebayError, InvalidArgument
from forebay.ids import LBA_BYTES

__all__ = [
    "Capabilities",
    "DeviceReadOp",
    "DeviceSegment",
    "Outcome",
    "ReadOp",
    "Segment",
    "Transport",
    "TransportState",
    "WriteOp",
    "op_bytes",
]


class Segment(NamedTuple):
    """One piece of an operation, in the order of the volume.

    ``view`` is contiguous bytes of ``length_bytes`` (writable for reads); None reads into nowhere, or writes zeros.
    With a ``seed`` the transport answers the CRC-32C of the segment started from it (see `forebay.checksum`), computed
    while the bytes are in cache; it needs a view. A tuple, because several are made for every block.
    """

    view: memoryview | None
    length_bytes: int
    seed: int | None = None


class ReadOp(NamedTuple):
    """Read ``segments`` from ``offset_bytes`` of the volume on; offset and sum of lengths are multiples of 4 KiB."""

    nsid: int
    offset_bytes: int
    segments: tuple[Segment, ...]


class DeviceSegment(NamedTuple):
    """One piece of a read into a device's memory, as `Segment`; its checksum is computed on the device."""

    view: DeviceView | None
    length_bytes: int
    seed: int | None = None


class DeviceReadOp(NamedTuple):
    """As `ReadOp`, into a device's memory."""

    nsid: int
    offset_bytes: int
    segments: tuple[DeviceSegment, ...]


class WriteOp(NamedTuple):
    """Write ``segments`` to ``offset_bytes`` of the volume on; offset and sum of lengths are multiples of 4 KiB.

    The commands carry ``tag`` (32 bits), by which the target knows whose grant they are under.
    """

    nsid: int
    offset_bytes: int
    segments: tuple[Segment, ...]
    tag: int = 0


class Outcome(NamedTuple):
    """What became of one operation.

    ``checksums`` holds one entry a segment, None where there was no seed or ``error`` is set. ``quiesced`` tells, for
    writes, that every command of the operation has completed (or was never sent): nothing of it can reach media later.
    """

    error: ForebayError | None
    checksums: tuple[int | None, ...] = ()
    quiesced: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do; callers act by this, never by its class."""

    name: str
    device_memory: bool = False
    """It has `Transport.read_device`."""
    writes: bool = True
    """It can write under a grant."""


@dataclass(frozen=True, slots=True)
class TransportState:
    """How a transport is doing, for metrics and for people.

    ``breaker_open`` means that connecting failed ``failures`` times in a row and is not tried again before
    ``retry_after_ms``; until then operations fail at once with `Unavailable`.
    """

    connected: bool
    connections: int
    reconnects: int
    failures: int
    breaker_open: bool
    retry_after_ms: int


class Transport(ABC):
    """One way to one endpoint's volumes."""

    capabilities: Capabilities

    @abstractmethod
    def connect(self, deadline_ms: int) -> None:
        """Connect now rather than at the first operation. Raises what an operation would answer."""

    @abstractmethod
    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        """Fill the segments' views; one outcome an operation, in order.

        ``deadline_ms`` is on the clock's monotonic scale; what is not done by then is `DeadlineExceeded`. After an
        error the contents of the operation's views are undefined. Raises `InvalidArgument` for a malformed operation.
        """

    def read_device(self, ops: Sequence[DeviceReadOp], deadline_ms: int) -> list[Outcome]:
        """As `read`, straight into a device's memory, where ``capabilities.device_memory`` says that it can.

        The caller's computation has let go of the views. Raises `InvalidArgument` where there is no such way.
        """
        raise InvalidArgument(f"{self.capabilities.name} reaches host memory only", field="segments")

    @abstractmethod
    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        """Write the segments; one outcome an operation, in order, as in `read`."""

    def serves(self, nsid: int) -> str | None:
        """Why a volume cannot be reached by this transport now; None if it can, or that is only seen by trying.

        Asks nobody and does not wait.
        """
        return None

    @abstractmethod
    def state(self) -> TransportState:
        """How the transport is doing now."""

    @abstractmethod
    def close(self) -> None:
        """Give up every connection; calls under way end early and later ones answer `Unavailable`. Idempotent."""


def op_bytes(op: ReadOp | DeviceReadOp | WriteOp, *, writable: bool) -> int:
    """Length of an operation in bytes. Raises `InvalidArgument` where it breaks the rules above."""
    total = 0
    for view, length_bytes, seed in op.segments:
        if length_bytes <= 0:
            raise InvalidArgument(f"a segment of {length_bytes} bytes", field="segments")
        if view is None:
            if seed is not None:
                raise InvalidArgument("a segment with a seed and no view", field="segments")
        elif view.nbytes != length_bytes or (
            isinstance(view, memoryview) and (not view.c_contiguous or (writable and view.readonly))
        ):
            raise InvalidArgument(
                f"a view of {view.nbytes} bytes that does not fit its segment of {length_bytes}", field="segments"
            )
        total += length_bytes
    if op.offset_bytes < 0 or op.offset_bytes % LBA_BYTES or total % LBA_BYTES or not total:
        raise InvalidArgument(
            f"range of {total} bytes at {op.offset_bytes}", field="offset_bytes", limit=f"multiples of {LBA_BYTES}"
        )
    return total
