"""LMCache beside vLLM: its multiprocess server with a store in files, and an engine that is connected to it.

The server keeps chunks of 256 tokens in host memory (L1) and behind that in files (L2, its ``fs`` adapter, as it comes:
through the page cache). An engine on a CPU reaches it in LMCache's engine-driven mode; its in-process connector knows
no CPU.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.engines.process import EngineSetup
from perf.outside import end, free_port
from perf.workload import Wrong
from tests.envs import ENVIRONMENTS

__all__ = ["LMCacheServer", "lmcache_missing", "lmcache_server"]

_START_S = 120
_STOP_S = 20
_POLL_S = 0.1


def lmcache_missing() -> str | None:
    """Why it cannot be compared with, or None."""
    return ENVIRONMENTS["lmcache"].missing


def _variables() -> dict[str, str]:
    """LMCache lies beside vLLM's packages; it shall tell nobody of its use."""
    packages = next((ENVIRONMENTS["lmcache"].directory / "lib").glob("python*/site-packages"))
    path = ENVIRONMENTS["vllm"].variables()["PYTHONPATH"]
    return {"PYTHONPATH": f"{path}{os.pathsep}{packages}", "LMCACHE_TRACK_USAGE": "false"}


@dataclass(frozen=True, slots=True)
class LMCacheServer:
    """A server that listens."""

    port: int
    pid: int

    @property
    def version(self) -> str:
        return ENVIRONMENTS["lmcache"].version("lmcache")

    def engine(self, name: str, arguments: Mapping[str, Any]) -> EngineSetup:
        """An engine that is connected to it."""
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port},
        }
        return EngineSetup(name, arguments, transfer, _variables(), "perf.engines.lmcache_engine")


@contextmanager
def lmcache_server(folder: Path, log: Path) -> Iterator[LMCacheServer]:
    """A server whose files lie in ``folder``. Raises `Wrong` if it does not start."""
    port = free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--l1-size-gb": "1",
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
        "--shm-name": f"lmcache-{port}",  # without, bytes go through messages
        "--l2-adapter": json.dumps({"type": "fs", "base_path": str(folder)}),
    }
    command: list[str | Path] = [ENVIRONMENTS["vllm"].python, "-m", "lmcache.v1.multiprocess.server"]
    command += ["--disable-observability", *(word for option in options.items() for word in option)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **_variables()},
            stdout=file,
            stderr=file,
        )
    try:
        until = time.monotonic() + _START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise Wrong(f"LMCache's server does not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(_POLL_S)
        yield LMCacheServer(port, process.pid)
    finally:
        end(process, _STOP_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))
