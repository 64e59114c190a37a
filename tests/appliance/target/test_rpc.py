"""The control socket, driven by SPDK's own client."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient, JSONRPCException  # type: ignore[import-untyped]

from forebay.appliance.dataplane.target.bdev_methods import BdevMethods
from forebay.appliance.dataplane.target.nvmf_methods import NvmfMethods
from forebay.appliance.dataplane.target.private_methods import PrivateMethods
from forebay.appliance.dataplane.target.rpc import RpcServer
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.volume import aligned_buffers
from forebay.checksum import crc32c
from forebay.nvmetcp.spec import DISCOVERY_NQN, Status
from tests.appliance.target.conftest import LIMITS
from tests.appliance.target.host import HOST_ID, HOST_NQN, OTHER_ID, OTHER_NQN, Association, RawHost

NQN = "nqn.2026-01.io.forebay:node:rpc"
UUID_TEXT = "0f0f0f0f-1111-2222-3333-444444444444"
NGUID_TEXT = UUID_TEXT.replace("-", "").upper()
MIB = 1 << 20


class Control:
    """A target behind a control socket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "t.sock"
        self.server = Server(LIMITS)
        self.methods = {
            **BdevMethods(self.server).table(),
            **NvmfMethods(self.server).table(),
            **PrivateMethods(self.server).table(),
        }
        self.rpc = RpcServer(self.socket, self.methods)
        self.rpc.start()
        self.client: Any = JSONRPCClient(str(self.socket))

    def close(self) -> None:
        self.client.close()
        self.rpc.close()
        self.server.close()

    def error(self, method: str, **params: object) -> tuple[int, str]:
        """Code and message of a call that must fail."""
        with pytest.raises(JSONRPCException) as caught:
            getattr(self.client, method)(**params)
        answer = json.loads(re.split(r"response:\n", caught.value.message)[-1])
        return answer["code"], answer["message"]

    def file(self, name: str = "v", size_bytes: int = 64 * MIB) -> str:
        path = self.directory / f"{name}.vol"
        with path.open("wb") as file:
            os.truncate(file.fileno(), size_bytes)
        return str(path)

    def volume(self, name: str = "v", **options: object) -> None:
        assert self.client.bdev_aio_create(name=name, filename=self.file(name), block_size=4096, **options) == name

    def serve(self) -> int:
        """A subsystem with the volume `v` under NSID 1, open to all; returns the port."""
        self.volume(uuid=UUID_TEXT)
        assert self.client.nvmf_create_transport(trtype="TCP") is True
        assert self.client.nvmf_create_subsystem(nqn=NQN, serial_number="S1", allow_any_host=True) is True
        assert self.client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "v"}) == 1
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
        assert self.client.nvmf_subsystem_add_listener(nqn=NQN, listen_address=address) is True
        return int(self.client.nvmf_subsystem_get_listeners(nqn=NQN)[0]["address"]["trsvcid"])


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    made = Control(tmp_path)
    yield made
    made.close()


def test_version_and_methods(control: Control) -> None:
    assert control.client.spdk_get_version()["fields"]["major"] == 0
    assert control.error("no_such_method") == (-32601, "Method not found")
    assert control.error("forebay_get_info", bogus=1) == (-32602, "Invalid parameters")


def test_the_socket_is_its_owners_alone(control: Control) -> None:
    assert stat.S_IMODE(control.socket.stat().st_mode) == 0o600
    with pytest.raises(OSError, match="in use"):
        RpcServer(control.socket, {})


def test_a_socket_that_nobody_answers_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = RpcServer(path, {})
    server.start()
    server.close()
    assert not path.exists()


def test_whoever_listens_has_the_socket_even_if_nothing_is_accepted(tmp_path: Path) -> None:
    """A target that hangs: its backlog fills up, and who connects to it would wait for ever."""
    path = tmp_path / "socket"
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(path))
        try:
            error = pool.submit(RpcServer, path, {}).exception(20)
        finally:
            for one in (*waiting, listener):
                one.close()
    assert isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    assert path.exists()


