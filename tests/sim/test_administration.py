"""What an operator is told while something is wrong."""

from __future__ import annotations

import pytest

from forebay.appliance.control.administration import NOT_ANSWERING, Administration
from forebay.appliance.namespace import node as node_module
from forebay.errors import OK, Busy
from tests.sim.rig import ADMIN, Rig
from tests.sim.running import on_loop

VALUE = bytes(range(256)) * 64


@on_loop
async def test_status_is_told_while_the_target_does_not_answer(rig: Rig) -> None:
    m = await rig.begin()
    assert await rig.put(m, b"k", VALUE) == OK
    administration = Administration(rig.node, "node", lambda: 3)
    assert (await administration.status()).target.kind != NOT_ANSWERING
    rig.target.fail("info")
    view = await administration.status()
    assert view.target.kind == NOT_ANSWERING and view.target.restarts == 3
    assert view.blocks == 1 and view.sessions == 1


@on_loop
async def test_a_session_has_no_more_processes_than_its_bound(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_MAX_HOSTS", 2)
    m = await rig.begin()
    await rig.join(m)
    with pytest.raises(Busy):
        await rig.node.join_session(ADMIN, m.session.token)
    assert len(m.session.hosts) == 2
