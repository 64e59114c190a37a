"""Loads of one step: what the engine waits for, what counts as loaded, and that nothing is copied once it is over."""

from __future__ import annotations

import threading

from forebay.clock import ManualClock, SystemClock
from forebay.connectors.vllm.layers import Piece, StepLoads
from forebay.connectors.vllm.messages import Load, Rows
from tests.client.conftest import eventually

LAYER_GROUPS = 3


def load(request: str, blocks: int, first: int = 0) -> Load:
    keys = tuple([bytes([i]) for i in range(blocks)])
    return Load(request, (Rows(0, keys, tuple(range(first, first + blocks))),), in_step=True)


def begin(*loads: Load, part: int = 4, limit_ms: int = 60_000) -> StepLoads:
    clock = SystemClock()
    return StepLoads(loads, LAYER_GROUPS, part, clock.monotonic_ms() + limit_ms, clock)


def read(step: StepLoads, piece: Piece, lost: int | None = None, why: str = "evicted") -> None:
    with step.copying() as may:
        assert may
    step.done(piece, lost, why)


def test_first_layers_of_all_requests_come_first() -> None:
    step = begin(load("a", 6), load("b", 3))
    first = [(piece.request, piece.first, len(piece.rows.keys)) for piece in step.pieces if piece.layer_group == 0]
    assert first == [("a", 0, 4), ("a", 4, 2), ("b", 0, 3)]
    assert [piece.layer_group for piece in step.pieces] == sorted(piece.layer_group for piece in step.pieces)


def test_a_layer_waits_for_its_own_group_and_no_other() -> None:
    step = begin(load("a", 6), load("b", 3), limit_ms=600_000)  # later than this test gives up
    waited = threading.Event()

    def wait() -> None:
        step.wait(0)
        waited.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    first = [piece for piece in step.pieces if piece.layer_group == 0]
    for piece in first[:-1]:
        read(step, piece)
        assert not waited.is_set()
    read(step, first[-1])
    assert waited.wait(60)
    thread.join()


def test_what_every_layer_group_has_was_loaded() -> None:
    step = begin(load("a", 6, 10))
    for piece in step.pieces:
        read(step, piece)
    for layer_group in range(LAYER_GROUPS):
        step.wait(layer_group)
    assert step.end() == {"a": (6, (), {})}


def test_a_block_that_one_layer_group_lacks_is_lost_with_those_after_it() -> None:
    step = begin(load("a", 6, 10), load("b", 3, 20))
    for piece in step.pieces:
        lacks = piece.request == "a" and piece.layer_group == 1 and piece.first == 0
        if piece.request == "a" and (piece.layer_group, piece.first) > (1, 0):
            assert step.useful(piece) == (2 if piece.first == 0 else 0), "what comes after it is not read any more"
        read(step, piece, 2 if lacks else None)
    for layer_group in range(LAYER_GROUPS):
        step.wait(layer_group)
    assert step.end() == {"a": (6, (12, 13, 14, 15), {"evicted": 1, "behind_gap": 3}), "b": (3, (), {})}


def test_a_block_counts_as_lost_to_what_was_wrong_with_it() -> None:
    """The node drops what one layer group's reader finds bad, perhaps before another layer group is read."""
    for order in (1, -1):
        step = begin(load("a", 4))
        found: tuple[tuple[int | None, str], ...] = ((1, "evicted"), (1, "checksum_mismatch"), (None, ""))
        for piece, (lost, why) in zip(step.pieces, found[::order], strict=True):
            read(step, piece, lost, why)
        for layer_group in range(LAYER_GROUPS):
            step.wait(layer_group)
        assert step.end() == {"a": (4, (1, 2, 3), {"checksum_mismatch": 1, "behind_gap": 2})}


def test_layer_groups_of_two_writers_do_not_make_a_block() -> None:
    """It was evicted and written anew between two reads: each part is whole, and they are not of one write."""
    step = begin(load("a", 3))
    one, two = step.pieces[:2]
    assert step.alike(one, [b"x", b"y", b"z"]) == 3
    assert step.alike(two, [b"x", b"other", b"z"]) == 1


def test_a_read_that_is_late_ends_the_wait_and_is_not_copied() -> None:
    clock = ManualClock()
    step = StepLoads([load("a", 6, 10)], LAYER_GROUPS, 4, clock.monotonic_ms() + 100, clock)
    first, second = step.pieces[:2]
    read(step, first)
    clock.advance(100)
    step.wait(0)
    with step.copying() as may:
        assert not may
    step.done(second, 0, "late")
    assert step.useful(step.pieces[2]) == 0
    step.wait(1)
    step.wait(2)
    assert step.end() == {"a": (6, tuple(range(10, 16)), {"late": 6})}, (
        "the other layer groups of the first blocks, too"
    )


def test_a_copy_under_way_is_waited_for() -> None:
    clock = ManualClock()
    step = StepLoads([load("a", 2)], LAYER_GROUPS, 4, clock.monotonic_ms() + 100, clock)
    ended = threading.Event()
    clock.advance(100)

    def end() -> None:
        step.end()
        ended.set()

    with step.copying() as may:
        assert may
        thread = threading.Thread(target=end)
        thread.start()
        eventually(lambda: not step.useful(step.pieces[0]), "the end")
        assert not ended.is_set(), "the engine's blocks are being written"
    thread.join(60)
    assert ended.is_set()
    with step.copying() as may:
        assert not may


def test_layers_that_did_not_wait_have_computed_with_anything() -> None:
    step = begin(load("a", 2, 10))
    for piece in step.pieces:
        read(step, piece)
    step.wait(0)
    step.wait(2)
    assert step.end() == {"a": (2, (10, 11), {"not_waited_for": 2})}
