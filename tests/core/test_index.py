from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay import index as module
from forebay.errors import NoSpace
from forebay.index import ABSENT, COLUMNS, BlockIndex, Digests, Rows, RowState


def make(max_rows: int = 1000) -> BlockIndex:
    return BlockIndex(bytes(32), max_rows)


def add(index: BlockIndex, digests: Digests, tiles: Sequence[int] | None = None, **columns: Any) -> Rows:
    tiles = tiles or [1] * len(digests)
    sums = [[int(d) % 2**32 + t for t in range(n)] for d, n in zip(digests[:, 1].tolist(), tiles, strict=True)]
    return index.insert(digests, sums, state=RowState.VISIBLE, **columns)


def digests(*values: int) -> Digests:
    """Digests whose place in the table is ``value`` and whose second word tells apart those of one place."""
    return np.array([(v % 8, v) for v in values], dtype=np.uint64).reshape(-1, 2)


def test_digests_depend_on_key_and_secret() -> None:
    one, other = make(), BlockIndex(b"x" * 32, 10)
    found = one.digests([b"a", b"b", b"a"])
    assert found.shape == (3, 2) and (found[0] == found[2]).all() and not (found[0] == found[1]).any()
    assert not (other.digests([b"a"]) == found[:1]).any()
    assert one.digests([]).shape == (0, 2)


def test_find_in_an_empty_index() -> None:
    assert make().find(make().digests([b"a", b"b"])).tolist() == [ABSENT, ABSENT]


def test_columns_come_back() -> None:
    index = make()
    rows = add(index, digests(1, 2), offset=[4096, 8192], namespace=7, length=[1, 2], write_id=[(1, 2), (3, 4)])
    assert index.offset[rows].tolist() == [4096, 8192] and index.namespace[rows].tolist() == [7, 7]
    assert index.write_id[rows].tolist() == [[1, 2], [3, 4]]
    assert set(COLUMNS) == set(BlockIndex.__annotations__)


def test_full() -> None:
    index = make(3)
    rows = add(index, digests(1, 2, 3))
    with pytest.raises(NoSpace) as caught:
        add(index, digests(4))
    assert caught.value.limit == 3 and index.count == 3
    index.unlink(rows[:1])
    index.free(rows[:1])
    assert add(index, digests(4)).tolist() == rows[:1].tolist()


def test_a_row_is_not_unlinked_twice() -> None:
    """It would be searched for in a table where it is not."""
    index = make()
    rows = add(index, digests(1, 2))
    with pytest.raises(AssertionError):
        index.unlink(np.concatenate([rows, rows]))


@pytest.mark.parametrize("tiles", [[1, 1, 1], [8, 1, 3]])
def test_checksums_of_blocks_with_different_grids(tiles: list[int]) -> None:
    index = make()
    rows = add(index, digests(10, 20, 30), tiles)
    want = [v + t for v, n in zip((10, 20, 30), tiles, strict=True) for t in range(n)]
    assert np.frombuffer(index.checksums(rows), "<u4").tolist() == want
    back = np.frombuffer(index.checksums(rows[::-1]), "<u4").tolist()
    assert back[: tiles[2]] == want[-tiles[2] :]


def test_places_of_checksums_are_used_again() -> None:
    index = make()
    for round_number in range(50):
        rows = add(index, digests(round_number), [8])
        index.unlink(rows)
        index.free(rows)
    assert index.pools[8].used == 1 and index.high == 1


def test_growth_and_tombstones_leave_everything_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_SLOTS", 8)
    index = make(100_000)
    rng = np.random.default_rng(5)
    live: dict[int, int] = {}
    for step in range(60):
        fresh = [step * 1000 + i for i in range(int(rng.integers(1, 200)))]
        keys = np.array([(int(rng.integers(0, 64)), k) for k in fresh], dtype=np.uint64)
        for key, row in zip(map(tuple, keys.tolist()), add(index, keys).tolist(), strict=True):
            live[key] = row  # type: ignore[index]
        gone = [k for k in live if rng.random() < 0.4]
        rows = np.array([live.pop(k) for k in gone], dtype=np.int64)
        index.unlink(rows)
        index.free(rows)
        every = np.array(list(live) + gone, dtype=np.uint64).reshape(-1, 2)
        want = [*live.values(), *[ABSENT] * len(gone)]
        assert index.find(every).tolist() == want
        assert index.count == len(live)


