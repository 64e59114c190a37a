"""The comparisons, one file each; ``run(bench)`` yields their rows or raises `perf.workload.Skipped`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from perf.engines import added, break_even, delivered, first_token, replay, tiers
from perf.harness import Row
from perf.ratios import (
    calls,
    checksum,
    floor,
    flush,
    get_disk,
    get_redis,
    get_tcp,
    kill,
    match,
    nvme_of,
    outside,
    put_full,
    put_redis,
    put_tcp,
    scale,
)
from perf.workload import Bench

__all__ = ["BENCHMARKS", "GROUPS", "NOT_UNASKED", "OF_ENGINES"]

BENCHMARKS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "get_tcp": get_tcp.run,
    "get_disk": get_disk.run,
    "get_redis": get_redis.run,
    "put_tcp": put_tcp.run,
    "put_redis": put_redis.run,
    "put_full": put_full.run,
    "nbdkit": outside.run_nbdkit,
    "mooncake": outside.run_mooncake,
    "floor": floor.run,
    "calls": calls.run,
    "match": match.run,
    "checksum": checksum.run,
    "flush": flush.run,
    "initiators": nvme_of.run_initiators,
    "targets": nvme_of.run_targets,
    "digests": nvme_of.run_digests,
    "scale": scale.run,
    "kill": kill.run,
    "vllm_added": added.run,
    "vllm_delivered": delivered.run,
    "vllm_tiers": tiers.run,
    "vllm_first_token": first_token.run,
    "break_even": break_even.run,
    "replay": replay.run,
}

OF_ENGINES = frozenset({"vllm_added", "vllm_tiers", "vllm_first_token"})
"""Those that start vLLM itself."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "engines": ("vllm_added", "vllm_delivered", "vllm_tiers", "vllm_first_token", "break_even", "replay")
}
"""Names for several at once."""

NOT_UNASKED = frozenset({"scale", "kill", *GROUPS["engines"]})
"""Comparisons that take long, and are made only when named."""
