"""Many sessions at once: every call overlaps with every other, with faults, fences, restarts of the target and time.

What `test_machine` does in sequence happens here between any two awaits. Writers, readers and an administrator run as
tasks over a target and a store that give way at every call, seeded, so that a failure can be repeated by its seed. A
reader may miss; it may never see other bytes than were stored under its key, nor see leased bytes change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.errors import OK, ConnectionLost, ForebayError, TargetRefused, Unavailable, WriteFenced
from forebay.ids import LBA_BYTES, BlockKey
from forebay.schema import Schema
from tests.conftest import LONG
from tests.sim.rig import GRID, Member, Rig
from tests.sim.running import on_loop
from tests.sim.target import SimHost

OPAQUE = Schema.opaque()
GRID_BYTES = GRID.groups[0].layout().value_bytes
KEYS = [b"%d" % i for i in range(12)]
FAILING = [
    *("grant", "seal", "revoke", "barrier"),
    *("prepare_region", "release_region", "add_host", "remove_host", "teardown_host"),
]
AWAY = (ConnectionLost, TargetRefused, WriteFenced)


class LoggedStore(MemoryStore):
    """Applies batches in order, a little later than they were handed over, as a log does."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._turn = asyncio.Lock()

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        async with self._turn:
            for _ in range(self._rng.randrange(4)):
                await asyncio.sleep(0)
            await super().write(ops, durable=durable)


