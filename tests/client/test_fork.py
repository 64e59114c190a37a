"""A client in a process that was forked (ADR 8): its calls end at once, and it takes nothing from the other's."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.client.scripted_node import ScriptedNode

SCRIPT = """
import os, sys
from forebay.client import ClientOptions, connect

url, token = sys.argv[1:]
options = ClientOptions(deadline_ms=60_000, connect_ms=20_000, attempt_ms=5_000)
with connect(url, token=token, options=options) as client:
    assert client.put([b"k"], [b"v" * 5000])[0].stored
    assert client.get([b"k"])[0].hit
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print(client.get([b"k"])[0].reason, client.put([b"new"], [b"v"])[0].reason)
        client.close()
        with connect(url, token=token, options=options) as own:
            print(own.get([b"k"])[0].reason)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert client.get([b"k"])[0].hit
    print("reconnects", client.stats.reconnects)
"""


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    with ScriptedNode() as node:
        yield node


def test_a_forked_client(node: ScriptedNode) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, node.url, node.token]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == ["unavailable unavailable", "ok", "reconnects 0"]
    assert done.returncode == 0
