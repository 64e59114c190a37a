"""Requests to an inference service as chains of token blocks: a trace in the Mooncake format, or a seeded generator."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import InvalidArgument

__all__ = ["BLOCK_TOKENS", "Request", "Sample", "ceiling_tokens", "conversations", "generate", "read_trace", "sample"]

BLOCK_TOKENS = 512
"""Tokens of one block in the Mooncake format."""

_SHARED_MIN = 32
_SHARED_FRACTION = 0.05


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    ``blocks`` are the ids of its whole blocks of `BLOCK_TOKENS` tokens, chained: equal ids mean equal prefixes. Tokens
    behind the last whole block are always computed, as engines do. ``arrival_ms`` counts from the trace's beginning.
    """

    input_tokens: int
    blocks: tuple[int, ...]
    arrival_ms: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Some whole conversations of a trace, in the trace's order; ``groups[i]`` is the conversation of request i."""

    requests: tuple[Request, ...]
    groups: tuple[int, ...]
    conversations: int
    conversations_total: int


def read_trace(path: Path) -> list[Request]:
    """Read a trace of JSON lines with ``input_length`` (tokens) and ``hash_ids`` (ids of 512-token blocks, chained).

    ``timestamp`` (milliseconds), where there is one, is when a request arrives. The last id of a request whose length
    is no multiple of 512 stands for a partial block and is dropped.
    Raises `InvalidArgument` naming the line.
    """
    requests = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_parse(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"cannot read the trace {path}: {e}", field="trace") from e
    if not any(r.blocks for r in requests):
        raise InvalidArgument(f"the trace {path} has no request of a whole block", field="trace", limit=BLOCK_TOKENS)
    return requests


def _parse(line: str, where: str) -> Request:
    try:
        raw = json.loads(line)
        length, ids, arrival_ms = raw["input_length"], raw["hash_ids"], raw.get("timestamp", 0)
    except (ValueError, KeyError, TypeError) as e:
        raise InvalidArgument(f"{where} is no JSON object with input_length and hash_ids", field="trace") from e
    good = isinstance(length, int) and isinstance(arrival_ms, int)
    good = good and isinstance(ids, list) and all(isinstance(i, int) for i in ids)
    if not good or length < 0 or len(ids) < length // BLOCK_TOKENS or len(set(ids)) != len(ids):
        message = (
            f"{where}: hash_ids must be distinct integers, one for each {BLOCK_TOKENS} tokens of input_length, and "
            "timestamp an integer"
        )
        raise InvalidArgument(message, field="trace")
    return Request(length, tuple(ids[: length // BLOCK_TOKENS]), arrival_ms)


def generate(seed: int, count: int, *, system_prompts: int = 4) -> list[Request]:
    """About ``count`` requests of multi-turn conversations, interleaved as concurrent users would send them.

    Each conversation begins with one of a few system prompts (of 1 to 4 blocks, the first ones far more popular), and
    each turn sends everything said before plus something new. One request a second arrives, in the mean. The same seed
    gives the same requests.
    """
    rng = random.Random(seed)
    next_id = 0

    def fresh(blocks: int) -> list[int]:
        nonlocal next_id
        next_id += blocks
        return list(range(next_id - blocks, next_id))

    prompts = [fresh(rng.randint(1, 4)) for _ in range(system_prompts)]
    weights = [1 / (rank + 1) for rank in range(system_prompts)]
    turns: list[tuple[float, Request]] = []
    while len(turns) < count:
        chain = list(rng.choices(prompts, weights)[0])
        at = rng.random() * count
        for _ in range(min(1 + int(rng.expovariate(0.5)), 12)):
            # New text is mostly short, sometimes a long document.
            chain += fresh(min(1 + int(rng.paretovariate(1.2)), 48))
            tokens = len(chain) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
            turns.append((at, Request(tokens, tuple(chain), int(at * 1000))))
            at += rng.expovariate(20 / count)
    turns.sort(key=lambda turn: turn[0])
    return [request for _, request in turns]


def conversations(requests: Sequence[Request]) -> list[int]:
    """The conversation of each request, numbered by first appearance.

    Requests belong together when they share a block, directly or through others: a connected set of prefix chains.
    Blocks that very many requests share (over 5 % of them, and over 32) are system prompts and connect nobody.
    """
    seen = Counter(block for r in requests for block in r.blocks)
    shared_from = max(_SHARED_MIN, int(len(requests) * _SHARED_FRACTION))
    parent = list(range(len(requests)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[int, int] = {}
    for i, request in enumerate(requests):
        for block in request.blocks:
            if seen[block] <= shared_from:
                parent[root(i)] = root(owner.setdefault(block, i))
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(i), len(numbers)) for i in range(len(requests))]


def sample(requests: Sequence[Request], seed: int, max_blocks: int | None) -> Sample:
    """Whole conversations, drawn by seed until they name ``max_blocks`` blocks; all of them when it is None.

    Counted are the blocks of all requests, since each one is either written or read. At least one conversation.
    """
    groups = conversations(requests)
    sizes: defaultdict[int, int] = defaultdict(int)
    for group, request in zip(groups, requests, strict=True):
        sizes[group] += len(request.blocks)
    order = list(sizes)
    random.Random(seed).shuffle(order)
    taken: set[int] = set()
    total = 0
    for group in order:
        if max_blocks is not None and taken and total + sizes[group] > max_blocks:
            break
        taken.add(group)
        total += sizes[group]
    kept = [(g, r) for g, r in zip(groups, requests, strict=True) if g in taken]
    return Sample(tuple(r for _, r in kept), tuple(g for g, _ in kept), len(taken), len(sizes))


def ceiling_tokens(requests: Iterable[Request]) -> int:
    """Tokens that a cache of infinite size would give back if requests came one after another."""
    seen: set[int] = set()
    tokens = 0
    for request in requests:
        for block in request.blocks:
            if block not in seen:
                break
            tokens += BLOCK_TOKENS
        seen.update(request.blocks)
    return tokens
