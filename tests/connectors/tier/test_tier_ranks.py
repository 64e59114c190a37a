"""The tier with several ranks and chunks of several blocks: who shares does exactly, and who cannot never meets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCKS, WHOLE, prompt
from tests.connectors.tier.process import TierProcess

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

ONE, TWO = prompt(41), prompt(42)
TINY = [1, 2, 3]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path_factory.mktemp("ranks") / "data")
    yield node
    node.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "model"


@pytest.fixture(scope="module")
def one(node: NodeProcess, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    engine = TierProcess(node, model, tmp_path_factory.mktemp("one") / "log")
    yield engine
    engine.end()


def store(engine: TierProcess, prompt: list[int], blocks: int = BLOCKS) -> list[list[int]]:
    """Compute a prompt that nobody has, and wait until it is stored."""
    before = engine.count("forebay_tier_stored_blocks")
    answer = engine.generate(prompt)
    assert answer["cached"] == [0]
    eventually(lambda: engine.counted("forebay_tier_stored_blocks") >= before + blocks, "all blocks", 60)
    return list(answer["tokens"])


def load(engine: TierProcess, prompt: list[int], blocks: int = BLOCKS) -> list[list[int]]:
    before = engine.count("forebay_tier_loaded_blocks")
    engine.ask("forget")
    answer = engine.generate(prompt)
    assert answer["cached"] == [WHOLE]
    assert engine.count("forebay_tier_loaded_blocks") == before + blocks
    return list(answer["tokens"])


def test_with_the_canonical_layout_any_split_reads_what_any_other_wrote(
    node: NodeProcess, model: Path, one: TierProcess, tmp_path: Path
) -> None:
    of_one = store(one, ONE)
    extra = {"canonical_layout": True}
    two = TierProcess(node, model, tmp_path / "log", extra=extra, tensor_parallel_size=2)
    try:
        assert load(two, ONE) == of_one
        of_two = store(two, TWO)
        assert load(one, TWO) == of_two
    finally:
        two.end()


def test_otherwise_ranks_share_with_as_many_ranks_and_the_engine_says_so(
    node: NodeProcess, model: Path, one: TierProcess, tmp_path: Path
) -> None:
    three = prompt(43)
    of_one = store(one, three)
    two = TierProcess(node, model, tmp_path / "log", tensor_parallel_size=2)
    try:
        log = tmp_path / "log"
        assert "shared only by engines with tensor_parallel_size=2" in log.read_text()
        assert store(two, three) == of_one
        assert "stored in keyspace" in log.read_text() and "groups[0].format" in log.read_text(), "and what differs"
        assert load(two, three) == of_one
    finally:
        two.end()


def test_chunks_of_several_blocks_are_blocks_of_their_own(
    node: NodeProcess, model: Path, one: TierProcess, tmp_path: Path
) -> None:
    four = prompt(44)
    of_one = store(one, four)
    pairs = TierProcess(node, model, tmp_path / "log", extra={"blocks_per_chunk": 2})
    try:
        assert store(pairs, four, BLOCKS // 2) == of_one
        assert load(pairs, four, BLOCKS // 2) == of_one
        assert load(one, four) == of_one
    finally:
        pairs.end()
