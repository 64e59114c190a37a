"""Settings of the NVMe/TCP initiator."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import InvalidArgument
from forebay.ids import LBA_BYTES

__all__ = ["MAX_COMMAND_BYTES", "NvmeTcpOptions"]

MAX_COMMAND_BYTES = LBA_BYTES << 16
"""The longest Read or Write: NLB has 16 bits and is 0's based. NVM §3.2.4."""


@dataclass(frozen=True, slots=True)
class NvmeTcpOptions:
    """Settings of the initiator.

    ``connections``: I/O queues at most, for all threads together. ``call_connections``: how many of them one call uses
    if it is long enough for ``queue_bytes`` on each; more of them cost the target more CPU time and are worth it only
    where one TCP stream does not fill the network. ``max_command_bytes``: neighbouring ranges become one command up to
    this, and longer ones several. ``queue_bytes``: bytes asked for on one queue at a time.
    ``keep_alive_ms``: KATO. ``backoff_ms``: first and longest wait after a failed connect.
    ``header_digest``, ``data_digest``: CRC-32C over what crosses the network, both ways; a target that offers none is
    refused then. Tiles have checksums of their own, so these only tell damage on the way from damage on the drive, and
    cost a second pass over the data.
    """

    connections: int = 4
    call_connections: int = 2
    max_command_bytes: int = 4 << 20
    queue_bytes: int = 8 << 20
    keep_alive_ms: int = 15_000
    backoff_ms: tuple[int, int] = (50, 2_000)
    header_digest: bool = False
    data_digest: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("connections", 1, 256),
            ("call_connections", 1, 256),
            ("max_command_bytes", LBA_BYTES, MAX_COMMAND_BYTES),
            ("queue_bytes", 1, 1 << 40),
            ("keep_alive_ms", 30, 0xFFFFFFFF),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}", field=f"nvme_tcp.{name}", limit=f"{low} to {high}")
        if self.max_command_bytes % LBA_BYTES:
            raise InvalidArgument(
                f"max_command_bytes is {self.max_command_bytes}",
                field="nvme_tcp.max_command_bytes",
                limit=f"multiples of {LBA_BYTES}",
            )
        if not 1 <= self.backoff_ms[0] <= self.backoff_ms[1]:
            raise InvalidArgument(
                f"backoff_ms is {self.backoff_ms}", field="nvme_tcp.backoff_ms", limit="1 <= first <= last"
            )
