"""NVMe/RDMA to a target on another machine, which is lost: two guests, Soft-RoCE, a wire between them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.appliance.target.conftest import eventually
from tests.client.conftest import lasting_port
from tests.interop import checks
from tests.interop.checks import Check
from tests.interop.guest import Guest

pytestmark = [pytest.mark.interop, pytest.mark.long, pytest.mark.timeout(900)]

SUITE = Path(__file__).with_name("rdma_wire_suite.py")
TARGET, HOST = "10.99.0.1", "10.99.0.2"
SETTINGS = {"NQN": "nqn.2026-01.io.forebay:wire", "ADDRESS": TARGET, "PORT": 4420, "NETDEV": "eth1"}
UP_S = 180.0
LIMIT_S = 500


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Check]]:
    mounts = checks.mounts("ibverbs")
    directory = tmp_path_factory.mktemp("wire")
    target, host = directory / "target", directory / "host"
    checks.prepare(target, "rdma.sh", SETTINGS | {"MINE": TARGET, "CHECKS": "'device target stays'"})
    mine = {"MINE": HOST, "CHECKS": "'device suite'", "SUITE": SUITE.name, "KEYWORDS": "''"}
    checks.prepare(host, "rdma.sh", SETTINGS | mine)
    wire = lasting_port(), lasting_port()
    ready = threading.Event()
    with Guest(target, wire=wire) as peer:
        try:
            with checks.serving(target, {"ready": ready.set}):
                eventually(lambda: ready.is_set() or not peer.runs, "the target is up", UP_S)
            assert ready.is_set(), peer.log()
            with (
                checks.serving(host, {"pause": peer.pause, "resume": peer.resume}),
                Guest(host, mounts=mounts, memory_mib=1024, wire=wire[::-1]) as guest,
            ):
                text = guest.wait(LIMIT_S)
        finally:
            peer.resume()
            (target / "over").touch()
            told = peer.wait(60)
    print(told, text)  # shown if a test failed
    yield {**checks.read(text), "stays": checks.read(told)["stays"]}


def test_a_target_that_is_lost(run: dict[str, Check]) -> None:
    checks.passed(run, "device")
    assert re.search(r"^\d+ passed", checks.passed(run, "suite"), re.MULTILINE)


@pytest.mark.parametrize("side", ["suite", "stays"])
def test_neither_kernel_is_in_trouble(run: dict[str, Check], side: str) -> None:
    assert not re.findall(r"^.*(?:BUG|WARNING|Oops|Call Trace|refcount|hung task).*$", run[side].kernel, re.M)
