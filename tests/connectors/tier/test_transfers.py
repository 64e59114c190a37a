"""Jobs between rows of a host pool and a real node: exact bytes, one report each, and an end whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forebay.client import Client, ClientOptions
from forebay.clock import SystemClock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.tier.transfers import Job, Outcome, Pool, Transfers
from forebay.errors import Unavailable
from forebay.schema import Group, HashAlgorithm, Schema
from tests.client.conftest import NodeProcess, eventually, halted

ROWS, ROW, VALUE = 16, 8192, 6144
GROUP = Group("full", (0, 1, 2), 16, 2, VALUE // 96, "float32", "test tier")
KEYS = tuple(bytes([i]) * 32 for i in range(ROWS))
NOTHING: tuple[bytes, ...] = ()


class Rig:
    """Transfers of a pool of random rows."""

    def __init__(
        self, node: NodeProcess | None, name: bytes, *, pending_bytes: int = ROWS * VALUE, **settings: object
    ) -> None:
        schema = Schema("vllm", name.ljust(32), HashAlgorithm("sha256_cbor", 16), (GROUP,))
        config = Settings.from_config({"url": node.url if node else "forebay://127.0.0.1:9", **settings})
        self.rows = np.random.default_rng(7).integers(0, 256, (ROWS, ROW), np.uint8)
        self.counters = Counters()

        def connect() -> Client:
            if node is None:
                raise Unavailable("nobody there")
            return config.connect(schema, ClientOptions(attempt_ms=20_000, connect_ms=20_000))

        self.link = Link(connect, SystemClock(), "test")
        self.link.wait(60_000)
        pool = Pool(self.rows.data.cast("B"), ROW, VALUE)
        self.transfers = Transfers(pool, self.link, config, self.counters, SystemClock(), pending_bytes=pending_bytes)
        self._ident = 0

    def submit(self, kind: str, keys: tuple[bytes, ...], rows: tuple[int, ...]) -> int:
        self._ident += 1
        self.transfers.submit(Job(self._ident, kind, keys, rows))  # type: ignore[arg-type]
        return self._ident

    def run(self, kind: str, keys: tuple[bytes, ...], rows: tuple[int, ...]) -> Outcome:
        self.submit(kind, keys, rows)
        (outcome,) = self.ended(1)
        return outcome

    def ended(self, count: int) -> list[Outcome]:
        found: list[Outcome] = []

        def enough() -> bool:
            found.extend(self.transfers.finished())
            return len(found) >= count

        eventually(enough, "the jobs", 60)
        assert len(found) == count and not self.transfers.finished(), "each once"
        return found

    def close(self) -> None:
        self.transfers.close()
        self.link.close()


@pytest.fixture
def rig(shared_node: NodeProcess, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("FOREBAY_TOKEN", shared_node.token)
    rig = Rig(shared_node, request.node.name[-32:].encode(), load_timeout_ms=60_000, save_timeout_ms=60_000)
    yield rig
    rig.close()


def test_rows_come_back_as_they_were_into_any_others(rig: Rig) -> None:
    before = rig.rows.copy()
    stored = rig.run("store", KEYS[:4], (0, 1, 2, 3))
    assert stored.whole and stored.done == stored.moved == KEYS[:4]
    loaded = rig.run("load", KEYS[:4], (9, 8, 11, 10))
    assert loaded.whole
    assert (rig.rows[[9, 8, 11, 10], :VALUE] == before[:4, :VALUE]).all()
    assert (rig.rows[8:12, VALUE:] == before[8:12, VALUE:]).all(), "nothing behind the value"
    assert (rig.rows[[*range(8), *range(12, ROWS)]] == before[[*range(8), *range(12, ROWS)]]).all()
    counts = rig.counters.take()
    assert counts.pop("load_seconds") >= 0
    assert counts == {"stored_blocks": 4, "stored_bytes": 4 * VALUE, "loaded_blocks": 4, "loaded_bytes": 4 * VALUE} | {
        "present_blocks": 0
    }


def test_what_is_there_is_not_written_again_and_counts_as_stored(rig: Rig) -> None:
    rig.run("store", KEYS[:2], (0, 1))
    again = rig.run("store", KEYS[:3], (0, 1, 2))
    assert again.whole and again.done == KEYS[:3] and again.moved == KEYS[2:3]


def test_a_load_tells_which_of_its_keys_came(rig: Rig) -> None:
    rig.run("store", (KEYS[0], KEYS[2]), (0, 2))
    before = rig.rows.copy()
    part = rig.run("load", KEYS[:3], (5, 6, 7))
    assert not part.whole and part.done == (KEYS[0], KEYS[2])
    assert (rig.rows[[5, 7], :VALUE] == before[[0, 2], :VALUE]).all()
    assert rig.counters.take()["lost_blocks:evicted"] == 1


def test_without_a_node_stores_end_at_once_and_loads_soon() -> None:
    rig = Rig(None, b"nobody")
    store = rig.submit("store", KEYS[:2], (0, 1))
    (ended,) = rig.transfers.finished()
    assert ended.job.ident == store and not ended.whole and ended.done == NOTHING, "it pins nothing"
    assert rig.run("load", KEYS[:2], (0, 1)).done == NOTHING
    counts = rig.counters.take()
    assert counts["unstored_blocks:unavailable"] == 2 and counts["lost_blocks:unavailable"] == 2
    rig.close()


def test_what_waits_to_be_stored_is_bounded(shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TOKEN", shared_node.token)
    rig = Rig(shared_node, b"bounded", pending_bytes=4 * VALUE, save_timeout_ms=60_000)
    assert rig.run("store", KEYS[:1], (0,)).whole
    target = shared_node.target_pid
    with halted(target):
        for start in range(0, 8, 2):
            rig.submit("store", KEYS[4 + start : 6 + start], (start, start + 1))
        refused = rig.transfers.finished()
        assert [outcome.job.ident for outcome in refused] == [4, 5]
        assert rig.counters.take()["unstored_blocks:busy"] == 4
    assert all(outcome.whole for outcome in rig.ended(2))
    assert rig.run("store", KEYS[14:], (14, 15)).whole, "and there is room again"
    rig.close()


def test_a_drain_ends_with_nobody_in_the_pool(shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TOKEN", shared_node.token)
    rig = Rig(shared_node, b"drained", load_timeout_ms=5_000, save_timeout_ms=60_000)
    assert rig.run("store", KEYS, tuple(range(ROWS))).whole
    target, begun, client = shared_node.target_pid, threading.Event(), rig.link.client
    assert client is not None
    read = client.get_into

    def noted(*args: Any, **options: Any) -> Any:
        begun.set()
        return read(*args, **options)

    monkeypatch.setattr(client, "get_into", noted)
    with halted(target):
        for row in range(ROWS):
            rig.submit("load", KEYS[row : row + 1], (row,))
        assert begun.wait(60)
        rig.transfers.drain()  # by the deadline of the loads that have begun
        rows = rig.rows.copy()
        ended = rig.transfers.finished()
    assert len(ended) == ROWS and not any(outcome.whole for outcome in ended)
    counts = rig.counters.take()
    assert counts["lost_blocks:cancelled"] > 0 and counts["lost_blocks:late"] > 0
    eventually(lambda: rig.run("load", KEYS[:1], (0,)).whole, "the target", 60)
    assert (rig.rows[1:] == rows[1:]).all()
    rig.close()


def test_what_was_to_be_stored_is_when_the_engine_ends(rig: Rig) -> None:
    for row in range(ROWS):
        rig.submit("store", KEYS[row : row + 1], (row,))
    rig.transfers.close()
    assert all(outcome.whole for outcome in rig.ended(ROWS))


def test_a_mistake_ends_its_job_and_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail(*_: object, **__: object) -> None:
        failed.set()
        raise RuntimeError("a mistake")

    client = rig.link.client
    assert client is not None
    with monkeypatch.context() as patch:
        patch.setattr(client, "put", fail)
        assert rig.run("store", KEYS[:2], (0, 1)).done == NOTHING
    assert failed.is_set() and rig.counters.take()["unstored_blocks:error"] == 2
    assert rig.run("store", KEYS[:2], (0, 1)).whole
