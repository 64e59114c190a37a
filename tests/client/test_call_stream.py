"""Calls by one stream (docs/adr/0008-call-stream.md): what they are answered, and what happens when it breaks."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from forebay.client import Client, ClientOptions, call_stream
from forebay.clock import ManualClock
from forebay.errors import Busy, ForebayError, Unavailable
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import unpack
from tests.client.conftest import NodeProcess, eventually, stop
from tests.client.scripted_node import ScriptedNode

KEYS = [b"k0", b"k1", b"k2"]
VALUES = [b"a" * 5000, b"b" * 8192, b"c"]
OPTIONS = ClientOptions(deadline_ms=30_000, attempt_ms=5_000)  # a busy machine connects when it can
UNARY = replace(OPTIONS, call_stream=False)


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    with ScriptedNode() as node:
        yield node


@pytest.fixture
def client(node: ScriptedNode) -> Iterator[Client]:
    with node.connect(options=OPTIONS) as client:
        assert [r.stored for r in client.put(KEYS, VALUES)] == [True] * 3
        yield client


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Gate:
    """Holds the replies of a node back until it is opened."""

    def __init__(self, node: ScriptedNode) -> None:
        self.reached = threading.Semaphore(0)
        self._opened = threading.Event()
        self.fails: ForebayError | None = None
        node.on_reply = self._pass

    def _pass(self, reply: pb.CallReply) -> pb.CallReply:
        self.reached.release()
        assert self._opened.wait(60)
        if self.fails is not None:
            raise self.fails
        return reply

    def open(self, fails: ForebayError | None = None) -> None:
        self.fails = fails
        self._opened.set()


def everything(client: Client) -> list[Any]:
    """Each call once: its answer."""
    return [
        [r.reason for r in client.put([*KEYS, b"new"], [*VALUES, b"n"])],
        [(r.reason, bytes(r.value or b"")) for r in client.get([*KEYS, b"none"])],
        client.match([*KEYS, b"none"]).reasons,
        [s.reason for s in client.stat([b"k0"])],
        client.delete([b"k0"]),
        client.touch([b"k0"]),
        client.pin([b"k0"]),
        list(client.list()),
    ]


def test_every_call_goes_by_one_stream_and_is_answered_as_by_itself(node: ScriptedNode, client: Client) -> None:
    by_stream = everything(client)
    assert node.opened == 1
    with node.connect(options=UNARY) as unary:
        del node.blocks[next(key for key in node.blocks if key.key == b"new")]
        assert everything(unary) == by_stream
    assert node.opened == 1


def test_a_node_of_before_the_stream_is_asked_once(node: ScriptedNode, caplog: pytest.LogCaptureFixture) -> None:
    node.streams = False
    with caplog.at_level(logging.INFO, "forebay.client.rpc"), node.connect(options=OPTIONS) as client:
        assert [r.stored for r in client.put(KEYS, VALUES)] == [True] * 3
        asked = node.opened  # the session's own thread may have asked at the same time
        assert 1 <= asked <= 2
        assert [bytes(r.value or b"") for r in client.get(KEYS)] == VALUES
        eventually(lambda: len(node.given_back()) == 1, "the lease is back")
    assert node.opened == asked
    assert len([r for r in caplog.records if "stream of calls" in r.message]) == 1


def test_a_process_that_may_have_no_more_threads_opens_no_stream(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are misses at once, and not by their deadlines, until there are threads again."""
    start = threading.Thread.start

    def none_left(self: threading.Thread) -> None:
        if self.name == "forebay-calls":
            raise RuntimeError("can't start new thread")
        start(self)

    stream = client._session.rpc._stream._current
    assert stream is not None
    stream.close()
    eventually(lambda: stream.ended, "the stream has ended")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        for _ in range(2):
            assert set(client.match(KEYS).reasons) == {"unavailable"}
    assert set(client.match(KEYS).reasons) == {"ok"}


