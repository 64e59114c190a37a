"""When loading beats computing: from measurements, with partial prefixes, and without flapping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.clock import ManualClock
from forebay.connectors.guard import Guard, Line, Verdict

TOKENS = 16


def guard(clock: ManualClock | None = None, *, rate: float = 1_000.0, limit_ms: int = 10_000) -> Guard:
    return Guard(clock or ManualClock(), tokens_per_s=rate, limit_ms=limit_ms)


def measure(guard: Guard, blocks: int, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        guard.began("r", blocks)
        guard.ended("r", seconds)


@given(base=st.floats(0, 1), slope=st.floats(0, 0.1), xs=st.sets(st.integers(1, 1000), min_size=2, max_size=20))
def test_a_line_is_found_again(base: float, slope: float, xs: set[int]) -> None:
    line = Line()
    for x in xs:
        line.add(x, base + slope * x)
    for x in (1, 500, 2000):
        assert line.at(x) == pytest.approx(base + slope * x, abs=1e-5, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100)), min_size=1, max_size=30), st.integers(0, 5000))
def test_no_measurements_make_it_expect_less_than_nothing(rows: list[tuple[int, float]], at: int) -> None:
    line = Line()
    assert line.at(at) is None
    for x, y in rows:
        line.add(x, y)
    expected = line.at(at)
    assert expected is not None and expected >= 0


def test_what_is_not_known_is_tried() -> None:
    assert guard().verdict(10, TOKENS) == Verdict(10, "unknown")
    learning = guard(rate=0)
    measure(learning, 10, 5.0)
    assert learning.verdict(10, TOKENS).reason == "unknown"
    learning.computed(8, 1.0)
    assert learning.verdict(10, TOKENS).reason == "unknown", "a step of decoding is no prefill"
    learning.computed(512, 0.512)
    assert learning.verdict(10, TOKENS) == Verdict(0, "slower")


def test_long_prefixes_are_loaded_and_short_ones_computed() -> None:
    """10 ms of latency and 1 ms a block, against 16 ms a block: one block is the break-even, with 2.5 ms a block it is
    at five."""
    fast = guard(rate=4_000)  # 4 ms a block
    for blocks in (1, 10, 100):
        measure(fast, blocks, 0.010 + 0.001 * blocks)
    assert [fast.verdict(blocks, TOKENS).reason for blocks in (1, 2, 3, 4, 100)] == [
        "slower",
        "slower",
        "slower",
        "faster",
        "faster",
    ]


def test_what_is_under_way_counts() -> None:
    busy = guard(rate=4_000)
    measure(busy, 10, 0.035, 3)
    assert busy.verdict(10, TOKENS).reason == "faster"
    busy.began("a", 20)
    busy.began("b", 20)
    assert busy.verdict(10, TOKENS).reason == "slower"
    busy.ended("a", None)
    busy.ended("b", None)
    assert busy.verdict(10, TOKENS).reason == "slower", "it must win by more now"
    assert busy.verdict(100, TOKENS).reason == "faster", "another size"


def test_a_refusal_stands_until_loading_wins_clearly() -> None:
    clock = ManualClock()
    near = guard(clock)  # 16 ms a block
    measure(near, 10, 0.170, 30)
    assert near.verdict(10, TOKENS).reason == "slower"
    measure(near, 10, 0.150, 60)
    assert near.verdict(10, TOKENS).reason == "slower", "not by so little"
    measure(near, 10, 0.100, 60)
    assert near.verdict(10, TOKENS).reason == "faster"
    measure(near, 10, 0.150, 60)
    assert near.verdict(10, TOKENS).reason == "faster"


def test_a_load_is_tried_now_and_then() -> None:
    clock = ManualClock()
    slow = guard(clock)
    measure(slow, 10, 1.0)
    assert slow.verdict(10, TOKENS).reason == "slower"
    clock.advance(10_000)
    assert slow.verdict(10, TOKENS) == Verdict(10, "trial")
    measure(slow, 10, 1.0)
    assert slow.verdict(10, TOKENS).reason == "slower", "and not again at once"


def test_of_a_prefix_that_would_come_too_late_a_part_is_loaded() -> None:
    tight = guard(rate=100, limit_ms=1_000)
    measure(tight, 10, 0.100, 3)
    assert tight.verdict(50, TOKENS) == Verdict(50, "faster")
    assert tight.verdict(400, TOKENS) == Verdict(100, "partial")
    tight.began("other", 100)
    assert tight.verdict(400, TOKENS) == Verdict(0, "late")
