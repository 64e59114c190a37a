"""What the connector adds to a request, and to a step of the scheduler, in milliseconds.

Three engines with one small model take turns, request by request: one without a connector, one with it, and one whose
guard is told that computing is so fast that no load is worth it. What is compared computes the same number of tokens:

- a *hit* is loaded from the node; the engine without a connector has the same prompt in its own prefix cache;
- a *miss* is a prompt that nobody has seen: looked up, computed, and copied for saving;
- a *refusal* is a prompt that the node has and the guard leaves there: looked up and computed.

The model is tiny, so that what is left is the connector's own time; what bytes cost is `perf.engines.delivered`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from perf.engines.process import (
    EngineProcess,
    EngineSetup,
    connect,
    engines,
    forebay_connector,
    parameters,
    vllm_version,
)
from perf.harness import Row, compared_latency_row, file_system
from perf.node import scratch, start_node
from perf.workload import Bench, Wrong
from tests.connectors.engine import SMALL_MODEL

__all__ = ["run"]

_BLOCK, _WHOLE, _TOKENS = 32, 512, 520
_STEP_TOKENS, _STEP_DECODED, _STEP_PROMPTS = 264, 16, 16
_WARM_UP = 2
_FASTEST = 1 << 40
_ARGUMENTS = {"sizes": SMALL_MODEL, "max_model_len": 1024}
_STORED, _NEW, _STEPS = 0, 1_000_000, 2_000_000
"""Where the seeds of prompts begin."""


def run(bench: Bench) -> Iterator[Row]:
    """Rows of requests, then of steps. Raises `Skipped` without vLLM's environment."""
    details = {
        "vllm": vllm_version(),
        "block_tokens": _BLOCK,
        "file_system": file_system(bench.memory_dir),
    }
    rounds = bench.sizes.engine_rounds
    with scratch(bench.memory_dir) as folder, start_node(bench.memory_dir, bench.sizes.node_bytes) as node:
        setups = [
            EngineSetup("plain", _ARGUMENTS),
            forebay_connector(node, "forebay", _ARGUMENTS, guard=False),
            forebay_connector(node, "refusing", _ARGUMENTS, prefill_tokens_per_s=_FASTEST),
        ]
        with engines(folder, setups) as started:
            details["parameters"] = parameters(folder)
            yield from _requests(started, rounds, {**details, "prompt_tokens": _TOKENS})
            yield from _steps(started["forebay"], started["plain"], max(1, rounds // 4), details)


class _Requests:
    """Requests of all kinds, and what came of them."""

    def __init__(self, started: dict[str, EngineProcess]) -> None:
        self._engines = started
        self.answers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def ask(self, kind: str, engine: str, seed: int, cached: int) -> None:
        """One request, of which so many tokens have to be cached. Raises `Wrong`."""
        answer = self._engines[engine].ask("timed", seed=seed, tokens=_TOKENS)
        if kind == "refusal" and answer["cached"]:
            return  # the guard tries a load now and then: those are hits
        if answer["cached"] != cached:
            raise Wrong(f"{kind}: {answer['cached']} tokens were cached, not {cached}")
        self.answers[kind].append(answer)

    def same_tokens(self, *kinds: str) -> None:
        """Raises `Wrong` unless these answered alike. Refusals may lack some, and are left to hits."""
        for answers in zip(*(self.answers[kind] for kind in kinds), strict=True):
            if len({answer["token"] for answer in answers}) > 1:
                raise Wrong(f"other tokens came of {', '.join(kinds)}")

    def seconds(self, kind: str) -> list[float]:
        return [answer["seconds"] for answer in self.answers[kind]]

    def cpu_ms(self, kind: str) -> float:
        """Of the engine's process, saves included; the mean of all."""
        answers = self.answers[kind]
        return float(f"{1e3 * sum(answer['cpu_s'] for answer in answers) / len(answers):.4g}")


def _requests(started: dict[str, EngineProcess], rounds: int, details: dict[str, Any]) -> Iterator[Row]:
    for name in ("forebay", "refusing"):
        connect(started[name])
    seeds = range(_STORED, _STORED + 4)
    for seed in seeds:
        started["forebay"].ask("timed", seed=seed, tokens=_TOKENS)
    asked = _Requests(started)
    for number in range(_WARM_UP + rounds):
        if number == _WARM_UP:
            asked = _Requests(started)
        for engine in started.values():
            engine.ask("forget")
        stored, new = seeds[number % len(seeds)], _NEW + number
        groups = [
            [("hit", "forebay", stored, _WHOLE)],
            [("computed", "plain", stored, 0), ("local hit", "plain", stored, _WHOLE)],
            [("refusal", "refusing", stored, 0)],
            [("miss", "forebay", new, 0)],
            [("computed new", "plain", new, 0)],
        ]
        for group in groups if number % 2 else reversed(groups):
            for request in group:
                asked.ask(*request)
    asked.same_tokens("hit", "local hit", "computed")
    asked.same_tokens("miss", "computed new")
    for kind, baseline, against in (
        ("hit", "local hit", "the same prompt in the engine's own prefix cache"),
        ("miss", "computed new", "the same prompt computed"),
        ("refusal", "computed", "the same prompt computed"),
    ):
        yield compared_latency_row(
            f"vllm.{kind}/plain",
            "vLLM: time to first token with the connector against the same engine without it, tiny model",
            asked.seconds(kind),
            asked.seconds(baseline),
            details={
                **details,
                "against": against,
                "engine_cpu_ms": asked.cpu_ms(kind),
                "baseline_engine_cpu_ms": asked.cpu_ms(baseline),
            },
        )


def _steps(ours: EngineProcess, plain: EngineProcess, rounds: int, details: dict[str, Any]) -> Iterator[Row]:
    """Half of the prompts of each round are stored, half are new; the engine without a connector computes all."""
    half = _STEP_PROMPTS // 2
    stored = list(range(_STEPS, _STEPS + half))
    ours.ask("steps", seeds=stored, tokens=_STEP_TOKENS, max_tokens=1)
    taken: dict[str, list[float]] = {
        f"{side} {what}": [] for side in ("ours", "plain") for what in ("schedule", "update")
    }
    for number in range(1 + rounds):
        first_new = _STEPS + half * (1 + number)
        seeds = [*stored, *range(first_new, first_new + half)]
        sides = [("ours", ours), ("plain", plain)]
        for side, engine in sides if number % 2 else reversed(sides):
            engine.ask("forget")
            told = engine.ask("steps", seeds=seeds, tokens=_STEP_TOKENS, max_tokens=_STEP_DECODED)
            if sum(told["cached"]) != (half * (_STEP_TOKENS // _BLOCK * _BLOCK) if side == "ours" else 0):
                raise Wrong(f"{side}: {told['cached']} tokens were cached")
            if number:
                taken[f"{side} schedule"] += told["schedule_s"]
                taken[f"{side} update"] += told["update_s"]
    for part, method in (("schedule", "schedule"), ("update", "update_from_output")):
        yield compared_latency_row(
            f"vllm.step.{part}.p99/plain",
            "vLLM: the scheduler's part of a step with the connector against without it, p99",
            taken[f"ours {part}"],
            taken[f"plain {part}"],
            quantile=0.99,
            details={
                **details,
                "method": method,
                "prompt_tokens": _STEP_TOKENS,
                "prompts_at_once": _STEP_PROMPTS,
                "steps": [len(taken[f"{side} {part}"]) for side in ("ours", "plain")],
            },
        )
