"""The mode of the moment: from the settings, or from a file that an operator writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.clock import ManualClock
from forebay.connectors.vllm.modes import ModeSwitch


def mode(switch: ModeSwitch) -> str:
    return switch.now


def test_without_a_file_it_stays() -> None:
    assert ModeSwitch("observe", "", ManualClock()).now == "observe"


def test_a_file_takes_its_place_while_it_is_there(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "mode"
    switch = ModeSwitch("on", str(path), clock)
    assert mode(switch) == "on"
    path.write_text("off\n")
    assert mode(switch) == "on", "it looks once a second"
    clock.advance(1_000)
    assert mode(switch) == "off"
    path.unlink()
    clock.advance(1_000)
    assert mode(switch) == "on"


def test_what_is_no_mode_changes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = ManualClock(), tmp_path / "mode"
    path.write_text("observe")
    switch = ModeSwitch("on", str(path), clock)
    assert mode(switch) == "observe"
    caplog.clear()
    for content in (b"maybe", b"maybe", b"\xff"):
        path.write_bytes(content)
        clock.advance(1_000)
        assert mode(switch) == "observe"
    assert len(caplog.records) == 2
