"""Plans of several ranks, when the node does not answer."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from forebay.connectors.vllm.advice import Advice
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.requests import Whole
from forebay.connectors.vllm.saves import Saves
from tests.client.conftest import eventually


class Away:
    """A link to a node that is being left alone after its first call."""

    def __init__(self) -> None:
        self.calls = 0
        self.client: Any = self
        self.schema = SimpleNamespace(groups=[SimpleNamespace(block_tokens=16)])

    def allocate(self, keys: list[Any], **_: Any) -> Any:
        self.calls += 1
        self.client = None
        raise RuntimeError("no answer")

    def note(self, reasons: Iterable[str]) -> None:
        raise AssertionError("there is nothing to note")


def test_a_node_that_is_left_alone_is_asked_for_no_plan() -> None:
    counters, link = Counters(), Away()
    saves = Saves(2, 30_000, counters)
    saves.hosts = {0: "a", 1: "b"}
    numbers = [saves.begin(cast(Link, link), 0, 0, [(bytes([i]), Whole(i, b"", Advice()))]).number for i in range(3)]
    dropped: list[int] = []

    def told() -> bool:
        plans, none = saves.tell(cast(Link, link))
        assert plans == []
        dropped.extend(none)
        return not saves.to_tell

    eventually(told, "the end of all")
    assert dropped == numbers and link.calls == 1
    assert counters.take() == {"unstored_blocks:unavailable": 2}
    assert not any(saves.has(0, bytes([i])) for i in range(3))
    saves.close()
