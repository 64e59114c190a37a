"""One RDMA connection over verbs that do as they are told: its events, and the order in which it ends (design §6.5)."""

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from forebay.client import registered as registered_module
from forebay.client.registered import nothing_registered, register
from forebay.client.transports import nvme_rdma_cm, nvme_rdma_device, nvme_rdma_link
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_rdma import NvmeRdmaTransport
from forebay.client.transports.nvme_rdma_cm import QpAttributes
from forebay.client.transports.nvme_rdma_device import Device, usable
from forebay.client.transports.nvme_rdma_link import Link, Response, Sent
from forebay.clock import SystemClock
from forebay.errors import ConnectionLost, ForebayError, InvalidArgument, ProtocolError, Unavailable
from forebay.ids import HostIdentity
from forebay.nvmerdma import CmRequest
from tests.client.conftest import eventually

ENTRIES = 4
DEADLINE_MS = 1 << 40


class Resource:
    """Something that a device gave, and its end in the order of ends; it may refuse to end."""

    def __init__(self, verbs: "Verbs", name: str, **values: object) -> None:
        self.verbs = verbs
        self.name = name
        self.refusals: list[int] = []
        self.refuses: threading.Event | None = None
        """Until when it does."""
        self.asked = False
        self.__dict__.update(values)

    def close(self) -> None:
        self.asked = True
        if self.refuses is not None and not self.refuses.is_set():
            raise OSError(errno.EBUSY, "as the test wants it")
        if self.refusals:
            raise OSError(self.refusals.pop(0), "as the test wants it")
        self.verbs.ended.append(self.name)


class Verbs:
    """In the place of the package ibverbs: one device, one queue pair."""

    AccessFlags = SimpleNamespace(LOCAL_WRITE=1, REMOTE_WRITE=2, REMOTE_READ=4)
    WROpcode = SimpleNamespace(SEND=2)
    SendFlags = SimpleNamespace(SIGNALED=2)
    SendWR = RecvWR = QPInitAttr = AHAttr = SimpleNamespace

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.states: list[int] = []
        self.masks: list[int] = []
        self.posted: list[Any] = []
        self.receives: list[int] = []
        self.completions: list[Any] = []
        self.armed = False
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.channel = Resource(self, "channel", fd=self.event_fd, get_cq_event=lambda: os.eventfd_read(self.event_fd))
        self.cq = Resource(self, "cq", poll=self.poll, req_notify=self.arm, ack_events=lambda _: None)
        self.qp = Resource(
            self,
            "qp",
            qp_num=77,
            modify=self.modify,
            post_send=self.posted.extend,
            post_recv=lambda wrs: self.receives.extend(wr.wr_id for wr in wrs),
        )
        self.regions = 0
        self.refused_regions = 0

    def SGE(self, address: int, length: int, lkey: int) -> tuple[int, int, int]:
        return address, length, lkey

    def modify(self, mask: int, ah_attr: object = None, **fields: int) -> None:
        self.states.append(fields["qp_state"])
        self.masks.append(fields.get("qp_access_flags", -1))

    def arm(self) -> None:
        self.armed = True

    def poll(self, limit: int) -> list[Any]:
        taken, self.completions = self.completions[:limit], self.completions[limit:]
        return taken

    def complete(self, wr_id: int, status: int = 0, byte_len: int = 16) -> None:
        """What a device does: an event for the first completion after it was asked for one."""
        self.completions.append(
            SimpleNamespace(wr_id=wr_id, status=status, byte_len=byte_len, status_str=f"status {status}")
        )
        if self.armed:
            self.armed = False
            os.eventfd_write(self.event_fd, 1)

    def reg_mr(self, address: int, length: int, access: int) -> Resource:
        if self.refused_regions:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.regions += 1
        kind = "shared region" if access & 6 else "region"
        return Resource(self, kind, lkey=self.regions, rkey=100 + self.regions)

    def get_device_list(self) -> list[Any]:
        context = SimpleNamespace(
            create_comp_channel=lambda: self.channel,
            create_cq=lambda entries, channel: self.cq,
            alloc_pd=lambda: Resource(self, "pd", create_qp=lambda attributes: self.qp, reg_mr=self.reg_mr),
            query_device=lambda: SimpleNamespace(max_qp_rd_atom=128, phys_port_cnt=1),
            query_port=lambda port: SimpleNamespace(state=self.port_state),
            close=lambda: self.ended.append("context"),
            __enter__=None,
        )
        return [SimpleNamespace(name="fake0", open=lambda: _Managed(context))]

    port_state = 4


