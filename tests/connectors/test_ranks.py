"""Tensor parallelism: what two ranks stored one reads, and the other way round, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCKS, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

ONE, TWO = prompt(1), prompt(2)
TINY = [1, 2, 3]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path_factory.mktemp("ranks") / "data")
    yield node
    node.stop()


def store(engine: EngineProcess, prompt: list[int], ranks: int) -> list[list[int]]:
    """Compute a prompt, again if need be, until every rank has stored its tiles of every block."""
    before = engine.count("forebay_stored_blocks")
    answer = engine.generate(prompt)
    assert answer["cached"] == [0]

    def stored() -> bool:
        engine.generate(TINY)  # counts come with the engine's steps
        if engine.count("forebay_stored_blocks") >= before + ranks * BLOCKS:
            return True
        engine.generate(prompt)  # what was not stored then is now
        return False

    eventually(stored, "all tiles", 60)
    return list(answer["tokens"])


def load(engine: EngineProcess, prompt: list[int], ranks: int) -> list[list[int]]:
    before = engine.count("forebay_loaded_blocks")
    answer = engine.generate(prompt)
    assert answer["cached"] == [WHOLE]
    assert engine.count("forebay_loaded_blocks") == before + ranks * BLOCKS
    return list(answer["tokens"])


def test_any_split_reads_what_any_other_wrote(node: NodeProcess, tmp_path: Path) -> None:
    model = tmp_path / "model"
    one = EngineProcess(node, model, tmp_path / "one.log")
    of_one = store(one, ONE, 1)
    two = EngineProcess(node, model, tmp_path / "two.log", tensor_parallel_size=2)
    try:
        assert load(two, ONE, 2) == of_one
        of_two = store(two, TWO, 2)
        assert load(one, TWO, 1) == of_two
        # Ranks write in one session: after a restart of the node they join a new one.
        node.kill()
        node.start()
        assert store(two, prompt(3), 2) == store_again(one, prompt(3))
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
