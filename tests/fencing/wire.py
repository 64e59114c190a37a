"""The network between clients and a target, in the test's hand: it keeps, delivers late and loses bytes."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from forebay.client import ClientOptions
from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import nvme_tcp
from forebay.clock import Clock
from forebay.ids import HostIdentity

__all__ = ["COMMAND_BYTES", "Way", "Wire"]

COMMAND_BYTES = 72
"""Of a command's PDU, before its data."""

Way = Literal["out", "back"]
"""Of a client's bytes: out to the target, or back from it."""
_PATIENCE_S = 30.0


@dataclass(eq=False)
class _Lane:
    """One direction of one connection: what is on its way, whether that is kept, and whether its sender has closed."""

    source: socket.socket
    sink: socket.socket
    kept: bytearray = field(default_factory=bytearray)
    held: bool = False
    over: bool = False
    passed: int = 0
    """Bytes that went on."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def flush(self) -> None:
        """Pass everything on. Bytes for a connection that is gone are lost, as in any network."""
        with suppress(OSError):
            self.sink.sendall(self.kept)
        self.passed += len(self.kept)
        self.kept.clear()


class Wire:
    """Stands between; clients reach the target on `port`. A context manager.

    With a ``delay_s`` everything takes up to so long.
    """

    def __init__(self, target_port: int, *, delay_s: float = 0.0, seed: int = 0) -> None:
        self._target_port = target_port
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._open = threading.Event()
        self._open.set()
        self._changed = threading.Condition()
        self._lanes: dict[Way, list[_Lane]] = {"out": [], "back": []}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def hold(self, way: Way) -> None:
        """From now on what goes this way on the connections that there are is kept."""
        with self._changed:
            for lane in self._lanes[way]:
                lane.held = True

    def await_kept(self, way: Way, count: int) -> None:
        """Wait until so many bytes are on their way, on one connection."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._kept(way) >= count, _PATIENCE_S)
            assert there, f"{self._kept(way)} of {count} bytes came"

    def _kept(self, way: Way) -> int:
        return max((len(lane.kept) for lane in self._lanes[way]), default=0)

    def deliver(self, way: Way) -> None:
        """What was kept arrives now, and what follows is not kept. That a sender closed meanwhile is lost."""
        with self._changed:
            lanes = list(self._lanes[way])
            for lane in lanes:
                lane.held = False
        for lane in lanes:
            with lane.lock:
                lane.flush()

    def deliver_and_await(self) -> None:
        """Deliver to the target, and wait until it has answered what was kept, or its connection had ended."""
        with self._changed:
            pairs = list(zip(self._lanes["out"], self._lanes["back"], strict=True))
            asked = [(back, back.passed) for out, back in pairs if out.kept]
        self.deliver("out")
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(back.over or back.passed > passed for back, passed in asked), _PATIENCE_S
            )
            assert done, "no answer"

    def cut(self) -> None:
        """Every connection breaks, and what was on its way is lost."""
        with self._changed:
            lanes = [lane for way in self._lanes.values() for lane in way]
            self._lanes = {"out": [], "back": []}
        for lane in lanes:
            with lane.lock:
                lane.kept.clear()
            with suppress(OSError):
                lane.source.shutdown(socket.SHUT_RDWR)

    def through(
        self,
        subsystem: SubsystemAddress,
        host: HostIdentity,
        nguids: Mapping[int, str],
        options: ClientOptions,
        clock: Clock,
    ) -> Transport:
        """The initiator by this way: a `TransportFactory`."""
        return nvme_tcp(replace(subsystem, port=self.port), host, nguids, options, clock)

    def bar(self) -> None:
        """Whoever connects from now on waits, until `admit`."""
        self._open.clear()

    def admit(self) -> None:
        """Those who wait get through."""
        self._open.set()

    def _spawn(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.wait()
            try:
                target = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            self._sockets += [client, target]
            for sock in (client, target):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out, back = _Lane(client, target), _Lane(target, client)
            with self._changed:
                self._lanes["out"].append(out)
                self._lanes["back"].append(back)
            self._spawn(partial(self._run, out))
            self._spawn(partial(self._run, back))

    def _run(self, lane: _Lane) -> None:
        while not lane.over:
            try:
                data = lane.source.recv(1 << 18)
            except OSError:
                data = b""
            time.sleep(self._random.random() * self._delay_s)
            with lane.lock:
                lane.kept += data
                lane.over = not data
                if not lane.held:
                    lane.flush()
                    if lane.over:
                        with suppress(OSError):
                            lane.sink.shutdown(socket.SHUT_WR)
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        self.admit()
        self.cut()
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
