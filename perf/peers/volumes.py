"""One volume of bytes in memory behind NVMe/TCP, served by the embedded target or by SPDK's, with the same content."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.ids import LBA_BYTES, HostIdentity
from perf.node import scratch
from perf.outside import end, free_port
from perf.workload import Skipped

__all__ = ["Volume", "embedded", "nvme_perf", "spdk"]

NQN = "nqn.2026-11.io.forebay:perf"
_IDENT = "6f1a3c4e-7d0e-4c35-9a1f-2f8b6a0d1e01"
HOST = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{_IDENT}", _IDENT)
_START_S = 20.0


@dataclass(frozen=True, slots=True)
class Volume:
    """A served volume, NSID 1 of `NQN`. ``pid`` is the target's."""

    port: int
    pid: int
    what: str

    def transport(self, options: NvmeTcpOptions | None = None) -> NvmeTcpTransport:
        """Our initiator on it."""
        return NvmeTcpTransport(SubsystemAddress("127.0.0.1", self.port, NQN), HOST, options=options)

    @property
    def address(self) -> str:
        """As SPDK's tools take it."""
        return f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{self.port} subnqn:{NQN} hostnqn:{HOST.nqn}"


@contextmanager
def embedded(parent: Path, size_bytes: int) -> Iterator[Volume]:
    """The embedded target with a raw volume on ``parent``'s file system."""
    with scratch(parent) as folder:
        volume = folder / "volume"
        volume.touch()
        os.truncate(volume, size_bytes)
        command = [sys.executable, "-m", "forebay.appliance.dataplane.target", "--socket", str(folder / "t.sock")]
        with _process([*command, "--log", str(folder / "log")], folder / "t.sock", folder / "log") as (pid, rpc):
            rpc.nvmf_create_transport(trtype="TCP", max_io_size=64 << 20)
            rpc.bdev_aio_create(name="v", filename=str(volume), block_size=LBA_BYTES)
            rpc.forebay_bdev_set_mode(name="v", mode="raw")
            yield Volume(_serve(rpc), pid, "embedded target")


@contextmanager
def spdk(size_bytes: int, *, interrupt_mode: bool) -> Iterator[Volume]:
    """SPDK's target with a malloc volume. Raises `Skipped` without ``FOREBAY_SPDK_TGT``."""
    binary = os.environ.get("FOREBAY_SPDK_TGT")
    if not binary:
        raise Skipped("SPDK's target is not here: set FOREBAY_SPDK_TGT to the path of nvmf_tgt")
    with scratch(Path(tempfile.gettempdir())) as folder:
        memory_mib = (size_bytes >> 20) + 1024
        command = [binary, "-m", "0x1", "-r", str(folder / "t.sock"), "-u", "--no-huge", "-s", str(memory_mib)]
        if interrupt_mode:
            command += ["--interrupt-mode"]
        with _process(command, folder / "t.sock", folder / "log") as (pid, rpc):
            rpc.nvmf_create_transport(trtype="TCP")
            rpc.bdev_malloc_create(name="v", num_blocks=size_bytes // LBA_BYTES, block_size=LBA_BYTES)
            yield Volume(_serve(rpc), pid, f"SPDK {rpc.spdk_get_version()['version']}")


def nvme_perf() -> str:
    """SPDK's own initiator, ``spdk_nvme_perf``. Raises `Skipped` without ``FOREBAY_SPDK_PERF``."""
    found = os.environ.get("FOREBAY_SPDK_PERF")
    if not found or not shutil.which(found):
        raise Skipped("SPDK's initiator is not here: set FOREBAY_SPDK_PERF to the path of spdk_nvme_perf")
    return found


def _serve(rpc: Any) -> int:
    port = free_port()
    rpc.nvmf_create_subsystem(nqn=NQN, serial_number="P1", model_number="perf", allow_any_host=True)
    rpc.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "v", "nsid": 1, "nguid": uuid.uuid4().hex.upper()})
    listen = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    rpc.nvmf_subsystem_add_listener(nqn=NQN, listen_address=listen)
    return port


@contextmanager
def _process(command: list[str], control: Path, log: Path) -> Iterator[tuple[int, Any]]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            until = time.monotonic() + _START_S
            while not _listens(control):
                if process.poll() is not None or time.monotonic() > until:
                    raise Skipped(f"{Path(command[0]).name} did not start: {log.read_text()[-500:]}")
                time.sleep(0.05)
            with JSONRPCClient(str(control)) as rpc:
                yield process.pid, rpc
        finally:
            end(process)


def _listens(control: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:  # SPDK's client leaves its socket open when it cannot connect
        return probe.connect_ex(str(control)) == 0
