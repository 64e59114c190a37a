"""Many at once: 2,000 sessions and 512 data connections, from eight processes, against one node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.pressure import herd
from tests.pressure.conftest import CALM, Node, eventually

MIB = 1 << 20


class Member:
    """One process of the herd."""

    def __init__(self, node: Node, role: str, count: int) -> None:
        command = [sys.executable, "-m", "tests.pressure.herd", role, node.url, node.token, str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a process of the herd ended with {self.process.wait(60)}"
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def crowd(node: Node, role: str, count: int, processes: int) -> Iterator[list[Member]]:
    members = [Member(node, role, count // processes) for _ in range(processes)]
    try:
        yield members
        for member in members:
            assert member.process.wait(120) == 0
    finally:
        for member in members:
            member.process.kill()
            member.process.communicate()


def together(said: list[dict[str, Any]], name: str) -> Counter[str]:
    return sum((Counter(one[name]) for one in said), Counter())


@pytest.mark.parametrize(
    ("count", "processes"), [pytest.param(200, 2, id="200"), pytest.param(2_000, 8, id="2000", marks=pytest.mark.long)]
)
def test_sessions(node: Node, count: int, processes: int) -> None:
    """All are opened, kept alive, used and closed; the client that was there before keeps its own and reads on."""
    with node.connect(options=CALM) as witness:
        witness.put([herd.KEY], [herd.VALUE])
        before = {"daemon": node.daemon.resident_bytes, "target": node.target.resident_bytes}
        with crowd(node, "sessions", count, processes) as members:
            said = [member.hear() for member in members]
            assert together(said, "opened") == {"ok": count}
            began_s = time.monotonic()
            while time.monotonic() - began_s < 3:
                assert bytes(witness.get([herd.KEY])[0].value or b"") == herd.VALUE
            assert node.held()["sessions"] == count + 1
            after = {"daemon": node.daemon.resident_bytes, "target": node.target.resident_bytes}
            for member in members:
                member.tell("go on")
            said_at_last = [member.hear() for member in members]
            assert together(said_at_last, "used") == {"ok": count}
            assert set(together(said_at_last, "beats")) == {"ok"}
        assert witness.stats.reopened == 0
    slowest_s = max(one["seconds"] for one in said)
    grown = {name: (after[name] - before[name]) / count / 1024 for name in before}
    rounds_s = max(one["round_s"] for one in said_at_last)
    print(
        f"{count} sessions opened in {slowest_s:.1f} s, heartbeats of all in {rounds_s:.1f} s; KiB a session: {grown}"
    )
    assert max(grown.values()) < 512
    node.expect_nothing_held()


@pytest.mark.embedded  # a thread for each connection
@pytest.mark.parametrize(
    ("count", "processes"), [pytest.param(64, 2, id="64"), pytest.param(512, 8, id="512", marks=pytest.mark.long)]
)
def test_data_connections(node: Node, count: int, processes: int) -> None:
    """All move data at once, every byte compared; memory goes by what is under way, and comes back."""
    with node.leaving_nothing(slack=8), node.connect(options=CALM) as witness:
        assert all(result.present for result in witness.put([herd.KEY], [herd.VALUE]))
        threads, resident_bytes = node.target.threads, node.target.resident_bytes
        with crowd(node, "connections", count, processes) as members:
            clients = count // 8
            assert together([member.hear() for member in members], "connected") == {"ok": clients}
            most = {"connections": 0, "resident_bytes": 0}

            def look() -> bool:
                most["connections"] = max(most["connections"], node.target.threads - threads)
                most["resident_bytes"] = max(most["resident_bytes"], node.target.resident_bytes)
                return most["connections"] >= count

            for _ in range(2):
                for member in members:
                    member.tell("move")
                with ThreadPoolExecutor(1) as pool:
                    hearing = pool.submit(lambda: [member.hear() for member in members])
                    while not hearing.done():
                        look()
                        assert bytes(witness.get([herd.KEY])[0].value or b"") == herd.VALUE
                    said = hearing.result()
                assert together(said, "read") == {"ok": 2 * clients}
                assert together(said, "written") == {"ok": clients}
            eventually(look, lambda: f"all connections at a time: {most}")
            idle_bytes = node.target.resident_bytes
            for member in members:
                member.tell("end")
            assert sum(member.hear()["closed"] for member in members) == clients
        assert witness.stats.reopened == 0
    most_mib, idle_mib = ((size - resident_bytes) / MIB for size in (most["resident_bytes"], idle_bytes))
    print(f"{count} data connections: the target grew by {most_mib:.0f} MiB, by {idle_mib:.0f} when they were idle")
    # What is kept for the next command, what is lent (two buffers a connection at most), and a thread's memory each.
    assert idle_mib < 300 + count / 4
    assert most_mib < 300 + count * 2.25
