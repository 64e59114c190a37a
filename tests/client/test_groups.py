"""Groups of ranks against a whole node, and the plans that they hand around."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.client import Client, ClientOptions, PlannedWrite, TilesResult, WritePlan
from forebay.client.layouts import runs
from forebay.client.plans import MAX_PLAN_BYTES
from forebay.client.transports.base import ReadOp, Segment, WriteOp
from forebay.client.transports.requests import plan as commands
from forebay.errors import (
    OK,
    AlreadyExists,
    DuplicateKey,
    GridInvalid,
    InvalidArgument,
    NoSpace,
    Pending,
    ValueSize,
)
from forebay.ids import LBA_BYTES, BlockKey, Extent, VolumeId
from forebay.proto import forebay_pb2 as pb
from forebay.ranks import held_tiles, written_tiles
from forebay.schema import Group, HashAlgorithm, Schema, TileLayout
from tests.client.conftest import NodeProcess, eventually, patient, stop

OPTIONS = patient(ClientOptions(deadline_ms=30_000))
TTL_MS = 2_000
"""All of which is waited for by those who wait for the end of a write; a busy machine begins one within it."""
SCHEMA = Schema(
    "test",
    b"",
    HashAlgorithm("sha256", 5),
    (
        Group("full", tuple(range(4)), 5, 4, 100, "bf16", "test", layer_groups=2, head_groups=4),
        Group("mla", (0, 1), 5, 0, 300, "bf16", "test", layer_groups=2),
    ),
)
FULL, MLA = SCHEMA.groups
LAYOUT = FULL.layout()
REFUSED = ("write_fenced", "write_expired", "connection_lost", "unavailable")
"""What a rank may hear that writes when the group's time is over: it was torn down, so it may find itself cut off."""
assert LAYOUT.tiles == 8 and LAYOUT.lengths[0] % LBA_BYTES


def value(seed: int) -> bytes:
    return bytes((seed * 31 + i) % 256 for i in range(LAYOUT.value_bytes))


def part(whole: bytes, tiles: Sequence[int], layout: TileLayout = LAYOUT) -> bytes:
    """Tiles of a value, back to back in this order."""
    return b"".join(whole[layout.value_offsets[t] :][: layout.lengths[t]] for t in tiles)


class Ranks:
    """Clients of one session; the first opened it."""

    def __init__(self, node: NodeProcess, count: int, options: ClientOptions = OPTIONS) -> None:
        self.node = node
        self.options = options
        self.clients = [node.connect(schema=SCHEMA, options=options)]
        self.clients += [self.join() for _ in range(count - 1)]

    def join(self) -> Client:
        token = self.clients[0].join_token
        return Client.join(
            self.node.url, session_token=token, token=self.node.token, schema=SCHEMA, options=self.options
        )

    def put(self, plan: WritePlan, rank: int, values: Sequence[bytes]) -> list[str]:
        """A rank's tiles of whole values."""
        tiles = written_tiles(FULL, rank, len(self.clients))
        return [r.reason for r in self.clients[rank].put_tiles(plan, tiles, [part(v, tiles) for v in values])]

    def close(self) -> None:
        for client in reversed(self.clients):
            client.close()


@pytest.fixture
def ranks(shared_node: NodeProcess) -> Iterator[Ranks]:
    ranks = Ranks(shared_node, 2)
    yield ranks
    ranks.close()


def stored(node: NodeProcess, key: bytes) -> bytes | None:
    with node.connect(schema=SCHEMA, options=OPTIONS) as client:
        (result,) = client.get([key])
        return None if result.value is None else bytes(result.value)


# --- the way of a block -----------------------------------------------------------------------------------------------


