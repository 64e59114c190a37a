"""The volumes in the store of a drive that only the target can reach, asked of the target."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from forebay.appliance.dataplane.labels import LabelledVolumes
from forebay.appliance.dataplane.spdk import SpdkTarget
from forebay.appliance.dataplane.spdk_stores import CLUSTER_BYTES
from forebay.errors import AlreadyExists, NotFound, TargetRefused, Unavailable, VolumeMismatch
from forebay.ids import VolumeId
from forebay.volume_label import LABEL_BYTES, VolumeLabel

__all__ = ["StoreVolumes"]

_T = TypeVar("_T")
_NAME = "vol"
_PATIENCE_S = 900.0
"""Beyond every time-out of what is called: a thread waits no longer, whatever happens."""


def _missing(path: Path) -> VolumeMismatch:
    return VolumeMismatch(f"{path} is missing: restore its drive, or delete its namespace", field="path")


class StoreVolumes(LabelledVolumes):
    """The volumes of the drive ``name``; ``loop`` is that of the target's driver."""

    by_target = True

    def __init__(self, target: SpdkTarget, name: str, loop: asyncio.AbstractEventLoop) -> None:
        drive = target.stores.drives[name]
        super().__init__(Path(f"{drive.kind}:{drive.where}"))
        self._target = target
        self._name = name
        self._loop = loop

    def path(self, volume: VolumeId) -> Path:
        """The store's name and the volume's."""
        return Path(self._target.stores.drives[self._name].lvs or self._name) / f"{_NAME}{volume}"

    def present(self) -> list[VolumeId]:
        names = self._ask(self._target.stores.volumes(self._name))
        found = [name.removeprefix(_NAME) for name in names if name.startswith(_NAME)]
        return sorted(VolumeId(int(number)) for number in found if number.isdecimal())

    def create(self, label: VolumeLabel) -> Path:
        """See `LabelledVolumes.create`."""
        path = self.path(label.volume)
        self._ask(self._target.stores.create(self._name, path.name, label.size_bytes))
        block = self._ask(self._read(path))
        if block.strip(b"\0") and VolumeLabel.decode(bytes(block), str(path)) != label:
            raise AlreadyExists(f"{path} is another volume: delete it", field="volume")
        self._ask(self._write(path, label))
        return path

    def read_label(self, volume: VolumeId) -> VolumeLabel:
        path = self.path(volume)
        try:
            block = self._ask(self._read(path))
        except (NotFound, TargetRefused) as error:
            if path.name in self._ask(self._target.stores.volumes(self._name)):
                raise Unavailable(f"{path} cannot be read now: {error.message}", field="target") from error
            raise _missing(path) from error
        return VolumeLabel.decode(bytes(block), str(path))

    def remove(self, volume: VolumeId) -> None:
        self._ask(self._target.stores.delete(self._name, self.path(volume).name))

    def stamp(self, volume: VolumeId, epoch: int) -> VolumeLabel:
        label = replace(self.read_label(volume), epoch=epoch)
        self._ask(self._write(self.path(volume), label))
        return label

    def prove(self, known: UUID) -> None:
        """Check that the drive is the one that metadata names. Raises `VolumeMismatch`, `TargetFailed`."""
        self._ask(self._target.stores.open(self._name, known))

    def look(self, known: UUID, volumes: Sequence[Path], *, closely: bool) -> None:
        """Raise what is wrong with the drive: `VolumeMismatch`, `TargetFailed`; `Unavailable` says nothing of it."""
        self.prove(known)
        there = set(self._ask(self._target.stores.volumes(self._name)))
        for path in volumes:
            if path.name not in there:
                raise _missing(path)
            if closely:
                self._ask(self._read(path))

    async def _read(self, path: Path) -> bytearray:
        async with self._target.io(str(path)) as host:
            return await host.read(0, LABEL_BYTES)

    async def _write(self, path: Path, label: VolumeLabel) -> None:
        async with self._target.io(str(path)) as host:
            if not (await host.read(0, LABEL_BYTES)).strip(b"\0"):
                await host.write_zeroes(0, CLUSTER_BYTES)  # a cluster is not cleared when a volume gets it
            await host.write_block(label.encode(), 0)
        drive = self._target.stores.drives[self._name]
        await asyncio.to_thread(self._target.stores.flush, drive)

    def _ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)
        except TimeoutError:
            raise Unavailable(f"drive {self._name}: no answer within {_PATIENCE_S:g} s", field="drives") from None
