"""What the client does with a node that lies, refuses, forgets or goes away: results with reasons, never a crash."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from forebay.client import Client, ClientOptions, NvmeTcpOptions, StatResult, connect, session
from forebay.client.transports.choice import Choice
from forebay.clock import ManualClock
from forebay.errors import (
    Busy,
    ForebayError,
    NamespaceNotFound,
    Pending,
    PermissionDenied,
    ProtocolError,
    QuotaExceeded,
    SchemaInvalid,
    SessionExpired,
    StaleIncarnation,
    Unauthenticated,
    Unavailable,
)
from forebay.ids import BlockKey
from forebay.nvmetcp.command import Command
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import pack
from forebay.testing.proxy import Action, Cut, FaultProxy, Message, Moment
from tests.client.conftest import eventually
from tests.client.peer import Link, truth
from tests.client.scripted_node import ScriptedNode

OPTIONS = ClientOptions(deadline_ms=20_000, nvme_tcp=NvmeTcpOptions(connections=2, backoff_ms=(1, 5)))
KEYS = [b"k0", b"k1", b"k2"]
VALUES = [b"a" * 5000, b"b" * 8192, b"c"]


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    with ScriptedNode() as node:
        yield node


@pytest.fixture
def client(node: ScriptedNode) -> Iterator[Client]:
    with node.connect(options=OPTIONS) as client:
        yield client


@pytest.fixture
def stored(node: ScriptedNode, client: Client) -> Client:
    """A client whose node has three blocks."""
    assert [r.stored for r in client.put(KEYS, VALUES)] == [True] * 3
    return client


def reasons(client: Client, keys: list[bytes] = KEYS) -> list[str]:
    return [result.reason for result in client.get(keys)]


def test_the_truth(stored: Client) -> None:
    results = stored.get([*KEYS, b"none", KEYS[0]])
    assert [r.reason for r in results] == ["ok", "ok", "ok", "absent", "ok"]
    assert [bytes(r.value or b"") for r in results] == [*VALUES, b"", VALUES[0]]


def set_field(name: str, value: Any) -> Callable[[Any], Any]:
    def lie(reply: Any) -> Any:
        setattr(reply, name, value)
        return reply

    return lie


def test_another_volume_in_the_place_of_the_one_named_is_neither_read_nor_written(node: ScriptedNode) -> None:
    """What the node calls the volume is compared with what the target says of itself."""

    def other(reply: pb.SessionReply) -> pb.SessionReply:
        reply.volumes[0].nguid = "ff" * 16
        return reply

    node.answer["OpenSession"] = other
    with node.connect(options=OPTIONS) as client:
        assert {result.reason for result in client.put(KEYS, VALUES)} == {"volume_mismatch"}
        node.answer.clear()


ACQUIRE_LIES: list[tuple[str, Any]] = [
    ("status", b""),
    ("status", bytes(5)),
    ("status", bytes(8)),
    ("volumes", b"123"),
    ("offsets", b""),
    ("offsets", pack("u64", [1, 2, 3])),
    ("lengths", pack("u64", [0, 0, 0])),
    ("lengths", bytes(16)),
    ("value_lengths", pack("u64", [0, 0, 0])),
    ("value_lengths", pack("u64", [1 << 40, 1 << 63, (1 << 64) - 1])),
    ("write_ids", bytes(47)),
    ("write_ids", bytes(32)),
    ("tiles", pack("u16", [0, 0, 0])),
    ("tiles", pack("u16", [9, 9, 9])),
    ("tiles", b""),
    ("checksums", b""),
    ("checksums", bytes(13)),
    ("checksum_kind", 9),
    ("lease", 0),
    ("offsets", pack("u64", [1 << 40, 1 << 62, (1 << 64) - 4096])),
]


@pytest.mark.parametrize(("field", "value"), ACQUIRE_LIES)
def test_an_acquire_that_makes_no_sense_is_a_miss(node: ScriptedNode, stored: Client, field: str, value: Any) -> None:
    node.answer["Acquire"] = set_field(field, value)
    assert set(reasons(stored)) == {"protocol_error"}
    node.answer.clear()
    assert reasons(stored) == ["ok"] * 3


def test_a_volume_that_nobody_knows(node: ScriptedNode, stored: Client) -> None:
    node.answer["Acquire"] = set_field("volumes", pack("u32", [9, 9, 9]))
    assert reasons(stored) == ["unavailable"] * 3
    assert node.named("Heartbeat"), "it was asked where that volume is"


def test_a_volume_that_is_new(node: ScriptedNode, stored: Client) -> None:
    """A namespace gains a volume while a session lives: the client learns of it when it needs it."""
    volumes = [pb.Volume(volume=v, nsid=1, endpoint=0) for v in (5, 9)]
    node.answer["Heartbeat"] = lambda reply: pb.HeartbeatReply(endpoints=node.endpoints(), volumes=volumes)
    node.answer["Acquire"] = set_field("volumes", pack("u32", [9, 5, 9]))
    assert reasons(stored) == ["ok"] * 3


def test_an_unknown_code_is_shown(node: ScriptedNode, stored: Client) -> None:
    node.answer["Acquire"] = set_field("status", pack("u16", [60_000, 5001, 2002]))
    assert reasons(stored) == ["code_60000", "absent", "permission_denied"]


# --- never a wrong byte ---


def test_bytes_that_changed_on_media_spoil_one_key(node: ScriptedNode, stored: Client) -> None:
    node.peer.volume[node.blocks[BlockKey(b"k1")].offset + 8191] ^= 1
    assert reasons(stored) == ["ok", "checksum_mismatch", "ok"]


def test_another_blocks_bytes_never_verify(node: ScriptedNode, stored: Client) -> None:
    """Same bytes under another key, tile or write: the seed of the checksum differs."""
    assert stored.put([b"twin"], [VALUES[0]])[0].stored
    first, twin = node.blocks[BlockKey(b"k0")], node.blocks[BlockKey(b"twin")]
    first.checksums, twin.checksums = twin.checksums, first.checksums
    assert reasons(stored, [b"k0", b"twin"]) == ["checksum_mismatch"] * 2
    first.checksums, twin.checksums = twin.checksums, first.checksums
    first.write_id = os.urandom(16)
    assert reasons(stored, [b"k0", b"twin"]) == ["checksum_mismatch", "ok"]


def test_swapped_extents_never_verify(node: ScriptedNode, stored: Client) -> None:
    a, b = node.blocks[BlockKey(b"k0")], node.blocks[BlockKey(b"k1")]
    a.offset, b.offset = b.offset, a.offset
    assert reasons(stored) == ["checksum_mismatch", "checksum_mismatch", "ok"]


def test_a_lease_counts_from_before_the_request_was_sent(node: ScriptedNode) -> None:
    """With all bytes good, but read when the lease had run out by the client's clock."""
    clock = ManualClock()
    with node.connect(options=OPTIONS, clock=clock) as client:
        assert client.put(KEYS, VALUES)[0].stored

        def slow(reply: pb.AcquireReply) -> pb.AcquireReply:
            clock.advance(node.lease_ttl_ms)  # the answer was long on its way
            return reply

        node.answer["Acquire"] = slow
        assert reasons(client) == ["lease_expired"] * 3
        node.answer.clear()

        def slower(link: Link, command: Command) -> None:
            truth(link, command)
            clock.advance(node.lease_ttl_ms)  # the bytes were

        node.peer.lie = slower
        assert set(reasons(client)) == {"lease_expired"}
        node.peer.lie = truth
        assert reasons(client) == ["ok"] * 3
        assert client.stats.misses == {"lease_expired": 6}


