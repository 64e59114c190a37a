"""A controller: one host's association with a subsystem, its properties, features and admin commands."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from forebay.appliance.dataplane.target import identify, log_pages
from forebay.appliance.dataplane.target.async_events import AsyncEvents
from forebay.appliance.dataplane.target.discovery import DiscoveryLog
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.subsystems import Subsystem
from forebay.appliance.dataplane.target.volume import IoTally
from forebay.clock import Clock
from forebay.ids import HostIdentity
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.spec import (
    DNR,
    AdminOpcode,
    AsyncEvent,
    CnsValue,
    FabricsType,
    FeatureId,
    IoOpcode,
    LogPage,
    Property,
    Status,
)

if TYPE_CHECKING:
    from forebay.appliance.dataplane.target.queue import Queue

__all__ = ["AdminReply", "Controller", "DiscoveryController"]

_CC_ENABLE: Final = 0x1
_CC_SHUTDOWN: Final = 0xC000
_CSTS_READY: Final = 0x1
_CSTS_SHUTDOWN_COMPLETE: Final = 0x8
_ALL_NAMESPACES: Final = 0xFFFFFFFF
_SAVE: Final = 1 << 31
"""SV of Set Features. Base §5.27."""
_RETAIN: Final = 1 << 15
"""RAE of Get Log Page. Base §5.16."""
_MAX_LOG_BYTES: Final = 1 << 20
"""Most of a log page that one command may ask for; longer ones are read by offset."""
_NOT_ABORTED: Final = 1
"""Bit 0 of an Abort command's result. Base §5.1."""
_KAS_MS: Final = identify.KAS * 100
_HOUR_MS: Final = 3_600_000
_WITH_LBA: Final = frozenset((IoOpcode.READ, IoOpcode.WRITE, IoOpcode.WRITE_ZEROES))
_INVALID_FIELD: Final = Status.INVALID_FIELD | DNR


class AdminReply(NamedTuple):
    """Answer to an admin command: `data` goes before the completion."""

    status: int = Status.SUCCESS
    result: int = 0
    data: bytes | None = None
    held: bool = False
    """No completion now (asynchronous event requests)."""
    aborted: int | None = None
    """A held command that ends, before this one, with Command Abort Requested."""
    reset: bool = False
    """The I/O queues must be closed before the completion is sent."""


