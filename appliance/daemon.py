"""The appliance daemon: one node, from its configuration to a clean stop.

Order of a start: lock, metadata, drives, target, incarnation, volumes, index, then the control service. What another
process needs to find the node stands in ``node.json`` of the data directory once it serves.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import logging
import os
import secrets
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.appliance import log
from forebay.appliance.config import Config
from forebay.appliance.control.admin_calls import AdminCalls
from forebay.appliance.control.administration import Administration
from forebay.appliance.control.calls import Calls
from forebay.appliance.control.data_calls import DataCalls
from forebay.appliance.control.doorkeeper import Doorkeeper
from forebay.appliance.control.load import LoadEstimate
from forebay.appliance.control.server import ControlServer
from forebay.appliance.dataplane.interface import Target
from forebay.appliance.dataplane.labels import DriveIdentity, translated
from forebay.appliance.dataplane.spdk import SpdkTarget
from forebay.appliance.dataplane.store_volumes import StoreVolumes
from forebay.appliance.dataplane.supervisor import Supervisor
from forebay.appliance.dataplane.volumes import claim_drive, discard_drive, drive_space, open_drive, require_capacity
from forebay.appliance.directories import make_directory
from forebay.appliance.namespace.acl import hash_token, new_token
from forebay.appliance.namespace.checkpoint import FILE_NAME
from forebay.appliance.namespace.desired_state import DesiredState, Principal
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.node import Node, NodeLimits
from forebay.appliance.namespace.reserve import Reserve
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.room import Watermarks
from forebay.appliance.namespace.scrub import ScrubLimits
from forebay.appliance.namespace.space import Drive, DriveState
from forebay.appliance.namespace.store import Store
from forebay.appliance.open_files import raise_open_files
from forebay.appliance.settings import Endpoint
from forebay.appliance.targets import drive_target, supervise_target
from forebay.appliance.trace import Tracer
from forebay.clock import SystemClock
from forebay.errors import CapacityShort, ConfigInvalid, DataDirInUse, ForebayError, VolumeMismatch
from forebay.ids import LBA_BYTES
from forebay.measure.machine import file_system

if TYPE_CHECKING:
    from forebay.appliance.control.http_server import HttpServer

__all__ = ["ADMIN_TOKEN_FILE", "DEFAULT_NAMESPACE", "NODE_FILE", "hold", "run", "settle_memory"]

_log = logging.getLogger(__name__)

NODE_FILE = "node.json"
ADMIN = "admin"
"""Name of the first administrator, whose token stands in the data directory."""
ADMIN_TOKEN_FILE = "admin.token"
DEFAULT_NAMESPACE = "default/default"
_SWEEP_S = 0.25
_LOOK_S = 1.0
_STATS_ROUNDS = 8
_RECONCILE_ROUNDS = 120
_SCRUB_AGAIN_MS = 1_000
_CHECKPOINT_S = 60.0
_CHECKPOINT_CHANGES = 100_000
_DEFAULT_CAPACITY_BYTES = 64 << 30
_DEFAULT_SHARE = 0.8
_STORE_SHARE = 0.98
"""Of a store's clusters, for blocks: each volume has one more, with its label."""
_MAX_BLOCKS = 1 << 28
_COLLECT_AFTER = 50_000
"""Objects that the collector of cycles lets come before it looks: a batch of 1,000 keys is no reason to."""


