"""One of the processes that crowd a node: `python -m tests.pressure.herd ROLE URL TOKEN COUNT`.

``sessions``: opens COUNT sessions at once, says so, and keeps them alive until a line comes; then uses and closes each.
``connections``: COUNT data connections, eight to a client; says so, moves data on all of them at a line, ends at
another. Each says what it found as JSON, one object a line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

from forebay.client import Client, ClientOptions
from forebay.client.rpc import NodeAddress, Rpc
from forebay.client.session import Opening
from forebay.client.transports.options import NvmeTcpOptions
from forebay.clock import SystemClock
from forebay.errors import ForebayError
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto
from forebay.schema import Schema

LIMIT_MS = 240_000
THREADS = 32
CHANNELS = 4
KEY = b"of all"
VALUE = Random(5).randbytes(1 << 20)


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def tally(call: Callable[[int], str], count: int) -> Counter[str]:
    """The outcomes of a call made so often, by many threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return Counter(pool.map(call, range(count)))


def sessions(url: str, token: str, count: int) -> None:
    clock, schema = SystemClock(), Schema.opaque()
    channels = [Rpc(NodeAddress(url), token, clock, 10_000) for _ in range(CHANNELS)]
    contexts: list[pb.Context] = []

    def until_ms() -> int:
        return clock.monotonic_ms() + LIMIT_MS

    def named(call: Callable[[], object]) -> str:
        try:
            call()
        except ForebayError as e:
            return type(e).__name__
        return "ok"

    def open_one(i: int) -> str:
        request = pb.OpenSessionRequest(namespace="default/default", schema=schema.cbor, deadline_ms=LIMIT_MS)
        rpc = channels[i % CHANNELS]

        def call() -> None:
            reply = rpc.call(rpc.blocks.OpenSession, request, until_ms())
            contexts.append(pb.Context(session=reply.session, incarnation=reply.incarnation, deadline_ms=LIMIT_MS))

        return named(call)

    def beat(i: int) -> str:
        rpc = channels[i % CHANNELS]
        return named(lambda: rpc.call(rpc.blocks.Heartbeat, pb.HeartbeatRequest(context=contexts[i]), until_ms()))

    over = threading.Event()
    beats: Counter[str] = Counter()
    slowest_beat_s = 0.0

    def keep() -> None:
        """As each client would for itself."""
        nonlocal beats, slowest_beat_s
        while not over.wait(1.5):
            began_s = time.monotonic()
            beats += tally(beat, len(contexts))
            slowest_beat_s = max(slowest_beat_s, time.monotonic() - began_s)

    keeping = threading.Thread(target=keep)
    keeping.start()
    began_s = time.monotonic()
    opened = tally(open_one, count)
    say(opened=opened, seconds=time.monotonic() - began_s)
    sys.stdin.readline()
    over.set()
    keeping.join()

    def use(i: int) -> str:
        rpc, context = channels[i % CHANNELS], contexts[i]
        keys = keys_to_proto([BlockKey(KEY)])

        def call() -> None:
            found = rpc.call(rpc.blocks.Match, pb.MatchRequest(context=context, keys=keys), until_ms())
            located = rpc.call(rpc.blocks.Acquire, pb.AcquireRequest(context=context, keys=keys), until_ms())
            assert found.status == located.status == b"\0\0" and located.lease
            rpc.call(rpc.blocks.CloseSession, pb.CloseSessionRequest(context=context, quiesced=True), until_ms())

        return named(call)

    say(beats=beats, used=tally(use, len(contexts)), round_s=slowest_beat_s)


def connections(url: str, token: str, count: int) -> None:
    each = 8  # one admin queue, the others for data
    options = ClientOptions(
        deadline_ms=LIMIT_MS,
        connect_ms=LIMIT_MS,
        attempt_ms=10_000,
        nvme_tcp=NvmeTcpOptions(connections=each - 1, call_connections=each - 1, queue_bytes=4096),
    )
    opening = Opening("default/default", Schema.opaque(), 0)
    clients = [Client(url, opening, token=token, options=options) for _ in range(count // each)]

    def read(i: int) -> str:
        into = [bytearray(len(VALUE)) for _ in range(2 * each)]
        results = clients[i % len(clients)].get_into([KEY] * len(into), into)
        bad = [r.reason for r in results if not r.hit] + ["wrong bytes" for one in into if one != VALUE]
        return bad[0] if bad else "ok"

    def write(i: int) -> str:
        keys = [f"{id(clients)}/{time.monotonic_ns()}/{i}/{k}".encode() for k in range(4)]
        return clients[i % len(clients)].put(keys, [VALUE[: 256 << 10]] * len(keys))[0].reason

    say(connected=tally(read, len(clients)))
    for line in sys.stdin:
        if line.strip() == "end":
            break
        say(read=tally(read, 2 * len(clients)), written=tally(write, len(clients)))
    for client in clients:
        client.close()
    say(closed=len(clients))


if __name__ == "__main__":
    {"sessions": sessions, "connections": connections}[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
