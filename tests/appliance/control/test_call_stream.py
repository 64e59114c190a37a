"""The stream of calls at the edge: order, bounds, cancellation, what breaks it, and a node that stops.

The server is the real one, in this process, with methods that a test holds back.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from forebay import request_id
from forebay.appliance.control import call_stream
from forebay.appliance.control.accounting import CANCELLED, Accounts
from forebay.appliance.control.calls import Calls, Method, finish
from forebay.appliance.control.server import ControlServer
from forebay.appliance.namespace.desired_state import Principal
from forebay.appliance.settings import Endpoint
from forebay.errors import OK, Busy, InvalidArgument, Unauthenticated, Unavailable, from_code
from forebay.proto import forebay_pb2 as pb
from tests.appliance.control.peer import Caller, CallStream

PRINCIPAL = Principal("p", b"", 0)


class Doors:
    """Who may come in."""

    def __init__(self) -> None:
        self.tokens = {"good"}

    def authenticate(self, token: str | None) -> Principal:
        if token not in self.tokens:
            raise Unauthenticated(field="token")
        return PRINCIPAL


class Spans:
    """A tracer that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.ends: list[int] = []

    def call(self, name: str, headers: Mapping[str, Any]) -> Spans:
        self.calls.append((name, headers.get("traceparent", "")))
        return self

    def end(self, code: int, principal: str) -> None:
        self.ends.append(code)


class Server:
    """Two methods: Match answers at once how many keys it was asked for, Commit when the test says so."""

    def __init__(self) -> None:
        self.doors = Doors()
        self.accounts = Accounts()
        self.go = asyncio.Event()
        self.began: list[bytes] = []
        self.ended: list[bytes] = []
        self.undone: list[bytes] = []
        self.ids: list[str] = []
        self.spans = Spans()
        calls = Calls(self.doors, Counter(), self.accounts, self.spans)  # type: ignore[arg-type]
        self.server = ControlServer(calls, self, _Nothing(), 64 << 20)  # type: ignore[arg-type]

    def methods(self) -> list[Method[Any, Any]]:
        return [
            Method("OpenSession", pb.OpenSessionRequest, self._match),
            Method("Match", pb.MatchRequest, self._match),
            Method("Commit", pb.CommitRequest, self._commit),
        ]

    async def _match(self, principal: Principal, request: Any) -> pb.MatchReply:
        self.ids.append(request_id.current())
        return pb.MatchReply(load_us=len(request.keys.data))

    async def _commit(self, principal: Principal, request: pb.CommitRequest) -> pb.CommitReply:
        async def work() -> bytes:
            self.began.append(request.write_ids)
            await self.go.wait()
            self.ended.append(request.write_ids)
            return request.write_ids

        async def undo(write_ids: bytes) -> None:
            self.undone.append(write_ids)

        return pb.CommitReply(status=await finish(work(), 60_000, undo))


class _Nothing:
    def methods(self) -> list[Method[Any, Any]]:
        return []


class Client:
    """A stream, from the other side."""

    def __init__(self, channel: grpc.aio.Channel, token: str = "good") -> None:
        calls: Any = channel.stream_stream(
            "/forebay.v1.Blocks/Calls",
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=pb.CallReply.FromString,
        )
        self.channel = channel
        self.call = calls(metadata=(("authorization", f"Bearer {token}"),))

    async def send(self, ident: int, method: str, request: Any, **rest: Any) -> None:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        await self.call.write(pb.CallRequest(id=ident, method=method, request=data, **rest))

    async def commit(self, ident: int, write_ids: bytes | None = None) -> None:
        await self.send(ident, "Commit", pb.CommitRequest(write_ids=write_ids or b"%d" % ident))

    async def match(self, ident: int, size: int = 0, **rest: Any) -> None:
        await self.send(ident, "Match", pb.MatchRequest(keys=pb.Keys(data=bytes(size))), **rest)

    async def read(self) -> pb.CallReply:
        reply = await self.call.read()
        assert isinstance(reply, pb.CallReply), await self.call.details()
        return reply


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, Client]]:
    server = Server()
    port = await server.server.start(Endpoint("127.0.0.1", 0))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, Client(channel)
    finally:
        await server.server.stop()


