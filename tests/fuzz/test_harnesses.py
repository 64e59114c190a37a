"""Every harness: on its corpus, which holds all that ever failed, and on inputs that Hypothesis draws.

`make fuzz` runs them for longer, guided by coverage.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import LONG
from tests.counting import Count
from tests.fuzz import initiator, target
from tests.fuzz.harnesses import HARNESSES, entries, load
from tests.fuzz.watch import Faults

CASES = [(name, path) for name in HARNESSES for path in entries(name)]
#: Examples of the short profile; the long one has twenty times as many.
EXAMPLES = {"control": 12, "metadata": 25, "rpc_requests": 25, "initiator": 40, "target": 60}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What peers do wrong is logged, line after line; only faults of ours count here."""
    faults = Faults.install()
    yield
    Faults.remove()
    faults.check()


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """Servers that serve all inputs end with them."""
    yield
    initiator.close()
    target.close()


@pytest.mark.parametrize(("name", "path"), CASES, ids=[f"{name}-{path.name}" for name, path in CASES])
def test_corpus(name: str, path: object) -> None:
    load(name)(path.read_bytes())  # type: ignore[attr-defined]  # a Path


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize("name", HARNESSES)
def test_drawn_inputs(name: str, count: Count) -> None:
    examples = EXAMPLES.get(name, 100) * (20 if LONG else 1)
    harness = load(name)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(max_size=800))
    def run(data: bytes) -> None:
        harness(data)
        count.add(fuzz_inputs=1)

    run()


@pytest.mark.parametrize("name", HARNESSES)
def test_each_harness_has_a_corpus(name: str) -> None:
    assert entries(name), f"tests/fuzz/corpus/{name} is empty: python -m tests.fuzz {name} fills it"
