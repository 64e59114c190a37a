"""Engines as processes of a test, and what they are asked."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

from tests.client.conftest import NodeProcess
from tests.connectors.engine import VOCABULARY
from tests.envs import ENVIRONMENTS

BLOCK = 32
TOKENS = 200
WHOLE = TOKENS // BLOCK * BLOCK
BLOCKS = TOKENS // BLOCK
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 32 * 4
"""Two layers, two heads, K and V of 32 floats."""
PLENTY = {"probe_timeout_ms": 30_000, "load_timeout_ms": 30_000}
"""Settings with which a busy machine is no reason for a miss."""


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=TOKENS)


def rot(node: NodeProcess, volume: int, offset_bytes: int) -> None:
    """Change one bit of what lies there."""
    (path,) = node.data.rglob(f"volumes/{volume}.vol")
    with path.open("r+b") as file:
        file.seek(offset_bytes + 100)
        (byte,) = file.read(1)
        file.seek(offset_bytes + 100)
        file.write(bytes([byte ^ 1]))


class EngineProcess:
    """A vLLM engine whose connector is at a node."""

    module = "tests.connectors.engine"

    def __init__(
        self, node: NodeProcess, model: Path, log: Path, *, extra: dict[str, Any] | None = None, **arguments: Any
    ) -> None:
        env = ENVIRONMENTS["vllm"]
        config = json.dumps({"kv_transfer_config": self.transfer(node, extra or {}), **arguments})
        variables = {**env.variables(), "FOREBAY_TOKEN": node.token}
        if arguments.get("tensor_parallel_size", 1) > 1:
            # The engine goes on stepping by itself, which plans of several ranks need.
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        variables.pop("PYTHONHASHSEED", None)
        if (installed := self.installed(log.with_suffix(".installed"))) is not None:
            variables["PYTHONPATH"] += os.pathsep + str(installed)
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [env.python, "-m", self.module, model, config],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        try:
            assert self._answer() == {"ready": True}
        except BaseException:
            self.kill()
            raise

    def installed(self, folder: Path) -> Path | None:
        """A directory that is on the engine's path besides."""
        return None

    def transfer(self, node: NodeProcess, extra: dict[str, Any]) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config``."""
        return {
            "kv_connector": "ForebayConnector",
            "kv_connector_module_path": "forebay.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": node.url, "guard": False, **extra},
        }

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has ended:\n{self.log.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **request}), file=self.process.stdin, flush=True)
        return self._answer()

    def generate(self, *prompts: list[int], **request: Any) -> dict[str, Any]:
        answer = self.ask("generate", prompts=list(prompts), **request)
        assert set(answer["reasons"]) == {"length"}, "no request may end in an error"
        return answer

    def count(self, name: str) -> float:
        """One of the engine's metrics."""
        return float(self.ask("metrics").get(name, 0))

    def counted(self, name: str) -> float:
        """`count`, up to now: counts come with the engine's steps."""
        self.generate([1, 2, 3])
        return self.count(name)

    def end(self) -> None:
        self.process.communicate(timeout=120)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
