"""A shim is compiled once, by what it is made from, and what the compiler refuses is said."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.shims.building import ShimNotBuilt, build

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))


def test_a_library_is_made_once_and_anew_when_its_source_changes(tmp_path: Path) -> None:
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 41; }\n")
    first = build(source)
    assert build(source) == first
    source.write_text('#include "more.h"\nint answer(void) { return 41 + MORE; }\n')
    (tmp_path / "more.h").write_text("#define MORE 1\n")
    second = build(source)
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 42
    (tmp_path / "more.h").write_text("#define MORE 2\n")
    assert ctypes.CDLL(str(build(source))).answer() == 43
    assert [p.suffix for p in second.parent.iterdir()] == [".so"] * 3


def test_what_the_compiler_refuses_is_said(tmp_path: Path) -> None:
    source = tmp_path / "wrong.c"
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(ShimNotBuilt, match="nothing"):
        build(source)
