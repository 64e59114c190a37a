"""A paced replay of a trace: requests arrive as it says, and real blocks are looked up, loaded and stored.

Four replicas of an engine share the node, and take requests in turn, as a router does that knows of no caches. Only
their GPUs are a model: a queue that computes a prompt in the time that a profile of `perf.engines.profiles` says.
Times and bytes are scaled so that a small machine can play it: everything runs ``speed`` times as fast as there, and
blocks have one ``bytes_scale``-th of the profile's bytes. In the profile's terms storage is so as fast as what is
measured times ``bytes_scale / speed``, which the row tells; what a call costs apart from bytes counts ``speed``-fold.

Arrivals are pressed together until computing every prompt would keep the GPUs busy for 70 % of the time; but the next
turn of a conversation comes after the one before was answered (and, with Forebay, stored, which ends before an answer
of some hundred tokens does). Both sides have each engine's own prefix cache, least recently used blocks first out. It
shrinks as the trace's span does, or a minute's excerpt would fit into a cache that an hour of requests passes through.
Without Forebay there is nothing that needs a clock: that side is computed, exactly. The guard decides as it does in
the connector.

FOREBAY_TRACE names a trace in the Mooncake format; without it, conversations are generated.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import forebay
from forebay.cli.demo.trace import BLOCK_TOKENS, Request, ceiling_tokens, generate, read_trace, sample
from forebay.cli.demo.workload import Contents, block_key
from forebay.client import Client
from forebay.clock import SystemClock
from forebay.connectors.guard import Guard
from perf.engines.profiles import PROFILES, GpuProfile
from perf.harness import Row, compared_latency_row, file_system
from perf.node import start_node
from perf.workload import Bench, Wrong

__all__ = ["LocalCache", "Plan", "run", "without_storage"]

_PROFILES = ("llama-3.1-70b.32xgh200", "llama-3.1-405b.32xgh200", "deepseek-v3.8xh100")
"""Those whose models take prompts as long as traces have."""
_BUSY = 0.7
_REPLICAS = 4
_TOKENS_PER_S = 40_000
"""Of prompts, on this machine's clock: what its two cores can move at `_BLOCK_BYTES` for each 512 of them."""
_BLOCK_BYTES = 2 << 20
_BATCH_BLOCKS = 16
_LOADERS = 4
_AT_ONCE = 64
_GENERATED = 2_000
_SEED = 1


class LocalCache:
    """An engine's own prefix cache: ids of blocks, the least recently used one first out."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, blocks: Sequence[int]) -> int:
        """How many of the first ones are there."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def add(self, blocks: Sequence[int]) -> None:
        """A request used these."""
        for block in reversed(blocks):  # the end of a chain is of no use without its beginning
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played, in seconds of the profile.

    ``arrivals_s[i]`` is when request i comes, unless ``before[i]``, the last turn of its conversation (-1: none), has
    not been answered then.
    """

    profile: GpuProfile
    requests: tuple[Request, ...]
    arrivals_s: tuple[float, ...]
    before: tuple[int, ...]
    speed: float
    bytes_scale: float
    local_blocks: int
    source: str
    replicas: int = _REPLICAS

    @classmethod
    def of(cls, profile: GpuProfile, trace: Sequence[Request], source: str, seconds: float) -> Plan:
        """Whole conversations that this machine plays in about ``seconds``."""
        part = sample(trace, _SEED, max(1, int(seconds * _TOKENS_PER_S / BLOCK_TOKENS)))
        busy_s = sum(profile.prefill_s(request.input_tokens) for request in part.requests)
        first, last = part.requests[0].arrival_ms, part.requests[-1].arrival_ms
        span_s = busy_s / _BUSY / _REPLICAS
        press = span_s * 1000 / max(1, last - first)
        tokens = sum(request.input_tokens for request in part.requests)
        turns: dict[int, int] = {}
        before = []
        for number, group in enumerate(part.groups):
            before.append(turns.get(group, -1))
            turns[group] = number
        return cls(
            profile,
            part.requests,
            tuple((request.arrival_ms - first) * press / 1000 for request in part.requests),
            tuple(before),
            speed=span_s * _TOKENS_PER_S / tokens,
            bytes_scale=profile.kv_bytes * BLOCK_TOKENS / _BLOCK_BYTES,
            local_blocks=int(min(1.0, press) * profile.cache_bytes / (profile.kv_bytes * BLOCK_TOKENS)),
            source=source,
        )


def without_storage(plan: Plan) -> list[float]:
    """Seconds to the first token of each request; each replica computes one after the other as they come."""
    after: dict[int, int] = {before: number for number, before in enumerate(plan.before) if before >= 0}
    coming = [(at, number) for number, at in enumerate(plan.arrivals_s) if plan.before[number] < 0]
    heapq.heapify(coming)
    free_s, times = [0.0] * plan.replicas, [0.0] * len(plan.requests)
    caches = [LocalCache(plan.local_blocks) for _ in range(plan.replicas)]
    while coming:
        arrival_s, number = heapq.heappop(coming)
        request, replica = plan.requests[number], number % plan.replicas
        cached = caches[replica].prefix(request.blocks) * BLOCK_TOKENS
        began_s = max(free_s[replica], arrival_s)
        free_s[replica] = began_s + plan.profile.prefill_s(request.input_tokens, cached)
        times[number] = free_s[replica] - arrival_s
        caches[replica].add(request.blocks)
        if number in after:
            heapq.heappush(coming, (max(plan.arrivals_s[after[number]], free_s[replica]), after[number]))
    return times


class _Gpu:
    """Computes one thing after the other, in real time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = time.monotonic()

    def compute(self, seconds: float) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + seconds
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