def test_ranks_write_their_heads_and_any_split_reads_them(shared_node: NodeProcess) -> None:
    ranks = Ranks(shared_node, 4)
    keys, values = [b"split-%d" % i for i in range(10)], [value(i) for i in range(10)]
    plan = ranks.clients[0].allocate(keys)
    assert plan.reasons == ("ok",) * 10
    told = WritePlan.from_bytes(plan.to_bytes())
    assert told == plan
    for rank in (2, 0, 3):
        assert ranks.put(told, rank, values) == ["pending"] * 10
        assert not any(ranks.clients[rank].match(keys).present)
    assert ranks.put(told, 1, values) == ["ok"] * 10
    for count in (1, 2, 4):
        for rank in range(count):
            tiles = held_tiles(FULL, rank, count)
            results = ranks.clients[rank].get(keys, tiles=tiles)
            assert [bytes(r.value or b"") for r in results] == [part(v, tiles) for v in values]
    assert ranks.clients[0].allocate(keys).reasons == ("already_exists",) * 10
    assert [client.stats.stored for client in ranks.clients] == [0, 10, 0, 0]
    assert sum(client.stats.bytes_written for client in ranks.clients) == 10 * LAYOUT.value_bytes
    ranks.close()


def test_ranks_write_at_the_same_time(ranks: Ranks) -> None:
    keys, values = [b"race-%d" % i for i in range(50)], [value(i) for i in range(50)]
    plan = ranks.clients[0].allocate(keys)
    reasons: list[list[str]] = [[], []]

    def work(rank: int) -> None:
        reasons[rank] = ranks.put(plan, rank, values)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of each block at least one rank learns that it is visible; both may, if their commits met.
    assert all("ok" in pair and set(pair) <= {"ok", "pending"} for pair in zip(*reasons, strict=True))
    assert [bytes(r.value or b"") for r in ranks.clients[1].get(keys)] == values


def test_layer_by_layer_in_any_order(ranks: Ranks) -> None:
    whole = value(5)
    plan = ranks.clients[0].allocate([b"layers"])
    for client, tiles in ((ranks.clients[1], [6, 0, 4, 2]), (ranks.clients[0], [7, 3])):
        assert client.put_tiles(plan, tiles, [part(whole, tiles)]) == [TilesResult(True, False, "pending")]
    assert ranks.clients[0].put_tiles(plan, (5, 1), [part(whole, (5, 1))]) == [TilesResult(True, True, "ok")]
    for tiles in ([7, 0, 1], [3, 2, 1, 0], [0, 2, 4, 6]):
        assert bytes(ranks.clients[1].get([b"layers"], tiles=tiles)[0].value or b"") == part(whole, tiles)


def test_replicated_tiles_have_one_writer_in_turn(ranks: Ranks) -> None:
    keys = [BlockKey(b"mla-%d" % i, 1) for i in range(6)]
    size = MLA.layout().value_bytes
    plan = ranks.clients[0].allocate(keys)
    for rank, client in enumerate(ranks.clients):
        turns = [i for i in range(6) if written_tiles(MLA, rank, 2, turn=i)]
        assert turns == [i for i in range(6) if i % 2 == rank]
        assert {r.reason for r in client.put_tiles(plan.take(turns), None, [bytes([i]) * size for i in turns])} == {
            "ok"
        }
    assert [bytes(r.value or b"")[:1] for r in ranks.clients[0].get(keys)] == [bytes([i]) for i in range(6)]


@pytest.mark.parametrize("tiles", [None, [1, 0]])
def test_blocks_of_all_groups_and_scopes_in_one_call(shared_node: NodeProcess, tiles: list[int] | None) -> None:
    """Also one that is asked for twice: what some of them have in common is no other's."""
    name = b"mixed" if tiles is None else b"mixed tiles"
    with shared_node.connect(schema=SCHEMA, options=OPTIONS, scopes=("one", "two")) as client:
        scopes = client.scope_ids.values()
        keys = [BlockKey(name + b"-%d" % i, group, scope) for i in range(2) for group in (0, 1) for scope in scopes]
        whole = {key: os.urandom(SCHEMA.groups[key.group].layout().value_bytes) for key in keys}
        assert {r.reason for r in client.put(keys, list(whole.values()))} == {"ok"}
        asked = [*keys, BlockKey(name, 1, keys[0].scope), *reversed(keys)]
        layouts = [group.layout() for group in SCHEMA.groups]
        expected = [
            part(whole[key], tiles or range(layouts[key.group].tiles), layouts[key.group]) if key in whole else b""
            for key in asked
        ]
        assert [bytes(r.value or b"") for r in client.get(asked, tiles=tiles)] == expected
        into = [bytearray(len(value)) for value in expected if value]
        there = [key for key in asked if key in whole]
        assert {r.reason for r in client.get_into(there, into, tiles=tiles)} == {"ok"}
        assert into == [value for value in expected if value]


