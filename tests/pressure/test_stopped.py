"""Processes that are stopped and go on later: calls end by their deadlines, and what goes on finds its place again."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from forebay.client import Client, ClientOptions
from forebay.client.transports.options import NvmeTcpOptions
from tests.client.conftest import halted
from tests.pressure.conftest import CALM, HANG_S, Node, eventually

DEADLINE_MS = 500
OPTIONS = ClientOptions(
    deadline_ms=DEADLINE_MS, connect_ms=10_000, attempt_ms=10_000, nvme_tcp=NvmeTcpOptions(keep_alive_ms=1_500)
)


def calls(client: Client, key: bytes, value: bytes) -> set[str]:
    """Put and get with little time; the outcomes. Each call ends soon after its deadline; a hit has the right bytes."""
    said = set()
    for _ in range(3):
        began_s = time.monotonic()
        said.add(client.put([key], [value])[0].reason)
        (got,) = client.get([key])
        said.add(got.reason)
        assert not got.hit or bytes(got.value or b"") == value
        assert time.monotonic() - began_s < 2 * DEADLINE_MS / 1000 + HANG_S
    return said


@pytest.mark.parametrize("which", ["daemon", "target"])
def test_a_part_of_the_node_stops(node: Node, which: str) -> None:
    """Until it goes on there are misses; then the client works again, and nothing was started anew."""
    process = node.daemon if which == "daemon" else node.target
    pids = (node.daemon.pid, node.target_pid)
    with node.leaving_nothing(slack=8), node.connect(options=OPTIONS) as client:
        value = which.encode() * 100_000
        kept = f"{which}/before".encode()
        eventually(lambda: client.put([kept], [value])[0].present, "it works")
        with halted(process.pid):
            said = calls(client, f"{which}/during".encode(), value)
        assert said <= {"deadline_exceeded", "unavailable", "absent", "connection_lost", "busy", "ok", "pending"}
        assert said & {"deadline_exceeded", "unavailable", "connection_lost"}
        eventually(lambda: client.get([kept])[0].hit, "it works again")
        assert bytes(client.get([kept], deadline_ms=60_000)[0].value or b"") == value
        assert (node.daemon.pid, node.target_pid) == pids


@pytest.mark.long
def test_a_client_stops_for_longer_than_its_session_lives(node: Node) -> None:
    """What it held is given back, others go on; when it goes on it has a new session, and the right bytes."""
    with node.leaving_nothing(slack=8), node.connect(options=CALM) as owner, node.connect(options=CALM) as other:
        command = [sys.executable, "-m", "tests.client.engine", node.url, node.token, owner.join_token.hex()]
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert engine.stdin is not None and engine.stdout is not None

        def ask(line: str) -> str:
            assert engine.stdin is not None and engine.stdout is not None
            engine.stdin.write(line + "\n")
            engine.stdin.flush()
            return engine.stdout.readline().strip()

        assert engine.stdout.readline().strip() == "joined"
        assert ask("put theirs") == "ok"
        owner.close()  # who opened it ends it: the engine's process has to find one of its own
        with halted(engine.pid):
            eventually(lambda: node.held()["sessions"] == 1, "the session is gone")
            eventually(lambda: node.held()["hosts"] == 1, "its hosts are gone")
            assert bytes(other.get([b"theirs"])[0].value or b"") == b"theirs" * 3000
        assert ask("get theirs") == f"ok {(b'theirs' * 3000).hex()}"
        assert ask("put more") == "ok"
        assert bytes(other.get([b"more"])[0].value or b"") == b"more" * 3000
        engine.stdin.close()
        assert engine.wait(60) == 0
        engine.stdout.close()
