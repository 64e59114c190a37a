"""The table of what was run is that of the recorded results, and names tests that there are."""

from __future__ import annotations

import json
import re

import pytest

from tests.connectors.matrix import FILE, PAGE, SCENARIOS, table

HERE = FILE.parents[1] / "connectors"


@pytest.mark.parametrize("test", sorted({test for tests in SCENARIOS.values() for test in tests}))
def test_there_is_such_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE)


def test_the_page_shows_what_is_recorded() -> None:
    versions = json.loads(FILE.read_text())
    assert table(versions) in PAGE.read_text(), "make it anew: python -m tests.connectors.matrix"
    for version, about in versions.items():
        assert set(about["outcomes"].values()) == {"passed"}, version