def test_named_hosts_alone_may_write(shared_node: NodeProcess) -> None:
    ranks = Ranks(shared_node, 3)
    leader, writer, other = ranks.clients
    plan = leader.allocate([b"named"], hosts=[writer.host_nqn])
    assert leader.put_tiles(plan, None, [value(1)])[0].reason == "write_fenced"
    assert other.put_tiles(plan, None, [value(2)])[0].reason == "write_fenced"
    assert writer.put_tiles(plan, None, [value(3)])[0].visible
    assert stored(shared_node, b"named") == value(3)
    assert leader.allocate([b"stranger"], hosts=["nqn.2014-08.org.nvmexpress:uuid:none"]).reasons == (
        "invalid_argument",
    )
    ranks.close()


def test_what_is_present_or_pending_is_not_written(ranks: Ranks) -> None:
    leader = ranks.clients[0]
    assert leader.put([b"there"], [value(1)])[0].stored
    held = leader.allocate([b"held"])
    plan = leader.allocate([b"there", b"held", b"fresh"])
    assert plan.reasons == ("already_exists", "pending", "ok")
    results = leader.put_tiles(plan, None, [None, None, value(2)])
    assert [(r.committed, r.visible, r.reason) for r in results] == [
        (False, True, "already_exists"),
        (False, False, "pending"),
        (True, True, "ok"),
    ]
    assert leader.abort(held) == 1


def test_the_documented_example(ranks: Ranks) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "ranks.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    keys = [b"doc-%d" % i for i in range(3)]
    sent: list[bytes] = []

    def tiles_of_block(key: BlockKey, tiles: Sequence[int]) -> bytes:
        return part(value(key.key[-1]), tiles)

    plan = names["lead"](ranks.clients[0], keys, sent.append)
    assert names["store"](ranks.clients[0], plan, FULL, 0, 2, tiles_of_block) == ["pending"] * 3
    assert names["follow"](ranks.clients[1], sent[0], FULL, 1, 2, tiles_of_block) == ["ok"] * 3
    for rank in range(4):
        tiles = held_tiles(FULL, rank, 4)
        buffers = [bytearray(len(part(value(0), tiles))) for _ in keys]
        assert names["load"](ranks.clients[1], keys, buffers, FULL, rank, 4) == [True] * 3
        assert buffers == [part(value(key[-1]), tiles) for key in keys]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_rank_that_joined_too_late_is_refused_and_told(ranks: Ranks) -> None:
    plan = ranks.clients[0].allocate([b"late"])
    with ranks.join() as late:
        tiles = held_tiles(FULL, 1, 2)
        result = late.put_tiles(plan, tiles, [part(value(9), tiles)])
        assert result == [TilesResult(False, False, "write_fenced")]
    assert ranks.put(plan, 0, [value(1)]) == ["pending"], "the group goes on"
    assert ranks.put(plan, 1, [value(1)]) == ["ok"]
    assert stored(ranks.node, b"late") == value(1)


