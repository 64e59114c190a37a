"""Settings of a client."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from forebay.client.transports.block_device import BlockDeviceOptions
from forebay.client.transports.options import NvmeRdmaOptions, NvmeTcpOptions
from forebay.errors import InvalidArgument

__all__ = ["TRANSPORTS", "ClientOptions", "Verify"]

TRANSPORTS = ("auto", "block", "rdma", "tcp")

Verify = Literal["always", "sample", "never"]
"""When checksums of what is read are looked at."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings that have a good default.

    Attributes:
        deadline_ms: of a data call that names none.
        connect_ms: of opening a session, the first time and after it was lost.
        attempt_ms: how long one attempt to reach the node may take at least. Calls wait for it, so an engine wants it
            short and a person at a distant node long. Opening the first session makes as many as there is time for.
        lease_ttl_ms: how long extents to read are leased; 0 leaves it to the node.
        write_ttl_ms: by when an allocated block must be committed; 0 leaves it to the node.
        wait_pending_ms: how long `put` waits for a block that another writer is writing before it reports it as such.
        call_stream: whether calls go by one stream where the node takes it, which costs half as much; each by itself
            otherwise.
        batch_bytes: `get` and `put` work through longer batches in parts of about this size.
        staging_bytes: what is read for a device's memory by a transport that reaches only the host's comes in parts of
            about this size, of which two are in pinned memory at a time.
        verify: when checksums of what is read are looked at: ``always``, ``sample`` (one block in ``verify_one_in``),
            or ``never``. It counts where the target refuses reads without a lease (it says so, and neither of today's
            does) and ``transport`` lets no block device pass it by; everywhere else it is always, since a stale read
            would go unnoticed.
        client: free text for the node's operator: engine, version, host.
        transport: ``auto``, or the one kind of transport that reads may use: block, rdma or tcp (docs/transports.md).
            The environment's FOREBAY_TRANSPORT where nothing is said.
        nvme_tcp: settings of the initiator over TCP.
        nvme_rdma: settings of the initiator over RDMA.
        block: settings of reads by block device.
    """

    deadline_ms: int = 10_000
    connect_ms: int = 5_000
    attempt_ms: int = 100
    lease_ttl_ms: int = 0
    write_ttl_ms: int = 0
    wait_pending_ms: int = 0
    call_stream: bool = True
    batch_bytes: int = 256 << 20
    staging_bytes: int = 32 << 20
    verify: Verify = "always"
    verify_one_in: int = 16
    client: str = ""
    transport: str = field(default_factory=lambda: os.environ.get("FOREBAY_TRANSPORT") or "auto")
    nvme_tcp: NvmeTcpOptions = field(default_factory=NvmeTcpOptions)
    nvme_rdma: NvmeRdmaOptions = field(default_factory=NvmeRdmaOptions)
    block: BlockDeviceOptions = field(default_factory=BlockDeviceOptions)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("deadline_ms", 1, 600_000),
            ("connect_ms", 1, 600_000),
            ("attempt_ms", 1, 600_000),
            ("lease_ttl_ms", 0, 0xFFFFFFFF),
            ("write_ttl_ms", 0, 0xFFFFFFFF),
            ("wait_pending_ms", 0, 600_000),
            ("batch_bytes", 1, 1 << 40),
            ("staging_bytes", 1, 1 << 40),
            ("verify_one_in", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}", field=name, limit=f"{low} to {high}")
        if self.transport not in TRANSPORTS:
            raise InvalidArgument(f"transport is {self.transport!r}", field="transport", limit=" or ".join(TRANSPORTS))
        if self.verify not in get_args(Verify):
            raise InvalidArgument(f"verify is {self.verify!r}", field="verify", limit=" or ".join(get_args(Verify)))
