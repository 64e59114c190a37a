"""What goes wrong in a soak: faults by name, with how often each comes, of processes, the network and media."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from forebay.appliance.dataplane.process import Process, ProcessName
from forebay.appliance.dataplane.volumes import volumes_on
from forebay.client import Client, ClientOptions, connect
from forebay.errors import ForebayError
from forebay.ids import VolumeId
from tests.client.conftest import NodeProcess, eventually
from tests.soak.content import SHARED_KEYS
from tests.soak.proxy import RoughProxy
from tests.soak.workers import WorkerProcess

__all__ = ["Faults"]

_LIMIT_S = 90.0
"""Only a run that has failed waits this long."""


class Faults:
    """Injects faults into a node, its clients and what is between them. All that is random comes from ``chance``.

    ``injected`` counts by name. ``spoilt`` are bytes of volumes that were changed: (volume, offset).
    """

    def __init__(
        self, node: NodeProcess, workers: list[WorkerProcess], proxies: tuple[RoughProxy, ...], chance: random.Random
    ) -> None:
        self.injected: Counter[str] = Counter()
        self.spoilt: set[tuple[int, int]] = set()
        self._node, self._workers, self._proxies, self._chance = node, workers, proxies, chance
        self._waking: list[tuple[float, Callable[[], None]]] = []
        self._reader: Client | None = None

    def inject(self, *, kill: bool) -> None:
        """One fault of those that are due; with ``kill`` daemon and target may die, too."""
        calm: list[tuple[int, Callable[[], None]]] = [
            (3, self.connections_reset),
            (2, self.connections_held),
            (2, self.client_killed),
            (2, self.client_stopped),
            (2, self.daemon_stopped),
            (2, self.target_stopped),
            (4, self.byte_spoilt),
        ]
        rough = [(4, self.daemon_killed), (3, self.target_killed), (2, self.node_killed)] if kill else []
        faults = [*calm, *rough]
        act = self._chance.choices([f for _, f in faults], [w for w, _ in faults])[0]
        act()

    def due(self) -> None:
        """Wake what has been stopped for long enough."""
        now = time.monotonic()
        waking, self._waking = (
            [(at, wake) for at, wake in self._waking if at <= now],
            [(at, wake) for at, wake in self._waking if at > now],
        )
        for _, wake in waking:
            wake()

    def end(self) -> None:
        """Everything that stands still goes on."""
        for _, wake in self._waking:
            wake()
        self._waking.clear()
        for proxy in self._proxies:
            proxy.heal()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _for(self, least_s: float, most_s: float, wake: Callable[[], None]) -> None:
        self._waking.append((time.monotonic() + self._chance.uniform(least_s, most_s), wake))

    # ------------------------------------------------------------------------------------------------ the network

    def _half(self, links: list[object]) -> list[object]:
        return self._chance.sample(links, (len(links) + 1) // 2)

    def connections_reset(self) -> None:
        """Half of the connections of one kind end in a reset."""
        self.injected["connections_reset"] += 1
        self._chance.choice(self._proxies).reset(self._half)  # type: ignore[arg-type]  # links are links

    def connections_held(self) -> None:
        """Half of the connections of one kind stand still for a while."""
        self.injected["connections_held"] += 1
        proxy = self._chance.choice(self._proxies)
        proxy.hold(self._half)  # type: ignore[arg-type]  # links are links
        self._for(0.2, 9.0, proxy.heal)

    # ------------------------------------------------------------------------------------------------ processes

    def client_killed(self) -> None:
        """A client dies with all that it had begun, and another takes its place."""
        self.injected["client_killed"] += 1
        worker = self._chance.choice(self._workers)
        worker.kill()
        worker.start()

    def client_stopped(self) -> None:
        """A client is stopped, often beyond its deadlines and its session's."""
        self.injected["client_stopped"] += 1
        worker = self._chance.choice(self._workers)
        worker.signal(signal.SIGSTOP)
        self._for(0.2, 9.0, lambda: worker.signal(signal.SIGCONT))

    def daemon_stopped(self) -> None:
        """The daemon is stopped for a moment."""
        self.injected["daemon_stopped"] += 1
        process = self._node.process
        process.send_signal(signal.SIGSTOP)
        self._for(0.1, 3.0, lambda: process.send_signal(signal.SIGCONT))

    def target_stopped(self) -> None:
        """The target is stopped, perhaps until the daemon takes it for hung."""
        target = self._target()
        if target is not None:
            self.injected["target_stopped"] += 1
            target.signal(signal.SIGSTOP)
            self._for(0.1, 3.0, lambda: self._go_on(target))

    @staticmethod
    def _go_on(target: Process) -> None:
        with suppress(ProcessLookupError):
            target.signal(signal.SIGCONT)
        target.close()

    def daemon_killed(self) -> None:
        """The daemon dies; the target and the clients live on."""
        self.injected["daemon_killed"] += 1
        self._node.process.kill()
        self._node.process.wait()
        self._node.start()

    def target_killed(self) -> None:
        """The target dies; the daemon starts another."""
        target = self._target()
        if target is not None:
            self.injected["target_killed"] += 1
            target.signal(signal.SIGKILL)
            target.close()

    def node_killed(self) -> None:
        """Both die at once."""
        self.injected["node_killed"] += 1
        self.kill_node()
        self._node.start()

    def kill_node(self) -> None:
        """SIGKILL to both; returns when they are gone."""
        target = self._target()
        self._node.process.kill()
        if target is not None:
            target.signal(signal.SIGKILL)
        self._node.process.wait()
        if target is not None:
            eventually(lambda: not target.running, "the target's end", _LIMIT_S)
            target.close()

    def _target(self) -> Process | None:
        for file in self._node.data.rglob("target.pid"):
            name = ProcessName.load(file)
            return Process.find(name) if name is not None else None
        return None

    # ------------------------------------------------------------------------------------------------ media

    def byte_spoilt(self) -> None:
        """One stored byte is not what was written, of a block that may be lost."""
        try:
            if self._reader is None:
                options = ClientOptions(deadline_ms=2_000, connect_ms=2_000)
                self._reader = connect(self._node.url, token=self._node.token, namespace="soak/shared", options=options)
            keys = [b"s%d" % self._chance.randrange(SHARED_KEYS) for _ in range(32)]
            found = [stat.block for stat in self._reader.stat(keys) if stat.block is not None]
        except ForebayError:
            return  # the node is away
        if not found:
            return
        block = self._chance.choice(found)
        at = block.offset_bytes + self._chance.randrange(block.length_bytes)
        path = volumes_on(self._node.data / "drive0").path(VolumeId(block.volume))
        self.spoilt.add((block.volume, at))
        handle = os.open(path, os.O_RDWR)
        try:
            (byte,) = os.pread(handle, 1, at)
            os.pwrite(handle, bytes([byte ^ 1 << self._chance.randrange(8)]), at)
            os.fsync(handle)
        finally:
            os.close(handle)
        self.injected["byte_spoilt"] += 1
