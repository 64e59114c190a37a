"""An RDMA device, and the memory that it may write to: verbs by the package ``ibverbs``, loaded when needed."""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from forebay.client import registered
from forebay.client.registered import address_of
from forebay.client.threads import begin
from forebay.client.transports.nvme_rdma_cm import library
from forebay.errors import Unavailable

__all__ = ["Device", "Key", "Memory", "access_flags", "destroy", "usable", "verbs"]
_log = logging.getLogger(__name__)

_DEVICE_GONE = (errno.EIO, errno.ENODEV)
"""What destroying answers when the kernel has taken the device away, and with it whatever could write."""
_AGAIN_S = 0.1
_CLOSE_S = 2.0
"""How long closing waits for a device that refuses it."""
_ACTIVE = 4
"""IBV_PORT_ACTIVE."""


@cache
def verbs() -> Any:
    """The package ``ibverbs``. Raises `Unavailable` where it or what it needs is missing."""
    try:
        import ibverbs
    except ImportError as e:
        raise Unavailable(f"RDMA needs the package ibverbs (pip install 'forebay[rdma]') and libibverbs: {e}") from None
    return ibverbs


def usable() -> str | None:
    """Why this machine cannot do NVMe/RDMA, or None. Looks at libraries and devices, and talks to nobody."""
    try:
        ib = verbs()
        library()
        devices = ib.get_device_list()
    except Unavailable as e:
        return e.message
    except OSError as e:  # without the kernel's part there is no list
        return f"this machine has no RDMA devices: {e}"
    if not devices:
        return "this machine has no RDMA devices"
    for device in devices:
        try:
            with device.open() as context:
                ports = range(1, context.query_device().phys_port_cnt + 1)
                if any(context.query_port(port).state == _ACTIVE for port in ports):
                    return None
        except OSError as e:
            reason = f"{device.name}: {e}"
        else:
            reason = f"no port of {device.name} is up"
    return reason


def access_flags(*, remote: bool) -> int:
    """Who may do what with registered memory: the device, and with ``remote`` the peer."""
    flags = verbs().AccessFlags
    return int(flags.LOCAL_WRITE | (flags.REMOTE_WRITE | flags.REMOTE_READ if remote else 0))


class Key(NamedTuple):
    """What a range of registered memory is named by, here (``local``) and at the target (``remote``)."""

    local: int
    remote: int


def destroy(close: Callable[[], None], what: str, *, again: bool = True) -> bool:
    """Take something from a device. It may write to memory as long as it is there, so nobody goes on before it is not.

    The device is asked until it confirms, or once without ``again``; whether it did. That it is gone itself confirms
    as well.
    """
    while True:
        try:
            close()
            return True
        except OSError as e:
            if e.errno in _DEVICE_GONE:
                return True
            _log.error("%s cannot be destroyed, and its buffers not be given back: %s", what, e)
        if not again:
            return False
        time.sleep(_AGAIN_S)


class _Region:
    """A caller's buffer in the device."""

    def __init__(self, region: Any) -> None:
        self.key = Key(region.lkey, region.rkey)
        self._close = region.close

    def close(self) -> None:
        destroy(self._close, "a registered buffer")


class Memory:
    """Pages of our own that a device may write to until they are closed: ``remote`` by a peer, too."""

    def __init__(self, device: Device, length_bytes: int, *, remote: bool) -> None:
        # Anonymous pages of their own: nothing else can lie in them, whatever their end is.
        self._pages = mmap.mmap(-1, length_bytes)
        self.view = memoryview(self._pages)
        self.address = address_of(self.view)
        self._region = device.region(self.address, length_bytes, remote=remote)
        self.key = Key(self._region.lkey, self._region.rkey)

    def close(self) -> None:
        """Take the memory from the device."""
        self._region.close()


class Device:
    """An open device with its protection domain. Thread-safe."""

    def __init__(self, name: str) -> None:
        ib = verbs()
        found = next((d for d in ib.get_device_list() if d.name == name), None)
        if found is None:
            raise Unavailable(f"the RDMA device {name} is gone")
        self.name = name
        opened: list[Any] = []
        try:
            self.context = found.open()
            opened.append(self.context)
            self.domain = self.context.alloc_pd()
            opened.append(self.domain)
            self.read_depth = min(255, self.context.query_device().max_qp_rd_atom)
        except OSError as e:
            while opened:  # once: there is no memory in them
                destroy(opened.pop().close, "a part of a device", again=False)
            raise Unavailable(f"opening the RDMA device {name}: {e}") from e
        self._lock = threading.Lock()
        self._users = 1
        self.failed = False
        """Something could not be made of it: it is not to be used for another connection."""
        self._owner = registered.Owner(name, lambda address, size: _Region(self.region(address, size, remote=True)))
        registered.attach(self._owner)

    def region(self, address: int, length_bytes: int, *, remote: bool) -> Any:
        """Register memory. Raises `Unavailable`."""
        try:
            return self.domain.reg_mr(address, length_bytes, access_flags(remote=remote))
        except OSError as e:
            raise Unavailable(
                f"registering {length_bytes} bytes with {self.name}: {e}; locked memory may be limited (ulimit -l)"
            ) from e

    def find(self, address: int, length_bytes: int) -> Key | None:
        """The key of registered memory that holds the whole range, if the device can reach it already."""
        buffer = registered.find(address, length_bytes)
        region = None if buffer is None else buffer.region(self._owner)
        return None if region is None else region.key

    def hold(self) -> None:
        """Another connection uses the device. Raises `Unavailable` once it is closed."""
        with self._lock:
            if not self._users:
                raise Unavailable(f"{self.name} was closed")
            self._users += 1

    def release(self) -> None:
        """A connection, or who opened the device, does not use it any more; the last one closes it.

        By a thread, which is left behind where the device refuses for long: nothing of a caller's depends on it, but
        registered buffers, whose own end waits for it.
        """
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            try:
                begin(self._close, "forebay-rdma-close").join(_CLOSE_S)
            except Unavailable:
                self._close()

    def _close(self) -> None:
        registered.detach(self._owner)
        destroy(self.domain.close, "a protection domain")
        destroy(self.context.close, "a device's context")
