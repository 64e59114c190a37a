"""The engine against a naive model: any sequence of calls, faults of the target, kills and starts.

The model knows what was acknowledged. After every step the engine must have exactly that, less what it said it evicted
(and it may evict only what nobody leased or pinned); every leased place must still hold the bytes it was leased for;
no extent may have two owners, and every byte must be accounted for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.appliance.namespace import checkpoint, recovery
from forebay.appliance.namespace.blocks import Located
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import MemoryStore
from forebay.appliance.namespace.writes import TileSum
from forebay.errors import (
    OK,
    AlreadyExists,
    ConnectionLost,
    Pending,
    QuotaExceeded,
    SessionExpired,
    StaleGeneration,
    TargetRefused,
    Unavailable,
    WriteFenced,
)
from forebay.ids import LBA_BYTES, BlockKey, Extent, StoredKey, WriteId
from forebay.index import ABSENT
from forebay.schema import Schema
from tests.conftest import LONG
from tests.sim.rig import GRID, REGION, Member, Rig
from tests.sim.target import SimHost

T = TypeVar("T")
OPAQUE = Schema.opaque()
KEYS = [b"%d" % i for i in range(6)]
SIZES = [LBA_BYTES - 1, 3 * LBA_BYTES, 5 * LBA_BYTES, 40 * LBA_BYTES]
GRID_BYTES = GRID.groups[0].layout().value_bytes
QUOTA = 64 * LBA_BYTES


class _Complaints(logging.Handler):
    """What a start found wrong: nothing may be, whatever happened before."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@dataclass
class Attempt:
    """A write that was allocated and is not known to have ended."""

    member: Member
    key: bytes
    stored: StoredKey
    write_id: WriteId
    extent: Extent
    value: bytes
    sums: list[TileSum]
    deadline_ms: int
    written: bool = False


@dataclass
class Held:
    """A lease: what was promised, and until when."""

    member: Member
    lease: int
    until_ms: int
    places: list[tuple[StoredKey, Extent, bytes, bytes]] = field(default_factory=list)  # with value and write id


