"""The target has a host prove who it is: our initiator against it, by every way that a host may do wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCException  # type: ignore[import-untyped]

from forebay.appliance.dataplane.target.keyring import HostKeys
from forebay.client.transports.base import ReadOp, Segment, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.clock import ManualClock, SystemClock
from forebay.errors import ForebayError, TargetRefused
from forebay.ids import HostIdentity
from forebay.nvmetcp import command, spec
from forebay.nvmetcp.authentication import MAX_MESSAGE_BYTES, ControllerAuthentication, HostAuthentication, Step
from forebay.nvmetcp.command import Command, Completion
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import Status
from tests.appliance.target.conftest import Rig, eventually
from tests.appliance.target.host import HOST_ID, HOST_NQN, OTHER_ID, OTHER_NQN, RawHost
from tests.appliance.target.test_process import Process

NQN = "nqn.2026-01.io.forebay:node:tenant"
HOST_KEY, CONTROLLER_KEY, OTHER_KEY = (Secret(bytes([n]) * 32) for n in (1, 2, 3))
BOTH = HostSecrets(HOST_KEY, CONTROLLER_KEY)
AUTH_REQUIRED = Status.AUTHENTICATION_REQUIRED


class Node:
    """A target process with a subsystem that a host with keys may connect to, and another without."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.process = Process(directory, *options)
        with self.client() as client:
            for name, secret in (("host", HOST_KEY), ("controller", CONTROLLER_KEY), ("other", OTHER_KEY)):
                path = directory / f"{name}.key"
                path.touch(mode=0o600)
                path.write_text(secret.text() + "\n")
                client.keyring_file_add_key(name=name, path=str(path))
            volume = directory / "v.vol"
            volume.write_bytes(bytes(16 << 20))
            client.bdev_aio_create(name="v", filename=str(volume), block_size=4096)
            client.forebay_bdev_set_mode(name="v", mode="raw")
            client.nvmf_create_transport(trtype="TCP")
            client.nvmf_create_subsystem(nqn=NQN, serial_number="AUTH")
            client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "v", "nsid": 1})
            address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
            client.nvmf_subsystem_add_listener(nqn=NQN, listen_address=address)
            self.port = int(client.nvmf_subsystem_get_listeners(nqn=NQN)[0]["address"]["trsvcid"])
            client.nvmf_subsystem_add_host(nqn=NQN, host=HOST_NQN, dhchap_key="host", dhchap_ctrlr_key="controller")
            client.nvmf_subsystem_add_host(nqn=NQN, host=OTHER_NQN)

    def client(self) -> Any:
        return self.process.client()

    def transport(self, secrets: HostSecrets | None, nqn: str = HOST_NQN) -> NvmeTcpTransport:
        host_id = str(HOST_ID if nqn == HOST_NQN else OTHER_ID)
        return NvmeTcpTransport(SubsystemAddress("127.0.0.1", self.port, NQN), HostIdentity(nqn, host_id, secrets))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("auth"))
    yield node
    node.process.process.terminate()
    node.process.process.wait(60)


def soon() -> int:
    return SystemClock().monotonic_ms() + 30_000


def transfers(transport: NvmeTcpTransport) -> None:
    """Write and read through it."""
    data, got = bytes(range(256)) * 64, bytearray(16384)
    assert transport.write([WriteOp(1, 8192, (Segment(memoryview(data), 16384),))], soon())[0].error is None
    assert transport.read([ReadOp(1, 8192, (Segment(memoryview(got), 16384),))], soon())[0].error is None
    assert got == data


def refusal(transport: NvmeTcpTransport) -> str:
    with pytest.raises(ForebayError) as caught:
        transport.connect(soon())
    transport.close()
    assert isinstance(caught.value, TargetRefused), caught.value
    return str(caught.value)


@pytest.mark.parametrize("secrets", [BOTH, HostSecrets(HOST_KEY)], ids=["both ways", "one way"])
def test_a_host_with_its_secret_reads_and_writes(node: Node, secrets: HostSecrets) -> None:
    transport = node.transport(secrets)
    try:
        transfers(transport)
        with node.client() as client:
            pairs = client.nvmf_subsystem_get_qpairs(nqn=NQN)
            assert len(pairs) >= 2  # each queue has to
            assert all(one["auth"] == {"state": "completed", "digest": "sha256", "dhgroup": "null"} for one in pairs)
    finally:
        transport.close()


