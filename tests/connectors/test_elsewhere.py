"""Misses that are elsewhere: all behind the first are counted as it is, and each place is told once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from forebay.client import Client, KeyspaceInfo, MatchResult
from forebay.connectors.vllm.elsewhere import Elsewhere
from forebay.errors import Unavailable
from forebay.schema import Schema


class Node:
    """As much of a client as is asked."""

    schema = Schema.opaque()

    def __init__(self, known: list[KeyspaceInfo] | None) -> None:
        self.known = known
        self.asked = 0

    def keyspaces(self, **_: Any) -> list[KeyspaceInfo]:
        self.asked += 1
        if self.known is None:
            raise Unavailable
        return self.known


def explained(elsewhere: Elsewhere, node: Node, *reasons: str, place: tuple[bytes, int] | None) -> tuple[str, ...]:
    present = tuple([reason == "ok" for reason in reasons])
    return elsewhere.explained(cast(Client, node), MatchResult(present, reasons, {}, 0.0, 0, place), 100)


def test_what_is_behind_the_first_counts_as_it_does(caplog: pytest.LogCaptureFixture) -> None:
    node, elsewhere = Node([]), Elsewhere()
    reasons = ("ok", "other_keyspace", "absent", "evicted", "ok", "absent")
    for _ in range(2):
        assert explained(elsewhere, node, *reasons, place=(b"k" * 32, 0)) == (
            *("ok", "other_keyspace", "other_keyspace", "evicted", "ok", "other_keyspace"),
        )
    assert node.asked == len(caplog.records) == 1


def test_nothing_is_made_of_what_is_nowhere() -> None:
    assert explained(Elsewhere(), Node([]), "ok", "absent", place=None) == ("ok", "absent")
    assert explained(Elsewhere(), Node([]), "absent", place=(b"k", 1)) == ("absent",), "a node that says half of it"


def test_a_node_that_does_not_say_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    assert explained(Elsewhere(), Node(None), "other_keyspace", place=(b"k" * 32, 0)) == ("other_keyspace",)
    assert "does not say what differs" in caplog.text


def test_a_user_is_told_of_so_many_places_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = Elsewhere()
    for generation in range(100):
        explained(elsewhere, Node([]), "other_generation", place=(b"k" * 32, generation))
    assert 1 < len(caplog.records) < 100
