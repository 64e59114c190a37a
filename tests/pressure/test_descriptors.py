"""A node that may open 256 files in each of its processes: what is too much is refused, and nothing else notices."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.client import Client
from forebay.client.session import Opening
from forebay.errors import ForebayError
from forebay.schema import Schema
from tests.pressure.conftest import CALM, Node, Process, eventually

FILES = 256
CROWD = 400
"""Connections that come, of which most can have no descriptor."""


class SmallNode(Node):
    """A node under ``ulimit -n``."""

    program = ("bash", "-c", f'ulimit -n {FILES}; exec "$@"', "--", str(Path(sys.executable).with_name("forebay")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    node = SmallNode(tmp_path_factory.mktemp("small") / "data")
    yield node
    node.stop()


def works(client: Client) -> bool:
    key = f"{time.monotonic_ns()}".encode()
    value = key * 1000
    return client.put([key], [value])[0].stored and bytes(client.get([key])[0].value or b"") == value


def address(node: Node, which: str) -> tuple[str, int]:
    host, _, port = {"grpc": node.grpc, "nvme": node.nvme, "http": str(node.info["http"])}[which].rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("which", ["nvme", "grpc", pytest.param("http", marks=pytest.mark.long)])
def test_a_crowd_at_one_door(small: SmallNode, which: str) -> None:
    process: Process = small.target if which == "nvme" else small.daemon
    with small.connect(options=CALM) as client:
        assert works(client)
        before = process.descriptors
        crowd: list[socket.socket] = []
        try:
            for _ in range(CROWD):
                sock = socket.create_connection(address(small, which), timeout=60)
                sock.setblocking(False)
                crowd.append(sock)
            eventually(lambda: process.descriptors > FILES / 2, "the crowd is in")
            began_s, cpu_s = time.monotonic(), process.cpu_s
            while time.monotonic() - began_s < 1.5:
                assert works(client), "who is there goes on"
                time.sleep(0.1)
            busy = (process.cpu_s - cpu_s) / (time.monotonic() - began_s)
            assert busy < 0.9, f"{which}: the process spins"
            assert process.descriptors <= FILES
        finally:
            for sock in crowd:
                sock.close()
        eventually(lambda: process.descriptors <= before + 4, "descriptors are free again")
        assert works(client)
    eventually(lambda: came_in(small), "others come in again")


def came_in(node: Node) -> bool:
    try:
        with Client(node.url, Opening("default/default", Schema.opaque(), 0), token=node.token, options=CALM) as client:
            return works(client)
    except ForebayError:
        return False
