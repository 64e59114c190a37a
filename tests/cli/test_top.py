"""`forebay top`: frames, rates, and a terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import OK, UNAVAILABLE
from forebay.cli.top.frame import frame
from forebay.cli.top.sample import Look, Rates
from forebay.client import DriveStatus, NamespaceInfo, NodeProblem, NodeStatus
from tests.cli.shell import Shell

STATUS = NodeStatus(
    node="storage-1",
    version="0.1.0",
    incarnation=3,
    uptime_ms=90_000,
    blocks=1000,
    used_bytes=9 << 40,
    capacity_bytes=10 << 40,
    sessions=12,
    leases=345,
    pending_writes=6,
    drives=(DriveStatus("drive0", "/drives/0", 10 << 40, 1 << 40, "direct"),),
    target_kind="embedded",
    target_pid=1234,
    target_capabilities=("fencing",),
    index_bytes=1 << 20,
    counters={"match_keys": 1000, "match_hits": 500, "acquire_hits": 40, "acquire_misses": 10, "blocks_evicted": 7},
    read_bytes=10**9,
    written_bytes=10**9,
    target_restarts=1,
)
SPACE = NamespaceInfo("acme/chat", 1, 10 << 30, "flush", "lru", 0, 0, 9 << 30, 0, 0, 10 << 30, 800, 5, 0)


def look(at_s: float, status: NodeStatus = STATUS, *spaces: NamespaceInfo) -> Look:
    return Look(at_s, status, spaces or (SPACE,))


def later(**counters: int) -> NodeStatus:
    return replace(STATUS, counters={**STATUS.counters, **counters}, read_bytes=5 * 10**9, written_bytes=2 * 10**9)


def test_rates_are_per_second() -> None:
    now = later(match_keys=5000, match_hits=3500, acquire_hits=130, blocks_evicted=27, committed_blocks=8)
    found = Rates.between(look(10), look(12, now))
    assert (found.read_bytes, found.written_bytes) == (2e9, 0.5e9)
    assert (found.match_keys, found.match_hit_rate) == (2000, 0.75)
    assert (found.load_keys, found.load_hit_rate) == (45, 1.0)
    assert (found.evicted, found.stored, found.removed) == (10, 4, 0)


def test_nothing_asked_for_is_no_hit_rate() -> None:
    found = Rates.between(look(10), look(11))
    assert found.match_hit_rate is None and found.load_hit_rate is None and found.read_bytes == 0


def test_counters_that_started_anew_never_give_negative_rates() -> None:
    fresh = replace(STATUS, counters={"match_keys": 10}, read_bytes=4000, written_bytes=0)
    found = Rates.between(look(10), look(12, fresh))
    assert found.read_bytes == 2000 and found.match_keys == 5 and found.written_bytes == 0


def drawn(now: Look, height: int = 24, trouble: str = "") -> list[str]:
    console = Console(width=80, height=height, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    with console.file:
        console.print(frame(now, Rates.between(look(10), now), height=height, foot="foot", trouble=trouble))
        return console.export_text().splitlines()


def test_a_frame_says_what_matters() -> None:
    text = "\n".join(drawn(look(12, later(match_keys=5000, match_hits=3500))))
    for part in ("storage-1", "up 1 min 30 s", "2.00 GB/s", "62.5% hit of", "replaced 1 times", "sessions     12"):
        assert part in text or part == "62.5% hit of"
    assert re.search(r"match +75\.0% hit", text) and "9 TiB of 10 TiB (90.0%)" in text
    assert re.search(r"acme/chat +█+·+ +9 GiB +10 GiB +800 +5", text) and text.endswith("foot")


@pytest.mark.parametrize("height", [3, 10, 14, 16, 24, 60])
def test_it_fits(height: int) -> None:
    spaces = [replace(SPACE, name=f"tenant-{i:04}/" + "n" * 64, used_bytes=i << 30) for i in range(40)]
    busy = replace(later(match_keys=10**12, match_hits=10**12), node="n" * 64, leases=10**6, sessions=10**5)
    lines = drawn(look(10.001, busy, *spaces), height)
    assert len(lines) <= height and all(len(line) <= 80 for line in lines)
    if height == 24:
        assert "tenant-0039" in "\n".join(lines) and "and 30 more" in "\n".join(lines)


def test_what_is_degraded_is_said_in_a_line() -> None:
    why = "drive drive1: /drives/1 has no forebay.drive: is the drive mounted? " + "x" * 80
    away = NodeProblem("drives", why, "some")
    lines = drawn(look(12, replace(STATUS, problems=(away, away))))
    assert lines[2].startswith("degraded: drive drive1: /drives/1") and "1 more" in lines[2]
    assert len(lines) == len(drawn(look(12))) and all(len(line) <= 80 for line in lines)


def test_trouble_takes_the_foot() -> None:
    lines = drawn(look(12), trouble="no answer")
    assert lines[-1].strip() == "no answer" and "foot" not in "\n".join(lines)


def test_once(forebay: Shell) -> None:
    text = forebay("top", "--once", "--interval", "0.05")
    assert "default/default" in text and "read " in text and all(len(line) <= 80 for line in text.splitlines())
    assert forebay("top", "--interval", "0.05").splitlines()[3:7] == text.splitlines()[3:7]  # no terminal: once, too


def test_json(forebay: Shell) -> None:
    forebay("put", "top", __file__)
    found = forebay.json("top", "--interval", "0.05")
    assert found["blocks"] == 1 and found["capacity_bytes"] == 512 << 20 and found["match_hit_rate"] is None
    (space,) = found["namespaces"]
    assert space["name"] == "default/default" and space["blocks"] == 1 and space["used_bytes"] > 0


def test_without_a_node(forebay: Shell) -> None:
    forebay("top", "--url", "127.0.0.1:9", code=UNAVAILABLE)


def read_until(handle: int, over: Callable[[str], bool]) -> str:
    """What a terminal shows, which nobody can write to who is not read, until it is over."""
    text, deadline = "", time.monotonic() + 60
    while not over(text):
        assert time.monotonic() < deadline, text
        if select.select([handle], [], [], 0.2)[0]:
            text += os.read(handle, 65536).decode()
    return text


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_on_a_terminal_it_follows_until_it_is_told_to_end(node: DemoNode, key: bytes) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "forebay.cli.main", "--data", str(node.data), "top", "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm"}
    running = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    try:
        shown = read_until(ours, lambda text: "q ends" in text)
        assert "default/default" in shown
        read_until(ours, lambda text: "q ends" in text)  # another frame
        os.write(ours, key)
        read_until(ours, lambda _: running.poll() is not None)
        assert running.returncode == OK
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)
