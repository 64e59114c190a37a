"""SPDK's ``nvmf_tgt`` as a process of the node's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import spdk_identity
from forebay.appliance.dataplane.supervisor import TargetProgram

__all__ = ["SpdkProgram"]


@dataclass(frozen=True, slots=True)
class SpdkProgram(TargetProgram):
    """How ``nvmf_tgt`` is started: which one, on which cores (a mask such as ``0x3``), with how much memory."""

    binary: Path
    core_mask: str = "0x1"
    memory_bytes: int = 1 << 30
    interrupt_mode: bool = True
    hugepages: bool = False
    pci: bool = False
    """Whether it looks for NVMe drives on the PCI bus."""

    def command(self, socket: Path, log_file: Path) -> list[str]:
        found = [str(self.binary), "-r", str(socket), "-m", self.core_mask, "-s", str(self.memory_bytes >> 20)]
        if not self.pci:
            found.append("-u")
        if not self.hugepages:
            found.append("--no-huge")
        if self.interrupt_mode:
            # it sleeps when there is nothing to do, so that its cores need not be its own
            found += ["--interrupt-mode", "--disable-cpumask-locks"]
        return found

    async def probe(self, rpc: JsonRpcClient) -> tuple[int, str]:
        _, pid, boot_id = await spdk_identity(rpc)
        return pid, boot_id
