"""Reads of blocks whose namespace is full, so that every new block needs another's place (design §6.3, §6.4, §6.6)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.fencing.conftest import PRODUCT, Node, Out, got, out
from tests.fencing.engine import Engine
from tests.fencing.wire import COMMAND_BYTES, Wire

BLOCKS = 4
"""So many blocks of 4 KiB fill the namespace."""
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
FRESH = b"\xbb" * 4096


@pytest.fixture
def full(node: Node) -> Iterator[str]:
    """A namespace of its own, with little room."""
    name = f"full/{os.urandom(4).hex()}"
    with node.admin() as admin:
        admin.create_namespace(name, quota_bytes=BLOCKS * 4096)
        yield name
        admin.delete_namespace(name, force=True)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Engine()) for _ in range(3)]


@dataclass(frozen=True)
class Seen:
    present: bool
    read: tuple[str, bytes]


SOUND = Seen(True, ("ok", FRESH))
GONE, HARM = Seen(False, ("ok", FRESH)), Seen(False, ("checksum_mismatch", b""))


def read_while_full(node: Node, wire: Wire, full: str, *, deleted: bool = False) -> Seen:
    """Read a block; when that is on its way more blocks are stored than the namespace holds."""
    with node.client(wire=wire, namespace=full) as reader, node.client(namespace=full) as writer:
        assert reader.put([b"leased"], [FRESH])[0].stored
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(got, reader, b"leased")
            wire.await_kept("out", COMMAND_BYTES)
            if deleted:
                assert writer.delete([b"leased"]) == ["ok"]
            for number in range(3 * BLOCKS):
                assert writer.put([b"%d" % number], [bytes(4096)])[0].stored
            present = writer.match([b"leased"]).present[0]
            wire.deliver("out")
            return Seen(present, reading.result(60))


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
    assert read_while_full(node, wire, full) == seen


@pytest.mark.parametrize(
    ("removed", "seen"),
    [pytest.param(PRODUCT, GONE, id="product"), pytest.param(out("free-leased"), HARM, id="leases hold nothing")],
)
def test_a_leased_block_that_is_deleted(node: Node, wire: Wire, full: str, removed: Out, seen: Seen) -> None:
    """It is not found any more, and who had found it reads it all the same."""
    assert read_while_full(node, wire, full, deleted=True) == seen


@pytest.mark.parametrize(
    ("removed", "lost"),
    [
        pytest.param(PRODUCT, False, id="product"),
        pytest.param(out("evict-leased", "free-leased"), True, id="neither"),
    ],
)
def test_processes_that_take_each_others_places(
    node: Node, full: str, engines: Sequence[Engine], removed: Out, lost: bool
) -> None:
    """A get is a hit with the right bytes, or the block is absent: nothing that was found is lost under its reader.

    Without the defences blocks are lost so; the checksum still keeps their bytes from the reader.
    """
    seen = Counter[str]()
    with Wire(node.nvme_port, delay_s=0.02, seed=SEED) as slow:
        acts = (["get"], *[["put", "put", "put", "delete"]] * 2)
        for engine, port in zip(engines, (slow.port, node.nvme_port, node.nvme_port), strict=True):
            engine.open_freely(node.url, node.token, port, full)
        for turn in range(1 if not lost else 20):
            for number, (engine, act) in enumerate(zip(engines, acts, strict=True)):
                engine.say("race", SEED + 10 * turn + number, 30 if act == ["get"] else 150, BLOCKS + 2, act)
            for engine in engines:
                seen += Counter(json.loads(engine.hear()))
            if seen["checksum_mismatch"]:
                break
    assert seen["wrong"] == 0
    assert (seen["checksum_mismatch"] > 0) == lost
    if not lost:
        assert seen["ok"] > 10 and seen.keys() <= {"ok", "absent", "put", "delete"}, seen
