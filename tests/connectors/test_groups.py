"""What a hit is when groups need different things of a prefix: compared with a definition that is slow and plain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.connectors.vllm.groups import CacheGroup, CacheGroups, Presence
from forebay.schema import Required

FULL = CacheGroup("full", 16)


@st.composite
def engines(draw: st.DrawFn) -> tuple[CacheGroups, list[list[bool]]]:
    """Groups of several kinds and block sizes, and which blocks of each are there, of 24 hashed ones."""
    kinds = st.sampled_from(["full", "sliding", "chunked", "mamba"])
    groups = tuple(
        CacheGroup(kind, 4 * draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 40)))  # type: ignore[arg-type]
        for kind in draw(st.lists(kinds, min_size=1, max_size=4))
    )
    present = [draw(st.lists(st.booleans(), min_size=24, max_size=24)) for _ in groups]
    return CacheGroups(groups, 4), [row[: 96 // g.block_tokens] for row, g in zip(present, groups, strict=True)]


def restores(group: CacheGroup, row: list[bool], start: int, tokens: int) -> bool:
    """Token by token: whether a group has all that tokens after ``tokens`` look at."""
    if group.kind == "mamba":
        looked_at = [tokens - 1]
    elif group.kind == "sliding":  # the next token, and as many before it as make up the window
        looked_at = list(range(max(0, tokens - group.window_tokens + 1), tokens))
    elif group.kind == "chunked":
        looked_at = list(range(tokens // group.window_tokens * group.window_tokens, tokens))
    else:
        looked_at = list(range(tokens))
    return all(row[token // group.block_tokens] for token in looked_at if token >= start)


@given(engines(), st.integers(0, 5), st.integers(0, 96))
def test_the_longest_hit_is_the_longest(engine: tuple[CacheGroups, list[list[bool]]], had: int, most: int) -> None:
    groups, present = engine
    unit = groups.unit_tokens
    start = had * unit
    expected = start
    for tokens in range(start + unit, min(most, 96) + 1, unit):
        if all(restores(group, row, start, tokens) for group, row in zip(groups.groups, present, strict=True)):
            expected = tokens
    assert groups.longest([Presence(row) for row in present], start, most) == expected


def test_a_window_needs_its_last_blocks_and_no_others() -> None:
    sliding = CacheGroup("sliding", 16, 33)  # the next token looks at 32 before it
    groups = CacheGroups((FULL, sliding), 16)
    assert list(groups.rows(1, 0, 160)) == [8, 9] and sliding.required == Required("trailing", 2)
    assert list(groups.rows(0, 32, 160)) == list(range(2, 10))
    assert list(groups.rows(1, 144, 160)) == [9], "the engine has the one before"


def test_a_state_is_the_one_at_the_end() -> None:
    groups = CacheGroups((FULL, CacheGroup("mamba", 64)), 16)
    assert groups.unit_tokens == 64 and list(groups.rows(1, 0, 128)) == [1]
    assert [groups.hashed(1, block) for block in (0, 1)] == [3, 7]
    everything, states = Presence([True] * 12), Presence([True, False, True])
    assert groups.longest([everything, states], 0, 191) == 64
    assert groups.longest([everything, states], 0, 192) == 192


def test_only_full_attention_alone_is_plain() -> None:
    assert CacheGroups((FULL,), 16).plain
    assert not CacheGroups((CacheGroup("sliding", 16, 64),), 16).plain
    assert not CacheGroups((FULL, FULL), 16).plain
