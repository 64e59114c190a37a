"""A client over a transport that fails now and then: hits have the right bytes, everything else has a reason."""

import os
import random
from collections.abc import Iterator, Mapping

import pytest

from forebay.client import Client, ClientOptions
from forebay.client.session import Opening
from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import nvme_tcp
from forebay.clock import Clock
from forebay.ids import HostIdentity
from forebay.schema import Schema
from forebay.testing.faults import FaultRates, Faulty
from tests.client.scripted_node import TOKEN, ScriptedNode

SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
RATES = FaultRates(corrupt=0.1, lost=0.05, late=0.05, media=0.05)


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    with ScriptedNode() as node:
        yield node


def test_never_a_wrong_byte(node: ScriptedNode) -> None:
    faulty: list[Faulty] = []

    def with_faults(
        subsystem: SubsystemAddress, host: HostIdentity, nguids: Mapping[int, str], options: ClientOptions, clock: Clock
    ) -> Transport:
        faulty.append(Faulty(nvme_tcp(subsystem, host, nguids, options, clock), SEED, RATES))
        return faulty[-1]

    rng = random.Random(SEED)
    values: dict[bytes, bytes] = {}
    written = failed = 0
    opening = Opening("default/default", Schema.opaque(), 0)
    with Client(
        node.url, opening, token=TOKEN, options=ClientOptions(deadline_ms=20_000), transport=with_faults
    ) as client:
        for turn in range(60):
            fresh = {b"k%d-%d" % (turn, i): rng.randbytes(rng.randrange(1, 20_000)) for i in range(4)}
            for (key, value), result in zip(fresh.items(), client.put(list(fresh), list(fresh.values())), strict=True):
                if result.stored:
                    values[key] = value
                else:
                    failed += 1
                    assert result.reason in ("connection_lost", "deadline_exceeded", "target_failed"), f"seed {SEED}"
            written += len(fresh)
            keys = rng.sample(sorted(values), min(8, len(values)))
            into = [bytearray(b"\xee" * 20_000) for _ in keys]
            for key, buffer, got in zip(keys, into, client.get_into(keys, into), strict=True):
                if got.hit:
                    assert buffer[: got.length_bytes] == values[key], f"seed {SEED}"
        misses, injected = client.stats.misses, faulty[0].injected
    assert misses["checksum_mismatch"] == injected["corrupt"] > 0
    assert failed > 0
    assert len(values) + failed == written
    assert sum(misses.values()) + failed == sum(injected.values())


def test_the_same_seed_gives_the_same_faults(node: ScriptedNode) -> None:
    runs = []
    for _ in range(2):
        faulty: list[Faulty] = []

        def make(*arguments: object, made: list[Faulty] = faulty) -> Transport:
            made.append(Faulty(nvme_tcp(*arguments), 11, RATES))  # type: ignore[arg-type]
            return made[-1]

        opening = Opening("default/default", Schema.opaque(), 0)
        with Client(node.url, opening, token=TOKEN, transport=make) as client:
            client.put([b"k"], [b"v" * 4096])
            runs.append([client.get([b"k"])[0].reason for _ in range(40)])
        node.blocks.clear()
        node.next_offset = 0
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
