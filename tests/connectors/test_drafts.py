"""Engines that guess tokens with a model of drafts, whose layers lie in the blocks of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCK, BLOCK_BYTES, BLOCKS, PLENTY, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ANSWER = 80


class Drafting:
    """Engines one after the other at a node, each with a model of drafts by ``method``."""

    def __init__(self, node: NodeProcess, directory: Path) -> None:
        self._node, self._directory = node, directory
        self.started: list[EngineProcess] = []

    def start(self, method: str = "", seed: int = 1, **arguments: Any) -> EngineProcess:
        """Another engine, whose model of drafts lies in a directory of its own; without a ``method`` it has none."""
        number = len(self.started)
        draft = {"directory": str(self._directory / f"draft{number}"), "method": method, "seed": seed}
        log, model = self._directory / f"{number}.log", self._directory / "model"
        guessing = {"draft": draft} if method else {}
        self.started.append(EngineProcess(self._node, model, log, extra=PLENTY, **guessing, **arguments))
        if "tensor_parallel_size" not in arguments:  # workers of several ranks are in other processes
            eventually(lambda: self.started[-1].ask("connected")["both"], "the engine's session", 60)
        return self.started[-1]


@pytest.fixture
def drafting(shared_node: NodeProcess, tmp_path: Path) -> Iterator[Drafting]:
    drafting = Drafting(shared_node, tmp_path)
    yield drafting
    for engine in drafting.started:
        engine.kill()


def stores_what_was_accepted(engine: EngineProcess, start: list[int]) -> dict[str, Any]:
    """An engine computes an answer, and stores the blocks of what it accepted: those, and no others."""
    before = set(engine.ask("blocks"))
    answer = engine.ask("drafted", prompt=start, max_tokens=ANSWER)
    assert answer["cached"] == [0]
    tokens = [*start, *answer["tokens"][0]][:-1]  # the last one was never computed with
    keys = engine.ask("keys", prompt=tokens)["keys"]
    assert len(keys) == len(tokens) // BLOCK > BLOCKS
    eventually(lambda: set(engine.ask("blocks")) - before >= set(keys), "the blocks", 60)
    engine.ask("settle")
    assert set(engine.ask("blocks")) - before == set(keys)
    return answer


def test_drafts_go_on_from_what_another_engine_stored(drafting: Drafting) -> None:
    """The same tokens, and the same guesses: the draft's layers have come with the model's.

    What could not be told apart, or would not be whole, is refused.
    """
    first = drafting.start("draft_model")
    answer = stores_what_was_accepted(first, prompt(70))
    accepted = first.count("spec_decode_num_accepted_tokens")
    assert 0 < accepted < first.count("spec_decode_num_draft_tokens"), "some of the guesses were wrong"
    refused = first.ask("drafts_refused")
    assert list(refused) == ["vocabulary", "parallel", "ranks", "heads", "shorter", "layers", "images", "layer groups"]
    assert all("does not support" in text for text in refused.values())
    first.end()
    again = drafting.start("draft_model").ask("drafted", prompt=prompt(70), max_tokens=ANSWER)
    assert again["cached"] == [WHOLE]
    assert again["tokens"] == answer["tokens"]
    assert again["guesses"] == answer["guesses"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_layers_of_eagle_go_on_from_what_another_engine_stored(drafting: Drafting, method: str) -> None:
    """A block less is loaded than there is, as vLLM computes the last of its own anew."""
    first = drafting.start(method)
    answer = stores_what_was_accepted(first, prompt(71))
    assert first.count("spec_decode_num_accepted_tokens") < first.count("spec_decode_num_draft_tokens")
    assert first.ask("drafted", prompt=prompt(71), max_tokens=ANSWER)["cached"] == [WHOLE - BLOCK], "its own"
    assert first.count("forebay_loaded_blocks") == 0, "what it has itself it does not load"
    first.end()
    again = drafting.start(method).ask("drafted", prompt=prompt(71), max_tokens=ANSWER)
    assert again["cached"] == [WHOLE - BLOCK]
    assert again["tokens"] == answer["tokens"]
    assert again["guesses"] == answer["guesses"]


@pytest.mark.long
def test_engines_with_other_drafts_or_none_share_nothing(drafting: Drafting) -> None:
    first = drafting.start("draft_model")
    answer = stores_what_was_accepted(first, prompt(72))
    first.end()
    for method, seed in (("draft_model", 2), ("eagle", 1), ("", 0)):
        other = drafting.start(method, seed)
        again = other.generate(prompt(72), max_tokens=ANSWER)
        assert again["cached"] == [0] and again["tokens"] == answer["tokens"]
        other.end()


@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_for_many_requests_at_once(drafting: Drafting, method: str) -> None:
    """With chunks of prompts, preemption and a batch whose requests have other numbers of right guesses."""
    prompts = [prompt(seed) for seed in range(73, 79)]
    plain = drafting.start()
    expected = plain.generate(*prompts, max_tokens=ANSWER)["tokens"]
    plain.end()
    # A draft's layers take as much again, or half of it.
    small = {"kv_cache_memory_bytes": 44 * BLOCK_BYTES, "max_model_len": 512, "max_num_batched_tokens": 128}
    for cached in (0, WHOLE - BLOCK):
        engine = drafting.start(method, **small)
        answer = engine.generate(*prompts, max_tokens=ANSWER)
        assert answer["tokens"] == expected and max(answer["cached"]) >= cached
        assert engine.count("num_preemptions") > 0
        engine.ask("settle")
        engine.end()


@pytest.mark.long
def test_one_rank_goes_on_from_drafts_that_two_stored(drafting: Drafting) -> None:
    two = drafting.start("draft_model", tensor_parallel_size=2)
    answer = two.generate(prompt(80), max_tokens=ANSWER)
    accepted = two.count("spec_decode_num_accepted_tokens")

    def stored() -> bool:
        two.generate(prompt(80))  # stored once both have joined
        return two.count("forebay_stored_blocks") >= 2 * BLOCKS

    eventually(stored, "all tiles", 60)
    two.end()
    one = drafting.start("draft_model")
    again = one.generate(prompt(80), max_tokens=ANSWER)
    assert again["cached"] == [WHOLE] and again["tokens"] == answer["tokens"]
    assert one.count("spec_decode_num_accepted_tokens") == accepted > 0
