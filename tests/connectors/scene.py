"""A node and two engines of vLLM, and what must hold by whichever seam of vLLM's the blocks come.

Each engine is a process of its own with hash seeds of its own. The first starts while the node is away and computes
every prompt: those tokens are what all others are compared with. The second is the one that tests ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.client.conftest import NodeProcess, eventually, halted
from tests.connectors.process import BLOCK_BYTES, BLOCKS, WHOLE, EngineProcess

LONG_ANSWER = 100
SMALL = {"kv_cache_memory_bytes": 22 * BLOCK_BYTES, "max_model_len": 512, "max_num_batched_tokens": 128}
"""An engine with so little memory and so small steps preempts, and prefills in chunks."""


class Scene:
    """A node, what every prompt is answered with, and the second engine after the node was killed and restarted."""

    engines: ClassVar[type[EngineProcess]] = EngineProcess
    counters = "forebay_"
    """How the names of what is counted begin."""
    PROMPTS: ClassVar[Sequence[list[int]]]
    LONG: ClassVar[Sequence[list[int]]]
    SHARED: ClassVar[list[int]]
    """What is stored before the first engine ends."""

    def __init__(self, directory: Path, node: NodeProcess, first: dict[str, Any], second: dict[str, Any]) -> None:
        self.directory, self.node, self.log = directory, node, directory / "second.log"
        self.node.stop()
        log = directory / "first.log"
        engine = self.engines(self.node, directory / "model", log, **first)
        try:
            self._compute(engine)
            self.first_log = log.read_text()
            self.node.start()
            self.begin(engine)
            engine.end()
            self.node.kill()
            self.node.start()
            self.engine = self.engines(self.node, directory / "model", self.log, **second)
            eventually(lambda: self.engine.ask("connected")["both"], "the second engine's session", 60)
        except BaseException:
            engine.kill()
            self.node.stop()
            raise

    def _compute(self, first: EngineProcess) -> None:
        """Answers without storage."""
        computed = first.generate(*self.PROMPTS)
        self.long = first.generate(*self.LONG, max_tokens=LONG_ANSWER)["tokens"]
        self.first_cached = computed["cached"]
        self.answers: dict[tuple[int, ...], list[int]] = dict(
            zip(map(tuple, self.PROMPTS), computed["tokens"], strict=True)
        )

    def begin(self, first: EngineProcess) -> None:
        """The node has come: the first engine stores `SHARED`, and is then told that it computes in no time."""
        self.guarded = []
        for _ in range(3):
            first.ask("forget")
            answer = first.generate(self.SHARED)
            assert answer["tokens"] == [self.answer(self.SHARED)]
            self.guarded.append(answer["cached"][0])
        self.first_metrics = first.ask("metrics")

    def end(self) -> None:
        self.engine.end()
        self.node.stop()

    def answer(self, prompt: list[int]) -> list[int]:
        """What the first engine computed without storage."""
        return self.answers[tuple(prompt)]

    def again(self, prompt: list[int], **request: Any) -> int:
        """Generate with nothing in the engine's own caches: the same tokens, and how many came from the node."""
        assert self.engine.ask("forget") == {"dropped": True}
        answer = self.engine.generate(prompt, **request)
        assert answer["tokens"] == [self.answer(prompt)]
        (cached,) = answer["cached"]
        return int(cached)

    def blocks(self) -> dict[str, Any]:
        """What the namespace has, when everything has been stored."""
        self.engine.ask("settle")
        return self.engine.ask("blocks")

    def store(self, prompt: list[int], **request: Any) -> set[str]:
        """Generate, and wait until all blocks are stored; their keys."""
        before = self.blocks()
        assert self.again(prompt, **request) == 0
        new = self.blocks().keys() - before.keys()
        assert len(new) == BLOCKS
        return new

    def count(self, name: str) -> float:
        """One of the connector's counters, up to the last step."""
        return self.engine.count(self.counters + name)

    def unstored(self, reason: str) -> float:
        """Blocks that were not stored, up to now."""
        return self.engine.counted(f"{self.counters}unstored_blocks:{reason}")

    # --- what must hold -----------------------------------------------------------------------------------------------

    def starts_without_a_node(self) -> None:
        assert self.first_cached == [0] * len(self.first_cached)
        warnings = [line for line in self.first_log.splitlines() if "the engine goes on without it" in line]
        assert len(warnings) == 1 and "does not answer" in warnings[0], "one, and clear"

    def computes_what_comes_slower(self) -> None:
        assert self.guarded == [WHOLE, 0, 0], "the first load is one to learn from"
        counted = {name.removeprefix(self.counters): count for name, count in self.first_metrics.items()}
        assert counted["decisions:unknown"] == 1
        assert counted["decisions:slower"] == 2
        assert counted["lost_blocks:guard"] == 2 * BLOCKS

    def observes(self, prompt: list[int]) -> None:
        """Of a prompt that is stored: nothing is loaded, what it could have had is counted."""
        (self.directory / "mode").write_text("observe\n")
        eventually(lambda: self.again(prompt) == 0, "observing")
        hits = self.count("hit_blocks")
        assert self.again(prompt) == 0
        assert self.count("hit_blocks") == hits + BLOCKS

    def is_on_again(self, prompt: list[int]) -> None:
        (self.directory / "mode").unlink()
        eventually(lambda: self.again(prompt) == WHOLE, "on again")

    def keeps_salts_apart(self, prompt: list[int]) -> None:
        self.store(prompt)
        self.store(prompt, salt="of a tenant")
        assert self.again(prompt, salt="of another") == 0
        assert self.again(prompt, salt="of a tenant") == WHOLE

    def answers_the_same_when_preempted(self) -> None:
        for _ in range(2):  # the second time from what the first stored
            before = self.engine.count("num_preemptions")
            self.engine.ask("forget")
            answer = self.engine.generate(*self.LONG, max_tokens=LONG_ANSWER)
            assert answer["tokens"] == self.long
            assert self.engine.count("num_preemptions") > before
        assert WHOLE in answer["cached"]

    def computes_around_a_stopped_target(self, prompt: list[int]) -> None:
        self.store(prompt)
        with halted(self.node.target_pid):
            assert self.again(prompt) == 0
        assert self.count("lost_blocks:late") >= 1
        eventually(lambda: self.again(prompt) == WHOLE, "the target", 60)

    def computes_around_a_killed_node(self, prompt: list[int]) -> None:
        self.store(prompt)
        self.node.kill()
        for _ in range(5):
            assert self.again(prompt) == 0
        self.node.start()
        eventually(lambda: self.again(prompt) == WHOLE, "the node", 60)

    def stores_nothing_without_room(self, prompt: list[int]) -> None:
        with self.node.admin() as admin:
            admin.update_namespace("default/default", quota_bytes=4096, eviction="none")
            try:
                before = self.blocks()
                assert self.again(prompt) == 0
                eventually(lambda: self.unstored("quota_exceeded") > 0, "a refusal")
                assert self.blocks() == before
            finally:
                admin.update_namespace("default/default", quota_bytes=0, eviction="lru")
        self.store(prompt)
        assert self.again(prompt) == WHOLE

    def misses_by_a_raised_generation(self, prompt: list[int]) -> float:
        """How many are counted. Nothing that is stored is found any more, since it cannot be lowered."""
        self.store(prompt)
        assert self.again(prompt) == WHOLE
        stale = self.count("missed_blocks:stale_generation")
        with self.node.admin() as admin:
            admin.update_namespace("default/default", min_generation=1)
        assert self.again(prompt) == 0
        return self.count("missed_blocks:stale_generation") - stale
