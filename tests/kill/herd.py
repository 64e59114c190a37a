"""A node and clients as processes, to be killed one by one or together, and what must hold after each kill."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from forebay.appliance.dataplane.process import Process, ProcessName
from forebay.appliance.dataplane.volumes import volumes_on
from forebay.appliance.namespace.checkpoint import FILE_NAME
from forebay.appliance.namespace.fsck import Fsck
from forebay.appliance.namespace.records import Durability
from forebay.appliance.namespace.rocks import RocksStore
from forebay.client import Admin, ClientOptions, GetResult, connect
from forebay.errors import Unavailable
from tests.client.conftest import NodeProcess, eventually
from tests.kill.blocks import SCHEMA, WITHOUT_HTTP, value_of
from tests.kill.worker import NEVER
from tests.power.history import History

__all__ = ["VICTIMS", "Herd", "administrator", "fsck"]

ROOT = Path(__file__).parents[2]
_LIMIT_S = 60.0
"""Only a test that fails waits this long."""
_BATCH = 64
VICTIMS = ("daemon", "target", "client", "daemon+target", "daemon+client", "target+client", "daemon+target+client")
POLICIES = {f"kill/{policy.name.lower()}": policy for policy in Durability}


def administrator(node: NodeProcess) -> Admin:
    """A connection to it, with patience for a machine that does much else."""
    return Admin(node.url, token=node.token, attempt_ms=10_000)


def fsck(data: Path) -> int:
    """Check what a node that is stopped left, media included; how many blocks that were."""
    metadata = data / "metadata"
    store = RocksStore(metadata / "rocksdb", read_only=True)
    try:
        check = Fsck(store, {"drive0": volumes_on(data / "drive0")}, metadata / FILE_NAME)
        report = asyncio.run(check.run(media=True, progress=lambda done, total: None))
    finally:
        store.close()
    assert report.clean, [finding for finding in report.findings if finding.wrong]
    return report.checked.get("media_blocks", 0)


class _Worker:
    """A client process, and its journal, which outlives it."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.journal = folder / f"{namespace.partition('/')[2]}.journal"
        self.journal.touch()
        self._log = folder / "workers.log"
        self._process: subprocess.Popen[str] | None = None
        self._paused = threading.Event()
        self._lines: list[str] = []
        self._wrong: list[str] = []
        self._read_bytes = self._progress = 0

    def start(self, url: str, token: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.kill.worker", url, self.namespace, str(self.journal), str(seed)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "FOREBAY_TOKEN": token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        threading.Thread(target=self._listen, args=[self._process], daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for _ in process.stdout:
            self._paused.set()

    def lines(self) -> list[str]:
        """Of the journal; each is read once."""
        with self.journal.open("rb") as file:
            file.seek(self._read_bytes)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        lines = whole.decode().splitlines()
        self._lines += lines
        self._wrong += [line for line in lines if line.startswith("wrong")]
        self._progress += sum(line.startswith(("put ", "deleted ", "note got")) for line in lines)
        return self._lines

    def progress(self) -> int:
        """How many calls came to a good end."""
        self.lines()
        return self._progress

    def tell(self, word: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._paused.clear()
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def pause(self) -> None:
        self.tell("pause")
        assert self._paused.wait(_LIMIT_S), f"{self.namespace} does not pause"

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def check(self) -> None:
        assert self._process is not None and self._process.poll() is None, f"the worker of {self.namespace} ended"
        self.lines()
        assert not self._wrong, self._wrong


class Herd:
    """Daemon, target and a client of each policy. All that is random comes from ``seed``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self.node = NodeProcess(folder / "data", **WITHOUT_HTTP)
        self.verified = 0
        with administrator(self.node) as admin:
            for name, policy in POLICIES.items():
                admin.create_namespace(name, durability=policy.name.lower())
        self._workers = [_Worker(name, folder) for name in POLICIES]
        for worker in self._workers:
            self._start(worker)

    def _start(self, worker: _Worker) -> None:
        worker.start(self.node.url, self.node.token, self._chance.getrandbits(32))

    def kill(self, victim: str) -> None:
        """Let all work for a random time, kill, start again what does not start by itself."""
        progress = sum(w.progress() for w in self._workers) + self._chance.randint(0, 60)
        eventually(lambda: sum(w.progress() for w in self._workers) >= progress, "clients at work", _LIMIT_S)
        target = self._target()
        client = self._chance.choice(self._workers)
        threading.Event().wait(self._chance.uniform(0, 0.02))  # not only right behind an answer
        for part in victim.split("+"):
            if part == "daemon":
                self.node.process.kill()
            elif part == "target":
                target.signal(signal.SIGKILL)
            else:
                client.kill()
        if "daemon" in victim:
            self.node.process.wait()
            if "target" in victim:
                eventually(lambda: not target.running, "the target's end", _LIMIT_S)
                self._fsck()
            self.node.start()
        target.close()
        if "client" in victim:
            self._start(client)

    def _target(self) -> Process:
        """The target as it is now; it may be on its way back from the last kill."""
        found: list[Process] = []

        def find() -> bool:
            for file in self.node.data.rglob("target.pid"):
                name = ProcessName.load(file)
                process = Process.find(name) if name is not None else None
                if process is not None:
                    found.append(process)
            return bool(found)

        eventually(find, "a target", _LIMIT_S)
        return found[0]

    def check(self) -> None:
        """Everybody goes on; then all pause, and every byte that was ever acknowledged is compared."""
        before = {w.namespace: w.progress() for w in self._workers}

        def all_go_on() -> bool:
            for worker in self._workers:
                worker.check()
            return all(w.progress() > before[w.namespace] + 1 for w in self._workers)

        eventually(all_go_on, "recovery", _LIMIT_S)
        for worker in self._workers:
            worker.pause()
        for worker in self._workers:
            self._compare(worker)
            worker.tell("go")

    def _compare(self, worker: _Worker) -> None:
        # a kill takes nothing from the page cache: what was acknowledged under `verify` is there, too
        policy = Durability.VOLATILE if worker.namespace.endswith("volatile") else Durability.FLUSH
        lines = [line for line in worker.lines() if not line.startswith("note")]
        history = History({worker.namespace: policy}, made={worker.namespace: True}).read(lines)
        keys = [key for _, key in history.keys]
        for at in range(0, len(keys), _BATCH):
            part = keys[at : at + _BATCH]
            for key, result in zip(part, self._read(worker.namespace, part), strict=True):
                allowed = history.may_be(worker.namespace, key)
                if result.value is None:
                    assert None in allowed, f"{worker.namespace} {key}: {result.reason}, may be {allowed}"
                    continue
                found = bytes(result.value)
                versions = [v for v in allowed if v is not None and value_of(worker.namespace, key, v) == found]
                assert versions, f"{worker.namespace} {key} has other bytes, may be {allowed}"
                self.verified += 1

    def _read(self, namespace: str, keys: list[str]) -> list[GetResult]:
        """Read until the node says of each what there is, and not that it cannot say."""
        results: list[GetResult] = []
        options = ClientOptions(connect_ms=10_000, attempt_ms=1_000)

        def read() -> bool:
            try:
                client = connect(
                    self.node.url, token=self.node.token, namespace=namespace, schema=SCHEMA, options=options
                )
            except Unavailable:  # a target on its way back
                return False
            with client:
                results[:] = client.get([key.encode() for key in keys])
            return all(result.hit or result.reason in NEVER for result in results)

        eventually(read, f"an answer about every block of {namespace}", _LIMIT_S)
        return results

    def _fsck(self) -> None:
        """What lies there between two starts is whole, media included."""
        self.verified += fsck(self.node.data)

    def stop(self) -> None:
        """A clean end, and a check of what it left."""
        for worker in self._workers:
            worker.kill()
        self.node.stop()

    @property
    def read_under_load(self) -> int:
        """Blocks that the clients read and compared between and during the kills."""
        return sum(worker.lines().count("note got") for worker in self._workers)

    def stop_and_check(self) -> None:
        """The same, when nothing failed."""
        self.stop()
        self._fsck()
