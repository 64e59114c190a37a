"""Profiles of the property tests, what each marker needs, and the list of what was not run."""

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import targets
from tests.connectors import matrix
from tests.counting import PROPERTY, Count, save
from tests.envs import ENVIRONMENTS
from tests.interop import guest
from tests.shims import building

LONG = os.environ.get("FOREBAY_TEST_PROFILE") == "long"
targets.use()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it starts in the background ignore interrupts, and so would every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines measure the machine, not the code: a busy one must not fail a property.
settings.register_profile("default", max_examples=50, deadline=None)
settings.register_profile("long", max_examples=2_000, deadline=None)
settings.load_profile("long" if LONG else "default")


def _missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None."""
    if marker == "spdk" and not os.environ.get("FOREBAY_SPDK_TGT"):
        return "SPDK's target is not here: set FOREBAY_SPDK_TGT to the path of nvmf_tgt"
    if marker == "fencing" and not targets.able().fencing:
        return "the target of this run does not refuse writes outside grants"
    if marker == "seal" and not targets.able().seal:
        return "the target of this run does not revoke and flush in one call"
    if marker == "embedded" and targets.KIND != "embedded":
        return "about Forebay's own target, and this run has another"
    if marker == "gpu" and not os.path.exists("/dev/nvidiactl"):
        return "no CUDA device"
    if marker == "long" and not LONG:
        return "large profile: make test-long"
    if marker == "interop":
        return guest.missing()
    if marker == "compiler":
        return building.missing()
    return ENVIRONMENTS[marker].missing if marker in ENVIRONMENTS else None


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    """The root logger without handlers, for what sets up the log of its process; put back after the test."""
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    root.handlers.clear()
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = kept
    root.setLevel(level)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skip what this machine or this profile cannot run."""
    for item in items:
        for marker in ("spdk", "fencing", "seal", "embedded", "gpu", "long", "interop", "compiler", *ENVIRONMENTS):
            if item.get_closest_marker(marker) and (reason := _missing(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Count:
    """Numbers that the run's end shows."""
    return Count(request.node.user_properties)


def _counted(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    numbers: Counter[str] = Counter()
    for report in reports:
        for name, number in report.user_properties if report.when == "call" else ():
            if name.startswith(f"{PROPERTY}.") and isinstance(number, int):
                numbers[name.removeprefix(f"{PROPERTY}.")] += number
    return numbers


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not run and why: one line a reason."""
    if where := os.environ.get("FOREBAY_VLLM_RESULTS"):
        ended = [report for word in ("passed", "failed", "error") for report in terminalreporter.stats.get(word, [])]
        outcomes = [(report.nodeid, report.outcome) for report in ended if "vllm" in report.keywords]
        matrix.record(Path(where), outcomes, "long" if LONG else "default")
    if numbers := _counted(terminalreporter.stats.get("passed", [])):
        terminalreporter.section("faults survived")
        for name, number in sorted(numbers.items()):
            terminalreporter.line(f"{number:>10,} {name.replace('_', ' ')}")
        if where := os.environ.get("FOREBAY_TEST_RESULTS"):
            save(Path(where), numbers, "long" if LONG else "default")
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        where = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[where.removeprefix("Skipped: ")] += 1
    terminalreporter.section("not run, and why")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count} x {reason}")
    if not reasons:
        terminalreporter.line("nothing was left out of the tests")
    if not LONG:
        terminalreporter.line("large profiles of the property tests: make test-long")
    if not os.environ.get("FOREBAY_SPDK_TGT"):
        terminalreporter.line("nothing was run against SPDK's target: FOREBAY_SPDK_TGT is not set")