def test_a_short_lease_ends_the_read_early(node: ScriptedNode, stored: Client) -> None:
    node.lease_ttl_ms = 100
    node.peer.lie = lambda link, command: None
    start = time.monotonic()
    assert reasons(stored) == ["lease_expired"] * 3
    assert time.monotonic() - start < 15, "not at the call's own deadline of 20 s"


# --- leases and sessions ---


def test_leases_are_released_together(node: ScriptedNode, stored: Client) -> None:
    for _ in range(20):
        assert reasons(stored) == ["ok"] * 3
    eventually(lambda: len(node.given_back()) == 20, "20 leases back")
    assert len(node.named("Release")) < 20


def test_leases_are_released_at_close(node: ScriptedNode) -> None:
    with node.connect(options=OPTIONS) as client:
        client.put(KEYS, VALUES)
        client.get(KEYS)
        client.get([b"none"])
    assert len(node.given_back()) == 2
    assert [r.quiesced for r in node.named("CloseSession")] == [True]


def test_who_gave_the_token_away_does_not_speak_for_all(node: ScriptedNode) -> None:
    with node.connect(options=OPTIONS) as client:
        assert client.join_token == b"join"
    assert [r.quiesced for r in node.named("CloseSession")] == [False]


@pytest.mark.parametrize("error", [SessionExpired, StaleIncarnation])
def test_a_lost_session_is_opened_anew_once(node: ScriptedNode, stored: Client, error: type[ForebayError]) -> None:
    node.session = b"another"
    assert reasons(stored) == ["ok"] * 3
    assert node.sessions == 2
    assert stored.stats.reopened == 1
    node.fail["Match"] = error()
    assert set(stored.match(KEYS).reasons) == {"session_expired" if error is SessionExpired else "stale_incarnation"}
    assert len(node.named("Match")) == 2, "tried once more, and no more"


