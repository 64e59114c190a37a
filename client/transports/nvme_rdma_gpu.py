"""Staging memory on a GPU, to which a target writes without passing through the host (GPUDirect RDMA).

Never run on hardware: no machine with an RDMA device and a GPU was at hand. Tests drive it with a stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from forebay.client.device_checksum import device_crc32c
from forebay.client.transports.base import DeviceReadOp, DeviceSegment, Outcome
from forebay.client.transports.nvme_rdma_device import Device, Key, access_flags
from forebay.errors import Unavailable

__all__ = ["Checksum", "DeviceStaging", "GpuMemory", "seal", "without_seeds"]

Checksum = Callable[[Sequence[Any], Sequence[int]], list[int]]


class DeviceStaging(Protocol):
    """Staging memory of a queue on a device."""

    address: int
    key: Key

    def scatter(self, segments: Sequence[DeviceSegment], offset: int) -> None:
        """Copy what lies at ``offset`` to where it belongs; when this returns it may be written over."""

    def close(self) -> None:
        """Take the memory from the RDMA device."""


class GpuMemory:
    """``length_bytes`` on the GPU that ``like`` is on, registered with an RDMA device.

    By a dma-buf of the allocation, else by nvidia_peermem. Raises `Unavailable` where neither works.
    """

    def __init__(self, device: Device, like: Any, length_bytes: int) -> None:
        torch = sys.modules["torch"]
        try:
            from ibverbs import cuda

            self._tensor = torch.empty(length_bytes, dtype=torch.uint8, device=like.device)
            # What the allocator gave was another tensor's, and computations on that may still be under way.
            torch.cuda.synchronize(like.device)
            self._region = cuda.register_tensor(device.domain, self._tensor, access_flags(remote=True))
        except (ImportError, OSError, RuntimeError) as e:
            raise Unavailable(f"{device.name} does not reach the memory of {like.device}: {e}") from e
        self._torch = torch
        self._cuda = cuda
        self.address = int(self._region.addr)
        self.key = Key(self._region.lkey, self._region.rkey)

    def scatter(self, segments: Sequence[DeviceSegment], offset: int) -> None:
        """As `DeviceStaging.scatter`. Raises `Unavailable`."""
        torch, device = self._torch, self._tensor.device
        try:
            with torch.cuda.device(device):
                self._cuda.flush_gpudirect_writes()  # what the RDMA device wrote is seen by what follows
                try:
                    for view, length_bytes, _ in segments:
                        if view is not None:
                            view.tensor.copy_(self._tensor[offset : offset + length_bytes])
                        offset += length_bytes
                finally:  # copies before one that failed may be under way, too
                    torch.cuda.current_stream(device).synchronize()
        except RuntimeError as e:
            raise Unavailable(f"copying on {device}: {e}") from e

    def close(self) -> None:
        """As `DeviceStaging.close`."""
        self._region.close()


def without_seeds(ops: Sequence[DeviceReadOp]) -> list[DeviceReadOp]:
    """The operations as a queue carries them out: it computes nothing on a device."""
    return [op._replace(segments=tuple(segment._replace(seed=None) for segment in op.segments)) for op in ops]


def seal(ops: Sequence[DeviceReadOp], outcomes: Sequence[Outcome], checksum: Checksum = device_crc32c) -> list[Outcome]:
    """``outcomes`` with the checksums of what the caller has now, computed on the device in one go."""
    seeded = [
        (segment.view.tensor, segment.seed)
        for op, outcome in zip(ops, outcomes, strict=True)
        if outcome.error is None
        for segment in op.segments
        if segment.view is not None and segment.seed is not None
    ]
    sums = iter(checksum([tensor for tensor, _ in seeded], [seed for _, seed in seeded]) if seeded else ())
    return [
        outcome
        if outcome.error is not None
        else Outcome(None, tuple(None if s.view is None or s.seed is None else next(sums) for s in op.segments))
        for op, outcome in zip(ops, outcomes, strict=True)
    ]