def test_memory_of_a_block_is_what_is_said() -> None:
    """Design §9: at most 200 bytes a block of eight tiles."""
    index = make(300_000)
    index.insert(index.digests([b"%d" % i for i in range(200_000)]), [[0] * 8] * 200_000, state=RowState.VISIBLE)
    assert index.memory_bytes() / 200_000 <= 200


def test_relink_finds_again_what_the_columns_say() -> None:
    index = make()
    rows = add(index, digests(1, 2, 3, 4), [2, 2, 2, 2])
    index.leases[rows], index.pins[rows] = 3, 1
    index.unlink(rows[1:2])
    index.relink()
    assert index.find(digests(1, 2, 3, 4)).tolist() == [rows[0], ABSENT, rows[2], rows[3]]
    assert index.count == 3 and not index.leases.any() and not index.pins.any()
    again = add(index, digests(5), [2])
    assert again.tolist() == rows[1:2].tolist() and index.pools[2].used == 4
    assert np.frombuffer(index.checksums(rows), "<u4").tolist() == [1, 2, 5, 6, 3, 4, 4, 5]


class IndexMachine(RuleBasedStateMachine):
    """The index against a dict, with digests that collide in the table all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "_MIN_SLOTS", 8)
        self.index = make(60)
        self.live: dict[int, tuple[int, int]] = {}  # value -> row, tiles
        self.retired: dict[int, int] = {}  # row -> tiles

    def teardown(self) -> None:
        self.patch.undo()

    @rule(values=st.lists(st.integers(0, 63), min_size=1, max_size=12, unique=True), tiles=st.integers(1, 3))
    def insert(self, values: list[int], tiles: int) -> None:
        values = [v for v in values if v not in self.live]
        if not values:
            return
        if len(self.live) + len(self.retired) + len(values) > 60:
            with pytest.raises(NoSpace):
                add(self.index, digests(*values), [tiles] * len(values), tick=values)
            return
        rows = add(self.index, digests(*values), [tiles] * len(values), tick=values).tolist()
        assert not set(rows) & ({r for r, _ in self.live.values()} | set(self.retired))
        self.live |= {v: (row, tiles) for v, row in zip(values, rows, strict=True)}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        values = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True))
        rows = [self.live[v][0] for v in values]
        self.index.unlink(np.array(rows, dtype=np.int64))
        for v in values:
            row, tiles = self.live.pop(v)
            self.retired[row] = tiles

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.retired)), min_size=1, unique=True))
        self.index.free(np.array(rows, dtype=np.int64))
        for row in rows:
            del self.retired[row]

    @rule()
    def relink(self) -> None:
        self.index.relink()
        self.retired.clear()

    @invariant()
    def agrees(self) -> None:
        every = list(range(64))
        want = [self.live[v][0] if v in self.live else ABSENT for v in every]
        assert self.index.find(digests(*every)).tolist() == want
        assert self.index.count == len(self.live)
        for value, (row, tiles) in self.live.items():
            assert self.index.tick[row] == value and self.index.tiles[row] == tiles
            sums = np.frombuffer(self.index.checksums(np.array([row])), "<u4").tolist()
            assert sums == [value + t for t in range(tiles)]
        filled = int((self.index._slots != 0xFFFFFFFF).sum())
        assert filled == self.index._filled < len(self.index._slots)


IndexMachine.TestCase.settings = settings(stateful_step_count=30)
TestIndexMachine = IndexMachine.TestCase


@given(st.lists(st.binary(min_size=1, max_size=8), unique=True, min_size=1, max_size=30))
def test_real_digests_find_their_own_row(keys: list[bytes]) -> None:
    index = make()
    rows = add(index, index.digests(keys))
    assert index.find(index.digests(keys)).tolist() == rows.tolist()
    assert index.find(index.digests([k + b"\0" for k in keys if k + b"\0" not in keys])).max(initial=-1) == ABSENT


def test_a_pool_grows_past_its_first_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POOL_ROWS", 4)
    pool = module.SumPool(3, 1000)
    sums = np.arange(30, dtype=np.uint32).reshape(10, 3)
    places = pool.put(sums)
    assert (pool.data[places] == sums).all()
    pool.drop(places[:5].tolist())
    assert sorted(pool.put(sums[:5]).tolist()) == sorted(places[:5].tolist())