class Controller:
    """State of one association; its admin queue's thread runs the commands.

    `queues` and `closing` are guarded by the server's lock.
    """

    kind = "io"
    """CNTRLTYPE in words."""
    log_pages: tuple[LogPage, ...] = (
        LogPage.SUPPORTED_LOG_PAGES,
        LogPage.ERROR_INFORMATION,
        LogPage.SMART,
        LogPage.FIRMWARE_SLOT,
        LogPage.CHANGED_NAMESPACES,
        LogPage.COMMANDS_SUPPORTED,
    )
    offered_events = int(AsyncEvent.NAMESPACE_ATTRIBUTE)

    def __init__(
        self,
        cntlid: int,
        subsystem: Subsystem,
        host: HostIdentity,
        limits: TargetLimits,
        clock: Clock,
        *,
        kato_ms: int,
        started_ms: int = 0,
    ) -> None:
        self.cntlid = cntlid
        self.subsystem = subsystem
        self.host = host
        self.queues: dict[int, Queue] = {}
        self.closing = False
        self.io_queue_limit = limits.max_io_queues
        self.kato_ms = _round_up(kato_ms)
        self.heard = False
        """A command came, on any queue, since `expired` was last asked: traffic keeps a controller (CTRATT.TBKAS)."""
        self.events = AsyncEvents(self.offered_events)
        self._heard_ms = clock.monotonic_ms()
        self._started_ms = started_ms
        self._clock = clock
        self._limits = limits
        self._configuration = 0
        self._status = 0
        self.enabled = False
        """CC.EN is set and no shutdown was asked for."""
        # What a host may set and get back without any effect here; Base §5.27.1 wants every controller to have them.
        self._features: dict[int, int] = {
            FeatureId.ARBITRATION: 0x7,
            FeatureId.POWER_MANAGEMENT: 0,
            FeatureId.ERROR_RECOVERY: 0,
            FeatureId.WRITE_ATOMICITY: 0,
        }
        self._thresholds: dict[int, int] = {}
        self._errors: deque[bytes] = deque(maxlen=identify.ERROR_LOG_ENTRIES)
        self._error_count = 0
        self._error_lock = Lock()

    def expired(self) -> bool:
        """Whether the host has been silent for longer than its keep-alive time-out. Base §3.9.

        To be asked often: what was `heard` since the last time counts as heard now.
        """
        now_ms = self._clock.monotonic_ms()
        admin = self.queues.get(0)
        if admin is not None and not admin.ready:
            # A host that proves who it is is at work; its time for that is limited otherwise.
            self.heard = True
        if self.heard:
            self.heard = False
            self._heard_ms = now_ms
        return bool(self.kato_ms) and now_ms - self._heard_ms > self.kato_ms + _KAS_MS

    def note_error(self, queue_id: int, command: Command, status: int) -> None:
        """A command of any queue failed: for the Error Information log."""
        has_lba = bool(queue_id) and command.opcode in _WITH_LBA
        with self._error_lock:
            self._error_count += 1
            entry = spec.ERROR_ENTRY.pack(
                error_count=self._error_count,
                sqid=queue_id,
                cid=command.cid,
                status=status << 1,
                parameter=0xFFFF,  # no particular field
                lba=command.slba if has_lba else 0,
                nsid=command.nsid if command.opcode != spec.FABRICS_OPCODE else 0,
            )
            self._errors.appendleft(entry)

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
            (Property.VS, False): identify.VERSION,
            (Property.CC, False): self._configuration,
            (Property.CSTS, False): self._status,
        }
        value = values.get((command.cdw11, wide))
        return AdminReply(_INVALID_FIELD) if value is None else AdminReply(result=value)

    def _property_set(self, command: Command) -> AdminReply:
        if command.cdw11 != Property.CC or command.cdw10 & 0x7:
            return AdminReply(_INVALID_FIELD)
        was, self._configuration = self._configuration, command.cdw12
        reset = bool(was & _CC_ENABLE and not command.cdw12 & _CC_ENABLE)
        if command.cdw12 & _CC_ENABLE and not was & _CC_ENABLE:
            self._status = _CSTS_READY
        if reset:
            self._status = 0
            self.events.reset()
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
            if self.events.hold(command.cid):
                return AdminReply(held=True)
            return AdminReply(Status.ASYNC_EVENT_LIMIT_EXCEEDED | DNR)
        if opcode == AdminOpcode.ABORT:
            return self._abort(command)
        if opcode == AdminOpcode.GET_LOG_PAGE:
            return self._get_log_page(command)
        return AdminReply(Status.INVALID_OPCODE | DNR)

    def _abort(self, command: Command) -> AdminReply:
        """Only held commands can be aborted: all others ran to their end, or are about to. Base §5.1."""
        queue_id, cid = command.cdw10 & 0xFFFF, command.cdw10 >> 16
        if queue_id == 0 and self.events.give_up(cid):
            return AdminReply(aborted=cid)
        return AdminReply(result=_NOT_ABORTED)

    # --- features ---------------------------------------------------------------------------------------------------

    def _set_features(self, command: Command) -> AdminReply:
        feature, value = command.cdw10 & 0xFF, command.cdw11
        if command.cdw10 & _SAVE:
            return AdminReply(Status.FEATURE_NOT_SAVEABLE | DNR)
        if feature == FeatureId.KEEP_ALIVE_TIMER:
            self.kato_ms = _round_up(value)
            return AdminReply()
        if feature == FeatureId.ASYNC_EVENT_CONFIGURATION:
            self.events.enabled = value
            return AdminReply()
        return self._set_io_feature(feature, value)

    def _set_io_feature(self, feature: int, value: int) -> AdminReply:
        if feature == FeatureId.NUMBER_OF_QUEUES:
            asked = min(value & 0xFFFF, value >> 16)
            if asked == 0xFFFF:
                return AdminReply(_INVALID_FIELD)
            self.io_queue_limit = min(asked + 1, self._limits.max_io_queues)
            return AdminReply(result=self._queue_counts())
        if feature == FeatureId.VOLATILE_WRITE_CACHE:
            # The operating system's cache cannot be switched off.
            return AdminReply() if value & 1 else AdminReply(Status.FEATURE_NOT_CHANGEABLE | DNR)
        if feature == FeatureId.TEMPERATURE_THRESHOLD:
            self._thresholds[value >> 16 & 0x3F] = value & 0xFFFF
            return AdminReply()
        if feature == FeatureId.POWER_MANAGEMENT and value & 0x1F:
            return AdminReply(_INVALID_FIELD)  # there is power state 0
        if feature in self._features:
            self._features[feature] = value
            return AdminReply()
        return AdminReply(_INVALID_FIELD)

    def _get_features(self, command: Command) -> AdminReply:
        feature = command.cdw10 & 0xFF
        value = None
        if not command.cdw10 >> 8 & 0x7:  # SEL: only current values; ONCS says so
            value = self._feature(feature, command.cdw11)
        if value is not None:
            return AdminReply(result=value)
        if feature == FeatureId.HOST_IDENTIFIER and command.cdw11 & 1:  # the 128-bit one, which Fabrics has alone
            if command.sgl_length_bytes < 16:
                return AdminReply(Status.DATA_SGL_LENGTH_INVALID | DNR)
            return AdminReply(data=UUID(self.host.host_id).bytes)
        return AdminReply(_INVALID_FIELD)

    def _feature(self, feature: int, selector: int) -> int | None:
        if feature == FeatureId.KEEP_ALIVE_TIMER:
            return self.kato_ms
        if feature == FeatureId.ASYNC_EVENT_CONFIGURATION:
            return self.events.enabled
        return self._io_feature(feature, selector)

    def _io_feature(self, feature: int, selector: int) -> int | None:
        if feature == FeatureId.NUMBER_OF_QUEUES:
            return self._queue_counts()
        if feature == FeatureId.VOLATILE_WRITE_CACHE:
            return 1
        if feature == FeatureId.TEMPERATURE_THRESHOLD:
            under = selector >> 20 & 0x3
            return self._thresholds.get(selector >> 16 & 0x3F, 0 if under else 0xFFFF)
        return self._features.get(feature)

    def _queue_counts(self) -> int:
        return (self.io_queue_limit - 1) << 16 | (self.io_queue_limit - 1)

    # --- log pages --------------------------------------------------------------------------------------------------

    def _get_log_page(self, command: Command) -> AdminReply:
        page, retain = command.cdw10 & 0xFF, bool(command.cdw10 & _RETAIN)
        length_bytes = ((command.cdw10 >> 16 | (command.cdw11 & 0xFFFF) << 16) + 1) * 4
        offset_bytes = command.cdw13 << 32 | command.cdw12
        if page not in self.log_pages:
            return AdminReply(Status.INVALID_LOG_PAGE | DNR)
        if length_bytes > _MAX_LOG_BYTES or offset_bytes % 4:
            return AdminReply(_INVALID_FIELD)
        if command.sgl_length_bytes < length_bytes:
            return AdminReply(Status.DATA_SGL_LENGTH_INVALID | DNR)
        if page == LogPage.SMART and command.nsid not in (0, _ALL_NAMESPACES):
            return AdminReply(_INVALID_FIELD)  # LPA says that there is none for a single namespace
        data = self._log_page(LogPage(page), retain=retain)
        if offset_bytes > len(data):
            return AdminReply(_INVALID_FIELD)
        return AdminReply(data=data[offset_bytes : offset_bytes + length_bytes].ljust(length_bytes, b"\0"))

    def _log_page(self, page: LogPage, *, retain: bool) -> bytes:
        if page == LogPage.SUPPORTED_LOG_PAGES:
            return log_pages.supported(self.log_pages)
        if page == LogPage.ERROR_INFORMATION:
            with self._error_lock:
                return log_pages.error_information(self._errors, identify.ERROR_LOG_ENTRIES)
        if page == LogPage.SMART:
            total = IoTally()
            for one in self.subsystem.visible(self.host.nqn):
                total.add(one.volume.tally())
            hours = (self._clock.monotonic_ms() - self._started_ms) // _HOUR_MS
            return log_pages.smart(total, power_on_hours=hours, error_log_entries=self._error_count)
        if page == LogPage.FIRMWARE_SLOT:
            return log_pages.firmware_slots()
        if page == LogPage.CHANGED_NAMESPACES:
            return self.events.changed_namespaces(retain=retain)
        return log_pages.commands_supported(deallocates=self._deallocates())

    # --- identify ---------------------------------------------------------------------------------------------------

    def _deallocates(self) -> bool:
        return any(one.volume.deallocates for one in self.subsystem.visible(self.host.nqn))

    def _identify(self, command: Command) -> AdminReply:
        if command.sgl_length_bytes < spec.IDENTIFY_BYTES:
            return AdminReply(Status.DATA_SGL_LENGTH_INVALID | DNR)
        cns = command.cdw10 & 0xFF
        if cns == CnsValue.CONTROLLER:
            return AdminReply(data=self._identify_controller())
        return self._identify_io(cns, command)

    def _identify_controller(self) -> bytes:
        return identify.io_controller(
            self.subsystem,
            self.cntlid,
            self._limits,
            deallocates=self._deallocates(),
            oaes=self.offered_events,
        )

    def _identify_io(self, cns: int, command: Command) -> AdminReply:
        nsid = command.nsid
        if cns == CnsValue.CONTROLLER_OF_COMMAND_SET and not command.cdw11 >> 24:
            return AdminReply(data=identify.nvm_controller(self._limits))
        if cns == CnsValue.ACTIVE_NAMESPACES:
            if nsid >= _ALL_NAMESPACES - 1:
                return AdminReply(Status.INVALID_NAMESPACE | DNR)
            nsids = [one.nsid for one in self.subsystem.visible(self.host.nqn) if one.nsid > nsid]
            listed = b"".join(found.to_bytes(4, "little") for found in nsids[: spec.ACTIVE_NS_LIST_ENTRIES])
            return AdminReply(data=listed.ljust(spec.IDENTIFY_BYTES, b"\0"))
        if cns not in (CnsValue.NAMESPACE, CnsValue.NAMESPACE_DESCRIPTORS):
            return AdminReply(_INVALID_FIELD)
        if not 1 <= nsid <= self.subsystem.max_namespaces:
            return AdminReply(Status.INVALID_NAMESPACE | DNR)
        found = self.subsystem.namespace(nsid, self.host.nqn)
        if cns == CnsValue.NAMESPACE:
            # Of an inactive NSID all is zero. Base §5.17.2.
            return AdminReply(data=identify.namespace(found) if found is not None else bytes(spec.IDENTIFY_BYTES))
        if found is None:
            return AdminReply(Status.INVALID_NAMESPACE | DNR)
        return AdminReply(data=identify.namespace_descriptors(found))