@pytest.mark.fencing
def test_another_session_can_do_nothing_with_a_plan(ranks: Ranks) -> None:
    plan = ranks.clients[0].allocate([b"mine"])
    with ranks.node.connect(schema=SCHEMA, options=OPTIONS) as thief:
        assert thief.put_tiles(plan, None, [value(9)])[0].reason == "session_expired"
        assert thief.abort(plan) == 0
        # A plan is no secret: with its own session in it, the target still refuses.
        forged = replace(plan, session=thief.allocate([b"other"]).session)
        assert thief.put_tiles(forged, None, [value(9)])[0].reason == "write_fenced"
        assert thief.abort(forged) == 0
    assert [ranks.put(plan, rank, [value(1)]) for rank in range(2)] == [["pending"], ["ok"]]
    assert stored(ranks.node, b"mine") == value(1)


def test_two_groups_and_one_key(ranks: Ranks) -> None:
    others = Ranks(ranks.node, 2)
    plan, theirs = ranks.clients[0].allocate([b"both"]), others.clients[0].allocate([b"both"])
    assert (plan.reasons, theirs.reasons) == (("ok",), ("pending",))
    assert others.put(theirs, 0, [value(9)]) == ["pending"]
    assert ranks.put(plan, 0, [value(1)]) == ["pending"]
    assert others.clients[0].allocate([b"both"]).reasons == ("pending",)
    told: list[str] = []
    waiter = threading.Thread(target=lambda: told.extend(others.clients[1].wait([b"both"], 20_000)))
    waiter.start()
    assert ranks.put(plan, 1, [value(1)]) == ["ok"]
    waiter.join()
    assert told == ["ok"]
    assert others.clients[0].allocate([b"both"]).reasons == ("already_exists",)
    assert stored(ranks.node, b"both") == value(1)
    others.close()


def test_other_bytes_for_a_tile_give_the_block_up_and_no_other(ranks: Ranks) -> None:
    leader, follower = ranks.clients
    plan = leader.allocate([b"quarrel", b"peace"])
    tiles = (0, 1)
    mine = [part(value(1), tiles), part(value(2), tiles)]
    assert {r.reason for r in leader.put_tiles(plan, tiles, mine)} == {"pending"}
    again = [part(value(9), tiles), part(value(2), tiles)]
    assert [r.reason for r in follower.put_tiles(plan, tiles, again)] == ["grid_invalid", "pending"]
    assert leader.wait([b"quarrel"], 20_000, pending_only=True) == ["absent"], "nobody writes it any more"
    eventually(lambda: leader.put([b"bystander"], [value(3)])[0].present, "the leader to connect again")
    rest = tuple(range(2, 8))
    results = leader.put_tiles(plan, rest, [part(value(1), rest), part(value(2), rest)])
    assert [r.reason for r in results] in (["write_fenced", "ok"], ["write_expired", "ok"])
    assert stored(ranks.node, b"quarrel") is None
    assert stored(ranks.node, b"peace") == value(2)


@pytest.mark.fencing
def test_a_plan_that_is_given_up(ranks: Ranks) -> None:
    leader, follower = ranks.clients
    plan = leader.allocate([b"dropped", b"whole"])
    assert leader.put_tiles(plan.take([1]), None, [value(2)])[0].visible
    assert ranks.put(plan.take([0]), 1, [value(1)]) == ["pending"]
    assert leader.abort(plan) == 1
    assert leader.abort(plan) == 0
    eventually(lambda: ranks.put(plan.take([0]), 1, [value(1)]) == ["write_fenced"], "the follower to connect again")
    assert follower.match([b"dropped", b"whole"]).present == (False, True)
    (again,) = leader.put([b"dropped"], [value(3)])
    assert again.stored


@pytest.mark.fencing
def test_an_old_plan_reaches_nothing_of_a_new_one(ranks: Ranks) -> None:
    leader, follower = ranks.clients
    old = leader.allocate([b"again"])
    assert leader.abort(old) == 1
    new = leader.allocate([b"again"])
    assert new.writes[0].extent == old.writes[0].extent, "the same place, or this proves nothing"
    assert follower.host_nqn != leader.host_nqn
    eventually(lambda: follower.put([b"connected"], [value(0)])[0].present, "the follower to connect again")
    assert ranks.put(new, 1, [value(1)]) == ["pending"]
    assert ranks.put(old, 1, [value(9)]) == ["write_fenced"]
    assert ranks.put(new, 0, [value(1)]) == ["ok"]
    assert stored(ranks.node, b"again") == value(1)


