"""Bytes delivered into an engine's KV cache by the connector's worker half, for 1, 8 and 32 requests at once.

Each request is 256 tokens of Llama-3.1-8B in 16 bits, 32 MiB of 8 blocks, from a node on tmpfs into cache tensors of 32
layers (of fewer, where sizes are small). Beside it, in turns: a bare TCP receive of as many bytes into one buffer,
without putting them anywhere, and a copy of as many from one place of memory to another.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

from perf.harness import Row, Sample, file_system, gb_per_s_row
from perf.node import start_node
from perf.workload import Bench, Skipped, Wrong
from tests.envs import ENVIRONMENTS

__all__ = ["run"]

_CONCURRENT = (1, 8, 32)
_REQUEST_BLOCKS, _STORED_BLOCKS = 8, 64
_LAYERS, _LAYER_BYTES = 32, 128 << 10
_AGAINST = {
    "tcp": "vLLM: bytes delivered to the KV cache by the connector, against bare TCP of as many into one buffer",
    "memcpy": "vLLM: bytes delivered to the KV cache by the connector, against a copy of as many in memory",
}


def run(bench: Bench) -> Iterator[Row]:
    """Rows for each number of requests. Raises `Skipped` without an environment that has torch."""
    environment = ENVIRONMENTS["torch"]
    if environment.missing:
        raise Skipped(environment.missing)
    sizes = bench.sizes
    layers = min(_LAYERS, max(1, sizes.working_bytes // _STORED_BLOCKS // _LAYER_BYTES))
    with start_node(bench.memory_dir, sizes.node_bytes) as node:
        config = {
            "url": node.url,
            "servers": node.servers,
            "concurrent": _CONCURRENT,
            "layers": layers,
            "request_blocks": _REQUEST_BLOCKS,
            "slot_bytes": sizes.slot_bytes,
            "repeats": sizes.repeats,
        }
        done = subprocess.run(
            [environment.python, "-m", "perf.engines.loading", json.dumps(config)],
            env={**environment.variables(), "FOREBAY_TOKEN": node.token},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise Wrong(done.stderr[-4000:])
    for concurrent, sides in json.loads(done.stdout.splitlines()[-1]).items():
        samples = {name: [Sample(**sample) for sample in taken] for name, taken in sides.items()}
        for against, what in _AGAINST.items():
            yield gb_per_s_row(
                f"vllm.load.x{concurrent}/{against}",
                what,
                samples["forebay"],
                samples[against],
                aim=None,
                details={
                    "concurrent": int(concurrent),
                    "layers": layers,
                    "request_bytes": _REQUEST_BLOCKS * layers * _LAYER_BYTES,
                    "block_bytes": layers * _LAYER_BYTES,
                    "file_system": file_system(bench.memory_dir),
                },
            )
