"""A vLLM engine that measures itself: `python -m perf.engines.engine MODEL CONFIG`, where vLLM is installed.

Serves requests as `tests.connectors.engine` does, with what measuring needs besides. Times are taken in here, around
the engine's own call, so that the pipe to it is in none of them.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.connectors.engine import VOCABULARY, Engine, main

__all__ = ["MeasuredEngine", "prompt"]

_YIELD_S = 0.001


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that follow from a seed."""
    return random.Random(seed).choices(range(1, VOCABULARY), k=tokens)


class MeasuredEngine(Engine):
    """One engine in this process. Prompts are named by seeds.

    vLLM's core, in the process of its own that it usually has, sleeps for a millisecond after a step that computed
    nothing, to let the threads of connectors go on (`EngineCoreProc._process_engine_step`). In one process with its
    client, as here where its scheduler can be clocked, it does not; so it is made to.
    """

    def __init__(self, model: Path, config: dict[str, Any]) -> None:
        super().__init__(model, config)
        core = self.llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def yielding() -> Any:
            outputs, computed = step()
            if not computed and core.scheduler.has_requests():
                time.sleep(_YIELD_S)
            return outputs, computed

        core.step_fn = yielding

    def timed(self, seed: int, tokens: int) -> dict[str, Any]:
        """Seconds until the first token of one prompt, the process' CPU seconds, tokens from caches, and the token.

        The CPU counts what goes on behind the answer, such as saves, to its end.
        """
        cpu = time.process_time()
        began = time.perf_counter()
        answer = self.generate([prompt(seed, tokens)], max_tokens=1)
        seconds = time.perf_counter() - began
        self.settle()
        return {
            "seconds": seconds,
            "cpu_s": time.process_time() - cpu,
            "cached": answer["cached"][0],
            "token": answer["tokens"][0][0],
        }

    def settle(self) -> dict[str, Any]:
        """Wait for what is to be saved, by whatever connector there is."""
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        if hasattr(connector, "_worker"):
            return super().settle()
        while connector is not None and connector.has_pending_push_work():
            self.llm.llm_engine.step()
        return {}

    def forget(self) -> dict[str, Any]:
        """Drop the engine's own prefix cache, and what a connector keeps in memory.

        A connector may hold a request's blocks until a later step: another request, and the step after it, are some.
        """
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        while not self.llm.reset_prefix_cache():
            self.generate([[0]], max_tokens=1)
            self.llm.llm_engine.step()
        return {"dropped": scheduler.connector is None or scheduler.reset_connector_cache()}

    def steps(self, seeds: Sequence[int], tokens: int, max_tokens: int) -> dict[str, Any]:
        """Seconds of each step's `schedule` and `update_from_output` while these prompts are served at once.

        Only steps that compute something count: one that waits for a load has nothing to schedule.
        """
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule_s: list[float] = []
        update_s: list[float] = []

        def clocked(call: Callable[..., Any], into: list[float], counts: Callable[[Any, Any], bool]) -> Any:
            def around(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                result = call(*args, **kwargs)
                seconds = time.perf_counter() - began
                if counts(args, result):
                    into.append(seconds)
                return result

            return around

        schedule, update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule = clocked(schedule, schedule_s, lambda _, output: output.total_num_scheduled_tokens > 0)
        scheduler.update_from_output = clocked(update, update_s, lambda args, _: args[0].total_num_scheduled_tokens > 0)
        try:
            answer = self.generate([prompt(seed, tokens) for seed in seeds], max_tokens=max_tokens)
        finally:
            scheduler.schedule, scheduler.update_from_output = schedule, update
        self.settle()
        return {"schedule_s": schedule_s, "update_s": update_s, "cached": answer["cached"]}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], MeasuredEngine)