def run(config: Config, *, start_empty: bool = False, forget_drive: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises `ForebayError` when the node cannot start.

    With ``start_empty`` drives of a node whose metadata are lost are declared empty; ``forget_drive`` names one that is
    gone for good.
    """
    log.set_up(config.log.level, config.log.format)
    raise_open_files()  # before the target starts, which has it from here
    gc.disable()  # until it serves: what a start makes stays
    with hold(config.data):
        return asyncio.run(_Daemon(config, start_empty, forget_drive).main())


def settle_memory() -> None:
    """Let the collector of cycles look no more at what a start has made: each look holds up every call."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    gc.enable()


@contextmanager
def hold(data: Path) -> Iterator[None]:
    """Hold the data directory; the lock goes with the process, however it ends.

    Raises `DataDirInUse`, and `ConfigInvalid` where there can be none.
    """
    try:
        make_directory(data)
        handle = os.open(data / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigInvalid(f"data: {data} is no directory: name one, or a path that is free", field="data") from None
    except OSError as e:
        raise ConfigInvalid(
            f"data: {data} cannot be made or written to ({e.strerror}): name a directory that can", field="data"
        ) from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirInUse(
                f"{data} is served by another process: stop it, or give this node another --data", field="data"
            ) from None
        yield
    finally:
        os.close(handle)


def _write_private(path: Path, text: str) -> None:
    """Replace a 0600 file as a whole. Raises `NoSpace`, `TargetFailed`."""
    fresh = path.with_name(path.name + ".new")
    with translated(str(path)):
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)


def _most_blocks(store: Store, capacity_regions: int, region_bytes: int) -> int:
    """Blocks that there can be: of as many regions as drives have, or as are claimed, also where one is away."""
    claimed = sum(1 for _ in store.scan("regions"))
    return min(max(capacity_regions, claimed) * region_bytes // LBA_BYTES, _MAX_BLOCKS)


def _load_http() -> None:
    for name in ("control.http", "control.http_server", "metrics"):
        import_module(f"forebay.appliance.{name}")


class _Daemon:
    """The parts of a running node."""

    def __init__(self, config: Config, start_empty: bool, forget_drive: str | None) -> None:
        self._config = config
        self._start_empty = start_empty
        self._forget_drive = forget_drive
        self._node: Node | None = None
        self._load = LoadEstimate()
        self._stopping = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        endpoint = config.trace.otlp_endpoint
        self._tracer = Tracer.to_collector(endpoint, config.name) if endpoint else None

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        store = RocksStore(self._config.metadata_dir / "rocksdb")
        try:
            meta = await NodeMeta.load(store, secrets.token_bytes, self._config.space.region_bytes)
            if self._forget_drive is not None:
                await self._forget(store, meta, self._forget_drive)
            drives = await self._open_drives(meta)
            await self._serve(store, meta, drives)
        finally:
            store.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        return 0

    async def _open_drives(self, meta: NodeMeta) -> list[Drive]:
        drives: list[Drive] = []
        missing: list[ForebayError] = []
        fresh = not meta.drives
        if self._start_empty:
            self._discard(meta)
        for i, drive in enumerate(self._config.drives):
            name = f"drive{i}"
            known = meta.drives.get(name)
            asked_bytes = drive.capacity_bytes
            if drive.bdev is not None:
                drives.append(Drive(name, drive.bdev, 0, state=DriveState.AWAY, reason="the target is not there yet"))
                continue
            if known is None:
                capacity_bytes = self._capacity(drive.path, asked_bytes)
                identity = self._claim(drive.path, meta, fresh)
                await meta.name_drive(name, str(identity.drive_uuid))
            else:
                try:
                    open_drive(drive.path, meta.node_id, uuid.UUID(known))
                    capacity_bytes = self._capacity(drive.path, asked_bytes)
                except ForebayError as error:
                    missing.append(error)
                    regions = (asked_bytes or 0) // meta.region_bytes
                    lost = Drive(name, str(drive.path), regions, state=DriveState.AWAY, reason=error.message)
                    drives.append(lost)
                    continue
            kind = file_system(drive.path) if drive.path.is_dir() else ""
            if kind in ("tmpfs", "ramfs"):
                _log.warning(
                    "%s is %s: blocks are in memory, so durability flush does not survive a power loss there",
                    *(drive.path, kind),
                )
            drives.append(Drive(name, str(drive.path), capacity_bytes // meta.region_bytes))
        if missing and len(missing) == len(drives):
            raise missing[0]  # there is nothing to serve
        return drives

    async def _open_stores(self, meta: NodeMeta, target: Target, drives: list[Drive]) -> dict[str, StoreVolumes]:
        """Bring the drives that only the target can reach into service; those that are not there are away.

        Raises what is wrong with the first of them if there is nothing else to serve.
        """
        stores: dict[str, StoreVolumes] = {}
        wrong: list[ForebayError] = []
        for drive, wanted in zip(drives, self._config.drives, strict=True):
            if wanted.bdev is None or not isinstance(target, SpdkTarget):
                continue
            stores[drive.name] = StoreVolumes(target, drive.name, asyncio.get_running_loop())
            drive.capacity_regions = (wanted.capacity_bytes or 0) // meta.region_bytes
            try:
                known = meta.drives.get(drive.name)
                if known is None:
                    claimed = await target.claim_store(drive.name, uuid.uuid4())
                    await meta.name_drive(drive.name, str(claimed))
                else:
                    await target.stores.open(drive.name, uuid.UUID(known))
                space = await target.stores.space(drive.name)
                usable_bytes = int(space.total_bytes * _STORE_SHARE)
                if drive.capacity_regions * meta.region_bytes > space.total_bytes:
                    raise CapacityShort(
                        f"{wanted.bdev} has room for {space.total_bytes / 2**30:.1f} GiB",
                        field="capacity",
                        limit=space.total_bytes,
                    )
                drive.capacity_regions = drive.capacity_regions or usable_bytes // meta.region_bytes
                drive.state, drive.reason = DriveState.SERVING, ""
            except ForebayError as error:
                drive.reason = error.message
                if drive.name not in meta.drives:
                    drive.reason += "; it is new, and claimed by the next start that can"
                wrong.append(error)
        if wrong and all(drive.state is DriveState.AWAY for drive in drives):
            raise wrong[0]
        return stores

    def _claim(self, path: Path, meta: NodeMeta, fresh: bool) -> DriveIdentity:
        """`claim_drive`, which says more when the drive has outlived metadata."""
        try:
            return claim_drive(path, meta.node_id)
        except VolumeMismatch as error:
            if not fresh or error.field not in ("node", "drive"):
                raise
            raise VolumeMismatch(
                f"{error.message}. If it is this node's, then {self._config.metadata_dir} is not the metadata that it "
                "had: mount or restore that. If it is lost, nothing on the drive can be read any more: `forebay serve "
                "--start-empty` declares its volumes empty",
                field=error.field,
                limit=error.limit,
            ) from error

    async def _forget(self, store: RocksStore, meta: NodeMeta, name: str) -> None:
        """Give up a drive and all that metadata know of it. Raises `ConfigInvalid` if there is none of that name."""
        if name not in meta.drives:
            known = ", ".join(sorted(meta.drives)) or "none"
            raise ConfigInvalid(f"--forget-drive {name}: the node knows no such drive, but {known}", field="drives")
        volumes = [volume.id for volume in DesiredState(store).volumes if volume.drive == name]
        await meta.forget_drive(name, volumes)
        (self._config.metadata_dir / FILE_NAME).unlink(missing_ok=True)  # it names volumes that are no more
        _log.warning("drive %s is given up, with %d volumes and the blocks on them", name, len(volumes))

    def _discard(self, meta: NodeMeta) -> None:
        """Declare empty what lost metadata have left on the drives. Raises `ConfigInvalid` if they are not lost."""
        if meta.drives:
            raise ConfigInvalid(
                f"--start-empty is for a node that lost its metadata: {self._config.metadata_dir} has them",
                field="drives",
            )
        for drive in self._config.drives:
            gone = discard_drive(drive.path, meta.node_id)
            if gone:
                _log.warning(
                    "%s: %d volumes are declared empty, their metadata are lost: %s",
                    *(drive.path, len(gone), ", ".join(one.name for one in gone)),
                )

    def _capacity(self, path: Path, asked_bytes: int | None) -> int:
        if asked_bytes is not None:
            require_capacity(path, asked_bytes)
            return asked_bytes
        usable = drive_space(path).usable_bytes
        capacity_bytes = min(int(usable * _DEFAULT_SHARE), _DEFAULT_CAPACITY_BYTES)
        if capacity_bytes < self._config.space.region_bytes:
            raise CapacityShort(
                f"{path} has room for {usable / 2**20:.1f} MiB, less than one region: free space, or name another",
                field="capacity",
                limit=usable,
            )
        return capacity_bytes

    async def _serve(self, store: RocksStore, meta: NodeMeta, drives: list[Drive]) -> None:
        config = self._config
        supervisor = supervise_target(config, meta.node_id, self._replay)

        def load_http() -> None:
            self._loading = asyncio.create_task(asyncio.to_thread(_load_http))

        # What HTTP imports takes long: while a target starts there is time, but else clients wait for their blocks.
        found = await supervisor.start(load_http if config.http.enabled else None)
        if found:
            _log.info("the target of an earlier start is still there, pid %s", supervisor.pid)
        target = drive_target(config, supervisor.socket, meta.node_id, self._tracer)
        try:
            stores = await self._open_stores(meta, target, drives)
            sessions = config.sessions
            limits = NodeLimits(
                region_bytes=meta.region_bytes,
                heartbeat_ms=sessions.heartbeat_ms,
                expiry_ms=sessions.expiry_ms,
                lease_ttl_ms=sessions.lease_ttl_ms,
                write_ttl_ms=sessions.write_ttl_ms,
                max_sessions=sessions.max_sessions,
                max_blocks=_most_blocks(store, sum(d.capacity_regions for d in drives), meta.region_bytes),
                reclaim_bytes_per_s=config.space.reclaim_bytes_per_s,
                watermarks=Watermarks(config.space.high_watermark, config.space.low_watermark),
                scrub=ScrubLimits(config.scrub.rate_bytes_per_s, config.scrub.interval_ms),
                attached_hosts=tuple((host.tenant, host.nqn) for host in config.target.attached_hosts),
                authentication=config.target.authentication == "dhchap",
            )
            node = await Node.open(
                store,
                meta,
                target,
                drives=drives,
                limits=limits,
                clock=SystemClock(),
                random=secrets.token_bytes,
                checkpoint=config.metadata_dir / FILE_NAME,
                reserve=Reserve(config.metadata_dir, config.space.metadata_reserve_bytes),
                stores=stores,
            )
            self._node = node
            await self._bootstrap(node)
            await node.release_empty_regions()
            await self._run(node, store, supervisor)
            await node.close()
        except BaseException:
            # a start that failed leaves no target of its own behind; one that served goes on serving
            if not found:
                await supervisor.stop()
            else:
                await supervisor.detach()
            raise
        else:
            if config.target.on_stop == "keep":
                await supervisor.detach()
            else:
                if config.nvmf_tgt.socket is not None:
                    try:
                        await target.leave()
                    except ForebayError as error:
                        _log.warning("the target may keep what is this node's: %s", error)
                await supervisor.stop()
        finally:
            await target.close()

    async def _bootstrap(self, node: Node) -> None:
        """On the very first start: a namespace to work in, and an administrator whose token the local CLI finds.

        Later, a token file that is gone is made anew: who owns the data directory owns the node.
        """
        file = self._config.data / ADMIN_TOKEN_FILE
        principals = node.state.principals
        if not len(principals) and node.state.namespace(DEFAULT_NAMESPACE) is None:
            await node.create_namespace(DEFAULT_NAMESPACE)
        if len(principals) and file.exists():
            digest = hash_token(file.read_text().strip())
            if not any(p.admin and p.token_sha256 == digest for p in principals):
                _log.warning("%s is no administrator's token: delete it, and the next start writes a new one", file)
            return
        token = new_token()
        _write_private(file, token + "\n")
        known = principals.get(ADMIN)
        fresh = Principal(ADMIN, hash_token(token), SystemClock().wall_ms(), admin=True)
        await principals.put(fresh if known is None else replace(known, token_sha256=fresh.token_sha256, admin=True))
        if len(principals) > 1 or known is not None:
            _log.warning("there was no %s: principal %r has a new token", file, ADMIN)

    def _keep_token(self, name: str, token: str) -> None:
        """The administrator's token was changed: the file that the local CLI reads follows."""
        if name == ADMIN:
            _write_private(self._config.data / ADMIN_TOKEN_FILE, token + "\n")

    async def _run(self, node: Node, store: RocksStore, supervisor: Supervisor) -> None:
        config, open_files = self._config, raise_open_files()
        calls = Calls(node.acl, node.engine.counters, tracer=self._tracer)
        administration = Administration(node, config.name, lambda: supervisor.restarts, self._keep_token)
        server = ControlServer(
            calls,
            DataCalls(node, config.name, self._load.load_us),
            AdminCalls(administration),
            config.grpc.max_message_bytes,
        )
        served = {"grpc": replace(config.grpc.listen, port=await server.start(config.grpc.listen))}
        http: HttpServer | None = None
        work = (self._sweep(node), self._look(node), self._scrub(node), self._save_checkpoints(node))
        tasks = [asyncio.create_task(one) for one in work]
        try:
            if config.http.enabled:
                await (self._loading or asyncio.to_thread(_load_http))
                http = self._http(node, store, supervisor, calls, administration)
                served["http"] = replace(config.http.listen, port=http.start(config.http.listen))
            doorkeeper = Doorkeeper([address.port for address in served.values()], open_files)
            tasks.append(asyncio.create_task(doorkeeper.watch()))
            settle_memory()
            await self._announce(node, supervisor, served)
            await self._stopping.wait()
            _log.info("stopping")
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            (config.data / NODE_FILE).unlink(missing_ok=True)
            if http is not None:
                await http.stop()
            await server.stop()

    def _http(
        self, node: Node, store: RocksStore, supervisor: Supervisor, calls: Calls, administration: Administration
    ) -> HttpServer:
        from forebay.appliance.control.health import Health
        from forebay.appliance.control.http import make_app
        from forebay.appliance.control.http_server import HttpServer
        from forebay.appliance.metrics import NodeMetrics

        metrics = NodeMetrics(node, self._config.name, store, calls.accounts, supervisor)
        health = Health(node, lambda: supervisor.serving)
        open_metrics = self._config.http.open_metrics
        return HttpServer(make_app(calls, node.acl, administration, health, metrics.scrape, open_metrics=open_metrics))

    async def _announce(self, node: Node, supervisor: Supervisor, served: dict[str, Endpoint]) -> None:
        config, found = self._config, node.recovered
        about = {
            "node": config.name,
            **{protocol: str(address) for protocol, address in served.items()},
            "pid": os.getpid(),
            "incarnation": node.meta.incarnation,
            "target": {"socket": str(supervisor.socket), "pid": supervisor.pid},
        }
        tenants = sorted({spec.tenant for spec in node.engine.space.specs.values()})  # of volumes that are served
        lines = [f"control      forebay://{served['grpc']}"]
        if tenants:
            endpoint = await node.engine.target.endpoint(tenants[0])
            about["target"] |= {"address": endpoint.address, "port": endpoint.port}  # type: ignore[operator]
            lines.append(f"data         nvme-tcp://{endpoint.address}:{endpoint.port}")
        if "http" in served:
            lines.append(f"admin        http://{served['http']}")
        lines.append(f"admin token  {config.data / ADMIN_TOKEN_FILE}")
        _write_private(config.data / NODE_FILE, json.dumps(about, indent=2) + "\n")
        _log.info(
            "incarnation %d: %d blocks found, %d to verify, %d records dropped",
            node.meta.incarnation,
            found.blocks,
            found.suspects,
            found.dropped,
        )
        print("\n".join(lines), flush=True)

    async def _replay(self) -> None:
        if self._node is not None:
            await self._node.replay()

    async def _sweep(self, node: Node) -> None:
        for round_number in count():
            try:
                await node.sweep()
                await node.background()
                if round_number % _RECONCILE_ROUNDS == _RECONCILE_ROUNDS - 1:
                    for difference in await node.reconcile():
                        _log.warning("the target differed and was put right: %s", difference)
                if round_number % _STATS_ROUNDS == 0:
                    self._load.update(await node.engine.target.io_stats())
            except ForebayError as error:
                _log.warning("sweep: %s", error)
            except Exception:  # the sweep must go on: leases and sessions end by it
                _log.exception("sweep failed")
            await asyncio.sleep(_SWEEP_S)

    async def _look(self, node: Node) -> None:
        while True:
            try:
                await node.drives.look()
            except ForebayError as error:
                _log.warning("drives: %s", error)
            except Exception:  # or a drive that comes back would never be noticed
                _log.exception("looking at the drives failed")
            await asyncio.sleep(_LOOK_S)

    async def _scrub(self, node: Node) -> None:
        while True:
            wait_ms = _SCRUB_AGAIN_MS
            try:
                wait_ms = await node.scrubber.step()
            except ForebayError as error:
                _log.warning("scrub: %s", error)
            except Exception:  # the next batch may be better
                _log.exception("scrub failed")
            await asyncio.sleep(wait_ms / 1000)

    async def _save_checkpoints(self, node: Node) -> None:
        while True:
            await asyncio.sleep(_CHECKPOINT_S)
            try:
                await node.checkpoint(least_changes=_CHECKPOINT_CHANGES)
            except (ForebayError, OSError) as error:
                _log.warning("no checkpoint of the index: %s", error)
