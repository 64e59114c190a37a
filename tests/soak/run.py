"""One soak: load and faults in eras, and between them quiet moments in which everything is added up."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from forebay.appliance.dataplane.volumes import volumes_on
from forebay.appliance.namespace.checkpoint import FILE_NAME
from forebay.appliance.namespace.fsck import Fsck, FsckReport
from forebay.appliance.namespace.rocks import RocksStore
from forebay.client import Admin, Client, NamespaceInfo, NodeStatus, connect
from forebay.errors import ForebayError, Unavailable
from tests.client.conftest import NodeProcess, eventually
from tests.footprint import Footprint, footprint
from tests.soak.content import GRID, NAMESPACES
from tests.soak.faults import Faults
from tests.soak.proxy import RoughProxy
from tests.soak.workers import WorkerProcess

__all__ = ["CYCLE", "Plan", "Soak"]

_LIMIT_S = 120.0
"""Only a run that has failed waits this long."""
_SESSIONS = 5
"""Of each worker: one a namespace, and the second rank's where it had to open one of its own."""
_EXPIRY_S = 6
_ENVIRONMENT = {
    "FOREBAY_HTTP_ENABLED": "false",
    "FOREBAY_SESSIONS_HEARTBEAT": "1s",
    "FOREBAY_SESSIONS_EXPIRY": f"{_EXPIRY_S}s",
    "FOREBAY_SESSIONS_WRITE_TTL": "8s",
}
CYCLE = 3
"""In one era of so many daemon and target may die; all of the node is stopped and checked after it."""
_LONG_ERA_S = 30.0
_PLACE = re.compile(r"volume (\d+) at (\d+),")
_LARGEST_EXTENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how large. ``era_s`` is the time between two quiet moments, ``fault_s`` that between two faults."""

    seconds: float
    workers: int
    capacity_bytes: int
    era_s: float = 60.0
    fault_s: float = 4.0


class _Node(NodeProcess):
    def __init__(self, data: Path, capacity_bytes: int) -> None:
        self.capacity = str(capacity_bytes)
        super().__init__(data, **_ENVIRONMENT)

    def admin(self) -> Admin:
        return Admin(self.url, token=self.token)


class Soak:
    """Run it once. Raises AssertionError at the first thing that is wrong."""

    def __init__(self, folder: Path, plan: Plan, seed: int, tell: Callable[[float, str], None]) -> None:
        self._plan, self._seed, self._tell = plan, seed, tell
        self._chance = random.Random(seed)
        self._folder = folder
        self._node = _Node(folder / "data", plan.capacity_bytes)
        with self._node.admin() as admin:
            for name, policy in NAMESPACES.items():
                admin.create_namespace(name, **policy)  # type: ignore[arg-type]  # as the table has them
        ports = (int(address.rpartition(":")[2]) for address in (self._node.grpc, self._node.nvme))
        self._proxies = tuple(RoughProxy(port) for port in ports)
        self._workers = [
            WorkerProcess(
                folder, self._proxies[0].port, self._proxies[1].port, self._node.token, i, self._chance.getrandbits(32)
            )
            for i in range(plan.workers)
        ]
        self._faults = Faults(self._node, self._workers, self._proxies, self._chance)
        self._checks: Counter[str] = Counter()
        self._held: dict[str, tuple[int, Footprint]] = {}
        self._grown: dict[str, Footprint] = {name: Footprint(0, 0, 0) for name in ("daemon", "target")}
        self._began_s = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Soak for as long as planned; the summary."""
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.tell("pause")
                worker.tell("go")
            self._began_s = time.monotonic()
            end_s = self._began_s + self._plan.seconds
            era = 0
            while time.monotonic() < end_s or era < CYCLE:
                rough = era % CYCLE == CYCLE - 1
                until_s = time.monotonic() + self._plan.era_s
                self._era(until_s if era < CYCLE else min(end_s, until_s), kill=rough)
                self._quiet()
                if rough:
                    self._stop_and_check(clean=self._chance.random() < 0.5)
                for worker in self._workers:
                    worker.tell("go")
                era += 1
            self._quiet()
            self._stop_and_check(clean=True)
            self._check_logs()
        finally:
            self._end()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """What was done so far."""
        counts = sum((worker.counts for worker in self._workers), Counter[str]())
        verified = {name: counts.pop(name, 0) for name in ("calls", "blocks_verified", "bytes_verified")}
        verified["blocks_verified"] += self._checks["media_blocks"]
        return {
            "seed": self._seed,
            "plan": asdict(self._plan),
            "seconds": round(time.monotonic() - self._began_s, 1),
            **verified,
            "faults_injected": self._faults.injected.total(),
            "faults": dict(sorted(self._faults.injected.items())),
            "quiet_checks": self._checks["quiet"],
            "leak_checks": self._checks["leaks"],
            "fsck_runs": self._checks["fsck"],
            "fsck_media_blocks": self._checks["media_blocks"],
            "most_growth": {name: asdict(grown) for name, grown in self._grown.items()},
            "results": dict(sorted(counts.items())),
            "wrong": [wrong for worker in self._workers for wrong in worker.wrong],
        }

    # ------------------------------------------------------------------------------------------------ load and faults

    def _era(self, end_s: float, *, kill: bool) -> None:
        never = threading.Event()
        fault_s = time.monotonic() + self._chance.uniform(0, self._plan.fault_s)
        while (now := time.monotonic()) < end_s or now < fault_s:
            self._faults.due()
            if now >= fault_s:
                self._faults.inject(kill=kill)
                fault_s = time.monotonic() + self._chance.uniform(0, 2 * self._plan.fault_s)
                fault_s = min(fault_s, end_s)
            self._tell(min(1.0, (now - self._began_s) / self._plan.seconds), f"{self._faults.injected.total()} faults")
            never.wait(0.1)

    # ------------------------------------------------------------------------------------------------ quiet moments

    def _quiet(self) -> None:
        """All clients pause; then nothing is pending, what is used adds up, and nothing has leaked."""
        self._faults.end()
        for worker in self._workers:
            worker.signal(signal.SIGCONT)
        for worker in self._workers:
            worker.tell("pause")
            assert not worker.wrong, f"worker {worker.number}: {worker.wrong[:5]}"
        status = self._settled()
        self._add_up(status)
        self._leaks(status)
        self._checks["quiet"] += 1

    def _status(self) -> NodeStatus | None:
        try:
            with self._node.admin() as admin:
                return admin.status()
        except ForebayError:
            return None

    def _settled(self) -> NodeStatus:
        """The node's status once nothing is under way any more."""
        last: list[NodeStatus] = []

        def idle() -> bool:
            found = self._status()
            if found is None:
                return False
            last[:] = [found]
            if found.pending_writes or found.leases or found.sessions > self._plan.workers * _SESSIONS:
                return False
            if not Path(f"/proc/{found.target_pid}").exists():  # killed just now
                return False
            # What expires by itself goes first, so that nothing changes while it is added up.
            try:
                return not any(info.used_bytes for info in self._namespaces() if info.ttl_ms)
            except ForebayError:
                return False

        try:
            eventually(idle, "nothing is pending, leased or about to expire", _LIMIT_S)
        except AssertionError as error:
            error.add_note(str(last))
            raise
        status = self._status()
        assert status is not None, "the node went away in a quiet moment"
        return status

    def _namespaces(self) -> list[NamespaceInfo]:
        with self._node.admin() as admin:
            return admin.list_namespaces()

    def _add_up(self, status: NodeStatus) -> None:
        """What each namespace says that it uses are its blocks and what is in quarantine, to the byte."""
        with self._node.admin() as admin:
            aside: Counter[str] = Counter()
            for extent in admin.list_quarantine():
                aside[extent.namespace] += extent.length_bytes
        namespaces = self._namespaces()
        used = sum(n.used_bytes for n in namespaces)
        assert used == status.used_bytes <= status.capacity_bytes, f"{used} of {status}"
        for info in namespaces:
            if info.name in NAMESPACES:
                blocks = self._extents(info.name)
                assert blocks + aside[info.name] == info.used_bytes, f"{blocks} + {aside[info.name]}: {info}"

    def _extents(self, name: str) -> int:
        with self._opened(name) as client:
            total, keys = 0, [block.key for block in client.list()]
            for at in range(0, len(keys), 500):
                found = client.stat(keys[at : at + 500])
                total += sum(stat.block.extent_bytes for stat in found if stat.block is not None)
        return total

    def _opened(self, name: str) -> Client:
        """A session, once the target is there again that may just have been killed."""
        schema = GRID if name == "soak/ranks" else None
        found: list[Client] = []

        def opened() -> bool:
            try:
                found.append(connect(self._node.url, token=self._node.token, namespace=name, schema=schema))
            except Unavailable:
                return False
            return True

        eventually(opened, f"a session in {name}", _LIMIT_S)
        return found[0]

    def _processes(self, status: NodeStatus) -> tuple[tuple[str, int], ...]:
        return ("daemon", self._node.process.pid), ("target", status.target_pid)

    def _leaks(self, status: NodeStatus) -> None:
        """What lived through this era and the one before holds no more than after that one."""
        for name, pid in self._processes(status):
            now = footprint(pid)
            known, was = self._held.get(name, (0, now))
            self._held[name] = pid, now
            if known != pid:
                continue
            grown = Footprint(now.fds - was.fds, now.threads - was.threads, now.memory_bytes - was.memory_bytes)
            self._grown[name] = Footprint(*map(max, astuple(self._grown[name]), astuple(grown)))
            enough = all(g <= a for g, a in zip(astuple(grown), astuple(self._allowed()), strict=True))
            assert enough, f"{name}: {was} after the era before, {now} after this"
            self._checks["leaks"] += 1

    def _allowed(self) -> Footprint:
        """What a process may have more after an era than after the one before: caches fill.

        In short eras a client may have had no reason yet to connect to all that it reads from.
        """
        late = 2 * _SESSIONS * self._plan.workers if self._plan.era_s < _LONG_ERA_S else 0
        return Footprint(fds=12 + late, threads=12 + late, memory_bytes=128 << 20)

    # ------------------------------------------------------------------------------------------------ stop and check

    def _stop_and_check(self, *, clean: bool) -> None:
        """Stop the node, check all that it left, start it again: everything adds up as before."""
        before = {n.name: n.used_bytes for n in self._namespaces()}
        if clean:
            self._node.stop()
        else:
            self._faults.kill_node()
        report = self._fsck()
        wrong = [f for f in report.findings if f.wrong and not (f.part == "media" and self._spoilt(f.what))]
        assert not wrong, wrong
        used = report.checked.get("extent_bytes", 0) + report.checked.get("quarantined_bytes", 0)
        assert used == sum(before.values()), f"fsck counts {used} bytes, the node had {before}"
        self._checks["fsck"] += 1
        self._checks["media_blocks"] += report.checked.get("media_blocks", 0)
        self._node.start()
        for worker in self._workers:
            worker.tell("settle")
            assert not worker.wrong, f"worker {worker.number}: {worker.wrong[:5]}"

    def _fsck(self) -> FsckReport:
        metadata = self._node.data / "metadata"
        store = RocksStore(metadata / "rocksdb", read_only=True)
        try:
            files = {"drive0": volumes_on(self._node.data / "drive0")}
            check = Fsck(store, files, metadata / FILE_NAME)
            return asyncio.run(check.run(media=True, progress=lambda done, total: None))
        finally:
            store.close()

    def _spoilt(self, what: str) -> bool:
        """Whether a finding is of a byte that a fault changed."""
        found = _PLACE.search(what)
        if found is None:
            return False
        volume, start = int(found[1]), int(found[2])
        return any(v == volume and start <= at < start + _LARGEST_EXTENT_BYTES for v, at in self._faults.spoilt)

    def _check_logs(self) -> None:
        for path in (self._folder / "node.log", self._folder / "workers.log", *self._node.data.rglob("target.log")):
            text = path.read_text(errors="replace") if path.exists() else ""
            at = text.find("Traceback")
            assert at < 0, f"{path}: {text[max(0, at - 500) : at + 3000]}"

    def _end(self) -> None:
        self._faults.end()
        for worker in self._workers:
            worker.kill()
        for proxy in self._proxies:
            proxy.close()
        if self._node.process.poll() is None:
            self._faults.kill_node()
