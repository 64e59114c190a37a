"""A deallocate, or the zeroing of a region, that comes late: it has an owner again, and blocks (design §6.4 iv).

The target holds the request before it looks at it; the daemon gives it up, or is killed; a later request of the same
kind is carried out, and a client stores a block there. Then the first one goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from forebay.client import Client
from forebay.ids import Extent, VolumeId
from tests.client.conftest import eventually
from tests.fencing.conftest import ROOT, Node, Out, Undefended, got, out
from tests.fencing.switches import VARIABLE, Switches

pytestmark = pytest.mark.embedded  # it is there that deallocates are kept from coming late by their order

FRESH = b"\xbb" * 4096


class Small(Undefended):
    """Two regions, so that space must be given back before another can have it."""

    capacity = "128MiB"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    directory = tmp_path_factory.mktemp("small")
    switches = Switches(directory / "switches")
    node = Small(directory / "data", PYTHONPATH=ROOT, **{VARIABLE: str(switches.file)})
    node.switches = switches
    yield node
    node.stop()


@pytest.fixture
def pair(small: Small) -> Iterator[tuple[Client, Client]]:
    """Clients of two namespaces."""
    names = [f"late/{os.urandom(4).hex()}" for _ in range(2)]
    with small.admin() as admin:
        for name in names:
            admin.create_namespace(name)
        with small.client(namespace=names[0]) as one, small.client(namespace=names[1]) as two:
            yield one, two
        small.switches.set(())
        for name in names:
            admin.delete_namespace(name, force=True)


@dataclass(frozen=True)
class Seen:
    media: bytes
    read: tuple[str, bytes]


SOUND, HARM = Seen(FRESH, ("ok", FRESH)), Seen(bytes(4096), ("checksum_mismatch", b""))


def let_go(node: Node, switch: str) -> None:
    """The request that was held goes on, to its end."""
    before = node.switches.noted("region")
    node.switches.drop(switch)
    eventually(lambda: node.switches.noted("region") > before, "the late request ends")


def seen(node: Node, client: Client, key: bytes) -> Seen:
    block = client.stat([key])[0].block
    assert block is not None
    media = node.media(Extent(VolumeId(block.volume), block.offset_bytes, 4096), 4096)
    return Seen(media, got(client, key))


both = pytest.mark.parametrize(
    ("removed", "wanted"), [pytest.param(out(), SOUND, id="product"), pytest.param(out("precedence"), HARM, id="none")]
)


@both
@pytest.mark.parametrize("how", ["given up", pytest.param("daemon killed", marks=pytest.mark.long)])
def test_a_deallocate(small: Small, pair: tuple[Client, Client], how: str, removed: Out, wanted: Seen) -> None:
    """One namespace's last region is to be given back for the other. The first gets it again, and stores a block."""
    assert removed is not None
    one, two = pair
    assert one.put([b"first"], [FRESH])[0].stored
    assert two.put([b"first"], [FRESH])[0].stored
    assert one.delete([b"first"]) == ["ok"]
    small.switches.set({"late-release", "impatient", *removed})
    assert two.put([b"wide"], [bytes(1 << 20)])[0].reason == "unavailable"
    small.switches.drop("impatient")
    if how == "daemon killed":
        small.restart_daemon()
        assert one.match([b"first"]).present == (False,)  # it has a session again
    assert one.put([b"next"], [FRESH])[0].reason == "ok"
    let_go(small, "late-release")
    assert seen(small, one, b"next") == wanted


@both
def test_a_zeroing(small: Small, pair: tuple[Client, Client], removed: Out, wanted: Seen) -> None:
    """A region is to be prepared for its first blocks; that is tried again, and a block is stored."""
    assert removed is not None
    one, _ = pair
    small.switches.set({"late-prepare", "impatient", *removed})
    assert one.put([b"first"], [FRESH])[0].reason == "unavailable"
    small.switches.drop("impatient")
    assert one.put([b"next"], [FRESH])[0].reason == "ok"
    let_go(small, "late-prepare")
    assert seen(small, one, b"next") == wanted