class Process:
    """A rank in a process of its own: `tests.client.engine`."""

    def __init__(self, ranks: Ranks) -> None:
        node, token = ranks.node, ranks.clients[0].join_token
        command = [sys.executable, "-m", "tests.client.engine", node.url, node.token, token.hex(), SCHEMA.cbor.hex()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._hear() == "joined"

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, *words: str) -> str:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._hear()

    def put(self, plan: WritePlan, tiles: Sequence[int], values: Sequence[bytes]) -> str:
        numbers = ",".join(map(str, tiles))
        return self.say("tiles", plan.to_bytes().hex(), numbers, *[part(v, tiles).hex() for v in values])

    def end(self) -> None:
        self.process.communicate(timeout=30)


def test_ranks_in_processes_of_their_own(ranks: Ranks) -> None:
    process = Process(ranks)
    plan = ranks.clients[0].allocate([b"p", b"q"])
    values = [value(1), value(2)]
    assert process.put(plan, range(4, 8), values) == "pending pending"
    assert [r.reason for r in ranks.clients[0].put_tiles(plan, range(4), [part(v, range(4)) for v in values])] == [
        "ok",
        "ok",
    ]
    process.end()
    assert stored(ranks.node, b"q") == value(2)


def test_a_rank_that_dies_leaves_nothing(shared_node: NodeProcess) -> None:
    """Killed after another rank's commit and before its own: at the deadline all is as it was."""
    ranks = Ranks(shared_node, 1, replace(OPTIONS, write_ttl_ms=TTL_MS))
    leader = ranks.clients[0]
    with shared_node.admin() as admin:
        before = {n.name: (n.used_bytes, n.pending_bytes) for n in admin.list_namespaces()}
        follower, witness = Process(ranks), Process(ranks)
        plan = leader.allocate([b"dead"])
        assert leader.put_tiles(plan, range(4), [part(value(1), range(4))])[0].reason == "pending"
        follower.process.send_signal(signal.SIGKILL)
        follower.end()
        assert leader.wait([b"dead"], 20_000, pending_only=True) == ["absent"]
        after = {n.name: (n.used_bytes, n.pending_bytes) for n in admin.list_namespaces()}
        assert after == before and admin.status().pending_writes == 0
    assert witness.put(plan, range(4, 8), [value(1)]) in REFUSED
    eventually(lambda: leader.put([b"dead"], [value(2)])[0].present, "the leader to connect again")
    assert stored(shared_node, b"dead") == value(2)
    witness.end()
    ranks.close()


def test_a_leader_that_dies_leaves_nothing(shared_node: NodeProcess) -> None:
    ranks = Ranks(shared_node, 2, replace(OPTIONS, write_ttl_ms=TTL_MS))
    leader = Process(ranks)
    plan = WritePlan.from_bytes(bytes.fromhex(leader.say("allocate", "orphan")))
    leader.process.kill()
    leader.end()
    assert ranks.put(plan, 1, [value(1)]) == ["pending"]
    assert ranks.clients[0].wait([b"orphan"], 20_000, pending_only=True) == ["absent"]
    # The session lives on: another of its ranks leads.
    eventually(lambda: ranks.clients[1].allocate([b"orphan"]).reasons == ("ok",), "the extent to be free")
    assert stored(shared_node, b"orphan") is None
    ranks.close()


