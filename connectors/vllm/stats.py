"""The connector's counts in vLLM's log and on its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from forebay.connectors.vllm.counters import METRICS

__all__ = ["ConnectorStats", "PrometheusMetrics"]


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name, or by ``name:reason``."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, float]:
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
        make = metric_types[Counter]
        self._counters = {
            name: make(name=f"vllm:forebay_{name}", documentation=meaning, labelnames=[*labels, "reason"])
            for name, meaning in METRICS.items()
        }

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, count in data.items():
            name, _, reason = key.partition(":")
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
