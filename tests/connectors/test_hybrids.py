"""Models of several KV cache groups: each has what it needs at the node, and nothing more is asked of it.

In the long profile with two engines, each a process of its own; between them the node is killed and started again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.conftest import LONG
from tests.connectors.engine import VOCABULARY
from tests.connectors.models import GEMMA, LLAMA_4, NEEDED, QWEN_NEXT
from tests.connectors.process import BLOCK, BLOCKS, PLENTY, WHOLE, EngineProcess, prompt, rot

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


class Hybrid:
    """A node, what every prompt is answered with, and an engine that has nothing in its own cache."""

    SHARED, HELD, SHORT, ROTTEN, MIXED = (prompt(seed) for seed in range(20, 25))
    EVERYTHING = (SHARED, HELD, SHORT, ROTTEN, MIXED)

    def __init__(self, directory: Path) -> None:
        self.node = NodeProcess(directory / "data")
        self.model = directory / "model"
        first = self.start(directory / "first.log")
        try:
            self.groups = first.ask("groups")["kinds"]
            self.answers = first.generate(*self.EVERYTHING)["tokens"]
            eventually(lambda: self.stored(first) == 2 * BLOCKS * len(self.EVERYTHING), "all blocks", 60)
            self.engine = first
            if LONG:
                first.end()
                self.node.kill()
                self.node.start()
                self.engine = self.start(directory / "second.log")
                eventually(lambda: self.engine.ask("connected")["both"], "the second engine's session", 60)
        except BaseException:
            first.kill()
            self.node.stop()
            raise

    def start(self, log: Path) -> EngineProcess:
        return EngineProcess(self.node, self.model, log, extra=PLENTY, sizes=GEMMA)

    @staticmethod
    def stored(engine: EngineProcess) -> float:
        return engine.counted("forebay_stored_blocks")

    @property
    def sliding(self) -> int:
        return int(self.groups.index("sliding"))

    def again(self, prompt: list[int]) -> tuple[int, float]:
        """The same tokens with nothing in the engine's own cache: how many were hits, and how many blocks were read."""
        assert self.engine.ask("forget") == {"dropped": True}
        before = self.count("loaded_blocks")
        answer = self.engine.generate(prompt)
        assert answer["tokens"] == [self.answers[self.EVERYTHING.index(prompt)]]
        return int(answer["cached"][0]), self.count("loaded_blocks") - before

    def count(self, name: str) -> float:
        return self.engine.count(f"forebay_{name}")

    def keys(self, prompt: list[int]) -> list[str]:
        """The keys of a prompt's blocks, which are the same in both groups."""
        keys: list[str] = self.engine.ask("keys", prompt=prompt)["keys"]
        return keys

    def delete(self, keys: list[str], group: int) -> None:
        done: dict[str, Any] = self.engine.ask("delete_blocks", keys=keys, group=group)
        assert done == {"done": ["ok"] * len(keys)}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    hybrid = Hybrid(tmp_path_factory.mktemp("hybrid"))
    yield hybrid
    hybrid.engine.kill()
    hybrid.node.stop()


def test_a_window_of_one_group_is_found_and_all_of_the_other(hybrid: Hybrid) -> None:
    assert sorted(hybrid.groups) == ["full", "sliding"]
    assert hybrid.again(hybrid.SHARED) == (WHOLE, BLOCKS + NEEDED)


def test_failures_could_not_be_told_in_the_middle_of_a_step(hybrid: Hybrid) -> None:
    assert "load=layers with windows, states or several KV cache groups" in hybrid.engine.ask("layers_refused")["why"]


def test_what_lies_behind_the_window_is_not_missed(hybrid: Hybrid) -> None:
    hybrid.delete(hybrid.keys(hybrid.HELD)[: BLOCKS - NEEDED], hybrid.sliding)
    assert hybrid.again(hybrid.HELD) == (WHOLE, BLOCKS + NEEDED)


def test_a_hit_is_as_long_as_every_group_has_what_it_needs(hybrid: Hybrid) -> None:
    hybrid.delete(hybrid.keys(hybrid.SHORT)[BLOCKS - 1 : BLOCKS], hybrid.sliding)
    assert hybrid.again(hybrid.SHORT) == (WHOLE - BLOCK, BLOCKS - 1 + NEEDED)
    eventually(lambda: hybrid.again(hybrid.SHORT) == (WHOLE, BLOCKS + NEEDED), "what was computed is stored", 60)


