"""What the scheduler asks is asked of the node once a step, by threads; what cannot be loaded is not asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from forebay.clock import ManualClock
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.tier.lookups import Lookups
from tests.client.conftest import eventually

KEYS = [bytes([i]) * 32 for i in range(5)]


class Node:
    """What is there, and what was asked in each call."""

    def __init__(self, *there: bytes) -> None:
        self.there = set(there)
        self.calls: list[list[bytes]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def match(self, keys: Sequence[bytes]) -> Sequence[str]:
        self.calls.append(list(keys))
        self.go_on.wait(60)
        return ["ok" if key in self.there else "absent" for key in keys]


@contextmanager
def asking(match: Callable[[Sequence[bytes]], Sequence[str]], clock: ManualClock | None = None) -> Iterator[Lookups]:
    lookups = Lookups(match, Counters(), clock or ManualClock(), 1_000)
    yield lookups
    lookups.close()


def step(lookups: Lookups, request: str, *keys: bytes) -> list[str | None]:
    found = [lookups.ask(key, request) for key in keys]
    lookups.flush()
    return found


def answered(lookups: Lookups, request: str, *keys: bytes) -> list[str | None]:
    found: list[str | None] = []

    def all_there() -> bool:
        found[:] = step(lookups, request, *keys)
        return None not in found

    eventually(all_there, "answers")
    return found


def test_all_that_a_step_asks_is_one_call() -> None:
    node = Node(*KEYS[:2])
    with asking(node.match) as lookups:
        for request, keys in (("a", KEYS[:3]), ("b", KEYS[2:])):
            assert [lookups.ask(key, request) for key in keys] == [None] * 3
        lookups.flush()
        assert answered(lookups, "a", *KEYS[:3]) == ["ok", "ok", "absent"]
        assert [lookups.present("a"), lookups.present("b")] == [2, 0]
        assert answered(lookups, "b", *KEYS[2:]) == ["absent"] * 3
    assert node.calls == [KEYS], "once for all, and each key once"
    assert lookups._counters.take() == {"hit_blocks": 2, "missed_blocks:absent": 3}


def test_what_has_no_answer_in_time_is_a_miss_that_stays_one() -> None:
    node, clock = Node(*KEYS), ManualClock()
    node.go_on.clear()
    with asking(node.match, clock) as lookups:
        assert step(lookups, "a", KEYS[0]) == [None]
        clock.advance(999)
        assert step(lookups, "a", KEYS[0]) == [None]
        clock.advance(1)
        assert step(lookups, "a", KEYS[0]) == ["deadline_exceeded"]
        node.go_on.set()
        eventually(lambda: lookups._known[KEYS[0]].answer == "ok", "the answer")
        assert step(lookups, "a", KEYS[0]) == ["deadline_exceeded"], "the engine has gone on without it"
    assert lookups._counters.take() == {"missed_blocks:deadline_exceeded": 1}


def test_what_nobody_waits_for_any_more_is_not_asked_for() -> None:
    node, clock = Node(*KEYS), ManualClock()
    node.go_on.clear()
    with asking(node.match, clock) as lookups:
        for key in KEYS[:2]:
            step(lookups, "a", key)
        eventually(lambda: len(node.calls) == 2, "both threads in a call")
        step(lookups, "a", KEYS[2])
        step(lookups, "b", KEYS[3])
        step(lookups, "c", KEYS[4])
        lookups.forget("b")
        clock.advance(1_000)
        assert step(lookups, "a", KEYS[2]) == ["deadline_exceeded"]
        node.go_on.set()
        eventually(lambda: lookups._known[KEYS[4]].answer == "ok", "what is still waited for")
        assert sorted(node.calls) == [KEYS[:1], KEYS[1:2], KEYS[4:]]


def test_what_could_not_be_loaded_is_a_miss_for_those_who_asked_and_new_for_the_next() -> None:
    node = Node(*KEYS)
    with asking(node.match) as lookups:
        assert answered(lookups, "a", KEYS[0]) == ["ok"]
        lookups.lost([KEYS[0], KEYS[1]])
        assert step(lookups, "a", KEYS[0]) == ["lost"]
        assert step(lookups, "b", KEYS[0]) == ["lost"], "while somebody lives who knows better"
        lookups.forget("a")
        lookups.forget("b")
        assert answered(lookups, "c", KEYS[0]) == ["ok"]
    assert len(node.calls) == 2


def test_what_this_engine_has_stored_is_there_for_those_who_still_ask() -> None:
    with asking(Node().match) as lookups:
        assert answered(lookups, "a", KEYS[0]) == ["absent"]
        lookups.stored(KEYS)
        assert step(lookups, "a", KEYS[0]) == ["ok"]


def test_a_mistake_is_a_miss() -> None:
    def fail(keys: Sequence[bytes]) -> Sequence[str]:
        raise RuntimeError("a mistake")

    def fail_at_once() -> None:
        raise RuntimeError("another")

    with asking(fail) as lookups:
        assert answered(lookups, "a", KEYS[0]) == ["error"]
        done = threading.Event()
        lookups.background(fail_at_once)
        lookups.background(done.set)
        assert done.wait(60), "the threads live on"


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    with asking(Node(*KEYS).match) as lookups:
        answered(lookups, "a", *KEYS)
        step(lookups, "b", KEYS[0])
        lookups.forget("a")
        assert set(lookups._known) == {KEYS[0]}
        lookups.forget("b")
        lookups.forget("never seen")
        assert not lookups._known and not lookups._keys_of


def test_a_pause_ends_with_an_answer_and_is_none_without_a_question() -> None:
    node = Node(*KEYS)
    node.go_on.clear()
    with asking(node.match) as lookups:
        lookups.pause(3_600)
        step(lookups, "a", KEYS[0])
        threading.Timer(0.01, node.go_on.set).start()
        lookups.pause(3_600)
        assert step(lookups, "a", KEYS[0]) == ["ok"]
