"""Settings of the NVMe-oF initiators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forebay.errors import InvalidArgument
from forebay.ids import LBA_BYTES
from forebay.nvmerdma import MAX_KEYED_BYTES

__all__ = ["MAX_COMMAND_BYTES", "FabricsOptions", "NvmeRdmaOptions", "NvmeTcpOptions"]

MAX_COMMAND_BYTES = LBA_BYTES << 16
"""The longest Read or Write: NLB has 16 bits and is 0's based. NVM §3.2.4."""


@dataclass(frozen=True, slots=True)
class FabricsOptions:
    """Settings of an initiator, whatever the wire.

    ``connections``: I/O queues at most, for all threads together. ``call_connections``: how many of them one call uses
    if it is long enough for ``queue_bytes`` on each; more of them cost the target more CPU time and are worth it only
    where one connection does not fill the network. ``max_command_bytes``: neighbouring ranges become one command up to
    this, and longer ones several. ``queue_bytes``: bytes asked for on one queue at a time.
    ``keep_alive_ms``: KATO. ``backoff_ms``: first and longest wait after a failed connect.
    """

    SECTION: ClassVar[str] = "fabrics"
    MOST_COMMAND_BYTES: ClassVar[int] = MAX_COMMAND_BYTES

    connections: int = 4
    call_connections: int = 2
    max_command_bytes: int = 4 << 20
    queue_bytes: int = 8 << 20
    keep_alive_ms: int = 15_000
    backoff_ms: tuple[int, int] = (50, 2_000)

    def __post_init__(self) -> None:
        self._within("connections", 1, 256)
        self._within("call_connections", 1, 256)
        self._within("max_command_bytes", LBA_BYTES, self.MOST_COMMAND_BYTES)
        self._within("queue_bytes", 1, 1 << 40)
        self._within("keep_alive_ms", 30, 0xFFFFFFFF)
        self._multiple("max_command_bytes")
        if not 1 <= self.backoff_ms[0] <= self.backoff_ms[1]:
            raise InvalidArgument(
                f"backoff_ms is {self.backoff_ms}", field=f"{self.SECTION}.backoff_ms", limit="1 <= first <= last"
            )

    def _within(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise InvalidArgument(f"{name} is {value}", field=f"{self.SECTION}.{name}", limit=f"{low} to {high}")

    def _multiple(self, name: str) -> None:
        value = getattr(self, name)
        if value % LBA_BYTES:
            raise InvalidArgument(
                f"{name} is {value}", field=f"{self.SECTION}.{name}", limit=f"multiples of {LBA_BYTES}"
            )


@dataclass(frozen=True, slots=True)
class NvmeTcpOptions(FabricsOptions):
    """Settings of the NVMe/TCP initiator, beside those of `FabricsOptions`.

    ``header_digest``, ``data_digest``: CRC-32C over what crosses the network, both ways; a target that offers none is
    refused then. Tiles have checksums of their own, so these only tell damage on the way from damage on the drive, and
    cost a second pass over the data.
    """

    SECTION: ClassVar[str] = "nvme_tcp"

    header_digest: bool = False
    data_digest: bool = False


@dataclass(frozen=True, slots=True)
class NvmeRdmaOptions(FabricsOptions):
    """Settings of the NVMe/RDMA initiator, beside those of `FabricsOptions`.

    ``staging_bytes``: registered memory of each queue, by way of which everything goes that is not in registered
    memory of the caller. ``direct_bytes``: shorter runs of registered memory go by way of it, too, since each run is a
    command. ``source``: own address to come from, which selects the device; None leaves it to the routes.
    ``device_memory``: the RDMA device reaches the memory of GPUs (GPUDirect RDMA), and reads into it go there straight.
    """

    SECTION: ClassVar[str] = "nvme_rdma"
    MOST_COMMAND_BYTES: ClassVar[int] = MAX_KEYED_BYTES // LBA_BYTES * LBA_BYTES

    max_command_bytes: int = 1 << 20
    staging_bytes: int = 8 << 20
    direct_bytes: int = 64 << 10
    source: str | None = None
    device_memory: bool = False

    def __post_init__(self) -> None:
        FabricsOptions.__post_init__(self)
        self._within("staging_bytes", self.max_command_bytes, 1 << 40)
        self._within("direct_bytes", LBA_BYTES, 1 << 40)
        self._multiple("staging_bytes")
        self._multiple("direct_bytes")
