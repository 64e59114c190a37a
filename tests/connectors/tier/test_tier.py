"""vLLM itself, with Forebay behind its host pool: the same tokens as without, whatever happens, and the hits due.

Two engines, each a process of its own with hash seeds of its own. The first starts while the node is away and computes
every prompt of this module: those tokens are what all others are compared with. The second has a small KV cache and
small steps, so that it preempts and prefills in chunks. Copies between the KV cache and the pool are plain ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.client import Admin
from tests.client.conftest import NodeProcess, eventually, halted, stop
from tests.connectors.process import BLOCK_BYTES, BLOCKS, WHOLE, prompt
from tests.connectors.tier.process import BY_MODULE, BY_NAME, TierProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LONG_ANSWER = 100
TIMEOUT_MS = 3_000
SMALL = {"kv_cache_memory_bytes": 22 * BLOCK_BYTES, "max_model_len": 512, "max_num_batched_tokens": 128}
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class Scene:
    """A node, what every prompt is answered with, and the second engine after the node was killed and restarted."""

    SHARED, ROTTEN, SALTED, LATE, UNSAVED, AWAY, CUT, FULL, STALE = (prompt(seed) for seed in range(20, 29))
    LONG = tuple(prompt(seed) for seed in range(29, 32))
    HINTED = prompt(32)

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        self.node = NodeProcess(directory / "data")
        self.node.stop()
        instant = {**BY_MODULE, "prefill_tokens_per_s": 1 << 40}
        first = TierProcess(self.node, self.model, directory / "first.log", extra={"tier": instant})
        try:
            self._compute(first, directory / "first.log")
            first.end()
            self.node.kill()
            self.node.start()
            self.mode_file = directory / "mode"
            settings = {
                **BY_NAME,
                "probe_timeout_ms": 30_000,
                "load_timeout_ms": TIMEOUT_MS,
                "save_timeout_ms": TIMEOUT_MS,
                "mode_file": str(self.mode_file),
                "enable_kv_events": True,
            }
            log = directory / "second.log"
            self.engine = TierProcess(self.node, self.model, log, extra={"tier": settings}, **SMALL, **EVENTS)
            eventually(lambda: self.engine.ask("connected")["both"], "the second engine's session", 60)
        except BaseException:
            first.kill()
            self.node.stop()
            raise

    def _compute(self, first: TierProcess, log: Path) -> None:
        """Answers without storage; then the node comes, and what is computed is stored."""
        everything = [
            self.SHARED,
            self.ROTTEN,
            self.SALTED,
            self.LATE,
            self.UNSAVED,
            self.AWAY,
            self.CUT,
            self.FULL,
            self.STALE,
        ]
        computed = first.generate(*everything)
        self.long = first.generate(*self.LONG, max_tokens=LONG_ANSWER)["tokens"]
        self.first_cached = computed["cached"]
        self.answers: dict[tuple[int, ...], list[int]] = dict(
            zip(map(tuple, everything), computed["tokens"], strict=True)
        )
        self.first_log = log.read_text()
        self.node.start()
        eventually(lambda: first.ask("connected")["both"], "the node", 60)
        assert first.ask("forget") == {"dropped": True}
        assert first.generate(self.SHARED)["tokens"] == [self.answer(self.SHARED)]
        first.ask("settle")
        assert len(first.ask("blocks")) == BLOCKS
        self.guarded = []
        for _ in range(3):
            first.ask("forget")
            answer = first.generate(self.SHARED)
            assert answer["tokens"] == [self.answer(self.SHARED)]
            self.guarded.append(answer["cached"][0])
        self.first_metrics = first.ask("metrics")

    def answer(self, prompt: list[int]) -> list[int]:
        """What the first engine computed without storage."""
        return self.answers[tuple(prompt)]

    def again(self, prompt: list[int], **request: object) -> int:
        """Generate with nothing in the engine and its pool: the same tokens, and how many came from the node."""
        assert self.engine.ask("forget") == {"dropped": True}
        answer = self.engine.generate(prompt, **request)
        assert answer["tokens"] == [self.answer(prompt)]
        (cached,) = answer["cached"]
        return int(cached)

    def blocks(self) -> dict[str, Any]:
        """What the namespace has, when everything has been stored."""
        self.engine.ask("settle")
        return self.engine.ask("blocks")

    def store(self, prompt: list[int], **request: object) -> set[str]:
        """Generate, and wait until all blocks are stored; their keys."""
        before = self.blocks()
        assert self.again(prompt, **request) == 0
        new = self.blocks().keys() - before.keys()
        assert len(new) == BLOCKS
        return new

    def count(self, name: str) -> float:
        """One of the tier's counters, up to the last step."""
        return self.engine.count(f"forebay_tier_{name}")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("tier"))
    yield scene
    scene.engine.end()
    scene.node.stop()


