"""Power loss of a real daemon and a real target, with clients at work over sockets.

Both processes are recorded in one log, in which the test notes what its clients were told. Most states are then opened
in this process, which is quick; one is served by a daemon and a target again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.appliance.namespace.records import Durability
from forebay.client import Client, ClientOptions, connect
from tests import targets
from tests.client.conftest import NodeProcess
from tests.conftest import LONG
from tests.counting import Count
from tests.kill.blocks import SCHEMA, WITHOUT_HTTP, value_of
from tests.kill.herd import administrator
from tests.power.checking import Subject, check
from tests.power.disk import append_mark
from tests.power.history import History
from tests.power.recorded import Recording, State
from tests.seeds import SEED

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(3_600 if LONG else 120),
    pytest.mark.skipif(targets.KIND == "spdk", reason="SPDK's target writes by io_submit, which nothing records here"),
]

POLICIES = {f"real/{policy.name.lower()}": policy for policy in Durability}
SUBJECT = Subject(
    "data/metadata/rocksdb", "data/drive0", "data/metadata/index.checkpoint", 64, value_of, lambda key: SCHEMA
)
LOSSES = 200 if LONG else 4
SERVED = 8 if LONG else 1
_STEPS = 8
_BATCH = 3
_OPTIONS = ClientOptions(deadline_ms=60_000, connect_ms=60_000, attempt_ms=10_000)


class _Writer:
    """Stores, deletes and stores again in one namespace; says before and after."""

    def __init__(self, recording: Recording, name: str, seed: int) -> None:
        self._log, self._name = recording.log, name
        self._chance = random.Random(seed)
        self._versions: dict[str, int] = {}
        self._there: set[str] = set()

    def _say(self, *words: object) -> None:
        append_mark(self._log, " ".join(map(str, words)))

    def work(self, node: NodeProcess) -> None:
        with connect(node.url, token=node.token, namespace=self._name, schema=SCHEMA, options=_OPTIONS) as client:
            for _ in range(_STEPS):
                self._put(client)
                self._delete(client)

    def _put(self, client: Client) -> None:
        gone = sorted(self._versions.keys() - self._there)
        keys = self._chance.sample(gone, min(1, len(gone))) + [f"k-{len(self._versions) + i}" for i in range(_BATCH)]
        for key in keys:
            self._versions[key] = self._versions.get(key, 0) + 1
            self._say("putting", self._name, key, self._versions[key])
        values = [value_of(self._name, key, self._versions[key]) for key in keys]
        results = client.put([key.encode() for key in keys], values)
        assert all(result.stored for result in results), results
        for key in keys:
            self._say("put", self._name, key, self._versions[key])
        self._there.update(keys)

    def _delete(self, client: Client) -> None:
        keys = self._chance.sample(sorted(self._there), 2)
        for key in keys:
            self._say("deleting", self._name, key)
        assert client.delete([key.encode() for key in keys]) == ["ok"] * 2
        for key in keys:
            self._say("deleted", self._name, key)
        self._there.difference_update(keys)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A node that is started, used, killed, started and used again; in the large profile with a clean stop besides."""
    recording = Recording(tmp_path_factory.mktemp("processes"))
    node = NodeProcess(recording.root / "data", **WITHOUT_HTTP, **recording.environment())
    try:
        with administrator(node) as admin:
            for name, policy in POLICIES.items():
                append_mark(recording.log, f"making {name}")
                admin.create_namespace(name, durability=policy.name.lower())
                append_mark(recording.log, f"made {name}")
        writers = [_Writer(recording, name, SEED + i) for i, name in enumerate(POLICIES)]
        for end in (node.kill, node.stop, None) if LONG else (node.kill, None):
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda writer: writer.work(node), writers))
            if end is not None:
                end()
                node.start()
    finally:
        node.stop()
    return recording


def _history(state: State) -> History:
    return History(POLICIES).read(state.marks)


def _lost(state: State) -> int:
    return state.lost["changes_lost"] + state.lost["changes_torn"] + state.lost["entries_lost"]


def test_nothing_acknowledged_is_lost_or_wrong(life: Recording, count: Count) -> None:
    first = next(place for place, mark in life.marks() if mark.startswith("made"))
    for state in life.lose(life.anywhere(LOSSES, random.Random(SEED), after=first)):
        try:
            compared = asyncio.run(check(SUBJECT, state.folder, _history(state)))
        except BaseException as error:
            error.add_note(f"FOREBAY_SEED={SEED}, {state.cut}, {dict(state.lost)}")
            raise
        shutil.rmtree(state.folder)
        count.add(power_losses=1, blocks_verified=compared, changes_lost_or_torn=_lost(state))


def test_daemon_and_target_serve_what_a_loss_left(life: Recording, tmp_path: Path, count: Count) -> None:
    first = next(place for place, mark in life.marks() if mark.startswith("put "))
    for state in life.lose(life.anywhere(SERVED, random.Random(SEED), after=first)):
        history = _history(state)
        node = NodeProcess(state.folder / "data", **WITHOUT_HTTP)
        try:
            read = sum(_compare(node, history, name) for name in POLICIES)
        except BaseException as error:
            error.add_note(f"FOREBAY_SEED={SEED}, {state.cut}, {dict(state.lost)}")
            raise
        finally:
            node.stop()
        count.add(power_losses=1, blocks_verified=read, changes_lost_or_torn=_lost(state))


def _compare(node: NodeProcess, history: History, name: str) -> int:
    keys = [key for namespace, key in history.keys if namespace == name]
    read = 0
    if not keys:
        return 0
    with connect(node.url, token=node.token, namespace=name, schema=SCHEMA, options=_OPTIONS) as client:
        for key, result in zip(keys, client.get([key.encode() for key in keys]), strict=True):
            allowed = history.may_be(name, key)
            if result.value is None:
                assert None in allowed and result.reason == "absent", f"{name} {key}: {result.reason}, {allowed}"
            else:
                found = bytes(result.value)
                assert any(v is not None and value_of(name, key, v) == found for v in allowed), f"{name} {key}"
                read += 1
        fresh = [value_of(name, f"fresh-{i}", 1) for i in range(4)]
        names = [f"fresh-{i}".encode() for i in range(4)]
        assert all(result.stored for result in client.put(names, fresh))
        assert [bytes(result.value or b"") for result in client.get(names)] == fresh
    return read
