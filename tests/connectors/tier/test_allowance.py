"""What comes slower than it is computed is not loaded: one decision a request, whatever is asked how often."""

from __future__ import annotations

from forebay.clock import ManualClock
from forebay.connectors.guard import Guard
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.tier.allowance import Allowance

KEYS = [bytes([i]) * 32 for i in range(10)]


def of(rate: float, seconds_a_block: float, limit_ms: int = 60_000) -> Allowance:
    """Of an engine that computes ``rate`` tokens a second, and has learned how long loads take."""
    allowance = Allowance(Guard(ManualClock(), tokens_per_s=rate, limit_ms=limit_ms), Counters(), 16)
    for job, blocks in enumerate((1, 4)):
        allowance.began(job, blocks)
        allowance.ended(job, blocks * seconds_a_block)
    return allowance


def granted(allowance: Allowance, request: str) -> int:
    return sum(allowance.grants(request, key, len(KEYS)) for key in KEYS)


def test_a_request_whose_load_pays_gets_all_of_it() -> None:
    allowance = of(1_000, 0.001)
    assert granted(allowance, "a") == granted(allowance, "a") == 10
    assert allowance._counters.take() == {"decisions:faster": 1}


def test_a_request_whose_load_does_not_pay_gets_nothing() -> None:
    allowance = of(1_000_000, 0.001)
    assert granted(allowance, "a") == granted(allowance, "a") == 0
    assert allowance._counters.take() == {"decisions:slower": 1, "lost_blocks:guard": 10}
    allowance.forget("a")
    assert granted(allowance, "a") == 0
    assert allowance._counters.take()["decisions:slower"] == 1, "a new request, a new decision"


def test_of_what_takes_too_long_as_much_is_loaded_as_there_is_time_for() -> None:
    allowance = of(10, 0.1, limit_ms=550)
    assert [allowance.grants("a", key, len(KEYS)) for key in KEYS] == [True] * 5 + [False] * 5
    assert [allowance.grants("a", key, len(KEYS)) for key in KEYS] == [True] * 5 + [False] * 5
    assert allowance._counters.take() == {"decisions:partial": 1, "lost_blocks:guard": 5}


def test_a_load_that_failed_says_nothing_about_its_speed() -> None:
    allowance = of(1_000, 0.001)
    for job in range(10, 20):
        allowance.began(job, 4)
        allowance.ended(job, None)
    assert granted(allowance, "a") == 10