def test_bdevs(control: Control) -> None:
    control.volume("a", uuid=UUID_TEXT)
    control.volume("b", readonly=True)
    found = control.client.bdev_get_bdevs(name="a")[0]
    assert (found["name"], found["block_size"], found["num_blocks"], found["uuid"]) == ("a", 4096, 16384, UUID_TEXT)
    assert (found["product_name"], found["aliases"], found["claimed"]) == ("AIO disk", [UUID_TEXT], False)
    aio = found["driver_specific"]["aio"]
    assert aio["filename"] == str(control.directory / "a.vol")
    assert aio["io"] in ("mmap", "direct", "buffered")
    assert aio["mode"] == "fenced"
    assert [one["name"] for one in control.client.bdev_get_bdevs()] == ["a", "b"]
    assert control.error("bdev_get_bdevs", name="c") == (-19, "No such device")
    assert control.error("bdev_aio_create", name="a", filename=control.file("x")) == (-17, "File exists")
    assert control.error("bdev_aio_create", name="c", filename="/nowhere/c")[0] == -2
    assert control.error("bdev_aio_create", name="c", filename=control.file("c", 5000))[0] == -22
    assert control.error("bdev_aio_create", name="c", filename=str(control.directory / "a.vol"))[0] == -16
    assert control.error("bdev_aio_create", name="c", filename=control.file("c"), block_size=512)[0] == -22
    assert control.error("bdev_aio_create", name="c", filename=control.file("c"), uuid="x")[0] == -32603
    assert control.error("bdev_aio_create", name="", filename="x")[0] == -22
    assert control.client.bdev_aio_delete(name="a") is True
    assert control.error("bdev_aio_delete", name="a") == (-19, "No such device")
    control.volume("a")


def test_transport(control: Control) -> None:
    assert control.client.nvmf_get_transports() == []
    assert control.error("nvmf_get_transports", trtype="TCP")[0] == -19
    assert control.error("nvmf_create_transport", trtype="RDMA")[0] == -32602
    assert control.error("nvmf_create_transport", trtype="TCP", max_io_size=5000)[0] == -32602
    asked = {"max_queue_depth": 64, "in_capsule_data_size": 4096, "max_io_size": 4 * MIB, "max_io_qpairs_per_ctrlr": 3}
    assert control.client.nvmf_create_transport(trtype="TCP", c2h_success=True, **asked) is True
    (found,) = control.client.nvmf_get_transports(trtype="TCP")
    assert {name: found[name] for name in asked} == asked
    assert control.server.limits.max_command_bytes == 4 * MIB
    assert control.error("nvmf_create_transport", trtype="TCP")[0] == -32603


