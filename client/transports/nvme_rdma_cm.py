"""A connection of RDMA's connection manager (librdmacm): addresses, routes, private data, and the news that it ended.

Nothing here waits without a deadline: events come on a file descriptor. The queue pair itself is the caller's; the
manager says what attributes it must take in each state (`rdma_init_qp_attr`). Layouts are those of librdmacm's and
libibverbs' public headers, which are their ABI.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from contextlib import suppress
from ctypes import POINTER, byref, c_char, c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any

from forebay.client.transports.addresses import addresses_of
from forebay.clock import Clock
from forebay.errors import Busy, ConnectionLost, DeadlineExceeded, TargetRefused, Unavailable
from forebay.nvmerdma import CmRejection, rejection

__all__ = ["CmConnection", "QpAttributes", "library"]

_PS_TCP = 0x0106
_BUSY_RETRY_MS = 500
_RETRIES = 7
_NOBODY_LISTENS = 8
"""Reason of a rejection: invalid service id. InfiniBand architecture §12.6.7.2."""


class _Event(IntEnum):
    """enum rdma_cm_event_type."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


class _Channel(ctypes.Structure):
    _fields_ = [("fd", c_int)]


class _Context(ctypes.Structure):
    _fields_ = [("device", c_void_p)]


class _Id(ctypes.Structure):
    """The head of struct rdma_cm_id."""

    _fields_ = [("verbs", POINTER(_Context)), ("channel", POINTER(_Channel)), ("context", c_void_p), ("qp", c_void_p)]


class _ConnParam(ctypes.Structure):
    """struct rdma_conn_param."""

    _fields_ = [
        ("private_data", c_void_p),
        ("private_data_len", c_uint8),
        ("responder_resources", c_uint8),
        ("initiator_depth", c_uint8),
        ("flow_control", c_uint8),
        ("retry_count", c_uint8),
        ("rnr_retry_count", c_uint8),
        ("srq", c_uint8),
        ("qp_num", c_uint32),
    ]


class _CmEvent(ctypes.Structure):
    """struct rdma_cm_event of a connection (its union is larger, which matters to nobody who reads it)."""

    _fields_ = [
        ("id", c_void_p),
        ("listen_id", c_void_p),
        ("event", c_int),
        ("status", c_int),
        ("conn", _ConnParam),
    ]


class _GlobalRoute(ctypes.Structure):
    """struct ibv_global_route."""

    _fields_ = [
        ("dgid", c_uint64 * 2),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    ]


class _AddressHandle(ctypes.Structure):
    """struct ibv_ah_attr."""

    _fields_ = [
        ("grh", _GlobalRoute),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    ]


class QpAttributes(ctypes.Structure):
    """struct ibv_qp_attr."""

    _fields_ = [
        ("qp_state", c_int),
        ("cur_qp_state", c_int),
        ("path_mtu", c_int),
        ("path_mig_state", c_int),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32),
        ("cap", c_uint32 * 5),
        ("ah", _AddressHandle),
        ("alt_ah", _AddressHandle),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
    ]


@cache
def library() -> tuple[Any, Any]:
    """The libraries rdmacm and ibverbs. Raises `Unavailable` where one is missing or too old."""
    try:
        cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
        verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        event = POINTER(_CmEvent)
        for name, result, arguments in (
            ("rdma_create_event_channel", POINTER(_Channel), []),
            ("rdma_destroy_event_channel", None, [POINTER(_Channel)]),
            ("rdma_create_id", c_int, [POINTER(_Channel), POINTER(POINTER(_Id)), c_void_p, c_int]),
            ("rdma_destroy_id", c_int, [POINTER(_Id)]),
            ("rdma_resolve_addr", c_int, [POINTER(_Id), c_void_p, c_void_p, c_int]),
            ("rdma_resolve_route", c_int, [POINTER(_Id), c_int]),
            ("rdma_connect", c_int, [POINTER(_Id), POINTER(_ConnParam)]),
            ("rdma_establish", c_int, [POINTER(_Id)]),
            ("rdma_disconnect", c_int, [POINTER(_Id)]),
            ("rdma_get_cm_event", c_int, [POINTER(_Channel), POINTER(event)]),
            ("rdma_ack_cm_event", c_int, [event]),
            ("rdma_init_qp_attr", c_int, [POINTER(_Id), POINTER(QpAttributes), POINTER(c_int)]),
        ):
            function = getattr(cm, name)
            function.restype, function.argtypes = result, arguments
        verbs.ibv_get_device_name.restype = ctypes.c_char_p
        verbs.ibv_get_device_name.argtypes = [c_void_p]
    except (OSError, AttributeError) as e:
        raise Unavailable(f"the libraries of RDMA (rdma-core) cannot be used: {e}") from None
    return cm, verbs


