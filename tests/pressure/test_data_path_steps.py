"""The data path cut at every step of NVMe/TCP: no call outlives its deadline, no wrong byte, nothing left behind.

The steps are those that a run without a cut goes through, so that a new one is cut as well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from forebay.client import Client, ClientOptions
from forebay.client.session import Opening
from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import nvme_tcp
from forebay.client.transports.options import NvmeTcpOptions
from forebay.clock import Clock
from forebay.ids import HostIdentity
from forebay.schema import Schema
from forebay.testing.proxy import Action, Cut, FaultProxy, Moment
from forebay.testing.steps import NvmeTcpSteps
from tests.pressure.conftest import HANG_S, Node, eventually

DEADLINE_MS = 1_000
LATE_S = 1.5
OPTIONS = ClientOptions(deadline_ms=DEADLINE_MS, nvme_tcp=NvmeTcpOptions(connections=1, keep_alive_ms=3_000))
SIZES = (3_000, 3 << 20)
"""One that travels in its command's capsule, and one that takes several R2Ts' worth of data."""
FAULTS = [
    (moment, action)
    for moment, action in itertools.product(Moment, Action)
    if action is not Action.DELAY or moment is Moment.BEFORE
]
QUICK = {(Moment.BEFORE, Action.SILENCE), (Moment.INSIDE, Action.RESET)}
STEPS = {
    *("ic_req", "ic_resp", "connect_admin", "connect_admin.response", "connect_io", "connect_io.response"),
    *("property_get", "property_get.response", "property_set", "property_set.response"),
    *("identify", "identify.c2h_data", "set_features", "set_features.response", "keep_alive", "keep_alive.response"),
    *("write_in_capsule", "write_in_capsule.response"),
    *("write", "write.r2t", "write.h2c_data", "write.response", "read", "read.c2h_data"),
}
"""What the client goes through today: a step that is gone, or new, is noticed here."""
FAILURES = {"ok", "connection_lost", "deadline_exceeded", "unavailable", "absent", "already_exists", "pending"}
LOST = FAILURES | {"write_expired", "session_expired", "write_fenced", "lease_expired", "target_refused"}


def connect(node: Node, proxy: FaultProxy, options: ClientOptions = OPTIONS) -> Client:
    """A client whose data path goes through the proxy."""

    def through(
        subsystem: SubsystemAddress, host: HostIdentity, nguids: Mapping[int, str], options: ClientOptions, clock: Clock
    ) -> Transport:
        return nvme_tcp(replace(subsystem, port=proxy.port), host, nguids, options, clock)

    opening = Opening("default/default", Schema.opaque(), 0)
    return Client(node.url, opening, token=node.token, options=options, transport=through)


def proxied(node: Node, cut: Cut | None = None) -> FaultProxy:
    host, _, port = node.nvme.rpartition(":")
    return FaultProxy((host, int(port)), NvmeTcpSteps, cut)


class Trial:
    """One client under one cut, with what it stored."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.turn = 0
        self.deadline_ms = DEADLINE_MS
        self.stored: dict[bytes, bytes] = {}
        self.doubtful: dict[bytes, bytes] = {}

    def work(self) -> bool:
        """Put and get once, checking times and bytes; whether all of it worked."""
        self.turn += 1
        keys = [f"{self.name}/{self.turn}/{size}".encode() for size in SIZES]
        values = [Random(f"{key!r}").randbytes(size) for key, size in zip(keys, SIZES, strict=True)]
        began_s = time.monotonic()
        puts = self.client.put(keys, values, deadline_ms=self.deadline_ms)
        self.in_time(began_s)
        for key, value, result in zip(keys, values, puts, strict=True):
            assert result.reason in LOST, f"{self.name}: put ended as {result.reason}"
            (self.stored if result.stored else self.doubtful)[key] = value
        into = [bytearray(len(value)) for value in values]
        began_s = time.monotonic()
        gets = self.client.get_into(keys, into, deadline_ms=self.deadline_ms)
        self.in_time(began_s)
        for got, buffer, value in zip(gets, into, values, strict=True):
            assert got.reason in LOST, f"{self.name}: get ended as {got.reason}"
            assert not got.hit or buffer == value, f"{self.name}: wrong bytes"
        return all(result.stored for result in puts) and all(result.hit for result in gets)

    def in_time(self, began_s: float) -> None:
        took_s = time.monotonic() - began_s
        assert took_s < self.deadline_ms / 1000 + HANG_S, f"{self.name}: {self.deadline_ms} ms took {took_s:.1f} s"

    def check(self) -> None:
        """All that was acknowledged is there; of the rest nothing is wrong."""
        eventually(lambda: self._found(self.stored), f"{self.name}: what was stored")
        self._found(self.doubtful)

    def _found(self, expected: dict[bytes, bytes]) -> bool:
        """Whether all of it is there; what is there has the right bytes, and only what is written may be absent."""
        keys = list(expected)
        results = self.client.get(keys, deadline_ms=60_000) if keys else []
        for key, result in zip(keys, results, strict=True):
            assert not result.hit or bytes(result.value or b"") == expected[key], f"{self.name}: wrong bytes"
            assert result.reason != "absent" or expected is self.doubtful, f"{self.name}: {key!r} was stored"
        return all(result.hit for result in results)


def test_the_steps_are_these(node: Node) -> None:
    with proxied(node) as proxy, connect(node, proxy) as client:
        trial = Trial(client, "none")
        trial.deadline_ms = 20_000
        assert trial.work()
        eventually(lambda: "keep_alive.response" in proxy.seen, "a keep-alive")
        assert set(proxy.seen) == STEPS


def cut_at(node: Node, moment: Moment, action: Action, step: str) -> None:
    name = f"{step}.{moment.value}.{action.value}"
    with proxied(node, Cut(step, moment, action, LATE_S)) as proxy, connect(node, proxy) as client:
        trial = Trial(client, name)
        trial.work()
        eventually(lambda: proxy.cuts or (trial.work() and False), f"{name}: the cut")
        # Nothing is started anew by anybody: the client finds its own way back. What is slow is not what is lost.
        trial.deadline_ms = 20_000
        eventually(trial.work, lambda: f"{name}: recovery; last state {client._session.reconnects}")
        trial.check()
        began_s = time.monotonic()
        client.close()
        assert time.monotonic() - began_s < HANG_S, f"{name}: close"


@pytest.mark.parametrize(
    ("moment", "action"),
    [
        pytest.param(*fault, id="-".join(one.value for one in fault), marks=[] if fault in QUICK else pytest.mark.long)
        for fault in FAULTS
    ],
)
def test_cut_at_every_step(node: Node, moment: Moment, action: Action) -> None:
    with node.leaving_nothing(), ThreadPoolExecutor(len(STEPS)) as pool:
        list(pool.map(partial(cut_at, node, moment, action), sorted(STEPS)))
