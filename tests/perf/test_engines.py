"""What measuring engines rests on, without engines: profiles, plans of a replay, dropped pages, the page's tables."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.cli.demo.trace import BLOCK_TOKENS, Request, generate
from perf import page
from perf.engines import break_even
from perf.engines.cold import cached_bytes, drop
from perf.engines.profiles import PROFILES, GpuProfile
from perf.engines.replay import LocalCache, Plan, without_storage
from perf.harness import Row, compared_latency_row, file_system
from perf.workload import Bench
from tests.perf.test_perf import TINY

LINEAR = GpuProfile(
    name="linear",
    what="a model without attention",
    parameters=1,
    attention=0,
    kv_bytes=1_000,
    context_tokens=10_000,
    prompt_tokens=1_000,
    prompt_s=1.0,
    cache_bytes=1e12,
    source="nobody",
)
"""A thousand tokens a second, a megabyte of KV for them."""


def test_prefill_follows_the_figure() -> None:
    assert LINEAR.prefill_s(500) == pytest.approx(0.5)
    assert LINEAR.prefill_s(500, cached=200) == pytest.approx(0.3)
    for profile in PROFILES.values():
        assert profile.prefill_s(profile.prompt_tokens) == pytest.approx(profile.prompt_s)
        half = profile.prefill_s(profile.prompt_tokens / 2)
        assert half < profile.prompt_s / 2 < profile.prompt_s - half, "attention makes later tokens dearer"


def test_the_second_published_length_is_near_what_the_first_one_gives() -> None:
    # The source of this profile has 7.5 s for 122,880 tokens, too.
    assert PROFILES["llama-3.1-405b.32xgh200"].prefill_s(122_880) == pytest.approx(7.5, rel=0.15)


def test_kv_sizes_are_those_of_the_models() -> None:
    sizes = {name: profile.kv_bytes for name, profile in PROFILES.items()}
    assert sizes["llama-3-8b.rtx4090"] == 128 << 10
    assert sizes["llama-2-70b.4xa100"] == 2 * sizes["llama-2-70b.4xh100"] == 320 << 10
    assert sizes["deepseek-v3.8xh100"] == 70_272


def test_at_the_break_even_loading_takes_as_long_as_computing() -> None:
    rate = LINEAR.break_even_bytes_per_s(500, 0.1)
    assert rate is not None
    assert rate == pytest.approx(500_000 / 0.4)
    assert LINEAR.load_s(500, rate, 0.1) == pytest.approx(LINEAR.prefill_s(500))
    assert LINEAR.break_even_bytes_per_s(50, 0.1) is None


def test_break_even_is_told_for_prefixes_that_a_model_takes() -> None:
    rows = list(break_even.run(Bench(TINY, Path("/dev/shm"), None)))
    assert {row.name for row in rows if "llama-2-70b.4xh100" in row.name} == {
        "break_even.llama-2-70b.4xh100.1024",
        "break_even.llama-2-70b.4xh100.4096",
    }
    told = [{**row.as_json(), "date": "today", "machine": {}} for row in rows]
    text = page.tables(told)
    assert "| Llama-2-70B, FP16, four A100, TensorRT-LLM | 4,096 | 1.34 | 0.768 | 1.77 | 1.35 | **0.547** |" in text
    assert "Figures of DeepSeek-V3" in text


def test_the_local_cache_forgets_what_was_used_longest_ago() -> None:
    cache = LocalCache(3)
    cache.add([1, 2])
    cache.add([3])
    assert cache.prefix([1, 2, 3]) == 3
    cache.add([1])
    cache.add([4])
    assert (cache.prefix([1, 2]), cache.prefix([3, 4]), cache.prefix([4])) == (1, 2, 1)


def plan(*requests: Request, before: tuple[int, ...], local_blocks: int = 0, replicas: int = 1) -> Plan:
    arrivals_s = tuple(request.arrival_ms / 1000 for request in requests)
    return Plan(LINEAR, requests, arrivals_s, before, 1.0, 1.0, local_blocks, "test", replicas)


def test_without_storage_prompts_are_computed_in_the_order_in_which_they_come() -> None:
    one, two = Request(1_000, (1,), 0), Request(1_000, (2,), 500)
    assert without_storage(plan(one, two, before=(-1, -1))) == pytest.approx([1.0, 1.5])
    # The second turn is due while the first is computed, and comes when it has been.
    assert without_storage(plan(one, replace(two, blocks=(1, 2)), before=(-1, 0))) == pytest.approx([1.0, 1.0])
    cached_s = BLOCK_TOKENS / 1_000
    turns = plan(one, replace(two, blocks=(1, 2)), before=(-1, 0), local_blocks=8)
    assert without_storage(turns) == pytest.approx([1.0, 1.0 - cached_s])
    # Another replica has not got it, and need not wait for the first one.
    dealt = plan(one, replace(two, blocks=(1, 2)), before=(-1, -1), local_blocks=8, replicas=2)
    assert without_storage(dealt) == pytest.approx([1.0, 1.0])


def test_a_plan_keeps_the_gpu_as_busy_as_it_says_and_turns_in_order() -> None:
    trace = generate(3, 500)
    made = Plan.of(LINEAR, trace, "generated", 5.0)
    busy_s = sum(LINEAR.prefill_s(request.input_tokens) for request in made.requests)
    assert busy_s / made.replicas / made.arrivals_s[-1] == pytest.approx(0.7)
    assert list(made.arrivals_s) == sorted(made.arrivals_s)
    assert all(before < number for number, before in enumerate(made.before))
    assert any(before >= 0 for before in made.before)


def test_dropped_pages_are_gone(tmp_path: Path) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("the directory for temporary files lies in memory")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    assert cached_bytes(tmp_path) == 1 << 20
    drop(tmp_path)
    assert cached_bytes(tmp_path) == 0


def latencies(**options: object) -> Row:
    ours = [0.010 + i / 1e5 for i in range(100)]
    theirs = [0.005 + i / 1e5 for i in range(100)]
    return compared_latency_row("a/b", "a against b", ours, theirs, details={"parameters": 1_000}, **options)  # type: ignore[arg-type]


def test_latencies_are_compared() -> None:
    told = latencies().as_json()
    assert told["added_ms"]["median"] == pytest.approx(5)
    assert told["added_ms"]["low"] <= 5 <= told["added_ms"]["high"]
    assert told["ratio"]["median"] == pytest.approx(10.5 / 5.5, rel=1e-3)
    assert told["figure"] == "p50"
    mean = latencies(quantile=None, paired=True).as_json()
    assert mean["added_ms"] == {"median": 5.0, "low": 5.0, "high": 5.0}, "every pair differs by as much"
    text = page.tables([{**json.loads(json.dumps(told)), "date": "today", "machine": {}}])
    assert "| `a/b` | 10.50 | 5.50 | 5.00 [" in text
    assert "1,000 parameters" in text
