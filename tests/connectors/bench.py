"""A scheduler's half at a real node, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from forebay.client import Client, ClientOptions
from forebay.clock import SystemClock
from forebay.connectors.keys import STABLE_HASH, tiled
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.groups import CacheGroups
from forebay.connectors.vllm.messages import StepWork
from forebay.connectors.vllm.scheduler import SchedulerHalf
from forebay.connectors.vllm.settings import Settings
from forebay.ids import BlockKey
from forebay.schema import Group, HashAlgorithm, Schema
from tests.client.conftest import NodeProcess, eventually
from tests.connectors.fakes import BLOCK, PLAIN, Output, Request

GROUP = tiled(Group("full", (0, 1), BLOCK, 2, 64, "float32", "test"), max_ranks=2)


class Bench:
    """A half, and a schema of its own so that it finds only what its test stored."""

    def __init__(
        self,
        node: NodeProcess,
        name: str,
        *,
        ranks: int = 1,
        groups: CacheGroups = PLAIN,
        schema: tuple[Group, ...] = (GROUP,),
        **settings: Any,
    ) -> None:
        self.node = node
        self.schema = Schema("vllm", sha256(name.encode()).digest(), HashAlgorithm(STABLE_HASH, BLOCK), schema)
        self.counters = Counters()
        self.counts: dict[str, float] = {}
        config = {"url": node.url, "token_file": str(node.data / "admin.token"), "guard": False, **settings}
        config.setdefault("probe_timeout_ms", 30_000)
        self.half = SchedulerHalf(Settings.from_config(config), groups, ranks, self.counters, SystemClock())
        self.half.start(self.schema, ClientOptions(attempt_ms=20_000, connect_ms=20_000))

    def client(self) -> Client:
        return self.node.connect(schema=self.schema)

    def put(self, keys: list[bytes], group: int = 0) -> None:
        value = bytes(self.schema.groups[group].layout().value_bytes)
        with self.client() as client:
            named = [BlockKey(key, group) for key in keys]
            assert all(result.stored for result in client.put(named, [value] * len(keys)))

    def ask(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        """What the scheduler is told, as soon as it is told something."""
        answers: list[tuple[int | None, bool]] = []

        def answered() -> bool:
            answers.append(self.half.matched(request, computed))
            return answers[-1][0] is not None

        eventually(answered, "an answer")
        return answers[-1]

    def arrive(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        self.half.arrived(request)
        return self.ask(request, computed)

    def compute(self, request: Request, tokens: int) -> StepWork:
        """A step that computes ``tokens`` of a request."""
        work = self.half.step(Output({request.request_id: tokens}))
        request.num_computed_tokens += tokens
        return work

    def count(self, name: str) -> float:
        for counted, number in self.counters.take().items():
            self.counts[counted] = self.counts.get(counted, 0) + number
        return self.counts.get(name, 0)


Make = Callable[..., Bench]