def test_subsystems_namespaces_and_hosts(control: Control) -> None:
    client = control.client
    port = control.serve()
    control.volume("w", uuid=str(OTHER_ID))
    namespace = {"bdev_name": "w", "nsid": 9, "nguid": "AB" * 16, "no_auto_visible": True}
    assert client.nvmf_subsystem_add_ns(nqn=NQN, namespace=namespace) == 9
    assert client.nvmf_ns_add_host(nqn=NQN, nsid=9, host=HOST_NQN) is True
    assert client.nvmf_subsystem_add_host(nqn=NQN, host=HOST_NQN) is True
    assert client.nvmf_subsystem_allow_any_host(nqn=NQN, allow_any_host=False) is True
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    assert client.nvmf_get_subsystems(nqn=NQN) == [
        {
            "nqn": NQN,
            "subtype": "NVMe",
            "listen_addresses": [address],
            "allow_any_host": False,
            "hosts": [{"nqn": HOST_NQN}],
            "serial_number": "S1",
            "model_number": "Forebay",
            "max_namespaces": 32,
            "passthrough": False,
            "min_cntlid": 1,
            "max_cntlid": 0xFFEF,
            "dmrsl": 0,
            "wzsl": LIMITS.mdts,
            "namespaces": [
                {"nsid": 1, "bdev_name": "v", "name": "v", "nguid": NGUID_TEXT, "uuid": UUID_TEXT},
                {
                    "nsid": 9,
                    "bdev_name": "w",
                    "name": "w",
                    "nguid": "AB" * 16,
                    "uuid": str(OTHER_ID),
                    "no_auto_visible": True,
                    "hosts": [{"nqn": HOST_NQN}],
                },
            ],
        }
    ]  # fmt: skip
    with Association(port, NQN) as host:
        assert host.io[0].read(0, 1, nsid=9)[0].status == 0
        assert client.nvmf_ns_remove_host(nqn=NQN, nsid=9, host=HOST_NQN) is True
        assert host.io[0].read(0, 1, nsid=9)[0].status == Status.INVALID_NAMESPACE
        assert client.nvmf_subsystem_remove_ns(nqn=NQN, nsid=1) is True
        assert host.io[0].read(0, 1)[0].status == Status.INVALID_NAMESPACE
        assert client.nvmf_subsystem_remove_host(nqn=NQN, host=HOST_NQN) is True
        assert host.io[0].gone() is None
    with RawHost(port).initialize() as refused:
        assert refused.connect(NQN).status == Status.CONNECT_INVALID_HOST
    assert client.nvmf_delete_subsystem(nqn=NQN) is True
    (left,) = client.nvmf_get_subsystems()
    assert left["subtype"] == "Discovery"
    with pytest.raises(ConnectionRefusedError):
        RawHost(port)


