"""The checkpoint of the index: what it holds, what the change log adds, and what is never believed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import cbor2
import pytest

from forebay.appliance.namespace import checkpoint
from forebay.appliance.namespace.records import Durability
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.errors import OK, NoSpace
from forebay.ids import BlockKey
from forebay.schema import Schema
from tests.sim.rig import Member, Rig
from tests.sim.running import on_loop

VALUE = bytes(range(256)) * 64
KEYS = [b"k%03d" % i for i in range(40)]


@pytest.fixture(params=["memory", "rocksdb"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    store = MemoryStore() if request.param == "memory" else RocksStore(tmp_path / "db")
    request.addfinalizer(store.close)
    return Rig(tmp_path / "drive", store=store, checkpoint=tmp_path / checkpoint.FILE_NAME)


async def _filled(rig: Rig) -> Member:
    m = await rig.begin()
    for key in KEYS:
        assert await rig.put(m, key, VALUE) == OK
    return m


async def _reopened(rig: Rig, *, clean: bool = False) -> Member:
    await rig.restart(clean=clean)
    rig.check()
    return await rig.open()


@on_loop
async def test_a_start_after_a_checkpoint_finds_what_came_before_and_after(rig: Rig) -> None:
    m = await _filled(rig)
    assert await rig.node.checkpoint()
    await rig.node.blocks.delete(m.session, [BlockKey(k) for k in KEYS[:5]])
    assert await rig.put(m, b"late", VALUE) == OK
    assert await rig.put(m, KEYS[0], VALUE) == OK  # gone and back again
    m = await _reopened(rig)
    assert rig.present(m, *KEYS, b"late") == [True] + [False] * 4 + [True] * 36
    for key in (*KEYS[5:], KEYS[0], b"late"):
        assert await rig.get(m, key) == VALUE


@on_loop
async def test_a_clean_stop_leaves_a_checkpoint_and_nothing_to_read_again(rig: Rig) -> None:
    await _filled(rig)
    m = await _reopened(rig, clean=True)
    assert all(rig.present(m, *KEYS))
    assert list(rig.node.engine.changes.after(0)) == []
    # numbers go on where they were: a later checkpoint is not taken for an older one
    assert rig.node.engine.changes.last >= len(KEYS)


@on_loop
async def test_blocks_of_several_grids_keep_their_own_checksums(rig: Rig) -> None:
    """One pool a grid; as many bytes of checksums in either, so that a file that mixed them up would load."""
    await rig.start()
    await rig.namespace()
    grid, opaque = await rig.open(), await rig.open(schema=Schema.opaque())
    assert await rig.put(grid, b"g", VALUE) == OK
    for i in range(4):
        assert await rig.put(opaque, b"%d" % i, VALUE[: 100 + i]) == OK
    await rig.restart(clean=True)
    grid, opaque = await rig.open(), await rig.open(schema=Schema.opaque())
    assert await rig.get(grid, b"g") == VALUE
    assert [await rig.get(opaque, b"%d" % i) for i in range(4)] == [VALUE[: 100 + i] for i in range(4)]


@on_loop
async def test_the_order_of_use_survives(rig: Rig) -> None:
    m = await _filled(rig)
    assert await rig.get(m, KEYS[0]) == VALUE
    before = rig.node.engine.index
    order = before.tick[before.find(before.digests(m.session.stored_keys([BlockKey(k) for k in KEYS])))].argsort()
    m = await _reopened(rig, clean=True)
    after = rig.node.engine.index
    again = after.tick[after.find(after.digests(m.session.stored_keys([BlockKey(k) for k in KEYS])))].argsort()
    assert (order == again).all() and order[-1] == 0


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "version", "node"])
@on_loop
async def test_a_bad_file_means_a_rebuild(rig: Rig, harm: str) -> None:
    await _filled(rig)
    assert await rig.node.checkpoint()
    path = rig.checkpoint
    assert path is not None
    data = bytearray(path.read_bytes())
    if harm == "cut":
        del data[len(data) // 2 :]
    elif harm == "flip":
        data[len(data) // 2] ^= 1
    elif harm == "empty":
        data.clear()
    elif harm == "version":
        data[:] = bytes(data).replace(b"v\x01", b"v\x02", 1)
    else:
        data[:] = bytes(data).replace(rig.node.meta.node_id, bytes(16), 1)
    path.write_bytes(data)
    m = await _reopened(rig)
    for key in KEYS:
        assert await rig.get(m, key) == VALUE


@on_loop
async def test_a_checkpoint_that_the_records_never_reached_is_not_believed(rig: Rig) -> None:
    """Metadata restored from an older copy, the file left from later."""
    m = await _filled(rig)
    assert await rig.node.checkpoint()
    path = rig.checkpoint
    assert path is not None
    await rig.node.blocks.delete(m.session, [BlockKey(KEYS[0])])
    with open(path, "rb") as file:
        header = cbor2.loads(checkpoint._read_part(file, 1 << 20))
        rest = file.read()
    with open(path, "wb") as file:
        checkpoint._write_part(file, cbor2.dumps(header | {"change": header["change"] + 100}, canonical=True))
        file.write(rest)
    m = await _reopened(rig)
    assert rig.present(m, *KEYS) == [False] + [True] * 39


@on_loop
async def test_a_checkpoint_older_than_the_log_of_changes_is_not_believed(rig: Rig) -> None:
    """As a power loss leaves it when the newer one has not its name yet."""
    m = await _filled(rig)
    assert await rig.node.checkpoint()
    assert rig.checkpoint is not None
    older = rig.checkpoint.read_bytes()
    await rig.node.blocks.delete(m.session, [BlockKey(k) for k in KEYS[:5]])
    assert await rig.put(m, b"late", VALUE) == OK
    assert await rig.node.checkpoint()
    rig.checkpoint.write_bytes(older)
    m = await _reopened(rig)
    assert rig.present(m, *KEYS, b"late") == [False] * 5 + [True] * 36
    assert await rig.get(m, b"late") == VALUE


@on_loop
async def test_a_fuzzy_copy_is_made_whole_by_the_log(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change between the parts of the copy: some stand in it twice, some are of blocks that ended."""
    monkeypatch.setattr(checkpoint, "_PART_ROWS", 4)
    m = await _filled(rig)
    rng = random.Random(5)
    saving = asyncio.ensure_future(rig.node.checkpoint())
    alive = set(KEYS)
    while not saving.done():
        key = rng.choice(KEYS)
        if key in alive:
            await rig.node.blocks.delete(m.session, [BlockKey(key)])
            alive.discard(key)
        else:
            assert await rig.put(m, key, VALUE) == OK
            alive.add(key)
        await asyncio.sleep(0)
    assert saving.result()
    m = await _reopened(rig)
    assert rig.present(m, *KEYS) == [k in alive for k in KEYS]
    for key in alive:
        assert await rig.get(m, key) == VALUE


