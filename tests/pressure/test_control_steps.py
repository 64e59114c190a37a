"""The control connection cut at every call, before, within and after its request and its answer.

Each client does all that a client can do; the calls that it makes are the steps, and a call of the protocol that it
does not make fails the first test.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from forebay.client import Client, ClientOptions
from forebay.client.session import Opening
from forebay.errors import ForebayError
from forebay.proto import forebay_pb2 as pb
from forebay.schema import Schema
from forebay.testing.proxy import Action, Cut, FaultProxy, Moment
from forebay.testing.steps import GrpcSteps
from tests.pressure.conftest import HANG_S, Node, eventually

DEADLINE_MS = 1_000
LATE_S = 1.5
OPTIONS = ClientOptions(deadline_ms=DEADLINE_MS, connect_ms=DEADLINE_MS)
FAULTS = [
    (moment, action)
    for moment, action in itertools.product(Moment, Action)
    if action is not Action.DELAY or moment is Moment.BEFORE
]
QUICK = {(Moment.AFTER, Action.RESET)}
CALLS = {method.name for method in pb.DESCRIPTOR.services_by_name["Blocks"].methods} - {"Calls"}
STEPS = {f"{call}{part}" for call in CALLS for part in ("", ".response")} | {"settings", "settings.response"}
LEGAL = {
    *("ok", "absent", "already_exists", "pending"),
    *("unavailable", "deadline_exceeded", "busy"),
    *("session_expired", "write_expired", "lease_expired", "write_fenced", "connection_lost", "target_refused"),
}


class Trial:
    """A client, another process's worth of it that joined, and one that watches."""

    def __init__(self, node: Node, proxy: FaultProxy, name: str) -> None:
        self.name = name
        self.turn = 0
        self.events = 0
        self.said = ""
        self.deadline_ms = DEADLINE_MS
        self._node = node
        self._url = f"forebay://127.0.0.1:{proxy.port}"
        self.client: Client | None = None
        self.joined: Client | None = None
        self._watching: threading.Thread | None = None

    def timed(self, what: str, limit_ms: int, call: Callable[[], Any]) -> Any:
        """Make a call; None if it raises one of our errors. It must end, and soon after its deadline."""
        began_s = time.monotonic()
        try:
            return call()
        except ForebayError:
            return None
        finally:
            took_s = time.monotonic() - began_s
            assert took_s < limit_ms / 1000 + HANG_S, f"{self.name}: {what} took {took_s:.1f} s of {limit_ms} ms"

    def connected(self) -> bool:
        """Have all three, opened where they are missing."""
        opening = Opening("default/default", Schema.opaque(), 0)
        if self.client is None:
            make = partial(Client, self._url, opening, token=self._node.token, options=OPTIONS)
            self.client = self.timed("OpenSession", DEADLINE_MS, make)
        if self.client is not None and self._watching is None:
            self._watching = threading.Thread(target=self._watch, args=(self.client,), name="watch", daemon=True)
            self._watching.start()
        if self.client is not None and self.joined is None:
            token = self.client.join_token
            join = partial(Client.join, self._url, token=self._node.token, session_token=token, options=OPTIONS)
            self.joined = self.timed("JoinSession", DEADLINE_MS, join)
        return self.client is not None and self.joined is not None

    def _watch(self, client: Client) -> None:
        while True:
            try:
                for _ in client.watch():
                    self.events += 1
                return
            except ForebayError:
                if client._session.closed:
                    return
                time.sleep(0.05)

    def work(self) -> bool:
        """Everything once; whether all of it worked."""
        if not self.connected():
            return False
        assert self.client is not None and self.joined is not None
        one, other = self.client, self.joined
        self.turn += 1
        keys = [f"{self.name}/{self.turn}/{i}".encode() for i in range(2)]
        values = [key * 200 for key in keys]
        before = self.events
        words: list[str] = []

        limit_ms = self.deadline_ms

        def heard(what: str, call: Callable[[], Any]) -> Any:
            found = self.timed(what, limit_ms, call)
            if found is None:
                words.append("unavailable")
                return []
            words.extend(r if isinstance(r, str) else r.reason for r in found)
            return found

        heard("put", lambda: one.put(keys, values, deadline_ms=limit_ms))
        for key, value, got in zip(
            keys, values, heard("get", lambda: other.get(keys, deadline_ms=limit_ms)), strict=False
        ):
            assert not got.hit or bytes(got.value) == value, f"{self.name}: wrong bytes for {key!r}"
        heard("match", lambda: one.match(keys, deadline_ms=limit_ms).reasons)
        heard("keyspaces", lambda: ["ok" for _ in one.keyspaces(deadline_ms=limit_ms)])
        heard("stat", lambda: one.stat(keys, deadline_ms=limit_ms))
        heard("pin", lambda: one.pin(keys, deadline_ms=limit_ms))
        heard("touch", lambda: one.touch(keys, deadline_ms=limit_ms))
        heard("wait", lambda: other.wait(keys, limit_ms))
        heard("list", lambda: ["ok" for _ in one.list(keys[0][:-1], deadline_ms=limit_ms)])
        heard("delete", lambda: one.delete(keys, deadline_ms=limit_ms))
        plan = self.timed("allocate", limit_ms, lambda: one.allocate(keys, lengths=[100, 100], deadline_ms=limit_ms))
        self.timed("abort", limit_ms, lambda: one.abort(plan, deadline_ms=limit_ms))
        assert set(words) <= LEGAL, f"{self.name}: {set(words) - LEGAL}"
        self.said = " ".join(words)
        if set(words) != {"ok"}:
            return False
        eventually(lambda: self.events > before, f"{self.name}: the watcher hears of what was stored")
        return True

    def close(self) -> None:
        for client in (self.joined, self.client):
            if client is not None:
                self.timed("close", DEADLINE_MS, client.close)
        if self._watching is not None:
            self._watching.join(HANG_S)
            assert not self._watching.is_alive(), f"{self.name}: a watcher outlives its client"