def test_one_block_of_the_window_that_rotted_is_computed_around(hybrid: Hybrid) -> None:
    key = hybrid.keys(hybrid.ROTTEN)[BLOCKS - 1]
    rot(hybrid.node, *hybrid.engine.ask("blocks", group=hybrid.sliding)[key])
    hybrid.again(hybrid.ROTTEN)  # vLLM goes on to count what it planned to load as cached
    assert hybrid.count("lost_blocks:checksum_mismatch") == 1
    eventually(lambda: hybrid.again(hybrid.ROTTEN) == (WHOLE, BLOCKS + NEEDED), "whole again", 60)


def test_local_and_external_hits_add_up(hybrid: Hybrid) -> None:
    assert hybrid.engine.ask("forget") == {"dropped": True}
    assert hybrid.engine.generate(hybrid.MIXED[: 3 * BLOCK + 5])["cached"] == [3 * BLOCK]
    before = hybrid.count("loaded_blocks")
    answer = hybrid.engine.generate(hybrid.MIXED)
    assert answer["cached"] == [WHOLE] and answer["tokens"] == [hybrid.answers[hybrid.EVERYTHING.index(hybrid.MIXED)]]
    assert hybrid.count("loaded_blocks") - before == (BLOCKS - 3) + NEEDED


@pytest.mark.long
def test_of_a_chunk_is_loaded_what_it_has_so_far(tmp_path: Path) -> None:
    """Llama 4: where a hit ends with a chunk, nothing of it is looked at any more."""
    node = NodeProcess(tmp_path / "data")
    engine = EngineProcess(node, tmp_path / "model", tmp_path / "log", extra=PLENTY, sizes=LLAMA_4)
    try:
        assert sorted(engine.ask("groups")["kinds"]) == ["chunked", "full"]
        prompts = [prompt(30)[: 6 * BLOCK + 8], prompt(31)[: 5 * BLOCK + 8]]
        answers = engine.generate(*prompts)["tokens"]
        eventually(lambda: Hybrid.stored(engine) == 2 * (6 + 5), "all blocks", 60)
        for each, answer, blocks in zip(prompts, answers, (6 + 0, 5 + 1), strict=True):
            before = engine.count("forebay_loaded_blocks")
            engine.ask("forget")
            again = engine.generate(each)
            assert again["tokens"] == [answer] and again["cached"] == [len(each) // BLOCK * BLOCK]
            assert engine.count("forebay_loaded_blocks") - before == blocks
        engine.end()
    finally:
        engine.kill()
        node.stop()


@pytest.mark.long
def test_states_of_linear_attention_are_found_where_they_were_left(tmp_path: Path) -> None:
    """Qwen3-Next: a state is kept where a block ends and the engine stopped, which is at the last one of a prompt."""
    node = NodeProcess(tmp_path / "data")
    arguments: dict[str, Any] = {"extra": PLENTY, "sizes": QWEN_NEXT, "dtype": "bfloat16"}
    first = EngineProcess(node, tmp_path / "model", tmp_path / "first.log", **arguments)
    processes = [first]
    try:
        groups = first.ask("groups")
        assert sorted(set(groups["kinds"])) == ["full", "mamba"] and len(set(groups["tokens"])) == 1
        (block,) = set(groups["tokens"])
        states = groups["kinds"].count("mamba")
        one, other, lost = ([*random.Random(seed).choices(range(VOCABULARY), k=2 * block + 50)] for seed in range(3))
        answers = [first.generate(each)["tokens"] for each in (one, other, lost)]
        eventually(lambda: Hybrid.stored(first) == 3 * (2 + states), "all blocks and states", 60)
        first.end()
        node.kill()
        node.start()
        second = EngineProcess(node, tmp_path / "model", tmp_path / "second.log", **arguments)
        processes.append(second)
        eventually(lambda: second.ask("connected")["both"], "the second engine's session", 60)
        answer = second.generate(one)
        assert answer["tokens"] == answers[0] and answer["cached"] == [2 * block]
        assert second.count("forebay_loaded_blocks") == 2 + states
        # Without a state at its end a prefix is of no use, however much of the rest there is.
        key = second.ask("keys", prompt=other)["keys"][1]
        assert second.ask("delete_blocks", keys=[key], group=groups["kinds"].index("mamba"))["done"] == ["ok"]
        answer = second.generate(other)
        assert answer["tokens"] == answers[1] and answer["cached"] == [0]
        key = second.ask("keys", prompt=lost)["keys"][1]
        rot(node, *second.ask("blocks", group=groups["kinds"].index("mamba"))[key])
        assert second.generate(lost)["tokens"] == answers[2]
        assert second.count("forebay_lost_blocks:checksum_mismatch") == 1
        second.end()
    finally:
        for process in processes:
            process.kill()
        node.stop()
