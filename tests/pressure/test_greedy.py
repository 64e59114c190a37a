"""Clients that take no answers, and principals that ask for all there is: they end or wait, others go on."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest

from forebay.appliance.control.admission import Admission, Place
from forebay.client import Admin, Client
from forebay.client.session import Opening
from forebay.errors import Busy
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto import forebay_pb2_grpc as services
from forebay.proto.columns import keys_to_proto
from forebay.schema import Schema
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


@pytest.mark.long
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


def test_a_flood_by_one_principal_does_not_stop_another(node: Node) -> None:
    """The one that floods is told to come back, or waits; the others' calls and sessions go on."""
    with Admin(node.url, token=node.token, deadline_ms=60_000, attempt_ms=10_000) as admin:
        token = admin.create_principal("flood").token
        admin.set_grant("flood", "default/default", ["read", "write", "delete"])
    opening = Opening("default/default", Schema.opaque(), 0)
    over = threading.Event()
    ended: Counter[str] = Counter()

    def flood(flooder: Client) -> None:
        """Calls that wait for a drive, and give up soon: what they began goes on."""
        turn = 0
        while not over.is_set():
            turn += 1
            keys = [f"flood/{threading.get_ident()}/{turn}/{i}".encode() for i in range(16)]
            ended.update(one.reason for one in flooder.put(keys, [b"f"] * 16, deadline_ms=20))
            ended.update(flooder.wait(keys, 20))

    def use(other: Client) -> None:
        for turn in range(3):
            keys = [f"calm/{turn}/{i}".encode() for i in range(4)]
            assert all(one.present for one in other.put(keys, keys))
            assert [bytes(one.value or b"") for one in other.get(keys)] == keys

    flooders = [Client(node.url, opening, token=token, options=CALM) for _ in range(4)]
    with node.connect(options=CALM) as other, ThreadPoolExecutor(16) as pool:
        try:
            running = [pool.submit(flood, flooders[i % 4]) for i in range(16)]
            eventually(lambda: sum(ended.values()) > 300, "the flood is there")
            use(other)
        finally:
            over.set()
        for one in running:
            one.result(60)
        assert other.stats.reopened == 0
    for flooder in flooders:
        flooder.close()
    with Admin(node.url, token=node.token, deadline_ms=60_000, attempt_ms=10_000) as admin:
        admin.delete_principal("flood")
    node.expect_nothing_held()


def test_places_are_shared_between_principals() -> None:
    admission = Admission(100, "things", retry_after_ms=5)
    held: dict[str, list[Place]] = {name: [] for name in "abc"}
    for _ in range(200):
        for name in "abc":
            with suppress(Busy):
                held[name].append(admission.enter(name))
    assert {len(places) for places in held.values()} == {25}, "and as much is left for the next one"
    with pytest.raises(Busy) as caught:
        admission.enter("a")
    assert caught.value.retry_after_ms == 5
    assert admission.enter("a", always=True) and admission.enter("d", 24)
    for place in held["a"]:
        place.hold()
        place.leave()
    assert len(admission) == 100
    for places in held.values():
        for place in places:
            place.leave()
    assert len(admission) == 25
