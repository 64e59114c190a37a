"""Seconds to the first token on this CPU: a prompt that comes from the node, and one that is computed.

An illustration of a whole engine, with a model of random weights that a CPU can hold; its size is in the row. It says
nothing about a GPU: `perf.engines.break_even` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perf.engines.process import EngineSetup, connect, engines, forebay_connector, parameters, vllm_version
from perf.harness import Row, compared_latency_row, file_system
from perf.node import scratch, start_node
from perf.workload import Bench, Wrong
from tests.connectors.demo import MODEL

__all__ = ["run"]

_PROMPTS, _WHOLE, _TOKENS = 3, 1_024, 1_040
_ARGUMENTS = {"sizes": MODEL, "max_model_len": 2_048, "kv_cache_memory_bytes": 256 << 20}


def run(bench: Bench) -> Iterator[Row]:
    """One row. Raises `Skipped` without vLLM's environment."""
    version = vllm_version()
    rounds = max(1, bench.sizes.repeats // 2)
    with scratch(bench.memory_dir) as folder, start_node(bench.memory_dir, bench.sizes.node_bytes) as node:
        setups = [EngineSetup("plain", _ARGUMENTS), forebay_connector(node, "forebay", _ARGUMENTS, guard=False)]
        with engines(folder, setups) as started:
            ours, plain = started["forebay"], started["plain"]
            connect(ours)
            for seed in range(_PROMPTS):
                ours.ask("timed", seed=seed, tokens=_TOKENS)
                plain.ask("timed", seed=_PROMPTS + seed, tokens=_TOKENS)
            hits: list[dict[str, Any]] = []
            computed: list[dict[str, Any]] = []
            for number in range(rounds * _PROMPTS):
                seed = number % _PROMPTS
                ours.ask("forget")
                plain.ask("forget")
                sides = [(ours, hits), (plain, computed)]
                for engine, answers in sides if number % 2 else reversed(sides):
                    answers.append(engine.ask("timed", seed=seed, tokens=_TOKENS))
                if hits[-1]["cached"] != _WHOLE or computed[-1]["cached"]:
                    raise Wrong(f"{hits[-1]['cached']} and {computed[-1]['cached']} tokens were cached")
                if hits[-1]["token"] != computed[-1]["token"]:
                    raise Wrong("other tokens came of the node's bytes")
            size = parameters(folder)
    yield compared_latency_row(
        "vllm.first_token/computed",
        "vLLM on this CPU: time to first token from the node against computing it",
        [answer["seconds"] for answer in hits],
        [answer["seconds"] for answer in computed],
        details={
            "vllm": version,
            "parameters": size,
            "prompt_tokens": _TOKENS,
            "cached_tokens": _WHOLE,
            "file_system": file_system(bench.memory_dir),
        },
    )
