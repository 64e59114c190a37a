"""The check of ways into a GPU's memory: rehearsed on host memory everywhere, made where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs import ENVIRONMENTS, ROOT

SMALL = ["--blocks", "3", "--repeats", "1", "--json"]


@pytest.mark.torch
def test_a_rehearsal_brings_the_right_bytes(tmp_path: Path) -> None:
    env = ENVIRONMENTS["torch"]
    command = [str(env.python), "-m", "perf.gpu_check", "--rehearse", "--disk", str(tmp_path), *SMALL]
    done = subprocess.run(command, env=env.variables(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["gpu.crc32c/copy", "gpu.tcp.staged/copy", "gpu.tcp.apart/copy"]
    assert all(row["device"].startswith("host memory") for row in rows)
    assert done.stderr.count("not run: ") == 3


@pytest.mark.torch
def test_without_a_gpu_it_says_so() -> None:
    env = ENVIRONMENTS["torch"]
    command = [str(env.python), "-m", "perf.gpu_check", *SMALL]
    environment = {**env.variables(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.mark.gpu
def test_every_way_that_is_there(tmp_path: Path) -> None:
    """With the Python that runs the tests, in which torch for CUDA has to be."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "perf.gpu_check", "--disk", str(tmp_path), *SMALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