def run(test: Callable[[Server, Client], Awaitable[None]]) -> None:
    """A test with a deadline that only ends one that would fail."""

    async def go() -> None:
        async with serving() as (server, client):
            await test(server, client)

    asyncio.run(asyncio.wait_for(go(), 60))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def error_of(reply: pb.CallReply) -> Any:
    told = json.loads(reply.error)
    return from_code(told.pop("code"), told.pop("message"), **{k: v for k, v in told.items() if k != "error"})


async def ended_with(client: Client) -> Any:
    """What ended the stream: gRPC's status and our error."""
    code = await client.call.code()
    trailer = dict(await client.call.trailing_metadata())["forebay-error-bin"]
    return code.name, error_of(pb.CallReply(error=trailer))


def test_answers_come_as_they_are_ready() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.commit(7)
        await client.match(8, 5)
        reply = await client.read()
        assert (reply.id, pb.MatchReply.FromString(reply.reply).load_us) == (8, 5)
        server.go.set()
        assert (await client.read()).id == 7
        await client.call.done_writing()
        assert await client.call.read() is grpc.aio.EOF
        assert await client.call.code() is grpc.StatusCode.OK

    run(test)


def test_each_message_is_counted_and_named_as_a_call() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.match(1, request_id="mine", traceparent="theirs")
        await client.match(2)
        await client.send(3, "Match", pb.MatchRequest(context=pb.Context(request_id="inner")), request_id="outer")
        for _ in range(3):
            await client.read()
        assert [server.ids[0], server.ids[2]] == ["mine", "inner"] and server.ids[1] not in ("", "mine")
        assert server.accounts.of("grpc", "Match").outcomes == {OK: 3}
        assert server.spans.calls == [("grpc Calls", ""), ("grpc Match", "theirs"), *[("grpc Match", "")] * 2]
        assert server.spans.ends == [OK] * 3
        assert server.accounts.of("grpc", "Calls").in_flight == 1

    run(test)


def test_a_request_that_does_not_parse_is_that_calls_error_alone() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.commit(1)
        await client.send(2, "Match", b"\xff")
        reply = await client.read()
        assert reply.id == 2 and isinstance(error_of(reply), InvalidArgument)
        server.go.set()
        assert (await client.read()).id == 1

    run(test)


@pytest.mark.parametrize("method", ["", "NoSuch", "OpenSession", "Calls", "Wait", "x" * 1000])
def test_what_does_not_go_by_the_stream(method: str) -> None:
    async def test(server: Server, client: Client) -> None:
        await client.send(1, method, b"")
        error = error_of(await client.read())
        assert isinstance(error, InvalidArgument) and error.field == "method" and len(error.message) < 200
        await client.match(2)
        assert (await client.read()).id == 2

    run(test)


@pytest.mark.parametrize("how", ["malformed", "same id"])
def test_a_message_that_names_no_call_ends_the_stream(how: str) -> None:
    async def test(server: Server, client: Client) -> None:
        await client.commit(1)
        await until(lambda: server.began)
        with suppress(grpc.aio.AioRpcError):  # the end may come before the write is
            await (client.call.write(b"\xff\xff") if how == "malformed" else client.commit(1))
        status, error = await ended_with(client)
        assert status == "INVALID_ARGUMENT"
        assert (type(error), error.field) == (InvalidArgument, "request" if how == "malformed" else "id")
        server.go.set()
        await until(lambda: server.undone == [b"1"])  # nobody heard that it was done
        assert server.accounts.of("grpc", "Commit").outcomes == {CANCELLED: 1}

    run(test)


def test_a_cancelled_call_is_undone_and_not_answered() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.commit(1)
        await until(lambda: server.began)
        await client.call.write(pb.CallRequest(id=1, cancel=True))
        await client.call.write(pb.CallRequest(id=99, cancel=True))  # long answered, or never asked: nothing
        await client.commit(1)  # its id is free again
        await until(lambda: len(server.began) == 2)
        server.go.set()
        reply = await client.read()
        assert reply.id == 1 and pb.CommitReply.FromString(reply.reply).status == b"1"
        await until(lambda: server.undone == [b"1"])
        assert server.accounts.of("grpc", "Commit").outcomes == {CANCELLED: 1, OK: 1}
        await client.match(5)
        assert (await client.read()).id == 5

    run(test)


