"""What is told of stored blocks, once each, and of their removal; of nobody else's."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence

import pytest

from forebay.client import WatchEvent
from forebay.connectors.vllm.tier import inventory
from forebay.connectors.vllm.tier.inventory import Inventory
from tests.client.conftest import eventually

A, B, C = (bytes([i]) * 32 for i in range(3))


class Node:
    """Events, as they are given to whoever watches; None breaks the watch off."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.events: queue.SimpleQueue[WatchEvent | None] = queue.SimpleQueue()

    def watch(self) -> Iterator[WatchEvent]:
        while (event := self.events.get(timeout=60)) is not None:
            yield event
        raise OSError("the node is away")

    def match(self, keys: Sequence[bytes]) -> list[str]:
        return ["ok" if key in self.there else "absent" for key in keys]

    def say(self, kind: str, key: bytes = b"", keyspace: bytes = b"ours") -> None:
        self.events.put(WatchEvent(1, 1, kind, key, keyspace=keyspace))


def told(of: Inventory, count: int) -> list[tuple[bool, list[bytes]]]:
    found: list[tuple[bool, list[bytes]]] = []

    def enough() -> bool:
        found.extend(of.take())
        return len(found) >= count

    eventually(enough, "what is told")
    return found


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def ours(node: Node) -> Iterator[Inventory]:
    kept = Inventory(node.watch, lambda event: event.keyspace == b"ours", node.match)
    yield kept
    kept.close()
    node.events.put(None)


def test_a_block_is_told_once_until_it_is_gone(node: Node, ours: Inventory) -> None:
    ours.stored([A, B])
    ours.stored([A, B])
    assert told(ours, 1) == [(True, [A, B])]
    node.say("stored", C)
    node.say("removed", C)  # somebody else's, which was not told
    node.say("removed", B, keyspace=b"theirs")
    node.say("removed", A)
    assert told(ours, 1) == [(False, [A])]
    ours.stored([A])
    assert told(ours, 1) == [(True, [A])]


@pytest.mark.parametrize("kind", ["resync", "cleared", "generation"])
def test_after_what_concerns_many_only_what_is_not_there_any_more_is_told(
    node: Node, ours: Inventory, kind: str
) -> None:
    ours.stored([A, B, C])
    node.there = {B}
    node.say(kind)
    assert told(ours, 2) == [(True, [A, B, C]), (False, [A, C])]
    node.say("removed", B)
    assert told(ours, 1) == [(False, [B])]


def test_it_goes_on_listening_after_an_outage(node: Node, ours: Inventory) -> None:
    ours.stored([A])
    node.events.put(None)
    node.say("removed", A)
    assert told(ours, 2) == [(True, [A]), (False, [A])]


def test_it_remembers_a_bounded_number(node: Node, ours: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_MOST", 1)
    ours.stored([A, B])
    node.say("removed", A)
    node.say("removed", B)
    assert told(ours, 2) == [(True, [A, B]), (False, [B])]
