"""Which target a node has: what supervises it and what drives it, as the configuration says."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from forebay.appliance.config import Config
from forebay.appliance.dataplane.embedded import EmbeddedTarget
from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.nvmf_target import NvmfTarget
from forebay.appliance.dataplane.spdk import MAX_IO_BYTES, QosLimits, SpdkTarget
from forebay.appliance.dataplane.spdk_program import SpdkProgram
from forebay.appliance.dataplane.spdk_stores import StoreDrive
from forebay.appliance.dataplane.subsystems import Listener, TransportLimits
from forebay.appliance.dataplane.supervisor import TARGET_COMMAND, AttachedTarget, EmbeddedProgram, Supervisor
from forebay.appliance.trace import Tracer
from forebay.errors import ConfigInvalid

__all__ = ["drive_target", "supervise_target"]

_STORE_TABLES_BYTES = 64 << 20


def supervise_target(config: Config, node_id: bytes, on_restart: Callable[[], Awaitable[None]]) -> Supervisor:
    """Who finds or starts the node's target, and watches it; not started yet.

    Raises `ConfigInvalid` where the program that it should start is none.
    """
    run_dir, target, spdk = config.data / "run", config.target, config.nvmf_tgt
    if target.kind == "embedded":
        options = (
            *("--max-connections", str(target.max_connections)),
            *("--buffer-bytes", str(target.buffer_bytes)),
            *("--log-level", config.log.level, "--log-format", config.log.format),
        )
        return Supervisor(run_dir, node_id, on_restart, program=EmbeddedProgram((*TARGET_COMMAND, *options)))
    if spdk.binary is not None and spdk.socket is None and shutil.which(spdk.binary) is None:
        text = f"nvmf_tgt.binary: {spdk.binary} is no program that can be run"
        raise ConfigInvalid(text, field="nvmf_tgt.binary")
    program = SpdkProgram(
        spdk.binary or Path("nvmf_tgt"),
        spdk.core_mask,
        spdk.memory_bytes,
        spdk.interrupt_mode,
        spdk.hugepages,
        pci=any((drive.bdev or "").startswith("nvme:") for drive in config.drives),
    )
    if spdk.socket is not None:
        return AttachedTarget(run_dir, node_id, on_restart, socket=spdk.socket, program=program)
    return Supervisor(run_dir, node_id, on_restart, program=program)


def drive_target(config: Config, socket: Path, node_id: bytes, tracer: Tracer | None) -> NvmfTarget:
    """The driver of the target whose control socket that is."""
    target, spdk = config.target, config.nvmf_tgt
    timeout_s = target.rpc_timeout_ms / 1000
    rpc = JsonRpcClient(socket, timeout_s=timeout_s, tracer=tracer)
    node, listen = node_id.hex()[:16], target.listen
    keys, directory = None, config.data / "run" / "keys"
    if target.authentication == "dhchap":
        keys = HostKeyFiles(directory, node)
    else:
        HostKeyFiles.clear(directory, node)  # of a daemon that had it and did not stop as it should
    if target.kind == "embedded":
        limits = TransportLimits(max_io_bytes=target.max_command_bytes, in_capsule_bytes=target.in_capsule_bytes)
        return EmbeddedTarget(rpc, node=node, address=listen.host, port=listen.port, limits=limits, keys=keys)
    rdma = spdk.rdma_listen
    return SpdkTarget(
        rpc,
        node=node,
        address=listen.host,
        port=listen.port,
        limits=TransportLimits(
            max_io_bytes=min(target.max_command_bytes, MAX_IO_BYTES), in_capsule_bytes=target.in_capsule_bytes
        ),
        listeners=[Listener("RDMA", rdma.host, rdma.port)] if rdma is not None else [],
        stores=[
            _store(f"drive{i}", drive.bdev, drive.capacity_bytes)
            for i, drive in enumerate(config.drives)
            if drive.bdev is not None
        ],
        qos=QosLimits(spdk.volume_ios_per_s, spdk.volume_read_bytes_per_s, spdk.volume_write_bytes_per_s),
        timeout_s=timeout_s,
        keys=keys,
    )


def _store(name: str, bdev: str, capacity_bytes: int | None) -> StoreDrive:
    kind, _, where = bdev.partition(":")
    # room for the store's tables and for the clusters with the labels of some volumes
    size_bytes = (capacity_bytes or 0) + _STORE_TABLES_BYTES if kind == "malloc" else 0
    return StoreDrive(name, kind, where, size_bytes)