def test_a_session_that_cannot_be_opened_anew(node: ScriptedNode, stored: Client) -> None:
    node.session = b"another"
    node.fail["OpenSession"] = NamespaceNotFound()
    assert reasons(stored) == ["namespace_not_found"] * 3
    assert set(reasons(stored)) <= {"unavailable", "namespace_not_found"}
    node.fail.clear()
    eventually(lambda: reasons(stored) == ["ok"] * 3, "a new session")


def test_a_commit_is_never_repeated_in_another_session(node: ScriptedNode, client: Client) -> None:
    node.fail["Commit"] = SessionExpired()
    assert [r.reason for r in client.put(KEYS, VALUES)] == ["session_expired"] * 3
    assert len(node.named("Commit")) == 1


@pytest.mark.parametrize(
    "error",
    [
        Unauthenticated(),
        PermissionDenied(),
        NamespaceNotFound("no such", field="namespace"),
        Busy(retry_after_ms=60_000),  # for which there is no time
    ],
)
def test_connect_raises_what_the_node_says(node: ScriptedNode, error: ForebayError) -> None:
    node.fail["OpenSession"] = error
    with pytest.raises(type(error)) as caught:
        node.connect(options=OPTIONS)
    assert caught.value.to_dict() == error.to_dict()


def test_who_sleeps_past_the_deadline_was_turned_away(node: ScriptedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine is busy a wait takes longer than it should: the reason is what the node has said."""
    clock = ManualClock()
    with node.connect(options=OPTIONS, clock=clock) as client:

        def oversleep(_: float) -> bool:
            clock.advance(OPTIONS.deadline_ms)
            return False

        monkeypatch.setattr(client._session.rpc._closed, "wait", oversleep)
        node.fail["Match"] = Busy(retry_after_ms=7)
        assert set(client.match(KEYS).reasons) == {"busy"}


def test_a_fall_back_is_told_until_a_heartbeat_is_answered(node: ScriptedNode) -> None:
    """And not again, in whichever session; one that comes meanwhile is told by the next."""
    clock = ManualClock()  # so that none is due but those below
    with node.connect(options=OPTIONS, clock=clock) as client:
        session = client._session
        eventually(lambda: node.named("Heartbeat"), "the first one")
        until_ms = clock.monotonic_ms() + OPTIONS.deadline_ms

        def beat(fails: ForebayError | None = None) -> dict[str, int]:
            node.fail = {} if fails is None else {"Heartbeat": fails}
            session._beat(session.view, until_ms)
            return dict(node.named("Heartbeat")[-1].fallbacks)

        def fall(kind: str) -> None:
            ((choice, _),) = session._transports.values()
            choice._fallbacks[kind] += 1

        fall("rdma")
        assert beat(Unavailable()) == {"rdma": 1}
        fall("rdma")
        assert beat(SessionExpired()) == {"rdma": 2}
        assert client.stats.reopened == 1
        fall("block")
        assert beat() == {"rdma": 2, "block": 1}
        assert beat() == {}
        fall("block")
        assert beat() == {"block": 1}
        assert client.stats.fallbacks == {"rdma": 2, "block": 2}


def test_another_keyspace_is_refused(node: ScriptedNode) -> None:
    node.answer["OpenSession"] = set_field("keyspace", bytes(32))
    with pytest.raises(SchemaInvalid):
        node.connect(options=OPTIONS)


@pytest.mark.parametrize(
    ("field", "value"), [("checksum_kind", 4), ("scope_ids", b"123"), ("volumes", [pb.Volume(endpoint=3)])]
)
def test_a_session_that_makes_no_sense(node: ScriptedNode, field: str, value: Any) -> None:
    def lie(reply: pb.SessionReply) -> pb.SessionReply:
        if field == "volumes":
            reply.volumes.extend(value)
        else:
            setattr(reply, field, value)
        return reply

    node.answer["OpenSession"] = lie
    with pytest.raises(ProtocolError):
        node.connect(options=OPTIONS)


def test_wrong_token(node: ScriptedNode) -> None:
    node.token = "wrong"
    with pytest.raises(Unauthenticated):
        node.connect(options=OPTIONS)


def test_nobody_there() -> None:
    with ScriptedNode() as node:
        url = node.url
    node.url = url
    with pytest.raises(Unavailable):
        node.connect(options=OPTIONS)


class Pieces:
    """The bytes of a connection as they come."""

    def feed(self, data: bytes, *, up: bool) -> list[Message]:
        return [Message("up" if up else "down", data)]


def test_an_attempt_to_connect_that_runs_out_of_time_is_made_again(node: ScriptedNode) -> None:
    silence = Cut("down", Moment.BEFORE, Action.SILENCE)
    with FaultProxy(("127.0.0.1", node.port), Pieces, silence) as proxy:
        options = replace(OPTIONS, attempt_ms=100, connect_ms=60_000)
        with connect(f"forebay://127.0.0.1:{proxy.port}", token=node.token, options=options) as client:
            assert proxy.cuts == 1, "the first connection said nothing"
            assert [r.stored for r in client.put(KEYS, VALUES)] == [True] * 3


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"forebay://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"):
            connect(url, token="t", options=replace(OPTIONS, attempt_ms=100, connect_ms=1_000))


def test_a_node_that_went_away(node: ScriptedNode, stored: Client) -> None:
    node.close()
    assert reasons(stored) == ["unavailable"] * 3
    assert set(stored.match(KEYS).reasons) == {"unavailable"}
    assert [r.reason for r in stored.put([b"new"], [b"x"])] == ["unavailable"]
    assert stored.stat(KEYS) == [StatResult("unavailable")] * 3
    assert stored.delete(KEYS) == ["unavailable"] * 3
    assert stored.wait(KEYS, 100)[0] in ("unavailable", "deadline_exceeded")


# --- writing ---


def test_present_pending_and_refused_rows(node: ScriptedNode, stored: Client) -> None:
    def lie(reply: pb.AllocateReply) -> pb.AllocateReply:
        reply.status = pack("u16", [2005, Pending.code, QuotaExceeded.code, 0])
        return reply

    node.answer["Allocate"] = lie
    results = stored.put([b"k0", b"x", b"y", b"z"], [b"1", b"2", b"3", b"4"])
    assert [(r.stored, r.present, r.reason) for r in results] == [
        (False, True, "already_exists"),
        (False, False, "pending"),
        (False, False, "quota_exceeded"),
        (True, True, "ok"),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", b""),
        ("write_ids", bytes(16)),
        ("volumes", b"x"),
        ("offsets", bytes(8)),
        ("offsets", pack("u64", [5, 6, 7])),
        ("offsets", pack("u64", [1 << 50] * 3)),
        ("lengths", pack("u64", [1, 1, 1])),
    ],
)
def test_an_allocate_that_makes_no_sense(node: ScriptedNode, client: Client, field: str, value: Any) -> None:
    node.answer["Allocate"] = set_field(field, value)
    assert {r.reason for r in client.put(KEYS, VALUES)} == {"protocol_error"}
    node.answer.clear()
    assert [r.stored for r in client.put(KEYS, VALUES)] == [True] * 3


def test_a_commit_that_makes_no_sense(node: ScriptedNode, client: Client) -> None:
    node.answer["Commit"] = set_field("status", b"123")
    assert {r.reason for r in client.put(KEYS, VALUES)} == {"protocol_error"}


def test_a_failed_write_is_aborted_quiesced_only_when_that_is_proven(node: ScriptedNode, client: Client) -> None:
    node.peer.write = lambda link, command, data: link.respond(command.cid, 0x286)
    assert {r.reason for r in client.put([b"x", b"y"], [b"1", b"2"])} == {"write_fenced"}
    eventually(lambda: len(node.named("Abort")) == 1, "the abort")
    assert node.named("Abort")[0].quiesced
    node.peer.write = lambda link, command, data: None
    assert {r.reason for r in client.put([b"z"], [b"1"], deadline_ms=1_000)} == {"deadline_exceeded"}
    eventually(lambda: len(node.named("Abort")) == 2, "the abort")
    assert not node.named("Abort")[1].quiesced
    client.close()
    assert [r.quiesced for r in node.named("CloseSession")] == [False]


def test_only_what_failed_is_not_stored(node: ScriptedNode, client: Client) -> None:
    store = node.peer.write

    def fence_second(link: Link, command: Command, data: bytearray) -> None:
        if command.slba <= 2 < command.slba + command.block_count:
            link.respond(command.cid, 0x286)
        else:
            store(link, command, data)

    node.peer.write = fence_second
    assert [r.reason for r in client.put(KEYS, VALUES)] == ["ok", "write_fenced", "ok"]
    assert reasons(client) == ["ok", "absent", "ok"]


def test_waiting_for_another_writer(node: ScriptedNode) -> None:
    options = ClientOptions(deadline_ms=20_000, wait_pending_ms=5_000)
    node.answer["Allocate"] = set_field("status", pack("u16", [Pending.code, Pending.code]))
    node.answer["Wait"] = lambda _: pb.WaitReply(indices=pack("u32", [1, 0]), status=pack("u16", [5001, 0]))
    with node.connect(options=options) as client:
        results = client.put([b"x", b"y"], [b"1", b"2"])
    assert [(r.present, r.reason) for r in results] == [(True, "already_exists"), (False, "pending")]


@pytest.mark.parametrize(
    "reply",
    [
        pb.WaitReply(indices=b"123", status=b""),
        pb.WaitReply(indices=pack("u32", [0, 1]), status=pack("u16", [0])),
    ],
)
def test_a_wait_that_makes_no_sense(node: ScriptedNode, client: Client, reply: pb.WaitReply) -> None:
    node.answer["Wait"] = lambda _: reply
    assert client.wait([b"x"], 5_000) == ["protocol_error"]


def test_wait_ignores_rows_that_were_not_asked_for(node: ScriptedNode, client: Client) -> None:
    node.answer["Wait"] = lambda _: pb.WaitReply(indices=pack("u32", [7, 0]), status=pack("u16", [0, 0]))
    assert client.wait([b"x"], 5_000) == ["ok"]


# --- other answers ---


def test_other_answers_that_make_no_sense(node: ScriptedNode, client: Client) -> None:
    node.answer["Match"] = set_field("status", b"1")
    assert client.match(KEYS).reasons == ("protocol_error",) * 3
    node.answer["Match"] = set_field("prefix_groups", b"1")
    assert client.match(KEYS).reasons == ("protocol_error",) * 3
    assert client.delete(KEYS) == client.pin(KEYS) == client.touch(KEYS) == ["protocol_error"] * 3
    assert client.stat(KEYS) == [StatResult("protocol_error")] * 3
    node.answer["Stat"] = set_field("status", bytes(6))
    assert client.stat(KEYS) == [StatResult("protocol_error")] * 3
    node.answer["List"] = lambda _: pb.ListReply(keys=pb.Keys(data=b"abc", stride=2))
    with pytest.raises(ProtocolError):
        list(client.list())
    node.answer["List"] = lambda _: pb.ListReply(next=b"round and round")
    with pytest.raises(ProtocolError):
        list(client.list())


def test_watch_goes_on_where_it_was(node: ScriptedNode, client: Client) -> None:
    """The stream breaks after each answer; nothing is seen twice, and a new log is a resync."""

    def events(request: pb.WatchRequest) -> list[pb.WatchReply]:
        seen = len(node.named("Watch"))
        log = 1 if seen < 3 else 2
        return [pb.WatchReply(log=log, events=[pb.Event(sequence=10 * seen, kind="stored", key=b"k")])]

    node.answer["Watch"] = events
    watching = client.watch()
    got = [next(watching) for _ in range(4)]
    watching.close()  # type: ignore[attr-defined]
    assert [(e.log, e.sequence, e.kind) for e in got] == [
        (1, 10, "stored"),
        (1, 20, "stored"),
        (2, 0, "resync"),
        (2, 30, "stored"),
    ]
    assert [(r.log, r.after_sequence) for r in node.named("Watch")] == [(0, 0), (1, 10), (1, 20)]


@pytest.mark.parametrize(("transport", "fenced"), [("auto", False), ("block", False), ("tcp", True)])
def test_reads_are_fenced_only_where_each_goes_by_the_target(node: ScriptedNode, transport: str, fenced: bool) -> None:
    """A block device passes the target by, which then refuses nothing: checksums are looked at."""
    node.reads_fenced = True
    with node.connect(options=replace(OPTIONS, transport=transport, verify="never")) as client:
        assert {route.reads_fenced for route in client._session.view.routes.values()} == {fenced}


def test_counters_wait_for_no_session(client: Client) -> None:
    """One that is being opened anew may take as long as the node takes to answer."""
    counted = threading.Event()

    def count() -> None:
        assert client.stats.reconnects == 0
        assert client.transports(deadline_ms=20_000)
        counted.set()

    with client._session._changing:
        threading.Thread(target=count, daemon=True).start()
        assert counted.wait(30)


def test_the_sessions_thread_survives(node: ScriptedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library raises in it: without it there are no heartbeats, and leases are given back by nobody."""
    raised = threading.Event()

    def failing(*_: object) -> None:
        raised.set()
        raise ZeroDivisionError

    monkeypatch.setattr(session, "_RETRY_MS", (10, 20))
    with monkeypatch.context() as patched:
        patched.setattr(Choice, "connect", failing)
        client = node.connect()
        assert raised.wait(30)
    eventually(lambda: len(node.named("Heartbeat")) >= 2, "the heartbeat after the one that it died of")
    client.close()
