"""A node whose sessions end soon after their clients, and what may be left of them: nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client import Admin, ClientOptions
from tests import targets
from tests.client.conftest import NodeProcess

WORKERS = 64
"""Threads that the target keeps for control requests at most."""
HANG_S = 30.0
"""A call that takes so much longer than its deadline hangs; less may be the machine."""
CALM = ClientOptions(deadline_ms=60_000, connect_ms=60_000, attempt_ms=10_000)
"""For clients that nothing is done to: a busy machine takes its time."""
ENVIRONMENT = {
    "FOREBAY_SESSIONS_HEARTBEAT": "500ms",
    "FOREBAY_SESSIONS_EXPIRY": "10s",
    "FOREBAY_SESSIONS_WRITE_TTL": "60s",
    "FOREBAY_SESSIONS_LEASE_TTL": "60s",
}


def eventually(condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 60.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)


class Process:
    """A process from outside: what it holds."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith(name + ":")).split()[1])

    @property
    def threads(self) -> int:
        return self._status("Threads")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        return self._status("VmRSS") << 10

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_threads() -> set[threading.Thread]:
    """Threads of clients in this process, those that other tests keep for themselves among them."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("forebay-")}


class Node(NodeProcess):
    """A node, its parts as processes, and what it holds for clients."""

    @property
    def daemon(self) -> Process:
        return Process(self.process.pid)

    @property
    def target(self) -> Process:
        return Process(int(self._target()["pid"]))  # type: ignore[call-overload]

    @contextmanager
    def rpc(self) -> Iterator[Any]:
        """The target's control socket, as SPDK's own client speaks to it."""
        with JSONRPCClient(str(self._target()["socket"])) as rpc:
            yield rpc

    def held(self) -> dict[str, int]:
        """What the daemon and the target hold for clients, by name; without clients all is zero."""
        with Admin(self.url, token=self.token, deadline_ms=60_000, attempt_ms=10_000) as admin:
            status = admin.status()
        with self.rpc() as rpc:
            subsystems = [one for one in rpc.nvmf_get_subsystems() if "namespaces" in one]
            return {
                "sessions": status.sessions,
                "leases": status.leases,
                "pending": status.pending_writes,
                "grants": rpc.forebay_get_info()["grants"] if targets.able().fencing else 0,
                "hosts": sum(len(one["hosts"]) for one in subsystems),
                "controllers": sum(len(rpc.nvmf_subsystem_get_controllers(nqn=one["nqn"])) for one in subsystems),
            }

    def expect_nothing_held(self) -> None:
        """Sessions end, and with them all that they had."""
        found: dict[str, int] = {}

        def empty() -> bool:
            found.update(self.held())
            return not any(found.values())

        eventually(empty, lambda: f"held for clients that have gone: {found}")

    @contextmanager
    def leaving_nothing(self, slack: int = 4) -> Iterator[None]:
        """What the block's clients had is given back by daemon, target and this process: threads, descriptors, all."""
        own = Process(os.getpid())
        parts = {"daemon": self.daemon, "target": self.target, "client": own}
        before = {name: (part.threads, part.descriptors) for name, part in parts.items()}
        others = own_threads()
        yield
        self.expect_nothing_held()

        def now() -> Mapping[str, tuple[int, int]]:
            return {name: (part.threads, part.descriptors) for name, part in parts.items()}

        def as_before() -> bool:
            # gRPC keeps a few threads and descriptors for the next channel, the target threads for control requests.
            more = {name: (a - before[name][0], b - before[name][1]) for name, (a, b) in now().items()}
            return all(a <= (WORKERS if name == "target" else slack) and b <= slack for name, (a, b) in more.items())

        eventually(as_before, lambda: f"threads and descriptors: {before} before, {now()} after")
        assert not own_threads() - others


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node for all tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Node(tmp_path_factory.mktemp("node") / "data")
        yield made
        made.stop()
