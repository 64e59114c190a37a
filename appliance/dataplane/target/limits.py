"""Limits of the target process, all in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, fields

from forebay.errors import ConfigInvalid
from forebay.ids import LBA_BYTES
from forebay.nvmetcp.connection import MIN_MAX_H2C_DATA_BYTES

__all__ = ["TargetLimits"]


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What the target admits. Raises `ConfigInvalid` for values that do not make sense.

    A connection that does nothing holds no buffer. One that does holds two of `chunk_bytes` at most, and up to
    `open_writes` + 1 as long as all together hold less than `buffer_bytes`.
    """

    max_connections: int = 1024
    """Transport connections (queues) of all hosts together, if the process may open so many files; the Connect of one
    above is answered Controller Busy, or its socket closed at once while many are."""
    max_queue_depth: int = 128
    """Entries of a submission queue (CAP.MQES, MAXCMD)."""
    max_io_queues: int = 16
    """I/O queues of one controller."""
    max_command_bytes: int = 64 << 20
    """Most data of one Read or Write (MDTS is the power of two at or below)."""
    in_capsule_bytes: int = 8192
    """In-capsule data on I/O queues (IOCCSZ)."""
    max_h2c_data_bytes: int = 1 << 20
    """Data of one H2CData PDU (MAXH2CDATA)."""
    chunk_bytes: int = 1 << 20
    """Media and socket alternate in pieces of this size where data passes through a buffer."""
    buffer_bytes: int = 256 << 20
    """Buffers that are kept for the next command, and beyond which a connection has no more than it needs to get on."""
    open_writes: int = 3
    """Writes of one queue that may hold a buffer, each with its R2T open; further ones wait for their R2T."""
    io_timeout_s: float = 30.0
    """A peer that takes or gives no byte for so long in the middle of a PDU loses its connection."""
    digests: int = 3
    """Digests that a host may have: 1 of headers, 2 of data, 3 both, 0 none."""
    connect_timeout_s: float = 10.0
    """A new connection has so long, all in all, until its Connect command is here."""
    proof_timeout_s: float = 60.0
    """And so long until its host has proven who it is, if it has to: large groups take a slow host seconds."""

    def __post_init__(self) -> None:
        for name in ("in_capsule_bytes", "max_command_bytes", "max_h2c_data_bytes", "chunk_bytes"):
            if getattr(self, name) % LBA_BYTES:
                raise ConfigInvalid(f"{name} is no multiple of {LBA_BYTES}", field=name, limit=LBA_BYTES)
        ranges = {
            "max_connections": (1, 65_535),
            "max_queue_depth": (2, 65_536),
            "max_io_queues": (1, 65_534),
            "max_command_bytes": (LBA_BYTES, 65_536 * LBA_BYTES),
            "in_capsule_bytes": (0, 1 << 20),
            "max_h2c_data_bytes": (MIN_MAX_H2C_DATA_BYTES, 1 << 30),
            "chunk_bytes": (LBA_BYTES, 64 << 20),
            "buffer_bytes": (LBA_BYTES, 1 << 40),
            "open_writes": (1, 128),
            "digests": (0, 3),
            "io_timeout_s": (0.01, 3600),
            "connect_timeout_s": (0.01, 3600),
            "proof_timeout_s": (0.01, 3600),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}", field=name, limit=f"{low} to {high}")
        if self.in_capsule_bytes > self.chunk_bytes:
            raise ConfigInvalid(
                "in-capsule data must fit into a buffer", field="in_capsule_bytes", limit=self.chunk_bytes
            )

    @property
    def mdts(self) -> int:
        """MDTS of Identify Controller: log2 of 4 KiB pages; 0 (no limit) when a command cannot ask for more anyway."""
        pages = self.max_command_bytes // LBA_BYTES
        return 0 if pages >= 65_536 else max(1, pages.bit_length() - 1)

    def to_dict(self) -> dict[str, int | float]:
        """All limits by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
