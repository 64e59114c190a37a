"""Volumes as Linux's block devices: a node here, its volumes attached in the guest, a client there that reads them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator

import pytest

from forebay.client import ClientOptions
from forebay.testing.proxy import Action, Cut, FaultProxy, Moment
from forebay.testing.steps import NvmeTcpSteps
from tests.client.conftest import NodeProcess, new_host
from tests.interop import checks, guest
from tests.interop.checks import Check

pytestmark = [pytest.mark.interop, pytest.mark.long, pytest.mark.timeout(900)]

LIMIT_S = 500
SIZES = (1, 4096, 5000, 65_536, 1_000_000, 3 << 20)
OPTIONS = ClientOptions(deadline_ms=30_000, connect_ms=30_000, attempt_ms=30_000)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Check]]:
    mounts = checks.mounts("grpc")
    directory = tmp_path_factory.mktemp("block")
    share = directory / "share"
    host = new_host()
    node = NodeProcess(directory / "data", FOREBAY_TARGET_ATTACHED_HOSTS=f"default/{host.nqn}")
    blocks = {f"block {i}": os.urandom(size) for i, size in enumerate(SIZES)}
    try:
        with node.connect(options=OPTIONS) as client:
            stored = client.put([key.encode() for key in blocks], list(blocks.values()))
            assert all(one.stored for one in stored)
            (endpoint,) = client._session.view.reply.endpoints
        with FaultProxy((endpoint.address, endpoint.port), NvmeTcpSteps) as proxy:
            # Everything of the device goes by the proxy, nothing of the client's own transport.
            settings = {"SUBSYSTEM": endpoint.subsystem_nqn, "PORT": proxy.port, "HOSTNQN": host.nqn}
            settings |= {"HOSTID": host.host_id, "TOKEN": node.token}
            settings |= {"URL": f"forebay://10.0.2.2:{node.grpc.rpartition(':')[2]}"}
            checks.prepare(share, "block.sh", settings)
            wanted = {k: {"length": len(v), "sha256": hashlib.sha256(v).hexdigest()} for k, v in blocks.items()}
            (share / "blocks.json").write_text(json.dumps(wanted))
            silence = Cut("read.c2h_data", Moment.INSIDE, Action.SILENCE)
            actions = {"silence": lambda: proxy.arm(silence), "restore": lambda: proxy.arm(None)}
            with checks.serving(share, actions):
                text = guest.boot(share, LIMIT_S, mounts=mounts, memory_mib=1024)
            print(text)  # shown if a test failed
            yield checks.read(text)
    finally:
        node.stop()


def test_the_kernel_attaches_the_volume(run: dict[str, Check]) -> None:
    checks.passed(run, "attach")
    assert not checks.complaints(run["attach"])


def test_the_kernel_cannot_write(run: dict[str, Check]) -> None:
    checks.passed(run, "only_read")
    assert re.search(r"I/O Cmd\(0x1\) @ LBA 20000, .*sct 0x2 / sc 0x86\) DNR", run["only_read"].kernel)


@pytest.mark.parametrize(
    "line",
    [
        f"read {len(SIZES)} blocks, {sum(SIZES)} bytes, by the device",
        "written by NVMe/TCP, read by the device: no page of it was stale",
        "a path that fell silent: NVMe/TCP took over",
        "and back",
        "a device that was taken away: not one miss",
        "and found again",
        "done",
    ],
)
def test_a_client_reads_by_the_device(run: dict[str, Check], line: str) -> None:
    check = run["client"]
    assert line in check.output.splitlines(), check.output


def test_the_client_came_to_its_end(run: dict[str, Check]) -> None:
    checks.passed(run, "client")
    assert not re.search(r"BUG|WARNING|Oops|Call Trace", run["client"].kernel)
