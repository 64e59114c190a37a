"""Loads in parts: what is under way at once, what counts as loaded or lost, and that each has one end."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.client import Client, GetResult
from forebay.clock import ManualClock, SystemClock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.loads import LOADERS, Loads, PartedLoad, lost_to, part_blocks
from forebay.connectors.vllm.messages import Rows
from forebay.connectors.vllm.settings import Settings
from forebay.ids import MAX_BATCH_KEYS
from tests.client.conftest import eventually

SIZE = 10
Read = Callable[[Client, Rows, int], Sequence[GetResult]]


class There:
    """A link whose client is there as long as it is said to be."""

    def __init__(self) -> None:
        self.client: Any = SimpleNamespace()
        self.noted: list[str] = []

    def wait(self, timeout_ms: int) -> Any:
        return self.client

    def note(self, reasons: Any) -> None:
        self.noted += reasons


class Rig:
    """Threads for loads, and how those ended that it was asked for."""

    def __init__(self, clock: Any = None) -> None:
        self.counters, self.link = Counters(), There()
        self.loads = Loads(Settings(), self.counters, clock or SystemClock())
        self.loads.link = cast(Link, self.link)
        self.cancelled: set[int] = set()
        self.ends: dict[int, list[list[bool]]] = {}
        self._changed = threading.Condition()

    def begin(self, number: int, parts: int, read: Read, *, blocks: int = 2, chained: bool = True) -> None:
        of = [Rows(0, tuple([bytes([number, part, i]) for i in range(blocks)]), (0,) * blocks) for part in range(parts)]

        def ended(there: list[bool], seconds: float) -> None:
            assert seconds >= 0
            with self._changed:
                self.ends.setdefault(number, []).append(there)
                self._changed.notify_all()

        now_ms = self.loads.clock.monotonic_ms()
        load = PartedLoad(
            of, read, now_ms, 60_000, chained=chained, cancelled=lambda: number in self.cancelled, ended=ended
        )
        self.loads.begin(load)

    def end(self, number: int) -> list[bool]:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.ends, 60)
        (there,) = self.ends[number]
        return there

    def counts(self) -> dict[str, float]:
        return {name: count for name, count in self.counters.take().items() if count and name != "load_seconds"}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.loads.close()
    assert all(len(ends) == 1 for ends in rig.ends.values()), "each once"


def hit(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
    return [GetResult(True, "ok", None, SIZE)] * len(part.keys)


def part_of(part: Rows) -> int:
    return part.keys[0][1]


def missing(at: int, why: str) -> Read:
    """All is there but the first block of one part."""

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        results = hit(client, part, left_ms)
        return [GetResult(False, why), *results[1:]] if part_of(part) == at else results

    return read


def test_the_next_part_is_read_while_one_is_copied_and_no_more_than_that(rig: Rig) -> None:
    together = threading.Barrier(2)
    lock, now, most = threading.Lock(), 0, 0

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(60)  # nobody goes on alone
        with lock:
            now -= 1
        return hit(client, part, left_ms)

    rig.begin(1, 6, read)
    assert rig.end(1) == [True] * 12 and most == 2
    assert rig.counts() == {"loaded_blocks": 12, "loaded_bytes": 12 * SIZE}


def test_no_more_parts_are_under_way_than_there_are_threads(rig: Rig) -> None:
    lock, now, most, go = threading.Lock(), 0, 0, threading.Event()

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        assert go.wait(60)
        with lock:
            now -= 1
        return hit(client, part, left_ms)

    for number in range(2 * LOADERS):
        rig.begin(number, 3, read)
    eventually(lambda: now == LOADERS, "all threads")
    go.set()
    assert all(rig.end(number) == [True] * 6 for number in range(2 * LOADERS)) and most == LOADERS


def test_what_comes_after_a_gap_is_lost_with_it(rig: Rig) -> None:
    rig.begin(1, 4, missing(1, "absent"))
    assert rig.end(1) == [True, True, False, True, False, False, False, False]
    assert rig.counts() == {
        "loaded_blocks": 3,
        "loaded_bytes": 3 * SIZE,
        "lost_blocks:evicted": 1,
        "lost_blocks:behind_gap": 4,
    }


def test_a_part_behind_a_gap_is_lost_also_if_it_was_read_before(rig: Rig) -> None:
    second = threading.Event()

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        if part_of(part):
            second.set()
            return hit(client, part, left_ms)
        assert second.wait(60)
        return [GetResult(False, "checksum_mismatch")] * len(part.keys)

    rig.begin(1, 2, read)
    assert rig.end(1) == [False] * 4
    assert rig.counts() == {"lost_blocks:checksum_mismatch": 2, "lost_blocks:behind_gap": 2}


def test_parts_that_need_no_others_are_read_whatever_becomes_of_those(rig: Rig) -> None:
    rig.begin(1, 3, missing(0, "deadline_exceeded"), chained=False)
    assert rig.end(1) == [False, True, True, True, True, True]
    assert rig.counts() == {"loaded_blocks": 5, "loaded_bytes": 5 * SIZE, "lost_blocks:late": 1}


@pytest.mark.parametrize("chained", [True, False])
def test_a_mistake_ends_its_load_and_no_other(rig: Rig, chained: bool) -> None:
    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        if part_of(part) == 1:
            raise RuntimeError("a mistake")
        return hit(client, part, left_ms)

    rig.begin(1, 2, read, chained=chained)
    rig.begin(2, 1, hit)
    assert rig.end(1) == [True, True, False, False] and rig.end(2) == [True, True]
    assert rig.counts() == {"loaded_blocks": 4, "loaded_bytes": 4 * SIZE, "lost_blocks:error": 2}


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("had", [0, 1])
def test_a_load_that_finds_no_thread_has_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, chained: bool, had: int
) -> None:
    start, left = threading.Thread.start, had

    def refused(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    go = threading.Event()

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        assert go.wait(60)
        return hit(client, part, left_ms)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        rig.begin(1, 3, read, chained=chained)
    go.set()
    there = sum(rig.end(1))
    assert there <= 2 * had, "what was begun by then"
    assert rig.counts()["lost_blocks:error"] == 6 - there
    rig.begin(2, 3, hit)
    assert rig.end(2) == [True] * 6


@pytest.mark.parametrize("chained", [True, False])
def test_a_load_that_is_given_up_ends_where_it_is(rig: Rig, chained: bool) -> None:
    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        rig.cancelled.add(1)
        return hit(client, part, left_ms)

    rig.begin(1, 9, read, chained=chained)
    there = sum(rig.end(1))
    assert there <= 4, "each of two threads had one part"
    assert rig.counts()["lost_blocks:cancelled"] == 18 - there


def test_a_node_that_goes_away_is_not_asked_for_the_rest(rig: Rig) -> None:
    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        rig.link.client = None
        return [GetResult(False, "unavailable")] * len(part.keys)

    rig.begin(1, 9, read, chained=False)
    assert not any(rig.end(1))
    assert rig.counts() == {"lost_blocks:unavailable": 18}


def test_what_a_client_meets_is_noted_of_its_own_link_also_when_another_has_come(rig: Rig) -> None:
    before, after = rig.link, There()

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        rig.loads.link = cast(Link, after)
        return [GetResult(False, "connection_lost")] * len(part.keys)

    rig.begin(1, 1, read)
    assert not any(rig.end(1))
    assert before.noted == ["connection_lost"] * 2 and after.noted == []


def test_what_is_late_is_not_begun() -> None:
    clock = ManualClock()
    rig = Rig(clock)

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        assert left_ms == 60_000
        clock.advance(60_000)
        return hit(client, part, left_ms)

    rig.begin(1, 1, read)
    assert rig.end(1) == [True, True], "it came, however long that took"
    rig.begin(2, 5, hit)
    clock.advance(60_000)
    rig.end(2)
    rig.loads.close()
    counts = rig.counts()
    assert counts.get("loaded_blocks", 0) + counts.get("lost_blocks:late", 0) == 12


def test_whatever_happens_each_block_is_counted_once(rig: Rig) -> None:
    reasons = ("absent", "late", "deadline_exceeded", "connection_lost", "checksum_mismatch")

    def outcome(part: Rows) -> random.Random:
        return random.Random(f"{part.keys[0]!r}")

    def read(client: Client, part: Rows, left_ms: int) -> list[GetResult]:
        rng = outcome(part)
        if rng.random() < 0.05:
            raise RuntimeError("a mistake")
        return [
            GetResult(True, "ok", None, SIZE) if rng.random() < 0.9 else GetResult(False, rng.choice(reasons))
            for _ in part.keys
        ]

    rng, blocks = random.Random(3), 0
    for number in range(200):
        parts = rng.randrange(1, 8)
        blocks += 3 * parts
        rig.begin(number, parts, read, blocks=3, chained=number % 2 == 0)
    there = [rig.end(number) for number in range(200)]
    counts = Counter(rig.counts())
    lost = sum(count for name, count in counts.items() if name.startswith("lost_blocks:"))
    assert sum(map(len, there)) == blocks == counts["loaded_blocks"] + lost
    assert sum(map(sum, there)) == counts["loaded_blocks"] == counts["loaded_bytes"] / SIZE
    for each in there[::2]:  # of those where one part needs the others, only the last that counts has gaps
        whole = [part for part in range(len(each) // 3) if all(each[3 * part : 3 * part + 3])]
        some = [part for part in range(len(each) // 3) if any(each[3 * part : 3 * part + 3])]
        assert whole == list(range(len(whole))) and max(some, default=-1) <= len(whole)


def test_reasons_and_sizes() -> None:
    assert [lost_to(why) for why in ("absent", "deadline_exceeded", "unavailable")] == [
        "evicted",
        "late",
        "unavailable",
    ]
    assert [part_blocks(size) for size in (1, 16 << 20, 64 << 20)] == [MAX_BATCH_KEYS, 1, 1]
