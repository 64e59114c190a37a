"""What the NVMe/RDMA transport must do when its target is lost: another guest, which is stopped. See test_rdma_wire.py.

A stopped guest acknowledges nothing and says nothing, as a machine without power or behind a cut wire; when it goes on
it does what it had begun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.client.registered import register
from forebay.client.transports.nvme_rdma import NvmeRdmaTransport
from forebay.errors import ConnectionLost, DeadlineExceeded, Unavailable
from tests.interop.asking import ask
from tests.interop.rdma_suite import SIZE, SLOW, eventually, make, now_ms, read, write

BEFORE = b"\xaa" * SIZE
DATA = b"\x55" * SIZE
SOON_MS = 5_000


@pytest.fixture
def transport() -> Iterator[NvmeRdmaTransport]:
    one = make(connections=2, keep_alive_ms=3_000)
    assert write(one, DATA).error is None
    assert write(one, DATA, SLOW).error is None
    yield one
    one.close()


@contextmanager
def lost() -> Iterator[None]:
    """Meanwhile the target's machine stands still."""
    ask("pause")
    try:
        yield
    finally:
        ask("resume")


def works(transport: NvmeRdmaTransport) -> None:
    into = bytearray(SIZE)
    eventually(lambda: read(transport, into, left_ms=SOON_MS).error is None, "it is back", 60)
    assert into == DATA


@pytest.mark.parametrize("registered", [False, True])
def test_calls_end_by_their_deadline_and_buffers_are_safe(transport: NvmeRdmaTransport, registered: bool) -> None:
    into = bytearray(BEFORE)
    registration = register(into) if registered else None
    with lost():
        began_ms = now_ms()
        outcome = read(transport, into, left_ms=1_000)
        assert isinstance(outcome.error, DeadlineExceeded | ConnectionLost)
        late = write(transport, os.urandom(SIZE), SLOW, left_ms=1_000)
        assert late.error is not None
        assert now_ms() - began_ms < 30_000, "nobody waited for the target"
        assert into == BEFORE
    works(transport)
    assert into == BEFORE, "what it did when it went on reached no buffer"
    if registration is not None:
        registration.close()


@pytest.mark.parametrize("registered", [False, True])
def test_a_target_that_is_lost_while_it_works(transport: NvmeRdmaTransport, registered: bool) -> None:
    """It has the command, and the bytes come when nobody wants them any more."""
    into = bytearray(BEFORE)
    registration = register(into) if registered else None
    assert isinstance(read(transport, into, SLOW, left_ms=300).error, DeadlineExceeded)
    with lost():
        assert into == BEFORE
    works(transport)
    assert into == BEFORE
    if registration is not None:
        registration.close()


def test_silence_is_noticed_and_the_way_back_found(transport: NvmeRdmaTransport) -> None:
    """By keep-alive, though no call is made; what is tried meanwhile ends, and closing waits for nobody."""
    with lost():
        eventually(lambda: not transport.state().connected, "its silence is noticed", 60)
        other = make(connections=1)
        into = bytearray(BEFORE)
        outcome = read(other, into, left_ms=1_000)
        assert isinstance(outcome.error, DeadlineExceeded | ConnectionLost | Unavailable)
        began_ms = now_ms()
        other.close()
        assert now_ms() - began_ms < 30_000
        assert into == BEFORE
    works(transport)
    assert transport.state().reconnects >= 1


def test_closing_while_it_is_lost(transport: NvmeRdmaTransport) -> None:
    with lost():
        began_ms = now_ms()
        transport.close()
        assert now_ms() - began_ms < 30_000
    one = make(connections=1)
    works(one)
    one.close()
