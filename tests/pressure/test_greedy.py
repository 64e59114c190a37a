"""Clients that take no answers, and principals that ask for all there is: they end or wait, others go on."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import Any

import grpc
import pytest

from forebay.client import Client
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto import forebay_pb2_grpc as services
from forebay.proto.columns import keys_to_proto
from tests.pressure.conftest import CALM, Node, eventually

KEY_BYTES = 1_000
BATCH = 1_000
GROWTH_BYTES = 192 << 20
"""More than a stream of events that nobody takes may cost, and less than what went through."""


def under_way(node: Node, method: str) -> int:
    """How many calls of a method the node has under way, by its metrics."""
    with urllib.request.urlopen(f"http://{node.info['http']}/metrics", timeout=60) as response:
        text = response.read().decode()
    found = re.search(rf'^forebay_calls_in_flight\{{[^}}]*method="{method}"[^}}]*\}} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


class Greedy:
    """A client at the level of gRPC, which asks and does not read."""

    def __init__(self, node: Node) -> None:
        self._client = node.connect(options=CALM)
        self.view = self._client._session.view
        self._metadata = (("authorization", f"Bearer {node.token}"),)
        self._channel = grpc.insecure_channel(node.grpc)
        self._blocks = services.BlocksStub(self._channel)

    def watch(self) -> Any:
        return self._blocks.Watch(pb.WatchRequest(context=self.view.context(600_000)), metadata=self._metadata)

    def ask(self, keys: list[bytes], times: int) -> Any:
        """Acquire the same keys again and again, by one stream whose answers nobody reads."""
        request = pb.AcquireRequest(
            context=self.view.context(600_000), keys=keys_to_proto([BlockKey(key) for key in keys])
        ).SerializeToString()
        messages = (pb.CallRequest(id=i + 1, method="Acquire", request=request) for i in range(times))
        return self._blocks.Calls(messages, metadata=self._metadata)

    def close(self) -> None:
        self._channel.close()
        self._client.close()


def stored(client: Client, name: str) -> list[bytes]:
    keys = [f"{name}/{i}/".encode().ljust(KEY_BYTES, b"x") for i in range(BATCH)]
    assert all(result.present for result in client.put(keys, [b"v"] * BATCH, deadline_ms=120_000))
    return keys


@pytest.mark.parametrize("method", ["Watch", "Calls"])
def test_a_client_that_reads_nothing_ends(node: Node, method: str) -> None:
    with node.connect(options=CALM) as other:
        keys = stored(other, f"greedy/{method}")
        before = under_way(node, method)
        resident_bytes = node.daemon.resident_bytes
        greedy = Greedy(node)
        call = greedy.watch() if method == "Watch" else greedy.ask(keys, 100_000)
        eventually(lambda: under_way(node, method) > before, "it is under way")
        began_s, turn = time.monotonic(), 0
        while under_way(node, method) > before + (method == "Calls"):  # the client beside it has a stream of its own
            assert time.monotonic() - began_s < 120, f"{method} is still under way"
            turn += 1
            if method == "Watch" and turn < 20:
                other.delete(stored(other, f"greedy/{turn}"))
            assert other.get(keys[:10])[0].hit
            time.sleep(0.1)
        grown_bytes = node.daemon.resident_bytes - resident_bytes
        assert grown_bytes < GROWTH_BYTES, f"the daemon grew by {grown_bytes >> 20} MiB"
        assert all(result.hit for result in other.get(keys))
        call.cancel()
        greedy.close()
    node.expect_nothing_held()
