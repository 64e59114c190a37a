"""Metrics of a node in Prometheus' text format; ``docs/metrics.md`` is made from the table here.

What is counted on the way of a call is counted in plain Python (`Counter`, `Histogram`) and only read here. Labels are
names of namespaces, drives, methods and error codes: all bounded; never keys, sessions or a client's words.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forebay import __version__
from forebay.appliance.control.accounting import Accounts, outcome
from forebay.appliance.dataplane.interface import IoStats
from forebay.appliance.dataplane.supervisor import Supervisor
from forebay.appliance.histogram import Histogram
from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.problems import problems_of, reads_go_on, writes_go_on
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.sessions import TRANSPORTS
from forebay.appliance.namespace.space import DriveState
from forebay.errors import ForebayError
from forebay.index import BlockIndex, RowState

__all__ = ["METRICS", "MetricSpec", "NodeMetrics", "render_markdown"]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name as it is scraped (counters end with ``_total``), what it says, and its labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _process(prefix: str, whose: str) -> tuple[MetricSpec, ...]:
    """What `ProcessCollector` tells of a process."""
    return (
        MetricSpec(f"{prefix}_process_virtual_memory_bytes", "gauge", f"Virtual memory of {whose}."),
        MetricSpec(f"{prefix}_process_resident_memory_bytes", "gauge", f"Resident memory of {whose}."),
        MetricSpec(f"{prefix}_process_start_time_seconds", "gauge", f"When {whose} started, in Unix time."),
        MetricSpec(f"{prefix}_process_cpu_seconds_total", "counter", f"User and system CPU time of {whose}."),
        MetricSpec(f"{prefix}_process_open_fds", "gauge", f"Open file descriptors of {whose}."),
        MetricSpec(f"{prefix}_process_max_fds", "gauge", f"The most file descriptors that {whose} may open."),
    )


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("forebay_node_info", "gauge", "Always 1; what runs.", ("node", "version")),
    MetricSpec("forebay_incarnation", "gauge", "Starts of the node's daemon so far."),
    # what is kept
    MetricSpec(
        "forebay_blocks",
        "gauge",
        "Blocks that can be found; a `suspect` one is verified before it is served.",
        ("namespace", "state"),
    ),
    MetricSpec("forebay_namespace_used_bytes", "gauge", "Bytes of extents that have an owner.", ("namespace",)),
    MetricSpec("forebay_namespace_reserved_bytes", "gauge", "Bytes of regions that are held.", ("namespace",)),
    MetricSpec(
        "forebay_namespace_quota_bytes", "gauge", "The quota; 0 leaves only the node's capacity.", ("namespace",)
    ),
    MetricSpec("forebay_drive_capacity_bytes", "gauge", "What the drive may hold, in whole regions.", ("drive",)),
    MetricSpec("forebay_drive_reserved_bytes", "gauge", "Bytes of regions that namespaces hold.", ("drive",)),
    MetricSpec("forebay_drive_used_bytes", "gauge", "Bytes of extents that have an owner.", ("drive",)),
    MetricSpec(
        "forebay_drive_full", "gauge", "1 when the drive's file system had less room than its capacity.", ("drive",)
    ),
    MetricSpec(
        "forebay_drive_up",
        "gauge",
        "1 while the drive's blocks are served; on one that is away they are misses.",
        ("drive",),
    ),
    MetricSpec("forebay_drive_writable", "gauge", "1 while new blocks go to the drive.", ("drive",)),
    MetricSpec(
        "forebay_drive_errors_total", "counter", "What the drive refused or failed to read, write or flush.", ("drive",)
    ),
    MetricSpec("forebay_drives_lost_total", "counter", "Times that a drive went away or could only be read."),
    MetricSpec("forebay_reads_up", "gauge", "1 while blocks are served, though perhaps not those of every drive."),
    MetricSpec("forebay_writes_up", "gauge", "1 while new blocks are stored."),
    MetricSpec(
        "forebay_drive_quarantined_bytes", "gauge", "Of these, bytes that the drive did not give back.", ("drive",)
    ),
    MetricSpec("forebay_index_bytes", "gauge", "Memory of the index."),
    # who works
    MetricSpec("forebay_sessions", "gauge", "Sessions.", ("namespace",)),
    MetricSpec("forebay_leases", "gauge", "Read leases that are held.", ("namespace",)),
    MetricSpec("forebay_pending_writes", "gauge", "Blocks that are allocated and not visible yet.", ("namespace",)),
    MetricSpec("forebay_pending_writes_bytes", "gauge", "Bytes of their extents.", ("namespace",)),
    MetricSpec("forebay_sessions_opened_total", "counter", "Sessions opened."),
    MetricSpec("forebay_sessions_expired_total", "counter", "Sessions that ended because nothing was heard of them."),
    MetricSpec(
        "forebay_transport_fallbacks_total",
        "counter",
        "Times that clients went on by another transport with a volume, by the one that had failed, as they say.",
        ("transport",),
    ),
    # calls
    MetricSpec(
        "forebay_calls_total",
        "counter",
        "Calls answered. The outcome is `ok`, `cancelled` (the caller went away) or an error's name.",
        ("protocol", "method", "outcome"),
    ),
    MetricSpec(
        "forebay_call_duration_seconds",
        "histogram",
        "From the request's arrival to its answer; streams (Calls, Wait, Watch) are not in it, messages of Calls are.",
        ("protocol", "method"),
    ),
    MetricSpec("forebay_calls_in_flight", "gauge", "Calls being worked on.", ("protocol", "method")),
    # blocks come and go
    MetricSpec(
        "forebay_lookup_keys_total",
        "counter",
        "Keys asked for by Match or Acquire: `hit`, or why it was a miss (an error's name).",
        ("call", "outcome"),
    ),
    MetricSpec("forebay_allocated_blocks_total", "counter", "Blocks that writers were given extents for."),
    MetricSpec("forebay_committed_blocks_total", "counter", "Blocks that became visible."),
    MetricSpec("forebay_committed_bytes_total", "counter", "Bytes of their values."),
    MetricSpec("forebay_aborted_blocks_total", "counter", "Allocated blocks that were taken back."),
    MetricSpec(
        "forebay_removed_blocks_total",
        "counter",
        "Blocks removed: `evicted` for room, `deleted` by a client, `expired` (time to live), `stale` (minimum "
        "generation), `cleared` with their namespace, `bad` (a checksum did not match), `lost` (stored again elsewhere "
        "while their drive was away).",
        ("cause",),
    ),
    MetricSpec(
        "forebay_evicted_blocks_total",
        "counter",
        "The evicted ones by what was short: the node's `space`, the namespace's `quota`, a `scope_quota`; `watermark` "
        "ones went ahead of need.",
        ("limit",),
    ),
    MetricSpec("forebay_verified_blocks_total", "counter", "Blocks whose checksums the node compared itself."),
    MetricSpec("forebay_scrubbed_blocks_total", "counter", "Of these, blocks that a scrub came to."),
    MetricSpec("forebay_scrubbed_bytes_total", "counter", "Bytes of their extents."),
    MetricSpec("forebay_scrub_passes_total", "counter", "Scrubs that came to their end."),
    MetricSpec("forebay_dropped_records_total", "counter", "Records that this start found to be of no use."),
    # the target
    MetricSpec("forebay_target_up", "gauge", "1 when the target answers and knows what it should serve."),
    MetricSpec("forebay_target_restarts_total", "counter", "Targets that had to be replaced since the daemon started."),
    MetricSpec(
        "forebay_target_differences_total", "counter", "Differences from desired state found at the target and undone."
    ),
    MetricSpec("forebay_target_read_bytes_total", "counter", "Bytes that hosts read; starts anew with the target."),
    MetricSpec("forebay_target_read_seconds_total", "counter", "Time that their read commands took, added up."),
    MetricSpec("forebay_target_written_bytes_total", "counter", "Bytes that hosts wrote; starts anew with the target."),
    MetricSpec("forebay_target_write_seconds_total", "counter", "Time that their write commands took, added up."),
    # metadata
    MetricSpec(
        "forebay_metadata_commit_duration_seconds", "histogram", "From a batch's turn to its place on stable media."
    ),
    MetricSpec("forebay_metadata_failed_commits_total", "counter", "Batches of metadata that could not be written."),
    MetricSpec("forebay_metadata_reopened_total", "counter", "Times that metadata were opened again after that."),
    MetricSpec("forebay_metadata_up", "gauge", "1 while metadata can be written."),
    MetricSpec("forebay_metadata_free_bytes", "gauge", "What is free on the file system of metadata."),
    *_process("forebay", "the daemon"),
    *_process("forebay_target", "the target"),
)
"""All of them, in the order of the page."""

_SIMPLE = {
    "forebay_sessions_opened_total": "sessions_opened",
    "forebay_sessions_expired_total": "sessions_expired",
    "forebay_allocated_blocks_total": "allocated_blocks",
    "forebay_committed_blocks_total": "committed_blocks",
    "forebay_committed_bytes_total": "committed_bytes",
    "forebay_aborted_blocks_total": "aborted_blocks",
    "forebay_verified_blocks_total": "blocks_verified",
    "forebay_scrubbed_blocks_total": "scrubbed_blocks",
    "forebay_scrubbed_bytes_total": "scrubbed_bytes",
    "forebay_scrub_passes_total": "scrub_passes",
    "forebay_dropped_records_total": "records_dropped",
    "forebay_target_differences_total": "target_differences",
    "forebay_drives_lost_total": "drives_lost",
}
"""Metrics that are one counter of the engine."""
_CAUSES = ("evicted", "deleted", "expired", "stale", "cleared", "bad", "lost")
_LIMITS = ("watermark", "space", "quota", "scope_quota")
_TARGET_ANSWERS_S = 2.0

Value = float | Histogram


class _Samples(Collector):
    """What one scrape found, by metric and labels."""

    def __init__(self) -> None:
        self.found: dict[str, dict[tuple[str, ...], Value]] = defaultdict(dict)

    def set(self, name: str, value: Value, *labels: str) -> None:
        """One sample."""
        self.found[name][labels] = value

    def collect(self) -> Iterator[Metric]:
        for spec in METRICS:
            samples = self.found.get(spec.name)
            if samples is not None:
                yield _family(spec, samples)


def _family(spec: MetricSpec, samples: dict[tuple[str, ...], Value]) -> Metric:
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for labels, value in samples.items():
            if isinstance(value, Histogram):
                histogram.add_metric(labels, value.cumulative(), value.total)
        return histogram
    family = (CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily)(
        spec.name, spec.help, labels=spec.labels
    )
    for labels, value in samples.items():
        if not isinstance(value, Histogram):
            family.add_metric(labels, value)
    return family


class NodeMetrics:
    """The metrics of one node."""

    def __init__(self, node: Node, name: str, store: RocksStore, accounts: Accounts, supervisor: Supervisor) -> None:
        self._node = node
        self._name = name
        self._store = store
        self._accounts = accounts
        self._supervisor = supervisor
        self._scraping = asyncio.Lock()
        self._processes = [
            ProcessCollector("forebay", registry=None),
            ProcessCollector("forebay_target", self._target_pid, registry=None),
        ]

    def _target_pid(self) -> int:
        return self._supervisor.pid or -1

    async def scrape(self) -> bytes:
        """All of them as text. What has to look at every block does so beside the event loop."""
        async with self._scraping:  # any number of scrapers cost what one does
            samples = _Samples()
            io = await self._io_stats()
            self._read_node(samples)
            self._read_calls(samples)
            self._read_target(samples, io)
            names = {n.id: n.full_name for n in self._node.state.namespaces}
            return await asyncio.to_thread(self._render, samples, names)

    def _render(self, samples: _Samples, names: dict[int, str]) -> bytes:
        for state, counts in _count_blocks(self._node.engine.index).items():
            for number, name in names.items():
                samples.set("forebay_blocks", counts.get(number, 0), name, state)
        registry = CollectorRegistry(auto_describe=False)
        for collector in (samples, *self._processes):
            registry.register(collector)
        return generate_latest(registry)

    async def _io_stats(self) -> IoStats | None:
        """What the target says of its volumes; None if it does not answer now."""
        try:
            async with asyncio.timeout(_TARGET_ANSWERS_S):
                return await self._node.engine.target.io_stats()
        except (ForebayError, TimeoutError):
            return None

    def _read_node(self, samples: _Samples) -> None:
        node, engine, space = self._node, self._node.engine, self._node.engine.space
        samples.set("forebay_node_info", 1, self._name, __version__)
        samples.set("forebay_incarnation", node.meta.incarnation)
        samples.set("forebay_index_bytes", engine.index.memory_bytes())
        used: Counter[int] = Counter()
        reserved: Counter[int] = Counter()
        drive_used: Counter[str] = Counter()
        for volume in list(space.volumes.values()):
            extents = space.maps[volume.id]
            used[volume.namespace] += extents.used_bytes
            reserved[volume.namespace] += len(extents.claimed) * space.region_bytes
            drive_used[volume.drive] += extents.used_bytes
        sessions: Counter[int] = Counter()
        leases: Counter[int] = Counter()
        writes: Counter[int] = Counter()
        pending_bytes: Counter[int] = Counter()
        for session in node.sessions:
            sessions[session.namespace] += 1
            leases[session.namespace] += len(session.leases)
            writes[session.namespace] += len(session.writes)
            extents_of = (write.extent for write in session.writes.values())
            pending_bytes[session.namespace] += sum(e.length_bytes for e in extents_of if e is not None)
        for namespace in node.state.namespaces:
            name, number = namespace.full_name, namespace.id
            samples.set("forebay_namespace_used_bytes", used[number], name)
            samples.set("forebay_namespace_reserved_bytes", reserved[number], name)
            samples.set("forebay_namespace_quota_bytes", namespace.quota_bytes, name)
            samples.set("forebay_sessions", sessions[number], name)
            samples.set("forebay_leases", leases[number], name)
            samples.set("forebay_pending_writes", writes[number], name)
            samples.set("forebay_pending_writes_bytes", pending_bytes[number], name)
        for drive in space.drives.values():
            samples.set("forebay_drive_capacity_bytes", drive.capacity_regions * space.region_bytes, drive.name)
            samples.set("forebay_drive_reserved_bytes", drive.claimed_regions * space.region_bytes, drive.name)
            samples.set("forebay_drive_used_bytes", drive_used[drive.name], drive.name)
            samples.set("forebay_drive_full", drive.full, drive.name)
            samples.set("forebay_drive_quarantined_bytes", space.quarantined_bytes(drive.name), drive.name)
            samples.set("forebay_drive_up", drive.state is not DriveState.AWAY, drive.name)
            samples.set("forebay_drive_writable", drive.writable and not drive.full, drive.name)
            errors = node.engine.counters[f"drive_errors_{drive.name}"]
            samples.set("forebay_drive_errors_total", errors, drive.name)
        problems = problems_of(node.engine)
        samples.set("forebay_reads_up", reads_go_on(problems))
        samples.set("forebay_writes_up", writes_go_on(problems))
        samples.set("forebay_metadata_up", node.engine.store.problem is None)
        samples.set("forebay_metadata_free_bytes", node.engine.reserve.free_bytes)

    def _read_calls(self, samples: _Samples) -> None:
        counters = self._node.engine.counters
        for name, counter in _SIMPLE.items():
            samples.set(name, counters[counter])
        for transport in TRANSPORTS:
            samples.set("forebay_transport_fallbacks_total", counters[f"fallbacks_{transport}"], transport)
        for cause in _CAUSES:
            samples.set("forebay_removed_blocks_total", counters[f"blocks_{cause}"], cause)
        for limit in _LIMITS:
            samples.set("forebay_evicted_blocks_total", counters[f"evicted_for_{limit}"], limit)
        for call in ("match", "acquire"):
            samples.set("forebay_lookup_keys_total", counters[f"{call}_hits"], call, "hit")
        for name, value in list(counters.items()):
            call, misses, why = name.partition("_misses_")
            if misses:
                samples.set("forebay_lookup_keys_total", value, call, why)
        for account in self._accounts:
            labels = (account.protocol, account.method)
            samples.set("forebay_calls_in_flight", account.in_flight, *labels)
            if account.outcomes:
                samples.set("forebay_call_duration_seconds", account.latency_s, *labels)
            for code, count in list(account.outcomes.items()):
                samples.set("forebay_calls_total", count, *labels, outcome(code))
        samples.set("forebay_metadata_commit_duration_seconds", self._store.commit_s)
        samples.set("forebay_metadata_failed_commits_total", self._store.failed_commits)
        samples.set("forebay_metadata_reopened_total", self._store.reopened)

    def _read_target(self, samples: _Samples, io: IoStats | None) -> None:
        samples.set("forebay_target_up", io is not None and self._supervisor.serving)
        samples.set("forebay_target_restarts_total", self._supervisor.restarts)
        if io is not None:
            samples.set("forebay_target_read_bytes_total", io.read_bytes)
            samples.set("forebay_target_read_seconds_total", io.read_us / 1e6)
            samples.set("forebay_target_written_bytes_total", io.write_bytes)
            samples.set("forebay_target_write_seconds_total", io.write_us / 1e6)


def _count_blocks(index: BlockIndex) -> dict[str, dict[int, int]]:
    """Blocks by state and namespace id. Rows may change meanwhile: a block more or less is no matter."""
    high = index.high
    state, owner = index.state[:high], index.namespace[:high]
    counts = {}
    for found in (RowState.VISIBLE, RowState.SUSPECT):
        column = np.bincount(owner[state == found])
        counts[found.name.lower()] = {number: int(column[number]) for number in np.flatnonzero(column).tolist()}
    return counts


PAGE = """# Metrics

<!-- Made from appliance/metrics.py by `python -m forebay.appliance.metrics > docs/metrics.md`; a test keeps it so. -->

`GET /metrics` on the node's HTTP address ([administration.md](administration.md)) answers in Prometheus' text format.
Numbers are of one node. Labels take few values: namespaces, drives, methods, error names; never a key, a session or
text of a client. Counters start anew with the daemon, those of the target's volumes with the target.

| metric | kind | labels | |
|---|---|---|---|
"""


def render_markdown() -> str:
    """The reference page, ``docs/metrics.md``."""
    rows = []
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |\n")
    return PAGE + "".join(rows)


if __name__ == "__main__":
    print(render_markdown(), end="")
