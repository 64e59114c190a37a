"""The room that is kept for metadata: what the log says when it is gone, and when it is back."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.appliance.namespace.reserve import Reserve

MIB = 1 << 20


def test_a_lack_and_its_end_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve = Reserve(tmp_path, 16 * MIB)
    with caplog.at_level(logging.INFO, logger="forebay.appliance.namespace.reserve"):
        for free_mib in (500, 3, 2, 500, 500):
            found = SimpleNamespace(f_bavail=free_mib, f_blocks=1000, f_frsize=MIB)
            monkeypatch.setattr(os, "statvfs", lambda _, found=found: found)
            reserve.look()
            assert (reserve.problem is not None) is (free_mib < 16)
    short, back = caplog.messages
    assert "3 MiB free" in short and "space.metadata_reserve" in short and "500 MiB free again" in back
