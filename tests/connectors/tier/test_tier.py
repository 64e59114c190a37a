"""vLLM itself, with Forebay behind its host pool: the same tokens as without, whatever happens, and the hits due.

Copies between the KV cache and the pool are plain ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.client import Admin
from tests.client.conftest import NodeProcess, eventually, halted, stop
from tests.connectors.process import BLOCK_BYTES, BLOCKS, WHOLE, EngineProcess, prompt
from tests.connectors.scene import SMALL, Scene
from tests.connectors.tier.process import BY_MODULE, BY_NAME, TierProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

TIMEOUT_MS = 3_000
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class TierScene(Scene):
    """Engines with the node as a tier behind their host pools."""

    engines = TierProcess
    counters = "forebay_tier_"
    PROMPTS = SHARED, ROTTEN, SALTED, LATE, UNSAVED, AWAY, CUT, FULL, STALE = tuple(
        prompt(seed) for seed in range(20, 29)
    )
    LONG = tuple(prompt(seed) for seed in range(29, 32))
    HINTED = prompt(32)

    def __init__(self, directory: Path) -> None:
        instant = {**BY_MODULE, "prefill_tokens_per_s": 1 << 40}
        settings = {
            **BY_NAME,
            "probe_timeout_ms": 30_000,
            "load_timeout_ms": TIMEOUT_MS,
            "save_timeout_ms": TIMEOUT_MS,
            "mode_file": str(directory / "mode"),
            "enable_kv_events": True,
        }
        super().__init__(
            directory,
            NodeProcess(directory / "data"),
            {"extra": {"tier": instant}},
            {"extra": {"tier": settings}, **SMALL, **EVENTS},
        )

    def begin(self, first: EngineProcess) -> None:
        eventually(lambda: first.ask("connected")["both"], "the node", 60)
        assert first.ask("forget") == {"dropped": True}
        assert first.generate(self.SHARED)["tokens"] == [self.answer(self.SHARED)]
        first.ask("settle")
        assert len(first.ask("blocks")) == BLOCKS
        super().begin(first)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierScene]:
    scene = TierScene(tmp_path_factory.mktemp("tier"))
    yield scene
    scene.end()


def test_an_engine_starts_and_works_while_the_node_is_away(scene: TierScene) -> None:
    scene.starts_without_a_node()


def test_a_fresh_process_gets_exactly_what_another_stored(scene: TierScene) -> None:
    hits, loaded = scene.engine.count("external_prefix_cache_hits"), scene.count("loaded_blocks")
    assert scene.again(scene.SHARED) == WHOLE
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE
    assert scene.count("loaded_blocks") == loaded + BLOCKS
    assert scene.count("loaded_bytes") == scene.count("loaded_blocks") * BLOCK_BYTES


def test_what_comes_slower_than_it_is_computed_is_computed(scene: TierScene) -> None:
    """The first engine was told that it computes in no time."""
    scene.computes_what_comes_slower()


def test_what_is_not_supported_is_refused_at_start_in_words(scene: TierScene) -> None:
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


def test_what_is_stored_and_removed_is_told(scene: TierScene) -> None:
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


def test_hints_and_use_of_blocks_reach_the_node(scene: TierScene) -> None:
    before = scene.blocks()
    stored = scene.engine.ask("hinted", prompt=scene.HINTED, payload={"session": "of a router"})["hints"]
    assert stored and {hints["session"] for hints in stored} == {"of a router"}
    new = sorted(scene.blocks().keys() - before.keys())
    assert scene.engine.ask("touch", keys=[*new, "00" * 32])["reasons"] == ["ok"] * BLOCKS + ["absent"]


def test_bytes_that_were_overwritten_are_not_used(scene: TierScene) -> None:
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


def test_a_salt_keeps_blocks_apart(scene: TierScene) -> None:
    scene.keeps_salts_apart(scene.SALTED)


def test_requests_that_are_preempted_answer_the_same(scene: TierScene) -> None:
    scene.answers_the_same_when_preempted()


def test_the_mode_can_be_changed_while_the_engine_runs(scene: TierScene) -> None:
    scene.store(scene.SHARED)
    scene.observes(scene.SHARED)
    scene.is_on_again(scene.SHARED)


def test_a_target_that_stops_during_a_load_is_computed_around(scene: TierScene) -> None:
    scene.computes_around_a_stopped_target(scene.LATE)


def test_a_target_that_stops_during_a_save_holds_nobody(scene: TierScene) -> None:
    scene.engine.ask("forget")
    with halted(scene.node.target_pid):
        assert scene.again(scene.UNSAVED) == 0
        scene.engine.ask("settle")  # by the deadline of the save
    assert scene.unstored("deadline_exceeded") >= 1
    eventually(lambda: scene.again(scene.UNSAVED) == WHOLE, "the target", 60)


def test_a_node_that_is_killed_is_computed_around(scene: TierScene) -> None:
    scene.computes_around_a_killed_node(scene.AWAY)


def test_a_node_that_is_killed_during_a_load_is_computed_around(scene: TierScene) -> None:
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


def test_a_node_without_room_stores_nothing_and_disturbs_nobody(scene: TierScene) -> None:
    scene.stores_nothing_without_room(scene.FULL)


def test_a_generation_that_is_raised_ends_hits_at_once(scene: TierScene) -> None:
    """Last, since it cannot be lowered."""
    assert scene.misses_by_a_raised_generation(scene.STALE) >= BLOCKS
