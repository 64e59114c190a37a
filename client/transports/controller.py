"""An association with one NVMe subsystem: the admin queue, what it says of the target, and its keep-alive."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from uuid import UUID

from forebay.client.threads import begin
from forebay.client.transports.authentication import authenticate
from forebay.client.transports.options import FabricsOptions
from forebay.client.transports.queues import Dial, IoQueue
from forebay.clock import Clock
from forebay.errors import ConnectionLost, DeadlineExceeded, ForebayError, ProtocolError, TargetRefused
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp import command as nvme
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import DYNAMIC_CONTROLLER, ConnectData, ControllerIdentity, NamespaceIdentity
from forebay.nvmetcp.spec import CnsValue, FeatureId, Property

__all__ = ["Controller", "SubsystemAddress"]

_log = logging.getLogger(__name__)

_ADMIN_ENTRIES = 32
_IO_ENTRIES = 128
_ENABLE = 0x00460001
"""CC: EN, IOSQES 64 bytes, IOCQES 16 bytes. Base §3.1.3.5."""
_READY, _FATAL = 1, 2
"""CSTS.RDY and CSTS.CFS. Base §3.1.3.6."""


@dataclass(frozen=True, slots=True)
class SubsystemAddress:
    """Where a subsystem listens."""

    address: str
    port: int
    nqn: str


class Controller:
    """A controller, connected by `open`. Its methods may be called from any thread.

    When it is not `alive` any more (a keep-alive failed, the target tore it down) its queues are no good either, and
    the way on is a new one.
    """

    def __init__(
        self, subsystem: SubsystemAddress, host: HostIdentity, clock: Clock, options: FabricsOptions, dial: Dial
    ) -> None:
        self._subsystem = subsystem
        self._host = host
        self._clock = clock
        self._dial = dial
        self._keep_alive_ms = options.keep_alive_ms
        self._lock = threading.Lock()  # of the admin queue
        self._admin: IoQueue | None = None
        self._namespaces: dict[int, NamespaceIdentity] = {}
        self._stop = threading.Event()
        self._dead = False
        self._entries = _IO_ENTRIES
        self._queues = 1
        self._last_queue = 0
        self._transactions = 0
        self.identity = ControllerIdentity(0, "", "", "", None, 0, 0, 0, 0)

    def open(self, queues: int, deadline_ms: int) -> None:
        """Connect the admin queue and bring the controller up (Base §3.5.1), ready for ``queues`` I/O queues.

        Raises `TargetRefused`, `ConnectionLost`, `ProtocolError`, `DeadlineExceeded`, `Unavailable`.
        """
        admin = self._dial(0, _ADMIN_ENTRIES, 0, deadline_ms)
        self._admin = admin
        try:
            controller_id = self._connect(admin, 0, _ADMIN_ENTRIES, DYNAMIC_CONTROLLER, deadline_ms)
            admin.set_depth(_ADMIN_ENTRIES - 1)
            capabilities = admin.execute(nvme.property_get(0, Property.CAP, wide=True), deadline_ms)[0].result
            if not capabilities & 0xFFFF:
                raise ProtocolError("the controller has no queue that holds a command (MQES 0)")  # Base §3.1.3.1
            self._entries = min(_IO_ENTRIES, (capabilities & 0xFFFF) + 1)  # MQES is 0's based
            admin.execute(nvme.property_set(0, Property.CC, _ENABLE), deadline_ms)
            self._wait_ready(admin, deadline_ms)
            raw = admin.execute(nvme.identify(0, CnsValue.CONTROLLER), deadline_ms, read_bytes=spec.IDENTIFY_BYTES)[1]
            page_bytes = 4096 << ((capabilities >> 48) & 0xF)  # MDTS counts pages of CAP.MPSMIN
            self.identity = ControllerIdentity.from_bytes(raw, page_bytes=page_bytes)._replace(
                controller_id=controller_id
            )
            wanted = (queues - 1) | (queues - 1) << 16
            granted = admin.execute(nvme.set_features(0, FeatureId.NUMBER_OF_QUEUES, wanted), deadline_ms)[0].result
            self._queues = min(granted & 0xFFFF, granted >> 16 & 0xFFFF) + 1
            begin(self._keep_alive, "forebay-keep-alive")
        except BaseException:
            self.close()
            raise

    def _wait_ready(self, admin: IoQueue, deadline_ms: int) -> None:
        while True:
            state = admin.execute(nvme.property_get(0, Property.CSTS, wide=False), deadline_ms)[0].result
            if state & _FATAL:
                raise TargetRefused("the controller reports a fatal status")
            if state & _READY:
                return
            self._stop.wait(0.002)

    def _connect(self, pair: IoQueue, queue_id: int, entries: int, controller_id: int, deadline_ms: int) -> int:
        data = ConnectData(UUID(self._host.host_id), controller_id, self._subsystem.nqn, self._host.nqn).to_bytes()
        keep_alive_ms = self._keep_alive_ms if queue_id == 0 else 0
        command = nvme.connect(0, queue_id, entries, keep_alive_ms=keep_alive_ms)
        result = pair.execute(command, deadline_ms, data=data)[0].result
        if result & spec.CONNECT_ASCR:
            raise TargetRefused("the target wants a secure channel, which no transport here has")
        self._transactions += 1
        asked = bool(result & spec.CONNECT_ATR)
        authenticate(pair, self._host, self._subsystem.nqn, self._transactions, deadline_ms, asked=asked)
        pair.queue_id = queue_id
        return result & 0xFFFF

    @property
    def alive(self) -> bool:
        """Whether the association still stands, as far as can be told without asking the target."""
        if self._dead or self._admin is None:
            return False
        if not self._lock.acquire(blocking=False):
            return True  # an admin command is under way; its end will tell
        try:
            if not self._admin.usable():
                self._dead = True
        finally:
            self._lock.release()
        return not self._dead

    @property
    def max_transfer_bytes(self) -> int | None:
        """MDTS in bytes, None if the controller has no limit of its own."""
        return self.identity.max_transfer_bytes

    def open_queue(self, busy: set[int], deadline_ms: int) -> IoQueue:
        """Connect an I/O queue; ``busy`` are the ids of those that are open."""
        # The target may not have seen the end of a queue that broke, so its id is used again as late as possible.
        queue_id = self._last_queue % self._queues + 1
        while queue_id in busy and len(busy) < self._queues:
            queue_id = queue_id % self._queues + 1
        self._last_queue = queue_id
        pair = self._dial(queue_id, self._entries, self.identity.controller_id, deadline_ms)
        try:
            self._connect(pair, queue_id, self._entries, self.identity.controller_id, deadline_ms)
            depth = self._entries - 1
            if self.identity.max_commands:
                depth = min(depth, self.identity.max_commands)
            pair.set_depth(depth)
            pair.in_capsule_bytes = self.identity.in_capsule_bytes
        except BaseException:
            pair.close()
            raise
        return pair

    @property
    def queues(self) -> int:
        """How many I/O queues the target allows."""
        return self._queues

    def namespace(self, nsid: int, deadline_ms: int) -> NamespaceIdentity:
        """Identify Namespace, asked once.

        Raises `TargetRefused` where the host does not see it, and `ProtocolError` where its blocks are not 4 KiB.
        """
        known = self._namespaces.get(nsid)
        if known is not None:
            return known
        raw = self._admin_command(nvme.identify(0, CnsValue.NAMESPACE, nsid), deadline_ms, spec.IDENTIFY_BYTES)
        identity = NamespaceIdentity.from_bytes(raw)
        if not identity.lba_count:  # an inactive NSID reads as zeros. Base §5.17.2.1
            raise TargetRefused(f"NVMe namespace {nsid} is not visible to this host")
        if identity.lba_bytes != LBA_BYTES:
            raise ProtocolError(f"NVMe namespace {nsid} has blocks of {identity.lba_bytes} bytes, not {LBA_BYTES}")
        self._namespaces[nsid] = identity
        return identity

    def _admin_command(self, command: nvme.Command, deadline_ms: int, read_bytes: int = 0) -> bytearray:
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or not self._lock.acquire(timeout=left_ms / 1000):
            raise DeadlineExceeded("the admin queue was busy until the deadline")
        try:
            admin = self._admin
            if admin is None or admin.closed:
                self._dead = True
                raise ConnectionLost("the association with the target has ended")
            try:
                return admin.execute(command, deadline_ms, read_bytes=read_bytes)[1]
            except ForebayError:
                self._dead |= admin.closed
                raise
        finally:
            self._lock.release()

    def _keep_alive(self) -> None:
        """Keep Alive well before KATO runs out (Base §5.18); one that fails ends the association."""
        interval_ms = self._keep_alive_ms // 3
        while not self._stop.wait(interval_ms / 1000):
            try:
                self._admin_command(nvme.keep_alive(0), self._clock.monotonic_ms() + interval_ms)
            except ForebayError as e:
                if not self._stop.is_set():
                    _log.info("keep-alive to %s failed: %s", self._subsystem.nqn, e)
                self._dead = True
                return

    def close(self) -> None:
        """End the association. Idempotent."""
        self._stop.set()
        self._dead = True
        admin = self._admin
        if admin is not None:
            admin.cut()  # a command of another thread may be waiting in it, with a deadline of its own
            with self._lock:
                admin.close()
