"""The drives of a node: brought into service, lost, and brought back.

========= ================================================= ==========================================================
drive     moved by                                          blocks on it
========= ================================================= ==========================================================
serving   a start, `NodeDrives.look` (bring back)           read and written
read_only a flush, a region or a probe that failed          read; nothing new is written
away      its directory, identity or a label is not there   misses (`Unavailable`); what writers store again goes to
          or not its own; it does not answer                another drive
========= ================================================= ==========================================================

One volume can be lost alone: its label is another's, or the target cannot open it, though its drive is there. Its
blocks are misses, too, until a try shows that it can be served again (`NodeDrives.give_up`).

A drive that is lost takes only its own volumes. Its records stay, so its blocks are there again when it is, if drive
and labels prove to be the ones that metadata names. A start without it remembers the epoch that its labels have.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from forebay.appliance.dataplane.block_volumes import is_device
from forebay.appliance.dataplane.interface import VolumeErrors, VolumesFailed, VolumeSpec
from forebay.appliance.dataplane.labels import LabelledVolumes, volume_size_bytes
from forebay.appliance.dataplane.volumes import open_drive, volumes_on
from forebay.appliance.namespace.desired_state import DesiredState, Namespace, Volume
from forebay.appliance.namespace.drive_looks import Look, look_at, look_at_store, says_nothing
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.records import FLUSHED
from forebay.appliance.namespace.space import Drive, DriveState
from forebay.crashpoints import crash_point
from forebay.errors import ForebayError, InvalidArgument, NoSpace, Unavailable, VolumeMismatch
from forebay.ids import NamespaceId, VolumeId
from forebay.index import findable
from forebay.volume_label import VolumeLabel

if TYPE_CHECKING:
    from forebay.appliance.dataplane.store_volumes import StoreVolumes

__all__ = ["NodeDrives"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)
_MAX_NSID = 1024
_HANGS_MS = 30_000
"""A look that takes longer waits for a drive that is away."""
_AGAIN_MS = 1_000
_AGAIN_MOST_MS = 10_000
_PROOF_S = 5.0
"""What a drive has to show its labels before a new target opens its volumes."""
_FULL_MS = 30_000
"""After which a full drive is asked for a region again where nothing else tells whether it has room."""


@dataclass(slots=True)
class _Watched:
    """What is remembered between two looks."""

    errors: dict[VolumeId, VolumeErrors] = field(default_factory=dict)
    looking: Future[Look | None] | None = None
    looking_since_ms: int = 0
    closely: bool = False
    again_ms: int = 0
    wait_ms: int = _AGAIN_MS
    told: DriveState = DriveState.SERVING
    full_since_ms: int | None = None
    starved: bool = False
    """It came to want space for what it had promised to hold."""


class NodeDrives:
    """All drives of a node and the volumes on them. ``changing`` is the node's lock of administrative changes."""

    def __init__(
        self,
        engine: Engine,
        state: DesiredState,
        meta: NodeMeta,
        region_bytes: int,
        changing: asyncio.Lock,
        *,
        stores: Mapping[str, StoreVolumes] | None = None,
    ) -> None:
        self._e = engine
        self._state = state
        self._meta = meta
        self._region_bytes = region_bytes
        self._changing = changing
        self._files: dict[str, LabelledVolumes] = {}
        self._stores = dict(stores or {})
        self._watched = {name: _Watched() for name in engine.space.drives}
        # a thread each: one that waits for a drive keeps nobody from looking at the others
        self._threads = ThreadPoolExecutor(1 + len(self._watched), thread_name_prefix="forebay-drive")
        self._reserve_looking: Future[None] | None = None
        self.reconcile: Callable[[], Awaitable[object]] = self._reconcile_volumes
        """Makes the target serve `Space.specs` and nothing else; whoever calls holds ``changing``."""
        self.doom: Callable[[Collection[VolumeId]], None] = lambda volumes: None
        """Told the volumes of a drive that failed: nothing that is being written there may be committed."""

    def close(self) -> None:
        """Look no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _reconcile_volumes(self) -> None:
        """Raises `VolumesFailed` if no volume can be served."""
        while True:
            specs = self._e.space.specs
            try:
                await self._e.target.reconcile(list(specs.values()), [])
                break
            except VolumesFailed as error:
                if error.failed.keys() >= specs.keys():
                    raise
                self.give_up(error.failed)

    def _volumes_on(self, drive: Drive) -> LabelledVolumes:
        return self._stores.get(drive.name) or volumes_on(Path(drive.path))

    async def _do(self, name: str, act: Callable[[], _T]) -> _T:
        """Do something on a drive: in a thread where the target has to be asked, whose answer comes by this one."""
        return await asyncio.to_thread(act) if self._files[name].by_target else act()

    def files(self, drive: str) -> LabelledVolumes:
        """The volumes of a drive that is there."""
        return self._files[drive]

    # ------------------------------------------------------------------------------------------------ start

    async def start(self) -> None:
        """Check and stamp every label, and let the target serve the volumes.

        A drive whose volumes cannot be served is away, unless it would be the last: then raises what is wrong with it.
        """
        meta, space = self._meta, self._e.space
        for drive in space.drives.values():
            if drive.state is not DriveState.AWAY:
                self._files[drive.name] = self._volumes_on(drive)
        await self._drop_unfinished()
        volumes = list(self._state.volumes)
        for volume in volumes:
            if volume.drive not in space.drives:
                raise VolumeMismatch(
                    f"volume {volume.id} lies on drive {volume.drive!r}, which the configuration does not name",
                    field="drives",
                )
        by_drive = {name: [v for v in volumes if v.drive == name] for name in space.drives}
        for name, mine in by_drive.items():
            await self._try(name, partial(self._check, name, mine))
        for drive in self._serving():
            if drive.name in meta.absent:
                await meta.note_absent(drive.name, meta.intended_epoch)
        first = True
        for name, mine in by_drive.items():
            for volume in mine:
                if name in self._files:
                    await self._try(name, partial(self._files[name].stamp, volume.id, meta.intended_epoch))
                if first:
                    crash_point("start.between_labels")
                first = False
        for drive in space.drives.values():
            if drive.state is DriveState.AWAY:
                _log.error("drive %s is away, its blocks are misses: %s", drive.name, drive.reason)
                await meta.note_absent(drive.name, meta.confirmed_epoch, meta.intended_epoch)
        await meta.confirm_epoch()
        for drive in self._serving():
            await meta.note_present(drive.name)
        for volume in volumes:
            drive = space.drives[volume.drive]
            drive.capacity_regions = drive.capacity_regions or volume.regions
            space.add_volume(volume, self.spec(volume) if drive.state is not DriveState.AWAY else None)
        space.note_away()
        if strays := space.quarantine.strays(space.volumes):
            await self._e.store.write(strays)
        # hosts of earlier incarnations lose their right to connect here, not only their connections
        await self._reconcile_volumes()
        for drive in self._serving():
            await self._do(drive.name, partial(self._remove_strays, drive.name))

    async def _try(self, name: str, act: Callable[[], object]) -> None:
        """Do something on a drive; one that fails is away, unless no other serves."""
        drive = self._e.space.drives[name]
        if drive.state is DriveState.AWAY:
            return
        try:
            await self._do(name, act)
        except ForebayError as error:
            if len(list(self._serving())) == 1:
                raise
            drive.state, drive.reason = DriveState.AWAY, error.message

    def _serving(self) -> Iterable[Drive]:
        return (d for d in self._e.space.drives.values() if d.state is not DriveState.AWAY)

    def _check(self, name: str, volumes: Iterable[Volume]) -> None:
        """Compare the labels of a drive's volumes with metadata. Raises `VolumeMismatch`, `TargetFailed`."""
        meta = self._meta
        for volume in volumes:
            label = self._label(volume, meta.confirmed_epoch)
            self._files[name].check(label, meta.intended_epoch, also=meta.absent.get(name, ()))

    def _remove_strays(self, name: str) -> None:
        known = {v.id for v in self._state.volumes if v.drive == name}
        for left in self._files[name].present():
            if left not in known:
                _log.warning(
                    "volume %d on drive %s has no metadata: a creation was cut short; it is removed", left, name
                )
                self._files[name].remove(left)

    async def _drop_unfinished(self) -> None:
        """Clear away volumes of namespaces whose creation or deletion was cut short: their files may be gone."""
        for namespace in self._state.namespaces:
            if not namespace.deleting:
                continue
            for volume in self._state.volumes_of(namespace.id):
                if volume.drive not in self._files:
                    continue  # it goes when its drive is back
                await self._e.target.remove_volume(self.spec(volume))
                await self._try(volume.drive, partial(self._files[volume.drive].remove, volume.id))
                if self._e.space.drives[volume.drive].state is DriveState.AWAY:
                    continue
                crash_point("start.after_unfinished_file_before_record")
                number = volume.id.to_bytes(4, "big")
                ops = [op for family in ("regions", "owners") for op in self._e.store.deletes(family, number)]
                await self._e.store.write(ops + self._e.space.quarantine.drop(volume.id))
                await self._state.volumes.remove(volume.key)

    # ------------------------------------------------------------------------------------------------ volumes

    def _label(self, volume: Volume, epoch: int) -> VolumeLabel:
        return VolumeLabel(
            self._meta.node_id,
            volume.id,
            NamespaceId(volume.namespace),
            uuid.UUID(volume.uuid).bytes,
            epoch,
            self._region_bytes,
            volume_size_bytes(volume.regions, self._region_bytes),
        )

    def spec(self, volume: Volume) -> VolumeSpec:
        """What the target should serve of a volume whose drive is there."""
        namespace = self._state.namespaces.get(str(volume.namespace))
        if namespace is None:
            raise VolumeMismatch(f"volume {volume.id} has no namespace in metadata", field="namespace")
        return VolumeSpec(
            volume.id,
            namespace.tenant,
            volume.nsid,
            f"vol{volume.id}",
            str(self._files[volume.drive].path(volume.id)),
            volume_size_bytes(volume.regions, self._region_bytes),
            volume.nguid,
        )

    async def create_volumes(self, namespace: Namespace) -> None:
        """A volume on every drive that takes one and has none of this namespace yet.

        Raises what the last drive raised if there is no volume at all then.
        """
        trouble: ForebayError = Unavailable("no drive takes a new volume", field="drives")
        there = {v.drive for v in self._state.volumes_of(namespace.id)}
        for drive in self._e.space.drives.values():
            if drive.name in there or drive.state is not DriveState.SERVING:
                continue
            try:
                await self._create_volume(namespace, drive)
            except ForebayError as error:
                if len(self._e.space.drives) == 1:
                    raise
                trouble = error
                drive.doubted = True
                _log.error("namespace %s has no volume on drive %s: %s", namespace.full_name, drive.name, error)
        if not self._state.volumes_of(namespace.id):
            raise trouble

    async def _create_volume(self, namespace: Namespace, drive: Drive) -> None:
        volume_id = VolumeId(await self._state.new_id())
        fresh = str(uuid.UUID(bytes=self._e.random(16), version=4))
        volume = Volume(
            volume_id, namespace.id, drive.name, self._free_nsid(namespace.tenant), fresh, fresh, drive.capacity_regions
        )
        label = self._label(volume, self._meta.confirmed_epoch)
        await self._do(drive.name, partial(self._files[drive.name].create, label))
        crash_point("volume.after_file_before_record")
        await self._state.volumes.put(volume)
        spec = self.spec(volume)
        self._e.space.add_volume(volume, spec)
        await self._e.target.add_volume(spec)

    def _free_nsid(self, tenant: str) -> int:
        tenants = {n.id: n.tenant for n in self._state.namespaces}
        taken = {v.nsid for v in self._state.volumes if tenants.get(v.namespace) == tenant}
        for nsid in range(1, _MAX_NSID + 1):
            if nsid not in taken:
                return nsid
        raise InvalidArgument(f"tenant {tenant!r} has as many volumes as it can have", field="name", limit=_MAX_NSID)

    def all_there(self, namespace: int) -> bool:
        """Whether every drive that has a volume of a namespace can take that away."""
        return all(self.is_there(volume) for volume in self._state.volumes_of(namespace))

    def is_there(self, volume: Volume) -> bool:
        """Whether a volume can be taken away: what lies in the place of a lost one is perhaps another's."""
        space = self._e.space
        return space.drives[volume.drive].state is DriveState.SERVING and volume.id not in space.lost

    async def remove_volume(self, volume: Volume) -> None:
        """Take a volume away, from the target, from its drive, from metadata."""
        space = self._e.space
        if volume.id in space.volumes:
            if volume.id in space.specs:
                await self._e.target.remove_volume(space.specs[volume.id])
            await space.drop_volume(volume.id)
        crash_point("volume.after_regions_before_file_removed")
        await self._do(volume.drive, partial(self._files[volume.drive].remove, volume.id))
        crash_point("volume.after_file_removed_before_record")
        await self._state.volumes.remove(volume.key)

    # ------------------------------------------------------------------------------------------------ watching

    async def look(self) -> None:
        """Look at every drive: which are lost, which are back. Called every second or so."""
        self._look_at_reserve()
        await self._count_errors()
        for name, drive in self._e.space.drives.items():
            found = self._ask(drive, self._watched[name])
            if found is not None:
                await self._judge(drive, self._watched[name], found)
            self._tell_of(drive, self._watched[name])

    def _look_at_reserve(self) -> None:
        asked = self._reserve_looking
        if asked is not None and not asked.done():
            return
        if asked is not None and (error := asked.exception()) is not None:
            _log.warning("the room that metadata have is not known: %s", error)
        self._reserve_looking = self._threads.submit(self._e.reserve.look)

    async def _count_errors(self) -> None:
        """Doubt the drives of which the target failed to read or write something since the last time."""
        try:
            errors = await self._e.target.volume_errors()
        except ForebayError:
            return  # the supervisor's concern
        for volume, count in errors.items():
            known = self._e.space.volumes.get(volume)
            if known is None:
                continue
            before = self._watched[known.drive].errors.get(volume, VolumeErrors(0))
            self._watched[known.drive].errors[volume] = count
            drive = self._e.space.drives[known.drive]
            if count.failed > before.failed:
                drive.doubted = True
                self._e.counters[f"drive_errors_{known.drive}"] += count.failed - before.failed
            if count.no_space > before.no_space:
                # not even what was promised can be written
                self._watched[known.drive].starved = True
                self._e.space.drive_failed(
                    volume, NoSpace(f"{drive.path} has no space left for what is there: free some on its file system")
                )

    def _ask(self, drive: Drive, watched: _Watched) -> Look | None:
        """The answer of the look that was begun, if there is one, and a new one begun if it is time."""
        if drive.name not in self._meta.drives:
            return None  # it could not be claimed when the node started, and so it is nobody's that could come back
        now_ms = self._e.clock.monotonic_ms()
        asked = watched.looking
        if asked is not None and not asked.done():
            if now_ms - watched.looking_since_ms < _HANGS_MS or drive.state is DriveState.AWAY:
                return None
            return Look(DriveState.AWAY, f"{drive.path} does not answer")
        watched.looking = None
        closely = drive.doubted or drive.state is not DriveState.SERVING
        if asked is not None and (watched.closely or not closely):
            return asked.result()
        # or it was begun before something failed, and says nothing of that
        if drive.state is DriveState.SERVING or now_ms >= watched.again_ms:
            paths = [Path(s.path) for s in self._specs() if self._drive_of(s.volume) == drive.name]
            identity = uuid.UUID(self._meta.drives[drive.name])
            watched.looking_since_ms, watched.closely = now_ms, closely
            store = self._stores.get(drive.name)
            watched.looking = (
                self._threads.submit(look_at, Path(drive.path), self._meta.node_id, identity, paths, closely)
                if store is None
                else self._threads.submit(look_at_store, store, identity, paths, closely)
            )
        return None

    def _specs(self) -> list[VolumeSpec]:
        return list(self._e.space.specs.values())

    def _drive_of(self, volume: VolumeId) -> str:
        return self._e.space.volumes[volume].drive

    async def _judge(self, drive: Drive, watched: _Watched, found: Look) -> None:
        if found.lost and drive.state is not DriveState.AWAY:
            async with self._changing:
                self.give_up({s.volume: e for s in self._specs() if (e := found.lost.get(Path(s.path))) is not None})
                await self._quietly(self.reconcile())
        if found.state is DriveState.SERVING and drive.state is DriveState.SERVING:
            drive.doubted = False
            self._look_for_room(drive, watched, found)
            lost, lacks = self._lost_on(drive), not drive.full and self._lacks_volumes(drive)
            if not lost and not lacks:
                watched.wait_ms = _AGAIN_MS
            elif self._e.clock.monotonic_ms() >= watched.again_ms:
                self._later(watched)
                async with self._changing:
                    if lost:
                        await self._quietly(self._take_back(drive, lost))
                    if lacks:
                        await self._complete()
        elif found.state is DriveState.SERVING and not (watched.starved and found.free_bytes == 0):
            await self._bring_back(drive, watched)
        elif found.state is DriveState.SERVING:
            self._later(watched)
        elif drive.state is DriveState.AWAY:
            drive.reason = found.reason  # nothing of it is served; a read-only one cannot be taken into service
            self._later(watched)
        else:
            await self.lose(drive, found.state, found.reason)
            self._later(watched)

    def _look_for_room(self, drive: Drive, watched: _Watched, found: Look) -> None:
        """Whether a full drive may have room again."""
        now_ms = self._e.clock.monotonic_ms()
        if not drive.full:
            watched.full_since_ms = None
        elif found.free_bytes is not None:
            drive.full = found.free_bytes < self._region_bytes
        elif watched.full_since_ms is None:
            watched.full_since_ms = now_ms
        elif now_ms - watched.full_since_ms >= _FULL_MS:
            drive.full, watched.full_since_ms = False, None

    def _lacks_volumes(self, drive: Drive) -> bool:
        """Whether there is a namespace that could have a volume there and has none."""
        having = {v.namespace for v in self._state.volumes if v.drive == drive.name}
        if having and is_device(Path(drive.path)):
            return False  # it belongs to one namespace
        return any(not n.deleting and n.id not in having for n in self._state.namespaces)

    def _later(self, watched: _Watched) -> None:
        watched.again_ms = self._e.clock.monotonic_ms() + watched.wait_ms
        watched.wait_ms = min(2 * watched.wait_ms, _AGAIN_MOST_MS)

    async def lose(self, drive: Drive, state: DriveState, reason: str) -> None:
        """A drive can only be read from now on, or not even that."""
        was, drive.state, drive.reason, drive.doubted = drive.state, state, reason, False
        self._e.space.note_away()
        if was is not state:
            _log.error("drive %s is %s: %s", drive.name, state.replace("_", " "), reason)
        if state is DriveState.AWAY:
            async with self._changing:
                self._withdraw(drive)
                await self._quietly(self.reconcile())

    def _withdraw(self, drive: Drive) -> None:
        space = self._e.space
        mine = {v.id for v in space.volumes.values() if v.drive == drive.name}
        self.doom(mine)
        for volume in mine:
            space.specs.pop(volume, None)
            self._watched[drive.name].errors.pop(volume, None)
        space.note_away()

    def _tell_of(self, drive: Drive, watched: _Watched) -> None:
        """A change of its state, as an event for each namespace that has blocks there."""
        was, watched.told = watched.told, drive.state
        if was is drive.state:
            return
        back = drive.state is DriveState.SERVING
        self._e.counters["drives_back" if back else "drives_lost"] += 1
        reason = f"drive {drive.name} is {'back' if back else drive.state.replace('_', ' ')}"
        for namespace in sorted({v.namespace for v in self._e.space.volumes.values() if v.drive == drive.name}):
            self._e.events.add("restored" if back else "degraded", namespace, reason=reason)

    @staticmethod
    async def _quietly(work: Awaitable[object]) -> bool:
        try:
            await work
        except ForebayError as error:
            _log.warning("%s", error)
            return False
        return True

    async def _bring_back(self, drive: Drive, watched: _Watched) -> None:
        """Serve a drive again whose directory and identity are its own, if its labels are, too.

        Its volumes are opened anew: a file that was open while its drive failed proves nothing.
        """
        space, name = self._e.space, drive.name
        async with self._changing:
            drive.state = DriveState.AWAY
            self._withdraw(drive)
            try:
                await self.reconcile()
                mine = [v for v in space.volumes.values() if v.drive == name]
                living = {n.id for n in self._state.namespaces if not n.deleting}
                tried = [v for v in mine if v.namespace in living]
                # those that were lost alone keep no others away: they are tried by themselves
                tried = [v for v in tried if v.id not in space.lost] or tried
                await self._prove(drive, tried)
                wanted = {v.id: self.spec(v) for v in tried}
                space.specs.update(wanted)
                await self.reconcile()
                served = wanted.keys() & space.specs.keys()
                if wanted and not served:
                    raise Unavailable(space.lost[next(iter(wanted))], field="drives")
                await self._meta.note_present(name)
            except ForebayError as error:
                self._withdraw(drive)
                await self._quietly(self.reconcile())
                drive.reason = error.message
                _log.error("drive %s stays away: %s", name, error)
                self._later(watched)
                return
            for volume in served:
                space.lost.pop(volume, None)
            drive.state, drive.reason, drive.doubted, drive.full = DriveState.SERVING, "", False, False
            watched.wait_ms, watched.starved = _AGAIN_MS, False
            space.note_away()
            doubtful = self._doubt([v.id for v in mine])
            _log.warning("drive %s is back: %d blocks to verify", name, doubtful)
            await self._complete()

    async def _prove(self, drive: Drive, volumes: Sequence[Volume]) -> None:
        """Compare identity and labels of these volumes with metadata, and stamp what was away during a start."""
        name, path, meta = drive.name, Path(drive.path), self._meta
        known = uuid.UUID(meta.drives[name])
        if (store := self._stores.get(name)) is not None:
            await asyncio.to_thread(store.prove, known)
        else:
            await asyncio.to_thread(open_drive, path, meta.node_id, known)
        self._files[name] = await asyncio.to_thread(self._volumes_on, drive)
        await asyncio.to_thread(self._check, name, volumes)
        if name in meta.absent:
            await meta.note_absent(name, meta.confirmed_epoch)
            for volume in volumes:
                await asyncio.to_thread(self._files[name].stamp, volume.id, meta.confirmed_epoch)
        await asyncio.to_thread(self._remove_strays, name)
        drive.capacity_regions = drive.capacity_regions or max((v.regions for v in volumes), default=0)

    def _doubt(self, volumes: Collection[VolumeId]) -> int:
        """Make suspects of blocks there whose flush is not known: they may be lost. How many."""
        index = self._e.index
        rows = np.flatnonzero(findable(index.state[: index.high]) & np.isin(index.volume[: index.high], list(volumes)))
        rows = rows[index.flags[rows] & FLUSHED == 0]
        index.suspect(rows)
        return len(rows)

    # ------------------------------------------------------------------------------------------------ single volumes

    async def prove_volumes(self) -> None:
        """Give up volumes whose files are not theirs: a new target opens what is there now under their paths.

        What the target itself reaches alone is left to it, and so is a drive that does not answer in time.
        """
        for drive in list(self._serving()):
            mine = [v for v in self._e.space.volumes.values() if v.drive == drive.name and v.id in self._e.space.specs]
            if drive.name not in self._files or self._files[drive.name].by_target:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROOF_S):
                    self.give_up(await asyncio.to_thread(self._strangers, drive.name, mine))

    def _strangers(self, name: str, volumes: Iterable[Volume]) -> dict[VolumeId, ForebayError]:
        """Volumes of a drive whose labels are not as metadata say, and what is wrong with each."""
        wrong: dict[VolumeId, ForebayError] = {}
        for volume in volumes:
            try:
                self._check(name, [volume])
            except ForebayError as error:
                if not says_nothing(error):
                    wrong[volume.id] = error
        return wrong

    def give_up(self, failed: Mapping[VolumeId, ForebayError]) -> None:
        """Serve these volumes no more, though their drives are there; `look` tries them again.

        Their blocks are misses meanwhile, and what is being written there is never committed.
        """
        space = self._e.space
        failed = {volume: error for volume, error in failed.items() if volume in space.volumes}
        self.doom(failed)
        for volume, error in failed.items():
            spec, known = space.specs.pop(volume, None), space.volumes[volume]
            self._watched[known.drive].errors.pop(volume, None)
            path = str(self._files[known.drive].path(volume)) if spec is None else spec.path
            reason = error.message if path in error.message else f"{path}: {error.message}"
            if volume not in space.lost:
                self._e.events.add("degraded", known.namespace, reason=f"volume {volume} cannot be served")
            if space.lost.get(volume) != reason:
                _log.error(
                    "volume %d on drive %s cannot be served, its blocks are misses and all others are not touched: %s; "
                    "put right what is at that path, or delete the namespace; it is tried again every few seconds",
                    *(volume, known.drive, reason),
                )
            space.lost[volume] = reason
        if failed:
            space.note_away()

    def _lost_on(self, drive: Drive) -> list[Volume]:
        space = self._e.space
        return [space.volumes[volume] for volume in space.lost if space.volumes[volume].drive == drive.name]

    async def _take_back(self, drive: Drive, lost: list[Volume]) -> None:
        """Serve volumes again that were given up, if their labels are their own and the target can open them."""
        space = self._e.space
        wrong = await asyncio.to_thread(self._strangers, drive.name, lost)
        living = {n.id for n in self._state.namespaces if not n.deleting}
        for volume in lost:
            missing = isinstance(wrong.get(volume.id), VolumeMismatch) and wrong[volume.id].field == "path"
            if volume.namespace not in living and (missing or volume.id not in wrong):
                wrong.pop(volume.id, None)
                space.lost.pop(volume.id, None)  # nobody else's lies there: it goes with its namespace
        self.give_up(wrong)
        trying = [v for v in lost if v.id not in wrong and v.namespace in living]
        if not trying:
            space.note_away()
            return
        space.specs.update((v.id, self.spec(v)) for v in trying)
        try:
            await self.reconcile()
        except ForebayError:
            for volume in trying:
                space.specs.pop(volume.id, None)
            raise
        back = [v for v in trying if v.id in space.specs]
        for volume in back:
            doubtful = self._doubt([volume.id])  # before anybody gets one
            space.lost.pop(volume.id, None)
            self._e.events.add("restored", volume.namespace, reason=f"volume {volume.id} is back")
            _log.warning("volume %d on drive %s is back: %d blocks to verify", volume.id, drive.name, doubtful)
        space.note_away()

    async def _complete(self) -> None:
        """Give namespaces that were made while a drive was away their volumes on it."""
        for namespace in self._state.namespaces:
            if not namespace.deleting:
                await self._quietly(self.create_volumes(namespace))
        await self._quietly(self.reconcile())  # so that hosts see what is new