@pytest.mark.fencing  # it connects again, and what it writes then would be a miss, not a wrong byte
def test_a_stopped_rank_writes_nothing_when_it_goes_on(shared_node: NodeProcess) -> None:
    ranks = Ranks(shared_node, 1, replace(OPTIONS, write_ttl_ms=TTL_MS))
    leader = ranks.clients[0]
    sleeper = Process(ranks)
    plan = leader.allocate([b"slept"])
    stop(sleeper.process.pid)
    assert sleeper.process.stdin is not None
    line = ("tiles", plan.to_bytes().hex(), "4,5,6,7", part(value(9), range(4, 8)).hex())
    print(*line, file=sleeper.process.stdin, flush=True)
    assert leader.wait([b"slept"], 20_000, pending_only=True) == ["absent"]
    eventually(lambda: leader.put([b"slept"], [value(2)])[0].present, "the leader to connect again")
    os.kill(sleeper.process.pid, signal.SIGCONT)
    assert sleeper.process.stdout is not None
    assert sleeper.process.stdout.readline().strip() in REFUSED
    assert stored(shared_node, b"slept") == value(2)
    sleeper.end()
    ranks.close()


def test_a_plan_does_not_outlive_the_node(node: NodeProcess) -> None:
    ranks = Ranks(node, 2)
    plan = ranks.clients[0].allocate([b"k"])
    assert ranks.put(plan, 0, [value(1)]) == ["pending"]
    node.kill()
    assert ranks.put(plan, 1, [value(1)])[0] in ("unavailable", "connection_lost")
    assert ranks.clients[0].allocate([b"k"]).reasons == ("unavailable",)
    node.start()
    eventually(lambda: ranks.put(plan, 1, [value(1)]) == ["session_expired"], "a new session")
    assert stored(node, b"k") is None
    ranks.close()


# --- arguments --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_raises_before_anything_is_sent(ranks: Ranks) -> None:
    leader = ranks.clients[0]
    with pytest.raises(DuplicateKey):
        leader.allocate([b"a", b"a"])
    wrong: list[Any] = [[], "session"]
    for hosts in wrong:
        with pytest.raises(InvalidArgument, match="hosts"):
            leader.allocate([b"a"], hosts=hosts)
    with pytest.raises(ValueSize):
        leader.allocate([b"a"], lengths=[LAYOUT.value_bytes - 1])
    with pytest.raises(InvalidArgument, match="lengths"):
        leader.allocate([b"a"], lengths=[])
    with ranks.node.connect() as objects, pytest.raises(ValueSize):
        objects.allocate([b"a"])
    plan = leader.allocate([b"a"])
    for tiles in ([8], [-1], [0, 0], []):
        with pytest.raises(GridInvalid):
            leader.put_tiles(plan, tiles, [value(1)])
    with pytest.raises(ValueSize, match=r"values\[0\]"):
        leader.put_tiles(plan, [0], [value(1)])
    with pytest.raises(InvalidArgument, match="2 values"):
        leader.put_tiles(plan, None, [value(1), value(2)])
    small = replace(plan.writes[0], extent=Extent(VolumeId(1), 0, LBA_BYTES))
    with pytest.raises(InvalidArgument, match="too small"):
        leader.put_tiles(replace(plan, writes=(small,)), None, [value(1)])
    for rows in ([1], [-1], [0, 0]):
        with pytest.raises(InvalidArgument):
            plan.take(rows)
    assert leader.put_tiles(plan.take([]), None, []) == []
    assert leader.abort(plan) == 1