class DiscoveryController(Controller):
    """A controller of the discovery subsystem: no I/O queues, one log page. Base §3.1.2.3."""

    kind = "discovery"
    log_pages = (LogPage.SUPPORTED_LOG_PAGES, LogPage.ERROR_INFORMATION, LogPage.DISCOVERY)
    offered_events = int(AsyncEvent.DISCOVERY_LOG_CHANGE)

    def __init__(
        self,
        cntlid: int,
        subsystem: Subsystem,
        host: HostIdentity,
        limits: TargetLimits,
        clock: Clock,
        *,
        kato_ms: int,
        log: DiscoveryLog,
        reached_at: str,
    ) -> None:
        super().__init__(cntlid, subsystem, host, limits, clock, kato_ms=kato_ms)
        self.io_queue_limit = 0
        self._log = log
        self._reached_at = reached_at

    def _identify_controller(self) -> bytes:
        return identify.discovery_controller(self.subsystem, self.cntlid, self._limits, oaes=self.offered_events)

    def _identify_io(self, cns: int, command: Command) -> AdminReply:
        return AdminReply(_INVALID_FIELD)

    def _set_io_feature(self, feature: int, value: int) -> AdminReply:
        return AdminReply(_INVALID_FIELD)

    def _io_feature(self, feature: int, selector: int) -> int | None:
        return None

    def _log_page(self, page: LogPage, *, retain: bool) -> bytes:
        if page != LogPage.DISCOVERY:
            return super()._log_page(page, retain=retain)
        if not retain:
            self.events.read(AsyncEvent.DISCOVERY_LOG_CHANGE)
        return self._log.page(self.host.nqn, self._reached_at, self._limits.max_queue_depth)


def _round_up(kato_ms: int) -> int:
    """KATO in the timer's granularity. Base §5.27.1.12."""
    return -(-kato_ms // _KAS_MS) * _KAS_MS
