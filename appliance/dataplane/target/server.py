"""The target: listeners, queues, controllers and what they serve, under one lock.

Teardown is the point of much of this (design §6.4): what takes rights or media away returns only when the threads that
could still use them have ended or moved on. Such waits are outside the lock and as long as a drive takes.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from threading import Event, RLock, Thread
from typing import Final
from uuid import uuid4

from forebay.appliance.dataplane.target.buffers import BufferPool
from forebay.appliance.dataplane.target.controller import Controller, DiscoveryController
from forebay.appliance.dataplane.target.discovery import DiscoveryLog
from forebay.appliance.dataplane.target.grants import GrantTable
from forebay.appliance.dataplane.target.keyring import Keyring
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.portal import Portal
from forebay.appliance.dataplane.target.precedence import Precedence
from forebay.appliance.dataplane.target.proof import Proof, ProofTerms
from forebay.appliance.dataplane.target.queue import Queue
from forebay.appliance.dataplane.target.subsystems import ListenAddress, Namespace, Subsystem
from forebay.appliance.dataplane.target.volume import Volume
from forebay.clock import Clock, SystemClock
from forebay.ids import HostIdentity
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import DYNAMIC_CONTROLLER, Command, ConnectData
from forebay.nvmetcp.spec import DNR, AsyncEvent, Status

__all__ = ["Server"]

log = logging.getLogger(__name__)

_KEEP_ALIVE_CHECK_S: Final = 0.1
_RESERVED_DESCRIPTORS: Final = 64
"""Of files that the process may open, what is not for connections: log, control sockets, what a library opens."""
_DESCRIPTORS_PER_VOLUME: Final = 2
_MAX_REFUSALS: Final = 32
"""Connections above the limit that are told so at a time; what comes beside them is closed without a word."""
_REFUSED_LOG_S: Final = 10.0
"""How often refusals are logged, all of them in one line."""
_QUIESCE_POLL_S: Final = 0.001
_QUIESCE_PATIENCE_S: Final = 2.0
"""How long a command may go on with a namespace that is being taken away before its connection is cut."""


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Server:
    """Everything that the control methods act on. Methods raise OSError with the errno that they answer."""

    def __init__(self, limits: TargetLimits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or TargetLimits()
        self.boot_id = str(uuid4())
        self.grants = GrantTable()
        self.precedence = Precedence()
        self.keyring = Keyring()
        self.proof_terms = ProofTerms()
        self.buffers = BufferPool(self.limits.chunk_bytes, self.limits.buffer_bytes)
        self.lock = RLock()
        """Guards every change below, and controllers' `queues` and `closing`."""
        self.volumes: dict[str, Volume] = {}
        self.subsystems: dict[str, Subsystem] = {}
        self.transport_created = False
        self.controllers: set[Controller] = set()
        self.queues: set[Queue] = set()
        """Those that are served, and up to `_MAX_REFUSALS` that wait to be told that they are not."""
        self._refusals = 0
        self._refusals_unsaid = 0
        self._refusals_said_s = -_REFUSED_LOG_S
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.counts = {"admin_qpairs": 0, "io_qpairs": 0, "completed_nvme_io": 0, "refused_connections": 0}
        self.discovery = Subsystem(
            spec.DISCOVERY_NQN,
            serial="00000000000000000000",
            model="Forebay",
            max_namespaces=0,
            allow_any_host=True,
            discovery=True,
        )
        self._discovery_log = DiscoveryLog(self.subsystems)
        self._clock = clock or SystemClock()
        self._started_ms = self._clock.monotonic_ms()
        self._portals: dict[ListenAddress, Portal] = {}
        self._next_cntlid: int = 1
        self._stopping = Event()
        self._monitor = Thread(target=self._watch_keep_alive, name="keep alive", daemon=True)
        self._monitor.start()

    def close(self) -> None:
        """End all connections, then close all volumes. Not to be used after."""
        self._stopping.set()
        with self.lock:
            portals, self._portals = list(self._portals.values()), {}
        for portal in portals:
            portal.close()
        self._end_queues(list(self.queues))
        self._monitor.join()
        with self.lock:
            for volume in self.volumes.values():
                volume.close()
            self.volumes.clear()

    # --- queues and controllers -------------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket, portal: Portal) -> None:
        with self.lock:
            most = self.most_connections
            refused = len(self.queues) - self._refusals >= most
            if refused:
                self._refused(f"{most} connections are open, which is the limit")
            if self._stopping.is_set() or (refused and self._refusals >= _MAX_REFUSALS):
                sock.close()
                return
            try:
                host, port = sock.getpeername()[:2]
                queue = Queue(self, sock, portal.address, f"{host}:{port}", self.limits, refused=refused)
            except OSError:
                sock.close()  # gone already
                return
            self.queues.add(queue)
            self._refusals += refused
            try:
                queue.start()
            except RuntimeError as error:
                self._refused(f"no thread for it: {error}")
                self.queues.discard(queue)
                self._refusals -= refused
                sock.close()

    @property
    def most_connections(self) -> int:
        """Connections that are served at a time: as configured, and as many as there can be descriptors for."""
        others = _RESERVED_DESCRIPTORS + _DESCRIPTORS_PER_VOLUME * len(self.volumes)
        return max(1, min(self.limits.max_connections, self._descriptors - others))

    def _refused(self, why: str) -> None:
        """Count a connection that is not served, and say so now and then."""
        with self.lock:
            self.counts["refused_connections"] += 1
            self._refusals_unsaid += 1
            if time.monotonic() - self._refusals_said_s >= _REFUSED_LOG_S:
                log.warning("%d connections were refused: %s", self._refusals_unsaid, why)
                self._refusals_said_s, self._refusals_unsaid = time.monotonic(), 0

    def associate(self, queue: Queue, command: Command, data: ConnectData) -> tuple[int, int]:
        """Connect (Base §6.3): bind a queue to a new controller (queue 0) or to one of this host.

        Returns status and DW0, which is the controller id, or for invalid parameters where the bad one stands.
        """
        in_data = 1 << 16  # IATTR: the offset (IPO) is one of the data, not of the command
        qid, entries = command.cdw10 >> 16, (command.cdw11 & 0xFFFF) + 1
        bad = Status.CONNECT_INVALID_PARAMETERS | DNR
        if command.cdw10 & 0xFFFF:
            return Status.CONNECT_INCOMPATIBLE_FORMAT | DNR, 0
        if data.subsystem_nqn is None:
            return bad, in_data | spec.CONNECT_DATA.offset_bytes("subnqn")
        if data.host_nqn is None:
            return bad, in_data | spec.CONNECT_DATA.offset_bytes("hostnqn")
        if not 2 <= entries <= self.limits.max_queue_depth:
            return bad, 44
        if queue.refused:
            return Status.CONNECT_CONTROLLER_BUSY, 0
        with self.lock:
            subsystem = self._subsystem_at(data.subsystem_nqn, queue.listener)
            if subsystem is None:
                return bad, in_data | spec.CONNECT_DATA.offset_bytes("subnqn")
            if not subsystem.allows(data.host_nqn):
                log.warning("%s: host %s is not allowed in %s", queue.peer, data.host_nqn, subsystem.nqn)
                return Status.CONNECT_INVALID_HOST | DNR, 0
            host = HostIdentity(data.host_nqn, str(data.host_id))
            if qid:
                return self._add_io_queue(queue, qid, data.controller_id, subsystem, host)
            if data.controller_id != DYNAMIC_CONTROLLER:
                return bad, in_data | spec.CONNECT_DATA.offset_bytes("cntlid")
            cntlid = self._free_cntlid(subsystem)
            if cntlid is None:
                return Status.CONNECT_CONTROLLER_BUSY, 0
            controller = self._new_controller(queue, cntlid, subsystem, host, command.cdw12)
            controller.queues[0] = queue
            self.controllers.add(controller)
            queue.controller = controller
            self.counts["admin_qpairs"] += 1
            log.info("%s: controller %d of %s for %s %s", queue.peer, cntlid, subsystem.nqn, host.nqn, host.host_id)
            return Status.SUCCESS, cntlid | self._ask_proof(queue, subsystem, host)

    def _ask_proof(self, queue: Queue, subsystem: Subsystem, host: HostIdentity) -> int:
        """Have the host of a queue prove who it is, if it has keys; AUTHREQ of its Connect's response."""
        keys = subsystem.hosts.get(host.nqn)
        if keys is None:
            return 0
        queue.proof = Proof(queue, keys.secrets, (host.nqn, subsystem.nqn), self.proof_terms)
        return spec.CONNECT_ATR

    def _subsystem_at(self, nqn: str, listener: ListenAddress) -> Subsystem | None:
        if nqn == spec.DISCOVERY_NQN:
            return self.discovery
        found = self.subsystems.get(nqn)
        return found if found is not None and listener in found.listeners else None

    def _new_controller(
        self, queue: Queue, cntlid: int, subsystem: Subsystem, host: HostIdentity, kato_ms: int
    ) -> Controller:
        if subsystem.discovery:
            return DiscoveryController(
                cntlid,
                subsystem,
                host,
                self.limits,
                self._clock,
                kato_ms=kato_ms,
                log=self._discovery_log,
                reached_at=queue.local_address,
            )
        return Controller(
            cntlid, subsystem, host, self.limits, self._clock, kato_ms=kato_ms, started_ms=self._started_ms
        )

    def _add_io_queue(
        self, queue: Queue, qid: int, cntlid: int, subsystem: Subsystem, host: HostIdentity
    ) -> tuple[int, int]:
        found = next((one for one in self.controllers if one.cntlid == cntlid and one.subsystem is subsystem), None)
        if found is None or found.closing or found.host != host:
            return Status.CONNECT_INVALID_PARAMETERS | DNR, 1 << 16 | spec.CONNECT_DATA.offset_bytes("cntlid")
        if not found.enabled:
            return Status.COMMAND_SEQUENCE_ERROR | DNR, 0
        if qid > found.io_queue_limit or qid in found.queues:
            return Status.INVALID_QUEUE_ID | DNR, 0
        queue.controller = found
        self.counts["io_qpairs"] += 1
        asked = self._ask_proof(queue, subsystem, host)
        if not asked:
            found.queues[qid] = queue
        return Status.SUCCESS, cntlid | asked

    def claim(self, queue: Queue) -> bool:
        """Give a queue its id, once its host has proven who it is; whether it may have it.

        Not at its Connect: whoever knows a host's name would keep the ids of its queues from it.
        """
        with self.lock:
            controller = queue.controller
            assert controller is not None, "a connected queue without a controller"
            return not controller.closing and controller.queues.setdefault(queue.qid, queue) is queue

    def _free_cntlid(self, subsystem: Subsystem) -> int | None:
        first, last = subsystem.cntlids
        taken = {one.cntlid for one in self.controllers}
        # Onwards from the last one given, so that an id is not used again as soon as it is free.
        start = max(self._next_cntlid, first)
        for cntlid in chain(range(start, last + 1), range(first, min(start, last + 1))):
            if cntlid not in taken:
                self._next_cntlid = cntlid + 1
                return cntlid
        return None

    def forget(self, queue: Queue) -> None:
        """Called by a queue's thread as its last act: it touches nothing any more."""
        with self.lock:
            self.queues.discard(queue)
            self._refusals -= queue.refused
            self.counts["completed_nvme_io"] += queue.commands
            controller = queue.controller
            if controller is None:
                return
            if controller.queues.get(queue.qid) is queue:
                del controller.queues[queue.qid]
            if queue.qid == 0:
                # Without its admin queue a controller is over. Base §3.6.
                self._end_controller(controller)
            if not controller.queues:
                self.controllers.discard(controller)

    def close_io_queues(self, controller: Controller) -> None:
        """End a controller's I/O queues (a reset); returns when they have ended."""
        with self.lock:
            admin = controller.queues.get(0)
            queues = [queue for queue in self.queues if queue.controller is controller and queue is not admin]
        self._end_queues(queues)

    def teardown(self, matches: Callable[[Controller], bool]) -> int:
        """End the controllers that match; returns when every thread of them has ended, with how many there were."""
        with self.lock:
            ending = [controller for controller in self.controllers if matches(controller)]
            for controller in ending:
                controller.closing = True
            queues = [queue for queue in self.queues if queue.controller in ending]
        self._end_queues(queues)
        return len(ending)

    def teardown_host(self, host_nqn: str, host_id: str | None) -> int:
        """`teardown` every controller of a host, or of all hosts with that NQN."""
        return self.teardown(lambda one: one.host.nqn == host_nqn and host_id in (None, one.host.host_id))

    def _end_queues(self, queues: Iterable[Queue]) -> None:
        queues = list(queues)
        for queue in queues:
            queue.cut()
        for queue in queues:
            queue.ended.wait()

    def _watch_keep_alive(self) -> None:
        while not self._stopping.wait(_KEEP_ALIVE_CHECK_S):
            now_s = time.monotonic()
            with self.lock:
                for queue in self.queues:
                    if queue.overdue(now_s):
                        log.info("%s: not connected in time", queue.peer)
                        queue.cut()
                late = [one for one in self.controllers if not one.closing and one.expired()]
                for controller in late:
                    log.warning("controller %d of %s: keep-alive time-out", controller.cntlid, controller.host.nqn)
                    self._end_controller(controller)

    def _end_controller(self, controller: Controller) -> None:
        """Cut its queues, those that have not proven themselves as well. Called with the lock."""
        controller.closing = True
        for queue in self.queues:
            if queue.controller is controller:
                queue.cut()

    def quiesce(self, concerns: Callable[[Queue, Namespace], bool]) -> None:
        """Wait until no command that is under way now touches the media of a namespace that concerns the caller.

        The caller has made sure that no new one starts, or does not mind. A command that takes too long loses its
        connection: its host may be holding it up.
        """
        with self.lock:
            busy = [(queue, queue.serial) for queue in self.queues]
        cut_at = time.monotonic() + _QUIESCE_PATIENCE_S
        for queue, serial in busy:
            while not queue.ended.is_set():
                active = queue.active
                if active is None or queue.serial != serial or not concerns(queue, active):
                    break
                if time.monotonic() > cut_at:
                    queue.cut()
                queue.ended.wait(_QUIESCE_POLL_S)

    # --- events -----------------------------------------------------------------------------------------------------

    def _namespace_changed(self, subsystem: Subsystem, nsid: int, concerns: Callable[[str], bool]) -> None:
        """Tell the controllers whose host (by NQN) saw or sees the namespace. Called with the lock."""
        for controller in self.controllers:
            if controller.subsystem is subsystem and concerns(controller.host.nqn):
                controller.events.namespace_changed(nsid)
                self._tell(controller)

    def discovery_changed(self) -> None:
        """What discovery controllers say may be another now. Called with the lock."""
        self._discovery_log.generation += 1
        for controller in self.controllers:
            if controller.subsystem is self.discovery:
                controller.events.notice(AsyncEvent.DISCOVERY_LOG_CHANGE)
                self._tell(controller)

    def _tell(self, controller: Controller) -> None:
        queue = controller.queues.get(0)
        if queue is not None:
            queue.tell_events()

    # --- volumes and namespaces -------------------------------------------------------------------------------------

    def volume(self, name: str) -> Volume:
        """The volume of that name; ENODEV."""
        found = self.volumes.get(name)
        if found is None:
            raise _error(errno.ENODEV)
        return found

    def add_volume(self, volume: Volume) -> None:
        """Take over an open volume; EEXIST."""
        with self.lock:
            if volume.name in self.volumes:
                raise _error(errno.EEXIST)
            self.volumes[volume.name] = volume

    def delete_volume(self, name: str) -> None:
        """Take a volume out of all subsystems, drop its grants and close it."""
        with self.lock:
            volume = self.volume(name)
            using = [
                (subsystem, namespace.nsid)
                for subsystem in self.subsystems.values()
                for namespace in subsystem.namespaces.values()
                if namespace.volume is volume
            ]
            for subsystem, nsid in using:
                self._drop_namespace(subsystem, nsid)
            del self.volumes[name]
        self.quiesce(lambda _, active: active.volume is volume)
        self.grants.revoke_all(name)
        volume.close()

    def set_fenced(self, name: str, fenced: bool) -> None:
        """Change a volume's mode; when this returns no write goes by the old one."""
        volume = self.volume(name)
        volume.fenced = fenced
        self.quiesce(lambda _, active: active.volume is volume)

    def add_namespace(self, subsystem: Subsystem, namespace: Namespace) -> None:
        """Add it under its NSID, or under the first free one if that is 0; EEXIST, EBUSY (volume in use), EINVAL."""
        with self.lock:
            used = subsystem.namespaces
            if not namespace.nsid:
                free = (nsid for nsid in range(1, subsystem.max_namespaces + 1) if nsid not in used)
                namespace.nsid = next(free, 0)
            if not 1 <= namespace.nsid <= subsystem.max_namespaces:
                raise _error(errno.EINVAL)
            if namespace.nsid in used:
                raise _error(errno.EEXIST)
            claimed = (one.volume for each in self.subsystems.values() for one in each.namespaces.values())
            if namespace.volume in claimed:
                raise _error(errno.EBUSY)
            used[namespace.nsid] = namespace
            self._namespace_changed(subsystem, namespace.nsid, namespace.visible_to)

    def remove_namespace(self, subsystem: Subsystem, nsid: int) -> None:
        """Take it away; open commands on it have ended when this returns. ENODEV."""
        with self.lock:
            if nsid not in subsystem.namespaces:
                raise _error(errno.ENODEV)
            namespace = self._drop_namespace(subsystem, nsid)
        self.quiesce(lambda _, active: active is namespace)

    def _drop_namespace(self, subsystem: Subsystem, nsid: int) -> Namespace:
        namespace = subsystem.namespaces.pop(nsid)
        seen_by = {one.host.nqn for one in self.controllers if namespace.visible_to(one.host.nqn)}
        namespace.live = False
        self._namespace_changed(subsystem, nsid, seen_by.__contains__)
        return namespace

    def show_namespace(self, namespace: Namespace, host_nqn: str) -> None:
        """Let a host see a namespace that not all see."""
        with self.lock:
            if host_nqn not in namespace.hosts:
                namespace.hosts.add(host_nqn)
                self._sight_changed(namespace, host_nqn)

    def _sight_changed(self, namespace: Namespace, host_nqn: str) -> None:
        for subsystem in self.subsystems.values():
            if subsystem.namespaces.get(namespace.nsid) is namespace:
                self._namespace_changed(subsystem, namespace.nsid, lambda nqn: nqn == host_nqn)

    def hide_namespace(self, namespace: Namespace, host_nqn: str) -> None:
        """Take a host's sight of it away; its open commands on it have ended when this returns."""
        with self.lock:
            if host_nqn in namespace.hosts:
                namespace.hosts.discard(host_nqn)
                self._sight_changed(namespace, host_nqn)

        def concerns(queue: Queue, active: Namespace) -> bool:
            controller = queue.controller
            return active is namespace and controller is not None and controller.host.nqn == host_nqn

        self.quiesce(concerns)

    # --- subsystems and listeners -----------------------------------------------------------------------------------

    def subsystem(self, nqn: str) -> Subsystem | None:
        """The subsystem of that name, the discovery subsystem included."""
        return self.discovery if nqn == spec.DISCOVERY_NQN else self.subsystems.get(nqn)

    def add_subsystem(self, subsystem: Subsystem) -> None:
        """EEXIST."""
        with self.lock:
            if subsystem.nqn in self.subsystems:
                raise _error(errno.EEXIST)
            self.subsystems[subsystem.nqn] = subsystem
            self.discovery_changed()

    def delete_subsystem(self, subsystem: Subsystem) -> None:
        """End its controllers, then take its namespaces and listeners away. ENODEV."""
        with self.lock:
            if self.subsystems.pop(subsystem.nqn, None) is None:
                raise _error(errno.ENODEV)
            for namespace in subsystem.namespaces.values():
                namespace.live = False
            self.discovery_changed()
            listeners = list(subsystem.listeners)
        self.teardown(lambda one: one.subsystem is subsystem)
        for listener in listeners:
            self.remove_listener(subsystem, listener)

    def add_listener(self, subsystem: Subsystem, family: str, address: str, port: int) -> ListenAddress:
        """Listen for a subsystem, on a port of the kernel's choice if `port` is 0. EEXIST; whatever bind says."""
        with self.lock:
            wanted = ListenAddress(family, address, port)
            if wanted in subsystem.listeners:
                raise _error(errno.EEXIST)
            portal = self._portals.get(wanted)
            if portal is None:
                portal = Portal(family, address, port, self._accept, self._refused)
                self._portals[portal.address] = portal
            subsystem.listeners.add(portal.address)
            self.discovery_changed()
            return portal.address

    def remove_listener(self, subsystem: Subsystem, listener: ListenAddress) -> None:
        """Stop listening for a subsystem and end its controllers that came this way. ENOENT."""
        with self.lock:
            if listener not in subsystem.listeners:
                raise _error(errno.ENOENT)
            subsystem.listeners.discard(listener)
            self.discovery_changed()
            shared = any(listener in one.listeners for one in (self.discovery, *self.subsystems.values()))
            portal = None if shared else self._portals.pop(listener, None)
            queues = [
                queue
                for queue in self.queues
                if queue.listener == listener and queue.controller and queue.controller.subsystem is subsystem
            ]
        if portal is not None:
            portal.close()
        self._end_queues(queues)

    def set_limits(self, **changes: int) -> None:
        """Change limits for connections that come from now on. Raises `ConfigInvalid`."""
        with self.lock:
            self.limits = replace(self.limits, **changes)
