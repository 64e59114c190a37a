from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.appliance.dataplane.extents import Adoption, ExtentMap, slot_class_bytes
from forebay.ids import LBA_BYTES, Extent, VolumeId

REGION = 64 * LBA_BYTES
V = VolumeId(3)


@given(st.integers(1, 64 << 20))
def test_slot_classes_waste_at_most_six_per_cent(size: int) -> None:
    slot = slot_class_bytes(size)
    whole = -(-size // LBA_BYTES) * LBA_BYTES
    assert slot % LBA_BYTES == 0 and whole <= slot <= whole * 17 // 16
    assert slot_class_bytes(slot) == slot


@given(st.integers(1, 64 << 20), st.integers(1, 64 << 20))
def test_slot_classes_never_decrease(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert slot_class_bytes(low) <= slot_class_bytes(high)


def test_there_are_sixteen_classes_a_doubling() -> None:
    classes = {slot_class_bytes(n * LBA_BYTES) for n in range(257, 513)}
    assert len(classes) == 16


def test_consecutive_slots_where_there_is_a_run() -> None:
    extents = ExtentMap(V, REGION, 4)
    extents.claim(1, LBA_BYTES)
    first = extents.take(LBA_BYTES, 10)
    assert [x.offset_bytes for x in first] == [REGION + i * LBA_BYTES for i in range(10)]
    for i in (2, 3, 4, 7):
        extents.give(first[i])
    assert [x.offset_bytes for x in extents.take(LBA_BYTES, 3)] == [REGION + i * LBA_BYTES for i in (2, 3, 4)]


def test_the_fullest_region_that_holds_the_rest_is_used_first() -> None:
    extents = ExtentMap(V, REGION, 4)
    extents.claim(1, LBA_BYTES)
    extents.claim(2, LBA_BYTES)
    extents.take(LBA_BYTES, 40)
    assert {x.offset_bytes // REGION for x in extents.take(LBA_BYTES, 20)} == {1}
    assert len(list(extents.empty_regions())) == 1


def test_two_owners_are_a_programming_error() -> None:
    extents = ExtentMap(V, REGION, 4)
    extents.claim(1, LBA_BYTES)
    (extent,) = extents.take(LBA_BYTES, 1)
    extents.give(extent)
    with pytest.raises(AssertionError):
        extents.give(extent)
    with pytest.raises(AssertionError):
        extents.claim(1, LBA_BYTES)
    extents.take(LBA_BYTES, 1)
    with pytest.raises(AssertionError):
        extents.unclaim(1)


@pytest.mark.parametrize(
    "extent",
    [
        Extent(V, 2 * REGION, 2 * LBA_BYTES),  # not claimed
        Extent(V, REGION, LBA_BYTES),  # not the slot's size
        Extent(V, REGION + LBA_BYTES, 2 * LBA_BYTES),  # not a slot's place
        Extent(V, REGION + 63 * LBA_BYTES + LBA_BYTES // 2, 2 * LBA_BYTES),
    ],
)
def test_extents_that_no_slot_can_be_are_not_adopted(extent: Extent) -> None:
    extents = ExtentMap(V, REGION, 4)
    extents.claim(1, 2 * LBA_BYTES)
    good = Extent(V, REGION + 4 * LBA_BYTES, 2 * LBA_BYTES)
    assert not extents.adopt(extent)
    assert not adopted([extents], [extent])
    assert extents.used_bytes == 0
    assert extents.adopt(good) and not extents.adopt(good)
    assert not adopted([extents], [good])


def taken(maps: list[ExtentMap], extents: Iterable[Extent], parts: int = 1) -> list[bool]:
    """Adopt all at once, in so many parts, as a start does; which of them could be."""
    wanted = list(extents)
    adoption, could = Adoption(maps, REGION), list[bool]()
    for at in range(0, len(wanted), max(1, -(-len(wanted) // parts))):
        part = wanted[at : at + max(1, -(-len(wanted) // parts))]
        found, known = adoption.maps_of(np.array([x.volume for x in part], np.uint32))
        offsets = np.array([x.offset_bytes for x in part], np.uint64)
        could += adoption.take(found, offsets, np.array([x.length_bytes for x in part], np.uint32), known).tolist()
    adoption.finish()
    return could


def adopted(maps: list[ExtentMap], extents: Iterable[Extent]) -> bool:
    return all(taken(maps, extents))


@pytest.mark.parametrize("parts", [1, 2])
def test_one_extent_twice_is_not_adopted_at_once(parts: int) -> None:
    extents = ExtentMap(V, REGION, 4)
    extents.claim(1, LBA_BYTES)
    assert taken([extents], [Extent(V, REGION, LBA_BYTES)] * 2, parts) == [True, False]
    assert extents.used_bytes == LBA_BYTES and extents.free_slots(LBA_BYTES) == REGION // LBA_BYTES - 1


def test_nothing_is_adopted_where_nothing_is() -> None:
    assert adopted([], []) and adopted([ExtentMap(V, REGION, 4)], [])
    assert not adopted([], [Extent(V, REGION, LBA_BYTES)])
    assert not adopted([ExtentMap(V, REGION, 4)], [Extent(V, REGION, LBA_BYTES)])


PLACES = st.builds(
    Extent,
    st.sampled_from([VolumeId(1), VolumeId(4), VolumeId(9), VolumeId(5)]),
    st.integers(0, 5 * REGION // LBA_BYTES).map(lambda lba: lba * LBA_BYTES) | st.sampled_from([1, 2**64 - 4096]),
    st.sampled_from([LBA_BYTES, 3 * LBA_BYTES, 16 * LBA_BYTES, 0, 1]),
)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([1, 4, 9]), st.integers(1, 4)),
        st.sampled_from([LBA_BYTES, 3 * LBA_BYTES, 16 * LBA_BYTES]),
        max_size=12,
    ),
    st.data(),
)
def test_what_is_adopted_at_once_is_what_is_adopted_one_by_one(
    claims: dict[tuple[int, int], int], data: st.DataObject
) -> None:
    def fresh() -> list[ExtentMap]:
        maps = {volume: ExtentMap(VolumeId(volume), REGION, 4) for volume in (9, 1, 4)}
        for (volume, number), slot_bytes in claims.items():
            maps[volume].claim(number, slot_bytes)
        return list(maps.values())

    slots = [region.extent(s) for m in fresh() for region in m.claimed.values() for s in range(region.slots)]
    there = data.draw(st.lists(st.sampled_from(slots), max_size=30, unique=True)) if slots else []
    odd = data.draw(st.lists(PLACES, max_size=4))
    kept = data.draw(st.lists(st.sampled_from(slots), max_size=2, unique=True)) if slots else []
    one, other = fresh(), fresh()
    for maps in (one, other):
        for extent in kept:  # as those in quarantine
            assert {m.volume: m for m in maps}[extent.volume].adopt(extent)
    by_volume = {m.volume: m for m in one}
    wanted = data.draw(st.permutations(there + odd))
    could = [x.volume in by_volume and by_volume[x.volume].adopt(x) for x in wanted]
    assert taken(other, wanted, data.draw(st.integers(1, 3))) == could
    for left, right in zip(one, other, strict=True):
        assert left.used_bytes == right.used_bytes and left.slot_sizes() == right.slot_sizes()
        for number, region in left.claimed.items():
            assert (region.free == right.claimed[number].free).all()
            assert region.free_slots == right.claimed[number].free_slots


def test_a_slot_size_that_does_not_divide_a_region_leaves_a_rest_that_nobody_gets() -> None:
    extents = ExtentMap(V, REGION, 4)
    region = extents.claim(1, 24 * LBA_BYTES)
    assert region.slots == 2 and len(extents.take(24 * LBA_BYTES, 5)) == 2
    assert not extents.adopt(Extent(V, REGION + 48 * LBA_BYTES, 24 * LBA_BYTES))


class ExtentMachine(RuleBasedStateMachine):
    """The map against a list of owned ranges."""

    sizes = (LBA_BYTES, 3 * LBA_BYTES, 16 * LBA_BYTES)

    def __init__(self) -> None:
        super().__init__()
        self.extents = ExtentMap(V, REGION, 5)
        self.owned: set[Extent] = set()
        self.claimed: dict[int, int] = {}
        self.closed: set[int] = set()

    @rule(size=st.sampled_from(sizes))
    def claim(self, size: int) -> None:
        number = self.extents.unclaimed()
        assert number == next((n for n in range(1, 6) if n not in self.claimed), None)
        if number is not None:
            self.extents.claim(number, size)
            self.claimed[number] = size

    @rule(size=st.sampled_from(sizes), want=st.integers(1, 80))
    def take(self, size: int, want: int) -> None:
        open_slots = sum(
            REGION // s - sum(x.offset_bytes // REGION == n for x in self.owned)
            for n, s in self.claimed.items()
            if s == size and n not in self.closed
        )
        assert self.extents.free_slots(size) == open_slots
        taken = self.extents.take(size, want)
        assert len(taken) == len(set(taken)) == min(want, open_slots)
        assert not self.owned & set(taken)
        self.owned |= set(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        ordered = sorted(self.owned, key=lambda x: x.offset_bytes)
        for extent in data.draw(st.lists(st.sampled_from(ordered), unique=True, max_size=20)):
            self.extents.give(extent)
            self.owned.remove(extent)

    @rule(forget=st.booleans())
    def release(self, forget: bool) -> None:
        for region in list(self.extents.empty_regions())[:1]:
            self.extents.close(region.number)
            self.closed.add(region.number)
            if forget:
                self.extents.unclaim(region.number)
                self.closed.discard(region.number)
                del self.claimed[region.number]

    @rule(at_once=st.booleans())
    def rebuild(self, at_once: bool) -> None:
        """As a start does it."""
        self.extents = ExtentMap(V, REGION, 5)
        self.closed.clear()
        for number, size in self.claimed.items():
            self.extents.claim(number, size)
        if at_once:
            assert adopted([self.extents], self.owned)
        else:
            assert all(self.extents.adopt(x) for x in self.owned)

    @invariant()
    def nothing_overlaps_and_every_byte_is_counted(self) -> None:
        end = 0
        for extent in sorted(self.owned, key=lambda x: x.offset_bytes):
            assert extent.offset_bytes >= end
            end = extent.end_bytes
            number = extent.offset_bytes // REGION
            assert self.claimed[number] == extent.length_bytes and extent.end_bytes <= (number + 1) * REGION
        assert self.extents.used_bytes == sum(x.length_bytes for x in self.owned)
        assert {r.number for r in self.extents.claimed.values()} == set(self.claimed)
        for region in self.extents.claimed.values():
            assert region.free_slots == int(region.free.sum())


ExtentMachine.TestCase.settings = settings(stateful_step_count=30)
TestExtentMachine = ExtentMachine.TestCase
