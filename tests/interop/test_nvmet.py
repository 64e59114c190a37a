"""Linux's own NVMe/TCP target judges our initiator: the shipped suite, digests, authentication, a lost target."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from forebay.client.transports.base import Outcome, ReadOp, Segment, Transport, WriteOp
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.errors import ConnectionLost, DeadlineExceeded, ForebayError, TargetRefused, Unavailable
from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhchapHash
from forebay.testing.transport_suite import Area, TransportSuite
from tests.appliance.target.conftest import eventually
from tests.client.conftest import new_host
from tests.interop.checks import complaints, passed, prepare, read, serving
from tests.interop.guest import Guest

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

NQN = "nqn.2026-01.io.forebay:interop:nvmet"
SECURE = "nqn.2026-01.io.forebay:interop:nvmet-secure"
PORT = 4420
FAST, SLOW = 1, 2
FAST_BYTES = 64 << 20
UP_S = 120.0
EXPECTED = re.compile(
    r"connect request for invalid subsystem"  # of one that went
    r"|qid 0 failure1|fatal error occurred"  # of a host that has other secrets than it should
    r"|ctrl \d+ keep-alive timer"  # of a host that could not be heard
)
LONG_MS = 30_000


class Keys(NamedTuple):
    """A host that the secure subsystem knows, and what the two agree on."""

    host: HostIdentity
    hash: str
    group: str


def _keys(hash_id: str, group: str, transform: DhchapHash | None, *, both: bool) -> Keys:
    host = new_host()
    secret = Secret(
        bytes(range({None: 32, DhchapHash.SHA256: 32, DhchapHash.SHA384: 48}.get(transform, 64))), transform
    )
    secrets = HostSecrets(secret, Secret.generate() if both else None)
    return Keys(HostIdentity(host.nqn, host.host_id, secrets), hash_id, group)


KEYS = [
    _keys("sha256", "null", DhchapHash.SHA256, both=True),
    _keys("sha256", "null", None, both=False),
    _keys("sha384", "ffdhe2048", DhchapHash.SHA384, both=True),
    _keys("sha512", "ffdhe3072", DhchapHash.SHA512, both=True),
    _keys("sha512", "ffdhe4096", DhchapHash.SHA256, both=False),
    _keys("sha256", "ffdhe6144", DhchapHash.SHA512, both=True),
    _keys("sha384", "ffdhe8192", DhchapHash.SHA256, both=True),
]


def _row(keys: Keys) -> str:
    secrets = keys.host.secrets
    assert secrets is not None
    controller = secrets.controller.text() if secrets.controller is not None else ""
    return ",".join((keys.host.nqn, secrets.host.text(), controller, keys.hash, keys.group))


class Peer:
    """The guest with the target in it."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.port = guest.ports[PORT]

    def transport(
        self, host: HostIdentity | None = None, *, nqn: str = NQN, options: NvmeTcpOptions | None = None
    ) -> NvmeTcpTransport:
        address = SubsystemAddress("127.0.0.1", self.port, nqn)
        return NvmeTcpTransport(address, host or new_host(), options=options or NvmeTcpOptions())

    def tell(self, word: str) -> None:
        """Have the guest do something, and wait until it has."""
        file = self.guest.share / word
        file.touch()
        eventually(lambda: not file.exists(), f"the guest did {word}", 30)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    share = tmp_path_factory.mktemp("nvmet") / "share"
    hosts = " ".join(_row(keys) for keys in KEYS)
    prepare(share, "nvmet.sh", {"NQN": NQN, "SECURE": SECURE, "PORT": PORT, "HOSTS": f"'{hosts}'"})
    ready = threading.Event()
    with Guest(share, forwards=[PORT]) as guest:
        try:
            with serving(share, {"ready": ready.set}):
                eventually(lambda: ready.is_set() or not guest.runs, "the target is up", UP_S)
            assert ready.is_set(), guest.log()
            yield Peer(guest)
        finally:
            (share / "over").touch()
            log = guest.wait(30)
            print(log)  # shown if a test failed
    checks = read(log)
    passed(checks, "serve")
    passed(checks, "stays")
    told = [line for line in complaints(checks["stays"]) if "nvmet" in line and not EXPECTED.search(line)]
    assert not told, "the kernel complains"


class TestPlain(TransportSuite):
    options = NvmeTcpOptions()

    @pytest.fixture
    def transport(self, peer: Peer) -> Iterator[Transport]:
        transport = peer.transport(options=self.options)
        yield transport
        transport.close()

    @pytest.fixture
    def area(self) -> Area:
        return Area(FAST, 0, 32 << 20, FAST_BYTES)


class TestDigestsOnManyQueues(TestPlain):
    """Small commands, more queues than the target has processors."""

    options = NvmeTcpOptions(
        connections=8, call_connections=4, max_command_bytes=64 << 10, header_digest=True, data_digest=True
    )


def soon(left_ms: int = LONG_MS) -> int:
    return time.monotonic_ns() // 1_000_000 + left_ms


def transfers(transport: Transport) -> None:
    data, got = bytes(range(251)) * 1024, bytearray(251 << 10)
    pad = Segment(None, -len(data) % 4096)
    segments = (Segment(memoryview(data), len(data)), pad)
    assert transport.write([WriteOp(1, 1 << 20, segments)], soon())[0].error is None
    assert transport.read([ReadOp(1, 1 << 20, (Segment(memoryview(got), len(got)), pad))], soon())[0].error is None
    assert got == data


