"""Real processes for the client's tests: an embedded target with a raw volume, and a whole node."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client import Admin, Client, ClientOptions, connect
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.clock import Clock
from forebay.ids import HostIdentity
from tests import targets
from tests.waiting import eventually as eventually  # noqa: PLC0414  # most tests have it from here
from tests.waiting import halted as halted  # noqa: PLC0414
from tests.waiting import stop as stop  # noqa: PLC0414

NQN = "nqn.2026-11.test:client"
VOLUME_BYTES = 64 << 20
_WORKERS = 16
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS
_given: set[int] = set()


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def lasting_port() -> int:
    """A free port that is still free after who listened on it was killed.

    None that the system gives to connections, that this process has given out before, or that another one of the same
    run gives out.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000 + _WORKER, max(first, 20_000), _WORKERS)
    for port in random.SystemRandom().sample(ports, 100):  # whatever a test has seeded
        with socket.socket() as probe:
            if port not in _given and probe.connect_ex(("127.0.0.1", port)):
                _given.add(port)
                return port
    raise AssertionError("no free port was found")


def new_host() -> HostIdentity:
    ident = str(uuid.uuid4())
    return HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{ident}", ident)


class TargetProcess:
    """The embedded target as a process of its own, with one raw volume (NSID 1)."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "t.sock"
        self.volume = directory / "volume"
        self.volume.touch()
        os.truncate(self.volume, VOLUME_BYTES)
        self.nguid = uuid.uuid4()
        self.port = 0
        self.process: subprocess.Popen[bytes]
        self.start()

    @property
    def subsystem(self) -> SubsystemAddress:
        return SubsystemAddress("127.0.0.1", self.port, NQN)

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "forebay.appliance.dataplane.target", "--socket", str(self.socket)]
        self.process = subprocess.Popen([*command, "--log", str(self.socket.with_suffix(".log"))])
        eventually(self._listens, "the control socket")
        with JSONRPCClient(str(self.socket)) as rpc:
            rpc.nvmf_create_transport(trtype="TCP", max_io_size=64 << 20)
            rpc.bdev_aio_create(name="v", filename=str(self.volume), block_size=4096)
            rpc.forebay_bdev_set_mode(name="v", mode="raw")
            rpc.nvmf_create_subsystem(nqn=NQN, serial_number="T1", model_number="t", allow_any_host=True)
            rpc.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "v", "nsid": 1, "nguid": self.nguid.hex.upper()})
            listen = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(self.port)}
            rpc.nvmf_subsystem_add_listener(nqn=NQN, listen_address=listen)
            subsystems = rpc.nvmf_get_subsystems()
            mine = next(each for each in subsystems if each["nqn"] == NQN)
            self.port = int(mine["listen_addresses"][0]["trsvcid"])

    def _listens(self) -> bool:
        # Not by SPDK's client, which leaves its socket open when it cannot connect.
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def rpc(self) -> JSONRPCClient:
        return JSONRPCClient(str(self.socket))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def transport(
        self, options: NvmeTcpOptions | None = None, *, host: HostIdentity | None = None, clock: Clock | None = None
    ) -> NvmeTcpTransport:
        return NvmeTcpTransport(
            self.subsystem, host or new_host(), nguids={1: self.nguid.hex}, options=options, clock=clock, seed=1
        )


@pytest.fixture(scope="module")
def shared_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """One target for the tests of a module that do it no harm."""
    target = TargetProcess(tmp_path_factory.mktemp("target"))
    yield target
    target.stop()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    """A target to kill."""
    target = TargetProcess(tmp_path)
    yield target
    target.stop()


@pytest.fixture(autouse=True)
def capable(request: pytest.FixtureRequest) -> None:
    """Skip a test that needs what the target of its node cannot do."""
    if not request.node.get_closest_marker("fencing") or "shared_node" not in request.fixturenames:
        return
    if not targets.able(request.getfixturevalue("shared_node").kind).fencing:
        pytest.skip("the target of this node does not refuse writes outside grants")


def patient(options: ClientOptions | None = None) -> ClientOptions:
    """Options of a client that has patience with a busy machine, unless they name times of their own."""
    found, usual = options or ClientOptions(), ClientOptions()
    if found.connect_ms == usual.connect_ms:
        found = replace(found, connect_ms=20_000)
    return replace(found, attempt_ms=5_000) if found.attempt_ms == usual.attempt_ms else found


class NodeAccess:
    """Something that clients can connect to."""

    url: str
    token: str

    def connect(self, options: ClientOptions | None = None, **arguments: Any) -> Client:
        """A client of it, as the administrator."""
        return connect(self.url, token=self.token, options=patient(options), **arguments)

    def admin(self) -> Admin:
        """The administrator, who has patience with a machine that is busy."""
        return Admin(self.url, token=self.token, deadline_ms=60_000, attempt_ms=30_000)


class NodeProcess(NodeAccess):
    """A node: daemon and target."""

    program: Sequence[str] = (str(Path(sys.executable).with_name("forebay")),)
    capacity = "4GiB"

    def __init__(self, data: Path, **environment: str) -> None:
        self.data = data
        self.environment = environment
        self.process: subprocess.Popen[bytes]
        self.info: dict[str, object] = {}
        self.grpc, self.nvme = (f"127.0.0.1:{lasting_port()}" for _ in range(2))
        self.start()

    def start(self) -> None:
        """Start it, every time on the same ports."""
        env = {**os.environ, "FOREBAY_GRPC_LISTEN": self.grpc, "FOREBAY_TARGET_LISTEN": self.nvme}
        env |= {"FOREBAY_HTTP_LISTEN": "127.0.0.1:0", **self.environment}
        command = [*self.program, "serve", "--data", str(self.data)]
        described = self.data / "node.json"
        described.unlink(missing_ok=True)
        with (self.data.parent / "node.log").open("ab") as log:
            self.process = subprocess.Popen([*command, "--capacity", self.capacity], env=env, stdout=log, stderr=log)
        eventually(lambda: described.exists() or self.process.poll() is not None, "node.json", 60)
        self.info = json.loads(described.read_text())
        self.grpc = str(self.info["grpc"])
        self.url = f"forebay://{self.grpc}"
        self.token = (self.data / "admin.token").read_text().strip()
        target = self._target()
        self.nvme = f"{target['address']}:{target['port']}"

    def _target(self) -> dict[str, object]:
        target = self.info["target"]
        assert isinstance(target, dict)
        return target

    def kill(self) -> None:
        """SIGKILL to the daemon and its target."""
        target_pid = self.target_pid
        self.process.kill()
        self.process.wait()
        os.kill(target_pid, signal.SIGKILL)

    @property
    def kind(self) -> str:
        """Which target it has."""
        return self.environment.get("FOREBAY_TARGET_KIND", targets.KIND)

    @property
    def target_pid(self) -> int:
        """Of the target as it is now; the node starts it again when it dies."""
        found = [0]  # a signal to 0, which it is while the target does not answer, would be for this process too
        with self.admin() as admin:

            def answered() -> bool:
                found[0] = admin.status().target_pid
                return found[0] > 0

            eventually(answered, "the target's answer", 60)
        return found[0]

    def kill_target(self) -> None:
        os.kill(self.target_pid, signal.SIGKILL)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module", params=targets.EACH)
def shared_node(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[NodeProcess]:
    """One node for the tests of a module that do it no harm, with either target."""
    node = NodeProcess(tmp_path_factory.mktemp("node") / "data", **targets.environment(request.param))
    yield node
    node.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node to kill."""
    node = NodeProcess(tmp_path / "data")
    yield node
    node.stop()