class EngineMachine(RuleBasedStateMachine):
    """See the module."""

    rocks = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        drive = Path(self.folder.name) / "drive"
        store = RocksStore(Path(self.folder.name) / "metadata") if self.rocks else MemoryStore()
        self.rig = Rig(drive, capacity_regions=3, store=store, checkpoint=Path(self.folder.name) / checkpoint.FILE_NAME)
        self.members: list[Member] = []
        self.visible: dict[StoredKey, tuple[bytes, WriteId]] = {}
        self.attempts: list[Attempt] = []
        self.over: list[Attempt] = []  # their extents may be others' by now
        self.held: list[Held] = []
        self.pinned: dict[StoredKey, set[int]] = {}  # by session; 0 for good
        self.minimum = 0
        self.quota = 0
        self.sequence = 0
        self.counter = 0
        self.complaints = _Complaints()
        logging.getLogger(recovery.__name__).addHandler(self.complaints)
        logging.getLogger(checkpoint.__name__).addHandler(self.complaints)

    def teardown(self) -> None:
        logging.getLogger(recovery.__name__).removeHandler(self.complaints)
        logging.getLogger(checkpoint.__name__).removeHandler(self.complaints)
        self.rig.store.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def attempt(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result, or None when the target failed as it was told to, or the session or generation is over."""
        try:
            return self.run(work)
        except (Unavailable, SessionExpired, StaleGeneration, ConnectionLost, TargetRefused):
            return None

    @initialize(durability=st.integers(0, 2))
    def begin(self, durability: int) -> None:
        self.run(self.rig.start())
        self.run(self.rig.namespace(durability=durability))
        self.open(0, False)
        self.open(0, True)

    # ------------------------------------------------------------------------------------------------ sessions

    @rule(generation=st.integers(0, 2), grid=st.booleans())
    def open(self, generation: int, grid: bool) -> None:
        if len(self.members) < 5:
            member = self.attempt(self.rig.open(schema=GRID if grid else OPAQUE, generation=generation))
            if member is not None:
                assert generation >= self.minimum
                self.members.append(member)

    def alive(self, member: Member) -> bool:
        return any(s is member.session for s in self.rig.node.sessions) and member.session.state.value == "open"

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        member = _pick(data, self.members)
        self.attempt(self.rig.node.end_session(member.session))
        self.bury()

    def bury(self) -> None:
        """Forget what belonged to sessions that ended."""
        gone = [m for m in self.members if not self.alive(m)]
        self.members = [m for m in self.members if self.alive(m)]
        self.over += [a for a in self.attempts if a.member in gone]
        self.attempts = [a for a in self.attempts if a.member not in gone]
        self.held = [h for h in self.held if h.member not in gone]
        for holders in self.pinned.values():
            holders.difference_update(id(m) for m in gone)

    def reconnect(self, member: Member) -> None:
        if not self.rig.target.controllers(member.identity):
            member.host = SimHost(self.rig.target, "t", member.identity)

    # ------------------------------------------------------------------------------------------------ writing

    @precondition(lambda self: self.members)
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
        size=st.sampled_from(SIZES),
        ttl_ms=st.sampled_from([1_000, 30_000]),
        finish=st.booleans(),
    )
    def put(self, data: st.DataObject, keys: list[bytes], size: int, ttl_ms: int, finish: bool) -> None:
        self.store(_pick(data, self.members), keys, size, ttl_ms, finish=finish)

    def store(self, member: Member, keys: list[bytes], size: int, ttl_ms: int, *, finish: bool) -> None:
        grid = member.session.schema is not None and member.session.schema.engine != "opaque"
        size = GRID_BYTES if grid else size
        used_before = self.rig.node.engine.space.used_bytes(member.session.namespace)
        before = set(self.visible)  # making room for one key may evict another of the same call
        rows = self.attempt(self.rig.allocate(member, *keys, size=size, ttl_ms=ttl_ms))
        self.learn()
        if rows is None:
            return
        assert member.session.generation >= self.minimum
        used = self.rig.node.engine.space.used_bytes(member.session.namespace)
        if self.quota and any(r.status == OK for r in rows):
            assert used <= max(self.quota, used_before)
        stored_keys = member.session.stored_keys([BlockKey(k) for k in keys])
        started = []
        for key, stored, row in zip(keys, stored_keys, rows, strict=True):
            if row.status == AlreadyExists.code:
                assert stored in before
            if row.status == QuotaExceeded.code:
                assert self.quota
            if row.extent is None:
                continue
            assert stored not in self.visible and all(a.stored != stored for a in self.attempts)
            self.counter += 1
            value = (b"%8d" % self.counter * (size // 8 + 1))[:size]
            sums = self.rig.sums(member, key, row.write_id, value)
            until_ms = self.rig.clock.monotonic_ms() + ttl_ms
            started.append(Attempt(member, key, stored, row.write_id, row.extent, value, sums, until_ms))
        self.attempts += started
        for one in started if finish else ():
            self.write(one)
            self.commit(one, list(range(len(one.sums))))

    def write(self, one: Attempt) -> None:
        self.reconnect(one.member)
        self.rig.write(one.member, one.key, one.extent, one.value)
        one.written = True

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def write_and_commit(self, data: st.DataObject) -> None:
        one = _pick(data, self.attempts)
        if not one.written:
            try:
                self.write(one)
            except WriteFenced:  # only where taking it back was begun and did not come to its end
                assert one.deadline_ms <= self.rig.clock.monotonic_ms()
                return
        tiles = data.draw(st.lists(st.integers(0, len(one.sums) - 1), min_size=1, unique=True))
        self.commit(one, tiles)

    def commit(self, one: Attempt, tiles: list[int]) -> None:
        status = self.run(
            self.rig.node.writes.commit(one.member.session, [(one.write_id, [one.sums[t] for t in tiles])])
        )[0]
        if status == OK:
            assert one.stored not in self.visible and one.member.session.generation >= self.minimum
            self.visible[one.stored] = (one.value, one.write_id)
        elif status == StaleGeneration.code:
            assert one.member.session.generation < self.minimum
        else:
            assert status in (Pending.code, Unavailable.code), status
            assert status == Unavailable.code or len(one.sums) > 1
            return
        self.attempts.remove(one)
        self.over.append(one)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), quiesced=st.booleans())
    def abort(self, data: st.DataObject, quiesced: bool) -> None:
        one = _pick(data, self.attempts)
        hosts = [one.member.identity] if quiesced else []
        done = self.attempt(self.rig.node.writes.abort(one.member.session, [one.write_id], quiesced=hosts))
        if done is None:
            one.deadline_ms = 0  # the next sweep fences it
        else:
            self.attempts.remove(one)
            self.over.append(one)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def write_to_an_extent_that_was_mine(self, data: st.DataObject) -> None:
        """Whoever had a grant once and has it no more can change nothing."""
        one = _pick(data, self.over)
        try:
            self.reconnect(one.member)
            one.member.host.write(one.extent.volume, one.extent.offset_bytes, b"\xff" * LBA_BYTES)
        except (ConnectionLost, WriteFenced, TargetRefused):
            return
        at = one.extent.offset_bytes
        mine = [
            a
            for a in self.attempts
            if a.member is one.member and a.extent.offset_bytes <= at < a.extent.offset_bytes + a.extent.length_bytes
        ]
        assert mine, "a write without a grant reached media"
        for again in mine:
            again.written = False

    # ------------------------------------------------------------------------------------------------ reading

    @precondition(lambda self: self.members)
    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5), ttl_ms=st.integers(1, 5_000))
    def acquire(self, data: st.DataObject, keys: list[bytes], ttl_ms: int) -> None:
        self.lease(_pick(data, self.members), keys, ttl_ms)

    def lease(self, member: Member, keys: list[bytes], ttl_ms: int) -> None:
        blocks = [BlockKey(k) for k in keys]
        located = self.attempt(self.rig.node.blocks.acquire(member.session, blocks, ttl_ms))
        self.learn()
        if located is None:
            return
        assert member.session.generation >= self.minimum
        held = Held(member, located.lease, self.rig.clock.monotonic_ms() + ttl_ms)
        for i, stored in enumerate(member.session.stored_keys(blocks)):
            if located.status[i] == Unavailable.code:
                continue  # a suspect, while the target was told to fail
            assert (located.status[i] == OK) == (stored in self.visible), (located.status[i], stored)
            if located.status[i] == OK:
                value, write_id = self.visible[stored]
                extent = _extent(located, i)
                assert located.write_ids[i].tobytes() == write_id and located.value_lengths[i] == len(value)
                held.places.append((stored, extent, value, write_id))
        if held.lease:
            self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = _pick(data, self.held)
        self.rig.node.blocks.release(held.member.session, [held.lease])
        self.held.remove(held)

    @precondition(lambda self: self.members)
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True),
        pinned=st.booleans(),
        persistent=st.booleans(),
    )
    def pin(self, data: st.DataObject, keys: list[bytes], pinned: bool, persistent: bool) -> None:
        member = _pick(data, self.members)
        blocks = [BlockKey(k) for k in keys]
        status = self.attempt(self.rig.node.blocks.pin(member.session, blocks, pinned, persistent))
        if status is None:
            return
        holder = 0 if persistent else id(member)
        for stored, code in zip(member.session.stored_keys(blocks), status.tolist(), strict=True):
            if code == OK:
                holders = self.pinned.setdefault(stored, set())
                (holders.add if pinned else holders.discard)(holder)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    def delete(self, data: st.DataObject, keys: list[bytes]) -> None:
        member = _pick(data, self.members)
        blocks = [BlockKey(k) for k in keys]
        if self.attempt(self.rig.node.blocks.delete(member.session, blocks)) is not None:
            for stored in member.session.stored_keys(blocks):
                self.visible.pop(stored, None)
                self.pinned.pop(stored, None)
        self.learn()

    @precondition(lambda self: self.members)
    @rule(seed=st.integers(0, 2**32))
    def churn(self, seed: int) -> None:
        """Many ordinary calls, so that space gets tight and regions change hands."""
        rng = random.Random(seed)
        for _ in range(20):
            member = rng.choice(self.members)
            keys = rng.sample(KEYS, rng.randint(1, len(KEYS)))
            act = rng.random()
            if act < 0.5:
                self.store(member, keys, rng.choice(SIZES), 30_000, finish=rng.random() < 0.9)
            elif act < 0.7:
                self.lease(member, keys, rng.choice([1, 2_000]))
            elif self.held and act < 0.8:
                held = self.held.pop(rng.randrange(len(self.held)))
                self.rig.node.blocks.release(held.member.session, [held.lease])
            elif act < 0.9:
                self.attempt(self.rig.node.blocks.delete(member.session, [BlockKey(k) for k in keys]))
                self.learn()
            else:
                self.rig.clock.advance(1)
                self.sweep()

    # ------------------------------------------------------------------------------------------------ time and state

    @rule(ms=st.sampled_from([1, 400, 3_000, 12_000]), data=st.data())
    def time_passes(self, ms: int, data: st.DataObject) -> None:
        beating = data.draw(st.lists(st.booleans(), min_size=len(self.members), max_size=len(self.members)))
        self.rig.clock.advance(ms)
        for member, beats in zip(self.members, beating, strict=True):
            if beats:
                member.session.seen_ms = self.rig.clock.monotonic_ms()
        self.sweep()
        self.run(self.rig.node.background())
        self.learn()

    @rule()
    def scrub(self) -> None:
        """Whatever happened: what is visible has the bytes that its checksums are of."""
        scrubber = self.rig.node.scrubber
        scrubber.stop()
        scrubber.start(rate_bytes_per_s=1 << 40)
        for _ in range(4):
            self.rig.clock.advance(1)
            self.run(scrubber.step())
        assert scrubber.report().bad == 0
        self.sweep()

    def sweep(self) -> None:
        self.run(self.rig.node.sweep())
        now_ms = self.rig.clock.monotonic_ms()
        self.held = [h for h in self.held if h.until_ms > now_ms]
        self.bury()
        ended = [a for a in self.attempts if a.deadline_ms <= now_ms and a.write_id not in a.member.session.writes]
        self.over += ended
        self.attempts = [a for a in self.attempts if a not in ended]

    @rule(generation=st.integers(0, 2))
    def raise_the_minimum(self, generation: int) -> None:
        if generation >= self.minimum:
            self.run(self.rig.node.update_namespace("t/n", min_generation=generation))
            self.minimum = generation

    @rule(quota=st.sampled_from([0, QUOTA, QUOTA // 2]))
    def change_the_quota(self, quota: int) -> None:
        self.run(self.rig.node.update_namespace("t/n", quota_bytes=quota))
        self.quota = quota

    @rule(
        method=st.sampled_from(
            [
                "grant",
                "seal",
                "revoke",
                "barrier",
                "prepare_region",
                "release_region",
                "checksums",
                "remove_host",
                "teardown_host",
                "add_host",
            ]
        ),
        done=st.booleans(),
    )
    def the_target_will_fail(self, method: str, done: bool) -> None:
        self.rig.target.fail(method, done=done)

    @rule(clean=st.booleans(), save=st.booleans())
    def restart(self, clean: bool, save: bool) -> None:
        self.rig.target.heal()
        self.learn()
        if save:
            self.run(self.rig.node.checkpoint())
        self.run(self.rig.restart(clean=clean))
        self.sequence = 0
        self.over += self.attempts
        self.attempts, self.held, self.members = [], [], []
        for holders in self.pinned.values():
            holders.intersection_update({0})
        assert self.rig.node.recovered.dropped == 0
        assert not self.complaints.found, self.complaints.found
        self.open(self.minimum, False)
        self.open(self.minimum, True)

    @rule()
    def the_target_restarts(self) -> None:
        self.rig.target.heal()
        self.rig.target.restart()
        self.run(self.rig.node.replay())

    # ------------------------------------------------------------------------------------------------ what must hold

    def learn(self) -> None:
        """What the engine took away, by its own word; it must have had the right."""
        events, self.sequence = self.rig.node.engine.events.since(self.sequence, 2**32, 10**6)
        found = [e for e in self.rig.node.engine.events._events if e.kind == "removed"]
        for event in found:
            stored = StoredKey(event.stored_key)
            if event.reason == "stale":
                assert int.from_bytes(stored[36:44], "big") < self.minimum
            elif event.reason == "evicted":
                if stored in self.visible:
                    assert not self.pinned.get(stored), "a pinned block was evicted"
                    _, write_id = self.visible[stored]
                    leased = [h for h in self.held for s, _, _, w in h.places if (s, w) == (stored, write_id)]
                    assert not leased, "a leased block was evicted"
            else:
                assert event.reason == "deleted", event
            self.visible.pop(stored, None)
            self.pinned.pop(stored, None)
        self.rig.node.engine.events._events.clear()
        assert not events

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self.rig, "node"):
            return
        self.learn()
        self.rig.check()
        index, target = self.rig.node.engine.index, self.rig.target
        rows = index.find(index.digests(list(self.visible)))
        assert (rows != ABSENT).all(), "an acknowledged block is gone without a word"
        assert index.count == len(self.visible), "a block is visible that nobody committed"
        for row, (stored, (value, write_id)) in zip(rows.tolist(), self.visible.items(), strict=True):
            assert index.write_id[row].tobytes() == write_id
            extent = Extent(index.volume[row], int(index.offset[row]), int(index.length[row]))
            assert target.read(extent.volume, extent.offset_bytes, len(value)) == value
            pins = self.pinned.get(stored, set())
            assert int(index.pins[row]) == len(pins - {0}) and bool(index.flags[row] & 2) == (0 in pins)
        leases: dict[int, int] = {}
        for held in self.held:
            for _, extent, value, _ in held.places:
                assert target.read(extent.volume, extent.offset_bytes, len(value)) == value, "leased bytes changed"
                leases[extent.offset_bytes] = leases.get(extent.offset_bytes, 0) + 1
        for row in range(index.high):
            if index.state[row]:
                assert int(index.leases[row]) == leases.get(int(index.offset[row]), 0)
        granted = {g.extent for g in target.grants.values()}
        assert granted <= {w.extent for w in self.rig.node.writes._by_digest.values()}, "a grant outlived its write"
        for volume in target.volumes:
            claimed = {(volume, r.number * REGION) for r in self.rig.node.engine.space.maps[volume].claimed.values()}
            assert claimed <= target.prepared | {(volume, r.number * REGION) for r in _closed(self.rig, volume)}


def _pick(data: st.DataObject, things: list[T]) -> T:
    """One of them, drawn by number, so that a failure prints a number and not the whole node."""
    return things[data.draw(st.integers(0, len(things) - 1))]


def _closed(rig: Rig, volume: Any) -> list[Any]:
    """Regions whose release failed half-way: nothing of them is given out."""
    extents = rig.node.engine.space.maps[volume]
    return [r for n, r in extents.claimed.items() if n not in extents._open[r.slot_bytes] and r.empty]


def _extent(located: Located, i: int) -> Extent:
    return Extent(located.volumes[i], int(located.offsets[i]), int(located.lengths[i]))


class RocksMachine(EngineMachine):
    """The same over RocksDB."""

    rocks = True


EngineMachine.TestCase.settings = settings(max_examples=1_000 if LONG else 40, stateful_step_count=40, deadline=None)
RocksMachine.TestCase.settings = settings(max_examples=200 if LONG else 8, stateful_step_count=40, deadline=None)
TestEngine = EngineMachine.TestCase
TestEngineOnRocksDB = RocksMachine.TestCase
