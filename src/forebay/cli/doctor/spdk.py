"""Checks of SPDK's target: the program, what it needs of the machine, and the drives that it drives itself."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

from forebay.appliance.config import Config, DriveConfig, NvmfTgtConfig
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import spdk_identity
from forebay.cli.doctor.finding import Finding, fail, ok, warn
from forebay.cli.sizes import format_size
from forebay.errors import ForebayError

__all__ = ["check_spdk"]

_ANSWERS_S = 5.0
_USER_DRIVERS = ("vfio-pci", "uio_pci_generic", "igb_uio")


def check_spdk(config: Config, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Of a node whose ``target.kind`` is ``spdk``, or whose settings say so; ``root`` is where /proc and /sys lie."""
    spdk = config.nvmf_tgt
    if config.target.kind != "spdk":
        if spdk != NvmfTgtConfig():
            yield warn(
                "nvmf_tgt",
                f"[nvmf_tgt] is not used: target.kind is {config.target.kind}",
                'target.kind = "spdk" uses it',
            )
        return
    if spdk.socket is not None:
        yield asyncio.run(_answers(spdk.socket))
    elif spdk.binary is not None:
        yield _program(spdk.binary)
        yield from _memory(spdk.memory_bytes, hugepages=spdk.hugepages, root=root)
    for drive in config.drives:
        if drive.bdev is not None:
            yield from _drive(drive, drive.bdev, hugepages=spdk.hugepages, quiet=spdk.interrupt_mode, root=root)


async def _answers(socket: Path) -> Finding:
    rpc = JsonRpcClient(socket, timeout_s=_ANSWERS_S)
    try:
        version, pid, _ = await spdk_identity(rpc)
    except ForebayError as error:
        return fail("nvmf_tgt", f"{socket}: {error.message}", "start it, or set nvmf_tgt.socket to where it listens")
    finally:
        await rpc.close()
    return ok("nvmf_tgt", f"{version} answers on {socket}, pid {pid}")


def _program(binary: Path) -> Finding:
    if not binary.is_file() or not os.access(binary, os.X_OK):
        return fail(
            "nvmf_tgt", f"{binary} is no program that can be run", "set nvmf_tgt.binary to SPDK's build/bin/nvmf_tgt"
        )
    return ok("nvmf_tgt", f"{binary}")


def _memory(wanted_bytes: int, *, hugepages: bool, root: Path) -> Iterator[Finding]:
    found = dict(re.findall(r"^(\w+):\s+(\d+)", (root / "proc/meminfo").read_text(), re.MULTILINE))
    if hugepages:
        free_bytes = int(found.get("HugePages_Free", 0)) * int(found.get("Hugepagesize", 0)) << 10
        what, fix = (
            "huge pages",
            f"sysctl vm.nr_hugepages={-(-wanted_bytes // (2 << 20))}, or nvmf_tgt.hugepages = false",
        )
    else:
        free_bytes = int(found.get("MemAvailable", 0)) << 10
        what, fix = "memory", "a smaller nvmf_tgt.memory"
    text = f"{format_size(free_bytes)} of {what} free, {format_size(wanted_bytes)} wanted by nvmf_tgt"
    yield ok("nvmf_tgt memory", text) if free_bytes >= wanted_bytes else fail("nvmf_tgt memory", text, fix)


def _drive(drive: DriveConfig, bdev: str, *, hugepages: bool, quiet: bool, root: Path) -> Iterator[Finding]:
    kind, _, where = bdev.partition(":")
    if kind == "nvme":
        driver = root / "sys/bus/pci/devices" / where / "driver"
        name = driver.resolve().name if driver.exists() else ""
        if not driver.parent.exists():
            yield fail(bdev, f"there is no PCI device {where}", "`lspci -D | grep -i nvme` shows those that there are")
        elif name not in _USER_DRIVERS:
            fix = f"PCI_ALLOWED={where} scripts/setup.sh of SPDK, when nothing on it is needed"
            yield fail(bdev, f"{where} belongs to {name or 'no driver'}, not to SPDK", fix)
        elif not hugepages:
            yield fail(bdev, "SPDK drives NVMe only with huge pages", "nvmf_tgt.hugepages = true")
        else:
            yield ok(bdev, f"{where}, by {name}")
        return
    if kind == "malloc":
        yield warn(bdev, "memory that goes with the target", "another kind of drive, unless this is a test")
    elif not Path(where).exists():
        yield fail(bdev, f"{where} does not exist", f"truncate -s SIZE {where}, or another path")
    else:
        yield ok(bdev, f"{where} is there")
    if quiet and kind in ("uring", "malloc"):
        yield warn(bdev, f"{kind} keeps a core busy in interrupt mode, too", "aio, or nvmf_tgt.interrupt_mode = false")
