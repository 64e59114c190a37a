"""Two engines, processes of their own, that compute and store the same prompts at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCKS, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

PROMPTS = [prompt(seed) for seed in range(100, 112)]


def test_two_engines_that_store_the_same_prompts_at_once(shared_node: NodeProcess, tmp_path: Path) -> None:
    engines = [EngineProcess(shared_node, tmp_path / "model", tmp_path / f"{i}.log") for i in range(2)]
    try:
        with ThreadPoolExecutor(2) as together:
            answers = list(together.map(lambda engine: engine.generate(*PROMPTS), engines))
        assert answers[0]["tokens"] == answers[1]["tokens"]
        for engine in engines:
            engine.ask("settle")
        assert len(engines[0].ask("blocks")) == len(PROMPTS) * BLOCKS, "each once"

        def all_from_the_node(engine: EngineProcess) -> bool:
            engine.ask("forget")
            again = engine.generate(*PROMPTS)
            assert again["tokens"] == answers[0]["tokens"]
            return bool(again["cached"] == [WHOLE] * len(PROMPTS))

        for engine in engines:
            eventually(lambda engine=engine: all_from_the_node(engine), "all hits", 60)  # type: ignore[misc]
        stored = [engine.count("forebay_stored_blocks") for engine in engines]
        assert sum(stored) == len(PROMPTS) * BLOCKS
    finally:
        for engine in engines:
            engine.end()
