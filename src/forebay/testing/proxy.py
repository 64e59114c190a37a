"""A proxy that cuts a connection at a chosen step of its protocol: before a message, within it, or after it.

What the steps are called is the business of a `Splitter` (`forebay.testing.steps`), which finds the messages in the two
streams of a connection. A run without a cut tells which steps there are (`FaultProxy.seen`), so that a test which cuts
at each of them cannot forget one.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ["Action", "Cut", "FaultProxy", "Message", "Moment", "Splitter"]

_READ_BYTES = 256 << 10


class Message(NamedTuple):
    """Bytes that go on as one, and the step that they are; "" for what is no step (a ping, the rest of a long one)."""

    step: str
    data: bytes


class Splitter(Protocol):
    """Finds messages in one connection. Each direction is fed by a thread of its own."""

    def feed(self, data: bytes, *, up: bool) -> Sequence[Message]:
        """The messages that ``data`` completes, of what the client sends (``up``) or of what it is sent."""


class Moment(Enum):
    """When in a step the cut comes: the message is held back, half of it goes on, or all of it."""

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class Action(Enum):
    """What happens to the connection. New connections are served as ever.

    ``CLOSE``: both ends see its end. ``RESET``: both see it reset. ``SILENCE``: it stays open and nothing crosses it
    any more, as if either peer were stopped. ``HALF_OPEN``: the server sees its end, the client silence; ``ORPHAN``:
    the other way round. ``DELAY``: the message and all that follows it come late, but come.
    """

    CLOSE = "close"
    RESET = "reset"
    SILENCE = "silence"
    HALF_OPEN = "half_open"
    ORPHAN = "orphan"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class Cut:
    """Act once, at the first message of that step."""

    step: str
    moment: Moment
    action: Action
    delay_s: float = 0.0


class FaultProxy:
    """Listens on a free port of 127.0.0.1, or on a UNIX socket, and connects each client to ``upstream``.

    ``seen`` counts the steps that came by; ``cuts`` those that were cut.
    """

    def __init__(
        self,
        upstream: tuple[str, int] | Path,
        splitter: Callable[[], Splitter],
        cut: Cut | None = None,
        *,
        listen: Path | None = None,
    ) -> None:
        self.seen: dict[str, int] = {}
        self.cuts = 0
        self._upstream = upstream
        self._splitter = splitter
        self._cut = cut
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._links: set[_Link] = set()
        if listen is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.port: int = self._listener.getsockname()[1]
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(listen))
            self._listener.listen(16)
            self.port = 0
        self._accepting = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._accepting.start()

    def arm(self, cut: Cut | None) -> None:
        """Cut there from now on, once."""
        with self._lock:
            self._cut = cut

    @property
    def links(self) -> int:
        """Connections that are not at their end, silent ones included."""
        return len(self._links)

    def close(self) -> None:
        """End every connection and stop listening."""
        self._ending.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for link in list(self._links):
            link.end()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            try:
                server = socket.socket(socket.AF_UNIX if isinstance(self._upstream, Path) else socket.AF_INET)
                server.connect(str(self._upstream) if isinstance(self._upstream, Path) else self._upstream)
            except OSError:
                client.close()
                server.close()
                continue
            if client.family == socket.AF_INET:
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(self, client, server, self._splitter())
            self._links.add(link)
            link.start()

    def _passing(self, step: str) -> Cut | None:
        """A message of a step comes by; the cut, if this is where."""
        with self._lock:
            self.seen[step] = self.seen.get(step, 0) + 1
            cut = self._cut
            if cut is None or cut.step != step:
                return None
            self._cut = None
            self.cuts += 1
            return cut

    def _forget(self, link: _Link) -> None:
        self._links.discard(link)


class _Link:
    """One client and its connection to the server, with a thread for each direction."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket, splitter: Splitter) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._splitter = splitter
        self._over = threading.Event()
        self._silent = threading.Event()
        self._running = 2

    def start(self) -> None:
        for up in (True, False):
            threading.Thread(target=self._run, args=(up,), name="proxy link", daemon=True).start()

    def end(self) -> None:
        """End both connections, whatever state they are in."""
        self._over.set()
        for sock in (self._client, self._server):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self, up: bool) -> None:
        source, sink = (self._client, self._server) if up else (self._server, self._client)
        try:
            while not self._over.is_set() and (data := source.recv(_READ_BYTES)):
                for message in self._splitter.feed(data, up=up):
                    self._pass(message, sink)
                    if self._silent.is_set():
                        self._over.wait()
                        return
                    if self._over.is_set():
                        return  # nothing goes on behind a gap
        except OSError:
            pass  # a peer is gone: so is the link
        finally:
            if not self._silent.is_set():
                self.end()
            with self._proxy._lock:
                self._running -= 1
                last = not self._running
            if last:
                self._client.close()
                self._server.close()
                self._proxy._forget(self)

    def _pass(self, message: Message, sink: socket.socket) -> None:
        cut = self._proxy._passing(message.step) if message.step else None
        if self._silent.is_set():
            return
        if cut is None:
            sink.sendall(message.data)
            return
        if cut.action is Action.DELAY:
            self._over.wait(cut.delay_s)
            sink.sendall(message.data)
            return
        if cut.moment is Moment.INSIDE:
            sink.sendall(message.data[: len(message.data) // 2])
        elif cut.moment is Moment.AFTER:
            sink.sendall(message.data)
        self._act(cut.action)

    def _act(self, action: Action) -> None:
        if action is Action.CLOSE:
            self.end()
        elif action is Action.RESET:
            for sock in (self._client, self._server):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._over.set()
            # Shut down for reading, so that the other thread wakes up; closing, with the linger time of 0, resets.
            for sock in (self._client, self._server):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RD)
        else:
            self._silent.set()
            gone = {Action.HALF_OPEN: self._server, Action.ORPHAN: self._client}.get(action)
            if gone is not None:
                with suppress(OSError):
                    gone.shutdown(socket.SHUT_RDWR)
