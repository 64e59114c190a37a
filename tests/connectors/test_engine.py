"""vLLM itself, with its KV in Forebay: the same tokens as without, whatever happens, and exactly the hits due.

Two engines, each a process of its own with hash seeds of its own. The first starts while the node is away and computes
every prompt of this module: those tokens are what all others are compared with. The second has a small KV cache and
small steps, so that it preempts and prefills in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.client import Admin
from tests.client.conftest import eventually, halted
from tests.connectors.liar import LyingNode
from tests.connectors.process import BLOCK, BLOCK_BYTES, BLOCKS, WHOLE, EngineProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LONG_ANSWER = 100
LOAD_TIMEOUT_MS = 3_000
SAVE_TIMEOUT_MS = 10_000
LORA = {"enable_lora": True, "max_lora_rank": 8}
SMALL = {"kv_cache_memory_bytes": 22 * BLOCK_BYTES, "max_model_len": 512, "max_num_batched_tokens": 128}


class Scene:
    """A node, what every prompt is answered with, and the second engine after the node was killed and restarted."""

    SHARED, MIXED, SALTED, ROTTEN, LATE, GIVEN_UP, FULL, AWAY, FORGED, STALE = (prompt(seed) for seed in range(10))
    LONG = tuple(prompt(seed) for seed in range(10, 13))
    STOPPED, KILLED, GONE, DROPPED, CORRUPTED, WRONG, SLOW = (prompt(seed) for seed in range(13, 20))
    TUNED = prompt(20)

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        self.node = LyingNode(directory / "data")
        self.node.stop()
        instant = {"guard": True, "prefill_tokens_per_s": 1 << 40}
        first = EngineProcess(self.node, self.model, directory / "first.log", extra=instant, **LORA)
        try:
            self._compute(first, directory / "first.log")
            first.end()
            self.node.kill()
            self.node.start()
            self.mode_file = directory / "mode"
            settings = {
                "load_timeout_ms": LOAD_TIMEOUT_MS,
                "save_timeout_ms": SAVE_TIMEOUT_MS,
                "probe_timeout_ms": 30_000,
                "mode_file": str(self.mode_file),
            }
            self.log = directory / "second.log"
            self.engine = EngineProcess(self.node, self.model, self.log, extra=settings, **SMALL, **LORA)
            eventually(lambda: self.engine.ask("connected")["both"], "the second engine's session", 60)
        except BaseException:
            first.kill()
            self.node.stop()
            raise

    def _compute(self, first: EngineProcess, log: Path) -> None:
        """Answers without storage; then the node comes, and what has been computed is stored."""
        everything = [
            self.SHARED,
            self.MIXED,
            self.SALTED,
            self.ROTTEN,
            self.LATE,
            self.GIVEN_UP,
            self.FULL,
            self.AWAY,
            self.FORGED,
            self.STALE,
            self.STOPPED,
            self.KILLED,
            self.GONE,
            self.DROPPED,
            self.CORRUPTED,
            self.WRONG,
            self.SLOW,
        ]
        computed = first.generate(*everything)
        self.long = first.generate(*self.LONG, max_tokens=LONG_ANSWER)["tokens"]
        self.first_cached = computed["cached"]
        self.answers: dict[tuple[int, ...], list[int]] = {
            tuple(p): tokens for p, tokens in zip(everything, computed["tokens"], strict=True)
        }
        self.first_log = log.read_text()
        self.node.start()
        # What it has computed it stores as soon as it can, since requests for it come by.

        def stored() -> bool:
            first.generate(self.SHARED)
            return first.count("forebay_stored_blocks") >= BLOCKS

        eventually(stored, "the node", 60)
        self.guarded = []
        for _ in range(3):
            first.ask("forget")
            answer = first.generate(self.SHARED)
            assert answer["tokens"] == [self.answer(self.SHARED)]
            self.guarded.append(answer["cached"][0])
        self.first_metrics = first.ask("metrics")
        self._tune(first)

    def _tune(self, first: EngineProcess) -> None:
        """What an adapter stored, which is then trained anew in its place."""
        self.adapter = str(self.model.parent / "adapter")
        first.ask("train", adapter=self.adapter, seed=1)
        before = first.count("forebay_stored_blocks")
        self.before_training = first.generate(self.TUNED, adapter=self.adapter)["tokens"]

        def stored() -> bool:
            first.generate([1, 2, 3])  # counts come with the engine's steps
            return first.count("forebay_stored_blocks") >= before + BLOCKS

        eventually(stored, "the adapter's blocks", 60)
        first.ask("train", adapter=self.adapter, seed=2)

    def answer(self, prompt: list[int]) -> list[int]:
        """What the first engine computed without storage."""
        return self.answers[tuple(prompt)]

    def again(self, prompt: list[int], **request: Any) -> int:
        """Generate with nothing in the engine's own cache: the same tokens, and how many came from the node."""
        assert self.engine.ask("forget") == {"dropped": True}
        before = self.engine.count("external_prefix_cache_hits")
        answer = self.engine.generate(prompt, **request)
        assert answer["tokens"] == [self.answer(prompt)]
        (cached,) = answer["cached"]
        assert self.engine.count("external_prefix_cache_hits") - before >= cached
        return int(cached)

    def store(self, prompt: list[int], **request: Any) -> None:
        """Generate, and wait until all blocks are stored."""
        self.engine.ask("settle")
        before = len(self.engine.ask("blocks"))
        assert self.again(prompt, **request) == 0
        self.engine.ask("settle")
        assert len(self.engine.ask("blocks")) == before + BLOCKS


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("vllm"))
    yield scene
    scene.engine.end()
    scene.node.stop()


