"""The connector's halves move bytes between caches of any number of ranks, exactly, with a real node and no engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.client.conftest import NodeProcess
from tests.envs import ENVIRONMENTS


@pytest.mark.torch
def test_ranks_of_any_number_read_what_any_other_wrote(shared_node: NodeProcess) -> None:
    env = ENVIRONMENTS["torch"]
    command: list[str | Path] = [
        env.python,
        "-m",
        "tests.connectors.halves",
        shared_node.url,
        str(shared_node.target_pid),
    ]
    variables = {**env.variables(), "FOREBAY_TOKEN": shared_node.token}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        **{f"{wrote} to {read}": True for wrote in (1, 2, 4) for read in (1, 2, 4) if wrote != read},
        "missing": [3],
        "rest": True,
        "evicted": 2,
        "told together": [[], ["ended late"], ["ended late"]],
        "ended": 1,
        "stored at once": 5,
        "whole": [True] * 5,
        "no room": [5, 0],
        "unstored": 5,
        "left over": [0, 0],
        **{f"parts of {wrote} to {read} in a step": True for wrote in (1, 2) for read in (1, 2, 4)},
        "parts of 1 to 2": True,
        "parts of 2 to 1": True,
        "lost in a step": [3, 4],
        "kept in a step": True,
        "no room for parts": [5, 0],
        "unstored parts": [5, 0],
        "parts": True,
        "lost of parts": [3, 4],
        "kept of parts": True,
        "counted of parts": [1, 1],
        "reached": {"put": 1, "get_into": 1},
        "left registered": -2,
        "late": list(range(5)),
        "late left": 0,
        "late wrote": 0,
        "late in the cache": True,
        "after all": True,
    }