def test_an_engine_starts_and_works_while_the_node_is_away(scene: Scene) -> None:
    assert scene.first_cached == [0] * len(scene.first_cached)
    warnings = [line for line in scene.first_log.splitlines() if "the engine goes on without it" in line]
    assert len(warnings) == 1 and "does not answer" in warnings[0], "one, and clear"


def test_a_fresh_process_gets_exactly_what_another_stored(scene: Scene) -> None:
    hits, loaded = scene.engine.count("external_prefix_cache_hits"), scene.count("loaded_blocks")
    assert scene.again(scene.SHARED) == WHOLE
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE
    assert scene.count("loaded_blocks") == loaded + BLOCKS
    assert scene.count("loaded_bytes") == scene.count("loaded_blocks") * BLOCK_BYTES


def test_what_comes_slower_than_it_is_computed_is_computed(scene: Scene) -> None:
    """The first engine was told that it computes in no time."""
    assert scene.guarded == [WHOLE, 0, 0], "the first load is one to learn from"
    assert scene.first_metrics["forebay_tier_decisions:unknown"] == 1
    assert scene.first_metrics["forebay_tier_decisions:slower"] == 2
    assert scene.first_metrics["forebay_tier_lost_blocks:guard"] == 2 * BLOCKS


def test_what_is_not_supported_is_refused_at_start_in_words(scene: Scene) -> None:
    said = scene.engine.ask("refusals")
    assert "--prefix-caching-hash-algo=sha256_cbor" in said.pop("prefix_caching_hash_algo")
    assert "ForebayConnector" in said["lora_config"]
    assert "was not made by a connector" in said.pop("outside")
    assert {name: "does not support" in text for name, text in said.items()} == {
        "lora_config": True,
        "speculative_config": True,
        "enable_prompt_embeds": True,
        "kv_role": True,
        "packed": True,
        "world_size": True,
    }


def test_what_is_stored_and_removed_is_told(scene: Scene) -> None:
    scene.engine.ask("events")
    keys = scene.store(scene.ROTTEN)
    offload_keys = {key + "00000000" for key in keys}
    told = scene.engine.ask("events")["told"]
    assert {key for _, _, key in told} == offload_keys
    assert {(removed, medium) for removed, medium, _ in told} == {(False, "STORAGE")}
    removed: list[list[object]] = []

    def all_gone() -> bool:
        removed.extend(scene.engine.ask("events")["told"])
        return len(removed) >= len(keys)

    scene.engine.ask("delete")
    eventually(all_gone, "the removals", 60)
    assert {key for gone, _, key in removed if gone} == offload_keys, "and nothing that was never told"


def test_hints_and_use_of_blocks_reach_the_node(scene: Scene) -> None:
    before = scene.blocks()
    stored = scene.engine.ask("hinted", prompt=scene.HINTED, payload={"session": "of a router"})["hints"]
    assert stored and {hints["session"] for hints in stored} == {"of a router"}
    new = sorted(scene.blocks().keys() - before.keys())
    assert scene.engine.ask("touch", keys=[*new, "00" * 32])["reasons"] == ["ok"] * BLOCKS + ["absent"]


