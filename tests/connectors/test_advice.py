"""What the node is told of blocks: priority, session, adapter and parent; and bounds that a request brings."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.client import Hints
from forebay.connectors.vllm.advice import Advice, token_limit
from tests.connectors.fakes import Adapter, Request


def request(**said: Any) -> Request:
    return Request("r", [], **said)


def test_a_request_that_says_nothing() -> None:
    advice = Advice.of(request())
    assert advice == Advice() and advice.hints is None
    about = advice.describe([b"", b"p"], 32)
    assert (about.parents, about.block_tokens, about.adapter) == ([b"", b"p"], 32, "")


def test_priority_session_and_adapter() -> None:
    advice = Advice.of(request(priority=3, session_id="talk", lora_request=Adapter(lora_name="cook")))
    assert advice.hints == Hints(priority_class=3, session="talk", origin="vllm")
    assert advice.describe([b""], 16).adapter == "cook"


@pytest.mark.parametrize(("priority", "told"), [(-5, 0), (0, 0), (1 << 40, (1 << 32) - 1)])
def test_a_priority_out_of_range_is_the_nearest(priority: int, told: int) -> None:
    hints = Advice.of(request(priority=priority)).hints
    assert (0 if hints is None else hints.priority_class) == told


@pytest.mark.parametrize("name", ["x" * 10_000, "\ud800" * 300, "\N{GRINNING FACE}" * 2_000])
def test_names_that_the_node_would_refuse_are_cut(name: str) -> None:
    advice = Advice.of(request(session_id=name, lora_request=Adapter(lora_name=name)))
    assert advice.hints is not None
    assert len(advice.hints.session.encode()) <= 512 and len(advice.adapter.encode()) <= 512


def test_hints_that_a_request_brings_come_first() -> None:
    brought = {"forebay_hints": {"session": "of a router", "expected_reuse": 4, "nonsense": 1}}
    advice = Advice.of(request(priority=1, session_id="talk", kv_transfer_params=brought))
    assert advice.hints == Hints(priority_class=1, session="of a router", expected_reuse=4, origin="vllm")
    assert Advice.of(request(kv_transfer_params={"forebay_hints": "loud"})) == Advice()


@pytest.mark.parametrize(
    ("params", "limit"),
    [(None, None), ({}, None), ({"max_load_tokens": 64}, 64), ({"max_load_tokens": 0}, 0)]
    + [({"max_load_tokens": odd}, None) for odd in (-1, True, "64", 1.5)]
    + [("max_load_tokens", None)],
)
def test_bounds_that_a_request_brings(params: Any, limit: int | None) -> None:
    assert token_limit(request(kv_transfer_params=params), "max_load_tokens") == limit
