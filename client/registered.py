"""Buffers that are registered once, so that devices may be let at them for as long as that: see `register`.

NVMe/RDMA reads into them, and writes from them, without a copy (docs/transports.md). They belong to the process, not to
a client: devices of all transports that there are, or come to be, are let at them.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.client.buffers import writable
from forebay.client.threads import begin
from forebay.errors import ForebayError, InvalidArgument, Unavailable

__all__ = ["Owner", "RegisteredBuffer", "address_of", "attach", "detach", "find", "nothing_registered", "register"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Owner:
    """A device. ``make`` lets it at ``(address, length_bytes)`` until what it answers is closed.

    It raises `ForebayError`; closing returns when the device has let go.
    """

    name: str
    make: Callable[[int, int], Any]
    gone: bool = False


def address_of(view: memoryview) -> int:
    """Where its bytes are."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class RegisteredBuffer:
    """A registered buffer, until `close`. It holds the buffer, whose memory stays where it is. A context manager."""

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        self.address = address_of(view)
        self.length_bytes = view.nbytes
        self._lock = threading.Lock()
        self._regions: dict[Owner, Any] = {}
        self._closed = False

    def region(self, owner: Owner) -> Any | None:
        """What the device made of the buffer; None as long as there is no such thing."""
        return self._regions.get(owner)

    def offer(self, owner: Owner) -> None:
        """Let a device at the buffer, which pins its pages; where that fails, the log says why."""
        with self._lock:
            if self._closed or owner.gone or owner in self._regions:
                return
            try:
                self._regions[owner] = owner.make(self.address, self.length_bytes)
            except ForebayError as e:
                _log.warning("%s reaches a registered buffer by way of a copy: %s", owner.name, e)

    def withdraw(self, owner: Owner) -> None:
        """Take the buffer from one device."""
        with self._lock:  # whoever closes the buffer meanwhile waits until the device has let go
            region = self._regions.get(owner)
            if region is not None:
                region.close()
                del self._regions[owner]

    def close(self) -> None:
        """Take the buffer from every device: none can reach it after this. Idempotent.

        A call that is using it meanwhile fails, so end those first.
        """
        with _lock:
            _publish([one for one in _known[1] if one is not self])
        with self._lock:
            self._closed = True
            for owner in list(self._regions):
                self._regions[owner].close()
                del self._regions[owner]
            self._view = None

    def __enter__(self) -> RegisteredBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_lock = threading.Lock()
_owners: list[Owner] = []
_known: tuple[list[int], list[RegisteredBuffer]] = ([], [])
"""Starts, ascending, and the buffers that start there. Replaced as a whole, so that readers need no lock."""


def register(buffer: Any) -> RegisteredBuffer:
    """Let devices at ``buffer`` (host memory, writable, contiguous) until the answer is closed.

    For that long a target that is reached by RDMA could write to it at any time; one that keeps to the protocol does so
    only for a call that asks. Close it before the memory serves another purpose. Raises `InvalidArgument`.
    """
    view = writable(buffer, "buffer")
    if not view.nbytes:
        raise InvalidArgument("the buffer is empty", field="buffer")
    made = RegisteredBuffer(view)
    with _lock:
        _publish([*_known[1], made])
        owners = list(_owners)
    for owner in owners:
        made.offer(owner)
    return made


def find(address: int, length_bytes: int) -> RegisteredBuffer | None:
    """The registered buffer that holds the whole range."""
    starts, every = _known
    at = bisect_right(starts, address) - 1
    if at < 0 or address + length_bytes > every[at].address + every[at].length_bytes:
        return None
    return every[at]


def nothing_registered() -> bool:
    """Whether `find` finds nothing at all."""
    return not _known[0]


def attach(owner: Owner) -> None:
    """A device that is let at every buffer from now on; at those that there are, while the caller goes on."""
    with _lock:
        _owners.append(owner)
        every = _known[1]

    def offer() -> None:
        for buffer in every:
            buffer.offer(owner)

    if every:
        try:
            begin(offer, "forebay-register")
        except Unavailable as e:
            _log.warning("%s reaches registered buffers by way of copies: %s", owner.name, e)


def detach(owner: Owner) -> None:
    """A device that is about to be closed: it is taken from every buffer."""
    with _lock:
        owner.gone = True
        _owners.remove(owner)
        every = _known[1]
    for buffer in every:
        buffer.withdraw(owner)


def _publish(every: list[RegisteredBuffer]) -> None:
    global _known  # noqa: PLW0603  # the one state of the process
    every.sort(key=lambda one: one.address)
    _known = ([one.address for one in every], every)