SLOW_GROUPS = ("ffdhe3072", "ffdhe6144")
"""Slow in emulation, and nothing that the groups beside them have not."""


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(one, id=f"{one.hash}-{one.group}", marks=[pytest.mark.long] * (one.group in SLOW_GROUPS))
        for one in KEYS
    ],
)
def test_both_prove_who_they_are(peer: Peer, keys: Keys) -> None:
    transport = peer.transport(keys.host, nqn=SECURE, options=NvmeTcpOptions(connections=1))
    try:
        transfers(transport)
    finally:
        transport.close()


def refusal(transport: Transport) -> ForebayError:
    with pytest.raises(ForebayError) as caught:
        transport.connect(soon())
    transport.close()
    return caught.value


def test_who_cannot_prove_it_is_refused(peer: Peer) -> None:
    nqn, host_id, secrets = KEYS[0].host.nqn, KEYS[0].host.host_id, KEYS[0].host.secrets
    assert secrets is not None
    stranger = refusal(peer.transport(nqn=SECURE))
    assert isinstance(stranger, TargetRefused) and "invalid host" in str(stranger)
    none = refusal(peer.transport(HostIdentity(nqn, host_id), nqn=SECURE))
    assert isinstance(none, TargetRefused) and "no secret" in str(none)
    wrong = HostSecrets(Secret.generate(), secrets.controller)
    other = refusal(peer.transport(HostIdentity(nqn, host_id, wrong), nqn=SECURE))
    # The kernel closes right after it has said no, and what it said may be lost by that.
    assert isinstance(other, TargetRefused | ConnectionLost) and "does not take this host's secret" in str(other)
    impostor = HostSecrets(secrets.host, Secret.generate())
    unproven = refusal(peer.transport(HostIdentity(nqn, host_id, impostor), nqn=SECURE))
    assert isinstance(unproven, TargetRefused) and "does not prove who it is" in str(unproven)
    unasked = refusal(peer.transport(KEYS[0].host))
    assert isinstance(unasked, TargetRefused) and "does not authenticate" in str(unasked)
    transport = peer.transport(KEYS[0].host, nqn=SECURE)
    transfers(transport)
    transport.close()


def test_what_is_late_is_given_up(peer: Peer) -> None:
    """Every command of the slow disk takes 0.7 s: nothing writes to the buffer after the call."""
    transport = peer.transport()
    try:
        transport.connect(soon())
        into = bytearray(b"u" * (128 << 10))
        (outcome,) = transport.read([ReadOp(SLOW, 0, (Segment(memoryview(into), len(into)),))], soon(200))
        assert isinstance(outcome.error, DeadlineExceeded)
        seen = bytes(into)
        assert transport.read([ReadOp(SLOW, 0, (Segment(None, 4096),))], soon())[0].error is None
        assert bytes(into) == seen

        def doubtful() -> bool:
            (written,) = transport.write([WriteOp(SLOW, 0, (Segment(memoryview(seen), len(seen)),))], soon(200))
            assert isinstance(written.error, DeadlineExceeded)
            return not written.quiesced  # on a busy machine a write may be late before it is sent

        eventually(doubtful, "a write that the target has", 30)
    finally:
        transport.close()


def test_a_target_that_goes_and_comes_back(peer: Peer) -> None:
    """Reads and writes under way end with an error, none with wrong bytes, and all is well when it is back."""
    transport = peer.transport(options=NvmeTcpOptions(connections=4, backoff_ms=(20, 100)))
    data = bytes(range(256)) * 4096
    over = threading.Event()
    errors: list[ForebayError | None] = []

    def work() -> None:
        into = bytearray(len(data))
        while not over.is_set():
            ops = [ReadOp(FAST, 0, (Segment(memoryview(into), len(into)),))]
            outcome: Outcome = transport.read(ops, soon(5_000))[0]
            errors.append(outcome.error)
            assert outcome.error is not None or into == data

    try:
        assert transport.write([WriteOp(FAST, 0, (Segment(memoryview(data), len(data)),))], soon())[0].error is None
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(errors) > 5, "reads", 30)
        peer.tell("leave")
        eventually(lambda: any(error is not None for error in errors), "an error", 30)
        peer.tell("return")
        count = len(errors)
        eventually(lambda: any(error is None for error in errors[count:]), "reads again", 30)
        over.set()
        for thread in threads:
            thread.join(30)
        kinds = {type(error) for error in errors if error is not None}
        assert kinds <= {ConnectionLost, Unavailable, TargetRefused, DeadlineExceeded}
        assert transport.state().reconnects >= 1
    finally:
        over.set()
        transport.close()


def test_a_target_that_falls_silent(peer: Peer) -> None:
    """Nothing is closed, nothing answers: time tells, and when it speaks again all is well."""
    transport = peer.transport(options=NvmeTcpOptions(keep_alive_ms=1_500, backoff_ms=(20, 100)))
    try:
        transport.connect(soon())
        into = memoryview(bytearray(1 << 20))
        ops = [ReadOp(FAST, 0, (Segment(into, len(into)),))]
        assert transport.read(ops, soon())[0].error is None
        peer.guest.pause()
        try:
            assert isinstance(transport.read(ops, soon(300))[0].error, DeadlineExceeded)
            eventually(lambda: not transport.state().connected, "its silence is noticed", 30)
        finally:
            peer.guest.resume()
        eventually(lambda: transport.read(ops, soon(5_000))[0].error is None, "it is back", 30)
        assert transport.state().reconnects >= 1
    finally:
        transport.close()
