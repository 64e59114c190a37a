"""A prefix from disk behind a dropped page cache, against vLLM's own ``fs`` tier, with the same bytes.

Three engines with one model whose KV is as large as Llama-3.1-8B's (128 KiB a token) and whose computing is small: with
Forebay's connector, with Forebay as a tier of vLLM's offloading connector, and with vLLM's ``fs`` tier there. Each
loads a prefix of 64 MiB for one request that waits for it, from files on the same disk whose pages were dropped just
before (`perf.engines.cold`), into an engine whose own caches, host pool included, were emptied. What is timed is the
whole request. On a CPU vLLM's tiering needs copies of its own between KV cache and host pool
(`tests.connectors.tier.plain_copies`); both tiers have the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.measure.samples import process_cpu_s
from perf.engines.cold import cached_bytes, drop
from perf.engines.process import EngineProcess, EngineSetup, connect, engines, forebay_connector, vllm_version
from perf.harness import Row, Sample, file_system, gb_per_s_row
from perf.node import BenchNode, scratch, start_node
from perf.workload import Bench, Wrong

__all__ = ["run"]

_MODEL = {
    "hidden_size": 512,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "initializer_range": 0.05,
}
_TOKEN_BYTES = 32 * 4 * 2 * 128 * 4
_PROMPTS, _WHOLE, _TOKENS = 2, 512, 520
_POOL_BYTES = 256 << 20
_NODE_BYTES = 512 << 20
_SLACK_BYTES = 1 << 20
"""What a node may have written to its log and its metadata since."""
_ARGUMENTS = {"sizes": _MODEL, "max_model_len": 1_024, "kv_cache_memory_bytes": 256 << 20}


@dataclass(frozen=True, slots=True)
class _Way:
    """One engine, where its bytes lie, and the processes that serve them to it."""

    engine: EngineProcess
    files: Path
    servers: tuple[int, ...]

    def sample(self, seed: int) -> tuple[Sample, int]:
        """One request from nothing but the disk, and its first token. Raises `Wrong`."""
        self.engine.ask("forget")
        drop(self.files)
        cached = cached_bytes(self.files)
        if cached > _SLACK_BYTES:
            raise Wrong(f"{cached} bytes of {self.files} stayed cached")
        server_s = sum(map(process_cpu_s, self.servers))
        answer = self.engine.ask("timed", seed=seed, tokens=_TOKENS)
        server_s = sum(map(process_cpu_s, self.servers)) - server_s
        if answer["cached"] != _WHOLE:
            raise Wrong(f"{answer['cached']} tokens were loaded, not {_WHOLE}")
        return Sample(_WHOLE * _TOKEN_BYTES, answer["seconds"], answer["cpu_s"], server_s), answer["token"]


def _offloading(name: str, tier: dict[str, Any], variables: dict[str, str] | None = None) -> EngineSetup:
    extra = {
        "spec_name": "PlainCopyTieringSpec",
        "spec_module_path": "tests.connectors.tier.plain_copies",
        "cpu_bytes_to_use": _POOL_BYTES,
        "secondary_tiers": [tier],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return EngineSetup(name, _ARGUMENTS, transfer, variables or {})


def _setups(folder: Path, nodes: dict[str, BenchNode]) -> list[EngineSetup]:
    tier = nodes["tier"]
    ours = {"type": "ForebayTier", "module_path": "forebay.connectors.vllm.tier", "url": tier.url}
    return [
        forebay_connector(nodes["connector"], "connector", _ARGUMENTS, guard=False),
        _offloading("tier", ours, {"FOREBAY_TOKEN": tier.token}),
        _offloading("fs", {"type": "fs", "root_dir": str(folder / "fs")}),
    ]


def run(bench: Bench) -> Iterator[Row]:
    """A row for each of Forebay's seams. Raises `Skipped` without vLLM's environment, or a disk."""
    version, disk = vllm_version(), bench.disk()
    with (
        scratch(disk) as folder,
        start_node(disk, _NODE_BYTES) as connector_node,
        start_node(disk, _NODE_BYTES) as tier_node,
    ):
        (folder / "fs").mkdir()
        nodes = {"connector": connector_node, "tier": tier_node}
        with engines(folder, _setups(folder, nodes)) as started:
            connect(started["connector"])
            ways = {name: _Way(started[name], node.data, node.servers) for name, node in nodes.items()}
            ways["fs"] = _Way(started["fs"], folder / "fs", ())
            samples = _samples(ways, bench.sizes.repeats)
    for name, what in (("connector", "Forebay's connector"), ("tier", "Forebay's tier")):
        yield gb_per_s_row(
            f"vllm.cold.{name}/fs",
            f"vLLM: a prefix of 64 MiB from disk, page cache dropped: {what} against vLLM's fs tier",
            samples[name],
            samples["fs"],
            aim=None,
            details={
                "vllm": version,
                "bytes": _WHOLE * _TOKEN_BYTES,
                "request_ms": _milliseconds(samples[name]),
                "baseline_request_ms": _milliseconds(samples["fs"]),
                "dropped_by": "POSIX_FADV_DONTNEED",
                "file_system": file_system(disk),
            },
        )


def _samples(ways: dict[str, _Way], rounds: int) -> dict[str, list[Sample]]:
    tokens: dict[int, int] = {}
    for seed in range(_PROMPTS):
        for way in ways.values():
            answer = way.engine.ask("timed", seed=seed, tokens=_TOKENS)
            if answer["cached"] or tokens.setdefault(seed, answer["token"]) != answer["token"]:
                raise Wrong("the engines do not compute the same")
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    order = list(ways)
    for number in range(1 + rounds):
        seed, first = number % _PROMPTS, number % len(order)
        for name in (*order[first:], *order[:first]):
            sample, token = ways[name].sample(seed)
            if token != tokens[seed]:
                raise Wrong(f"{name}: another token came of the bytes that were loaded")
            if number:
                samples[name].append(sample)
    return samples


def _milliseconds(samples: list[Sample]) -> float:
    middle = sorted(sample.wall_s for sample in samples)[len(samples) // 2]
    return float(f"{middle * 1e3:.4g}")