def test_bytes_that_were_overwritten_are_not_used(scene: Scene) -> None:
    """With checks off they are, and give other tokens: so it is these bytes that answers come from."""
    keys = scene.store(scene.ROTTEN)
    places = scene.blocks()
    for key in keys:
        volume, offset_bytes = places[key]
        (path,) = scene.node.data.rglob(f"volumes/{volume}.vol")
        with path.open("r+b") as file:
            file.seek(offset_bytes)
            file.write(b"\x11\x3e" * (BLOCK_BYTES // 2))
    scene.engine.ask("believe", checks=False)
    scene.engine.ask("forget")
    answer = scene.engine.generate(scene.ROTTEN)
    assert answer["cached"] == [WHOLE] and answer["tokens"] != [scene.answer(scene.ROTTEN)]
    scene.engine.ask("believe", checks=True)
    lost = scene.count("lost_blocks:checksum_mismatch")
    assert scene.again(scene.ROTTEN) == 0
    assert scene.count("lost_blocks:checksum_mismatch") == lost + BLOCKS
    eventually(lambda: scene.again(scene.ROTTEN) == WHOLE, "whole again", 60)


def test_a_salt_keeps_blocks_apart(scene: Scene) -> None:
    scene.store(scene.SALTED)
    scene.store(scene.SALTED, salt="of a tenant")
    assert scene.again(scene.SALTED, salt="of another") == 0
    assert scene.again(scene.SALTED, salt="of a tenant") == WHOLE


def test_requests_that_are_preempted_answer_the_same(scene: Scene) -> None:
    for _ in range(2):  # the second time from what the first stored
        before = scene.engine.count("num_preemptions")
        scene.engine.ask("forget")
        answer = scene.engine.generate(*scene.LONG, max_tokens=LONG_ANSWER)
        assert answer["tokens"] == scene.long
        assert scene.engine.count("num_preemptions") > before
    assert WHOLE in answer["cached"]


def test_the_mode_can_be_changed_while_the_engine_runs(scene: Scene) -> None:
    scene.store(scene.SHARED)
    scene.mode_file.write_text("observe\n")
    eventually(lambda: scene.again(scene.SHARED) == 0, "observing")
    hits = scene.count("hit_blocks")
    assert scene.again(scene.SHARED) == 0
    assert scene.count("hit_blocks") == hits + BLOCKS, "it still counts what it could have had"
    scene.mode_file.unlink()
    eventually(lambda: scene.again(scene.SHARED) == WHOLE, "on again")


def test_a_target_that_stops_during_a_load_is_computed_around(scene: Scene) -> None:
    scene.store(scene.LATE)
    target = scene.node.target_pid
    with halted(target):
        assert scene.again(scene.LATE) == 0
    assert scene.count("lost_blocks:late") >= 1
    eventually(lambda: scene.again(scene.LATE) == WHOLE, "the target", 60)


def test_a_target_that_stops_during_a_save_holds_nobody(scene: Scene) -> None:
    scene.engine.ask("forget")
    target = scene.node.target_pid
    with halted(target):
        assert scene.again(scene.UNSAVED) == 0
        scene.engine.ask("settle")  # by the deadline of the save
    scene.engine.generate([1, 2, 3])  # counts come with the engine's steps
    assert scene.count("unstored_blocks:deadline_exceeded") >= 1
    eventually(lambda: scene.again(scene.UNSAVED) == WHOLE, "the target", 60)


def test_a_node_that_is_killed_is_computed_around(scene: Scene) -> None:
    scene.store(scene.AWAY)
    scene.node.kill()
    for _ in range(5):
        assert scene.again(scene.AWAY) == 0
    scene.node.start()
    eventually(lambda: scene.again(scene.AWAY) == WHOLE, "the node", 60)


def test_a_node_that_is_killed_during_a_load_is_computed_around(scene: Scene) -> None:
    scene.store(scene.CUT)
    scene.engine.ask("forget")
    target = scene.node.target_pid
    with ThreadPoolExecutor(1) as asking, Admin(scene.node.url, token=scene.node.token) as admin:

        def leases() -> int:
            return sum(session.leases for session in admin.list_sessions())

        eventually(lambda: not leases(), "the end of other loads", 60)
        stop(target)
        answer = asking.submit(scene.engine.generate, scene.CUT)
        eventually(leases, "the load", 60)
        scene.node.process.kill()
        scene.node.process.wait()
        os.kill(target, signal.SIGKILL)
        assert answer.result(60)["tokens"] == [scene.answer(scene.CUT)]
    scene.node.start()
    eventually(lambda: scene.again(scene.CUT) == WHOLE, "the node", 60)


def test_a_node_without_room_stores_nothing_and_disturbs_nobody(scene: Scene) -> None:
    with Admin(scene.node.url, token=scene.node.token) as admin:
        admin.update_namespace("default/default", quota_bytes=4096, eviction="none")
        try:
            before = scene.blocks()
            assert scene.again(scene.FULL) == 0
            assert scene.blocks() == before
            scene.engine.generate([1, 2, 3])
            assert scene.count("unstored_blocks:quota_exceeded") >= 1
        finally:
            admin.update_namespace("default/default", quota_bytes=0, eviction="lru")
    scene.store(scene.FULL)
    assert scene.again(scene.FULL) == WHOLE


def test_a_generation_that_is_raised_ends_hits_at_once(scene: Scene) -> None:
    """Last, since it cannot be lowered."""
    scene.store(scene.STALE)
    assert scene.again(scene.STALE) == WHOLE
    stale = scene.count("missed_blocks:stale_generation")
    with Admin(scene.node.url, token=scene.node.token) as admin:
        admin.update_namespace("default/default", min_generation=1)
    assert scene.again(scene.STALE) == 0
    assert scene.count("missed_blocks:stale_generation") >= stale + BLOCKS