def test_a_host_without_keys_is_not_asked(node: Node) -> None:
    transport = node.transport(None, OTHER_NQN)
    try:
        transfers(transport)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("secrets", "why"),
    [
        (None, "this host has no secret"),
        (HostSecrets(OTHER_KEY, CONTROLLER_KEY), "does not take this host's secret"),
        (HostSecrets(HOST_KEY, OTHER_KEY), "does not prove who it is"),
    ],
    ids=["none", "another", "another of the target"],
)
def test_who_has_no_secret_is_refused(node: Node, secrets: HostSecrets | None, why: str) -> None:
    assert why in refusal(node.transport(secrets))


def test_a_target_that_does_not_ask_is_not_believed_by_who_knows_its_secret(node: Node) -> None:
    assert "does not authenticate" in refusal(node.transport(BOTH, OTHER_NQN))


def test_other_keys_and_none(node: Node) -> None:
    with node.client() as client:
        client.nvmf_subsystem_set_keys(nqn=NQN, host=HOST_NQN, dhchap_key="other")
        assert {one["nqn"]: one.get("dhchap_key") for one in client.nvmf_get_subsystems(nqn=NQN)[0]["hosts"]} == {
            HOST_NQN: "other",
            OTHER_NQN: None,
        }
        try:
            assert "does not take" in refusal(node.transport(HostSecrets(HOST_KEY)))
            transport = node.transport(HostSecrets(OTHER_KEY))
            transfers(transport)
            client.nvmf_subsystem_set_keys(nqn=NQN, host=HOST_NQN)
            transfers(transport)  # who is connected stays
            transport.close()
            transport = node.transport(None)
            transfers(transport)
            transport.close()
        finally:
            client.nvmf_subsystem_set_keys(nqn=NQN, host=HOST_NQN, dhchap_key="host", dhchap_ctrlr_key="controller")


@pytest.mark.parametrize(("digest", "group"), [("sha384", "ffdhe2048"), ("sha512", "ffdhe8192")])
def test_what_is_agreed_on_is_what_was_configured(node: Node, digest: str, group: str) -> None:
    with node.client() as client:
        client.nvmf_set_config(dhchap_digests=[digest], dhchap_dhgroups=[group])
        try:
            transport = node.transport(BOTH)
            transfers(transport)
            assert client.nvmf_subsystem_get_qpairs(nqn=NQN)[0]["auth"] == {
                "state": "completed",
                "digest": digest,
                "dhgroup": group,
            }
            transport.close()
        finally:
            client.nvmf_set_config(
                dhchap_digests=["sha256", "sha384", "sha512"], dhchap_dhgroups=["null", "ffdhe2048", "ffdhe3072"]
            )


def test_keys_that_cannot_be_had_are_refused(node: Node, tmp_path: Path) -> None:
    open_to_all, no_secret = tmp_path / "open", tmp_path / "empty"
    open_to_all.write_text(HOST_KEY.text())
    open_to_all.chmod(0o640)
    no_secret.touch(mode=0o600)
    with node.client() as client:

        def fails(method: str, **params: object) -> bool:
            with pytest.raises(JSONRPCException):
                getattr(client, method)(**params)
            return True

        assert fails("keyring_file_add_key", name="x", path=str(open_to_all))
        assert fails("keyring_file_add_key", name="x", path=str(no_secret))
        assert fails("keyring_file_add_key", name="x", path=str(tmp_path / "nowhere"))
        assert fails("keyring_file_add_key", name="x", path="relative")
        assert fails("keyring_file_remove_key", name="x")
        assert fails("nvmf_subsystem_set_keys", nqn=NQN, host=HOST_NQN, dhchap_key="x")
        assert fails("nvmf_subsystem_set_keys", nqn=NQN, host="nqn.nobody", dhchap_key="host")
        assert fails("nvmf_subsystem_add_host", nqn=NQN, host="nqn.another", dhchap_ctrlr_key="controller")
        assert fails("nvmf_set_config", dhchap_digests=["md5"])
        assert fails("nvmf_set_config", dhchap_dhgroups=[])
        shown = client.keyring_get_keys()
    assert [one["name"] for one in shown] == ["controller", "host", "other"]
    text = str(shown) + node.process.log.read_text()
    assert not any(secret.text()[11:] in text or secret.key.hex() in text for secret in (HOST_KEY, CONTROLLER_KEY))


# --- hosts that do it wrong -----------------------------------------------------------------------------------------


