"""Tensor parallelism: what two ranks stored one reads, and the other way round, with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.engine import SMALL_MODEL, VOCABULARY
from tests.connectors.models import GEMMA, NEEDED, QWEN_NEXT
from tests.connectors.process import BLOCKS, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

ONE, TWO = prompt(1), prompt(2)
TINY = [1, 2, 3]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path_factory.mktemp("ranks") / "data")
    yield node
    node.stop()


@dataclass(frozen=True)
class Case:
    """A kind of engine: how many blocks of a prompt each rank stores, and loads; how many of two ranks write each."""

    name: str
    arguments: dict[str, Any]
    stores: int = BLOCKS
    loads: int = BLOCKS
    writers: int = 2


CASES = [
    Case("plain", {}),
    Case("layers", {"extra": {"load": "layers", "layer_groups": 2}}),
    Case("windows", {"sizes": GEMMA}, stores=2 * BLOCKS, loads=BLOCKS + NEEDED),
    Case("shared heads", {"sizes": {**SMALL_MODEL, "num_key_value_heads": 1}}, writers=1),
]


def store(engine: EngineProcess, prompt: list[int], ranks: int, blocks: int) -> list[list[int]]:
    """Compute a prompt, again if need be, until every rank has stored its tiles of so many blocks."""
    before = engine.count("forebay_stored_blocks")
    answer = engine.generate(prompt)
    assert answer["cached"] == [0]

    def stored() -> bool:
        if engine.counted("forebay_stored_blocks") >= before + ranks * blocks:
            return True
        engine.generate(prompt)  # what was not stored then is now
        return False

    eventually(stored, "all tiles", 60)
    return list(answer["tokens"])


def load(case: Case, engine: EngineProcess, prompt: list[int], ranks: int) -> list[list[int]]:
    before = engine.count("forebay_loaded_blocks")
    answer = engine.generate(prompt)
    assert answer["cached"] == [WHOLE]
    assert engine.count("forebay_loaded_blocks") == before + ranks * case.loads
    return list(answer["tokens"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_split_reads_what_any_other_wrote(node: NodeProcess, tmp_path: Path, case: Case) -> None:
    model = tmp_path / "model"
    one = EngineProcess(node, model, tmp_path / "one.log", **case.arguments)
    of_one = store(one, ONE, 1, case.stores)
    two = EngineProcess(node, model, tmp_path / "two.log", tensor_parallel_size=2, **case.arguments)
    try:
        assert load(case, two, ONE, 2) == of_one
        before = two.count("forebay_stored_blocks")
        of_two = store(two, TWO, case.writers, case.stores)
        assert two.count("forebay_stored_blocks") == before + case.writers * case.stores, "each once"
        assert load(case, one, TWO, 1) == of_two
        # Ranks write in one session: after a restart of the node they join a new one.
        node.kill()
        node.start()
        # What they computed meanwhile they store as far as they still have it, which is what a hit needs.
        assert store(two, prompt(3), case.writers, case.loads) == store_again(one, prompt(3))
    finally:
        one.end()
        two.end()


def store_again(engine: EngineProcess, prompt: list[int]) -> list[list[int]]:
    """What an engine makes of a prompt that others have stored, as soon as it reaches the node again."""
    answer = engine.generate(prompt)

    def loaded() -> bool:
        engine.ask("forget")
        again = engine.generate(prompt)
        assert again["tokens"] == answer["tokens"]
        return list(again["cached"]) == [WHOLE]

    eventually(loaded, "the node", 60)
    return list(answer["tokens"])


def test_ranks_find_their_parts_of_states_again(node: NodeProcess, tmp_path: Path) -> None:
    """What a rank holds of a state is its own: engines of as many ranks share, and the engine says so."""
    arguments: dict[str, Any] = {"sizes": QWEN_NEXT, "dtype": "bfloat16", "tensor_parallel_size": 2}
    engine = EngineProcess(node, tmp_path / "model", tmp_path / "log", **arguments)
    try:
        block, longest = 288, random.Random(0).choices(range(VOCABULARY), k=700)

        def joined() -> bool:
            engine.generate(longest[100:500])
            return engine.count("forebay_stored_blocks") > 0

        eventually(joined, "both ranks", 120)
        tokens = store(engine, longest, 2, 2 + 3)
        engine.ask("forget")
        before = engine.count("forebay_loaded_blocks")
        answer = engine.generate(longest)
        assert answer["tokens"] == tokens and answer["cached"] == [2 * block]
        assert engine.count("forebay_loaded_blocks") == before + 2 * (2 + 3)
        assert "shared only with engines of tensor_parallel_size=2" in engine.log.read_text()
    finally:
        engine.end()
