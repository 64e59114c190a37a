"""Rank 1 of a group dies between Allocate and Commit, with its write on the way (design §6.3, §6.4, docs/ranks.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.fencing.conftest import PAIR, PRODUCT, Node, Out, got, out, place
from tests.fencing.engine import Engine
from tests.fencing.wire import COMMAND_BYTES, Wire

STALE, MINE, FRESH = b"\xaa" * 4096, b"\xcc" * 4096, b"\xbb" * 4096


@pytest.fixture
def rank() -> Iterator[Engine]:
    with Engine() as rank:
        yield rank


@dataclass(frozen=True)
class Seen:
    before: tuple[str, bytes]
    """What a reader gets when rank 0 has committed, and rank 1 is dead."""
    media: bytes
    after: tuple[str, bytes]
    """What a reader gets of the next group's block, when rank 1's write has arrived."""


NOTHING, WHOLE = ("absent", b""), ("ok", FRESH + FRESH)


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(PRODUCT, Seen(NOTHING, FRESH, WHOLE), id="product"),
        pytest.param(out("grants"), Seen(NOTHING, FRESH, WHOLE), id="teardown alone", marks=pytest.mark.long),
        pytest.param(out("teardown"), Seen(NOTHING, FRESH, WHOLE), id="grants alone", marks=pytest.mark.long),
        pytest.param(
            out("grants", "teardown"), Seen(NOTHING, STALE, ("checksum_mismatch", b"")), id="neither of the two"
        ),
    ],
)
def test_its_write_reaches_nothing_of_the_next_group(
    node: Node, rank: Engine, wire: Wire, removed: Out, seen: Seen
) -> None:
    """The leader gives the plan up: that speaks for its own host, and the dead rank's is torn down all the same."""
    key = os.urandom(8)
    with node.client(schema=PAIR) as leader, node.client(schema=PAIR) as other:
        rank.open(node.url, node.token, wire.port, join=leader.join_token, schema=PAIR)
        warm_rank(rank)
        plan = leader.allocate([key])
        rank.put_tiles(plan, [1], STALE)
        wire.hold("out")
        rank.say("go")
        wire.await_kept("out", COMMAND_BYTES + len(STALE))
        rank.process.kill()
        assert leader.put_tiles(plan, [0], [MINE])[0].reason == "pending"
        before = got(other, key)
        assert leader.abort(plan) == 1
        fresh = other.allocate([key])
        assert place(fresh) == place(plan)
        assert other.put_tiles(fresh, None, [FRESH + FRESH])[0].reason == "ok"
        wire.deliver_and_await()
        assert Seen(before, node.media(place(plan), 8192)[4096:], got(other, key)) == seen


@pytest.mark.parametrize(
    ("removed", "read"),
    [
        pytest.param(PRODUCT, NOTHING, id="product"),
        pytest.param(out("whole"), ("checksum_mismatch", b""), id="half is enough"),
    ],
)
def test_its_block_is_not_visible(node: Node, rank: Engine, removed: Out, read: tuple[str, bytes]) -> None:
    """Visible means whole: the tiles of one write id cover the grid."""
    key = os.urandom(8)
    with node.client(schema=PAIR) as leader, node.client(schema=PAIR) as other:
        rank.open(node.url, node.token, node.nvme_port, join=leader.join_token, schema=PAIR)
        plan = leader.allocate([key])
        rank.put_tiles(plan, [1], STALE)
        rank.process.kill()
        leader.put_tiles(plan, [0], [MINE])
        assert got(other, key) == read


def warm_rank(rank: Engine) -> None:
    """Connect its data path."""
    plan = rank.allocate(os.urandom(8).hex())
    rank.put_tiles(plan, None, bytes(8192))
    rank.go("at commit")
    assert rank.go() == "ok"
