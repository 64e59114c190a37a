"""Commits on the target that ships, when it is killed in the middle of one."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import pytest

from forebay.appliance.dataplane.embedded import EmbeddedTarget
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.supervisor import EmbeddedProgram, Supervisor, SupervisorTimes
from forebay.appliance.dataplane.volumes import claim_drive
from forebay.appliance.namespace.desired_state import Principal
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.node import Node, NodeLimits
from forebay.appliance.namespace.sessions import WriteState
from forebay.appliance.namespace.space import Drive
from forebay.appliance.namespace.store import MemoryStore
from forebay.appliance.namespace.writes import TileSum
from forebay.checksum import crc32c, tile_seed
from forebay.clock import SystemClock
from forebay.errors import Unavailable, WriteExpired
from forebay.ids import LBA_BYTES, BlockKey
from forebay.nvmetcp.spec import Status
from forebay.schema import Schema
from tests.appliance.target.host import Association

ADMIN = Principal("root", bytes(32), 0, admin=True)
REGION = 64 << 20
KEY = BlockKey(b"k")
VALUE = b"\x5a" * 8192
TIMES = SupervisorTimes(probe_interval_s=0.02, backoff_min_s=0.01, backoff_max_s=0.1)
TARGET = """
import os, signal, sys
from pathlib import Path
from forebay.appliance.dataplane.target.__main__ import main

armed, sync = Path(sys.argv.pop(1)), os.fdatasync

def die_once(fd):
    if armed.exists():
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    sync(fd)

os.fdatasync = die_once
sys.exit(main())
"""
"""A target that dies once: where it would flush, which in a seal is when the grants are revoked."""


class Running:
    """A node over a target process; ``armed`` is the file that lets the target's next flush be its end."""

    def __init__(self, node: Node, supervisor: Supervisor, armed: Path) -> None:
        self.node = node
        self.supervisor = supervisor
        self.armed = armed

    async def restarted(self) -> None:
        async with asyncio.timeout(30):
            while not self.supervisor.restarts or not self.supervisor.serving:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Running]:
    rng, store, armed = random.Random(1), MemoryStore(), path / "armed"
    meta = await NodeMeta.load(store, rng.randbytes, REGION)
    await meta.name_drive("drive0", str(claim_drive(path / "drive", meta.node_id).drive_uuid))
    nodes: list[Node] = []

    async def replay() -> None:
        for node in nodes:
            await node.replay()

    program = EmbeddedProgram((sys.executable, "-c", TARGET, str(armed)))
    supervisor = Supervisor(path / "run", meta.node_id, replay, times=TIMES, program=program)
    await supervisor.start()
    target = EmbeddedTarget(JsonRpcClient(supervisor.socket), node="commits")
    try:
        nodes.append(
            await Node.open(
                store,
                meta,
                target,
                drives=[Drive("drive0", str(path / "drive"), 4)],
                limits=NodeLimits(REGION, max_blocks=1 << 12),
                clock=SystemClock(),
                random=rng.randbytes,
            )
        )
        yield Running(nodes[0], supervisor, armed)
        await nodes[0].close()
    finally:
        await target.close()
        await supervisor.stop()


@pytest.mark.parametrize("retried", [True, False])
async def test_a_target_killed_between_revocation_and_flush(tmp_path: Path, retried: bool) -> None:
    """The commit is not acknowledged, then or later: a flush that failed would not be told of again."""
    async with running(tmp_path) as rig:
        node = rig.node
        await node.create_namespace("t/n")
        session, host, _ = await node.open_session(
            ADMIN, "t/n", schema_cbor=Schema.opaque().cbor, generation=0, scopes=(), client="test"
        )
        (row,) = await node.writes.allocate(
            session, [KEY], [len(VALUE)], hosts=[host], ttl_ms=60_000, tails=[b""], retain_until_ms=0
        )
        extent = row.extent
        assert extent is not None
        endpoint = (await node.endpoints(session))[0]
        lba, identity = extent.offset_bytes // LBA_BYTES, {"host_nqn": host.nqn, "host_id": UUID(host.host_id)}

        def write() -> int:
            with Association(endpoint.port, endpoint.subsystem_nqn, **identity) as initiator:  # type: ignore[arg-type]
                return initiator.io[0].write(lba, VALUE, nsid=node.volumes(session)[0].nsid, tag=row.tag).status

        assert await asyncio.to_thread(write) == 0
        stored = session.stored_keys([KEY])[0]
        seed = tile_seed(stored, 0, row.write_id)
        rows = [(row.write_id, [TileSum(0, crc32c(VALUE, seed))])]
        rig.armed.touch()
        assert await node.writes.commit(session, rows) == [Unavailable.code]
        assert not rig.armed.exists()
        assert node.engine.store.get("blocks", stored) is None and node.engine.index.count == 0
        await rig.restarted()
        assert session.writes[row.write_id].state is WriteState.WRITING
        if retried:
            assert await asyncio.to_thread(write) == 0, "its grant was replayed"
            assert await node.writes.commit(session, rows) == [WriteExpired.code]
            assert node.engine.store.get("blocks", stored) is None and node.engine.index.count == 0
        await node.writes.abort(session, [row.write_id])
        assert not node.engine.space.used_bytes(session.namespace)
        assert node.engine.space.take(session.namespace, 0, extent.length_bytes, 1) == [extent]
        assert await asyncio.to_thread(write) == Status.ACCESS_DENIED
