"""vLLM's `MultiConnector`: Forebay's beside another connector, whichever comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCK, BLOCKS, PLENTY, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

OTHER = {"kv_connector": "OtherConnector", "kv_connector_module_path": "tests.connectors.other", "kv_role": "kv_both"}


class First(EngineProcess):
    """Forebay's connector before the other one."""

    first = True
    lacks_tokens = 0

    def transfer(self, node: NodeProcess, extra: dict[str, Any]) -> dict[str, Any]:
        mine = super().transfer(node, extra)
        other = {**OTHER, "kv_connector_extra_config": {"lacks_tokens": self.lacks_tokens}}
        connectors = [mine, other] if self.first else [other, mine]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": mine["kv_load_failure_policy"],
            "kv_connector_extra_config": {"connectors": connectors},
        }


class Last(First):
    """After it: what workers tell when the engine starts is of the other one."""

    first = False


@pytest.mark.parametrize("place", [First, Last])
def test_beside_another_connector(shared_node: NodeProcess, tmp_path: Path, place: type[First]) -> None:
    engine = place(shared_node, tmp_path / "model", tmp_path / "log", extra={**PLENTY, "revision": place.__name__})
    try:
        answer = engine.generate(prompt(70))["tokens"]

        def stored() -> bool:
            engine.generate(prompt(70))  # what it has computed it stores as soon as it can
            return engine.count("forebay_stored_blocks") >= BLOCKS

        eventually(stored, "the blocks", 120)
        engine.ask("forget")
        again = engine.generate(prompt(70))
        assert again["tokens"] == answer and again["cached"] == [WHOLE]
        assert engine.count("external_prefix_cache_hits") >= WHOLE
        engine.end()
    finally:
        engine.kill()


class Lacking(First):
    """The other one loads two blocks in the step that computes the rest, and says afterwards that it did not."""

    lacks_tokens = 2 * BLOCK


def test_what_was_computed_with_a_load_of_another_connector_that_failed_is_not_stored(
    shared_node: NodeProcess, tmp_path: Path
) -> None:
    engine = Lacking(shared_node, tmp_path / "model", tmp_path / "log", extra={**PLENTY, "revision": "Lacking"})
    try:
        answer = engine.generate(prompt(71))["tokens"]
        assert "Recovered from KV load failure" in engine.log.read_text()
        engine.ask("forget")
        again = engine.generate(prompt(71))
        assert again["tokens"] == answer and again["cached"] == [0], "nothing of the first time is there"

        def loaded() -> bool:
            engine.ask("forget")
            again = engine.generate(prompt(71))
            assert again["tokens"] == answer
            return bool(again["cached"] == [WHOLE])

        eventually(loaded, "what the second time has stored", 120)
        engine.end()
    finally:
        engine.kill()