def test_the_node_refuses_hosts_that_are_not_told_apart(ranks: Ranks) -> None:
    """What no client of ours sends."""
    leader = ranks.clients[0]
    session = leader._session
    view, deadline_ms = session.view, leader._until(None)
    keys = pb.Keys(data=b"k", stride=1)
    asks: list[Any] = [
        {"host_nqn": view.host.nqn, "session_hosts": True, "host_nqns": [view.host.nqn]},
        {"host_nqn": view.host.nqn, "host_nqns": ["nqn.2014-08.org.nvmexpress:uuid:none"]},
        {"session_hosts": True},
    ]
    for wrong in asks:
        request = pb.AllocateRequest(context=view.context(5_000), keys=keys, **wrong)
        with pytest.raises(InvalidArgument):
            session.rpc.call(session.rpc.blocks.Allocate, request, deadline_ms)
    plan = leader.allocate([b"told"])
    write_id = plan.writes[0].write_id
    with pytest.raises(InvalidArgument, match="did not join"):  # whose commands have completed?
        abort = pb.AbortRequest(context=view.context(5_000), write_ids=write_id, quiesced=True)
        session.rpc.call(session.rpc.blocks.Abort, abort, deadline_ms)
    outside = pb.CommitRequest(context=view.context(5_000), write_ids=write_id, host_nqn=view.host.nqn)
    outside.tile_counts, outside.tiles, outside.checksums = b"\x01\0", b"\x08\0", bytes(4)
    with pytest.raises(GridInvalid, match="tile 8"):
        session.rpc.call(session.rpc.blocks.Commit, outside, deadline_ms)
    assert leader.abort(plan) == 1


def test_opaque_blocks_can_be_planned_too(shared_node: NodeProcess) -> None:
    with shared_node.connect(options=OPTIONS) as client:
        plan = client.allocate([b"x", b"y"], lengths=[10, 5_000])
        assert {r.reason for r in client.put_tiles(plan, None, [b"1" * 10, b"2" * 5_000])} == {"ok"}
        assert [r.length_bytes for r in client.get([b"x", b"y"])] == [10, 5_000]


# --- plans as bytes ---------------------------------------------------------------------------------------------------

WRITES = (
    PlannedWrite(BlockKey(b"one"), 10_000, OK, bytes(range(16)), Extent(VolumeId(3), 1 << 30, 12_288)),
    PlannedWrite(BlockKey(b"second", 2, 7), 1, OK, bytes(range(16, 32)), Extent(VolumeId(1), 0, 4096)),
    PlannedWrite(BlockKey(b"there"), 4096, AlreadyExists.code),
    PlannedWrite(BlockKey(b"held"), 4096, Pending.code),
    PlannedWrite(BlockKey(b"full"), 4096, NoSpace.code),
)
PLAN = WritePlan(b"s" * 16, WRITES, 0xFFFFFFFF)


def test_a_plan_as_bytes_is_the_same_plan() -> None:
    assert WritePlan.from_bytes(PLAN.to_bytes()) == PLAN
    assert WritePlan.from_bytes(memoryview(bytearray(PLAN.to_bytes()))) == PLAN
    assert WritePlan.from_bytes(PLAN.take([3, 0]).to_bytes()).writes == (WRITES[3], WRITES[0])
    assert PLAN.reasons == ("ok", "ok", "already_exists", "pending", "no_space")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2: the ranks of a session need the same release"),
        ({"version": 0}, "version 0"),
        ({"session": b"short"}, "session"),
        ({"value_lengths": b""}, "plan.value_lengths"),
        ({"status": bytes(3)}, "plan.status"),
        ({"write_ids": bytes(16)}, "write ids"),
        ({"write_ids": bytes(81)}, "plan.write_ids"),
        ({"offsets": b"\x01" + bytes(39)}, "extent"),
        ({"lengths": bytes(40)}, "extent"),
        ({"lengths": b"\xff" * 40}, "extent"),
        ({"value_lengths": bytes(40)}, "a value of 0 bytes"),
        ({"value_lengths": b"\xff" * 40}, "a value of"),
        ({"keys": pb.Keys()}, "keys"),
        ({"keys": pb.Keys(data=b"aaaaa", stride=1)}, "earlier in the same batch"),
    ],
)
def test_a_plan_that_is_wrong_says_where(changes: dict[str, object], message: str) -> None:
    parsed = pb.WritePlan.FromString(PLAN.to_bytes())
    for name, wrong in changes.items():
        parsed.ClearField(name)  # type: ignore[arg-type]
        parsed.MergeFrom(pb.WritePlan(**{name: wrong}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=message):
        WritePlan.from_bytes(parsed.SerializeToString())


def test_too_long_a_plan() -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        WritePlan.from_bytes(bytes(MAX_PLAN_BYTES + 1))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_plan_or_refused(data: bytes) -> None:
    with suppress(InvalidArgument):
        WritePlan.from_bytes(data)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 400))