def test_what_spdk_refuses_is_refused(control: Control) -> None:
    control.serve()
    invalid = (-32602, "Invalid parameters")
    assert control.error("nvmf_create_subsystem", nqn=NQN) == (-32603, f"Unable to create subsystem {NQN}")
    assert control.error("nvmf_create_subsystem", nqn=DISCOVERY_NQN)[0] == -32603
    assert control.error("nvmf_create_subsystem", nqn="nqn.x", serial_number="1" * 21) == invalid
    assert control.error("nvmf_get_subsystems", nqn="nqn.none") == (-19, "No such device")
    for method, params in (
        ("nvmf_delete_subsystem", {}),
        ("nvmf_subsystem_add_ns", {"namespace": {"bdev_name": "v"}}),
        ("nvmf_subsystem_add_host", {"host": HOST_NQN}),
        ("nvmf_subsystem_get_listeners", {}),
        ("nvmf_subsystem_get_controllers", {}),
    ):
        assert control.error(method, nqn="nqn.none", **params) == invalid
    assert control.error("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "none"}) == invalid
    assert control.error("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "v", "nsid": 1}) == invalid
    assert control.error("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "v", "nguid": "12"}) == invalid
    assert control.error("nvmf_subsystem_remove_ns", nqn=NQN, nsid=5) == invalid
    assert control.error("nvmf_ns_add_host", nqn=NQN, nsid=1, host=HOST_NQN) == invalid  # all see it
    for address in (
        {"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "x"},
        {"trtype": "RDMA", "traddr": "127.0.0.1", "trsvcid": "0"},
        {"trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "0"},
        {"trtype": "TCP", "adrfam": "IB", "traddr": "127.0.0.1", "trsvcid": "0"},
    ):
        assert control.error("nvmf_subsystem_add_listener", nqn=NQN, listen_address=address) == invalid


def test_the_discovery_subsystem_may_have_listeners_of_its_own(control: Control) -> None:
    """As SPDK's: it is reached wherever a subsystem listens, and where it was told to listen."""
    control.client.nvmf_create_transport(trtype="TCP")
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
    assert control.client.nvmf_subsystem_add_listener(nqn=DISCOVERY_NQN, listen_address=address) is True
    (found,) = control.client.nvmf_get_subsystems(nqn=DISCOVERY_NQN)
    (shown,) = found["listen_addresses"]
    with Association(int(shown["trsvcid"]), DISCOVERY_NQN, queues=0):
        (one,) = control.client.nvmf_subsystem_get_controllers(nqn=DISCOVERY_NQN)
        assert (one["cntrltype"], one["num_io_qpairs"]) == ("discovery", 0)
    control.volume()
    invalid = (-32602, "Invalid parameters")
    assert control.error("nvmf_subsystem_add_ns", nqn=DISCOVERY_NQN, namespace={"bdev_name": "v"}) == invalid
    assert control.error("nvmf_delete_subsystem", nqn=DISCOVERY_NQN)[0] == -19
    assert control.client.nvmf_subsystem_remove_listener(nqn=DISCOVERY_NQN, listen_address=shown) is True
    with pytest.raises(ConnectionRefusedError):
        RawHost(int(shown["trsvcid"]))


def test_subsystems_share_a_port(control: Control) -> None:
    port = control.serve()
    client = control.client
    address = {"trtype": "TCP", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    client.nvmf_create_subsystem(nqn=NQN + "2", allow_any_host=True)
    with RawHost(port).initialize() as early:
        assert early.connect(NQN + "2").status == Status.CONNECT_INVALID_PARAMETERS
    assert client.nvmf_subsystem_add_listener(nqn=NQN + "2", listen_address=address) is True
    with Association(port, NQN) as one, Association(port, NQN + "2", queues=0) as two:
        assert client.nvmf_subsystem_remove_listener(nqn=NQN, listen_address=address) is True
        assert one.io[0].gone() is None
        two.admin.enable()
        assert client.nvmf_subsystem_get_listeners(nqn=NQN) == []


def test_controllers_qpairs_and_counts(control: Control) -> None:
    port = control.serve()
    client = control.client
    with Association(port, NQN, queues=2) as host:
        (found,) = client.nvmf_subsystem_get_controllers(nqn=NQN)
        assert found == {
            "cntlid": host.cntlid,
            "cntrltype": "io",
            "hostnqn": HOST_NQN,
            "hostid": str(HOST_ID),
            "num_io_qpairs": 2,
        }
        qpairs = client.nvmf_subsystem_get_qpairs(nqn=NQN)
        assert sorted(one["qid"] for one in qpairs) == [0, 1, 2]
        assert {one["listen_address"]["trsvcid"] for one in qpairs} == {str(port)}
        host.io[0].read(0, 256)
        (stat,) = client.bdev_get_iostat(names=["v"])["bdevs"]
        assert (stat["num_read_ops"], stat["bytes_read"]) == (1, MIB)
        (group,) = client.nvmf_get_stats()["poll_groups"]
        assert (group["current_admin_qpairs"], group["current_io_qpairs"], group["io_qpairs"]) == (1, 2, 2)
    assert control.error("bdev_get_iostat", names=["none"]) == (-19, "No such device")


def test_grants_and_teardown(control: Control) -> None:
    port = control.serve()
    client = control.client
    mine = {"name": "v", "hosts": [[HOST_NQN, str(HOST_ID).upper()]]}
    with Association(port, NQN) as host:
        assert host.io[0].write(0, bytes(4096)).status == Status.ACCESS_DENIED
        assert client.forebay_grants_add(**mine, grants=[[1, 0, 8, 0], [2, 8, 8, 0]]) is True
        assert host.io[0].write(4, bytes(8 * 4096)).status == 0
        theirs = {"name": "v", "hosts": [[OTHER_NQN, str(OTHER_ID)]]}
        assert control.error("forebay_grants_add", **theirs, grants=[[3, 100, 1, 0], [4, 15, 2, 0]]) == (
            -17,
            "File exists",
        )
        assert client.forebay_get_info()["grants"] == 2
        assert control.error("forebay_grants_add", **theirs, grants=[[3, 16384, 1, 0]])[0] == -32602
        assert control.error("forebay_grants_add", **theirs, grants=[[3, 16384]])[0] == -32602
        assert control.error("forebay_grants_add", **theirs, grants=[[3, -1, 1, 0]])[0] == -32602
        for hosts in ([[OTHER_NQN, "x"]], [[OTHER_NQN]], [OTHER_NQN], [[OTHER_NQN, 1]], [], None):
            assert control.error("forebay_grants_add", name="v", hosts=hosts, grants=[[3, 1, 1, 0]])[0] == -32602
        assert control.error("forebay_grants_add", **{**theirs, "name": "x"}, grants=[[3, 1, 1, 0]])[0] == -19
        assert client.forebay_grants_revoke(ids=[2, 5]) == {"revoked": 1}
        assert client.forebay_grants_revoke(ids=[2]) == {"revoked": 0}
        assert host.io[0].write(8, bytes(4096)).status == Status.ACCESS_DENIED
        assert client.forebay_host_teardown(host_nqn=HOST_NQN, host_id=str(OTHER_ID)) == {"controllers": 0}
        assert client.forebay_host_teardown(host_nqn=HOST_NQN) == {"controllers": 1}
        assert host.io[0].gone() is None
    with Association(port, NQN) as host, Association(port, NQN, host_nqn=OTHER_NQN, host_id=OTHER_ID):
        assert client.forebay_bdev_set_mode(name="v", mode="raw") is True
        assert host.io[0].write(100, bytes(4096)).status == 0
        assert client.forebay_bdev_set_mode(name="v", mode="fenced") is True
        assert host.io[0].write(100, bytes(4096)).status == Status.ACCESS_DENIED
        assert client.forebay_teardown_all() == {"controllers": 2, "grants": 1}
        assert host.io[0].gone() is None
    assert control.error("forebay_bdev_set_mode", name="v", mode="open")[0] == -32602


def test_info(control: Control) -> None:
    found = control.client.forebay_get_info()
    assert found["pid"] == os.getpid()
    assert found["boot_id"] == control.server.boot_id
    able = dict.fromkeys(("fencing", "barrier", "per_host_visibility", "seal", "ordered"), True)
    assert found["capabilities"] == {**able, "qos": False}
    assert found["limits"]["max_command_bytes"] == LIMITS.max_command_bytes


def blocks_of(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_regions(control: Control) -> None:
    """Prepared: space is there, and it reads as zeros. Released: the space is back."""
    control.serve()
    client = control.client
    path = control.directory / "v.vol"
    before = blocks_of(path)
    assert client.forebay_region_prepare(name="v", offset_bytes=16 * MIB, length_bytes=8 * MIB) is True
    assert blocks_of(path) - before >= 8 * MIB
    control.server.volumes["v"].write(_aligned(b"\x77" * 4096), 16 * MIB)
    assert client.forebay_region_prepare(name="v", offset_bytes=16 * MIB, length_bytes=8 * MIB) is True
    zero = crc32c(bytes(8 * MIB))
    (found,) = client.forebay_verify(name="v", kind="crc32c", ranges=[[16 * MIB, 8 * MIB, 0]])["checksums"]
    assert found == zero
    assert client.forebay_region_release(name="v", offset_bytes=16 * MIB, length_bytes=8 * MIB) is True
    assert blocks_of(path) - before < MIB
    assert path.stat().st_size == 64 * MIB
    for bad in ({"offset_bytes": 1}, {"length_bytes": 100}, {"length_bytes": 0}, {"offset_bytes": 60 * MIB}):
        params: dict[str, object] = {"name": "v", "offset_bytes": 0, "length_bytes": 8 * MIB, **bad}
        assert control.error("forebay_region_prepare", **params)[0] == -32602
        assert control.error("forebay_region_release", **params)[0] == -32602


def test_a_region_that_does_not_fit_is_told(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    control.serve()

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(control.server.volumes["v"], "prepare_region", full)
    answer = control.error("forebay_region_prepare", name="v", offset_bytes=0, length_bytes=4096)
    assert answer == (-28, "No space left on device")


def _aligned(data: bytes) -> memoryview:
    (view, *_) = aligned_buffers(len(data))
    view[:] = data
    return view


def test_verify_ranges_of_any_shape(control: Control) -> None:
    control.serve()
    data = os.urandom(3 * MIB)
    control.server.volumes["v"].write(_aligned(data), 4096)
    content = bytes(4096) + data + bytes(MIB)
    ranges = [[0, 1, 7], [4095, 2, 0], [4096, 3 * MIB, 99], [5000, 2 * MIB + 13, 1], [3, 0, 5], [1 << 20, 1 << 20, 0]]
    found = control.client.forebay_verify(name="v", kind="crc32c", ranges=ranges)["checksums"]
    assert found == [crc32c(content[at : at + length], seed) for at, length, seed in ranges]
    assert control.error("forebay_verify", name="v", kind="md5", ranges=[])[0] == -95
    assert control.error("forebay_verify", name="v", kind="crc32c", ranges=[[0, 65 * MIB, 0]])[0] == -32602
    assert control.error("forebay_verify", name="v", kind="crc32c", ranges=[[0, 1, 1 << 32]])[0] == -32602


def test_barrier(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    control.serve()
    calls: list[int] = []
    real = os.fdatasync

    def counted(fd: int) -> None:
        calls.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    assert control.client.forebay_barrier(name="v") == {"result": "flushed"}
    assert len(calls) == 1

    def failing(fd: int) -> None:
        raise OSError(5, "EIO")

    monkeypatch.setattr(os, "fdatasync", failing)
    assert control.error("forebay_barrier", name="v") == (-5, "Input/output error")
    monkeypatch.setattr(os, "fdatasync", real)
    assert control.error("forebay_barrier", name="v") == (-5, "Input/output error"), "it is never forgotten"


def test_a_volume_is_not_closed_under_a_control_operation(control: Control) -> None:
    control.volume("v")
    volume = control.server.volumes["v"]
    with volume.hold():
        deleting = threading.Thread(target=control.server.delete_volume, args=("v",))
        deleting.start()
        deleting.join(0.05)
        assert deleting.is_alive()
        os.fstat(volume._fd)
    deleting.join(60)
    assert not deleting.is_alive()
    with pytest.raises(OSError, match="No such device"), volume.hold():
        pass


# --- framing ----------------------------------------------------------------------------------------------------------


def raw_calls(control: Control, data: bytes, answers: int, *, cuts: int = 1 << 20) -> list[Any]:
    """Send bytes in pieces; read that many answers (or until the end)."""
    text, found = "", list[Any]()
    decoder = json.JSONDecoder()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(control.socket))
        for at in range(0, len(data), cuts):
            sock.sendall(data[at : at + cuts])
        while len(found) < answers:
            got = sock.recv(65536)
            if not got:
                break
            text += got.decode()
            while text:
                try:
                    value, end = decoder.raw_decode(text)
                except ValueError:
                    break
                found.append(value)
                text = text[end:]
        if len(found) < answers or answers == 0:
            assert sock.recv(1) == b""
    return found


@pytest.mark.parametrize("cuts", [1, 7, 1 << 20])
def test_requests_follow_one_another_without_newlines(control: Control, cuts: int) -> None:
    one = {"jsonrpc": "2.0", "method": "forebay_grants_revoke", "params": {"ids": [1]}, "id": '}{ \\"'}
    two = {"jsonrpc": "2.0", "method": "spdk_get_version", "id": 2}
    data = (json.dumps(one) + json.dumps(two, indent=2) + json.dumps(one)).encode()
    found = raw_calls(control, data, 3, cuts=cuts)
    assert sorted(str(answer["id"]) for answer in found) == ["2", '}{ \\"', '}{ \\"']
    assert all(answer["jsonrpc"] == "2.0" and "result" in answer for answer in found)


@pytest.mark.parametrize("data", [b"hello", b'{"a" 1}', b"}", b'{"method": "x"]}'])
def test_what_is_not_json_ends_the_connection(control: Control, data: bytes) -> None:
    (answer,) = raw_calls(control, data, 2)
    assert answer["error"]["code"] == -32700
    assert control.client.spdk_get_version()


def test_what_is_no_request_is_told(control: Control) -> None:
    found = raw_calls(control, b'{"id": 1}[1]{"method": "spdk_get_version", "id": 3, "params": [1]}', 3)
    assert [answer["error"]["code"] for answer in found] == [-32600, -32600, -32602]


@pytest.mark.parametrize(
    "data",
    [b'{"method": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"id": ' + b"9" * 5000 + b"}", b'{"id": NaN}'],
    ids=["deep", "huge number", "NaN"],
)
def test_what_python_takes_and_json_has_not_ends_the_connection(control: Control, data: bytes) -> None:
    (answer,) = raw_calls(control, data, 2)
    assert answer["error"]["code"] == -32700
    assert control.client.spdk_get_version()


@pytest.mark.parametrize("ident", ["[1]", "{}", "1.5"])
def test_an_id_is_a_number_or_a_text(control: Control, ident: str) -> None:
    found = raw_calls(control, b'{"method": "spdk_get_version", "id": %s}' % ident.encode(), 1)
    assert [answer["error"]["code"] for answer in found] == [-32600]


@pytest.mark.parametrize("address", ["", "\0", "\ud800", "a\n"])
def test_addresses_and_names_that_cannot_be_are_invalid(control: Control, address: str) -> None:
    control.serve()
    listen = {"trtype": "TCP", "adrfam": "IPv4", "traddr": address, "trsvcid": "0"}
    calls = [
        {"method": "nvmf_subsystem_add_listener", "params": {"nqn": NQN, "listen_address": listen}, "id": 1},
        {"method": "nvmf_create_subsystem", "params": {"nqn": "nqn.\ud800"}, "id": 2},
        {"method": "nvmf_subsystem_add_host", "params": {"nqn": NQN, "host": "\ud800"}, "id": 3},
    ]
    found = raw_calls(control, b"".join(json.dumps(call).encode() for call in calls), 3)
    assert sorted(answer["error"]["code"] for answer in found) == [-32602, -32602, -32602]


def test_a_waiting_call_holds_up_no_other(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers may come in another order than the requests, on one connection too."""
    control.volume("v")
    opened = threading.Event()
    monkeypatch.setattr(control.server.volumes["v"], "flush", lambda: opened.wait(60))
    slow = {"jsonrpc": "2.0", "method": "forebay_barrier", "params": {"name": "v"}, "id": 1}
    quick = {"jsonrpc": "2.0", "method": "spdk_get_version", "id": 2}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(control.socket))
        sock.sendall(json.dumps(slow).encode() + json.dumps(quick).encode())
        assert json.loads(sock.recv(65536))["id"] == 2
        opened.set()
        assert json.loads(sock.recv(65536)) == {"jsonrpc": "2.0", "id": 1, "result": {"result": "flushed"}}


def test_a_call_for_which_there_was_no_thread_is_not_carried_out_later(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was told that the target is busy takes it for not done."""
    control.volume("v")
    released: list[tuple[int, int]] = []
    monkeypatch.setattr(control.server.volumes["v"], "release_region", lambda *where: released.append(where))
    real, no_more = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        if thread.name == "rpc call" and not no_more.is_set():
            no_more.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    places = [(ident, ident * MIB) for ident in (1, 2)]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(control.socket))
        answers = []
        for ident, offset_bytes in places:
            params = {"name": "v", "offset_bytes": offset_bytes, "length_bytes": MIB}
            call = {"jsonrpc": "2.0", "method": "forebay_region_release", "params": params, "id": ident}
            sock.sendall(json.dumps(call).encode())
            answers.append(json.loads(sock.recv(65536)))
    assert answers[0]["error"]["code"] == -errno.EBUSY
    assert answers[1] == {"jsonrpc": "2.0", "id": 2, "result": True}
    assert released == [(2 * MIB, MIB)]