class Storm:
    """The tasks of one run."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.members: list[Member] = []
        self.counter = 0
        self.over = False

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)

    def value(self, key: bytes, size: int) -> bytes:
        self.counter += 1
        line = b"%s=%d;" % (key, self.counter)
        return (line * (size // len(line) + 1))[:size]

    def reconnect(self, member: Member) -> None:
        if not self.rig.target.controllers(member.identity):
            member.host = SimHost(self.rig.target, "t", member.identity)

    async def member(self) -> Member:
        alive = [m for m in self.members if m.session.state.value == "open"]
        if len(alive) > 3 or (alive and self.rng.random() < 0.9):
            return self.rng.choice(alive)
        name, schema = self.rng.choice(["t/a", "t/b"]), self.rng.choice([GRID, OPAQUE])
        member = await self.rig.open(name, schema)
        self.members.append(member)
        return member

    # ------------------------------------------------------------------------------------------------ tasks

    async def writer(self) -> None:
        while not self.over:
            await self.pause()
            with suppress(ForebayError):
                await self.write_some(await self.member())

    async def write_some(self, m: Member) -> None:
        keys = self.rng.sample(KEYS, self.rng.randint(1, 4))
        size = GRID_BYTES if m.session.schema.engine == "sim" else self.rng.choice([1, 3, 9, 30]) * LBA_BYTES - 7
        ttl_ms = self.rng.choice([40, 30_000])
        until_ms = self.rig.clock.monotonic_ms() + ttl_ms
        rows = await self.rig.allocate(m, *keys, size=size, ttl_ms=ttl_ms)
        for key, row in zip(keys, rows, strict=True):
            if row.extent is None:
                continue
            value = self.value(key, size)
            layout = m.session.schema.groups[0].layout(size)
            try:
                self.reconnect(m)
                for at, where, length in zip(layout.value_offsets, layout.offsets, layout.lengths, strict=True):
                    if self.rig.clock.monotonic_ms() >= until_ms:
                        raise WriteFenced  # a client begins nothing late: the place may be another block of its own
                    tile = value[at : at + length].ljust(-(-length // LBA_BYTES) * LBA_BYTES, b"\0")
                    flying = m.host.submit(row.extent.volume, row.extent.offset_bytes + where, tile)
                    await self.pause()
                    self.rig.target.land(flying)
            except AWAY:
                await self.rig.node.writes.abort(m.session, [row.write_id], quiesced=[m.identity])
                continue
            fate = self.rng.random()
            if fate < 0.1:
                await self.rig.node.writes.abort(m.session, [row.write_id])
            elif fate > 0.2:
                await self.rig.node.writes.commit(
                    m.session, [(row.write_id, self.rig.sums(m, key, row.write_id, value))]
                )

    async def reader(self) -> None:
        while not self.over:
            await self.pause()
            with suppress(ForebayError):
                m = await self.member()
                key = self.rng.choice(KEYS)
                located = await self.rig.node.blocks.acquire(m.session, [BlockKey(key)] * self.rng.randint(1, 2), 10**7)
                if located.status[0] != OK:
                    continue
                seen = set()
                for _ in range(3):
                    with suppress(*AWAY):
                        self.reconnect(m)
                        if m.session.state.value == "open":  # its leases end with it
                            seen.add(self.rig.read(m, key, located))
                    await self.pause()
                assert len(seen) <= 1 and all(v.startswith(key + b"=") for v in seen), "leased bytes changed"
                self.rig.node.blocks.release(m.session, [located.lease])

    async def meddler(self) -> None:
        while not self.over:
            await self.pause()
            with suppress(ForebayError):
                m = await self.member()
                blocks, keys = self.rig.node.blocks, [BlockKey(k) for k in self.rng.sample(KEYS, 3)]
                act = self.rng.random()
                if act < 0.4:
                    await blocks.delete(m.session, keys)
                elif act < 0.7:
                    await blocks.pin(m.session, keys, self.rng.random() < 0.5, self.rng.random() < 0.2)
                elif act < 0.8:
                    self.members.append(await self.rig.join(m))
                elif act < 0.9:
                    await self.rig.node.end_session(m.session)
                else:
                    blocks.touch(m.session, keys)

    async def administrator(self, rounds: int) -> None:
        node, target = self.rig.node, self.rig.target
        for _ in range(rounds):
            await self.pause()
            act = self.rng.random()
            if act < 0.3:
                self.rig.clock.advance(self.rng.choice([1, 20, 60]))
                for session in node.sessions:
                    if self.rng.random() < 0.97:
                        session.seen_ms = self.rig.clock.monotonic_ms()
            elif act < 0.6:
                await node.sweep()
                await node.background()
            elif act < 0.7:
                await node.update_namespace("t/a", quota_bytes=self.rng.choice([0, 40, 80]) * LBA_BYTES)
            elif act < 0.8:
                target.fail(self.rng.choice(FAILING), done=self.rng.random() < 0.5)
            elif act < 0.85:
                await node.checkpoint()
            elif act < 0.9:
                with suppress(Unavailable):
                    await node.release_empty_regions()
            elif act < 0.94:
                target.restart()
                for _ in range(5):  # as the supervisor, which tries again
                    with suppress(ForebayError):
                        await node.replay()
                        break
            elif act < 0.96:
                with suppress(ForebayError):
                    await node.delete_namespace("t/b", force=True)
                with suppress(ForebayError):
                    await self.rig.namespace("t/b")
        self.over = True

    async def run(self, rounds: int) -> None:
        for name in ("t/a", "t/b"):
            await self.rig.namespace(name)
        others = [self.writer(), self.writer(), self.writer(), self.reader(), self.reader(), self.meddler()]
        async with asyncio.TaskGroup() as tasks:
            for one in others:
                tasks.create_task(one)
            tasks.create_task(self.administrator(rounds))

    async def settle(self) -> None:
        """Nothing runs any more: what was left half-way comes to its end."""
        node, target = self.rig.node, self.rig.target
        target.heal()
        target.restart()
        await node.replay()
        drives = node.engine.space.drives.values()
        while not all(drive.writable for drive in drives):  # one that failed is looked at, by a thread
            await node.drives.look()
            self.rig.clock.advance(1_000)
            await asyncio.sleep(0.001)
        for _ in range(3):
            self.rig.clock.advance(31_000)
            for session in node.sessions:
                session.seen_ms = self.rig.clock.monotonic_ms()
            await node.sweep()
            await node.background()
        assert len(node.writes) == 0 and not target.grants
        self.rig.check()
        for session in node.sessions:
            await node.end_session(session)
        index = node.engine.index
        assert not index.leases.any() and not node.retirement._undurable
        assert not target.allowed and len(node.sessions) == 0
        self.rig.check()


@pytest.mark.parametrize("seed", range(200 if LONG else 12))
@on_loop
async def test_a_storm(rig: Rig, seed: int) -> None:
    rig.capacity_regions = 5
    if seed % 4 == 0:  # it is written by threads, so that these runs cannot be repeated exactly
        rig.checkpoint = rig.drive.with_suffix(".checkpoint")
    rig.store = LoggedStore(random.Random(seed))
    await rig.start()
    storm = Storm(rig, seed)
    await storm.run(rounds=150)
    await storm.settle()
    before = {key for key, _ in rig.store.scan("blocks")}
    await rig.restart(clean=seed % 2 == 0)
    assert rig.node.recovered.dropped == 0
    rig.check()
    assert {key for key, _ in rig.store.scan("blocks")} == before
    for name in ("t/a", "t/b"):
        if rig.node.state.namespace(name) is None:
            continue
        for schema in (GRID, OPAQUE):
            m = await rig.open(name, schema)
            for key in KEYS:
                found = await rig.get(m, key)
                assert found is None or found.startswith(key + b"=")
