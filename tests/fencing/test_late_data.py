"""A destination buffer is used for something else after its read timed out, and then the data comes (design §6.5)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.queue_pair import QueuePair
from forebay.clock import SystemClock
from forebay.errors import ForebayError
from tests.fencing.conftest import OPTIONS, PRODUCT, Node, Out, out
from tests.fencing.wire import Wire

SIZE = 1 << 20
STALE, FRESH = b"\xaa" * SIZE, b"\xbb" * SIZE


class ClientsClock(SystemClock):
    """The system's, put forward."""

    ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


def keep_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the defence: a queue whose command was given up is neither closed nor dropped, but used for the next."""

    def fail(self: QueuePair, error: ForebayError) -> None:
        for request in self._open.values():
            request.error = error

    def check_in(self: NvmeTcpTransport, association: object, held: Sequence[QueuePair]) -> None:
        with self._changed:
            assert self._association is not None
            self._association.idle += held
            self._changed.notify_all()

    monkeypatch.setattr(QueuePair, "fail", fail)
    monkeypatch.setattr(NvmeTcpTransport, "_check_in", check_in)
    monkeypatch.setattr(QueuePair, "usable", lambda self: True)


@pytest.mark.parametrize(
    ("removed", "content"),
    [pytest.param(PRODUCT, FRESH, id="product"), pytest.param(out(), STALE, id="queues are kept")],
)
def test_the_owner_has_its_buffer_to_itself(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, removed: Out, content: bytes
) -> None:
    if removed is not PRODUCT:
        keep_queues(monkeypatch)
    slow, quick = os.urandom(8), os.urandom(8)
    clock = ClientsClock()
    with node.client(wire=wire, clock=clock) as client:
        assert all(result.stored for result in client.put([slow, quick], [STALE, bytes(4096)]))
        buffer = bytearray(SIZE)
        wire.hold("back")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(client.get_into, [slow], [buffer])
            wire.await_kept("back", SIZE)
            clock.ahead_ms += OPTIONS.deadline_ms
            assert reading.result(60)[0].reason == "lease_expired"  # as is its deadline
        buffer[:] = FRESH  # the owner has its buffer back
        wire.deliver("back")
        (result,) = client.get([quick])
        assert result.value is not None and bytes(result.value) == bytes(4096)
        assert buffer == content