@dataclass(slots=True)
class _Player:
    """Serves the requests of a plan against a node."""

    plan: Plan
    client: Client
    guard: Guard
    contents: Contents
    times_s: dict[int, float] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)
    loaded_tokens: int = 0
    local_tokens: int = 0
    loaded: int = 0
    load_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    loaders: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_LOADERS))
    replicas: list[tuple[_Gpu, LocalCache]] = field(init=False)

    def __post_init__(self) -> None:
        self.replicas = [(_Gpu(), LocalCache(self.plan.local_blocks)) for _ in range(self.plan.replicas)]

    def play(self) -> list[float]:
        """Seconds to the first token of each request, on the profile's clock."""
        began = time.monotonic()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            served: list[Future[None]] = []
            for number, arrival_s in enumerate(self.plan.arrivals_s):
                at = began + arrival_s / self.plan.speed
                time.sleep(max(0.0, at - time.monotonic()))
                before = self.plan.before[number]
                served.append(pool.submit(self._serve, number, at, served[before] if before >= 0 else None))
            for each in served:
                each.result()
        return [self.times_s[number] for number in range(len(self.plan.requests))]

    def _serve(self, number: int, at: float, before: Future[None] | None) -> None:
        arrived = at
        if before is not None and not before.done():
            before.result()
            arrived = time.monotonic()
        request = self.plan.requests[number]
        gpu, local = self.replicas[number % self.plan.replicas]
        keys = [block_key(block) for block in request.blocks]
        with self.lock:
            held = local.prefix(request.blocks)
        have = held
        if keys[held:]:
            present = self.client.match(keys[held:]).prefix.get(0, 0)
            have += self._load(number, request, keys, range(held, held + present))
        with self.lock:
            self.local_tokens += held * BLOCK_TOKENS
            self.loaded_tokens += (have - held) * BLOCK_TOKENS
            local.add(request.blocks)
        gpu.compute(self.plan.profile.prefill_s(request.input_tokens, have * BLOCK_TOKENS) / self.plan.speed)
        self.times_s[number] = (time.monotonic() - arrived) * self.plan.speed
        self._store(request.blocks[have:], keys[have:])

    def _load(self, number: int, request: Request, keys: Sequence[bytes], rows: range) -> int:
        """Load those of the blocks there that the guard lets; how many."""
        if not rows:
            return 0
        with self.lock:
            verdict = self.guard.verdict(len(rows), BLOCK_TOKENS)
            self.decisions[verdict.reason] += 1
            if not verdict.blocks:
                return 0
            self.guard.began(str(number), verdict.blocks)
        rows = rows[: verdict.blocks]
        memory = memoryview(bytearray(len(rows) * _BLOCK_BYTES))
        buffers = [memory[i * _BLOCK_BYTES : (i + 1) * _BLOCK_BYTES] for i in range(len(rows))]
        began, hits = time.monotonic(), 0
        with self.loaders:
            reading = time.monotonic()
            for first, end in pairwise([*range(0, len(rows), _BATCH_BLOCKS), len(rows)]):
                results = self.client.get_into([keys[row] for row in rows[first:end]], buffers[first:end])
                here = next((i for i, result in enumerate(results) if not result.hit), len(results))
                hits += here
                if here < len(results):
                    break
            ended = time.monotonic()
        with self.lock:
            self.load_s += ended - reading
            self.loaded += hits * _BLOCK_BYTES
            self.guard.ended(str(number), ended - began if hits == len(rows) else None)
            for row, buffer in zip(rows[:hits], buffers, strict=False):
                if not self.contents.matches(request.blocks[row], buffer):
                    raise Wrong(f"block {request.blocks[row]} has other bytes than were stored")
        return hits

    def _store(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        for first in range(0, len(blocks), _BATCH_BLOCKS):
            values = []
            with self.lock:
                for block in blocks[first : first + _BATCH_BLOCKS]:
                    values.append(bytearray(_BLOCK_BYTES))
                    self.contents.fill(block, values[-1])
            self.client.put(keys[first : first + _BATCH_BLOCKS], values)


def run(bench: Bench) -> Iterator[Row]:
    """Rows of the median and of the 99th percentile for each profile."""
    path = os.environ.get("FOREBAY_TRACE")
    trace = read_trace(Path(path)) if path else generate(_SEED, _GENERATED)
    source = Path(path).name if path else f"generated, seed {_SEED}"
    with start_node(bench.memory_dir, 4 * bench.sizes.node_bytes) as node:
        for number, name in enumerate(_PROFILES):
            plan = Plan.of(PROFILES[name], trace, source, bench.sizes.replay_s)
            # Each in a generation of its own, where nothing is stored yet; what is old makes room as it has to.
            with forebay.connect(node.url, token=node.token, generation=number) as client:
                rate = plan.profile.tokens_per_s * plan.speed
                guard = Guard(SystemClock(), tokens_per_s=rate, limit_ms=10_000)
                player = _Player(plan, client, guard, Contents(_BLOCK_BYTES, _SEED))
                ours, theirs = player.play(), without_storage(plan)
            yield from _rows(bench, name, player, ours, theirs)


def _rows(bench: Bench, name: str, player: _Player, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Row]:
    details = {**_details(player.plan, player), "file_system": file_system(bench.memory_dir)}
    for figure, quantile in (("mean", None), ("p99", 0.99)):
        yield compared_latency_row(
            f"replay.{name}.{figure}",
            "a trace played to four replicas: time to first token with Forebay against their own prefix caches alone",
            ours,
            theirs,
            quantile=quantile,
            paired=True,
            details=details,
        )


def _details(plan: Plan, player: _Player) -> dict[str, Any]:
    tokens = sum(request.input_tokens for request in plan.requests)
    measured = player.loaded / player.load_s if player.load_s else 0.0
    return {
        "profile": plan.profile.what,
        "source": plan.profile.source,
        "trace": plan.source,
        "replicas": plan.replicas,
        "requests": len(plan.requests),
        "input_tokens": tokens,
        "span_s": _rounded(plan.arrivals_s[-1]),
        "speed": _rounded(plan.speed),
        "bytes_scale": _rounded(plan.bytes_scale),
        "local_blocks": plan.local_blocks,
        "ceiling_share": _rounded(ceiling_tokens(plan.requests) / tokens),
        "loaded_share": _rounded(player.loaded_tokens / tokens),
        "local_share": _rounded(player.local_tokens / tokens),
        "decisions": dict(player.decisions),
        "load_gb_per_s": _rounded(measured / 1e9),
        "load_gb_per_s_as_profile": _rounded(measured * plan.bytes_scale / plan.speed / 1e9),
        "break_even_gb_per_s": _rounded(plan.profile.tokens_per_s * plan.profile.kv_bytes / 1e9),
    }


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
