"""A client is stopped (SIGSTOP) beyond every deadline, and then goes on where it was: it reads, writes, commits.

Its lease, its grant, its session and its keep-alive have run out meanwhile, all by the clocks of the node and of the
client, which the test puts forward (`switches`); what it held has another owner. While nothing is switched off the
node is the product, except for its clock.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from forebay.ids import Extent, VolumeId
from tests.client.conftest import eventually, stop
from tests.fencing.conftest import SESSION_MS, Node, Out, got, out, place, take
from tests.fencing.engine import Engine

STALE, FRESH = b"\xaa" * 4096, b"\xbb" * 4096
BEYOND_MS = 2 * SESSION_MS
GRANT_MS = SESSION_MS // 3
TEARING = ("teardown", "keep-alive", "admission")
"""What ends a host's connections and keeps it from making others."""


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as process:
        yield process


@pytest.fixture
def sleeper(node: Node, process: Engine) -> Engine:
    """The client, in a session of its own."""
    process.open(node.url, node.token, node.nvme_port, write_ttl_ms=GRANT_MS)
    return process


def sleep_through(node: Node, sleeper: Engine, duration_ms: int, over: Callable[[], bool]) -> None:
    """The client stops where it stands, the time passes, and it goes on when that has done its work."""
    stop(sleeper.process.pid)
    node.switches.pass_time(duration_ms)
    eventually(over, "what it held is over", 60)
    sleeper.signal(signal.SIGCONT)


def sessions(node: Node) -> int:
    with node.admin() as admin:
        return len(admin.list_sessions())


def pending(node: Node) -> int:
    with node.admin() as admin:
        return admin.status().pending_writes


@dataclass(frozen=True)
class Seen:
    it_heard: str
    media: bytes
    read: tuple[str, bytes]


SOUND = (FRESH, ("ok", FRESH))
HARM = (STALE, ("checksum_mismatch", b""))


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(out(), Seen("target_refused", *SOUND), id="product"),
        pytest.param(out(*TEARING), Seen("write_fenced", *SOUND), id="grants alone"),
        pytest.param(out("grants"), Seen("target_refused", *SOUND), id="teardown and admission alone"),
        pytest.param(out("grants", *TEARING), Seen("session_expired", *HARM), id="none"),
    ],
)
def test_it_writes(node: Node, sleeper: Engine, removed: Out, seen: Seen) -> None:
    plan = sleeper.allocate("slow", len(STALE))
    sleeper.put_tiles(plan, None, STALE)
    sleep_through(node, sleeper, BEYOND_MS, lambda: not sessions(node))
    with node.client() as other:
        key = take(other, place(plan), FRESH)
        sleeper.go("at commit")
        assert Seen(sleeper.go(), node.media(place(plan), 4096), got(other, key)) == seen


@pytest.mark.parametrize(
    ("removed", "late_ms", "seen"),
    [
        pytest.param(out(), BEYOND_MS, Seen("session_expired", *SOUND), id="product, session over"),
        pytest.param(out(), GRANT_MS + 1, Seen("write_expired", *SOUND), id="product, grant over"),
        pytest.param(out("taken-back"), BEYOND_MS, Seen("session_expired", *SOUND), id="the session's end alone"),
        pytest.param(out("taken-back"), GRANT_MS + 1, Seen("ok", *SOUND), id="not taken back"),
    ],
)
def test_it_commits(node: Node, sleeper: Engine, removed: Out, late_ms: int, seen: Seen) -> None:
    """Its write is on the drive when it is stopped. A commit of it must not bring back what is another's by then."""
    name = os.urandom(8).hex()
    plan = sleeper.allocate(name, len(STALE))
    sleeper.put_tiles(plan, None, STALE)
    sleeper.go("at commit")
    sleep_through(node, sleeper, late_ms, lambda: not pending(node))
    with node.client() as other:
        key = take(other, place(plan), FRESH)
        assert Seen(sleeper.go(), node.media(place(plan), 4096), got(other, key)) == seen
        owners = other.stat([name.encode(), key])
        places = [(one.block.volume, one.block.offset_bytes) for one in owners if one.block is not None]
        assert (len(places) > len(set(places))) == (seen.it_heard == "ok"), "two blocks in one place"


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(out(), "lease_expired", id="product"),
        pytest.param(out("checksum", *TEARING), "lease_expired", id="lease alone"),
        pytest.param(out("lease", *TEARING), "checksum_mismatch", id="checksum alone"),
        pytest.param(out("lease", "checksum"), "target_refused", id="teardown and admission alone"),
        pytest.param(out("lease", "checksum", *TEARING), "ok " + FRESH.hex(), id="none"),
    ],
)
def test_it_reads(node: Node, sleeper: Engine, removed: Out, seen: str) -> None:
    """Where the client's clock stands still (``lease`` is out), its lease never ends as it sees it."""
    key = os.urandom(8).hex()
    with node.client() as writer:
        assert writer.put([key.encode()], [STALE])[0].stored
        block = writer.stat([key.encode()])[0].block
        assert block is not None
        sleeper.say("get", key)
        sleeper.until("at read")
        assert writer.delete([key.encode()]) == ["ok"]
    sleep_through(node, sleeper, BEYOND_MS, lambda: not sessions(node))
    with node.client() as other:
        take(other, Extent(VolumeId(block.volume), block.offset_bytes, 4096), FRESH)
        assert sleeper.go().strip() == seen
