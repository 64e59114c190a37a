"""How long a client goes without its blocks when the daemon is killed: from SIGKILL to its next read (aim: 3 s).

The node holds blocks by the million, the system has its metadata cached, and the client was there before; it asks again
every few milliseconds, as an engine does that would rather load than compute. What starts the daemon anew is a thread
of this process that waits for its end and starts it at once, as an init system does that is told to restart always and
without delay. The target lives on.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forebay
from forebay.cli.demo.node import DemoNode
from forebay.client import Client
from forebay.errors import Unavailable
from perf.filled_node import filled_bytes
from perf.harness import Row, file_system, interval
from perf.node import scratch
from perf.workload import Bench, Wrong, fill

__all__ = ["run"]

_REGION_BYTES = 64 << 20
_CHANGES = 90_000
"""Blocks since the last checkpoint: nearly as many as there ever are, since 100,000 make another one."""
_AIM_S = 3.0
_KEYS = [b"read after the kill, %02d" % i for i in range(16)]
_VALUE = bytes(range(256)) * 256
_AGAIN_S = 0.005
_GIVE_UP_S = 120.0


def run(bench: Bench) -> Iterator[Row]:
    """Two rows. Raises `Skipped` without a disk."""
    disk, blocks = bench.disk(), bench.sizes.scale_blocks
    name = f"{blocks // 1_000_000}M" if blocks >= 1_000_000 else str(blocks)
    details = {"blocks": blocks, "file_system": file_system(disk), "restarted_by": "this process, at once"}
    what = "from SIGKILL of the daemon to the next read of a client that was there"
    for suffix, told, changes in (("", what, 0), (".changed", f"{what}, with changes since the checkpoint", _CHANGES)):
        new = min(changes, blocks // 2)
        with scratch(disk) as folder:
            away_s = _kills(folder, blocks, new, bench.sizes.repeats)
        found = interval(away_s)
        yield Row(
            f"kill.{name}{suffix}",
            told,
            "s",
            found,
            None,
            found,
            "at most",
            _AIM_S,
            len(away_s),
            {**details, "changes": new},
        )


def _kills(folder: Path, blocks: int, changes: int, kills: int) -> list[float]:
    """Seconds without a read after each kill of a node that holds so many blocks."""
    capacity_bytes = filled_bytes(blocks + changes, _REGION_BYTES) + 8 * _REGION_BYTES
    node = DemoNode(folder / "data", capacity_bytes, folder / "node.log")
    try:
        node.start()
        with forebay.connect(node.url, token=node.token) as client:
            fill(client, _KEYS, [memoryview(_VALUE)] * len(_KEYS))
        node.stop()
        command = [sys.executable, "-m", "perf.filled_node", str(node.data), str(blocks), str(changes)]
        subprocess.run(command, check=True)
        with _kept(node, folder / "daemon.log") as daemon, node.admin() as admin:
            with forebay.connect(node.url, token=node.token) as client:
                _until_read(client)
                status = admin.status()
                if status.blocks < blocks + changes:
                    raise Wrong(f"the node holds {status.blocks} blocks of {blocks + changes}")
                away_s = [_without(client, daemon) for _ in range(kills)]
            if admin.status().incarnation != status.incarnation + kills:
                raise Wrong("the node was not started once for each kill")
        return away_s
    finally:
        node.stop()


def _without(client: Client, daemon: _Daemon) -> float:
    began = time.perf_counter()
    daemon.kill()
    _until_read(client)
    return time.perf_counter() - began


def _until_read(client: Client) -> None:
    """Ask until every block is there. Raises `Wrong` after two minutes, or for other bytes."""
    buffers = [bytearray(len(_VALUE)) for _ in _KEYS]
    until = time.monotonic() + _GIVE_UP_S
    while not all(result.hit for result in client.get_into(_KEYS, buffers)):
        if time.monotonic() > until:
            raise Wrong(f"no read within {_GIVE_UP_S:g} s")
        time.sleep(_AGAIN_S)
    if any(buffer != _VALUE for buffer in buffers):
        raise Wrong("other bytes were read than were written")


class _Daemon:
    """A daemon that is started again whenever it ends, until it is told to stop."""

    def __init__(self, node: DemoNode, log: Path) -> None:
        self._node = node
        self._log = log
        self._changing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._keep, name="keeps the daemon", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while True:
            with self._changing, self._log.open("ab") as log:
                if self._stopping:
                    return
                self._process = process = subprocess.Popen(
                    self._node.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=self._node.environment,
                )
            process.wait()

    def kill(self) -> None:
        """SIGKILL."""
        with self._changing:
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """End it cleanly, for good."""
        with self._changing:
            self._stopping = True
            if self._process is not None:
                self._process.terminate()
        self._thread.join()


@contextmanager
def _kept(node: DemoNode, log: Path) -> Iterator[_Daemon]:
    daemon = _Daemon(node, log)
    try:
        until = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                with node.admin() as admin:
                    admin.status()
                break
            except Unavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_S)
        yield daemon
    finally:
        daemon.stop()
