"""Prompts with images: found again by an engine that has not seen them, and only where they are processed alike.

Two engines, each a process of its own; in the long profile a third one, whose processor is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.conftest import LONG
from tests.connectors.process import BLOCK, BLOCKS, PLENTY, WHOLE, EngineProcess, prompt, rot
from tests.connectors.seeing import QUERIES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SETTINGS = {"multimodal": True, **PLENTY}
SEEN, OTHER, ROTTEN = range(3)
TEXT = prompt(70)
QUESTION = TEXT[QUERIES:]
"""As long as the other prompts with what an image takes."""
ELSEWHERE = {"image_mean": [0.1, 0.2, 0.9]}


class SeeingProcess(EngineProcess):
    module = "tests.connectors.seeing"

    def see(self, image: int, **request: Any) -> tuple[list[int], int]:
        """The tokens after an image and the question, and how many of the prompt's came from a cache."""
        answer = self.ask("see", image=image, prompt=QUESTION, **request)
        return answer["tokens"], answer["cached"]


class Scene:
    """A node, what an engine without anything in its caches computed, and another one that starts after it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.node = NodeProcess(directory / "data")
        try:
            first = self.start("first")
            try:
                self.answers = {ROTTEN: first.see(ROTTEN)[0]}
                eventually(lambda: first.counted("forebay_stored_blocks") == BLOCKS, "its blocks", 60)
                self.beginning = self._beginning(first)
                self.answers[SEEN] = first.see(SEEN)[0]
                (self.text,) = first.generate(TEXT)["tokens"]
                eventually(lambda: first.counted("forebay_stored_blocks") == 3 * BLOCKS, "all blocks", 60)
                first.end()
            except BaseException:
                first.kill()
                raise
            self.engine = self.start("second")
        except BaseException:
            self.node.stop()
            raise

    @staticmethod
    def _beginning(engine: SeeingProcess) -> list[tuple[int, int]]:
        """Where the first two blocks of the only prompt lie: volumes and offsets."""
        places = engine.ask("blocks")
        told = engine.ask("described", keys=list(places))
        (root,) = [key for key in told if told[key]["parent"] == ""]
        (second,) = [key for key in told if told[key]["parent"] == root]
        return [places[root], places[second]]

    def start(self, name: str, **arguments: Any) -> SeeingProcess:
        log, model = self.directory / f"{name}.log", self.directory / "model"
        engine = SeeingProcess(self.node, model, log, extra=SETTINGS, **arguments)
        try:
            eventually(lambda: engine.ask("connected")["both"], "the session", 60)
        except BaseException:
            engine.kill()
            raise
        return engine

    def end(self) -> None:
        self.engine.kill()
        self.node.stop()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("images"))
    yield scene
    scene.end()


def test_an_image_that_another_engine_saw_is_loaded(scene: Scene) -> None:
    before = scene.engine.counted("forebay_loaded_blocks")
    assert scene.engine.see(SEEN) == (scene.answers[SEEN], WHOLE)
    assert scene.engine.counted("forebay_loaded_blocks") == before + BLOCKS


def test_another_image_is_not_taken_for_it(scene: Scene) -> None:
    tokens, cached = scene.engine.see(OTHER)
    assert cached == 0 and tokens != scene.answers[SEEN]


def test_text_is_loaded_as_ever(scene: Scene) -> None:
    answer = scene.engine.generate(TEXT)
    assert answer["tokens"] == [scene.text] and answer["cached"] == [WHOLE]


def test_a_block_inside_an_image_that_is_lost_is_computed(scene: Scene) -> None:
    assert BLOCK < QUERIES < 2 * BLOCK, "the second block begins inside the image"
    for count, place in enumerate(reversed(scene.beginning), 1):
        rot(scene.node, *place)
        assert scene.engine.ask("forget") == {"dropped": True}
        assert scene.engine.see(ROTTEN)[0] == scene.answers[ROTTEN]
        assert scene.engine.counted("forebay_lost_blocks:checksum_mismatch") == count
        scene.engine.ask("settle")
    assert scene.engine.ask("forget") == {"dropped": True}
    eventually(lambda: scene.engine.see(ROTTEN) == (scene.answers[ROTTEN], WHOLE), "what was computed is stored", 60)


def test_a_name_is_believed_as_the_engine_believes_it(scene: Scene) -> None:
    named = scene.engine.see(SEEN, name="that")
    assert named == (scene.answers[SEEN], 0), "by its content it is another one"
    scene.engine.ask("settle")
    assert scene.engine.ask("forget") == {"dropped": True}
    assert scene.engine.see(OTHER, name="that") == (scene.answers[SEEN], WHOLE)


def test_a_processor_with_other_settings_is_another_one(scene: Scene) -> None:
    here = scene.engine.ask("processor")
    assert here["digest"] == here["schema"] != ""
    assert scene.engine.ask("processor", kwargs=ELSEWHERE)["digest"] != here["digest"]
    settings = scene.directory / "model" / "processor_config.json"
    text = settings.read_text()
    settings.write_text(text.replace('"resample": 3', '"resample": 2'))
    assert scene.engine.ask("processor")["digest"] != here["digest"]
    settings.write_text(text)
    assert scene.engine.ask("processor")["digest"] == here["digest"]


def test_what_would_not_go_well_with_images_is_refused(scene: Scene) -> None:
    said = scene.engine.ask("refused")
    assert "--ec-transfer-config" in said["ec_transfer_config"]
    assert "--video-pruning-rate" in said["video_pruning_rate"]
    assert "multimodal with load=layers" in said["load"]


@pytest.mark.skipif(not LONG, reason="starts a third engine (FOREBAY_TEST_PROFILE=long)")
def test_an_engine_with_another_processor_finds_nothing(scene: Scene) -> None:
    engine = scene.start("third", mm_processor_kwargs=ELSEWHERE)
    try:
        tokens, cached = engine.see(SEEN)
        assert cached == 0 and tokens != scene.answers[SEEN], "what it would have found was not its own"
        assert engine.generate(TEXT) == {"tokens": [scene.text], "reasons": ["length"], "cached": [0]}
        assert engine.counted("forebay_hit_blocks") == 0
    finally:
        engine.kill()
