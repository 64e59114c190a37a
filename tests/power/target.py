"""The simulated target with real volumes: what reaches media goes through the target's own `Volume`, file and all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from forebay.appliance.dataplane.interface import Barrier, VolumeSpec
from forebay.appliance.dataplane.target.volume import Volume, aligned_buffers
from forebay.errors import TargetFailed
from forebay.ids import LBA_BYTES, VolumeId
from tests.sim.target import SimTarget

__all__ = ["VolumeTarget"]

_BUFFER_BYTES = 1 << 20


class VolumeTarget(SimTarget):
    """Hosts, grants and controllers are the simulation's; reads, writes, flushes and regions are the target's."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[VolumeId, Volume] = {}
        self._buffer = aligned_buffers(_BUFFER_BYTES)[0]

    def read(self, volume: VolumeId, offset_bytes: int, length_bytes: int) -> bytes:
        view = self._buffer[: -(-length_bytes // LBA_BYTES) * LBA_BYTES]
        self.opened[volume].read_into(view, offset_bytes)
        return bytes(view[:length_bytes])

    def _store(self, volume: VolumeId, offset_bytes: int, data: bytes) -> None:
        view = self._buffer[: len(data)]
        view[:] = data
        self.opened[volume].write(view, offset_bytes)

    def _serve(self, spec: VolumeSpec) -> None:
        self.volumes[spec.volume] = spec
        if spec.volume not in self.opened:
            self.opened[spec.volume] = Volume(spec.bdev, Path(spec.path))

    async def prepare_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        await self._enter("prepare_region")
        self._served(volume)
        self.opened[volume.volume].prepare_region(offset_bytes, length_bytes)
        self._leave("prepare_region")

    async def release_region(self, volume: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        await self._enter("release_region")
        self._served(volume)
        self.opened[volume.volume].release_region(offset_bytes, length_bytes)
        self._leave("release_region")

    async def remove_volume(self, spec: VolumeSpec) -> None:
        await super().remove_volume(spec)
        if (volume := self.opened.pop(spec.volume, None)) is not None:
            volume.close()

    async def barrier(self, volume: VolumeSpec) -> Barrier:
        await self._enter("barrier")
        self._served(volume)
        await asyncio.to_thread(self.opened[volume.volume].flush)
        self._leave("barrier")
        return Barrier.FLUSHED

    async def checksums(self, volume: VolumeSpec, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        await self._enter("checksums")
        self._served(volume)
        try:
            return self.opened[volume.volume].checksums(ranges)
        except OSError as error:
            raise TargetFailed(str(error)) from error

    async def close(self) -> None:
        for volume in self.opened.values():
            volume.close()
        self.opened.clear()
