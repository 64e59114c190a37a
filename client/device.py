"""Buffers in a GPU's memory: bytes of them, and the lane by which staged bytes reach them.

A transport that reaches device memory fills it itself. For the others a block is read into pinned host memory, checked
there, and copied once it may be used, while the next ones are being read; so a miss leaves its buffer as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from forebay.errors import InvalidArgument

__all__ = ["CudaLane", "DeviceView", "Lane", "View", "lane_of"]


class DeviceView:
    """Bytes of a device's memory, as a `memoryview` is bytes of the host's: a slice is a view of the same memory.

    ``tensor`` is one-dimensional, contiguous, uint8.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __getitem__(self, part: slice) -> DeviceView:
        return DeviceView(self.tensor[part])

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self)

    @property
    def address(self) -> int:
        """Where it begins in the device's memory."""
        return int(self.tensor.data_ptr())


View = memoryview | DeviceView
"""A caller's buffer."""


class Lane(Protocol):
    """One call's way from host memory to one device. Copies are made in order, beside the caller's computation."""

    def host(self, length_bytes: int) -> Any:
        """Pinned host memory: a uint8 tensor. It may be dropped while a copy of it is under way."""

    def copy(self, view: DeviceView, host: Any) -> None:
        """Begin to copy ``host`` over ``view``, which is of its length."""

    def mark(self) -> Any:
        """A point after all copies so far, for `wait`."""

    def wait(self, mark: Any) -> None:
        """Return when the copies before ``mark`` have been made."""

    def settle(self) -> None:
        """Return when the caller's computation has let go of the buffers: before something else writes to them."""

    def drain(self) -> None:
        """Return when all copies have been made."""


class CudaLane:
    """A lane by torch, with a stream of its own. Raises `RuntimeError` as torch does when the device fails."""

    def __init__(self, device: Any) -> None:
        self._torch = sys.modules["torch"]  # the caller's tensors are of it
        self._device = device
        self._stream = self._torch.cuda.Stream(device)
        # What the caller has queued may read the old contents still.
        self._stream.wait_stream(self._torch.cuda.current_stream(device))

    def host(self, length_bytes: int) -> Any:
        """From torch's cache of pinned memory, which takes nothing back before the copies of it have been made."""
        return self._torch.empty(length_bytes, dtype=self._torch.uint8, pin_memory=True)

    def copy(self, view: DeviceView, host: Any) -> None:
        """As `Lane.copy`."""
        with self._torch.cuda.stream(self._stream):
            view.tensor.copy_(host, non_blocking=True)

    def mark(self) -> Any:
        """As `Lane.mark`: a CUDA event."""
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """As `Lane.wait`."""
        mark.synchronize()

    def settle(self) -> None:
        """As `Lane.settle`."""
        self._torch.cuda.current_stream(self._device).synchronize()

    def drain(self) -> None:
        """As `Lane.drain`."""
        self._stream.synchronize()


def lane_of(views: Sequence[View]) -> Lane | None:
    """The lane to the device that all ``views`` are on, None for the host.

    Raises `InvalidArgument` where they are on several.
    """
    devices = {view.tensor.device if isinstance(view, DeviceView) else None for view in views}
    if len(devices) > 1:
        names = sorted("cpu" if device is None else str(device) for device in devices)
        raise InvalidArgument(f"buffers on {', '.join(names)} in one call", field="buffers", limit="one device")
    device = devices.pop() if devices else None
    return None if device is None else CudaLane(device)
