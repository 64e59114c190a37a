"""Reads of blocks whose namespace is full, so that every new block needs another's place (design §6.3, §6.4, §6.6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from forebay.client import Admin
from tests.fencing.conftest import PRODUCT, Node, Out, got, out
from tests.fencing.wire import COMMAND_BYTES, Wire

BLOCKS = 4
"""So many blocks of 4 KiB fill the namespace."""
FRESH = b"\xbb" * 4096


@pytest.fixture
def full(node: Node) -> Iterator[str]:
    """A namespace of its own, with little room."""
    name = f"full/{os.urandom(4).hex()}"
    with Admin(node.url, token=node.token) as admin:
        admin.create_namespace(name, quota_bytes=BLOCKS * 4096)
        yield name
        admin.delete_namespace(name, force=True)


@dataclass(frozen=True)
class Seen:
    present: bool
    read: tuple[str, bytes]


SOUND = Seen(True, ("ok", FRESH))
GONE, HARM = Seen(False, ("ok", FRESH)), Seen(False, ("checksum_mismatch", b""))


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(PRODUCT, SOUND, id="product"),
        pytest.param(out("free-leased"), SOUND, id="eviction spares leased blocks"),
        pytest.param(out("evict-leased"), GONE, id="extents stay until their leases end"),
        pytest.param(out("evict-leased", "free-leased"), HARM, id="neither"),
    ],
)
def test_a_leased_block(node: Node, wire: Wire, full: str, removed: Out, seen: Seen) -> None:
    """The read is on its way while more blocks are stored than the namespace holds."""
    with node.client(wire=wire, namespace=full) as reader, node.client(namespace=full) as writer:
        assert reader.put([b"leased"], [FRESH])[0].stored
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(got, reader, b"leased")
            wire.await_kept("out", COMMAND_BYTES)
            for number in range(3 * BLOCKS):
                assert writer.put([b"%d" % number], [bytes(4096)])[0].stored
            present = writer.match([b"leased"]).present[0]
            wire.deliver("out")
            assert Seen(present, reading.result(60)) == seen


@pytest.mark.parametrize(
    ("removed", "seen"),
    [pytest.param(PRODUCT, GONE, id="product"), pytest.param(out("free-leased"), HARM, id="leases hold nothing")],
)
def test_a_leased_block_that_is_deleted(node: Node, wire: Wire, full: str, removed: Out, seen: Seen) -> None:
    """It is not found any more, and who had found it reads it all the same."""
    with node.client(wire=wire, namespace=full) as reader, node.client(namespace=full) as writer:
        assert reader.put([b"leased"], [FRESH])[0].stored
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(got, reader, b"leased")
            wire.await_kept("out", COMMAND_BYTES)
            assert writer.delete([b"leased"]) == ["ok"]
            for number in range(3 * BLOCKS):
                assert writer.put([b"%d" % number], [bytes(4096)])[0].stored
            present = writer.match([b"leased"]).present[0]
            wire.deliver("out")
            assert Seen(present, reading.result(60)) == seen
