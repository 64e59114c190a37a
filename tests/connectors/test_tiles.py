"""Copies between KV caches and tiles are exact to the byte, whatever the layout of memory and the number of ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.envs import ENVIRONMENTS


@pytest.mark.torch
def test_every_layout_and_every_split() -> None:
    env = ENVIRONMENTS["torch"]
    command: list[str | Path] = [env.python, "-m", "tests.connectors.tiles"]
    done = subprocess.run(command, env=env.variables(), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
