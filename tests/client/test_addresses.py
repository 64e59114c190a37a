"""Names and their addresses: by the deadline, whatever the resolver does and however many of them are dead."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from forebay.client.transports import addresses
from forebay.client.transports.addresses import addresses_of
from forebay.client.transports.queue_pair import _connected
from forebay.clock import SystemClock
from forebay.errors import ConnectionLost, DeadlineExceeded
from tests.client.conftest import now_ms

LONG_MS = 30_000


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_is_looked_up_nowhere(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "begin", lambda *_: pytest.fail("it needs no thread"))
    (found,) = addresses_of(address, 4420, LONG_MS)
    assert found.address[:2] == (address, 4420)


def test_a_name_is_looked_up() -> None:
    assert ("127.0.0.1", 4420) in [one.address[:2] for one in addresses_of("localhost", 4420, LONG_MS)]


class Resolver:
    """The system's, but for names that are no address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], None]) -> None:
        self._real = socket.getaddrinfo
        self._answer = answer
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, name: str, port: int, *, type: int, flags: int) -> Any:
        if not flags:
            self._answer()
        return self._real(name, port, type=type, flags=flags)


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    Resolver(monkeypatch, unknown)
    with pytest.raises(ConnectionLost, match="not known"):
        addresses_of("no-such-name.invalid", 4420, LONG_MS)


def test_a_name_that_no_name_can_be() -> None:
    with pytest.raises(ConnectionLost, match="looking up"):
        addresses_of("n" * 64 + ".invalid", 4420, LONG_MS)


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def late() -> None:
        answers.wait(60)

    Resolver(monkeypatch, late)
    with pytest.raises(DeadlineExceeded, match="looking up"):
        addresses_of("localhost", 4420, 50)
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "forebay-resolve":
            thread.join(30)


@pytest.fixture
def deaf() -> Iterator[int]:
    """A port whose connections wait for ever: its listener has as many as it takes, and takes none of them."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waits = opened.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def named(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """A name that stands for several places."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_dead_addresses_share_the_deadline(deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, *[deaf] * 200)
    began_ms = now_ms()
    with pytest.raises(DeadlineExceeded, match="too long"):
        _connected("name", 4420, now_ms() + 300, SystemClock())
    assert now_ms() - began_ms < 30_000, "each address took as long as the call has"


def test_an_address_that_answers_is_found_behind_dead_ones(deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        closed = socket.socket()
        closed.bind(("127.0.0.1", 0))  # nobody listens
        named(monkeypatch, closed.getsockname()[1], deaf, port)
        with _connected("name", 4420, now_ms() + 3_000, SystemClock()) as found:
            assert found.getpeername()[1] == port
        closed.close()


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        named(monkeypatch, closed.getsockname()[1])
        with pytest.raises(ConnectionLost, match="refused"):
            _connected("name", 4420, now_ms() + LONG_MS, SystemClock())