def test_who_was_turned_away_and_then_got_no_answer_ran_out_of_time(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the node had turned it away before: the last try may have been carried out."""
    options = replace(OPTIONS, attempt_ms=99)
    with node.connect(options=options, clock=ManualClock()) as client:  # by which no time passes
        node.fail["Match"] = Busy(retry_after_ms=1)
        rpc = client._session.rpc

        def wait(_: float) -> bool:
            node.fail.clear()
            gates.append(Gate(node))
            return False

        gates: list[Gate] = []
        monkeypatch.setattr(rpc._closed, "wait", wait)
        assert set(client.match(KEYS, deadline_ms=500).reasons) == {"deadline_exceeded"}
        node.on_reply = lambda reply: reply
        for gate in gates:
            gate.open()


@pytest.mark.parametrize("error", [Busy("full", field="f", limit=7, retry_after_ms=70_000), Busy()])
def test_an_error_arrives_with_all_it_says(node: ScriptedNode, client: Client, error: ForebayError) -> None:
    node.fail["List"] = error
    with pytest.raises(Busy) as caught:
        list(client.list())
    assert caught.value.to_dict() == error.to_dict()


@pytest.mark.parametrize(
    "lie",
    [
        lambda reply: pb.CallReply(id=reply.id, reply=b"\xff"),
        lambda reply: pb.CallReply(id=reply.id, error=b"no JSON"),
        lambda reply: pb.CallReply(id=reply.id),
    ],
)
def test_replies_that_make_no_sense(node: ScriptedNode, client: Client, lie: Callable[[Any], pb.CallReply]) -> None:
    node.on_reply = lie
    assert set(client.match(KEYS).reasons) == {"protocol_error"}
    node.on_reply = lambda reply: reply
    assert set(client.match(KEYS).reasons) == {"ok"}
    assert node.opened == 1


def test_a_reply_to_nobody_is_dropped(node: ScriptedNode, client: Client) -> None:
    node.on_reply = lambda reply: pb.CallReply(id=reply.id + 1000, reply=reply.reply)
    assert set(client.match(KEYS, deadline_ms=200).reasons) == {"deadline_exceeded"}
    node.on_reply = lambda reply: reply
    assert set(client.match(KEYS).reasons) == {"ok"}


def test_a_deadline_that_passes_cancels_and_mixes_nothing_up(node: ScriptedNode, client: Client) -> None:
    gate = Gate(node)

    def too_late() -> bool:
        assert set(client.match(KEYS, deadline_ms=100).reasons) == {"deadline_exceeded"}
        return gate.reached.acquire(blocking=False)  # on a busy machine a call may be late before it is sent

    eventually(too_late, "a call that the node has")
    gate.open()  # now the answer comes, and is nobody's
    assert client.match([b"none"]).reasons == ("absent",)
    assert set(client.match(KEYS).reasons) == {"ok"}
    eventually(lambda: node.named("cancel"), "the node was told")
    assert node.opened == 1


def test_an_answer_that_comes_at_the_deadline_is_the_answer(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken off by the reading thread, and not yet handed over, when its caller stops waiting."""
    refused = threading.Event()

    class Slow(call_stream._Waiting):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "reply" and value is not None:
                assert refused.wait(60)
            super().__setattr__(name, value)

    give_up = call_stream._Stream.give_up

    def told(stream: Any, waiting: Any) -> bool:
        eventually(lambda: waiting.id not in stream._waiting, "the reading thread has it")
        given_up = give_up(stream, waiting)
        refused.set()
        return given_up

    monkeypatch.setattr(call_stream, "_Waiting", Slow)
    monkeypatch.setattr(call_stream._Stream, "give_up", told)
    session = client._session
    request = pb.MatchRequest(context=session.view.context(30_000), keys=pb.Keys(data=b"k0", stride=2))
    answer = session.rpc._stream.call("Match", request.SerializeToString(), 0.0, "")
    assert unpack("u16", pb.MatchReply.FromString(answer.reply).status, "status", 1) == [0]
    assert refused.is_set()


def test_a_stream_that_breaks_fails_all_who_wait_and_no_other(
    node: ScriptedNode, client: Client, threads: ThreadPoolExecutor
) -> None:
    gate = Gate(node)
    waiting = [threads.submit(client.match, KEYS) for _ in range(4)]
    assert gate.reached.acquire(timeout=30)
    eventually(lambda: len(client._session.rpc._stream._current._waiting) == 4, "four calls wait")  # type: ignore[union-attr]
    gate.open(fails=Unavailable("the stream breaks"))
    assert {reason for one in waiting for reason in one.result(30).reasons} == {"unavailable"}
    node.on_reply = lambda reply: reply
    assert set(client.match(KEYS).reasons) == {"ok"}
    assert node.opened == 2


def test_too_many_calls_wait_their_turn_if_there_is_time(
    node: ScriptedNode, client: Client, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_stream, "_MAX_CALLS", 2)
    gate = Gate(node)
    first: list[Future[Any]] = [threads.submit(client.match, KEYS) for _ in range(2)]
    stream = client._session.rpc._stream
    eventually(lambda: stream._current is not None and len(stream._current._waiting) == 2, "two are under way")
    with monkeypatch.context() as patched:
        patched.setattr(call_stream, "_RETRY_MS", OPTIONS.deadline_ms)  # so that none of them has the time
        hasty = [client.match(KEYS) for _ in range(4)]
    assert {reason for one in hasty for reason in one.reasons} == {"busy"}
    patient: list[Future[Any]] = [threads.submit(client.match, KEYS) for _ in range(4)]
    gate.open()
    assert {one.result(30).reasons[0] for one in (*first, *patient)} == {"ok"}


def test_what_a_node_never_takes_is_bounded(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that were given up before gRPC could send them stay in no queue for ever."""
    monkeypatch.setattr(call_stream, "_MAX_CALLS", 4)
    gate = Gate(node)  # gRPC takes a window's worth of the first, and no second
    large = [b"%01000d" % i for i in range(4_000)]
    reasons = [client.match(large, deadline_ms=50).reasons[0] for _ in range(12)]
    assert set(reasons[:4]) == {"deadline_exceeded"}
    assert client._session.rpc._stream._current._outbox.qsize() <= 4 + 4  # type: ignore[union-attr]
    node.on_reply = lambda reply: reply
    gate.open()
    eventually(lambda: client.match(KEYS).reasons[0] == "ok", "calls go on")


def test_close_ends_calls_under_way(node: ScriptedNode, threads: ThreadPoolExecutor) -> None:
    with node.connect(options=OPTIONS) as client:
        gate = Gate(node)
        waiting = threads.submit(client.match, KEYS)
        assert gate.reached.acquire(timeout=30)
        client._session.rpc.close()
        assert set(waiting.result(30).reasons) == {"unavailable"}
        assert set(client.match(KEYS).reasons) == {"unavailable"}
        gate.open()


def test_a_full_stream_keeps_no_heartbeat_back(
    node: ScriptedNode, client: Client, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_stream, "_MAX_CALLS", 2)
    gate, session = Gate(node), client._session
    waiting = [threads.submit(client.match, KEYS) for _ in range(2)]
    stream = session.rpc._stream._current
    eventually(lambda: len(stream._waiting) == 2, "both are under way")  # type: ignore[union-attr]
    assert session._beat(session.view, session._clock.monotonic_ms() + 30_000)
    gate.open()
    for one in waiting:
        assert one.result(30).reasons == ("ok",) * 3


# --- a whole node ---


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_ends_with_calls_under_way(
    node_process: NodeProcess, threads: ThreadPoolExecutor, how: signal.Signals
) -> None:
    node = node_process
    with node.connect(options=replace(OPTIONS, deadline_ms=60_000)) as client:
        assert client.put(KEYS, VALUES)[0].stored
        stop(node.process.pid)
        waiting = [threads.submit(client.match, KEYS) for _ in range(4)]
        waiting += [threads.submit(client.put, [b"n%d" % i], [b"v"]) for i in range(2)]  # type: ignore[arg-type]
        stream = client._session.rpc._stream._current
        eventually(lambda: len(stream._waiting) >= 6, "all have been sent")  # type: ignore[union-attr]
        node.process.send_signal(how)
        node.process.send_signal(signal.SIGCONT)
        node.process.wait(30)
        # SIGTERM: what had arrived is answered. SIGKILL: nobody knows.
        for one in waiting:
            one.result(30)
        if how == signal.SIGKILL:
            os.kill(int(node._target()["pid"]), signal.SIGKILL)  # type: ignore[call-overload]
        node.start()
        eventually(lambda: client.match(KEYS).reasons == ("ok",) * 3, "the client finds it again")
        assert [bytes(r.value or b"") for r in client.get(KEYS)] == VALUES
        assert client.put([b"after"], [b"v"])[0].stored


@pytest.fixture
def node_process(tmp_path: Any) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path / "data")
    yield node
    node.stop()