def test_an_engine_starts_and_works_while_the_node_is_away(scene: Scene) -> None:
    assert scene.first_cached == [0] * len(scene.first_cached)
    warnings = [line for line in scene.first_log.splitlines() if "the engine goes on without it" in line]
    assert len(warnings) == 1 and "does not answer" in warnings[0], "one, and clear"


def test_what_is_not_supported_is_refused_at_start_in_words(scene: Scene) -> None:
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


def test_a_fresh_process_gets_exactly_what_another_stored(scene: Scene) -> None:
    hits = scene.engine.count("external_prefix_cache_hits")
    loaded = scene.engine.count("forebay_loaded_blocks")
    assert scene.again(scene.SHARED) == WHOLE
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE
    assert scene.engine.count("forebay_loaded_blocks") == loaded + BLOCKS
    assert scene.engine.count("forebay_loaded_bytes") == scene.engine.count("forebay_loaded_blocks") * BLOCK_BYTES


def test_a_router_is_told_what_a_block_follows(scene: Scene) -> None:
    keys = scene.engine.ask("keys", prompt=scene.SHARED)["keys"][:BLOCKS]
    told = scene.engine.ask("described", keys=keys)
    assert [told[key]["parent"] for key in keys] == ["", *keys[:-1]]
    assert {told[key]["block_tokens"] for key in keys} == {BLOCK}


def test_a_request_bounds_what_is_loaded_for_it(scene: Scene) -> None:
    assert scene.again(scene.SHARED, extra={"max_load_tokens": 2 * BLOCK + 1}) == 2 * BLOCK
    assert scene.again(scene.SHARED, extra={"max_load_tokens": 0}) == 0


def test_what_comes_slower_than_it_is_computed_is_computed(scene: Scene) -> None:
    """The first engine was told that it computes in no time."""
    assert scene.guarded == [WHOLE, 0, 0], "the first load is one to learn from"
    assert scene.first_metrics["forebay_decisions:unknown"] == 1
    assert scene.first_metrics["forebay_decisions:slower"] == 2
    assert scene.first_metrics["forebay_lost_blocks:guard"] == 2 * BLOCKS


def test_the_mode_can_be_changed_while_the_engine_runs(scene: Scene) -> None:
    assert scene.again(scene.SHARED) == WHOLE
    scene.mode_file.write_text("observe\n")
    eventually(lambda: scene.again(scene.SHARED) == 0, "observing")
    hits = scene.engine.count("forebay_hit_blocks")
    assert scene.again(scene.SHARED) == 0
    assert scene.engine.count("forebay_hit_blocks") == hits + BLOCKS, "it still counts what it could have had"
    scene.mode_file.write_text("off")

    def silent() -> bool:
        before = scene.engine.count("forebay_hit_blocks")
        assert scene.again(scene.SHARED) == 0
        return scene.engine.count("forebay_hit_blocks") == before

    eventually(silent, "off")
    scene.mode_file.unlink()
    eventually(lambda: scene.again(scene.SHARED) == WHOLE, "on again")


def test_local_and_external_hits_add_up(scene: Scene) -> None:
    scene.store(scene.MIXED)
    scene.engine.ask("forget")
    hits = scene.engine.count("external_prefix_cache_hits")
    assert scene.engine.generate(scene.MIXED[: 2 * BLOCK + 5])["cached"] == [2 * BLOCK]
    assert scene.engine.count("external_prefix_cache_hits") == hits + 2 * BLOCK
    answer = scene.engine.generate(scene.MIXED)
    assert answer["tokens"] == [scene.answer(scene.MIXED)] and answer["cached"] == [WHOLE]
    assert scene.engine.count("external_prefix_cache_hits") == hits + WHOLE


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


def test_a_block_that_rotted_is_computed_and_stored_again(scene: Scene) -> None:
    scene.engine.ask("settle")
    old = scene.engine.ask("blocks")
    scene.store(scene.ROTTEN)
    (volume, offset_bytes), *_ = [place for key, place in scene.engine.ask("blocks").items() if key not in old]
    (path,) = scene.node.data.rglob(f"volumes/{volume}.vol")
    with path.open("r+b") as file:
        file.seek(offset_bytes + 100)
        (byte,) = file.read(1)
        file.seek(offset_bytes + 100)
        file.write(bytes([byte ^ 1]))
    lost = scene.engine.count("forebay_lost_blocks:checksum_mismatch")
    scene.again(scene.ROTTEN)  # vLLM goes on to count what it planned to load as cached
    assert scene.engine.count("forebay_lost_blocks:checksum_mismatch") == lost + 1
    eventually(lambda: scene.again(scene.ROTTEN) == WHOLE, "whole again")


