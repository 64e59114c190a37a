"""A stand-in for kvikio and for GPU memory, named so: it takes what the calls are documented to take.

No GPU is here: that kvikio does what it says is seen by ``perf/gpu_check.py`` on a machine that has one.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from forebay.checksum import crc32c

__all__ = ["StandInKvikio", "StandInMemory", "StandInTensor", "stand_in_checksum"]


class StandInTensor:
    """Bytes of a device that nothing but the stand-in's own copies reaches."""

    dtype = "uint8"

    def __init__(self, array: Any, device: str = "cuda:0") -> None:
        self.array = array
        self.device = device
        self.shape = array.shape

    def __getitem__(self, part: slice) -> StandInTensor:
        return StandInTensor(self.array[part], self.device)

    def copy_(self, other: StandInTensor) -> None:
        assert other.device == self.device and other.shape == self.shape
        self.array[:] = other.array


def stand_in_checksum(tensors: Sequence[Any], seeds: Sequence[int]) -> list[int]:
    return [crc32c(tensor.array, seed) for tensor, seed in zip(tensors, seeds, strict=True)]


class StandInMemory:
    """Allocates, and counts how often somebody waited for copies."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.settled = 0

    def like(self, tensor: Any, length_bytes: int) -> StandInTensor:
        self.allocated.append(length_bytes)
        return StandInTensor(np.full(length_bytes, 0xAA, np.uint8), tensor.device)

    def settle(self, tensor: Any) -> None:
        self.settled += 1


class _CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class _Defaults:
    def __init__(self, library: StandInKvikio) -> None:
        self._library = library

    def set(self, name: str, value: object) -> None:
        self._library.settings[name] = value

    def is_compat_mode_preferred(self) -> bool:
        self._library.asked.wait()
        return self._library.settings["compat_mode"] is _CompatMode.ON or not self._library.cufile


class StandInKvikio:
    """The module. ``cufile``: whether it finds cuFile. Cleared, ``asked`` makes it hang, and ``reading`` its reads."""

    CompatMode = _CompatMode

    def __init__(self, *, cufile: bool = True) -> None:
        self.cufile = cufile
        self.settings: dict[str, object] = {}
        self.defaults = _Defaults(self)
        self.registered: list[Any] = []
        self.deregistered: list[Any] = []
        self.opened: list[str] = []
        self.reads: list[tuple[int, int]] = []
        self.direct_io = True
        self.fails = False
        self.short = 0
        self.asked = threading.Event()
        self.asked.set()
        self.reading = threading.Event()
        self.reading.set()
        self.under_way = 0
        library = self

        class CuFile:
            def __init__(self, file: str, flags: str = "r") -> None:
                assert flags == "r"
                library.opened.append(file)
                self._fd = os.open(file, os.O_RDONLY | os.O_DIRECT)

            def __del__(self) -> None:
                os.close(self._fd)

            def fileno(self) -> int:
                return self._fd

            def is_direct_io_supported(self) -> bool:
                return library.direct_io and library.settings.get("auto_direct_io_read") is True

            def read(self, buf: StandInTensor, size: int, file_offset: int) -> int:
                assert any(np.shares_memory(buf.array, slab.array) for slab in library.registered), "not registered"
                assert buf.shape[0] == size and size % 4096 == file_offset % 4096 == 0, "not aligned"
                library.under_way += 1
                library.reading.wait()
                library.under_way -= 1
                if library.fails:
                    raise RuntimeError("cuFile error: driver not initialized")
                size = min(size, library.short) if library.short else size
                host = mmap.mmap(-1, size)
                got = os.preadv(self._fd, [memoryview(host)], file_offset)
                buf.array[:got] = np.frombuffer(host, np.uint8)[:got]
                library.reads.append((file_offset, got))
                return got

        self.CuFile = CuFile

    def memory_register(self, buf: StandInTensor) -> None:
        assert not any(np.shares_memory(buf.array, slab.array) for slab in self.registered), "registered twice"
        self.registered.append(buf)

    def memory_deregister(self, buf: StandInTensor) -> None:
        self.deregistered.append(buf)
