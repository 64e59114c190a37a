"""What the connector counts, for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["METRICS", "ConnectorStats", "Counters", "PrometheusMetrics"]

METRICS = {
    "hit_blocks": "KV blocks that requests asked for and the node has.",
    "missed_blocks": (
        "KV blocks that requests asked for and do not get from the node, by reason; behind_gap: it has them, and not "
        "one before them."
    ),
    "decisions": (
        "Lookups with hits that the engine asked about, by what was decided: unknown (loaded, to learn), faster, "
        "partial, trial (loaded), slower, late (computed)."
    ),
    "loaded_blocks": "KV blocks read from the node, by each rank.",
    "loaded_bytes": "Bytes of the KV blocks read from the node.",
    "load_seconds": "Time that loads took, each from its start to its end.",
    "lost_blocks": "KV blocks that the node had and that could not be loaded and are computed, by reason.",
    "stored_blocks": "KV blocks stored at the node, by each rank.",
    "stored_bytes": "Bytes of the KV blocks stored at the node.",
    "present_blocks": "KV blocks that were not stored since somebody else had done so.",
    "unstored_blocks": "KV blocks that could not be stored, by reason.",
}
"""What is counted: name and meaning. Each may have a reason."""


class Counters:
    """Counts of one process since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: float = 1, reason: str = "") -> None:
        """Count, under a reason if there is one."""
        with self._lock:
            self._counts[f"{name}:{reason}" if reason else name] += count  # type: ignore[assignment]

    def take(self) -> ConnectorStats | None:
        """What was counted since the last call, or None."""
        with self._lock:
            if not self._counts:
                return None
            taken, self._counts = dict(self._counts), Counter()
        return ConnectorStats(data=taken)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name, or by ``name:reason``."""

    data: dict[str, int | float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 6) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PrometheusMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus counters ``vllm:forebay_…``, with the engine's labels and ``reason``."""

    def __init__(
        self,
        config: Any,
        metric_types: Mapping[Any, Any],
        labels: list[str],
        values_by_engine: dict[int, list[object]],
    ) -> None:
        super().__init__(config, metric_types, labels, values_by_engine)
        make = metric_types[PrometheusCounter]
        self._counters = {
            name: make(name=f"vllm:forebay_{name}", documentation=meaning, labelnames=[*labels, "reason"])
            for name, meaning in METRICS.items()
        }

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, count in data.items():
            name, _, reason = key.partition(":")
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
