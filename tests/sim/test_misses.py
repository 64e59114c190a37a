"""Why a key is absent: it was evicted, or is in another keyspace or generation of its namespace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forebay.errors import OK, Absent, Evicted, OtherGeneration, OtherKeyspace, StaleGeneration
from forebay.ids import BlockKey
from tests.sim.rig import GRID, Member, Rig
from tests.sim.running import on_loop

VALUE = bytes(GRID.groups[0].layout().value_bytes)
OTHER = replace(GRID, model=bytes(32))
BLOCK_BYTES = GRID.groups[0].layout().extent_bytes


def why(rig: Rig, member: Member, *keys: bytes | BlockKey) -> tuple[list[int], tuple[bytes, int] | None]:
    found = rig.node.blocks.match(member.session, [k if isinstance(k, BlockKey) else BlockKey(k) for k in keys])
    return found.status.tolist(), found.elsewhere


@on_loop
async def test_the_first_absent_key_is_looked_for_in_other_keyspaces(rig: Rig) -> None:
    here = await rig.begin()
    there = await rig.open(schema=OTHER)
    for key in (b"1", b"2"):
        assert await rig.put(there, key, VALUE) == OK
    assert await rig.put(here, b"0", VALUE) == OK
    place = (OTHER.keyspace, 0)
    assert why(rig, here, b"0", b"1", b"2") == ([OK, OtherKeyspace.code, Absent.code], place)
    assert rig.node.blocks.match_plain(here.session, [b"0", b"1"]).elsewhere == place
    assert why(rig, here, b"9", b"1") == ([Absent.code] * 2, None), "the first one says it for those behind it"
    assert why(rig, there, b"0") == ([OtherKeyspace.code], (GRID.keyspace, 0))
    counters = rig.node.engine.counters
    assert counters["match_misses_other_keyspace"] == 3 and counters["match_misses_absent"] == 3
    located = await rig.node.blocks.acquire(here.session, [BlockKey(b"1")], 1_000)
    assert located.status.tolist() == [Absent.code], "who loads has been told"


@on_loop
async def test_a_generation_beside_and_one_below_the_minimum(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    old, new = await rig.open(), await rig.open(generation=2)
    assert await rig.put(old, b"k", VALUE) == OK
    assert why(rig, new, b"k") == ([OtherGeneration.code], (GRID.keyspace, 0))
    await rig.node.update_namespace("t/n", min_generation=1)
    assert why(rig, new, b"k") == ([StaleGeneration.code], (GRID.keyspace, 0))


@on_loop
async def test_scope_and_namespace_are_never_crossed(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    await rig.namespace("t/other")
    one = await rig.open(schema=OTHER, scopes=("a",))
    (scope,) = one.session.scopes
    two = await rig.open(scopes=("a", "b"))
    away = await rig.open("t/other")
    assert await rig.put(one, BlockKey(b"k", 0, scope), VALUE) == OK
    other = next(number for number in two.session.scopes if number != scope)
    assert why(rig, two, BlockKey(b"k", 0, other)) == ([Absent.code], None)
    assert why(rig, two, BlockKey(b"k", 0, scope)) == ([OtherKeyspace.code], (OTHER.keyspace, 0))
    assert why(rig, away, b"k") == ([Absent.code], None)


@on_loop
async def test_an_evicted_block_is_told_from_one_that_never_was(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "d", capacity_regions=1)
    await rig.start()
    await rig.namespace(quota_bytes=2 * BLOCK_BYTES)
    m = await rig.open()
    for key in (b"1", b"2", b"3"):
        assert await rig.put(m, key, VALUE) == OK
    assert why(rig, m, b"1", b"2", b"never") == ([Evicted.code, OK, Absent.code], None)
    assert rig.node.engine.counters["match_misses_evicted"] == 1
    assert await rig.put(m, b"1", VALUE) == OK  # which evicts 2
    await rig.node.blocks.delete(m.session, [BlockKey(b"1")])
    assert why(rig, m, b"1", b"2") == ([Absent.code, Evicted.code], None), "deleted since is not evicted"


@on_loop
async def test_a_start_finds_the_keyspaces_that_there_are(rig: Rig) -> None:
    member = await rig.begin()
    generations = range(3)
    for generation in generations:
        session = await rig.open(schema=OTHER, generation=generation)
        assert await rig.put(session, b"%d" % generation, VALUE) == OK
    assert await rig.put(member, b"k", VALUE) == OK
    await rig.namespace("t/other")
    assert await rig.put(await rig.open("t/other", OTHER), b"k", VALUE) == OK
    await rig.restart()
    places = rig.node.engine.places
    here, other = (rig.node.state.namespace(name) for name in ("t/n", "t/other"))
    assert here is not None and other is not None
    assert set(places.of(here.id)) == {(GRID.keyspace, 0), *((OTHER.keyspace, n) for n in generations)}
    assert places.of(other.id) == [(OTHER.keyspace, 0)]
    again = await rig.open(schema=OTHER, generation=7)
    assert why(rig, again, b"2") == ([OtherGeneration.code], (OTHER.keyspace, 2))
    await rig.node.end_session(again.session)
    await rig.node.delete_namespace("t/n", force=True)
    assert places.of(here.id) == []


@on_loop
async def test_many_generations_are_bounded(rig: Rig) -> None:
    await rig.begin()
    for generation in range(40):
        assert await rig.put(await rig.open(generation=generation), b"%d" % generation, VALUE) == OK
    namespace = rig.node.state.namespace("t/n")
    assert namespace is not None
    assert len(rig.node.engine.places.of(namespace.id)) == 16
    await rig.restart()
    assert len(rig.node.engine.places.of(namespace.id)) == 16
    late = await rig.open(generation=99)
    assert len(rig.node.engine.places.others(late.session)) == 8
