"""Engines that keep their KV in another type, or guess tokens: the same tokens from the node as computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCK, BLOCKS, PLENTY, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture
def engines(shared_node: NodeProcess, tmp_path: Path) -> Iterator[Any]:
    started: list[EngineProcess] = []

    def start(**arguments: Any) -> EngineProcess:
        log = tmp_path / f"{len(started)}.log"
        started.append(EngineProcess(shared_node, tmp_path / "model", log, extra=PLENTY, **arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


def stored(engine: EngineProcess, blocks: int) -> None:
    eventually(lambda: engine.counted("forebay_stored_blocks") >= blocks, "the blocks", 120)


def test_eight_bits_are_kept_apart_by_type(engines: Any) -> None:
    """Whole numbers of bytes go and come whatever they mean, and an engine with another meaning does not find them."""
    engine = engines(kv_cache_dtype="fp8")
    answer = engine.generate(prompt(60))
    stored(engine, BLOCKS)
    engine.ask("forget")
    again = engine.generate(prompt(60))
    assert again["tokens"] == answer["tokens"] and again["cached"] == [WHOLE]
    assert engine.count("forebay_loaded_bytes") == BLOCKS * 2 * BLOCK * 2 * 2 * 32
    engine.end()
    other = engines(kv_cache_dtype="fp8_e5m2")
    assert other.generate(prompt(60))["cached"] == [0]


def test_only_what_was_accepted_of_guesses_is_stored(engines: Any) -> None:
    """A prompt that repeats itself, so that n-grams guess, rightly and wrongly; then on from what was stored."""
    engine = engines(speculative_config=NGRAM)
    start = prompt(61)[:50] * 4
    answer = engine.generate(start, max_tokens=120)["tokens"][0]
    whole = (len(start) + len(answer) - 1) // BLOCK
    stored(engine, whole)
    engine.ask("forget")
    longer = [*start, *answer[:90]]
    again = engine.generate(longer, max_tokens=30)
    assert again["cached"] == [len(longer) // BLOCK * BLOCK] and again["tokens"] == [answer[90:]]
    drafts = engine.count("spec_decode_num_draft_tokens")
    assert drafts > engine.count("spec_decode_num_accepted_tokens"), "some of the guesses were wrong"
