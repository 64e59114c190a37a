"""Reads of block devices into GPU memory, by kvikio: into buffers on the GPU that are registered once (ADR 15).

As on the host, what is under way in a driver cannot be taken back. So it gets memory of ours; the calling thread copies
what arrived, on the device, and the checksums are computed there, of what the caller then has.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from forebay.client.device_checksum import device_crc32c
from forebay.client.transports.base import DeviceReadOp, Outcome
from forebay.client.transports.bounce import BouncePool, Job
from forebay.client.transports.disks import Disk
from forebay.client.transports.gpu_path import GpuPath
from forebay.clock import Clock
from forebay.errors import DeadlineExceeded, ForebayError, Unavailable

__all__ = ["DeviceMemory", "DeviceReads", "TorchMemory"]

_log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """Memory of the device that a tensor is on."""

    def like(self, tensor: Any, length_bytes: int) -> Any:
        """New bytes on the device of ``tensor``."""

    def settle(self, tensor: Any) -> None:
        """Return when copies to and from ``tensor`` have been made."""


class TorchMemory:
    """By torch, which whoever has a tensor has loaded."""

    def like(self, tensor: Any, length_bytes: int) -> Any:
        """As `DeviceMemory.like`."""
        torch = sys.modules["torch"]
        found = torch.empty(length_bytes, dtype=tensor.dtype, device=tensor.device)
        # What the allocator gave was another tensor's, and computations on that may still be under way.
        torch.cuda.synchronize(tensor.device)
        return found

    def settle(self, tensor: Any) -> None:
        """As `DeviceMemory.settle`."""
        sys.modules["torch"].cuda.current_stream(tensor.device).synchronize()


class _Buffers:
    """``count`` buffers of one device in one piece of memory, which is registered when the first is asked for."""

    def __init__(self, kvikio: Any, make: Callable[[int], Any], count: int, size_bytes: int) -> None:
        self._kvikio = kvikio
        self._make = make
        self._size_bytes = size_bytes
        self._left = count
        self._lock = threading.Lock()
        self._slab: Any = None

    def make(self) -> Any:
        with self._lock:
            if self._slab is None:
                slab = self._make(self._left * self._size_bytes)
                self._kvikio.memory_register(slab)
                self._slab = slab
            self._left -= 1
            return self._slab[self._left * self._size_bytes : (self._left + 1) * self._size_bytes]

    def free(self) -> None:
        with self._lock:
            if self._slab is not None:
                with suppress(Exception):  # at the end of a process the driver may have gone already
                    self._kvikio.memory_deregister(self._slab)
                self._slab = None


class DeviceReads:
    """Reads by kvikio, for one transport. ``path`` is gds or compat; up to ``depth`` commands a device. Thread-safe."""

    def __init__(
        self,
        path: GpuPath,
        *,
        depth: int,
        max_command_bytes: int,
        clock: Clock,
        memory: DeviceMemory | None = None,
        checksum: Callable[[Sequence[Any], Sequence[int]], list[int]] = device_crc32c,
    ) -> None:
        self.path = path
        self._depth = depth
        self._max_bytes = max_command_bytes
        self._clock = clock
        self._memory = memory or TorchMemory()
        self._checksum = checksum
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # for as long as a device takes to be opened: no caller waits for it
        self._pools: dict[str, BouncePool[Any]] = {}
        self._handles: dict[int, tuple[Disk, Any]] = {}
        self._closed = False

    def run(
        self,
        ops: Mapping[int, DeviceReadOp],
        sizes: Sequence[int],
        disks: Mapping[int, Disk],
        deadline_ms: int,
    ) -> tuple[dict[int, Outcome], set[int]]:
        """Carry out operations, ``sizes[i]`` bytes each: outcomes by number, and the NSIDs whose disks failed."""
        views = [segment.view for op in ops.values() for segment in op.segments if segment.view is not None]
        if not views:
            return {i: Outcome(None, (None,) * len(op.segments)) for i, op in ops.items()}, set()
        places: dict[int, tuple[int, int]] = {}
        jobs: list[Job[Any]] = []
        for i, op in ops.items():
            for at in range(0, sizes[i], self._max_bytes):
                length_bytes = min(self._max_bytes, sizes[i] - at)
                job = self._job(disks[op.nsid], op, at, length_bytes)
                places[id(job)] = i, at
                jobs.append(job)

        def take(job: Job[Any], buffer: Any) -> None:
            i, at = places[id(job)]
            try:
                _scatter(ops[i], at, min(self._max_bytes, sizes[i] - at), buffer)
            finally:  # copies before one that failed may be under way, too
                self._memory.settle(buffer)

        errors: dict[int, ForebayError] = {}
        try:
            self._pool_of(views[0].tensor).run(jobs, take, deadline_ms)
        except ForebayError as e:
            errors = dict.fromkeys(ops, e)
        failed: set[int] = set()
        for job in jobs:
            if job.error is not None:
                i = places[id(job)][0]
                errors.setdefault(i, job.error)
                if not isinstance(job.error, DeadlineExceeded):
                    failed.add(ops[i].nsid)
        return self._checked(ops, errors), failed

    def _checked(self, ops: Mapping[int, DeviceReadOp], errors: Mapping[int, ForebayError]) -> dict[int, Outcome]:
        """Outcomes of all operations: the checksums of what arrived are computed in one go."""
        seeded = [
            (segment.view.tensor, segment.seed)
            for i, op in ops.items()
            if i not in errors
            for segment in op.segments
            if segment.view is not None and segment.seed is not None
        ]
        sums = iter(self._checksum([tensor for tensor, _ in seeded], [seed for _, seed in seeded]) if seeded else ())
        results: dict[int, Outcome] = {}
        for i, op in ops.items():
            if (error := errors.get(i)) is not None:
                results[i] = Outcome(error, (None,) * len(op.segments))
                continue
            found = tuple(None if s.view is None or s.seed is None else next(sums) for s in op.segments)
            results[i] = Outcome(None, found)
        return results

    def _job(self, disk: Disk, op: DeviceReadOp, at: int, length_bytes: int) -> Job[Any]:
        offset_bytes = op.offset_bytes + at

        def work(buffer: Any) -> None:
            with disk.using():
                handle = self._handle(op.nsid, disk)
                done = 0
                while done < length_bytes:
                    left = length_bytes - done
                    got = handle.read(buffer[done:length_bytes], left, offset_bytes + done)
                    if not 0 < got <= left:
                        raise Unavailable(f"{disk.path}: kvikio read {got} of {left} bytes")
                    done += got

        return Job(work, lambda e: Unavailable(f"kvikio: {e}"))

    def _handle(self, nsid: int, disk: Disk) -> Any:
        """The library's own opening of the very device that ``disk`` is. Raises `Unavailable`."""
        with self._opening:
            known = self._handles.get(nsid)
            if known is not None and known[0] is disk:
                return known[1]
            handle = self.path.kvikio.CuFile(f"/proc/self/fd/{disk.fd}", "r")
            reopened = Disk(f"/proc/self/fd/{handle.fileno()}")
            try:
                if not reopened.same(disk):
                    raise Unavailable(f"{disk.path} became another device while it was opened")
            finally:
                reopened.close()
            if not handle.is_direct_io_supported():
                raise Unavailable(f"kvikio would read {disk.path} through the page cache")
            with self._lock:
                if not self._closed:
                    self._handles[nsid] = disk, handle  # the one before is closed when its last read has ended
            return handle

    def _pool_of(self, tensor: Any) -> BouncePool[Any]:
        device = str(tensor.device)
        with self._lock:
            if self._closed:
                raise Unavailable("the transport is closed")
            if device not in self._pools:
                buffers = _Buffers(
                    self.path.kvikio, lambda size: self._memory.like(tensor, size), self._depth, self._max_bytes
                )
                self._pools[device] = BouncePool(
                    buffers.make, self._depth, self._depth // 2, self._clock, "forebay-device", end=buffers.free
                )
            return self._pools[device]

    def close(self) -> None:
        """Take no more reads; what is under way ends when it does, in memory that is kept for it. Idempotent.

        The memory is deregistered when nothing is under way in it any more.
        """
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
            self._handles.clear()
        for pool in pools:
            pool.close()


def _scatter(op: DeviceReadOp, at: int, length_bytes: int, buffer: Any) -> None:
    """Copy the piece of an operation that lies in ``buffer`` to where it belongs, on the device."""
    start = 0
    for view, size, _ in op.segments:
        low, high = max(start, at), min(start + size, at + length_bytes)
        if view is not None and low < high:
            view.tensor[low - start : high - start].copy_(buffer[low - at : high - at])
        start += size
