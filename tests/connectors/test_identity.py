"""Whatever changes the KV of a model, without being in the engine's block hashes, makes another keyspace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.envs import ENVIRONMENTS


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_what_is_done_to_the_weights_is_part_of_the_identity() -> None:
    env = ENVIRONMENTS["vllm"]
    command: list[str | Path] = [env.python, "-m", "tests.connectors.facts"]
    done = subprocess.run(command, env=env.variables(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert not [path for path, differs in seen["changed"].items() if not differs]
    assert not [path for path, alike in seen["same"].items() if not alike]
