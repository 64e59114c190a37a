import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.dataplane.json_stream import JsonStream
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient, translate
from forebay.errors import (
    AlreadyExists,
    Busy,
    ForebayError,
    NoSpace,
    NotFound,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
)

Answering = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(path: Path, answer: Answering) -> AsyncIterator[None]:
    """A peer that does with each request what a test says: what no real target would do on demand."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        stream = JsonStream(1 << 20)
        try:
            while data := await reader.read(65_536):
                for request in stream.feed(data):
                    await answer(request, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reply(request: dict[str, Any], result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()


async def echo(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(reply(request, request.get("params")))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (-errno.ENOSPC, NoSpace),
        (-errno.EEXIST, AlreadyExists),
        (-errno.ENODEV, NotFound),
        (-errno.ENOENT, NotFound),
        (-errno.EBUSY, Busy),
        (-errno.EIO, TargetFailed),
        (-32601, TargetRefused),
        (-32602, TargetRefused),
        (-32603, TargetFailed),
        (12345, TargetFailed),
    ],
)
def test_each_error_of_the_target_has_one_of_ours(code: int, error: type[ForebayError]) -> None:
    found = translate("bdev_aio_create", {"code": code, "message": "why"})
    assert type(found) is error
    assert "why" in str(found) and "bdev_aio_create" in str(found)


@pytest.mark.parametrize("malformed", [None, "text", {}, {"code": "1"}, []])
def test_a_malformed_error_is_a_protocol_error(malformed: Any) -> None:
    assert isinstance(translate("m", malformed), ProtocolError)


class TestStream:
    @given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers()), max_size=5), st.data())
    def test_objects_come_whole_however_the_bytes_are_cut(
        self, values: list[dict[str, Any]], data: st.DataObject
    ) -> None:
        text = b"\n ".join(json.dumps(value, ensure_ascii=False).encode() for value in values)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        stream = JsonStream(1 << 20)
        found: list[Any] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            found += stream.feed(text[start:end])
        assert found == values

    @pytest.mark.parametrize(
        "data",
        [
            b"}",
            b'"a"}',
            b"HTTP/1.1 {}",
            b"HTTP/1.1 200",
            b'{"a": NaN}',
            b'{"a": ' + b"9" * 5000 + b"}",
            b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"a" 1}',
        ],
        ids=["bracket", "text", "HTTP", "HTTP at once", "NaN", "huge number", "deep", "deep arrays", "no colon"],
    )
    def test_what_is_no_message_is_refused(self, data: bytes) -> None:
        with pytest.raises(ProtocolError):
            list(JsonStream(1 << 20).feed(data))

    @pytest.mark.parametrize("pause", [b"\n", b" \r\n", b"\0"])
    def test_space_between_values_is_the_begin_of_none(self, pause: bytes) -> None:
        stream = JsonStream(1 << 20)
        assert list(stream.feed(b'{"a": 1}')) == [{"a": 1}]
        assert list(stream.feed(pause)) == [] and not stream.unfinished
        assert list(stream.feed(b"{")) == [] and stream.unfinished
        assert list(stream.feed(b"}")) == [{}] and not stream.unfinished

    @pytest.mark.parametrize("piece_bytes", [1_000, 65_537, 300_001])
    def test_values_without_a_pause_between_them_come_before_the_end(self, piece_bytes: int) -> None:
        """No piece ends where a value ends, and all of them together are longer than one may be."""
        one = {"id": 1, "result": "é" * 50_000}
        data = json.dumps(one, ensure_ascii=False).encode() * 80
        stream, found = JsonStream(1 << 20), 0
        for at in range(0, len(data) - 1, piece_bytes):
            piece = data[at : min(at + piece_bytes, len(data) - 1)]
            for value in stream.feed(piece):
                assert value == one
                found += 1
        assert found >= 70
        assert list(stream.feed(b"}")) == [one] * (80 - found)

    def test_what_came_before_nonsense_is_there(self) -> None:
        found = JsonStream(1 << 20).feed(b'{"a": 1} [2] }')
        assert (next(found), next(found)) == ({"a": 1}, [2])
        with pytest.raises(ProtocolError):
            next(found)

    def test_a_message_without_end_is_refused(self) -> None:
        stream = JsonStream(max_message_bytes=100)
        assert list(stream.feed(b'{"a": "' + b"x" * 80)) == []
        with pytest.raises(ProtocolError):
            list(stream.feed(b"x" * 80))


async def test_several_requests_share_a_connection_and_may_be_answered_in_any_order(tmp_path: Path) -> None:
    held: list[bytes] = []

    async def backwards(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        held.append(reply(request, request["params"]["n"]))
        if len(held) == 8:
            writer.write(b"".join(reversed(held)))

    async with scripted(tmp_path / "s", backwards):
        client = JsonRpcClient(tmp_path / "s")
        assert await asyncio.gather(*(client.call("m", {"n": n}) for n in range(8))) == list(range(8))
        await client.close()


async def test_parameters_that_are_none_are_left_out(tmp_path: Path) -> None:
    async with scripted(tmp_path / "s", echo):
        client = JsonRpcClient(tmp_path / "s")
        assert await client.call("m", {"a": None, "b": 0}) == {"b": 0}
        assert await client.call("m") is None
        await client.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        await JsonRpcClient(tmp_path / "s").call("m")


async def test_a_late_answer_is_unavailable_and_disturbs_no_later_call(tmp_path: Path) -> None:
    late: list[bytes] = []

    async def slow(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if request["method"] == "slow":
            late.append(reply(request, "late"))
        else:
            writer.write(b"".join(late) + reply(request, "in time"))

    async with scripted(tmp_path / "s", slow):
        client = JsonRpcClient(tmp_path / "s")
        assert await client.call("quick") == "in time"  # connected
        with pytest.raises(Unavailable, match="no answer within"):
            await client.call("slow", timeout_s=0.05)
        async with asyncio.timeout(60):
            while not late:
                await asyncio.sleep(0)
        assert await client.call("quick") == "in time"
        await client.close()


async def test_a_lost_connection_fails_what_waits_and_the_next_call_opens_another(tmp_path: Path) -> None:
    async def hang_up(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if request["method"] == "die":
            writer.write(b'{"jsonrpc": "2.0", "id"')
            await writer.drain()
            writer.close()
        elif request["method"] == "echo":
            await echo(request, writer)

    async with scripted(tmp_path / "s", hang_up):
        client = JsonRpcClient(tmp_path / "s")
        waiting = asyncio.create_task(client.call("wait"))
        with pytest.raises(Unavailable, match="closed"):
            await client.call("die")
        with pytest.raises(Unavailable, match="closed"):
            await waiting
        assert await client.call("echo", {"n": 1}) == {"n": 1}
        await client.close()


async def test_a_peer_that_speaks_something_else_is_a_protocol_error(tmp_path: Path) -> None:
    async def other(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x {}")

    async with scripted(tmp_path / "s", other):
        client = JsonRpcClient(tmp_path / "s")
        with pytest.raises(ProtocolError):
            await client.call("m")
        await client.close()


async def test_an_answer_without_result_is_a_protocol_error(tmp_path: Path) -> None:
    async def empty(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"id": "other"}).encode() + json.dumps({"id": request["id"]}).encode())

    async with scripted(tmp_path / "s", empty):
        client = JsonRpcClient(tmp_path / "s")
        with pytest.raises(ProtocolError, match="neither"):
            await client.call("m")
        await client.close()


async def test_closing_fails_what_waits(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def silent(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.set()

    async with scripted(tmp_path / "s", silent):
        client = JsonRpcClient(tmp_path / "s")
        waiting = asyncio.create_task(client.call("m"))
        await seen.wait()
        await client.close()
        with pytest.raises(Unavailable, match="was closed"):
            await waiting


async def test_a_peer_that_reads_nothing_does_not_make_us_hold_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.appliance.dataplane.jsonrpc.MAX_UNSENT_BYTES", 1 << 20)
    going_on = asyncio.Event()

    async def stuck(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await going_on.wait()

    async with scripted(tmp_path / "s", stuck):
        client = JsonRpcClient(tmp_path / "s", timeout_s=60.0)
        calls = [asyncio.create_task(client.call("m", {"x": "y" * 200_000})) for _ in range(20)]
        refused, held = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert held and all("does not read" in str(call.exception()) for call in refused)
        for call in held:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await client.close()