def test_a_damaged_plan_is_a_plan_or_refused(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(PLAN.to_bytes())
    for at, byte in changes:
        data[at % len(data)] = byte
    for damaged in (data, data[:cut]):
        try:
            plan = WritePlan.from_bytes(damaged)
        except InvalidArgument:
            continue
        for write in plan.writes:
            assert write.extent is None or not (write.extent.offset_bytes | write.extent.length_bytes) % LBA_BYTES


# --- few commands -----------------------------------------------------------------------------------------------------


def test_tiles_of_a_split_take_few_commands() -> None:
    grid = Group("full", tuple(range(32)), 16, 8, 2 * 128 * 2, "bf16", "test", layer_groups=8, head_groups=8)
    layout = grid.layout()
    every = range(layout.tiles)

    def count(tiles: Sequence[int] | None, bridge_bytes: int = 0) -> int:
        ops = []
        for offset_bytes, pieces in runs(layout, tiles, bridge_bytes=bridge_bytes):
            segments = tuple(Segment(None, length_bytes) for _, _, length_bytes in pieces)
            ops.append(ReadOp(1, offset_bytes, segments))
        sizes = [sum(segment.length_bytes for segment in op.segments) for op in ops]
        return len(commands(ops, range(len(ops)), sizes, 1 << 30))

    assert count(None) == count(every) == count(list(reversed(every))) == 1
    for ranks in (2, 4, 8):
        assert {count(held_tiles(grid, rank, ranks)) for rank in range(ranks)} == {1}
    stage = grid.tiles_of(layers=range(16))
    assert count(stage) == count(sorted(stage, key=lambda tile: tile % 8)) == 8
    assert count(stage, bridge_bytes=layout.extent_bytes // 16) == 1
    assert count(grid.tiles_of(range(2, 6), range(8, 24))) == 4


def test_a_command_carries_one_tag() -> None:
    def write(at: int, tag: int, blocks: int = 1) -> WriteOp:
        return WriteOp(1, at * LBA_BYTES, (Segment(None, blocks * LBA_BYTES),), tag)

    ops = [write(0, 5), write(1, 5), write(2, 6), write(3, 0), write(4, 6, 4)]
    sizes = [LBA_BYTES] * 4 + [4 * LBA_BYTES]
    made = commands(ops, range(5), sizes, 2 * LBA_BYTES)
    assert [(r.tag, r.length_bytes // LBA_BYTES) for r in made] == [(5, 2), (6, 1), (0, 1), (6, 2), (6, 2)]


@given(st.data())
def test_runs_hold_each_tile_once_where_it_lies(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=12))
    layout = TileLayout.of(tuple(lengths))
    tiles = data.draw(st.none() | st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    bridge_bytes = data.draw(st.sampled_from([0, 4096, 16_384]))
    order = list(range(len(lengths))) if tiles is None else tiles
    found: dict[int, int] = {}
    last = -1
    for offset_bytes, pieces in runs(layout, tiles, bridge_bytes=bridge_bytes):
        assert last < 0 or offset_bytes > last + bridge_bytes, "apart, and in the order of the extent"
        assert pieces[0].tile is not None
        at = offset_bytes
        for tile, start, length_bytes in pieces:
            if tile is not None:
                assert (at, length_bytes) == (layout.offsets[tile], layout.lengths[tile])
                found[tile] = start
            at += length_bytes
        assert at % LBA_BYTES == 0 and at <= layout.extent_bytes
        last = at
    assert sorted(found) == sorted(order)
    assert found == {t: sum(layout.lengths[o] for o in order[: order.index(t)]) for t in order}