class _Managed:
    """A context that is a context manager, too."""

    def __init__(self, context: SimpleNamespace) -> None:
        self.__dict__.update(context.__dict__)

    def __enter__(self) -> "_Managed":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Cm:
    """In the place of `CmConnection`."""

    private = bytes.fromhex("00000400")
    failing = ""

    def __init__(self, clock: object) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.reason: str | None = None
        self.established = False
        self.closed = False

    def resolve(self, address: str, port: int, source: str | None, deadline_ms: int) -> str:
        return "fake0"

    def attributes(self, state: int) -> tuple[QpAttributes, int]:
        return QpAttributes(qp_state=state), 1 | 1 << 3 | (1 << 7 if state == 2 else 0)

    def connect(self, number: int, private_data: bytes, resources: int, deadline_ms: int) -> bytes:
        assert number == 77 and len(private_data) == 32 and resources == 128
        if self.failing == "connect":
            raise ConnectionLost("nobody listens there")
        return self.private

    def establish(self) -> None:
        self.established = True

    def ended(self) -> str | None:
        os.eventfd_read(self.fd)
        return self.reason

    def end(self, reason: str) -> None:
        self.reason = reason
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            nvme_rdma_device.verbs().ended.append("connection")


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    fake = Verbs()
    monkeypatch.setattr(nvme_rdma_link, "verbs", lambda: fake)
    monkeypatch.setattr(nvme_rdma_device, "verbs", lambda: fake)
    monkeypatch.setattr(nvme_rdma_device, "library", lambda: None)
    monkeypatch.setattr(nvme_rdma_link, "CmConnection", Cm)
    monkeypatch.setattr(nvme_rdma_device, "_AGAIN_S", 0.001)
    return fake


def dial(device: Device) -> Link:
    return Link.dial(
        lambda name: device,
        "10.0.0.1",
        4420,
        source=None,
        request=CmRequest(1, ENTRIES, 7),
        staging_bytes=1 << 16,
        deadline_ms=DEADLINE_MS,
        clock=SystemClock(),
    )


@pytest.fixture
def device(verbs: Verbs) -> Iterator[Device]:
    one = Device("fake0")
    yield one
    one.release()


@pytest.fixture
def link(device: Device) -> Iterator[Link]:
    one = dial(device)
    yield one
    one.close()


def readable(link: Link) -> bool:
    poller = select.poll()
    poller.register(link.fd, select.POLLIN)
    return bool(poller.poll(0))


def test_a_queue_pair_is_brought_up(verbs: Verbs, link: Link) -> None:
    assert verbs.states == [1, 1, 2, 3], "INIT, and after the peer's answer INIT, RTR, RTS"
    assert all(mask & 6 == 6 for mask in verbs.masks), "the peer may read and write"
    assert verbs.receives == list(range(ENTRIES)), "before the peer may send"


def test_every_order_of_completion_and_poll_leaves_it_readable(verbs: Verbs, link: Link) -> None:
    assert link.receive(8) == []
    assert not readable(link)
    verbs.complete(1 << 32 | 2)
    assert readable(link)
    verbs.complete(0)  # no event of its own
    assert link.receive(1) == [Sent(2)]
    link.linger()
    assert readable(link), "one is left that no event tells of"
    (event,) = link.receive(1)
    assert isinstance(event, Response)
    assert link.receive(1) == []
    assert not readable(link)
    verbs.complete(1 << 32 | 1)
    assert readable(link)


def test_a_response_slot_is_posted_again(verbs: Verbs, link: Link) -> None:
    verbs.receives.clear()
    verbs.complete(3)
    verbs.complete(1 << 32)
    assert len(link.receive(8)) == 2
    assert verbs.receives == [3]


