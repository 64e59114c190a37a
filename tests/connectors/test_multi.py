"""vLLM's `MultiConnector`: Forebay's beside another connector, whichever comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.process import BLOCKS, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

OTHER = {"kv_connector": "OtherConnector", "kv_connector_module_path": "tests.connectors.other", "kv_role": "kv_both"}
PLENTY = {"probe_timeout_ms": 30_000, "load_timeout_ms": 30_000}


class First(EngineProcess):
    """Forebay's connector before the other one."""

    first = True

    def transfer(self, node: NodeProcess, extra: dict[str, Any]) -> dict[str, Any]:
        mine = super().transfer(node, extra)
        connectors = [mine, OTHER] if self.first else [OTHER, mine]
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
