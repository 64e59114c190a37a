"""A controller: one host's association with a subsystem, its properties, features and admin commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.subsystems import Subsystem
from forebay.clock import Clock
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.spec import DNR, AdminOpcode, CnsValue, FabricsType, FeatureId, NsDescriptorType, Property, Status

if TYPE_CHECKING:
    from forebay.appliance.dataplane.target.queue import Queue

__all__ = ["AdminReply", "Controller"]

_VERSION: Final = 0x00010400
"""VS: NVMe 1.4, whose mandatory Identify structures these are."""
_KAS: Final = 1
"""Granularity of the keep-alive timer: 100 ms."""
_AERL: Final = 3
"""Asynchronous event requests that are held, 0's based."""
_ASYNC_LIMIT_EXCEEDED: Final = 0x105
_CC_ENABLE: Final = 0x1
_CC_SHUTDOWN: Final = 0xC000
_CSTS_READY: Final = 0x1
_CSTS_SHUTDOWN_COMPLETE: Final = 0x8
_ALL_NAMESPACES: Final = 0xFFFFFFFF


class AdminReply(NamedTuple):
    """Answer to an admin command: `data` goes before the completion."""

    status: int = Status.SUCCESS
    result: int = 0
    data: bytes | None = None
    held: bool = False
    """No completion now (asynchronous event requests)."""
    reset: bool = False
    """The I/O queues must be closed before the completion is sent."""