@pytest.mark.parametrize(
    ("status", "error"), [(5, ConnectionLost), (12, ConnectionLost), (13, ConnectionLost), (10, ProtocolError)]
)
def test_what_came_before_an_error_counts(verbs: Verbs, link: Link, status: int, error: type[ForebayError]) -> None:
    verbs.complete(1 << 32)
    verbs.complete(1 << 32 | 1, status)
    verbs.complete(1 << 32 | 2, 5)
    assert link.receive(8) == [Sent(0)]
    for _ in range(2):
        with pytest.raises(error):
            link.receive(8)
    assert not link.quiet()


def test_the_news_of_the_end_waits_for_what_came_before(verbs: Verbs, link: Link) -> None:
    verbs.complete(1 << 32)
    link._cm.end("the target closed the connection")  # type: ignore[attr-defined]
    assert link.receive(8) == [Sent(0)]
    with pytest.raises(ConnectionLost, match="closed the connection"):
        link.receive(8)


def test_it_is_cut_from_another_thread(verbs: Verbs, link: Link) -> None:
    link.cut()
    assert verbs.states[-1] == 6
    link.close()
    link.cut()


def test_memory_is_taken_back_after_the_queue_pair_is_gone(verbs: Verbs, device: Device) -> None:
    link = dial(device)
    link.close()
    link.close()
    assert verbs.states[-1] == 6
    assert verbs.ended == ["qp", "shared region", "region", "cq", "channel", "connection"]


