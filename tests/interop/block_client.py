"""A client that reads by the kernel's block device, while that is taken away from it in several ways.

Runs in the guest. Prints what it found as lines; the first thing that is wrong ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from forebay.client import Client, ClientOptions
from forebay.client import client as client_module
from forebay.client.session import Opening
from forebay.client.transports.base import Segment, Transport, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import KINDS, nvme_tcp, tcp_kind
from forebay.clock import Clock
from forebay.errors import TargetRefused
from forebay.ids import HostIdentity
from forebay.schema import Schema
from tests.interop.asking import SHARE, ask, until

DISK = Path("/sys/block/nvme0n1")
LONG_MS = 60_000
WANTED = json.loads((SHARE / "blocks.json").read_text())
"""The blocks: key to length and SHA-256."""


def outside(
    subsystem: SubsystemAddress, host: HostIdentity, nguids: Mapping[int, str], options: ClientOptions, clock: Clock
) -> Transport:
    """The node tells its own loopback address, which is another one from here."""
    return nvme_tcp(replace(subsystem, address="10.0.2.2"), host, nguids, options, clock)


client_module.__dict__["KINDS"] = tuple(tcp_kind(outside) if kind.name == "tcp" else kind for kind in KINDS)


def sectors_read() -> int:
    return int((DISK / "stat").read_text().split()[2])


def way(client: Client) -> tuple[str, str]:
    (found,) = client.transports()
    return found.transport, found.place


def read_all(client: Client, deadline_ms: int = LONG_MS) -> tuple[int, list[bytearray]]:
    """How many were hits; every hit is checked, and no miss is taken for one."""
    buffers = [bytearray(b"\xee" * one["length"]) for one in WANTED.values()]
    results = client.get_into([key.encode() for key in WANTED], buffers, deadline_ms=deadline_ms)
    for (key, one), buffer, result in zip(WANTED.items(), buffers, results, strict=True):
        if result.hit:
            assert hashlib.sha256(buffer).hexdigest() == one["sha256"], f"{key} has wrong bytes"
    return sum(result.hit for result in results), buffers


def main() -> None:
    options = ClientOptions(deadline_ms=LONG_MS, connect_ms=LONG_MS, attempt_ms=LONG_MS)
    opening = Opening("default/default", Schema.opaque(), 0)
    with Client(os.environ["URL"], opening, token=os.environ["TOKEN"], options=options) as client:
        until(lambda: way(client) == ("block", "/dev/nvme0n1"), "the device is found")
        before = sectors_read()
        assert read_all(client)[0] == len(WANTED)
        size = sum(one["length"] for one in WANTED.values())
        assert (sectors_read() - before) * 512 >= size, "they came by the device"
        assert not client.stats.fallbacks
        print(f"read {len(WANTED)} blocks, {size} bytes, by the device")

        value = os.urandom(300_000)
        assert client.put([b"from the guest"], [value])[0].stored
        before = sectors_read()
        (got,) = client.get([b"from the guest"])
        assert bytes(got.value or b"") == value
        assert (sectors_read() - before) * 512 >= len(value)
        print("written by NVMe/TCP, read by the device: no page of it was stale")

        route = next(iter(client._session.view.routes.values()))
        block = next(w.transport for w in route.transport._ways if w.kind.name == "block")  # type: ignore[attr-defined]
        op = WriteOp(route.nsid, 1 << 20, (Segment(memoryview(bytes(4096)), 4096),))
        assert isinstance(block.write([op], time.monotonic_ns() // 1_000_000 + LONG_MS)[0].error, TargetRefused)

        ask("silence")
        # The next answer to the kernel stops half-way: to one of these reads, or to the client's own look at the label.
        calls = [read_all(client, 3_000)]
        while way(client)[0] == "block" and len(calls) < 20:
            calls.append(read_all(client, 3_000))
        assert way(client)[0] == "tcp"
        assert client.stats.fallbacks == {"block": 1}
        assert read_all(client)[0] == len(WANTED)
        left = [[bytes(buffer) for buffer in buffers] for _, buffers in calls]
        print("a path that fell silent: NVMe/TCP took over")
        ask("restore")
        until(lambda: way(client)[0] == "block", "the kernel has connected again, and the device is used")
        assert [[bytes(buffer) for buffer in buffers] for _, buffers in calls] == left, "a late answer was written"
        assert read_all(client)[0] == len(WANTED)
        print("and back")

        subprocess.run(["nvme", "disconnect", "-n", os.environ["SUBSYSTEM"]], check=True)
        assert read_all(client)[0] == len(WANTED), "a device that is gone costs no read"
        assert way(client)[0] == "tcp"
        print("a device that was taken away: not one miss")
        where = ["-t", "tcp", "-a", "10.0.2.2", "-s", os.environ["PORT"], "-n", os.environ["SUBSYSTEM"]]
        who = ["-q", os.environ["HOSTNQN"], "-I", os.environ["HOSTID"]]
        subprocess.run(["nvme", "connect", *where, *who], check=True)
        until(lambda: way(client)[0] == "block", "it is found again")
        assert read_all(client)[0] == len(WANTED)
        print("and found again")
    print("done")


main()
