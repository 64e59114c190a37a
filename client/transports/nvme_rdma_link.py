"""One RDMA connection: a queue pair, its completions, and the capsules that go through it.

A link knows nothing of NVMe but the sizes of its capsules. The rule that keeps buffers safe lives in `Link.close`: the
queue pair is destroyed, and where a caller's memory may be in use only that the device has confirmed it lets the call
end (docs/design.md §6.5).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from forebay.client.threads import begin
from forebay.client.transports.nvme_rdma_cm import CmConnection
from forebay.client.transports.nvme_rdma_device import Device, Memory, destroy, verbs
from forebay.clock import Clock
from forebay.errors import ConnectionLost, ForebayError, ProtocolError, Unavailable
from forebay.nvmerdma import CmAccept, CmRequest
from forebay.nvmetcp import spec

__all__ = ["Closable", "Data", "Link", "Response", "Sent"]

_INIT, _RTR, _RTS, _ERR = 1, 2, 3, 6
"""enum ibv_qp_state."""
_STATE, _ACCESS, _AV = 1 << 0, 1 << 3, 1 << 7
_FIELDS = (
    (_STATE, "qp_state"),
    (_ACCESS, "qp_access_flags"),
    (1 << 4, "pkey_index"),
    (1 << 5, "port_num"),
    (1 << 8, "path_mtu"),
    (1 << 9, "timeout"),
    (1 << 10, "retry_cnt"),
    (1 << 11, "rnr_retry"),
    (1 << 12, "rq_psn"),
    (1 << 13, "max_rd_atomic"),
    (1 << 15, "min_rnr_timer"),
    (1 << 16, "sq_psn"),
    (1 << 17, "max_dest_rd_atomic"),
    (1 << 20, "dest_qp_num"),
)
"""enum ibv_qp_attr_mask, and the fields it names."""
_REMOTE = 1 << 1 | 1 << 2
"""IBV_ACCESS_REMOTE_WRITE and _READ."""
_SEND = 1 << 32
"""In the id of a work request: it is a send."""
_RESPONSE_BYTES = spec.CQE.size
_FLUSHED, _RETRIES_EXCEEDED, _RNR_RETRIES_EXCEEDED = 5, 12, 13
"""enum ibv_wc_status."""


class Data(NamedTuple):
    """Bytes that go in a capsule behind the command: memory that is registered under the local ``key``."""

    address: int
    length_bytes: int
    key: int


class Sent(NamedTuple):
    """The capsule of that slot was taken by the peer: its memory is free again."""

    slot: int


class Response(NamedTuple):
    """A response capsule, and how long it was."""

    capsule: bytes
    length_bytes: int


class Closable(Protocol):
    """A resource of the device."""

    def close(self) -> None:
        """Give it back. Raises `OSError`."""


class Link:
    """A connected queue pair with ``entries`` slots for command capsules, and memory of its own for their data.

    Made by `dial`; held by one thread at a time.

    Methods raise `ConnectionLost` or `ProtocolError` when the connection is no good any more: its holder closes it.
    """

    def __init__(self, cm: CmConnection, device: Device, entries: int, staging_bytes: int) -> None:
        """``cm``, and the hold on ``device``, are the link's from here on, also where this raises."""
        self.device = device
        ib = verbs()
        self._ib = ib
        self._cm = cm
        self._ending = threading.Lock()
        self._closed = False
        self._left = False
        """A thread is about to end it."""
        self._qp: Any = None
        self._opened: list[Any] = []  # in the order of opening, to be closed the other way round
        self._out: list[Any] = []
        # ``fd`` must be readable while a completion waits. The device tells only of the first one after it was asked to
        # (the queue is armed), so a holder that stops half-way leaves a mark of its own (the queue lingers).
        self._armed = False
        self._lingers = False
        self._reason: str | None = None
        self._broken: ForebayError | None = None
        try:
            self._channel = self._keep(device.context.create_comp_channel())
            self._cq = self._keep(device.context.create_cq(2 * entries + 2, self._channel))
            self._capsules = self._keep(Memory(device, entries * (spec.SQE.size + _RESPONSE_BYTES), remote=False))
            self.staging: Memory = self._keep(Memory(device, staging_bytes, remote=True))
            self._responses_at = entries * spec.SQE.size
            attributes = ib.QPInitAttr(
                send_cq=self._cq, recv_cq=self._cq, max_send_wr=entries, max_recv_wr=entries, max_send_sge=2
            )
            self._qp = device.domain.create_qp(attributes)
            self._epoll = self._keep(select.epoll())
            self._epoll.register(self._channel.fd, select.EPOLLIN)
            self._epoll.register(cm.fd, select.EPOLLIN)
            self._mark = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._keep(os.fdopen(self._mark, "rb", buffering=0))
            self._epoll.register(self._mark, select.EPOLLIN)
            self.fd = self._epoll.fileno()
            self._bring(_INIT)
            self._receive_into(range(entries))
        except OSError as e:
            device.failed = True  # it may be one that was taken away; the next connection opens it anew
            self.close(proven=False)
            raise ConnectionLost(f"setting up a queue pair on {device.name}: {e}") from e
        except BaseException:
            self.close(proven=False)
            raise

    def _keep(self, opened: Any) -> Any:
        self._opened.append(opened)
        return opened

    def keep(self, memory: Closable) -> None:
        """Take over memory that the target may write to: it is closed with the link, after the queue pair."""
        self._keep(memory)

    @classmethod
    def dial(
        cls,
        device: Callable[[str], Device],
        address: str,
        port: int,
        *,
        source: str | None,
        request: CmRequest,
        staging_bytes: int,
        deadline_ms: int,
        clock: Clock,
    ) -> Link:
        """Connect. ``device`` opens a device by name; ``source`` is the own address to come from, None for any.

        Raises `ConnectionLost`, `TargetRefused`, `Busy`, `ProtocolError`, `Unavailable`, `DeadlineExceeded`.
        """
        cm = CmConnection(clock)
        try:
            opened = device(cm.resolve(address, port, source, deadline_ms))
            opened.hold()
        except BaseException:
            cm.close()
            raise
        link = cls(cm, opened, request.entries, staging_bytes)  # a thread may be closing both where it raises
        try:
            private = cm.connect(link._qp.qp_num, request.to_bytes(), opened.read_depth, deadline_ms)
            accepted = CmAccept.from_bytes(private)
            if accepted.receive_entries < request.entries - 1:
                raise ProtocolError(
                    f"the target takes {accepted.receive_entries} commands on a queue of {request.entries}"
                )
            for state in (_INIT, _RTR, _RTS):  # INIT again: only now is it known what the peer may do
                link._bring(state)
            cm.establish()
        except OSError as e:
            link.close(proven=False)
            raise ConnectionLost(f"bringing up a queue pair: {e}") from e
        except BaseException:
            link.close(proven=False)
            raise
        return link

    def _bring(self, state: int) -> None:
        """Move the queue pair to a state with the attributes that the connection manager names."""
        found, mask = self._cm.attributes(state)
        fields = {name: getattr(found, name) for bit, name in _FIELDS if mask & bit}
        if mask & _ACCESS:
            fields["qp_access_flags"] |= _REMOTE
        route = None
        if mask & _AV:
            ah = found.ah
            route = self._ib.AHAttr(
                dgid=bytes(ah.grh.dgid),
                sgid_index=ah.grh.sgid_index,
                dlid=ah.dlid,
                is_global=ah.is_global,
                port_num=ah.port_num,
                hop_limit=ah.grh.hop_limit,
                traffic_class=ah.grh.traffic_class,
                sl=ah.sl,
                flow_label=ah.grh.flow_label,
                src_path_bits=ah.src_path_bits,
                static_rate=ah.static_rate,
            )
        self._qp.modify(mask, ah_attr=route, **fields)

    def _receive_into(self, slots: Sequence[int]) -> None:
        base, key = self._capsules.address + self._responses_at, self._capsules.key.local
        self._qp.post_recv(
            [
                self._ib.RecvWR(
                    wr_id=slot, sg_list=[self._ib.SGE(base + slot * _RESPONSE_BYTES, _RESPONSE_BYTES, lkey=key)]
                )
                for slot in slots
            ]
        )

    # --- traffic ----------------------------------------------------------------------------------------------------

    @property
    def wants_to_send(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._out)

    def send(self, slot: int, capsule: bytes, data: Data | None) -> None:
        """Queue a command capsule; its slot and ``data`` must stay as they are until they are `Sent`."""
        ib, size = self._ib, spec.SQE.size
        at = slot * size
        self._capsules.view[at : at + size] = capsule
        pieces = [ib.SGE(self._capsules.address + at, size, lkey=self._capsules.key.local)]
        if data is not None:
            pieces.append(ib.SGE(data.address, data.length_bytes, lkey=data.key))
        self._out.append(
            ib.SendWR(
                wr_id=_SEND | slot, sg_list=pieces, opcode=ib.WROpcode.SEND, send_flags=int(ib.SendFlags.SIGNALED)
            )
        )

    def flush(self) -> None:
        """Hand to the device what is queued."""
        out, self._out = self._out, []
        try:
            self._qp.post_send(out)
        except OSError as e:
            raise ConnectionLost(f"sending to the target: {e}") from e

    def receive(self, limit: int) -> list[Sent | Response]:
        """Up to ``limit`` events; none when there are none, and ``fd`` becomes readable with the next one.

        Who stops before that calls `linger`.
        """
        if self._broken is not None:
            raise self._broken
        try:
            self._take_news()
            if self._lingers:
                os.eventfd_read(self._mark)
                self._lingers = False
            completions = self._cq.poll(limit)
            if not completions and not self._armed:
                self._cq.req_notify()
                self._armed = True
                completions = self._cq.poll(limit)  # what came in between causes no event
            if not completions and self._reason is not None:
                raise ConnectionLost(self._reason)
            return self._events(completions)
        except OSError as e:
            raise ConnectionLost(f"receiving from the target: {e}") from e

    def linger(self) -> None:
        """Keep ``fd`` readable until the next `receive`."""
        if not self._lingers:
            self._lingers = True
            os.eventfd_write(self._mark, 1)

    def _take_news(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd == self._cm.fd:
                self._reason = self._reason or self._cm.ended()
            elif fd == self._channel.fd:
                self._channel.get_cq_event()
                self._cq.ack_events(1)
                self._armed = False

    def _events(self, completions: Sequence[Any]) -> list[Sent | Response]:
        events: list[Sent | Response] = []
        free: list[int] = []
        for completion in completions:
            if completion.status:
                self._broken = self._failure(completion)
                if not events:
                    raise self._broken
                return events  # what came before counts
            slot = int(completion.wr_id)
            if slot & _SEND:
                events.append(Sent(slot & ~_SEND))
                continue
            at = self._responses_at + slot * _RESPONSE_BYTES
            capsule = bytes(self._capsules.view[at : at + _RESPONSE_BYTES])
            events.append(Response(capsule, completion.byte_len))
            free.append(slot)
        if free:
            self._receive_into(free)
        return events

    def _failure(self, completion: Any) -> ForebayError:
        if completion.status == _FLUSHED:
            return ConnectionLost(self._reason or "the connection to the target is broken")
        if completion.status in (_RETRIES_EXCEEDED, _RNR_RETRIES_EXCEEDED):
            return ConnectionLost("the target does not answer any more")
        return ProtocolError(f"the connection failed: {completion.status_str}")

    # --- the end ----------------------------------------------------------------------------------------------------

    def quiet(self) -> bool:
        """Whether the connection stands, as far as is known here, and nothing has arrived on it."""
        try:
            return not self.receive(1)
        except ForebayError:
            return False

    def cut(self) -> None:
        """End the connection, from any thread: whoever waits for it hears of it."""
        if self._ending.acquire(blocking=False):  # else it is ending, or was cut
            try:
                if self._qp is not None:
                    self._fail()
            finally:
                self._ending.release()

    def close(self, *, proven: bool = True) -> None:
        """End the connection. When this returns, the device can neither read nor write memory for it. Idempotent.

        Where that need not be ``proven``, since all of the memory is the link's own, a device that refuses is left to a
        thread. An end that was interrupted goes on where it was.
        """
        if self._left and not proven:
            return
        with self._ending:
            if self._closed:
                return
            self._out.clear()
            if not self._end(again=proven):
                self._left = True
                try:
                    begin(self.close, "forebay-rdma-close")
                    return
                except Unavailable:
                    self._end(again=True)
            self._closed = True
        self.device.release()

    def _end(self, *, again: bool) -> bool:
        """Take from the device what it has still, the queue pair first; whether nothing is left."""
        if self._qp is not None:
            self._fail()
            if not destroy(self._qp.close, "a queue pair", again=again):
                return False
            self._qp = None
        while self._opened:
            if not destroy(self._opened[-1].close, "a part of a connection", again=again):
                return False
            self._opened.pop()
        self._cm.close()
        return True

    def _fail(self) -> None:
        with suppress(OSError):  # it may have ended by itself
            self._qp.modify(_STATE, qp_state=_ERR)
