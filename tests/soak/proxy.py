"""A rough network between clients and a node: connections that are reset, stand still, or come late, at any byte."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["RoughProxy"]

_READ_BYTES = 256 << 10


class _Link:
    def __init__(self, client: socket.socket, server: socket.socket, done: Callable[[_Link], None]) -> None:
        self._ends = (client, server)
        self._done = done
        self._flowing = threading.Event()
        self._flowing.set()
        self._running = 2
        self._lock = threading.Lock()

    def start(self) -> None:
        for source, sink in (self._ends, self._ends[::-1]):
            threading.Thread(target=self._run, args=(source, sink), name="proxy", daemon=True).start()

    def _run(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_READ_BYTES):
                self._flowing.wait()
                sink.sendall(data)
        except OSError:
            pass  # a peer is gone: so is the link
        self.end()
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            for sock in self._ends:
                sock.close()
            self._done(self)

    def end(self, *, reset: bool = False) -> None:
        self._flowing.set()
        for sock in self._ends:
            with suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        self._flowing.clear()

    def let_go(self) -> None:
        self._flowing.set()


class RoughProxy:
    """Listens on a port of 127.0.0.1 and connects each client to ``upstream``, another port of it."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream), timeout=5)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server, self._forget)
            with self._lock:
                self._links.add(link)
            link.start()

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _some(self, choose: Callable[[list[_Link]], list[_Link]]) -> list[_Link]:
        with self._lock:
            return choose(list(self._links))

    def reset(self, choose: Callable[[list[_Link]], list[_Link]]) -> None:
        """End the connections that ``choose`` picks, without a word."""
        for link in self._some(choose):
            link.end(reset=True)

    def hold(self, choose: Callable[[list[_Link]], list[_Link]]) -> None:
        """Let nothing pass on these connections until `heal`."""
        for link in self._some(choose):
            link.hold()

    def heal(self) -> None:
        """Everything passes."""
        for link in self._some(list):
            link.let_go()

    def close(self) -> None:
        """End all of it."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._some(list):
            link.end()