@on_loop
async def test_blocks_of_unknown_flush_are_doubted_after_a_kill(rig: Rig) -> None:
    await rig.start()
    await rig.namespace(durability=int(Durability.VERIFY))
    m = await rig.open()
    assert await rig.put(m, b"k", VALUE) == OK
    assert await rig.node.checkpoint()
    m = await _reopened(rig)
    assert rig.node.recovered.suspects == 1
    assert await rig.get(m, b"k") == VALUE
    assert rig.node.engine.counters["blocks_verified"] == 1


@on_loop
async def test_the_copy_is_given_up_while_a_delete_may_not_be_in_the_log(rig: Rig) -> None:
    m = await _filled(rig)
    writing = rig.store.write

    async def full(ops: Sequence[Op], *, durable: bool = True) -> None:
        raise NoSpace("the drive is full")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(NoSpace):
        patch.setattr(rig.store, "write", full)
        await rig.node.blocks.delete(m.session, [BlockKey(KEYS[0])])
    assert rig.store.write == writing
    assert not await rig.node.checkpoint()
    assert rig.checkpoint is not None and not rig.checkpoint.exists()
    used = rig.node.engine.space.used_bytes(m.session.namespace)
    await rig.node.sweep()  # the delete is written after all, and its extent is free
    assert rig.node.engine.space.used_bytes(m.session.namespace) < used
    rig.check()
    assert await rig.node.checkpoint()
    m = await _reopened(rig)
    assert rig.present(m, *KEYS[:2]) == [False, True]
