"""Nodes for the scenarios: the product as it is, and one whose defences can be taken out (`undefended`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.client import Client, ClientOptions, NvmeTcpOptions, WritePlan
from forebay.client.session import Opening
from forebay.client.transports.kinds import TransportFactory, nvme_tcp
from forebay.clock import Clock
from forebay.ids import LBA_BYTES, Extent
from forebay.schema import Group, HashAlgorithm, Schema
from tests import targets
from tests.client.conftest import NodeProcess
from tests.fencing.switches import VARIABLE, Switches
from tests.fencing.wire import Wire

ROOT = str(Path(__file__).resolve().parents[2])
OPTIONS = ClientOptions(
    deadline_ms=60_000, connect_ms=60_000, attempt_ms=30_000, nvme_tcp=NvmeTcpOptions(connections=1, backoff_ms=(1, 1))
)
PAIR = Schema(
    "test",
    b"",
    HashAlgorithm("sha256", 1),
    (Group("full", (0, 1), 1, 1, LBA_BYTES, "bf16", "test", layer_groups=2),),
)
"""Blocks of two tiles, each so small that its write is one PDU."""
SESSION_MS = 60_000
"""A session ends after so long a silence."""

Out = frozenset[str] | None
"""Which defences are out: None is the product, as `forebay serve` runs it."""
PRODUCT: Out = None


def out(*names: str) -> Out:
    return frozenset(names)


class Node(NodeProcess):
    """A node, by what the scenarios ask of it."""

    switches: Switches

    def client(
        self,
        *,
        options: ClientOptions = OPTIONS,
        schema: Schema | None = None,
        wire: Wire | None = None,
        **opening: Any,
    ) -> Client:
        """A client, by the wire if there is one."""
        way: TransportFactory = nvme_tcp if wire is None else wire.through
        return self.client_by(way, options=options, schema=schema, **opening)

    def client_by(
        self,
        way: TransportFactory,
        *,
        options: ClientOptions = OPTIONS,
        schema: Schema | None = None,
        clock: Clock | None = None,
        **opening: Any,
    ) -> Client:
        asked = Opening(opening.pop("namespace", "default/default"), schema or Schema.opaque(), 0, **opening)
        return Client(self.url, asked, token=self.token, options=options, clock=clock, transport=way)

    @property
    def nvme_port(self) -> int:
        return int(self.nvme.rpartition(":")[2])

    def media(self, extent: Extent, length_bytes: int) -> bytes:
        """What lies on the drive."""
        with (self.data / "drive0" / "volumes" / f"{extent.volume}.vol").open("rb") as file:
            file.seek(extent.offset_bytes)
            return file.read(length_bytes)

    def restart_daemon(self) -> None:
        """SIGKILL to the daemon alone, and another one."""
        self.process.kill()
        self.process.wait()
        self.start()


class Undefended(Node):
    program: Sequence[str] = (sys.executable, "-m", "tests.fencing.undefended")


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Out], Node]]:
    """The node without these defences; both nodes are made when first asked for."""
    directory = tmp_path_factory.mktemp("fencing")
    switches = Switches(directory / "switches")
    os.environ[VARIABLE] = str(switches.file)  # for clients that follow the node's time
    settings = {"FOREBAY_SESSIONS_EXPIRY": f"{SESSION_MS}ms", "PYTHONPATH": ROOT, VARIABLE: str(switches.file)}
    made: dict[str, Node] = {}

    def get(names: Out) -> Node:
        kind = Node if names is PRODUCT else Undefended
        if kind is Undefended and targets.KIND != "embedded":
            pytest.skip("defences can be taken out of Forebay's own target only, and this run has another")
        if kind.__name__ not in made:
            (directory / kind.__name__).mkdir()
            found = made[kind.__name__] = kind(directory / kind.__name__ / "data", **settings)
            found.switches = switches
        switches.set(names or ())
        return made[kind.__name__]

    try:
        yield get
    finally:
        switches.set(())
        for node in made.values():
            node.stop()
        del os.environ[VARIABLE]


@pytest.fixture
def node(request: pytest.FixtureRequest, nodes: Callable[[Out], Node]) -> Iterator[Node]:
    """The node without the defences that the test's parameter ``removed`` names."""
    found = nodes(request.getfixturevalue("removed"))
    yield found
    found.switches.set(())


@pytest.fixture
def wire(node: Node) -> Iterator[Wire]:
    with Wire(node.nvme_port) as wire:
        yield wire


def warm(client: Client, length_bytes: int = LBA_BYTES) -> None:
    """Connect the data path, so that what follows is one command."""
    key = b"warm-" + os.urandom(8)
    assert client.put([key], [bytes(length_bytes)])[0].stored
    client.delete([key])


def place(plan: WritePlan, row: int = 0) -> Extent:
    extent = plan.writes[row].extent
    assert extent is not None, plan.reasons
    return extent


def take(client: Client, extent: Extent, value: bytes) -> bytes:
    """Store blocks until one of them lies in that place; its key."""
    for _ in range(64):
        key = b"taker-" + os.urandom(8)
        assert client.put([key], [value])[0].stored
        block = client.stat([key])[0].block
        assert block is not None
        if (block.volume, block.offset_bytes) == (extent.volume, extent.offset_bytes):
            return key
    raise AssertionError(f"{extent} was not given to another: nothing is tested")


def got(client: Client, key: bytes) -> tuple[str, bytes]:
    """A read: its reason, and its bytes if it is a hit."""
    (result,) = client.get([key])
    return result.reason, bytes(result.value) if result.value is not None else b""
