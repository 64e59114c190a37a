"""Peers that say nothing, or a byte now and then, or take nothing: they end, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forebay.appliance.control import http_server
from forebay.appliance.control.http_edge import Receive, Scope, Send
from forebay.appliance.control.http_server import HttpServer
from forebay.appliance.dataplane.target import rpc
from forebay.appliance.dataplane.target.rpc import Method, Params, RpcServer
from forebay.appliance.settings import Endpoint
from tests.pressure.conftest import CALM, Node, Process, eventually

LIMIT_S = 0.5
"""In place of the product's limits where a test would have to wait for them."""
REQUEST = b"GET / HTTP/1.1\r\nhost: node\r\n\r\n"
LARGE_BYTES = 64 << 20


def ended(sock: socket.socket, trickle: bytes = b"", *, pause_s: float = 0.05, within_s: float = 60.0) -> bytes:
    """What a peer says until it ends the connection, while ``trickle`` goes to it byte by byte."""
    sock.settimeout(pause_s)
    said, at, end = bytearray(), 0, time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if at < len(trickle):
                sock.sendall(trickle[at : at + 1])
                at += 1
            data = sock.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return bytes(said)
        if not data:
            return bytes(said)
        said += data
    raise AssertionError(f"still connected after {within_s} s")


# --- HTTP -------------------------------------------------------------------------------------------------------------


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers ``/``, and ``/large`` with more than sockets hold."""
    body = bytes(LARGE_BYTES) if scope["path"] == "/large" else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, HttpServer]]:
    """A server with short limits, in a thread of its own: its port and itself."""
    monkeypatch.setattr(http_server, "_HEADER_S", LIMIT_S)
    monkeypatch.setattr(http_server, "_TAKEN_MS", int(LIMIT_S * 1000))
    server = HttpServer(application)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> int:
        return server.start(Endpoint("127.0.0.1", 0))

    yield asyncio.run_coroutine_threadsafe(start(), loop).result(30), server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def get(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        return ended(sock)


@pytest.mark.parametrize("trickle", [b"", b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 10_000], ids=["silent", "trickle"])
def test_a_header_has_a_time_by_which_it_must_be_here(http: tuple[int, HttpServer], trickle: bytes) -> None:
    port, _ = http
    with socket.create_connection(("127.0.0.1", port)) as slow:
        assert ended(slow, trickle).startswith(b"HTTP/1.1 408 ")
        assert get(port).endswith(b"ok")
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(REQUEST)
        assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert ended(slow, trickle or REQUEST[:1]).endswith(b"content-length: 0\r\n\r\n"), "a further one too"


def test_who_takes_no_response_ends(http: tuple[int, HttpServer]) -> None:
    port, server = http
    with socket.create_connection(("127.0.0.1", port)) as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.sendall(REQUEST.replace(b"GET /", b"GET /large"))
        connections = server._server.server_state.connections
        eventually(lambda: len(connections) == 1, "it is there")
        assert get(port).endswith(b"ok")
        eventually(lambda: not connections, "it is gone")


def test_more_connections_than_there_are_places(http: tuple[int, HttpServer], monkeypatch: pytest.MonkeyPatch) -> None:
    port, server = http
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(http_server, "_HEADER_S", 60.0)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    eventually(lambda: len(server._server.server_state.connections) == 4, "all are there")
    assert b" 503 " in get(port)
    for one in idle:
        one.close()
    eventually(lambda: get(port).endswith(b"ok"), "there are places again")


# --- the target's control socket --------------------------------------------------------------------------------------


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """A control socket with short limits; connects to it."""
    monkeypatch.setattr(rpc, "_UNFINISHED_S", LIMIT_S)
    monkeypatch.setattr(rpc, "_MAX_SESSIONS", 4)
    path = tmp_path / "s"

    def echo(params: Params) -> Any:
        return params.text("text")

    server = RpcServer(path, {"echo": Method(echo), "wait": Method(echo, waits=True)})
    server.start()
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].connect(str(path))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()
    server.close()


def call(sock: socket.socket, text: str = "hello", method: str = "echo") -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": {"text": text}}).encode()


def answered(sock: socket.socket) -> bool:
    sock.settimeout(60)
    try:
        sock.sendall(call(sock))
        return b"hello" in sock.recv(65536)
    except ConnectionError:
        return False


def test_a_control_request_has_a_time_by_which_it_must_be_here(control: Callable[[], socket.socket]) -> None:
    idle, stopped, trickling = control(), control(), control()
    assert answered(idle)
    stopped.sendall(b'{"jsonrpc": ')
    assert b"Parse error" in ended(stopped)
    assert b"Parse error" in ended(trickling, call(trickling, "x" * 100_000))
    assert answered(idle), "between requests there is all the time of the world"


@pytest.mark.parametrize("method", ["echo", "wait"])
def test_a_control_connection_that_takes_no_answer_ends(control: Callable[[], socket.socket], method: str) -> None:
    greedy, other = control(), control()
    with suppress(OSError):  # it ends while we send
        for _ in range(100):
            greedy.sendall(call(greedy, "x" * 100_000, method))
    assert answered(other)
    ended(greedy)
    assert answered(other)


def test_the_most_silent_control_connection_makes_way(control: Callable[[], socket.socket]) -> None:
    first = control()
    assert answered(first)
    others = [control() for _ in range(3)]
    for one in others:
        assert answered(one)
    assert answered(first)
    assert answered(control())
    assert not answered(others[0])
    assert answered(first)


# --- a node, by its own limits ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_node_is_rid_of_peers_that_say_nothing(node: Node) -> None:
    """On each of its addresses, in half a minute, while a client goes on; nothing of them is left."""
    ports = {name: int(str(node.info[name]).rpartition(":")[2]) for name in ("grpc", "http")}
    ports["nvme"] = int(node.nvme.rpartition(":")[2])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100
    trickles = {"grpc": preface, "http": REQUEST[:-4] + b"x" * 1000, "nvme": bytes([0, 0, 128, 0, 128, 0, 0, 0]) * 100}
    parts: dict[str, Process] = {"daemon": node.daemon, "target": node.target}
    before = {name: part.descriptors for name, part in parts.items()}
    opened: list[tuple[socket.socket, bytes]] = []
    for name, port in ports.items():
        for trickle in (b"", trickles[name]):
            opened += [(socket.create_connection(("127.0.0.1", port)), trickle) for _ in range(20)]
    with ThreadPoolExecutor(len(opened)) as pool, node.connect(options=CALM) as client:
        endings = [pool.submit(ended, sock, trickle, pause_s=1.0, within_s=90.0) for sock, trickle in opened]
        while not all(one.done() for one in endings):
            key = str(time.monotonic_ns()).encode()
            assert client.put([key], [key])[0].stored
            assert bytes(client.get([key])[0].value or b"") == key
            time.sleep(0.2)
        for one in endings:
            one.result()
    for sock, _ in opened:
        sock.close()
    eventually(
        lambda: all(part.descriptors <= before[name] + 2 for name, part in parts.items()),
        lambda: f"descriptors: {before} before, { ({name: part.descriptors for name, part in parts.items()}) } after",
    )