class CmConnection:
    """One connection to be: `resolve`, then `connect` with a queue pair, then `ended` whenever ``fd`` is readable."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cm, self._verbs = library()
        self._channel = self._cm.rdma_create_event_channel()
        if not self._channel:
            raise _failed("rdma_create_event_channel")
        self.fd: int = self._channel.contents.fd
        os.set_blocking(self.fd, False)
        self._id = POINTER(_Id)()
        if self._cm.rdma_create_id(self._channel, byref(self._id), None, _PS_TCP):
            error = _failed("rdma_create_id")
            self._cm.rdma_destroy_event_channel(self._channel)
            self._channel = None
            raise error

    def resolve(self, address: str, port: int, source: str | None, deadline_ms: int) -> str:
        """Find the device and the way; returns the device's name.

        Raises `ConnectionLost`, `DeadlineExceeded`, and `Unavailable` where no RDMA device leads there.
        """
        peer = _sockaddr(address, port, self._left_ms(deadline_ms))
        mine = _sockaddr(source, 0, self._left_ms(deadline_ms)) if source else None
        left_ms = self._left_ms(deadline_ms)
        if self._cm.rdma_resolve_addr(self._id, mine, peer, left_ms):
            raise _failed(f"no RDMA device leads to {address}", Unavailable)
        self._await(_Event.ADDR_RESOLVED, f"resolving {address}", deadline_ms)
        if self._cm.rdma_resolve_route(self._id, self._left_ms(deadline_ms)):
            raise _failed(f"no route to {address}")
        self._await(_Event.ROUTE_RESOLVED, f"finding a route to {address}", deadline_ms)
        return str(self._verbs.ibv_get_device_name(self._id.contents.verbs.contents.device).decode())

    def attributes(self, state: int) -> tuple[QpAttributes, int]:
        """What the queue pair must be set to for ``state`` (enum ibv_qp_state): attributes and their mask."""
        found, mask = QpAttributes(qp_state=state), c_int()
        if self._cm.rdma_init_qp_attr(self._id, byref(found), byref(mask)):
            raise _failed("rdma_init_qp_attr")
        return found, mask.value

    def connect(self, qp_number: int, private_data: bytes, responder_resources: int, deadline_ms: int) -> bytes:
        """Ask the peer; returns its private data. Then bring the queue pair up, and call `establish`.

        Raises `TargetRefused` and `Busy` by what the peer says, `ConnectionLost`, `DeadlineExceeded`.
        """
        data = ctypes.create_string_buffer(private_data, len(private_data))
        param = _ConnParam(
            ctypes.cast(data, c_void_p), len(private_data), responder_resources, 0, 1, _RETRIES, _RETRIES, 0, qp_number
        )
        if self._cm.rdma_connect(self._id, byref(param)):
            raise _failed("rdma_connect")
        return self._await(_Event.CONNECT_RESPONSE, "connecting", deadline_ms)

    def establish(self) -> None:
        """Tell the peer that the queue pair is ready."""
        if self._cm.rdma_establish(self._id):
            raise _failed("rdma_establish")

    def ended(self) -> str | None:
        """Why the connection is no good any more, None while it is. Does not wait."""
        while True:
            event = self._next()
            if event is None:
                return None
            kind, _, _ = event
            if kind == _Event.DISCONNECTED:
                return "the target closed the connection"
            if kind != _Event.ESTABLISHED:
                return f"the connection ended: {_name(kind)}"

    def close(self) -> None:
        """Tell the peer and forget the connection, whose queue pair must be gone. Idempotent; waits for nobody."""
        if self._channel is None:
            return
        self._cm.rdma_disconnect(self._id)  # fails where nothing is connected, or the peer was first
        self._cm.rdma_destroy_id(self._id)
        self._cm.rdma_destroy_event_channel(self._channel)
        self._channel = None

    def _left_ms(self, deadline_ms: int) -> int:
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise DeadlineExceeded("no time left to connect to the target")
        return min(left_ms, 1 << 30)

    def _await(self, wanted: _Event, doing: str, deadline_ms: int) -> bytes:
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while True:
            event = self._next()
            if event is None:
                try:
                    poller.poll(self._left_ms(deadline_ms))
                except DeadlineExceeded:
                    raise DeadlineExceeded(f"{doing} took too long") from None
                continue
            kind, status, data = event
            if kind == wanted:
                return data
            if kind == _Event.REJECTED:
                raise _rejected(status, data)
            error = os.strerror(-status) if status < 0 else f"status {status}"
            raise ConnectionLost(f"{doing}: {_name(kind)} ({error})")

    def _next(self) -> tuple[int, int, bytes] | None:
        """The next event: kind, status, private data."""
        event = POINTER(_CmEvent)()
        if self._cm.rdma_get_cm_event(self._channel, byref(event)):
            return None
        try:
            found = event.contents
            data = b""
            if found.event in (_Event.CONNECT_RESPONSE, _Event.REJECTED) and found.conn.private_data:
                data = ctypes.string_at(found.conn.private_data, found.conn.private_data_len)
            return found.event, found.status, data
        finally:
            self._cm.rdma_ack_cm_event(event)


def _rejected(status: int, data: bytes) -> ConnectionLost | TargetRefused | Busy:
    if status == _NOBODY_LISTENS:
        return ConnectionLost("nobody listens there")
    why = rejection(data)
    if why is CmRejection.NO_RESOURCES:
        return Busy("the target has no room for another connection", retry_after_ms=_BUSY_RETRY_MS)
    told = why.name.lower().replace("_", " ") if why is not None else f"reason {status}"
    return TargetRefused(f"the target rejected the connection: {told}")


def _failed(what: str, kind: type[ConnectionLost] | type[Unavailable] = ConnectionLost) -> ConnectionLost | Unavailable:
    return kind(f"{what}: {os.strerror(ctypes.get_errno())}")


def _name(kind: int) -> str:
    with suppress(ValueError):
        return _Event(kind).name.lower().replace("_", " ")
    return f"event {kind}"


def _sockaddr(name: str, port: int, left_ms: int) -> ctypes.Array[c_char]:
    """A struct sockaddr_in or sockaddr_in6. Raises as `addresses_of`."""
    family, found = addresses_of(name, port, left_ms)[0]
    packed = socket.inet_pton(family, str(found[0]).partition("%")[0])
    head = struct.pack("=H", family) + struct.pack("!H", port)
    if family == socket.AF_INET:
        raw = head + packed + bytes(8)
    else:
        raw = head + struct.pack("!I", found[2]) + packed + struct.pack("=I", found[3])  # type: ignore[misc]
    return ctypes.create_string_buffer(raw, 128)
