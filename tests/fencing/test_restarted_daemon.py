"""The daemon is killed and another one starts, while the target and the clients live on (design §6.4)."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.fencing.conftest import PRODUCT, Node, Out, got, out, place, take, warm
from tests.fencing.wire import COMMAND_BYTES, Wire

STALE, FRESH = b"\xaa" * 4096, b"\xbb" * 4096


@dataclass(frozen=True)
class Seen:
    media: bytes
    read: tuple[str, bytes]


SOUND = Seen(FRESH, ("ok", FRESH))


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(PRODUCT, SOUND, id="product"),
        pytest.param(out("grants", "admission"), SOUND, id="teardown alone", marks=pytest.mark.long),
        pytest.param(out("teardown", "admission"), SOUND, id="grants alone", marks=pytest.mark.long),
        pytest.param(out("teardown", "grants"), SOUND, id="admission alone", marks=pytest.mark.long),
        pytest.param(
            out("teardown", "grants", "admission"), Seen(STALE, ("checksum_mismatch", b"")), id="none of the three"
        ),
    ],
)
def test_a_write_of_the_earlier_incarnation(node: Node, wire: Wire, removed: Out, seen: Seen) -> None:
    """It arrives when the next daemon has given its place to another.

    Before it allocates anything, a daemon that starts has every controller torn down and every grant dropped, and no
    earlier host sees a volume.
    """
    target = node.target_pid
    with node.client(wire=wire) as writer:
        warm(writer)
        plan = writer.allocate([b"slow"], lengths=[len(STALE)])
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.put_tiles, plan, None, [STALE])
            wire.await_kept("out", COMMAND_BYTES + len(STALE))
            node.restart_daemon()
            assert node.target_pid == target
            assert writer.match([b"slow"]).present == (False,)  # it has a session again
            assert writing.result(60)[0].reason in ("connection_lost", "unavailable")
        with node.client() as other:
            key = take(other, place(plan), FRESH)
            wire.deliver_and_await()
            assert Seen(node.media(place(plan), 4096), got(other, key)) == seen


@pytest.mark.parametrize(
    ("removed", "read"),
    [
        pytest.param(PRODUCT, ("ok", FRESH), id="product"),
        pytest.param(out(), ("connection_lost", b""), id="no target", marks=pytest.mark.long),
    ],
)
def test_a_leased_read_goes_on_without_a_daemon(node: Node, wire: Wire, removed: Out, read: tuple[str, bytes]) -> None:
    """The target outlives the daemon; where it does not, the read is a miss."""
    with node.client(wire=wire) as reader:
        key = os.urandom(16)
        assert reader.put([key], [FRESH])[0].stored
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(got, reader, key)
            wire.await_kept("out", COMMAND_BYTES)
            target = node.target_pid
            node.process.kill()
            node.process.wait()
            if removed is not PRODUCT:
                os.kill(target, signal.SIGKILL)
            wire.deliver("out")
            assert reading.result(60) == read
        node.start()
