"""A client sends a read, or a write, once more after its connection broke, when the place belongs to another."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from forebay.client import ClientOptions
from forebay.client import reader as reader_module
from forebay.client.transports.base import Outcome, Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.clock import Clock, SystemClock
from forebay.ids import Extent, HostIdentity, VolumeId
from tests.client.conftest import eventually
from tests.fencing.conftest import OPTIONS, PAIR, PRODUCT, Node, Out, got, out, place, take, warm
from tests.fencing.replaying import Replaying
from tests.fencing.wire import COMMAND_BYTES, Wire

STALE, FRESH = b"\xaa" * 4096, b"\xbb" * 4096


class Way:
    """To the target by the wire, with replays."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.made: list[Replaying] = []

    def __call__(
        self,
        subsystem: SubsystemAddress,
        host: HostIdentity,
        nguids: Mapping[int, str],
        options: ClientOptions,
        clock: Clock,
    ) -> Transport:
        self.made.append(Replaying(self.wire.through(subsystem, host, nguids, options, clock), clock))
        return self.made[-1]

    def lose(self, count: int) -> None:
        """The commands on their way are lost with their connections; nothing is sent again yet."""
        self.wire.await_kept("out", count)
        self.wire.cut()
        assert self.made[-1].broken.wait(60)

    def again(self) -> None:
        self.made[-1].again.set()


# --- a read -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(PRODUCT, ("lease_expired", b""), id="product"),
        pytest.param(out("checksum"), ("lease_expired", b""), id="lease alone"),
        pytest.param(out("lease"), ("checksum_mismatch", b""), id="checksum alone"),
        pytest.param(out("lease", "checksum"), ("ok", FRESH), id="neither"),
    ],
)
def test_a_read(node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, removed: Out, seen: tuple[str, bytes]) -> None:
    """The client's verdict: the lease must still be good, and the bytes those of this key, tile and write."""
    verdict, without = reader_module.verdict, removed or frozenset()

    def judge(outcomes: Sequence[Outcome], expected: Sequence[Sequence[int | None]], now_ms: int, until_ms: int) -> int:
        return verdict(
            outcomes,
            [outcome.checksums for outcome in outcomes] if "checksum" in without else expected,
            now_ms,
            now_ms + 1 if "lease" in without else until_ms,
        )

    monkeypatch.setattr(reader_module, "verdict", judge)
    way, key = Way(wire), os.urandom(16)
    lease_ms = 10_000 if removed else 3_000  # where time cannot be put forward it has to pass
    options, clock = replace(OPTIONS, lease_ttl_ms=lease_ms), NodesClock(node)
    with node.client_by(way, options=options, clock=clock) as reader, node.client() as other:
        assert reader.put([key], [STALE])[0].stored
        block = other.stat([key])[0].block
        assert block is not None
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(got, reader, key)
            way.lose(COMMAND_BYTES)
            assert other.delete([key]) == ["ok"]
            if removed:
                node.switches.pass_time(lease_ms)
            eventually(lambda: not leases(node), "the lease ends")
            take(other, Extent(VolumeId(block.volume), block.offset_bytes, 4096), FRESH)
            way.again()
            assert reading.result(60) == seen


class NodesClock(SystemClock):
    """The system's, put forward with the node's."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.node.switches.ahead_ms


def leases(node: Node) -> int:
    with node.admin() as admin:
        return sum(session.leases for session in admin.list_sessions())


# --- a write ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    late_write: str
    media: bytes
    read: tuple[str, bytes]


SOUND = Seen("write_fenced", FRESH, ("ok", FRESH))
HARM = Seen("write_expired", STALE, ("checksum_mismatch", b""))


@pytest.mark.fencing
@pytest.mark.parametrize(
    ("removed", "seen"),
    [pytest.param(PRODUCT, SOUND, id="product"), pytest.param(out("grants"), HARM, id="no grants")],
)
def test_a_write_in_the_place_of_another(node: Node, wire: Wire, removed: Out, seen: Seen) -> None:
    """Teardown is no help: the host may connect again, and does. Its grant is gone."""
    way = Way(wire)
    with node.client_by(way) as writer, node.client(join=writer.join_token) as leader, node.client() as other:
        warm(writer)
        plan = writer.allocate([b"slow"], lengths=[len(STALE)])
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.put_tiles, plan, None, [STALE])
            way.lose(COMMAND_BYTES + len(STALE))
            assert leader.abort(plan) == 1
            key = take(other, place(plan), FRESH)
            way.again()
            (late,) = writing.result(60)
        assert Seen(late.reason, node.media(place(plan), 4096), got(other, key)) == seen


@pytest.mark.fencing
@pytest.mark.parametrize(
    ("removed", "seen"),
    [pytest.param(PRODUCT, SOUND, id="product"), pytest.param(out("tags"), HARM, id="no tags")],
)
def test_a_write_in_a_place_that_is_its_own_again(node: Node, wire: Wire, removed: Out, seen: Seen) -> None:
    """The host has a live grant of the place, of a later attempt: the tag tells the two apart."""
    way = Way(wire)
    with (
        node.client_by(way, schema=PAIR) as writer,
        node.client(join=writer.join_token, schema=PAIR) as leader,
    ):
        warm(writer, 8192)
        plan = writer.allocate([b"slow"])
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.put_tiles, plan, [0], [STALE])
            way.lose(COMMAND_BYTES + len(STALE))
            assert leader.abort(plan) == 1
            fresh = writer.allocate([b"fresh"])
            assert place(fresh) == place(plan)
            assert writer.put_tiles(fresh, [0], [FRESH])[0].reason == "pending"
            way.again()
            (late,) = writing.result(60)
        assert writer.put_tiles(fresh, [1], [FRESH])[0].reason == "ok"
        reason, value = got(writer, b"fresh")
        assert writer.delete([b"fresh"]) == ["ok" if reason == "ok" else "absent"]
        assert Seen(late.reason, node.media(place(plan), 4096), (reason, value[:4096])) == seen
