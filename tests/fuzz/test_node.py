"""A real node under hostile traffic of every protocol, beside a client that reads and writes and checks every byte."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc
import pytest

from forebay.client import Client, ClientOptions
from forebay.proto import forebay_pb2 as pb
from tests.appliance.control.peer import Caller
from tests.client.conftest import NodeProcess, eventually
from tests.conftest import LONG
from tests.counting import Count
from tests.footprint import Footprint, footprint
from tests.fuzz.control import Messages
from tests.fuzz.host_pdus import HostPdus
from tests.fuzz.rpc import spoilt
from tests.fuzz.source import Source
from tests.fuzz.target import exchange
from tests.seeds import SEED

ROUNDS = 400 if LONG else 25
GROWTH_BYTES = 64 << 20
JUNK_METADATA: list[tuple[tuple[str, str | bytes], ...]] = [
    (("x-request-id", "a b\x7e" * 100),),
    (("traceparent", "00-zz-zz-zz"),),
    (("authorization", "Basic x"),),
    (("x-bin", b"\xff" * 500),),
    (("grpc-timeout-x", "-1"),) * 20,
]


class Neighbour:
    """Puts, gets and deletes in a thread of its own; everything has to go well."""

    def __init__(self, node: NodeProcess) -> None:
        self._client: Client = node.connect(options=ClientOptions(deadline_ms=60_000))
        self._over = threading.Event()
        self.verified = 0
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def value(number: int) -> bytes:
        return random.Random(number).randbytes(10_000 + number % 50_000)

    def _run(self) -> None:
        number = 0
        while not self._over.is_set() and not self.wrong:
            number += 1
            key = b"%d" % number
            (put,) = self._client.put([key], [self.value(number)])
            found = self._client.get([key, b"%d" % max(1, number - 3)])
            wanted = [self.value(number), self.value(max(1, number - 3))]
            for result, value in zip(found, wanted, strict=True):
                if bytes(result.value or b"") != value:
                    self.wrong.append(f"block {number}: put {put.reason}, get {result.reason}")
            self.verified += 2
            if number > 8:
                self._client.delete([b"%d" % (number - 8)])

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        self._client.close()


class Hostile:
    """One with rights of its own, in the same tenant, who sends what comes to mind."""

    def __init__(self, node: NodeProcess, seed: int) -> None:
        self.node = node
        self.random = random.Random(seed)
        self.caller = Caller(node.grpc, node.token)
        self.caller.admin("CreateNamespace", create("default/hostile"))
        self.session = self.caller.open("default/hostile")
        self.known: dict[str, list[Any]] = {
            "contexts": [self.caller.context()], "texts": [self.session.host_nqn], "session": [self.session.session],
            "token": [self.session.token], "write_ids": [], "leases": [],
        }  # fmt: skip
        self.sent = 0

    def source(self, most: int = 1500) -> Source:
        self.sent += 1
        return Source(self.random.randbytes(self.random.randrange(most)))

    def pdus(self) -> None:
        """A stream to the target, as a host that may connect."""
        endpoint, source = self.session.endpoints[0], self.source()
        drawn = HostPdus(
            source,
            subsystem_nqn=endpoint.subsystem_nqn,
            host_nqn=self.session.host_nqn,
            host_id=UUID(self.session.host_id),
            qid=source.pick([0, 0, 1]),
        )
        exchange(endpoint.port, b"".join([*drawn.opening(), *drawn.more()]))

    def message(self) -> None:
        """A call with drawn fields or drawn bytes, now and then with odd metadata."""
        source = self.source(400)
        service = pb.DESCRIPTOR.services_by_name["Blocks"]
        method = source.pick([m for m in service.methods if not m.client_streaming])
        request = Messages(source, self.known).fill(getattr(pb, method.input_type.name)())
        data = source.take(40) if source.chance(4) else request.SerializeToString()
        metadata = source.pick(JUNK_METADATA) if source.chance(3) else ()
        channel = self.caller.channel
        call: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
        token = (("authorization", f"Bearer {self.node.token}"),)
        try:
            found = call(f"/forebay.v1.Blocks/{method.name}")(data, metadata=(*token, *metadata), timeout=5)
            if method.server_streaming:
                next(found, None)
                found.cancel()
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.INTERNAL, f"{method.name}: {error.details()}"

    def stream(self) -> None:
        """Messages of the stream of calls: ids twice, cancelled calls, unknown methods, requests that do not parse."""
        source = self.source(400)

        def messages() -> Iterator[bytes]:
            for _ in range(1 + source.below(8)):
                if source.chance(16):
                    yield source.take(20)
                    continue
                one = pb.CallRequest(
                    id=source.pick([1, 2, 3, source.number(64)]),
                    method=source.pick(["Match", "Stat", "Acquire", "Wait", "OpenSession", "", "x" * 200]),
                    cancel=source.chance(4),
                )
                filled = Messages(source, self.known).fill(pb.MatchRequest())
                one.request = source.take(20) if source.chance(4) else filled.SerializeToString()
                yield one.SerializeToString()

        token = (("authorization", f"Bearer {self.node.token}"),)
        call: Any = self.caller.channel.stream_stream("/forebay.v1.Blocks/Calls")
        try:
            for _ in call(messages(), metadata=token, timeout=5):
                pass
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.INTERNAL, error.details()

    def control_socket(self) -> None:
        """What only the node's owner could send: questions, most of them spoilt."""
        source, path = self.source(300), next(self.node.data.rglob("target.sock"))
        asked = b""
        for _ in range(1 + source.below(4)):
            method = source.pick(["nvmf_get_subsystems", "bdev_get_bdevs", "forebay_get_info", "nvmf_get_stats", "x"])
            asked += spoilt(source, json.dumps({"id": 1, "method": method, "params": {}}).encode())
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(path))
            say(sock, asked)

    def no_http(self) -> None:
        """Bytes to the port of the control service that are no HTTP/2."""
        port = int(self.node.grpc.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            say(sock, self.random.randbytes(self.random.randrange(1, 400)))

    def round(self) -> None:
        for attack in (self.pdus, self.pdus, self.pdus, self.message, self.message, self.stream, self.control_socket):
            attack()
        self.no_http()

    def close(self) -> None:
        self.caller.close()


def say(sock: socket.socket, data: bytes) -> None:
    """Send it all and hear whatever comes until the other end closes."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass


def create(name: str) -> pb.CreateNamespaceRequest:
    return pb.CreateNamespaceRequest(context=pb.AdminContext(deadline_ms=30_000), spec=pb.NamespaceSpec(name=name))


def came_back(name: str, pid: int, was: Footprint) -> None:
    """Nothing that the traffic took is still held."""
    eventually(lambda: footprint(pid).fds <= was.fds, f"descriptors of the {name}: {was}", 60)
    eventually(lambda: footprint(pid).threads <= was.threads + 2, f"threads of the {name}: {was}", 60)
    now = footprint(pid)
    assert now.memory_bytes < was.memory_bytes + GROWTH_BYTES, f"{name}: {was} before, {now} after"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path / "data")
    yield node
    node.stop()


@pytest.mark.timeout(1800 if LONG else 120)
def test_hostile_traffic_harms_nobody_and_leaves_nothing(node: NodeProcess, count: Count) -> None:
    neighbour, hostile = Neighbour(node), Hostile(node, SEED)
    pids = {"daemon": node.process.pid, "target": node.target_pid}
    try:
        for _ in range(3):  # what is made at first use is there then
            hostile.round()
        before = {name: footprint(pid) for name, pid in pids.items()}
        began = neighbour.verified
        for _ in range(ROUNDS):
            hostile.round()
            assert not neighbour.wrong, f"FOREBAY_SEED={SEED}: {neighbour.wrong}"
        eventually(lambda: neighbour.verified > began + 10 or neighbour.wrong, "the neighbour goes on", 60)
    finally:
        hostile.close()
        neighbour.close()
    assert not neighbour.wrong, f"FOREBAY_SEED={SEED}: {neighbour.wrong}"
    assert {"daemon": node.process.pid, "target": node.target_pid} == pids, "a process died"
    for name, pid in pids.items():
        came_back(name, pid, before[name])
    logs = (node.data.parent / "node.log").read_text() + next(node.data.rglob("target.log")).read_text()
    assert "Traceback" not in logs, f"FOREBAY_SEED={SEED}: {logs[logs.index('Traceback') - 500 :][:3000]}"
    count.add(fuzz_inputs=hostile.sent, blocks_verified=neighbour.verified)