@pytest.fixture
def host(node: Node) -> Iterator[RawHost]:
    """An admin queue whose Connect was answered: authenticate first."""
    with RawHost(node.port).initialize() as host:
        done = host.connect(NQN)
        assert (done.status, done.result & ~0xFFFF) == (0, spec.CONNECT_ATR)
        yield host


def send(host: RawHost, message: bytes, **changes: int) -> Completion:
    one = command.authentication_send(host.next_cid(), len(message))._replace(**changes)
    return host.run(one, data=message)[0]


def receive(host: RawHost, **changes: int) -> tuple[Completion, bytes]:
    one = command.authentication_receive(host.next_cid(), MAX_MESSAGE_BYTES)._replace(**changes)
    return host.run(one, read_bytes=MAX_MESSAGE_BYTES)


def proof(secrets: HostSecrets = BOTH) -> HostAuthentication:
    return HostAuthentication(secrets, HOST_NQN, NQN, 1)


def refused(done: Completion) -> int:
    assert done.do_not_retry
    return done.status


def test_nothing_else_is_taken_before(host: RawHost) -> None:
    for one in (
        command.property_get(1, spec.Property.CAP, wide=True),
        command.property_set(2, spec.Property.CC, 0x460001),
        command.keep_alive(3),
        command.async_event_request(4),
        Command(spec.AdminOpcode.ABORT, spec.SQE_PSDT_SGL, 5),
        command.connect(6, 0, 32),
    ):
        assert refused(host.run(one)[0]) == AUTH_REQUIRED
    assert refused(host.run(command.identify(7, spec.CnsValue.CONTROLLER), read_bytes=4096)[0]) == AUTH_REQUIRED
    data = command.ConnectData(HOST_ID, 0xFFFF, NQN, HOST_NQN).to_bytes()
    assert refused(host.run(command.connect(8, 0, 32), data=data)[0]) == AUTH_REQUIRED


def test_an_io_queue_has_to_prove_itself_too(node: Node) -> None:
    with RawHost(node.port).initialize() as admin, RawHost(node.port).initialize() as queue:
        cntlid = admin.connect(NQN).result & 0xFFFF
        # Not before the admin queue has.
        assert refused(queue.connect(NQN, qid=1, cntlid=cntlid)) == Status.COMMAND_SEQUENCE_ERROR
        authenticate(admin)
        admin.enable()
        done = queue.connect(NQN, qid=1, cntlid=cntlid)
        assert (done.status, done.result) == (0, spec.CONNECT_ATR | cntlid)
        assert refused(queue.read(0, 1)[0]) == AUTH_REQUIRED
        assert refused(queue.write(0, bytes(4096))) == AUTH_REQUIRED
        assert refused(queue.write(0, bytes(4096), in_capsule=True)) == AUTH_REQUIRED
        assert refused(queue.run(command.flush(90, 1))[0]) == AUTH_REQUIRED
        authenticate(queue)
        assert queue.write(0, b"a" * 4096).status == 0
        assert queue.read(0, 1)[1] == b"a" * 4096


def test_who_proves_nothing_keeps_no_queue_id(node: Node) -> None:
    """Names are no secrets: whoever knows them connects as that host, and gets no further."""
    with RawHost(node.port).initialize() as admin:
        cntlid = admin.connect(NQN).result & 0xFFFF
        authenticate(admin)
        admin.enable()
        with RawHost(node.port).initialize() as impostor, RawHost(node.port).initialize() as queue:
            assert impostor.connect(NQN, qid=1, cntlid=cntlid).status == 0
            assert queue.connect(NQN, qid=1, cntlid=cntlid).status == 0
            authenticate(queue)
            assert queue.write(0, b"b" * 4096).status == 0
            with RawHost(node.port).initialize() as second:
                assert refused(second.connect(NQN, qid=1, cntlid=cntlid)) == Status.INVALID_QUEUE_ID
            authenticate(impostor)
            impostor.gone()  # a proof does not help it any more: the id is another's
            assert queue.read(0, 1)[1] == b"b" * 4096


