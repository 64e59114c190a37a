"""vLLM's `KVConnectorBase_V1` for Forebay: a thin face of two halves, that never raises into a running engine."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from forebay.client import ClientOptions
from forebay.clock import SystemClock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.identity import check_supported, schema_of
from forebay.connectors.vllm.messages import StepWork, WorkerFacts, WorkerReport
from forebay.connectors.vllm.scheduler import SchedulerHalf
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.shielding import shielded
from forebay.connectors.vllm.specs import cache_groups, held_caches
from forebay.connectors.vllm.stats import ConnectorStats, PrometheusMetrics
from forebay.connectors.vllm.versions import check_version
from forebay.connectors.vllm.worker import WorkerHalf
from forebay.errors import ConfigInvalid, ForebayError

__all__ = ["ForebayConnector"]

_log = logging.getLogger("vllm.forebay")


@dataclass(frozen=True)
class _Facts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    facts: WorkerFacts


@dataclass(frozen=True)
class _Work(KVConnectorMetadata):  # type: ignore[misc]
    work: StepWork


@dataclass
class _Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell; with the first, of each rank, what it holds."""

    report: WorkerReport
    facts: dict[int, WorkerFacts]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _Report:
        assert isinstance(other, _Report)
        self.report.add(other.report)
        self.facts |= other.facts
        return self


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads and stores KV blocks at a Forebay node; see docs/engines/vllm.md.

    vLLM makes one for its scheduler and one for each worker. Raises `ConfigInvalid` at start for what it does not
    support; after that whatever happens is a miss.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.from_config(self._kv_transfer_config.kv_connector_extra_config or {})
        check_version(self._settings)
        check_supported(vllm_config, kv_cache_config, self._settings)
        self._counters = Counters()
        name = f"vllm {vllm.__version__} {self._kv_transfer_config.engine_id}"
        # All calls are made by threads, with deadlines of their own: they can wait for a node that is slow to reach.
        self._options = ClientOptions(client=name, attempt_ms=2_000)
        self._failed_blocks: set[int] = set()  # of the step whose transfers were asked for last
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._facts: dict[int, WorkerFacts] = {}  # of ranks; to be told, or told so far
        self._started = False
        self._reset = False
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if role is KVConnectorRole.SCHEDULER:
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                _log.warning(
                    "kv_load_failure_policy is %r: a block that cannot be loaded ends its request in an error; set it "
                    "to 'recompute'",
                    self._kv_transfer_config.kv_load_failure_policy,
                )
            groups = cache_groups(vllm_config, kv_cache_config)
            self._scheduler = SchedulerHalf(self._settings, groups, ranks, self._counters, SystemClock())
        else:
            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerHalf(self._settings, (rank, ranks), self._counters, self._options, SystemClock())

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, and nothing worse."""
        return False

    # --- at start ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        caches, facts, names = held_caches(self._vllm_config, self._kv_cache_config, kv_caches)
        self._worker.register(caches, facts, names)
        self._facts[get_tensor_model_parallel_rank()] = facts

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        facts = None if self._worker is None else self._worker.facts
        return None if facts is None else _Facts(facts)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if not all(isinstance(each, _Facts) for each in metadata.values()):
            return  # those of the first of several connectors: what our workers hold comes with their first report
        self._started = True
        self._start({each.facts for each in metadata.values()})

    def _learn(self, facts: dict[int, WorkerFacts]) -> None:
        """Workers have told what they hold: once all have, start beside the engine, which is running by now."""
        self._facts |= facts
        if self._started or len(self._facts) < self._vllm_config.parallel_config.tensor_parallel_size:
            return

        def start() -> None:
            try:
                self._start(set(self._facts.values()))
            except ForebayError as e:
                _log.error("%s; the engine goes on without storage", e)
            except Exception:  # the engine must live on
                _log.exception("the engine goes on without storage")

        self._started = True
        threading.Thread(target=start, name="forebay-start", daemon=True).start()

    def _start(self, facts: set[WorkerFacts]) -> None:
        assert self._scheduler is not None
        if len(facts) != 1:
            raise ConfigInvalid(f"the ranks hold different things: {facts}", field="tensor_parallel_size")
        if self._settings.mode == "off" and not self._settings.mode_file:
            return
        schema, notes = schema_of(self._vllm_config, facts.pop(), self._settings)
        for note in notes:
            _log.warning("%s", note)
        _log.info("forebay keyspace %s", schema.keyspace.hex())
        self._scheduler.start(schema, self._options)

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.null_block = gpu_block_pool.null_block.block_id

    @shielded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    @shielded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        # Not shielded: a request whose load is never begun would wait for ever.
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return _Work(self._scheduler.step(scheduler_output))

    @shielded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, _Report) else WorkerReport()
        if isinstance(meta, _Report) and meta.facts:
            self._learn(meta.facts)
        received = set(connector_output.finished_recving or ())
        failed = connector_output.failed_recving
        self._forget(self._scheduler.heard(report, received, connector_output.invalid_block_ids, failed))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @shielded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        given_up = request.status is RequestStatus.FINISHED_ABORTED
        self._forget(self._scheduler.ended(request, given_up=given_up))
        return False, None

    def _forget(self, blocks: set[int]) -> None:
        """Have vLLM drop blocks from its own prefix cache."""
        if blocks and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(blocks)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.waited_for

    def reset_cache(self) -> bool:
        """Nothing is kept here, and what is stored belongs to all replicas: weights that change have a generation."""
        if not self._reset:
            self._reset = True
            _log.warning(
                "vLLM has reset its caches; what is stored at the node stays, and goes on being used: if the weights "
                "have changed, have mode_file say off, and start this engine anew with another generation"
            )
        return True

    # --- the worker's side ------------------------------------------------------------------------------------------

    @property
    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Work)
        return metadata.work

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.begin(self._work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    @shielded(lambda: None)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.layer_computed(layer_name, self._work)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers that are waited for one by one call back, which a graph of the whole model would leave out."""
        return extra_config.get("load") == "layers"

    @shielded(lambda: None)
    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end(self._work)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        ended = self._worker.received(finished_req_ids, idle=self._work.idle)
        self._failed_blocks = ended.failed_blocks
        return KVConnectorTransferResults(finished_recving=ended.requests, failed_recving=ended.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @shielded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        report, facts, self._facts = self._worker.report(), self._facts, {}
        return None if report.empty and not facts else _Report(report, facts)

    # --- both -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._scheduler is not None:  # vLLM asks here once a step, when its output is there
            self._scheduler.stepped()
        counts = self._counters.take()
        return ConnectorStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrometheusMetrics:
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @shielded(lambda: None)
    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()
