"""Loads into the step that computes with them, layer group by layer group: the same tokens, whatever happens to them.

One engine, whose own prefix cache is dropped between the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import NodeProcess, eventually, halted
from tests.connectors.engine import SMALL_MODEL
from tests.connectors.process import BLOCK, BLOCKS, WHOLE, EngineProcess, prompt, rot

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LAYERS = 4
TILE_BYTES = 2 * BLOCK * 32 * 4
"""One layer and one head, K and V of 32 floats: a whole number of the units that tiles begin on."""
SETTINGS = {"load": "layers", "layer_groups": LAYERS, "probe_timeout_ms": 30_000, "load_timeout_ms": 3_000}


class Scene:
    """A node and an engine, and what it computed for every prompt before anything was stored."""

    PROMPTS = tuple(prompt(seed) for seed in range(40, 45))
    LONGER = (*PROMPTS[0], *prompt(50)[: 2 * BLOCK])

    def __init__(self, directory: Path) -> None:
        self.node = NodeProcess(directory / "data")
        try:
            sizes = {**SMALL_MODEL, "num_hidden_layers": LAYERS}
            log = directory / "engine.log"
            self.engine = EngineProcess(self.node, directory / "model", log, extra=SETTINGS, sizes=sizes)
            *self.answers, self.longer = self.engine.generate(*self.PROMPTS, list(self.LONGER))["tokens"]
            eventually(lambda: self.count("stored_blocks") == len(self.PROMPTS) * BLOCKS + 2, "all blocks", 60)
        except BaseException:
            self.node.stop()
            raise

    def count(self, name: str) -> float:
        return self.engine.counted(f"forebay_{name}")

    def again(self, number: int) -> int:
        """The same tokens with nothing in the engine's own cache; how many it takes for hits."""
        assert self.engine.ask("forget") == {"dropped": True}
        answer = self.engine.generate(self.PROMPTS[number])
        assert answer["tokens"] == [self.answers[number]]
        return int(answer["cached"][0])

    def rot(self, number: int, *, block: int, layer_group: int) -> None:
        """Change a bit of a prompt's block, in the first head group's tile of a layer group."""
        key = self.engine.ask("keys", prompt=self.PROMPTS[number])["keys"][block]
        volume, offset_bytes = self.engine.ask("blocks")[key]
        rot(self.node, volume, offset_bytes + layer_group * TILE_BYTES)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("layers"))
    yield scene
    scene.engine.kill()
    scene.node.stop()


def test_a_step_computes_with_what_it_loads(scene: Scene) -> None:
    before, hits = scene.count("loaded_blocks"), scene.engine.count("external_prefix_cache_hits")
    assert scene.again(0) == WHOLE
    assert scene.count("loaded_blocks") == before + BLOCKS
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE
    assert not scene.engine.count("forebay_lost_blocks:not_waited_for"), "every layer waits"


def test_several_requests_load_in_one_step(scene: Scene) -> None:
    assert scene.engine.ask("forget") == {"dropped": True}
    answer = scene.engine.generate(*scene.PROMPTS)
    assert answer["tokens"] == scene.answers and answer["cached"] == [WHOLE] * len(scene.PROMPTS)


def test_what_first_layers_made_is_stored_while_later_ones_compute(scene: Scene) -> None:
    """All but the last layer group, each of its own tiles: a rank has two head groups."""
    early = scene.engine.ask("written_early", prompt=prompt(51))["tiles"]
    assert early == [[group, LAYERS + group] for group in range(LAYERS - 1)]


def test_a_layer_group_that_rotted_is_computed_again_and_nothing_wrong_is_stored(scene: Scene) -> None:
    """The last layer group of the third block: the step has been computed with those before it."""
    scene.rot(1, block=2, layer_group=LAYERS - 1)
    scene.again(1)
    assert scene.count("lost_blocks:checksum_mismatch") == 1
    assert scene.count("lost_blocks:behind_gap") == BLOCKS - 3
    eventually(lambda: scene.again(1) == WHOLE, "whole again", 60)


def test_what_a_step_computed_on_top_of_a_lost_block_is_not_stored(scene: Scene) -> None:
    longer = [*scene.PROMPTS[2], *prompt(50)[: 2 * BLOCK]]
    scene.engine.ask("forget")
    scene.rot(2, block=0, layer_group=1)
    unstored = scene.count("unstored_blocks:recomputed")
    answer = scene.engine.generate(longer)["tokens"]
    assert scene.count("unstored_blocks:recomputed") == unstored + 2
    # What has been stored of it since was computed with everything: it answers the same from the node.
    scene.engine.ask("settle")
    scene.engine.ask("forget")
    again = scene.engine.generate(longer)
    assert again["tokens"] == answer and again["cached"] == [len(longer) // BLOCK * BLOCK]


def test_two_requests_that_begin_alike_both_get_over_a_lost_block(scene: Scene) -> None:
    scene.rot(0, block=1, layer_group=2)
    scene.engine.ask("forget")
    lost = scene.count("lost_blocks:checksum_mismatch")
    answers = scene.engine.generate(scene.PROMPTS[0], list(scene.LONGER))["tokens"]
    assert answers == [scene.answers[0], scene.longer]
    assert scene.count("lost_blocks:checksum_mismatch") > lost
    scene.engine.ask("settle")
    scene.engine.ask("forget")
    assert scene.engine.generate(list(scene.LONGER), scene.PROMPTS[0])["tokens"] == [scene.longer, scene.answers[0]]


def test_what_is_given_up_while_its_load_fails_is_forgotten(scene: Scene) -> None:
    """vLLM has put the blocks into its own cache by then, and does not hear of the failure."""
    scene.rot(4, block=1, layer_group=0)
    scene.engine.ask("forget")
    lost = scene.count("lost_blocks:checksum_mismatch")
    scene.engine.ask("abort_in_step", prompt=scene.PROMPTS[4])
    assert scene.count("lost_blocks:checksum_mismatch") == lost + 1
    assert scene.engine.generate(scene.PROMPTS[4])["tokens"] == [scene.answers[4]]


def test_a_target_that_stops_in_the_middle_ends_the_step_in_time(scene: Scene) -> None:
    target = scene.node.target_pid
    with halted(target):
        scene.again(3)
    assert scene.count("lost_blocks:late") + scene.count("lost_blocks:unavailable") >= 1
    eventually(lambda: scene.again(3) == WHOLE and scene.again(4) == WHOLE, "the target", 60)
