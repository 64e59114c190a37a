"""One queue: a transport connection, the thread that serves it, and its I/O commands.

The thread does one thing after the other: it reads a header, runs the command, sends the answer. A slow peer therefore
holds up nobody but itself; what it can hold is this thread and `TargetLimits.open_writes` + 1 buffers. All calls that
take time (sockets, files) give up the interpreter's lock.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import deque
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Final

from forebay.appliance.dataplane.target.controller import AdminReply, Controller
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.stream import PeerLost, Stream
from forebay.appliance.dataplane.target.subsystems import ListenAddress, Namespace
from forebay.appliance.dataplane.target.volume import IoTally, Volume, aligned_buffers
from forebay.ids import LBA_BYTES
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command, ConnectData
from forebay.nvmetcp.connection import Buffer, Connection
from forebay.nvmetcp.events import CommandReceived, DataStart, Event, ICReqReceived, TermReceived
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import DNR, FabricsType, FatalError, IoOpcode, Status
from forebay.nvmetcp.states import Role

if TYPE_CHECKING:
    from forebay.appliance.dataplane.target.server import Server

__all__ = ["Queue"]

log = logging.getLogger(__name__)

_READ: Final = int(IoOpcode.READ)
_WRITE: Final = int(IoOpcode.WRITE)
_FLUSH: Final = int(IoOpcode.FLUSH)
_ALL_NAMESPACES: Final = 0xFFFFFFFF
_LBA_SHIFT: Final = LBA_BYTES.bit_length() - 1
_ACCESS_DENIED: Final = Status.ACCESS_DENIED | DNR
_MEDIA_STATUS: Final[dict[int, int]] = {
    # Space that was promised and is not there will not come back by trying again.
    errno.ENOSPC: Status.CAPACITY_EXCEEDED | DNR,
    errno.EDQUOT: Status.CAPACITY_EXCEEDED | DNR,
    errno.EFBIG: Status.CAPACITY_EXCEEDED | DNR,
}


class _OpenWrite:
    """A Write whose data comes by R2T: at most one chunk of it is held at a time."""

    __slots__ = ("at_bytes", "buffer", "cid", "filled_bytes", "length_bytes", "namespace", "slba", "status")

    def __init__(self, cid: int, namespace: Namespace, slba: int, length_bytes: int) -> None:
        self.cid = cid
        self.namespace = namespace
        self.slba = slba
        self.length_bytes = length_bytes
        self.at_bytes = 0  # of the command: where the buffer's first byte belongs
        self.filled_bytes = 0
        self.status: int = Status.SUCCESS
        self.buffer = memoryview(b"")


class Queue:
    """A queue from accept to close. `start` it; `cut` ends it from any thread; `ended` is set when it has ended."""

    def __init__(
        self, server: Server, sock: socket.socket, listener: ListenAddress, peer: str, limits: TargetLimits
    ) -> None:
        self.listener = listener
        self.peer = peer
        self.controller: Controller | None = None
        self.qid = 0
        self.ended = Flag()
        self.active: Namespace | None = None
        """The namespace whose media this thread may be touching; see `Server.quiesce`."""
        self.serial = 0
        """Counts up with each command that set `active`, so that another thread can tell one from the next."""
        self.commands = 0
        self._server = server
        self._limits = limits
        self._conn = Connection(Role.CONTROLLER, max_h2c_data_bytes=limits.max_h2c_data_bytes)
        self._stream = Stream(sock, self._conn)
        self._flow_control = True
        self._entries = limits.max_queue_depth
        self._sq_head = 0
        self._in_capsule: Command | None = None
        self._writes: dict[int, _OpenWrite] = {}  # by cid, which is also the R2T's tag
        self._waiting: deque[_OpenWrite] = deque()
        self._spare: list[memoryview] = []
        self._read_buffer: memoryview | None = None
        self._tallies: dict[Volume, IoTally] = {}

    # --- the thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the connection in a thread of its own."""
        Thread(target=self._run, name=f"queue {self.peer}", daemon=True).start()

    def cut(self) -> None:
        """End the connection. Returns at once; the thread ends when its current read or write of media has."""
        self._stream.cut()

    def _run(self) -> None:
        try:
            self._stream.set_timeout(self._limits.connect_timeout_s)
            self._serve()
        except PduError as error:
            log.warning("%s: %s; terminated", self.peer, error.message)
            self._stream.terminate(error.termination)
        except (PeerLost, OSError) as error:
            log.info("%s: %s", self.peer, error)
        except Exception:
            # A fault of ours in one queue must not end the process that serves all others.
            log.exception("%s: the queue failed", self.peer)
        finally:
            for volume, tally in self._tallies.items():
                volume.close_tally(tally)
            self._server.forget(self)
            self._stream.close()
            self.ended.set()

    def _serve(self) -> None:
        conn, receive = self._conn, self._stream.receive_header
        header = memoryview(bytearray(256))
        while True:
            try:
                count = receive(header, conn.bytes_wanted)
            except BlockingIOError:
                if self.controller is None or not conn.between_pdus:
                    raise PeerLost("the peer stopped sending") from None
                continue
            if not count:
                return
            for event in conn.receive_data(header[:count]):
                if type(event) is CommandReceived:
                    self._command(event.command, event.in_capsule_bytes)
                elif self._other_event(event):
                    return

    def _other_event(self, event: Event) -> bool:
        """Anything but a command; True ends the connection."""
        if isinstance(event, DataStart):
            if event.tag is None:
                self._in_capsule_data(event.length_bytes)
            else:
                self._write_data(self._writes[event.tag])
        elif isinstance(event, ICReqReceived):
            self._stream.send(self._conn.send_ic_resp())
        elif isinstance(event, TermReceived):
            log.warning(
                "%s: the host ended the connection, FES %d FEI %d", self.peer, event.fatal_error, event.fatal_info
            )
            return True
        return False

    # --- commands ---------------------------------------------------------------------------------------------------

    def _command(self, command: Command, in_capsule_bytes: int) -> None:
        self.commands += 1
        if self._flow_control:
            self._sq_head = (self._sq_head + 1) % self._entries
        controller = self.controller
        if controller is not None:
            controller.heard = True
            if self.qid and not in_capsule_bytes and command.opcode == _READ:
                self._read(command)
                return
        if in_capsule_bytes:
            self._in_capsule = command  # runs when its data is here
        elif controller is None:
            # Only Connect may come first, and its data must be in its capsule. Base §6.3.
            self._respond(command.cid, Status.COMMAND_SEQUENCE_ERROR | DNR)
        elif command.opcode == spec.FABRICS_OPCODE:
            self._admin(
                command, controller.fabrics(command) if not self.qid else AdminReply(Status.INVALID_FIELD | DNR)
            )
        elif not self.qid:
            self._admin(command, controller.admin(command))
        elif command.opcode == _WRITE:
            self._start_write(command)
        elif command.opcode == _FLUSH:
            self._respond(command.cid, self._flush(command.nsid))
        else:
            self._respond(command.cid, Status.INVALID_OPCODE | DNR)

    def _respond(self, cid: int, status: int, result: int = 0) -> None:
        self._stream.send([self._conn.send_response(cid, status, result=result, sq_head=self._sq_head)])

    def _in_capsule_data(self, length_bytes: int) -> None:
        """The data of the command that came just before."""
        command, self._in_capsule = self._in_capsule, None
        assert command is not None, "in-capsule data without a command"
        is_connect = command.opcode == spec.FABRICS_OPCODE and command.fabrics_type == FabricsType.CONNECT
        if self.controller is None and is_connect and length_bytes == spec.CONNECT_DATA.size_bytes:
            raw = memoryview(bytearray(length_bytes))
            self._stream.receive(raw)
            self._connect(command, ConnectData.from_bytes(raw))
            return
        if self.controller is not None and self.qid and command.opcode == _WRITE:
            self._write_in_capsule(command, length_bytes)
            return
        self._drain()
        if self.controller is None:
            status = Status.INVALID_FIELD if is_connect else Status.COMMAND_SEQUENCE_ERROR
        else:
            status = Status.COMMAND_SEQUENCE_ERROR if is_connect else Status.INVALID_FIELD
        self._respond(command.cid, status | DNR)

    def _connect(self, command: Command, data: ConnectData) -> None:
        qid, entries = command.cdw10 >> 16, (command.cdw11 & 0xFFFF) + 1
        status, result = self._server.associate(self, command, data)
        if status == Status.SUCCESS:
            self.qid, self._entries = qid, entries
            self._flow_control = not command.cdw11 >> 16 & spec.ConnectAttribute.DISABLE_SQ_FLOW_CONTROL
            self._sq_head = 1 % entries if self._flow_control else 0xFFFF
            if qid:
                self._conn.in_capsule_limit_bytes = self._limits.in_capsule_bytes
            self._stream.set_timeout(self._limits.io_timeout_s)
        self._respond(command.cid, status, result)

    def _admin(self, command: Command, reply: AdminReply) -> None:
        if reply.held:
            return
        if reply.reset:
            assert self.controller is not None, "a reset without a controller"
            self._server.close_io_queues(self.controller)
        if reply.data is None or reply.status:
            self._respond(command.cid, reply.status, reply.result)
        else:
            self._send_read(command.cid, reply.data)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _enter(self, namespace: Namespace) -> bool:
        """From here on this thread may touch the namespace's media, unless it is being taken away.

        Set first, looked second: whoever takes it away from all or from this host does that first and looks at
        `active` second.
        """
        assert self.controller is not None, "I/O without a controller"
        self.serial += 1
        self.active = namespace
        if namespace.visible_to(self.controller.host.nqn):
            return True
        self.active = None
        return False

    def _tally(self, volume: Volume) -> IoTally:
        tally = self._tallies.get(volume)
        if tally is None:
            tally = self._tallies[volume] = volume.open_tally()
        return tally

    def _check(self, command: Command) -> tuple[int, Namespace | None]:
        """Judge a Read or Write by everything but grants."""
        controller = self.controller
        assert controller is not None, "I/O without a controller"
        namespace = controller.subsystem.namespace(command.nsid, controller.host.nqn)
        if namespace is None:
            return Status.INVALID_NAMESPACE | DNR, None
        if not controller.enabled:
            return Status.COMMAND_SEQUENCE_ERROR | DNR, None
        count = command.block_count
        length_bytes = count << _LBA_SHIFT
        if length_bytes > self._limits.max_command_bytes:
            return Status.INVALID_FIELD | DNR, None
        if command.slba + count > namespace.volume.lba_count:
            return Status.LBA_OUT_OF_RANGE | DNR, None
        if command.sgl_length_bytes < length_bytes:
            return Status.DATA_SGL_LENGTH_INVALID | DNR, None
        return Status.SUCCESS, namespace

    def _read(self, command: Command) -> None:
        status, namespace = self._check(command)
        if namespace is None:
            self._respond(command.cid, status)
            return
        if command.sgl_kind != spec.SGL_TRANSPORT_DATA_BLOCK:
            self._respond(command.cid, Status.SGL_DESCRIPTOR_TYPE_INVALID | DNR)
            return
        if not self._enter(namespace):
            self._respond(command.cid, Status.INVALID_NAMESPACE | DNR)
            return
        started_ns = time.monotonic_ns()
        try:
            volume = namespace.volume
            offset_bytes = command.slba << _LBA_SHIFT
            length_bytes = command.block_count << _LBA_SHIFT
            if volume.read_view is not None:
                self._count_read(volume, length_bytes)
                self._send_read(command.cid, volume.read_view[offset_bytes : offset_bytes + length_bytes])
            else:
                self._read_in_chunks(command.cid, volume, offset_bytes, length_bytes)
            self._tally(volume).read_ns += time.monotonic_ns() - started_ns
        finally:
            self.active = None

    def _send_read(self, cid: int, data: Buffer, offset_bytes: int = 0, *, last: bool = True) -> None:
        """Data to the host, and with its last byte the completion.

        By the SUCCESS flag where the host gave up SQ flow control (TCP §3.6.2.9), else by a response capsule in the
        same call.
        """
        if self._flow_control or not last:
            pieces = [self._conn.send_c2h_data(cid, len(data), offset_bytes=offset_bytes, last=last), data]
            if last:
                pieces.append(self._conn.send_response(cid, sq_head=self._sq_head))
        else:
            pieces = [self._conn.send_c2h_data(cid, len(data), offset_bytes=offset_bytes, success=True), data]
        self._stream.send(pieces)

    def _count_read(self, volume: Volume, length_bytes: int) -> None:
        # Before the answer, so that a host that has it finds it counted.
        tally = self._tally(volume)
        tally.reads += 1
        tally.bytes_read += length_bytes

    def _read_in_chunks(self, cid: int, volume: Volume, offset_bytes: int, length_bytes: int) -> None:
        """Disk and socket in turn, a PDU for each chunk, so that an error of the drive can still be told."""
        if self._read_buffer is None:
            self._read_buffer = self._buffer()
        done = 0
        while done < length_bytes:
            chunk = self._read_buffer[: min(self._limits.chunk_bytes, length_bytes - done)]
            try:
                volume.read_into(chunk, offset_bytes + done)
            except OSError as error:
                log.error("%s: read of %d bytes at %d: %s", volume.name, len(chunk), offset_bytes + done, error)
                self._respond(cid, Status.UNRECOVERED_READ_ERROR)
                return
            last = done + len(chunk) == length_bytes
            if last:
                self._count_read(volume, length_bytes)
            self._send_read(cid, chunk, done, last=last)
            done += len(chunk)

    # --- writing ----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Throw the current payload away."""
        scratch = self._buffer()
        self._stream.drain(scratch)
        self._spare.append(scratch)

    def _buffer(self) -> memoryview:
        if not self._spare:
            self._spare = aligned_buffers(self._limits.chunk_bytes)
        return self._spare.pop()

    def _check_write(self, command: Command) -> tuple[int, Namespace | None]:
        status, namespace = self._check(command)
        if namespace is not None:
            if command.cid in self._writes or any(one.cid == command.cid for one in self._waiting):
                return Status.COMMAND_ID_CONFLICT | DNR, None
            # Refused early, before any data moves; what counts is the check at the write itself, in `_store`.
            if not self._may_write(namespace, command.slba, command.block_count):
                return _ACCESS_DENIED, None
        return status, namespace

    def _may_write(self, namespace: Namespace, slba: int, nlb: int) -> bool:
        volume = namespace.volume
        assert self.controller is not None, "a write without a controller"
        if volume.readonly:
            return False
        return not volume.fenced or self._server.grants.covers(volume.name, self.controller.host, slba, nlb)

    def _write_in_capsule(self, command: Command, length_bytes: int) -> None:
        status, namespace = self._check_write(command)
        if namespace is not None and length_bytes != command.block_count << _LBA_SHIFT:
            status, namespace = Status.DATA_SGL_LENGTH_INVALID | DNR, None
        if namespace is None:
            self._drain()
        else:
            buffer = self._buffer()
            self._stream.receive(buffer[:length_bytes])
            status = self._store(namespace, command.slba, buffer[:length_bytes])
            self._spare.append(buffer)
            if status == Status.SUCCESS:
                self._count_write(namespace.volume, length_bytes)
        self._respond(command.cid, status)

    def _start_write(self, command: Command) -> None:
        status, namespace = self._check_write(command)
        if namespace is not None and command.sgl_kind != spec.SGL_TRANSPORT_DATA_BLOCK:
            status, namespace = Status.SGL_DESCRIPTOR_TYPE_INVALID | DNR, None
        if namespace is None:
            self._respond(command.cid, status)
            return
        if len(self._writes) + len(self._waiting) >= self._entries:
            raise PduError(
                "more commands than the queue has entries",
                fatal_error=FatalError.LIMIT_EXCEEDED,
                termination=self._conn.send_term(FatalError.LIMIT_EXCEEDED),
            )
        self._waiting.append(_OpenWrite(command.cid, namespace, command.slba, command.block_count << _LBA_SHIFT))
        self._ask_for_data()

    def _ask_for_data(self) -> None:
        """Open R2Ts as long as there is a buffer for what they bring."""
        pieces: list[Buffer] = []
        while self._waiting and len(self._writes) < self._limits.open_writes:
            write = self._waiting.popleft()
            write.buffer = self._buffer()
            self._writes[write.cid] = write
            pieces.append(self._conn.send_r2t(write.cid, write.cid, 0, write.length_bytes))
        if pieces:
            self._stream.send(pieces)

    def _write_data(self, write: _OpenWrite) -> None:
        """Data of one H2CData PDU: into the buffer, and to media whenever a chunk is whole."""
        chunk_bytes = self._limits.chunk_bytes
        while self._conn.payload_remaining:
            room = min(chunk_bytes - write.filled_bytes, self._conn.payload_remaining)
            self._stream.receive(write.buffer[write.filled_bytes : write.filled_bytes + room])
            write.filled_bytes += room
            whole = write.at_bytes + write.filled_bytes == write.length_bytes
            if whole or write.filled_bytes == chunk_bytes:
                if write.status == Status.SUCCESS:
                    slba = write.slba + (write.at_bytes >> _LBA_SHIFT)
                    write.status = self._store(write.namespace, slba, write.buffer[: write.filled_bytes])
                write.at_bytes += write.filled_bytes
                write.filled_bytes = 0
        if write.at_bytes == write.length_bytes:
            del self._writes[write.cid]
            self._spare.append(write.buffer)
            if write.status == Status.SUCCESS:
                self._count_write(write.namespace.volume, write.length_bytes)
            self._respond(write.cid, write.status)
            self._ask_for_data()

    def _store(self, namespace: Namespace, slba: int, data: memoryview) -> int:
        """Write to media, if at this moment this host may. Returns the status."""
        volume = namespace.volume
        assert self.controller is not None, "a write without a controller"
        if not self._enter(namespace):
            return Status.INVALID_NAMESPACE | DNR
        grants = self._server.grants
        held = None
        try:
            if volume.fenced:
                held = grants.begin_write(volume.name, self.controller.host, slba, len(data) >> _LBA_SHIFT)
                if held is None:
                    return _ACCESS_DENIED
            started_ns = time.monotonic_ns()
            volume.write(data, slba << _LBA_SHIFT)
            self._tally(volume).write_ns += time.monotonic_ns() - started_ns
        except OSError as error:
            log.error("%s: write of %d bytes at LBA %d: %s", volume.name, len(data), slba, error)
            return _MEDIA_STATUS.get(error.errno or 0, int(Status.WRITE_FAULT))
        finally:
            if held is not None:
                grants.end_write(held)
            self.active = None
        return Status.SUCCESS

    def _count_write(self, volume: Volume, length_bytes: int) -> None:
        tally = self._tally(volume)
        tally.writes += 1
        tally.bytes_written += length_bytes

    def _flush(self, nsid: int) -> int:
        controller = self.controller
        assert controller is not None, "I/O without a controller"
        if nsid == _ALL_NAMESPACES:
            namespaces = controller.subsystem.visible(controller.host.nqn)
        else:
            found = controller.subsystem.namespace(nsid, controller.host.nqn)
            if found is None:
                return Status.INVALID_NAMESPACE | DNR
            namespaces = [found]
        for namespace in namespaces:
            if not self._enter(namespace):
                continue
            try:
                namespace.volume.flush()
            except OSError as error:
                log.error("%s: flush: %s", namespace.volume.name, error)
                return Status.WRITE_FAULT
            finally:
                self.active = None
        return Status.SUCCESS