def test_a_target_that_stops_during_a_load_is_computed_around(scene: Scene) -> None:
    scene.store(scene.LATE)
    target = scene.node.target_pid
    with halted(target):
        assert scene.again(scene.LATE) == 0
    assert scene.engine.count("forebay_lost_blocks:late") >= 1
    eventually(lambda: scene.again(scene.LATE) == WHOLE, "the target", 60)


def test_a_request_that_is_given_up_during_its_load_leaves_nothing(scene: Scene) -> None:
    scene.store(scene.GIVEN_UP)
    target = scene.node.target_pid
    scene.engine.ask("forget")
    with halted(target):
        for status in ("WAITING", "WAITING_FOR_REMOTE_KVS"):
            assert scene.engine.ask("abort", prompt=scene.GIVEN_UP, status=status) == {"status": [status]}
    eventually(lambda: scene.again(scene.GIVEN_UP) == WHOLE, "the target", 60)


def test_a_node_that_is_killed_is_computed_around(scene: Scene) -> None:
    scene.store(scene.AWAY)
    scene.node.kill()
    for _ in range(5):
        assert scene.again(scene.AWAY) == 0
    scene.node.start()
    eventually(lambda: scene.again(scene.AWAY) == WHOLE, "the node", 60)


def test_a_node_without_room_stores_nothing_and_disturbs_nobody(scene: Scene) -> None:
    with Admin(scene.node.url, token=scene.node.token) as admin:
        admin.update_namespace("default/default", quota_bytes=4096, eviction="none")
        try:
            scene.engine.ask("settle")
            blocks = len(scene.engine.ask("blocks"))
            assert scene.again(scene.FULL) == 0
            eventually(lambda: _unstored(scene, "quota_exceeded") > 0, "a refusal")
            assert len(scene.engine.ask("blocks")) == blocks
        finally:
            admin.update_namespace("default/default", quota_bytes=0, eviction="lru")
    scene.store(scene.FULL)
    assert scene.again(scene.FULL) == WHOLE


def _unstored(scene: Scene, reason: str) -> float:
    scene.engine.generate([1, 2, 3])  # counts come with the engine's steps
    return scene.engine.count(f"forebay_unstored_blocks:{reason}")


def test_an_adapter_that_was_trained_anew_gets_nothing_of_the_old_one(scene: Scene) -> None:
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


def test_a_target_that_stops_during_a_save_holds_up_nothing(scene: Scene) -> None:
    target = scene.node.target_pid
    scene.node.lie("slow")
    try:
        with halted(target):
            assert scene.again(scene.STOPPED) == 0
            scene.engine.ask("settle")  # the save has ended, and the target has not answered
            eventually(lambda: _unstored(scene, "deadline_exceeded") > 0, "a save that was given up", 60)
    finally:
        scene.node.lie("")
    eventually(lambda: scene.again(scene.STOPPED) == WHOLE, "the target", 60)


@pytest.mark.parametrize("who", ["target", "node"])
def test_who_is_killed_during_a_save_is_computed_around(scene: Scene, who: str) -> None:
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
def test_what_a_target_only_says_it_wrote_is_computed_and_stored_again(scene: Scene, lie: str) -> None:
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


def test_a_target_that_reads_slowly_or_wrong_changes_no_token(scene: Scene) -> None:
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


def test_a_target_that_writes_slowly_holds_up_nothing(scene: Scene) -> None:
    scene.node.lie("slow")
    try:
        for _ in range(3):
            scene.again(scene.SLOW)
        scene.engine.ask("settle")
    finally:
        scene.node.lie("")
    eventually(lambda: scene.again(scene.SLOW) == WHOLE, "what is quick", 60)


def test_what_is_loaded_is_what_is_used(scene: Scene) -> None:
    """Valid blocks of other bytes give other tokens: the tests above compare what came from the node."""
    scene.store(scene.FORGED)
    assert scene.engine.ask("forge")["stored"] > BLOCKS
    scene.engine.ask("forget")
    answer = scene.engine.generate(scene.FORGED)
    assert answer["cached"] == [WHOLE] and answer["tokens"] != [scene.answer(scene.FORGED)]


def test_a_generation_that_is_raised_ends_hits_at_once(scene: Scene) -> None:
    """Last, since it cannot be lowered."""
    scene.store(scene.STALE)
    assert scene.again(scene.STALE) == WHOLE
    stale = scene.engine.count("forebay_missed_blocks:stale_generation")
    with Admin(scene.node.url, token=scene.node.token) as admin:
        admin.update_namespace("default/default", min_generation=1)
    assert scene.again(scene.STALE) == 0
    assert scene.engine.count("forebay_missed_blocks:stale_generation") == stale + BLOCKS