def test_it_does_not_end_before_the_device_has_confirmed(
    verbs: Verbs, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    link = dial(device)
    verbs.qp.refusals = [errno.EBUSY, errno.EAGAIN, errno.EBUSY]
    link.close()
    assert verbs.ended[0] == "qp"
    assert len([record for record in caplog.records if "cannot be destroyed" in record.message]) == 3


def test_a_link_without_memory_of_a_caller_is_left_to_a_thread(verbs: Verbs, device: Device) -> None:
    """Nobody waits for the device then, not even who cuts it; what it has not confirmed stays what it was."""
    link = dial(device)
    gone = threading.Event()
    verbs.qp.refuses = gone
    link.close(proven=False)
    link.close(proven=False)
    link.cut()
    assert verbs.ended == []
    assert device._users == 2
    gone.set()
    eventually(lambda: device._users == 1, "the device confirms")
    assert verbs.ended == ["qp", "shared region", "region", "cq", "channel", "connection"]


def test_a_link_that_never_was_is_ended_by_one_thread_alone(verbs: Verbs, device: Device) -> None:
    """The connection goes after its queue pair, and is not closed by whoever dialled at the same time."""

    def refused(_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    verbs.qp.post_recv = refused  # type: ignore[attr-defined]
    verbs.qp.refuses = gone = threading.Event()
    with pytest.raises(ConnectionLost, match="memory"):
        dial(device)
    assert verbs.ended == []
    gone.set()
    eventually(lambda: device._users == 1, "the device confirms")
    assert verbs.ended == ["qp", "shared region", "region", "cq", "channel", "connection"]


def test_a_caller_waits_for_the_thread(verbs: Verbs, device: Device) -> None:
    link = dial(device)
    verbs.qp.refuses = threading.Event()
    link.close(proven=False)
    threading.Timer(0.05, verbs.qp.refuses.set).start()
    link.close()
    assert verbs.ended[-1] == "connection"


def test_without_a_thread_a_refusing_device_is_waited_for(
    verbs: Verbs, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise Unavailable("no thread can be started")

    link = dial(device)
    monkeypatch.setattr(nvme_rdma_link, "begin", none)
    verbs.qp.refusals = [errno.EBUSY, errno.EBUSY]
    link.close(proven=False)
    assert verbs.ended[-1] == "connection"
    assert device._users == 1


def test_a_device_that_cannot_be_closed_is_left_to_a_thread(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_rdma_device, "_CLOSE_S", 0.01)
    device = Device("fake0")
    device.domain.refuses = gone = threading.Event()
    device.release()
    assert verbs.ended == []
    gone.set()
    eventually(lambda: verbs.ended == ["pd", "context"], "the device confirms")


def test_a_buffer_is_not_given_back_while_its_device_is_being_closed(
    verbs: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it from the device, its owner has it back when the device has let go."""
    monkeypatch.setattr(nvme_rdma_device, "_CLOSE_S", 0.01)
    device = Device("fake0")
    registered = register(bytearray(8192))
    region = next(iter(registered._regions.values()))._close.__self__
    region.refuses = threading.Event()
    device.release()
    eventually(lambda: region.asked, "it is taken from the device")
    closing = threading.Thread(target=registered.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    region.refuses.set()
    closing.join(30)
    assert "shared region" in verbs.ended
    assert not closing.is_alive()
    eventually(lambda: "context" in verbs.ended, "the device is closed")


def test_an_interrupted_end_is_no_end(verbs: Verbs, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C: whoever closes it then, as its holder does in any case, destroys what is there still."""
    link, queue_pair, close = dial(device), verbs.qp, verbs.qp.close

    def interrupted() -> None:
        monkeypatch.setattr(queue_pair, "close", close)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue_pair, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        link.close()
    assert "qp" not in verbs.ended
    link.close()
    assert verbs.ended == ["qp", "shared region", "region", "cq", "channel", "connection"]
    link.close()
    assert device._users == 1


def test_a_device_that_is_gone_writes_nothing(verbs: Verbs, device: Device) -> None:
    link = dial(device)
    verbs.qp.refusals = [errno.EIO] * 5
    link.close()
    assert verbs.ended[-1] == "connection"


def _nobody_listens(verbs: Verbs, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cm, "failing", "connect")


def _takes_too_little(verbs: Verbs, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cm, "private", bytes.fromhex("00000200"))


def _no_memory(verbs: Verbs, patch: pytest.MonkeyPatch) -> None:
    verbs.refused_regions = 1


@pytest.mark.parametrize(
    ("why", "error"),
    [(_nobody_listens, ConnectionLost), (_takes_too_little, ProtocolError), (_no_memory, Unavailable)],
)
def test_what_cannot_be_connected_leaves_nothing(
    verbs: Verbs,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    why: Callable[[Verbs, pytest.MonkeyPatch], None],
    error: type[ForebayError],
) -> None:
    why(verbs, monkeypatch)
    with pytest.raises(error):
        dial(device)
    assert {"cq", "channel", "connection"} <= set(verbs.ended)
    assert device._users == 1


def test_a_device_is_closed_after_its_last_connection(verbs: Verbs) -> None:
    device = Device("fake0")
    link = dial(device)
    device.release()
    assert "pd" not in verbs.ended
    link.close()
    assert verbs.ended[-2:] == ["pd", "context"]


@pytest.mark.parametrize(("what", "left"), [("alloc_pd", ["context"]), ("query_device", ["pd", "context"])])
def test_a_device_that_cannot_be_used_is_closed(
    verbs: Verbs, monkeypatch: pytest.MonkeyPatch, what: str, left: list[str]
) -> None:
    def failing() -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    (found,) = verbs.get_device_list()
    context = found.open()
    monkeypatch.setattr(context, what, failing)
    monkeypatch.setattr(found, "open", lambda: context)
    monkeypatch.setattr(verbs, "get_device_list", lambda: [found])
    with pytest.raises(Unavailable, match="memory"):
        Device("fake0")
    assert verbs.ended == left


def test_a_device_that_is_closed_while_a_connection_comes_to_be(verbs: Verbs) -> None:
    """By another thread that closes the transport: nothing is asked of it any more."""
    device = Device("fake0")
    device.release()
    with pytest.raises(Unavailable, match="closed"):
        dial(device)
    assert verbs.ended == ["pd", "context", "connection"]


def test_a_device_that_was_taken_away_is_opened_anew(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = str(uuid4())
    one = NvmeRdmaTransport(SubsystemAddress("10.0.0.1", 4420, "nqn"), HostIdentity(f"nqn:{identity}", identity))
    first = one._opened("fake0")
    assert one._opened("fake0") is first

    def gone() -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(first.context, "create_comp_channel", gone)
    with pytest.raises(ConnectionLost):
        dial(first)
    second = one._opened("fake0")
    assert second is not first
    assert verbs.ended == ["connection", "pd", "context"]
    dial(second).close()
    one.close()
    assert verbs.ended[-2:] == ["pd", "context"]


def test_a_registered_buffer_is_given_back_when_the_device_has_let_go(verbs: Verbs, device: Device) -> None:
    buffer = bytearray(8192)
    registered = register(buffer)
    region = next(iter(registered._regions.values()))
    region._close.__self__.refusals = [errno.EBUSY, errno.EBUSY]
    registered.close()
    assert verbs.ended == ["shared region"]


def test_a_device_is_let_at_registered_buffers(verbs: Verbs) -> None:
    before, after = bytearray(8192), bytearray(8192)
    with register(before) as first:
        device = Device("fake0")
        eventually(lambda: device.find(first.address, 8192) is not None, "it came to what was there")
        second = register(after)
        key = device.find(second.address + 4096, 4096)
        assert key is not None and key != device.find(first.address, 1)
        assert device.find(second.address + 4096, 4097) is None
        assert device.find(second.address - 1, 2) is None
        second.close()
        second.close()
        assert device.find(second.address, 1) is None
        assert verbs.ended == ["shared region"]
        device.release()
        assert verbs.ended == ["shared region", "shared region", "pd", "context"]
        assert device.find(first.address, 1) is None
    assert nothing_registered()


def test_a_buffer_that_a_device_cannot_be_let_at_is_copied(verbs: Verbs, caplog: pytest.LogCaptureFixture) -> None:
    device = Device("fake0")
    verbs.refused_regions = 1
    buffer = bytearray(8192)
    with register(buffer) as registered:
        assert device.find(registered.address, 8192) is None
        assert "locked memory may be limited" in caplog.text
    device.release()


def test_without_a_thread_buffers_are_copied(
    verbs: Verbs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise Unavailable("no thread can be started")

    monkeypatch.setattr(registered_module, "begin", none)
    with register(bytearray(8192)) as registered:
        device = Device("fake0")
        assert device.find(registered.address, 8192) is None
        assert "by way of copies" in caplog.text
        device.release()
    assert verbs.ended == ["pd", "context"]


@pytest.mark.parametrize("buffer", [b"read-only", bytearray(), memoryview(bytearray(8))[::2], "text"])
def test_what_cannot_be_registered(buffer: object) -> None:
    with pytest.raises(InvalidArgument):
        register(buffer)
    assert nothing_registered()


def test_a_registered_buffer_stays_where_it_is() -> None:
    buffer = bytearray(8192)
    with register(buffer) as registered, pytest.raises(BufferError):
        buffer.extend(b"more")
    buffer.extend(b"more")  # closed, it holds nothing
    assert registered.length_bytes == 8192


def test_what_a_machine_lacks_is_said(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable() is None
    monkeypatch.setattr(verbs, "port_state", 1)
    assert usable() == "no port of fake0 is up"
    monkeypatch.setattr(verbs, "get_device_list", list)
    assert usable() == "this machine has no RDMA devices"

    def none() -> Any:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(verbs, "get_device_list", none)
    assert "no RDMA devices" in str(usable())

    def missing() -> Any:
        raise Unavailable("RDMA needs the package ibverbs")

    monkeypatch.setattr(nvme_rdma_device, "verbs", missing)
    assert usable() == "RDMA needs the package ibverbs"


def test_layouts_are_those_of_the_libraries() -> None:
    """Sizes and offsets that a C compiler gives the public headers of rdma-core on 64-bit Linux."""
    from ctypes import sizeof

    assert sizeof(QpAttributes) == 144
    assert (QpAttributes.ah.offset, QpAttributes.alt_ah.offset, QpAttributes.pkey_index.offset) == (56, 88, 120)
    assert QpAttributes.rate_limit.offset == 136
    assert sizeof(nvme_rdma_cm._ConnParam) == 24
    assert nvme_rdma_cm._CmEvent.conn.offset == 24


@pytest.mark.parametrize(
    ("address", "raw"),
    [
        ("127.0.0.1", "020011447f000001" + "00" * 8),
        ("::1", "0a00114400000000" + "00" * 15 + "01" + "00000000"),
    ],
)
def test_addresses(address: str, raw: str) -> None:
    assert bytes(nvme_rdma_cm._sockaddr(address, 4420, 1_000))[: len(raw) // 2] == bytes.fromhex(raw)


def test_rejections_are_errors_to_act_by() -> None:
    names = [
        type(nvme_rdma_cm._rejected(status, data)).__name__
        for status, data in (
            (8, b""),
            (28, bytes.fromhex("00000600")),
            (28, bytes.fromhex("00000300")),
            (28, b""),
        )
    ]
    assert names == ["ConnectionLost", "Busy", "TargetRefused", "TargetRefused"]
