"""An engine in a process of its own, which stops where a scenario wants it: `python -m tests.fencing.engine`.

It reads commands from standard input, one JSON list a line, and answers each with a line. Before each read and write
of the data path, and after each write, it says so (``at read``, ``at write``, ``at commit``) and goes on when it is
told to: what happens in between is the test's affair. Its clock is the node's (`switches`), unless ``lease`` is
switched: then it is not put forward. With ``checksum`` it believes any bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forebay.client import Client, ClientOptions, NvmeTcpOptions, WritePlan
from forebay.client import reader as reader_module
from forebay.client.session import Opening, Session
from forebay.client.transports.base import Outcome, ReadOp, Transport, TransportState, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import TransportFactory, nvme_tcp
from forebay.clock import Clock, SystemClock
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.schema import Schema
from tests.fencing.switches import ahead_ms, on

__all__ = ["Engine"]


class Engine:
    """The test's side: the process. A context manager."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fencing.engine"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def open(
        self, url: str, token: str, port: int, *, join: bytes = b"", schema: Schema | None = None, **options: Any
    ) -> None:
        """Become a client, in place of what it was, that finds the target on this port."""
        self.say("open", url, token, port, join.hex(), (schema or Schema.opaque()).cbor.hex(), options)
        self.until("open")

    def open_freely(self, url: str, token: str, port: int, namespace: str) -> None:
        """Become a client that stops nowhere."""
        self.say("open freely", url, token, port, namespace)
        self.until("open")

    def say(self, *words: object) -> None:
        """Begin a command, or let one go on."""
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def hear(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def allocate(self, key: str, *length_bytes: int) -> WritePlan:
        """Its plan for one block."""
        self.say("allocate", key, *length_bytes)
        return WritePlan.from_bytes(bytes.fromhex(self.hear()))

    def put_tiles(self, plan: WritePlan, tiles: Sequence[int] | None, value: bytes) -> None:
        """Have it begin, up to where it stands ``at write``."""
        self.say("tiles", plan.to_bytes().hex(), tiles, value.hex())
        self.until("at write")

    def go(self, place: str = "") -> str:
        """Let it go on: to the place, or to the end of its command, whose answer this is."""
        self.say("go")
        if place:
            self.until(place)
        return "" if place else self.hear()

    def until(self, place: str) -> None:
        """It stands there."""
        heard = self.hear()
        assert heard == place, heard

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


# --- the process ------------------------------------------------------------------------------------------------------


class _FollowingClock(SystemClock):
    """The system's clock, put forward with the node's."""

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + (0 if on("lease") else ahead_ms())


def _stand(place: str) -> None:
    print(place, flush=True)
    sys.stdin.readline()


class _Stopping(Transport):
    """``inner``, stopping at the places."""

    def __init__(self, inner: Transport) -> None:
        self.capabilities = inner.capabilities
        self._inner = inner

    def connect(self, deadline_ms: int) -> None:
        self._inner.connect(deadline_ms)

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        _stand("at read")
        return self._inner.read(ops, _later(deadline_ms))

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        _stand("at write")
        outcomes = self._inner.write(ops, _later(deadline_ms))
        _stand("at commit")
        return outcomes

    def state(self) -> TransportState:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


def _later(deadline_ms: int) -> int:
    """It minds no deadline of its own: only what others do is in its way."""
    return deadline_ms + 600_000


def _judge(
    outcomes: Sequence[Outcome], expected: Sequence[Sequence[int | None]], now_ms: int, lease_until_ms: int
) -> int:
    return _verdict(outcomes, [o.checksums for o in outcomes] if on("checksum") else expected, now_ms, lease_until_ms)


_verdict = reader_module.verdict


def _by(port: int) -> TransportFactory:
    """To a target that is found on this port."""

    def way(
        subsystem: SubsystemAddress, host: HostIdentity, nguids: Mapping[int, str], chosen: ClientOptions, clock: Clock
    ) -> Transport:
        return nvme_tcp(replace(subsystem, port=port), host, nguids, chosen, clock)

    return way


def _open(url: str, token: str, port: int, join: str, schema: str, options: dict[str, Any]) -> Client:
    opening = Opening("default/default", Schema.from_cbor(bytes.fromhex(schema)), 0, join=bytes.fromhex(join))
    chosen = ClientOptions(
        deadline_ms=300_000,
        connect_ms=60_000,
        attempt_ms=30_000,
        nvme_tcp=NvmeTcpOptions(connections=1, backoff_ms=(1, 1)),
        **options,
    )
    way = _by(port)
    keep = Session._keep
    # nobody keeps the session, or opens another: what follows is tried with the rights that it had
    Session._keep = lambda self: None  # type: ignore[method-assign]
    try:
        return Client(
            url,
            opening,
            token=token,
            options=chosen,
            clock=_FollowingClock(),
            transport=lambda *given: _Stopping(way(*given)),
        )
    finally:
        Session._keep = keep  # type: ignore[method-assign]


_ABSENT = 50


def _race(client: Client, seed: int, rounds: int, keys: int, acts: Sequence[str]) -> Counter[str]:
    """Get, put and delete the same blocks as others do, where not all have room; what became of the gets.

    A get of an absent block takes no time, and many count as one.
    """
    chosen, seen = random.Random(seed), Counter[str]()
    while sum(seen.values()) - seen["absent"] + seen["absent"] // _ABSENT < rounds:
        key = b"%d" % chosen.randrange(keys)
        value = hashlib.shake_128(key).digest(LBA_BYTES)
        what = chosen.choice(acts)
        if what == "put":
            client.put([key], [value])
            seen["put"] += 1
        elif what == "delete":
            client.delete([key])
            seen["delete"] += 1
        else:
            (read,) = client.get([key])
            seen["wrong" if read.value is not None and bytes(read.value) != value else read.reason] += 1
    if "put" in acts:  # so that who reads on finds something
        for number in range(keys):
            client.put([b"%d" % number], [hashlib.shake_128(b"%d" % number).digest(LBA_BYTES)])
    return seen


def _main() -> None:
    reader_module.verdict = _judge
    clients: list[Client] = []
    for line in sys.stdin:
        verb, *words = json.loads(line)
        if verb == "open":
            clients.append(_open(*words))
            print("open", flush=True)
        elif verb == "open freely":
            url, token, port, namespace = words
            opening = Opening(namespace, Schema.opaque(), 0)
            options = ClientOptions(deadline_ms=60_000, connect_ms=60_000, attempt_ms=30_000)
            clients.append(Client(url, opening, token=token, options=options, transport=_by(port)))
            print("open", flush=True)
        elif verb == "race":
            print(json.dumps(_race(clients[-1], *words)), flush=True)
        elif verb == "get":
            (read,) = clients[-1].get([words[0].encode()])
            print(read.reason, bytes(read.value or b"").hex(), flush=True)
        elif verb == "allocate":
            key, *lengths = words
            print(clients[-1].allocate([key.encode()], lengths=lengths or None).to_bytes().hex(), flush=True)
        elif verb == "tiles":
            plan, tiles, value = words
            (done,) = clients[-1].put_tiles(WritePlan.from_bytes(bytes.fromhex(plan)), tiles, [bytes.fromhex(value)])
            print(done.reason, flush=True)
    os._exit(0)  # sessions that nobody keeps end by themselves


if __name__ == "__main__":
    _main()