def proxied(node: Node, cut: Cut | None = None) -> FaultProxy:
    host, _, port = node.grpc.rpartition(":")
    return FaultProxy((host, int(port)), GrpcSteps, cut)


def test_every_call_of_the_protocol_is_a_step(node: Node) -> None:
    with proxied(node) as proxy:
        trial = Trial(node, proxy, "none")
        eventually(trial.work, "all calls answered")
        eventually(lambda: "Heartbeat.response" in proxy.seen, "a heartbeat")
        trial.close()
        with suppress(KeyError):
            del proxy.seen["cancel"]
        assert set(proxy.seen) == STEPS


def cut_at(node: Node, moment: Moment, action: Action, step: str) -> None:
    name = f"{step}.{moment.value}.{action.value}"
    with proxied(node, Cut(step, moment, action, LATE_S)) as proxy:
        trial = Trial(node, proxy, name)
        try:
            end_s = time.monotonic() + 60
            while step.partition(".")[0] != "CloseSession" and not proxy.cuts:
                assert time.monotonic() < end_s, f"{name}: the cut"
                if trial.turn > 2:  # its first call was too slow, and a connection tells a call's name once
                    trial.close()
                    trial = Trial(node, proxy, name)
                trial.work()
            trial.deadline_ms = 20_000  # what is slow is not what is lost
            eventually(trial.work, lambda: f"{name}: recovery, last {trial.said}")
        finally:
            trial.close()
        assert proxy.cuts, f"{name}: not cut"


@pytest.mark.parametrize(
    ("moment", "action"),
    [
        pytest.param(*fault, id="-".join(one.value for one in fault), marks=[] if fault in QUICK else pytest.mark.long)
        for fault in FAULTS
    ],
)
def test_cut_at_every_call(node: Node, moment: Moment, action: Action) -> None:
    with node.leaving_nothing(slack=8), ThreadPoolExecutor(len(STEPS)) as pool:
        list(pool.map(partial(cut_at, node, moment, action), sorted(STEPS)))


def test_silence_is_noticed(node: Node) -> None:
    """Of a connection that stays open while nothing crosses it, one case also where there is little time."""
    with node.leaving_nothing(slack=8):
        cut_at(node, Moment.AFTER, Action.SILENCE, "Acquire")