def test_a_client_that_goes_away_leaves_nothing_done() -> None:
    async def test(server: Server, client: Client) -> None:
        for i in range(3):
            await client.commit(i)
        await until(lambda: len(server.began) == 3)
        client.call.cancel()
        await until(lambda: server.accounts.of("grpc", "Calls").in_flight == 0)
        server.go.set()
        await until(lambda: len(server.undone) == 3)
        assert server.accounts.of("grpc", "Commit").in_flight == 0

    run(test)


@pytest.mark.parametrize("bound", ["calls", "bytes"])
def test_too_much_at_once_is_busy(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    if bound == "calls":
        monkeypatch.setattr(call_stream, "_MAX_CALLS", 3)
    else:
        monkeypatch.setattr(call_stream, "_MAX_BYTES", 3_100)

    async def test(server: Server, client: Client) -> None:
        for i in range(5):
            await client.commit(i, b"%01000d" % i)
        for ident in (3, 4):
            reply = await client.read()
            error = error_of(reply)
            assert (reply.id, type(error)) == (ident, Busy) and error.retry_after_ms > 0
        server.go.set()
        assert sorted([(await client.read()).id for _ in range(3)]) == [0, 1, 2]
        assert server.accounts.of("grpc", "Commit").outcomes == {OK: 3, Busy.code: 2}
        # Larger than the bound, and alone: it goes. Those before are over when gRPC has taken their answers.
        for ident in range(10, 100_000):
            await client.commit(ident, bytes(5_000))
            if not (await client.read()).error:
                break
        assert server.accounts.of("grpc", "Commit").outcomes[OK] == 4

    run(test)


def test_a_token_that_is_taken_away_counts_from_the_next_message_on() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.match(1)
        assert not (await client.read()).error
        server.doors.tokens.clear()
        await client.match(2)
        assert isinstance(error_of(await client.read()), Unauthenticated)

    run(test)


def test_a_wrong_token_opens_no_stream() -> None:
    async def test(server: Server, client: Client) -> None:
        stranger = Client(client.channel, "wrong")
        status, error = await ended_with(stranger)
        assert (status, type(error)) == ("UNAUTHENTICATED", Unauthenticated)
        await client.match(1)  # on a stream of its own
        assert not (await client.read()).error

    run(test)


def test_a_node_that_stops_answers_what_is_under_way() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.commit(1)
        await until(lambda: server.began)
        stopping = asyncio.create_task(server.server.stop())
        await asyncio.sleep(0)
        server.go.set()
        assert (await client.read()).id == 1
        status, error = await ended_with(client)
        assert (status, type(error)) == ("UNAVAILABLE", Unavailable)
        await stopping
        assert server.ended == [b"1"] and not server.undone

    run(test)


def test_a_node_that_stops_does_not_wait_for_streams_that_are_idle() -> None:
    async def test(server: Server, client: Client) -> None:
        await client.match(1)
        await client.read()
        await server.server.stop()
        status, error = await ended_with(client)
        assert (status, type(error)) == ("UNAVAILABLE", Unavailable)  # not cut off at the end of the grace

    run(test)


def test_many_messages_of_many_sizes_get_their_own_answers(caller: Caller) -> None:
    """Against a whole node, by a client that does not wait: every answer is of its own question."""
    stream = CallStream(caller.channel, caller._metadata)
    sizes = [(i * 37) % 300 + 1 for i in range(200)]
    for i, size in enumerate(sizes):
        request = pb.MatchRequest(context=caller.context(), keys=caller.keys(*[b"%d" % k for k in range(size)]))
        stream.send(pb.CallRequest(id=i, method="Match", request=request.SerializeToString()))
    found = {}
    for reply in stream.replies:
        assert not reply.error
        found[reply.id] = len(pb.MatchReply.FromString(reply.reply).status) // 2
        if len(found) == len(sizes):
            break
    assert found == dict(enumerate(sizes))
    stream.send(pb.CallRequest(id=1, method="Match", request=b"", cancel=False))
    assert isinstance(error_of(next(stream.replies)), InvalidArgument)
    stream.end()
    assert not list(stream.replies)
