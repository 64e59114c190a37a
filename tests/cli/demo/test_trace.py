"""Traces: parsing, sampling whole conversations, the ceiling against a naive model."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.demo.trace import BLOCK_TOKENS, Request, ceiling_tokens, conversations, generate, read_trace, sample
from forebay.errors import InvalidArgument


def naive_ceiling(requests: list[Request]) -> int:
    """Keeps whole prefixes, not blocks: what an infinite cache would hold, written another way."""
    prefixes: set[tuple[int, ...]] = set()
    total = 0
    for request in requests:
        total += max((n for n in range(len(request.blocks) + 1) if request.blocks[:n] in prefixes), default=0)
        prefixes |= {request.blocks[:n] for n in range(1, len(request.blocks) + 1)}
    return total * BLOCK_TOKENS


@st.composite
def chains(draw: st.DrawFn) -> list[Request]:
    """Requests whose ids are chained as in a trace: an id stands for everything up to it."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(draw(st.integers(1, 25))):
        texts = tuple(draw(st.lists(st.integers(0, 2), min_size=0, max_size=6)))
        blocks = tuple(ids.setdefault(texts[:n], len(ids)) for n in range(1, len(texts) + 1))
        requests.append(Request(len(blocks) * BLOCK_TOKENS + draw(st.integers(0, BLOCK_TOKENS - 1)), blocks))
    return requests


@given(chains())
def test_ceiling_is_that_of_a_naive_model(requests: list[Request]) -> None:
    assert ceiling_tokens(requests) == naive_ceiling(requests)


@given(chains())
def test_conversations_are_the_connected_chains(requests: list[Request]) -> None:
    groups = conversations(requests)
    for i, one in enumerate(requests):
        for j, other in enumerate(requests):
            if set(one.blocks) & set(other.blocks):
                assert groups[i] == groups[j]
    # Chained ids: two chains are connected if and only if they begin alike.
    for group in set(groups):
        firsts = {r.blocks[0] for r, g in zip(requests, groups, strict=True) if g == group and r.blocks}
        assert len(firsts) <= 1


@given(chains(), st.integers(0, 5), st.integers(1, 40))
def test_samples_hold_whole_conversations_in_order(requests: list[Request], seed: int, most: int) -> None:
    groups = conversations(requests)
    part = sample(requests, seed, most)
    taken = set(part.groups)
    assert part.requests == tuple(r for r, g in zip(requests, groups, strict=True) if g in taken)
    assert (part.conversations, part.conversations_total) == (len(taken), len(set(groups)))
    assert sum(len(r.blocks) for r in part.requests) <= most or part.conversations == 1
    assert sample(requests, seed, most) == part
    assert sample(requests, seed, None).requests == tuple(requests)


def test_system_prompts_connect_nobody() -> None:
    # 200 conversations of two turns each, all with one system prompt.
    requests = []
    for i in range(200):
        requests += [Request(1024, (0, 2 * i + 1)), Request(1536, (0, 2 * i + 1, 2 * i + 2))]
    assert len(set(conversations(requests))) == 200
    part = sample(requests, 1, 50)
    assert part.conversations == 10 and len(part.requests) == 20


@given(st.integers(0, 1000), st.integers(1, 120))
def test_generated_requests_are_chained_conversations(seed: int, count: int) -> None:
    requests = generate(seed, count)
    assert len(requests) >= count and requests == generate(seed, count)
    before: dict[int, tuple[int, ...]] = {}
    for request in requests:
        assert len(request.blocks) == request.input_tokens // BLOCK_TOKENS > 0
        for n, block in enumerate(request.blocks):
            assert before.setdefault(block, request.blocks[:n]) == request.blocks[:n]


def test_generated_requests_share_and_grow() -> None:
    requests = generate(3, 400)
    assert 0.4 < ceiling_tokens(requests) / sum(r.input_tokens for r in requests) < 0.9
    assert len(set(conversations(requests))) > 100


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_trace_in_the_mooncake_format(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
        "",
        {"timestamp": 9, "input_length": 1536, "output_length": 5, "hash_ids": [0, 1, 7]},
        {"timestamp": 9, "input_length": 100, "output_length": 5, "hash_ids": [8]},
    )
    # The last id of 1,300 tokens stands for a partial block, which engines do not store.
    assert read_trace(trace) == [Request(1300, (0, 1)), Request(1536, (0, 1, 7), 9), Request(100, (), 9)]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        {"input_length": 600},
        {"input_length": "600", "hash_ids": [1]},
        {"input_length": 600, "hash_ids": ["1"]},
        {"input_length": 1200, "hash_ids": [1]},
        {"input_length": 1200, "hash_ids": [1, 1]},
        {"input_length": -1, "hash_ids": []},
        {"input_length": 512, "hash_ids": [1], "timestamp": "9"},
    ],
    ids=str,
)
def test_bad_lines_are_named(tmp_path: Path, line: object) -> None:
    trace = write(tmp_path / "trace.jsonl", {"input_length": 512, "hash_ids": [0]}, line)
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2"):
        read_trace(trace)


def test_a_trace_without_whole_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="whole block"):
        read_trace(write(tmp_path / "t", {"input_length": 511, "hash_ids": [0]}))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument):
        read_trace(tmp_path / "binary")


def test_a_real_trace() -> None:
    path = os.environ.get("FOREBAY_TRACE")
    if not path:
        pytest.skip("no trace: FOREBAY_TRACE names one in the Mooncake format")
    requests = read_trace(Path(path))
    part = sample(requests, 1, 4_000)
    assert 0 < ceiling_tokens(part.requests) < sum(r.input_tokens for r in part.requests)
    assert 3_000 < sum(len(r.blocks) for r in part.requests) <= 4_000