def test_who_proves_nothing_ends_with_the_controller(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    node = Node(directory, "--proof-timeout-s", "600")
    try:
        with RawHost(node.port).initialize() as admin, RawHost(node.port).initialize() as queue:
            cntlid = admin.connect(NQN).result & 0xFFFF
            authenticate(admin)
            admin.enable()
            assert queue.connect(NQN, qid=1, cntlid=cntlid).status == 0
            admin.sock.close()
            queue.gone()
    finally:
        node.process.process.terminate()
        node.process.process.wait(60)


def authenticate(host: RawHost, secrets: HostSecrets = BOTH) -> None:
    mine = proof(secrets)
    message: bytes | None = mine.start()
    while message is not None:
        assert send(host, message).status == 0
        message = mine.received(receive(host)[1]) if mine.step is not Step.AUTHENTICATED else None


def test_a_host_may_prove_itself_again(host: RawHost) -> None:
    authenticate(host)
    host.enable()
    authenticate(host)
    assert host.run(command.keep_alive(200))[0].status == 0
    mine = proof(HostSecrets(OTHER_KEY))
    assert send(host, mine.start()).status == 0
    assert host.run(command.keep_alive(201))[0].status == 0  # it is believed until it fails
    reply = mine.received(receive(host)[1])
    assert reply is not None and send(host, reply).status == 0
    assert receive(host)[1][:2] == b"\x00\xf1"
    host.gone()


def test_commands_out_of_turn_and_of_other_protocols(host: RawHost) -> None:
    assert refused(receive(host)[0]) == Status.COMMAND_SEQUENCE_ERROR
    start = proof().start()
    assert refused(send(host, start, cdw10=0)) == Status.INVALID_FIELD
    assert refused(send(host, start, cdw11=len(start) + 1)) == Status.INVALID_FIELD
    assert refused(send(host, bytes(MAX_MESSAGE_BYTES + 4))) == Status.INVALID_FIELD
    assert refused(host.run(command.authentication_send(90, 64), write=bytes(64))[0]) == Status.INVALID_FIELD
    assert send(host, start).status == 0
    assert refused(receive(host, cdw10=0)[0]) == Status.INVALID_FIELD
    assert refused(receive(host, cdw11=16)[0]) == Status.INVALID_FIELD
    assert refused(receive(host, cdw11=MAX_MESSAGE_BYTES + 1)[0]) == Status.INVALID_FIELD
    done, challenge = receive(host)
    assert (done.status, challenge[:2]) == (0, b"\x01\x01")


@pytest.mark.parametrize("message", [b"\0", b"\xff" * 300, bytes(64), b"\x00\xf0\0\0\1\0\1\1"])
def test_garbage_is_a_failure(host: RawHost, message: bytes) -> None:
    assert send(host, message).status == 0
    done, failure = receive(host)
    assert (done.status, failure[:2], failure[6]) == (0, b"\x00\xf1", 1)


def test_a_reply_made_up_without_the_secret(host: RawHost) -> None:
    impostor = ControllerAuthentication(BOTH, HOST_NQN, NQN)
    assert send(host, proof().start()).status == 0
    challenge = receive(host)[1]
    impostor.received(proof().start())
    assert send(host, b"\x01\x02" + challenge[2:16] + bytes(64)).status == 0
    assert receive(host)[1][:2] == b"\x00\xf1"
    host.gone()


def test_a_host_that_does_not_believe_the_controller_says_so(node: Node, host: RawHost) -> None:
    mine = proof()
    assert send(host, mine.start()).status == 0
    reply = mine.received(receive(host)[1])
    assert reply is not None and send(host, reply).status == 0
    receive(host)
    assert send(host, b"\x00\xf0\0\0\1\0\1\1").status == 0
    host.gone()
    eventually(lambda: "does not take the controller's proof" in node.process.log.read_text(), "it is logged")


def test_one_that_stops_half_way_is_cut_off(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    node = Node(directory, "--proof-timeout-s", "0.3")
    try:
        with RawHost(node.port).initialize() as host:
            host.connect(NQN)
            assert send(host, proof().start()).status == 0
            host.gone()
    finally:
        node.process.process.terminate()
        node.process.process.wait(60)


def test_the_keep_alive_timer_waits_for_the_proof(disk_rig: Rig) -> None:
    """A slow host with a large group must not lose its controller while it computes."""
    clock = ManualClock()
    keys = HostKeys("k", None, HostSecrets(HOST_KEY))
    disk_rig.subsystem.hosts[HOST_NQN] = keys
    with RawHost(disk_rig.port).initialize() as host:
        assert host.connect(NQN, keep_alive_ms=1000).status == 0
        (controller,) = disk_rig.server.controllers
        controller._clock = clock
        controller.expired()
        clock.advance(3_600_000)
        assert not controller.expired()
        authenticate(host, HostSecrets(HOST_KEY))
        eventually(lambda: controller.queues[0].ready, "the target, too, has noted that the host is proven")
        controller.expired()
        clock.advance(3_600_000)
        assert controller.expired()
