"""vLLM itself, with its KV in Forebay: the same tokens as without, whatever happens, and exactly the hits due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import eventually, halted
from tests.connectors.liar import LyingNode
from tests.connectors.process import BLOCK, BLOCK_BYTES, BLOCKS, PLENTY, WHOLE, EngineProcess, prompt, rot
from tests.connectors.scene import SMALL, Scene

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LOAD_TIMEOUT_MS = 3_000
SAVE_TIMEOUT_MS = 10_000
LORA = {"enable_lora": True, "max_lora_rank": 8}


class ConnectorScene(Scene):
    """Engines whose connector is at the node, which can be made to lie."""

    STORED = SHARED, MIXED, SALTED, ROTTEN, LATE, GIVEN_UP, FULL, AWAY, FORGED, STALE = tuple(
        prompt(seed) for seed in range(10)
    )
    HURT = STOPPED, KILLED, GONE, DROPPED, CORRUPTED, WRONG, SLOW = tuple(prompt(seed) for seed in range(13, 20))
    SPLIT = prompt(21)
    PROMPTS = (*STORED, *HURT, SPLIT)
    LONG = tuple(prompt(seed) for seed in range(10, 13))
    TUNED = prompt(20)
    node: LyingNode

    def __init__(self, directory: Path) -> None:
        instant = {"guard": True, "prefill_tokens_per_s": 1 << 40}
        settings = {
            "load_timeout_ms": LOAD_TIMEOUT_MS,
            "save_timeout_ms": SAVE_TIMEOUT_MS,
            "probe_timeout_ms": 30_000,
            "mode_file": str(directory / "mode"),
        }
        super().__init__(
            directory,
            LyingNode(directory / "data", FOREBAY_SESSIONS_LEASE_TTL="5m"),  # what is given back ends before that
            {"extra": instant, **LORA},
            {"extra": settings, **SMALL, **LORA},
        )

    def begin(self, first: EngineProcess) -> None:
        # What it has computed it stores as soon as it can, since requests for it come by.

        def stored() -> bool:
            first.generate(self.SHARED)
            return first.count("forebay_stored_blocks") >= BLOCKS

        eventually(stored, "the node", 60)
        super().begin(first)
        self._tune(first)

    def _tune(self, first: EngineProcess) -> None:
        """What an adapter stored, which is then trained anew in its place."""
        self.adapter = str(self.directory / "adapter")
        first.ask("train", adapter=self.adapter, seed=1)
        before = first.count("forebay_stored_blocks")
        self.before_training = first.generate(self.TUNED, adapter=self.adapter)["tokens"]
        eventually(lambda: first.counted("forebay_stored_blocks") >= before + BLOCKS, "the adapter's blocks", 60)
        first.ask("train", adapter=self.adapter, seed=2)

    def again(self, prompt: list[int], **request: Any) -> int:
        before = self.engine.count("external_prefix_cache_hits")
        cached = super().again(prompt, **request)
        assert self.engine.count("external_prefix_cache_hits") - before >= cached
        return cached


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectorScene]:
    scene = ConnectorScene(tmp_path_factory.mktemp("vllm"))
    yield scene
    scene.end()


def test_an_engine_starts_and_works_while_the_node_is_away(scene: ConnectorScene) -> None:
    scene.starts_without_a_node()


def test_what_is_not_supported_is_refused_at_start_in_words(scene: ConnectorScene) -> None:
    said = scene.engine.ask("refusals")
    assert "--prefix-caching-hash-algo=sha256_cbor" in said.pop("prefix_caching_hash_algo")
    assert "0.99.1" in said["version"] and "untested_engine" in said.pop("version")
    assert "0.99.1" in said["import"] and "of_another_vllm" in said.pop("import")
    assert "--no-async-scheduling" in said.pop("async_scheduling")
    assert {name: "does not support" in text for name, text in said.items()} == {
        "enable_prefix_caching": True,
        "pipeline_parallel_size": True,
        "decode_context_parallel_size": True,
        "enable_dbo": True,
        "kv_role": True,
        "speculative_config": True,
    }


def test_a_fresh_process_gets_exactly_what_another_stored(scene: ConnectorScene) -> None:
    hits = scene.engine.count("external_prefix_cache_hits")
    loaded = scene.engine.count("forebay_loaded_blocks")
    assert scene.again(scene.SHARED) == WHOLE
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE
    assert scene.engine.count("forebay_loaded_blocks") == loaded + BLOCKS
    assert scene.engine.count("forebay_loaded_bytes") == scene.engine.count("forebay_loaded_blocks") * BLOCK_BYTES


def test_a_router_is_told_what_a_block_follows(scene: ConnectorScene) -> None:
    keys = scene.engine.ask("keys", prompt=scene.SHARED)["keys"][:BLOCKS]
    told = scene.engine.ask("described", keys=keys)
    assert [told[key]["parent"] for key in keys] == ["", *keys[:-1]]
    assert {told[key]["block_tokens"] for key in keys} == {BLOCK}


def test_a_request_bounds_what_is_loaded_for_it(scene: ConnectorScene) -> None:
    assert scene.again(scene.SHARED, extra={"max_load_tokens": 2 * BLOCK + 1}) == 2 * BLOCK
    assert scene.again(scene.SHARED, extra={"max_load_tokens": 0}) == 0


def test_what_several_requests_begin_with_is_loaded_once(scene: ConnectorScene) -> None:
    scene.engine.ask("forget")
    loaded, hits = scene.count("loaded_blocks"), scene.engine.count("external_prefix_cache_hits")
    answer = scene.engine.generate(*[scene.SHARED] * 3)
    assert answer["tokens"] == [scene.answer(scene.SHARED)] * 3 and answer["cached"] == [WHOLE] * 3
    assert scene.count("loaded_blocks") == loaded + BLOCKS
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE


def test_two_ranks_and_one_read_what_the_other_wrote(scene: ConnectorScene, tmp_path: Path) -> None:
    model, log = scene.directory / "model", tmp_path / "two.log"
    two = EngineProcess(scene.node, model, log, extra=PLENTY, tensor_parallel_size=2, max_model_len=512)
    try:
        answer = two.generate(scene.SHARED)
        assert answer["tokens"] == [scene.answer(scene.SHARED)] and answer["cached"] == [WHOLE]
        assert two.count("forebay_loaded_blocks") == 2 * BLOCKS, "each rank its tiles"

        def stored() -> bool:
            assert two.generate(scene.SPLIT)["tokens"] == [scene.answer(scene.SPLIT)]  # stored once both have joined
            return two.count("forebay_stored_blocks") >= 2 * BLOCKS

        eventually(stored, "all tiles", 60)
        two.end()
    finally:
        two.kill()
    assert scene.again(scene.SPLIT) == WHOLE


def test_a_reset_is_the_engines_and_leaves_what_is_stored(scene: ConnectorScene) -> None:
    for _ in range(2):
        assert scene.engine.ask("reset") == {"dropped": True}
        assert scene.again(scene.SHARED) == WHOLE
    assert scene.log.read_text().count("vLLM has reset its caches") == 1, "which may have been for other weights"


def test_it_asks_for_no_delivery_and_warns_where_a_failed_load_would_end_a_request(scene: ConnectorScene) -> None:
    said = scene.engine.ask("manners", policy="fail")
    assert len(said["warned"]) == 1 and "set it to 'recompute'" in said["warned"][0]
    assert scene.engine.ask("manners", policy="recompute") == {"warned": [], "delivery": False}


def test_what_comes_slower_than_it_is_computed_is_computed(scene: ConnectorScene) -> None:
    """The first engine was told that it computes in no time."""
    scene.computes_what_comes_slower()


def test_the_mode_can_be_changed_while_the_engine_runs(scene: ConnectorScene) -> None:
    assert scene.again(scene.SHARED) == WHOLE
    scene.observes(scene.SHARED)
    (scene.directory / "mode").write_text("off")

    def silent() -> bool:
        before = scene.engine.count("forebay_hit_blocks")
        assert scene.again(scene.SHARED) == 0
        return scene.engine.count("forebay_hit_blocks") == before

    eventually(silent, "off")
    scene.is_on_again(scene.SHARED)


def test_local_and_external_hits_add_up(scene: ConnectorScene) -> None:
    scene.store(scene.MIXED)
    scene.engine.ask("forget")
    hits = scene.engine.count("external_prefix_cache_hits")
    assert scene.engine.generate(scene.MIXED[: 2 * BLOCK + 5])["cached"] == [2 * BLOCK]
    assert scene.engine.count("external_prefix_cache_hits") == hits + 2 * BLOCK
    answer = scene.engine.generate(scene.MIXED)
    assert answer["tokens"] == [scene.answer(scene.MIXED)] and answer["cached"] == [WHOLE]
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE


def test_a_salt_keeps_blocks_apart(scene: ConnectorScene) -> None:
    scene.keeps_salts_apart(scene.SALTED)


def gives_back(scene: ConnectorScene) -> None:
    """Once loads have ended, in whatever way, no session holds a lease; by themselves they would end later."""
    with scene.node.admin() as admin:
        eventually(lambda: not any(session.leases for session in admin.list_sessions()), "leases given back", 60)


def test_requests_that_are_preempted_answer_the_same(scene: ConnectorScene) -> None:
    scene.answers_the_same_when_preempted()
    gives_back(scene)


def test_a_block_that_rotted_is_computed_and_stored_again(scene: ConnectorScene) -> None:
    keys = scene.store(scene.ROTTEN)
    rot(scene.node, *scene.engine.ask("blocks")[min(keys)])
    lost = scene.engine.count("forebay_lost_blocks:checksum_mismatch")
    scene.again(scene.ROTTEN)  # vLLM goes on to count what it planned to load as cached
    assert scene.engine.count("forebay_lost_blocks:checksum_mismatch") == lost + 1
    eventually(lambda: scene.again(scene.ROTTEN) == WHOLE, "whole again")


def test_a_target_that_stops_during_a_load_is_computed_around(scene: ConnectorScene) -> None:
    scene.computes_around_a_stopped_target(scene.LATE)


def test_a_request_that_is_given_up_during_its_load_leaves_nothing(scene: ConnectorScene) -> None:
    scene.store(scene.GIVEN_UP)
    scene.engine.ask("forget")
    with halted(scene.node.target_pid):
        for status in ("WAITING", "WAITING_FOR_REMOTE_KVS"):
            assert scene.engine.ask("abort", prompt=scene.GIVEN_UP, status=status) == {"status": [status]}
    gives_back(scene)
    eventually(lambda: scene.again(scene.GIVEN_UP) == WHOLE, "the target", 60)


def test_a_node_that_is_killed_is_computed_around(scene: ConnectorScene) -> None:
    scene.computes_around_a_killed_node(scene.AWAY)


def test_a_node_without_room_stores_nothing_and_disturbs_nobody(scene: ConnectorScene) -> None:
    scene.stores_nothing_without_room(scene.FULL)


def test_an_adapter_that_was_trained_anew_gets_nothing_of_the_old_one(scene: ConnectorScene) -> None:
    def tuned() -> tuple[int, list[list[int]]]:
        assert scene.engine.ask("forget") == {"dropped": True}
        answer = scene.engine.generate(scene.TUNED, adapter=scene.adapter)
        scene.engine.ask("settle")
        return answer["cached"][0], answer["tokens"]

    cached, computed = tuned()
    assert cached == 0 and computed != scene.before_training, "under one name and path, and so one hash of vLLM's"
    assert tuned() == (WHOLE, computed)
    plain = scene.engine.generate(scene.TUNED)
    assert plain["cached"] == [0] and plain["tokens"] not in (computed, scene.before_training)
    # Trained once more while the engine has it loaded: which of the two its blocks are of nobody can say.
    scene.engine.ask("train", adapter=scene.adapter, seed=3)
    scene.engine.ask("settle")
    before = len(scene.engine.ask("blocks"))
    assert tuned()[0] == 0 and tuned()[0] == 0
    assert len(scene.engine.ask("blocks")) == before
    assert "has changed" in scene.log.read_text()


def test_a_target_that_stops_during_a_save_holds_up_nothing(scene: ConnectorScene) -> None:
    target = scene.node.target_pid
    scene.node.lie("slow")
    try:
        with halted(target):
            assert scene.again(scene.STOPPED) == 0
            scene.engine.ask("settle")  # the save has ended, and the target has not answered
            eventually(lambda: scene.unstored("deadline_exceeded") > 0, "a save that was given up", 60)
    finally:
        scene.node.lie("")
    eventually(lambda: scene.again(scene.STOPPED) == WHOLE, "the target", 60)


@pytest.mark.parametrize("who", ["target", "node"])
def test_who_is_killed_during_a_save_is_computed_around(scene: ConnectorScene, who: str) -> None:
    wanted = scene.KILLED if who == "target" else scene.GONE
    scene.node.lie("slow")
    try:
        assert scene.again(wanted) == 0  # and the save is under way
        if who == "target":
            scene.node.kill_target()
        else:
            scene.node.kill()
    finally:
        scene.node.lie("")
    for _ in range(3):
        scene.again(wanted)
    if who == "node":
        scene.node.start()
    eventually(lambda: scene.again(wanted) == WHOLE, "the node", 60)


@pytest.mark.parametrize("lie", ["drop", "corrupt"])
def test_what_a_target_only_says_it_wrote_is_computed_and_stored_again(scene: ConnectorScene, lie: str) -> None:
    wanted = scene.DROPPED if lie == "drop" else scene.CORRUPTED
    scene.node.lie(lie)
    try:
        scene.store(wanted)
    finally:
        scene.node.lie("")
    lost = scene.engine.count("forebay_lost_blocks:checksum_mismatch")
    scene.again(wanted)
    assert scene.engine.count("forebay_lost_blocks:checksum_mismatch") > lost
    eventually(lambda: scene.again(wanted) == WHOLE, "whole again", 60)


def test_a_target_that_reads_slowly_or_wrong_changes_no_token(scene: ConnectorScene) -> None:
    scene.store(scene.WRONG)
    lost = scene.engine.count("forebay_lost_blocks:checksum_mismatch")
    scene.node.lie("wrong_reads")
    try:
        scene.again(scene.WRONG)
        assert scene.engine.count("forebay_lost_blocks:checksum_mismatch") > lost
    finally:
        scene.node.lie("")
    eventually(lambda: scene.again(scene.WRONG) == WHOLE, "the truth", 60)
    scene.node.lie("slow_reads")
    try:
        scene.again(scene.WRONG)  # as it comes: in time, or computed
    finally:
        scene.node.lie("")
    eventually(lambda: scene.again(scene.WRONG) == WHOLE, "in time", 60)


def test_a_target_that_writes_slowly_holds_up_nothing(scene: ConnectorScene) -> None:
    scene.node.lie("slow")
    try:
        for _ in range(3):
            scene.again(scene.SLOW)
        scene.engine.ask("settle")
    finally:
        scene.node.lie("")
    eventually(lambda: scene.again(scene.SLOW) == WHOLE, "what is quick", 60)


def test_what_is_loaded_is_what_is_used(scene: ConnectorScene) -> None:
    """Valid blocks of other bytes give other tokens: the tests above compare what came from the node."""
    scene.store(scene.FORGED)
    assert scene.engine.ask("forge")["stored"] > BLOCKS
    scene.engine.ask("forget")
    answer = scene.engine.generate(scene.FORGED)
    assert answer["cached"] == [WHOLE] and answer["tokens"] != [scene.answer(scene.FORGED)]


def test_a_generation_that_is_raised_ends_hits_at_once(scene: ConnectorScene) -> None:
    """Last, since it cannot be lowered."""
    assert scene.misses_by_a_raised_generation(scene.STALE) == BLOCKS
