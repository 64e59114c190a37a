"""Other stores whose clients are processes of their own (`perf.peers`): nbdkit with libnbd, and Mooncake Store.

Slots are timed here, around one line to the client's process and its answer, which is nothing beside a slot. The CPU
time of that process is the client's.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.harness import Side
from perf.workload import Skipped, Workload, Wrong
from tests.envs import ENVIRONMENTS, ROOT

__all__ = ["OutsidePeer", "end", "free_port", "mooncake", "nbdkit"]

_SYSTEM_PYTHON = "/usr/bin/python3"
_START_S = 15.0
_STOP_S = 3.0
_LEAST_SEGMENT_BYTES = 64 << 20
"""Mooncake gives no segment that is much smaller."""


class _Client:
    """A client's process. ``ask`` raises `Wrong` when it could not do what it was told."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self, do: str, **told: int) -> int:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **told}), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self.line())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise Wrong("the client's process ended") from error
        if "error" in answer:
            raise Wrong(answer["error"])
        return int(answer["bytes"])

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        end(self._process)
        self._process.stdout.close()


@dataclass(frozen=True, slots=True)
class OutsidePeer:
    """A store and its client, both running."""

    name: str
    versions: dict[str, str]
    servers: tuple[int, ...]
    client: _Client

    def reading(self, work: Workload) -> Side:
        """A side that reads; the blocks are stored first."""
        self._work(work)
        self.client.ask("load")
        return self._side("get", work, lambda: None)

    def writing(self, work: Workload) -> Side:
        """A side that writes, new blocks in every slot."""
        self._work(work)

        def renew() -> None:
            self.client.ask("renew")

        return self._side("put", work, renew)

    def _work(self, work: Workload) -> None:
        self.client.ask("work", block_bytes=work.block_bytes, batch=work.batch, count=work.count)

    def _side(self, do: str, work: Workload, before: Any) -> Side:
        return Side(
            self.name,
            lambda: self.client.ask(do, calls=work.calls),
            self.servers,
            before,
            clients=(self.client.pid,),
        )


@contextmanager
def nbdkit(size_bytes: int) -> Iterator[OutsidePeer]:
    """A disk in memory, served by nbdkit. Raises `Skipped`."""
    if shutil.which("nbdkit") is None:
        raise Skipped("nbdkit is not installed (apt-get install nbdkit)")
    if subprocess.run([_SYSTEM_PYTHON, "-c", "import nbd"], capture_output=True, check=False).returncode:
        raise Skipped(f"libnbd is not installed for {_SYSTEM_PYTHON} (apt-get install python3-libnbd)")
    port = free_port()
    command = ["nbdkit", "--foreground", "--ipaddr", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, "memory", f"size={size_bytes}", "allocator=malloc"])
    try:
        _wait_for(port, server)
        client = _Client([_SYSTEM_PYTHON, "-m", "perf.peers.nbd_client", str(port)])
        try:
            yield OutsidePeer("nbdkit", {"nbdkit": _said("nbdkit", "--version").split()[-1]}, (server.pid,), client)
        finally:
            client.stop()
    finally:
        end(server)


@contextmanager
def mooncake(size_bytes: int) -> Iterator[OutsidePeer]:
    """Mooncake Store over TCP: a master, a process that gives memory, a client that gives none. Raises `Skipped`."""
    environment = ENVIRONMENTS["mooncake"]
    if environment.missing:
        raise Skipped(environment.missing)
    size_bytes = max(size_bytes, _LEAST_SEGMENT_BYTES)
    port, module = free_port(), "perf.peers.mooncake_client"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [environment.python.with_name("mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    command += [f"--metrics_port={free_port()}", "--default_kv_lease_ttl=5000"]
    master = subprocess.Popen(command, env=_environment(), **quiet)  # type: ignore[call-overload]
    try:
        _wait_for(port, master)
        storage = _Client([environment.python, "-m", module, "storage", str(port), str(size_bytes)])
        try:
            if storage.line() != "ready\n":
                raise Skipped("Mooncake's storage process did not start")
            client = _Client([environment.python, "-m", module, "client", str(port)])
            try:
                version = environment.version("mooncake-transfer-engine-non-cuda")
                yield OutsidePeer("mooncake", {"mooncake": version}, (master.pid, storage.pid), client)
            finally:
                client.stop()
        finally:
            storage.stop()
    finally:
        end(master)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def free_port() -> int:
    """One that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[Any]) -> None:
    """Until it listens. Raises `Skipped`."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline or server.poll() is not None:
                raise Skipped(f"{server.args!r} did not start") from error
            time.sleep(0.05)


def end(process: subprocess.Popen[Any], within_s: float = _STOP_S) -> None:
    """End a process, which may hang in its own clean-up."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
