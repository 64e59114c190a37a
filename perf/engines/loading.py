"""The connector's worker half without an engine: `python -m perf.engines.loading JSON`, where torch is installed.

Real caches of Llama-3.1-8B's shape, a real node, real loads. Prints a JSON object: samples of each side, by how many
requests were loaded at once.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from forebay.client import ClientOptions
from forebay.clock import SystemClock
from forebay.connectors.keys import STABLE_HASH, tiled
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.groups import CacheGroup
from forebay.connectors.vllm.messages import GroupFacts, Load, Rows, Save, SessionOffer, StepWork, WorkerFacts
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.worker import WorkerHalf
from forebay.measure.samples import Side, interleave
from forebay.measure.tcp_peer import TcpPeer
from forebay.schema import Group, HashAlgorithm, Schema

__all__ = ["main"]

HEADS, TOKENS, CONTENT = 8, 32, 2 * 128
"""A layer's block of 32 tokens of Llama-3.1-8B in 16 bits: 128 KiB. All of its 32 layers have 4 MiB."""
LAYER_BYTES = HEADS * TOKENS * CONTENT * 2
STORED = 64
_WAIT_S = 60


class Loading:
    """A worker half whose cache has ``STORED`` blocks that the node has too, and room for loads behind them."""

    def __init__(self, url: str, layers: int, requests: int, request_blocks: int) -> None:
        self.request_blocks = request_blocks
        self.block_bytes = layers * LAYER_BYTES
        group = tiled(
            Group("full", tuple(range(layers)), TOKENS, HEADS, CONTENT * 2, "bfloat16", "perf"), max_ranks=HEADS
        )
        schema = Schema("vllm", bytes(32), HashAlgorithm(STABLE_HASH, TOKENS), (group,))
        settings = Settings.from_config({"url": url, "load_timeout_ms": 60_000, "staging_bytes": 1 << 30})
        options = ClientOptions(attempt_ms=20_000, connect_ms=20_000)
        self.counters = Counters()
        self._client = settings.connect(schema, options)
        self._offer = SessionOffer(1, self._client.join_token, schema.cbor)
        self._worker = WorkerHalf(settings, (0, 1), self.counters, options, SystemClock())
        generator = torch.Generator().manual_seed(0)
        rows = STORED + requests * request_blocks
        self.cache = torch.ones((layers, rows, HEADS, TOKENS, CONTENT), dtype=torch.bfloat16)
        random = torch.randint(0, 1 << 15, self.cache[:, :STORED].shape, generator=generator, dtype=torch.int16)
        self.cache[:, :STORED] = random.view(torch.bfloat16)
        held = GroupFacts(CacheGroup("full", TOKENS), tuple(range(layers)), HEADS, CONTENT * 2, "bfloat16", "perf")
        self._worker.register([list(self.cache)], WorkerFacts((held,), TOKENS))
        self._keys = [hashlib.sha256(b"%d" % row).digest() for row in range(STORED)]
        self._number = 0

    def store(self) -> None:
        """Save the first blocks, as after a step."""
        work = StepWork(self._offer, saves=(Save(1, Rows(0, tuple(self._keys), tuple(range(STORED)))),))
        self._worker.begin(work)
        self._worker.end(work)
        stored = 0.0
        while stored < STORED:
            counts = self.counters.take()
            stored += counts.get("stored_blocks", 0)
            if any(name.startswith("unstored") for name in counts):
                raise RuntimeError(f"not stored: {counts}")
            time.sleep(0.01)

    def load(self, requests: int) -> int:
        """Load so many requests at once, each into blocks of its own; the bytes of them."""
        loads = []
        for place in range(requests):
            rows = range(place * self.request_blocks, (place + 1) * self.request_blocks)
            self._number += 1
            keys = tuple(self._keys[row % STORED] for row in rows)
            loads.append(Load(str(self._number), (Rows(0, keys, tuple(STORED + row for row in rows)),)))
        self._worker.begin(StepWork(self._offer, tuple(loads)))
        received: set[str] = set()
        until = time.monotonic() + _WAIT_S
        while len(received) < requests:
            ended = self._worker.received(set(), idle=True)
            received |= ended.requests
            if ended.failed or ended.failed_blocks or time.monotonic() > until:
                raise RuntimeError(f"not loaded: {ended}, {self.counters.take()}")
        return requests * self.request_blocks * self.block_bytes

    def proved(self, requests: int) -> None:
        """Load once, and compare every byte. Raises `RuntimeError`."""
        self.cache[:, STORED:] = 1
        self.load(requests)
        for row in range(requests * self.request_blocks):
            loaded, saved = self.cache[:, STORED + row], self.cache[:, row % STORED]
            if not torch.equal(loaded.view(torch.int16), saved.view(torch.int16)):  # as bits: some are no numbers
                raise RuntimeError(f"block {row} has other bytes than were saved")

    def close(self) -> None:
        self._worker.close()
        self._client.close()


def sides(loading: Loading, peer: TcpPeer, servers: tuple[int, ...], requests: int, times: int) -> list[Side]:
    """The connector, a bare TCP receive of as many bytes, and a copy of as many inside this process' memory."""
    size = loading.block_bytes
    buffer = torch.ones(loading.request_blocks * size, dtype=torch.uint8)
    flat = memoryview(buffer.numpy())
    buffers = [flat[i * size : (i + 1) * size] for i in range(loading.request_blocks)]
    places = list(loading.cache[:, STORED:].view(torch.uint8).reshape(-1)[: requests * len(flat)].split(len(flat)))

    def repeated(move: Callable[[], int]) -> Callable[[], int]:
        return lambda: sum(move() for _ in range(times))

    def receive() -> int:
        for place in range(requests):
            peer.get(place * loading.request_blocks % STORED, buffers)
        return requests * len(flat)

    def copy() -> int:
        for place in places:
            place.copy_(buffer)
        return requests * len(flat)

    return [
        Side("forebay", repeated(lambda: loading.load(requests)), servers),
        Side("tcp", repeated(receive), (peer.pid,)),
        Side("memcpy", repeated(copy)),
    ]


def main(config: str) -> None:
    """Measure what the JSON object asks for."""
    asked: dict[str, Any] = json.loads(config)
    torch.set_num_threads(1)
    concurrent = asked["concurrent"]
    loading = Loading(asked["url"], asked["layers"], max(concurrent), asked["request_blocks"])
    taken = {}
    try:
        loading.store()
        with TcpPeer(STORED * loading.block_bytes) as peer:
            for row in range(STORED):
                block = loading.cache[:, row].contiguous().view(torch.uint8).reshape(-1)
                peer.put(row, [memoryview(block.numpy())])
            for requests in concurrent:
                loading.proved(requests)
                each = requests * asked["request_blocks"] * loading.block_bytes
                times = max(1, asked["slot_bytes"] // each)
                samples = interleave(sides(loading, peer, tuple(asked["servers"]), requests, times), asked["repeats"])
                taken[requests] = {name: [asdict(sample) for sample in each] for name, each in samples.items()}
    finally:
        loading.close()
    print(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1])
