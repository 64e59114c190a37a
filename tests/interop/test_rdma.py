"""The NVMe/RDMA transport against the Linux kernel's target on Soft-RoCE: rdma_suite.py in one boot of the guest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.conftest import LONG
from tests.interop import checks, guest
from tests.interop.checks import Check

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

SUITE = Path(__file__).with_name("rdma_suite.py")
NQN = "nqn.2026-01.io.forebay:rdma"
ADDRESS = "10.0.2.15"
LIMIT_S = 500
BRIEF = "not TestLittleStaging and not 9437184 and not 5242881 and not (TestRegistered and (threads or malformed))"
"""What the short profile runs: emulation makes minutes of the rest."""


class Result(NamedTuple):
    """One test of the suite, in the guest."""

    name: str
    failure: str | None


class Run(NamedTuple):
    """What came of the guest."""

    checks: dict[str, Check]
    results: list[Result]


def _groups() -> list[str]:
    """The classes and functions of the suite that hold tests."""
    tree = ast.parse(SUITE.read_text())
    named = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in named if re.match(r"[Tt]est", name) and (LONG or name != "TestLittleStaging")]


def _results(path: Path) -> Iterator[Result]:
    for case in ElementTree.parse(path).iter("testcase"):
        bad = [element for kind in ("failure", "error", "skipped") for element in case.findall(kind)]
        group = case.get("classname", "").rpartition(".")[2]
        name = f"{group}::{case.get('name')}" if group.startswith("Test") else str(case.get("name"))
        yield Result(name, "\n".join(f"{element.get('message')}\n{element.text}" for element in bad) or None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    mounts = checks.mounts("ibverbs")
    share = tmp_path_factory.mktemp("rdma") / "share"
    keywords = "''" if LONG else f"'{BRIEF}'"
    settings = {"NQN": NQN, "ADDRESS": ADDRESS, "PORT": 4420, "KEYWORDS": keywords}
    settings |= {"CHECKS": "'device target suite'", "NETDEV": "eth0", "SUITE": SUITE.name}
    checks.prepare(share, "rdma.sh", settings)
    text = guest.boot(share, LIMIT_S, mounts=mounts, memory_mib=1024)
    print(text)  # shown if a test failed
    results = share / "results.xml"
    return Run(checks.read(text), list(_results(results)) if results.exists() else [])


def test_there_is_a_target(run: Run) -> None:
    checks.passed(run.checks, "device")
    checks.passed(run.checks, "target")


@pytest.mark.parametrize("group", _groups())
def test_suite(run: Run, group: str) -> None:
    results = [result for result in run.results if re.match(rf"{group}\b", result.name)]
    assert results, f"none of it ran: {run.checks.get('suite')}"
    failed = [result for result in results if result.failure is not None]
    assert not failed, "\n".join(f"{result.name}\n{result.failure}" for result in failed)


def test_the_suite_came_to_its_end(run: Run) -> None:
    checks.passed(run.checks, "suite")


def test_the_kernel_complains_of_nothing_of_its_own(run: Run) -> None:
    """Keys that are none make the target's device report errors, as they must."""
    trouble = re.findall(
        r"^.*(?:BUG|WARNING|Oops|Call Trace|refcount|hung task|blocked for).*$", run.checks["suite"].kernel, re.M
    )
    assert not trouble
