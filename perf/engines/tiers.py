"""A prefix from disk behind a dropped page cache, against vLLM's own ``fs`` tier and LMCache, with the same bytes.

Engines with one model whose KV is as large as Llama-3.1-8B's (128 KiB a token) and whose computing is small: with
Forebay's connector, with Forebay as a tier of vLLM's offloading connector, with vLLM's ``fs`` tier there, and, where it
is installed, with LMCache and its own files (`perf.engines.lmcache`). Each
loads a prefix of 64 MiB for one request that waits for it, from files on the same disk whose pages were dropped just
before (`perf.engines.cold`), into an engine whose own caches, host pool included, were emptied. What is timed is the
whole request. On a CPU vLLM's tiering needs copies of its own between KV cache and host pool
(`tests.connectors.tier.plain_copies`); both tiers have the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.measure.samples import process_cpu_s
from perf.engines.cold import cached_bytes, drop
from perf.engines.lmcache import lmcache_missing, lmcache_server
from perf.engines.process import EngineProcess, EngineSetup, connect, engines, forebay_connector, vllm_version
from perf.harness import Row, Sample, file_system, gb_per_s_row
from perf.node import scratch, start_node
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
_STORE_S, _POLL_S = 120, 0.1
_OURS = {"connector": "Forebay's connector", "tier": "Forebay's tier"}
_THEIRS = {"fs": "vLLM's fs tier", "lmcache": "LMCache with files"}
_SLACK_BYTES = 1 << 20
"""What a node may have written to its log and its metadata since."""
_ARGUMENTS = {"sizes": _MODEL, "max_model_len": 1_024, "kv_cache_memory_bytes": 256 << 20}


@dataclass(frozen=True, slots=True)
class _Way:
    """One engine, where its bytes lie, and the processes that serve them to it."""

    engine: EngineProcess
    files: Path
    servers: tuple[int, ...]

    def stored(self, size: int) -> None:
        """Wait until so many bytes have reached the disk. Raises `Wrong`."""
        until = time.monotonic() + _STORE_S
        while sum(path.stat().st_blocks * 512 for path in self.files.rglob("*")) < size:
            if time.monotonic() > until:
                raise Wrong(f"{self.files} has not got what was computed")
            time.sleep(_POLL_S)

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


def run(bench: Bench) -> Iterator[Row]:
    """A row for each of Forebay's seams and each of the others. Raises `Skipped` without vLLM, or a disk."""
    version, disk = vllm_version(), bench.disk()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(disk))
        nodes = {name: stack.enter_context(start_node(disk, _NODE_BYTES)) for name in _OURS}
        ours = {"type": "ForebayTier", "module_path": "forebay.connectors.vllm.tier", "url": nodes["tier"].url}
        setups = [
            forebay_connector(nodes["connector"], "connector", _ARGUMENTS, guard=False),
            _offloading("tier", ours, {"FOREBAY_TOKEN": nodes["tier"].token}),
            _offloading("fs", {"type": "fs", "root_dir": str(folder / "fs")}),
        ]
        places = {name: (node.data, node.servers) for name, node in nodes.items()} | {"fs": (folder / "fs", ())}
        about = {"vllm": version, "lmcache": lmcache_missing()}
        if about["lmcache"] is None:
            server = stack.enter_context(lmcache_server(folder / "lmcache", folder / "lmcache-server.log"))
            setups.append(server.engine("lmcache", _ARGUMENTS))
            places["lmcache"] = folder / "lmcache", (server.pid,)
            about["lmcache"] = server.version
        for files, _ in places.values():
            files.mkdir(exist_ok=True)
        started = stack.enter_context(engines(folder, setups))
        connect(started["connector"])
        ways = {name: _Way(started[name], *place) for name, place in places.items()}
        samples = _samples(ways, bench.sizes.repeats)
    for theirs in (name for name in samples if name not in _OURS):
        for name, what in _OURS.items():
            yield gb_per_s_row(
                f"vllm.cold.{name}/{theirs}",
                f"vLLM: a prefix of 64 MiB from disk, page cache dropped: {what} against {_THEIRS[theirs]}",
                samples[name],
                samples[theirs],
                aim=None,
                details={
                    **about,
                    "bytes": _WHOLE * _TOKEN_BYTES,
                    "request_ms": _milliseconds(samples[name]),
                    "baseline_request_ms": _milliseconds(samples[theirs]),
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
    for way in ways.values():
        way.stored(_PROMPTS * _WHOLE * _TOKEN_BYTES)
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
