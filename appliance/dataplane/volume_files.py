"""The daemon's own hand on the files of volumes that a target serves which cannot do these things itself.

SPDK's target moves the bytes of a file; what else a volume needs (zeroing regions, giving space back, a flush that
flushes, reading for checksums) is done here, on the same file, by the kernel. Nothing of one volume runs beside
another: a call that was given up keeps later ones waiting, so that it can clear nothing that came after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from forebay.appliance.dataplane.interface import VolumeSpec
from forebay.appliance.dataplane.labels import translated
from forebay.appliance.dataplane.target.volume import Volume
from forebay.errors import NotFound, Unavailable
from forebay.ids import VolumeId

__all__ = ["VolumeFiles"]

_T = TypeVar("_T")


@dataclass(slots=True)
class _Open:
    volume: Volume
    worker: ThreadPoolExecutor  # one thread: what was asked for first is done first
    given_up: Future[object] | None = None


class VolumeFiles:
    """Open files of volumes, locked as a target of ours would lock them. ``timeout_s`` is for each call."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[VolumeId, _Open] = {}

    def open(self, spec: VolumeSpec, *, anew: bool = False) -> None:
        """Open a volume's file, or find that it is open: with ``anew`` the one that is there now.

        Raises `TargetFailed` if it cannot be, or another has it.
        """
        known = self._open.get(spec.volume)
        if known is not None:
            if known.volume.path == Path(spec.path) and not (anew and known.volume.was_replaced()):
                return
            self.close(spec.volume)
        with translated(f"volume {spec.path}"):
            volume = Volume(spec.bdev, Path(spec.path), uuid=UUID(spec.nguid))
        self._open[spec.volume] = _Open(volume, ThreadPoolExecutor(1, thread_name_prefix=f"forebay-{spec.bdev}"))

    def has(self, spec: VolumeSpec) -> bool:
        """Whether that volume's file is open."""
        known = self._open.get(spec.volume)
        return known is not None and known.volume.path == Path(spec.path)

    def close(self, volume: VolumeId) -> None:
        """Let go of a file, at the latest when what was given up there has ended."""
        known = self._open.pop(volume, None)
        if known is not None:
            known.worker.submit(known.volume.close)
            known.worker.shutdown(wait=False)

    def close_all(self) -> None:
        """Let go of all of them."""
        for volume in list(self._open):
            self.close(volume)

    async def flush(self, spec: VolumeSpec) -> None:
        """Put what was written to the volume on stable media. Raises `TargetFailed`, then for ever."""
        await self._run(spec, lambda volume: volume.flush())

    async def prepare_region(self, spec: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        """Reserve a region and make it read as zeros. Raises `NoSpace`, `TargetFailed`."""
        await self._run(spec, lambda volume: volume.prepare_region(offset_bytes, length_bytes))

    async def release_region(self, spec: VolumeSpec, offset_bytes: int, length_bytes: int) -> None:
        """Give a region's space back. Raises `TargetFailed`."""
        await self._run(spec, lambda volume: volume.release_region(offset_bytes, length_bytes))

    async def checksums(self, spec: VolumeSpec, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        """CRC-32C of ``(offset_bytes, length_bytes, seed)`` ranges. Raises `TargetFailed`."""
        return await self._run(spec, lambda volume: volume.checksums(ranges))

    async def _run(self, spec: VolumeSpec, act: Callable[[Volume], _T]) -> _T:
        known = self._open.get(spec.volume)
        if known is None:
            raise NotFound(f"volume {spec.volume} is not open", field="volume")
        if known.given_up is not None and not known.given_up.done():
            raise Unavailable(f"volume {spec.volume}: its drive has not answered yet", field=spec.path)

        def work() -> _T:
            with translated(f"volume {spec.path}"):
                return act(known.volume)

        running: Future[_T] = known.worker.submit(work)
        waiting = asyncio.wrap_future(running)
        done, _ = await asyncio.wait([waiting], timeout=self._timeout_s)
        if not done:
            if not running.cancel():
                known.given_up = running  # type: ignore[assignment]  # only whether it is done is asked
            waiting.add_done_callback(lambda one: None if one.cancelled() else one.exception())
            raise Unavailable(f"volume {spec.volume}: no answer within {self._timeout_s:g} s", field=spec.path)
        return waiting.result()