class Controller:
    """State of one association; its admin queue's thread runs the commands.

    `queues` and `closing` are guarded by the server's lock.
    """

    def __init__(
        self, cntlid: int, subsystem: Subsystem, host: HostIdentity, limits: TargetLimits, clock: Clock, *, kato_ms: int
    ) -> None:
        self.cntlid = cntlid
        self.subsystem = subsystem
        self.host = host
        self.queues: dict[int, Queue] = {}
        self.closing = False
        self.io_queue_limit = limits.max_io_queues
        self.kato_ms = kato_ms
        self.heard = False
        """A command came, on any queue, since `expired` was last asked: traffic keeps a controller (CTRATT.TBKAS)."""
        self._heard_ms = clock.monotonic_ms()
        self._clock = clock
        self._limits = limits
        self._configuration = 0
        self._status = 0
        self.enabled = False
        """CC.EN is set and no shutdown was asked for."""
        self._async_events: list[int] = []
        self._async_configuration = 0

    def expired(self) -> bool:
        """Whether the host has been silent for longer than its keep-alive time-out. Base §3.9.

        To be asked often: what was `heard` since the last time counts as heard now.
        """
        now_ms = self._clock.monotonic_ms()
        if self.heard:
            self.heard = False
            self._heard_ms = now_ms
        return bool(self.kato_ms) and now_ms - self._heard_ms > self.kato_ms + _KAS * 100

    # --- Fabrics commands (Base §6) ---------------------------------------------------------------------------------

    def fabrics(self, command: Command) -> AdminReply:
        """Property Get and Property Set; Connect never comes here."""
        if command.fabrics_type == FabricsType.PROPERTY_GET:
            return self._property_get(command)
        if command.fabrics_type == FabricsType.PROPERTY_SET:
            return self._property_set(command)
        return AdminReply(Status.INVALID_OPCODE | DNR)

    def _property_get(self, command: Command) -> AdminReply:
        wide = bool(command.cdw10 & 0x7)
        # CAP: MQES, CQR, TO of 15 s, CSS of the NVM command set; pages of 4 KiB. Base §3.1.3.1.
        capabilities = (self._limits.max_queue_depth - 1) | 1 << 16 | 30 << 24 | 1 << 37
        values: dict[tuple[int, bool], int] = {
            (Property.CAP, True): capabilities,
            (Property.VS, False): _VERSION,
            (Property.CC, False): self._configuration,
            (Property.CSTS, False): self._status,
        }
        value = values.get((command.cdw11, wide))
        return AdminReply(Status.INVALID_FIELD | DNR) if value is None else AdminReply(result=value)

    def _property_set(self, command: Command) -> AdminReply:
        if command.cdw11 != Property.CC or command.cdw10 & 0x7:
            return AdminReply(Status.INVALID_FIELD | DNR)
        was, self._configuration = self._configuration, command.cdw12
        reset = bool(was & _CC_ENABLE and not command.cdw12 & _CC_ENABLE)
        if command.cdw12 & _CC_ENABLE and not was & _CC_ENABLE:
            self._status = _CSTS_READY
        if reset:
            self._status = 0
        shutdown = bool(command.cdw12 & _CC_SHUTDOWN)
        if shutdown:
            self._status = self._status & ~_CSTS_READY | _CSTS_SHUTDOWN_COMPLETE
        self.enabled = bool(self._status & _CSTS_READY)
        return AdminReply(reset=reset or shutdown)

    # --- admin commands (Base §5) -----------------------------------------------------------------------------------

    def admin(self, command: Command) -> AdminReply:
        """Any admin command but Fabrics ones."""
        opcode = command.opcode
        if opcode == AdminOpcode.KEEP_ALIVE:
            return AdminReply()
        if not self.enabled:
            return AdminReply(Status.COMMAND_SEQUENCE_ERROR | DNR)
        if opcode == AdminOpcode.IDENTIFY:
            return self._identify(command)
        if opcode == AdminOpcode.SET_FEATURES:
            return self._set_features(command)
        if opcode == AdminOpcode.GET_FEATURES:
            return self._get_features(command)
        if opcode == AdminOpcode.ASYNC_EVENT_REQUEST:
            if len(self._async_events) > _AERL:
                return AdminReply(_ASYNC_LIMIT_EXCEEDED | DNR)
            self._async_events.append(command.cid)
            return AdminReply(held=True)
        if opcode == AdminOpcode.ABORT:
            return AdminReply(result=1)  # not aborted: it ran to its end, or is about to. Base §5.1
        if opcode == AdminOpcode.GET_LOG_PAGE:
            return AdminReply(Status.INVALID_LOG_PAGE | DNR)
        return AdminReply(Status.INVALID_OPCODE | DNR)

    def _set_features(self, command: Command) -> AdminReply:
        feature = command.cdw10 & 0xFF
        if feature == FeatureId.NUMBER_OF_QUEUES:
            asked = min(command.cdw11 & 0xFFFF, command.cdw11 >> 16)
            if asked == 0xFFFF:
                return AdminReply(Status.INVALID_FIELD | DNR)
            self.io_queue_limit = min(asked + 1, self._limits.max_io_queues)
            return AdminReply(result=self._queue_counts())
        if feature == FeatureId.KEEP_ALIVE_TIMER:
            self.kato_ms = command.cdw11
            return AdminReply()
        if feature == FeatureId.ASYNC_EVENT_CONFIGURATION:
            self._async_configuration = command.cdw11
            return AdminReply()
        return AdminReply(Status.INVALID_FIELD | DNR)

    def _get_features(self, command: Command) -> AdminReply:
        values: dict[int, int] = {
            FeatureId.NUMBER_OF_QUEUES: self._queue_counts(),
            FeatureId.KEEP_ALIVE_TIMER: self.kato_ms,
            FeatureId.ASYNC_EVENT_CONFIGURATION: self._async_configuration,
        }
        value = values.get(command.cdw10 & 0xFF)
        return AdminReply(Status.INVALID_FIELD | DNR) if value is None else AdminReply(result=value)

    def _queue_counts(self) -> int:
        return (self.io_queue_limit - 1) << 16 | (self.io_queue_limit - 1)

    def _identify(self, command: Command) -> AdminReply:
        if command.sgl_length_bytes < spec.IDENTIFY_BYTES:
            return AdminReply(Status.DATA_SGL_LENGTH_INVALID | DNR)
        cns = command.cdw10 & 0xFF
        if cns == CnsValue.CONTROLLER:
            return AdminReply(data=self._identify_controller())
        if cns == CnsValue.ACTIVE_NAMESPACES:
            if command.nsid >= _ALL_NAMESPACES - 1:
                return AdminReply(Status.INVALID_NAMESPACE | DNR)
            nsids = [one.nsid for one in self.subsystem.visible(self.host.nqn) if one.nsid > command.nsid]
            listed = b"".join(nsid.to_bytes(4, "little") for nsid in nsids[: spec.ACTIVE_NS_LIST_ENTRIES])
            return AdminReply(data=listed.ljust(spec.IDENTIFY_BYTES, b"\0"))
        if cns not in (CnsValue.NAMESPACE, CnsValue.NAMESPACE_DESCRIPTORS):
            return AdminReply(Status.INVALID_FIELD | DNR)
        if not 1 <= command.nsid <= self.subsystem.max_namespaces:
            return AdminReply(Status.INVALID_NAMESPACE | DNR)
        if cns == CnsValue.NAMESPACE:
            return AdminReply(data=self._identify_namespace(command.nsid))
        return self._namespace_descriptors(command.nsid)

    def _identify_controller(self) -> bytes:
        subsystem, limits = self.subsystem, self._limits
        return spec.IDENTIFY_CONTROLLER.pack(
            sn=subsystem.serial.encode().ljust(20)[:20],
            mn=subsystem.model.encode().ljust(40)[:40],
            fr=b"1".ljust(8),
            cmic=0x02,  # the subsystem may have several controllers
            mdts=limits.mdts,
            cntlid=self.cntlid,
            ver=_VERSION,
            ctratt=1 << 6,  # traffic based keep alive
            cntrltype=1,
            acl=3,
            aerl=_AERL,
            kas=_KAS,
            sqes=0x66,
            cqes=0x44,
            maxcmd=limits.max_queue_depth,
            nn=subsystem.max_namespaces,
            mnan=subsystem.max_namespaces,
            vwc=0x07,  # volatile cache present; Flush of all namespaces at once is supported
            sgls=1 | 1 << 20,
            subnqn=subsystem.nqn.encode(),
            ioccsz=(spec.SQE.size + limits.in_capsule_bytes) // 16,
            iorcsz=spec.CQE.size // 16,
            msdbd=1,
        )

    def _identify_namespace(self, nsid: int) -> bytes:
        found = self.subsystem.namespace(nsid, self.host.nqn)
        if found is None:
            return bytes(spec.IDENTIFY_BYTES)  # an inactive NSID. Base §5.17.2
        lbas = found.volume.lba_count
        return spec.IDENTIFY_NAMESPACE.pack(
            nsze=lbas,
            ncap=lbas,
            nuse=lbas,
            nmic=0x01,  # other controllers may have it too
            nguid=found.nguid,
            lbaf0_lbads=LBA_BYTES.bit_length() - 1,
        )

    def _namespace_descriptors(self, nsid: int) -> AdminReply:
        found = self.subsystem.namespace(nsid, self.host.nqn)
        if found is None:
            return AdminReply(Status.INVALID_NAMESPACE | DNR)
        listed = b""
        if any(found.nguid):
            listed += spec.NS_DESCRIPTOR_HEADER.pack(NsDescriptorType.NGUID, 16) + found.nguid
        if found.uuid is not None:
            listed += spec.NS_DESCRIPTOR_HEADER.pack(NsDescriptorType.UUID, 16) + found.uuid.bytes
        return AdminReply(data=listed.ljust(spec.IDENTIFY_BYTES, b"\0"))
