"""The short size of `make soak`: both kinds of eras, every kind of check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.counting import Count
from tests.seeds import SEED
from tests.soak.content import LEAST_BYTES, problem, value_of, write_of
from tests.soak.run import Plan, Soak

PLAN = Plan(600.0, 3, 512 << 20) if LONG else Plan(6.0, 2, 384 << 20, era_s=2.0, fault_s=0.5)


@pytest.mark.timeout(3600 if LONG else 240)
def test_soak(tmp_path: Path, count: Count) -> None:
    soak = Soak(tmp_path, PLAN, SEED, lambda share, text: None)
    try:
        summary = soak.run()
    except BaseException as error:
        error.add_note(f"FOREBAY_SEED={SEED}")
        raise
    assert summary["blocks_verified"] > 20 and summary["fsck_runs"] >= 2, summary
    count.add(blocks_verified=summary["blocks_verified"], faults_injected=summary["faults_injected"])


def test_a_value_says_what_is_wrong_with_it() -> None:
    value = value_of(b"k", 7, 5000)
    assert problem(b"k", value) is None and write_of(value) == 7
    assert problem(b"other", value) == "another key's value"
    assert problem(b"k", value[:-1]) == "4999 bytes of 5000"
    assert "from byte 4000" in (problem(b"k", value[:4000] + value_of(b"k", 8, 5000)[4000:]) or "")
    assert "no value of ours" in (problem(b"k", bytes(5000)) or "")
    assert problem(b"k", value[: LEAST_BYTES - 1]) == f"{LEAST_BYTES - 1} bytes"
