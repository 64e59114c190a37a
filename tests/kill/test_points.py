"""The daemon dies at each crash point while target and clients live on: real processes, started again on what is there.

All points in `make test-long`, one at random in `make test`; `tests/sim/test_crashes.py` has all of them always, with
daemon and target in one process.
"""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.appliance.namespace.records import Durability
from forebay.client import Client, ClientOptions, connect
from forebay.crashpoints import POINTS
from forebay.errors import ForebayError
from forebay.schema import Schema
from tests.client.conftest import NodeProcess, eventually
from tests.conftest import LONG
from tests.counting import Count
from tests.kill.blocks import SCHEMA, WITHOUT_HTTP, value_of
from tests.kill.herd import administrator, fsck
from tests.power.history import History
from tests.seeds import SEED

NAME = "kill/flush"
HALF_MADE = "start.after_unfinished_file_before_record"
"""Is reached only by a start that finds a creation cut short."""
_OPTIONS = ClientOptions(deadline_ms=5_000, connect_ms=5_000, attempt_ms=5_000)
_PATIENT = ClientOptions(deadline_ms=60_000, connect_ms=60_000, attempt_ms=5_000)


class _Doomed(NodeProcess):
    """A node whose daemon kills itself at a point, perhaps while it starts."""

    def start(self) -> None:
        try:
            super().start()
        except FileNotFoundError:  # no node.json: it was over before it served
            assert self.dead

    @property
    def dead(self) -> bool:
        return self.process.poll() == -signal.SIGKILL


class _Life:
    """What a client and an administrator do, noted; every step may be the last."""

    def __init__(self, node: _Doomed) -> None:
        self.node = node
        self.history = History({NAME: Durability.FLUSH, "kill/other": Durability.FLUSH})

    def run(self) -> None:
        steps: list[Callable[[], None]] = [self._make, self._use, self._evict, self._other, self._stop, self._use]
        for step in steps:
            if not self.node.dead:
                try:
                    step()
                except ForebayError:  # as a command says it whose node died
                    eventually(lambda: self.node.dead, "the daemon's end")

    def note(self, *words: object) -> None:
        self.history.read([" ".join(map(str, words))])

    def _client(self, name: str = NAME, schema: Schema = SCHEMA) -> Client:
        return connect(self.node.url, token=self.node.token, namespace=name, schema=schema, options=_OPTIONS)

    def _make(self) -> None:
        with administrator(self.node) as admin:
            self.note("making", NAME)
            admin.create_namespace(NAME)
            self.note("made", NAME)

    def _put(self, client: Client, name: str, keys: list[str], version: int) -> None:
        for key in keys:
            self.note("putting", name, key, version)
        results = client.put([k.encode() for k in keys], [value_of(name, k, version) for k in keys])
        for key, result in zip(keys, results, strict=True):
            if result.stored:
                self.note("put", name, key, version)

    def _use(self) -> None:
        keys = [f"k{i}" for i in range(6)]
        with self._client() as client, self._client(schema=Schema.opaque()) as other:
            for version in (1, 2):
                for key in keys:
                    self.note("deleting", NAME, key)
                for key, reason in zip(keys, client.delete([key.encode() for key in keys]), strict=True):
                    if reason in ("ok", "absent"):
                        self.note("deleted", NAME, key)
                self._put(client, NAME, keys, version)
            other.put([b"opaque"], [bytes(100_000)])  # a region of its own, empty again when the node starts
            other.delete([b"opaque"])

    def _evict(self) -> None:
        with administrator(self.node) as admin, self._client() as client:
            self.note("evicting", NAME)
            admin.update_namespace(NAME, quota_bytes=8 * SCHEMA.groups[0].layout().extent_bytes)
            self._put(client, NAME, [f"more{i}" for i in range(4)], 1)

    def _other(self) -> None:
        with administrator(self.node) as admin:
            self.note("making", "kill/other")
            admin.create_namespace("kill/other")
            self.note("made", "kill/other")
            with self._client("kill/other") as client:
                self._put(client, "kill/other", ["theirs"], 1)
            self.note("dropping", "kill/other")
            admin.delete_namespace("kill/other", force=True)
            self.note("dropped", "kill/other")

    def _stop(self) -> None:
        self.node.process.terminate()
        self.node.process.wait(60)
        if not self.node.dead:
            self.node.start()


def _hold(node: NodeProcess, history: History) -> int:
    """What the clients were told against what the node says now; blocks compared."""
    with administrator(node) as admin:
        there = {one.name for one in admin.list_namespaces()}
    read = 0
    for name, made in history.made.items():
        assert made is None or made is (name in there), (name, made, there)
        keys = [key for namespace, key in history.keys if namespace == name]
        if name not in there or not keys:
            continue
        with connect(node.url, token=node.token, namespace=name, schema=SCHEMA, options=_PATIENT) as client:
            for key, result in zip(keys, client.get([key.encode() for key in keys]), strict=True):
                allowed = history.may_be(name, key)
                found = None if result.value is None else bytes(result.value)
                assert (found is None and None in allowed) or any(
                    v is not None and found == value_of(name, key, v) for v in allowed
                ), f"{name} {key}: {result.reason}, may be {allowed}"
                read += found is not None
            (after,) = client.put([b"after"], [value_of(name, "after", 1)])
            assert after.stored, after
    return read


@pytest.mark.timeout(1_200)
def test_the_daemon_dies_at_a_point_and_the_target_lives_on(tmp_path: Path, count: Count) -> None:
    chosen = POINTS if LONG else random.Random(SEED).sample(POINTS, 1)
    for point in chosen:
        home = tmp_path / point
        home.mkdir()
        try:
            read = _die_at(home / "data", point)
        except BaseException as error:
            error.add_note(f"FOREBAY_SEED={SEED}, {point}, {home}")
            raise
        count.add(crash_points_with_daemon_death=1, blocks_verified=read)


def _die_at(data: Path, point: str) -> int:
    if point == HALF_MADE:
        _die_at_once(data, "namespace.after_volumes_before_live")
    node = _Doomed(data, FOREBAY_CRASH_AT=point, **WITHOUT_HTTP)
    life = _Life(node)
    try:
        life.run()
        assert node.dead, f"the daemon never comes to {point}"
        del node.environment["FOREBAY_CRASH_AT"]
        node.start()
        read = _hold(node, life.history)
    finally:
        _stop(node)
    return read + fsck(data)


def _die_at_once(data: Path, point: str) -> None:
    node = _Doomed(data, FOREBAY_CRASH_AT=point, **WITHOUT_HTTP)
    eventually(lambda: node.dead, "the daemon's end")


def _stop(node: NodeProcess) -> None:
    if node.process.poll() is None:
        node.process.terminate()
        try:
            node.process.wait(60)
        except subprocess.TimeoutExpired:
            node.process.kill()
