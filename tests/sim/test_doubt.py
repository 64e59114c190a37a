"""A reader whose bytes did not verify tells the node, which looks itself."""

from __future__ import annotations

from forebay.errors import OK
from forebay.ids import BlockKey, VolumeId
from tests.sim.rig import Member, Rig
from tests.sim.running import on_loop

VALUE = bytes(range(256)) * 64
KEYS = [b"a", b"b", b"c"]


async def _stored(rig: Rig) -> Member:
    m = await rig.begin()
    for key in KEYS:
        assert await rig.put(m, key, VALUE) == OK
    return m


@on_loop
async def test_a_block_that_is_bad_on_media_is_dropped_and_can_be_put_again(rig: Rig) -> None:
    m = await _stored(rig)
    located = await rig.node.blocks.acquire(m.session, [BlockKey(b"b")], 1000)
    rig.target.corrupt(VolumeId(int(located.volumes[0])), int(located.offsets[0]) + 7)
    rig.node.blocks.release(m.session, [located.lease])
    await rig.node.blocks.doubt(m.session, [BlockKey(k) for k in (b"c", b"b", b"b", b"nobody")])
    assert rig.present(m, *KEYS) == [True, False, True]
    assert rig.node.engine.counters["blocks_bad"] == 1
    assert await rig.put(m, b"b", VALUE) == OK
    assert [await rig.get(m, k) for k in KEYS] == [VALUE] * 3
    rig.check()


@on_loop
async def test_a_reader_that_lies_costs_a_look_and_no_block(rig: Rig) -> None:
    m = await _stored(rig)
    await rig.node.blocks.doubt(m.session, [BlockKey(k) for k in KEYS])
    assert rig.present(m, *KEYS) == [True] * 3
    assert rig.node.engine.counters["blocks_verified"] == 3
    rig.check()


@on_loop
async def test_a_block_in_doubt_is_not_served_while_the_target_cannot_look(rig: Rig) -> None:
    m = await _stored(rig)
    rig.target.fail("checksums", times=2)
    await rig.node.blocks.doubt(m.session, [BlockKey(b"a")])
    assert await rig.get(m, b"a") is None
    assert await rig.get(m, b"a") == VALUE
