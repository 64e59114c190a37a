"""A namespace that is deleted while something of it is still on its way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import OK, SessionExpired, Unavailable
from tests.sim.rig import Rig
from tests.sim.running import on_loop, until

VALUE = bytes(range(256)) * 64


@on_loop
async def test_a_deletion_goes_on_only_when_commits_under_way_have_ended(rig: Rig) -> None:
    m = await rig.begin()
    (row,) = await rig.allocate(m, b"k", size=len(VALUE))
    assert row.extent is not None
    rig.write(m, b"k", row.extent, VALUE)
    gate = rig.target.hold("barrier")
    commit = asyncio.ensure_future(
        rig.node.writes.commit(m.session, [(row.write_id, rig.sums(m, b"k", row.write_id, VALUE))])
    )
    await gate.reached.wait()
    rig.target.fail("remove_host")
    with pytest.raises(Unavailable):
        await rig.node.delete_namespace("t/n", force=True)
    await rig.node.background()  # the session is still ending: nothing of the namespace may go yet
    gate.open.set()
    await commit
    await until(lambda: len(rig.node.writes) == 0, "the commit has ended")
    rig.check()
    await rig.node.sweep()
    await rig.node.background()
    assert not list(rig.node.state.namespaces) and not list(rig.store.scan("blocks"))
    rig.check()


@on_loop
async def test_a_deletion_that_a_start_finishes_leaves_no_owners(tmp_path: Path) -> None:
    """Also when the index comes from a checkpoint, which has no rows of such a namespace."""
    rig = Rig(tmp_path / "drive", checkpoint=tmp_path / "index.checkpoint")
    m = await rig.begin()
    assert await rig.put(m, b"k", VALUE) == OK
    assert await rig.node.checkpoint()
    namespace = rig.node.state.namespace("t/n")
    assert namespace is not None
    await rig.node.state.namespaces.put(replace(namespace, deleting=True))
    await rig.restart()
    for family in ("blocks", "owners", "regions"):
        assert not list(rig.store.scan(family)), family
    rig.check()


@on_loop
async def test_a_deletion_that_was_interrupted_waits_for_no_engine_that_goes_on_asking(rig: Rig) -> None:
    await rig.start()
    await rig.namespace()
    members = [await rig.open() for _ in range(3)]
    assert await rig.put(members[0], b"k", VALUE) == OK
    rig.target.fail("remove_host")
    with pytest.raises(Unavailable):
        await rig.node.delete_namespace("t/n", force=True)
    for member in members:
        with pytest.raises(SessionExpired):
            await rig.put(member, b"more", VALUE)
        member.session.seen_ms = rig.clock.monotonic_ms()
    await rig.node.sweep()
    await rig.node.background()
    assert not list(rig.node.state.namespaces) and not list(rig.store.scan("blocks"))
    rig.check()
