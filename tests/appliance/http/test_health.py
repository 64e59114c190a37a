"""Liveness and readiness."""

import asyncio
from typing import Any, cast

import httpx
import pytest

from forebay.appliance.control.health import Health
from forebay.appliance.namespace.problems import Problem
from forebay.appliance.namespace.reserve import Reserve
from forebay.appliance.namespace.space import Drive
from forebay.appliance.namespace.store import MemoryStore
from forebay.clock import SystemClock
from forebay.errors import Unavailable
from tests.appliance.http.conftest import NodeMaker, eventually
from tests.client.conftest import halted


def test_a_node_is_ready_while_its_target_answers_and_its_drive_is_there(start: NodeMaker) -> None:
    node = start('[target]\nrpc_timeout = "1s"\n')

    client = httpx.Client(base_url=node.url, timeout=30, trust_env=False)
    ask = client.get

    def parts() -> set[str]:
        answer = ask("/readyz")
        body = answer.json()
        assert answer.status_code == (200 if body["ready"] else 503)
        assert body["ready"] is body["reads"] is body["writes"] is (not body["problems"])
        assert all(problem["reason"] for problem in body["problems"])
        return {problem["part"] for problem in body["problems"]}

    assert parts() == set()
    pid = int(node.about["target"]["pid"])
    with halted(pid):
        eventually(lambda: "target" in parts(), "the target is missed")
        assert ask("/healthz").json() == {"ok": True}
    eventually(lambda: parts() == set(), "ready again")
    files = [path for path in (node.data / "drive0").rglob("*") if path.is_file()]
    volume = max(files, key=lambda path: path.stat().st_size)
    hidden = volume.with_name("hidden")
    volume.rename(hidden)
    eventually(lambda: parts() == {"drives"}, "the volume is missed")
    hidden.rename(volume)
    eventually(lambda: parts() == set(), "ready once more")
    client.close()


class _Broken(MemoryStore):
    """Metadata on a disk that is full."""

    async def write(self, ops: Any, *, durable: bool = True) -> None:
        raise Unavailable("metadata cannot be written: no space")


class _Node:
    """As much of a node as `Health` looks at: a target that answers, no volumes."""

    def __init__(self) -> None:
        self.engine = self.target = self.space = self
        self.store = _Broken()
        self.clock = SystemClock()
        self.drives = {"drive0": Drive("drive0", "/d", 1)}
        self.lost: dict[int, str] = {}
        self.reserve = Reserve()

    async def info(self) -> None:
        return None


@pytest.mark.parametrize("serving", [True, False])
def test_metadata_that_cannot_be_written_is_told(serving: bool) -> None:
    async def ask() -> list[Problem]:
        return await Health(cast(Any, _Node()), lambda: serving).problems()

    found = {problem.part: problem for problem in asyncio.run(ask())}
    assert found.pop("metadata") == Problem("metadata", "metadata cannot be written: no space", "writes")
    assert found.keys() == (set() if serving else {"target"})
