"""I/O commands of one queue: what they may touch, and how their bytes move between socket and media."""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from forebay.appliance.dataplane.target.buffers import BufferPool
from forebay.appliance.dataplane.target.controller import Controller
from forebay.appliance.dataplane.target.identify import MAX_DATASET_RANGES
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.stream import Stream
from forebay.appliance.dataplane.target.subsystems import Namespace
from forebay.appliance.dataplane.target.volume import IoTally, Volume
from forebay.ids import LBA_BYTES
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.connection import Buffer
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import DNR, FatalError, IoOpcode, Status

if TYPE_CHECKING:
    from forebay.appliance.dataplane.target.grants import GrantTable
    from forebay.appliance.dataplane.target.queue import Queue

__all__ = ["IoCommands"]

log = logging.getLogger(__name__)

_WRITE: Final = int(IoOpcode.WRITE)
_FLUSH: Final = int(IoOpcode.FLUSH)
_WRITE_ZEROES: Final = int(IoOpcode.WRITE_ZEROES)
_DATASET_MANAGEMENT: Final = int(IoOpcode.DATASET_MANAGEMENT)
_ALL_NAMESPACES: Final = 0xFFFFFFFF
_LBA_SHIFT: Final = LBA_BYTES.bit_length() - 1
_FORCE_UNIT_ACCESS: Final = 1 << 30
"""FUA, dword 12 of Write and Write Zeroes. NVM §3.2.6."""
_DEALLOCATE: Final = 1 << 25
"""DEAC, dword 12 of Write Zeroes. NVM §3.2.8."""
_DATASET_DEALLOCATE: Final = 0x4
"""AD, dword 11 of Dataset Management. NVM §3.2.3."""
_MAX_DATASET_BYTES: Final = MAX_DATASET_RANGES * spec.DATASET_RANGE.size
_ACCESS_DENIED: Final = Status.ACCESS_DENIED | DNR
_NO_SPACE: Final = Status.CAPACITY_EXCEEDED | DNR
"""Space that was promised and is not there will not come back by trying again."""
_MEDIA_STATUS: Final[dict[int, int]] = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
}


class _OpenWrite:
    """A command whose data comes by R2T: at most one chunk of it is held at a time."""

    __slots__ = ("at_bytes", "buffer", "command", "filled_bytes", "length_bytes", "namespace", "status")

    def __init__(self, command: Command, namespace: Namespace, length_bytes: int) -> None:
        self.command = command
        self.namespace = namespace
        self.length_bytes = length_bytes
        self.at_bytes = 0  # of the command: where the buffer's first byte belongs
        self.filled_bytes = 0
        self.status: int = Status.SUCCESS
        self.buffer = memoryview(b"")


class IoCommands:
    """Runs a queue's I/O commands, in its thread. `serve` a controller once Connect has said whose queue this is."""

    def __init__(
        self, queue: Queue, stream: Stream, limits: TargetLimits, grants: GrantTable, buffers: BufferPool
    ) -> None:
        self._queue = queue
        self._stream = stream
        self._conn = stream.conn
        self._limits = limits
        self._grants = grants
        self._buffers = buffers
        self._controller: Controller | None = None
        self._entries = 0
        self._writes: dict[int, _OpenWrite] = {}  # by cid, which is also the R2T's tag
        self._waiting: deque[_OpenWrite] = deque()
        self._tallies: dict[Volume, IoTally] = {}

    def serve(self, controller: Controller, entries: int) -> None:
        """Commands are of this controller from here on; the queue has so many entries."""
        self._controller = controller
        self._entries = entries

    def close(self) -> None:
        """The queue ends; what it counted stays, and its buffers go back."""
        for write in self._writes.values():
            self._buffers.give(write.buffer)
        self._writes.clear()
        for volume, tally in self._tallies.items():
            volume.close_tally(tally)

    # --- judging ----------------------------------------------------------------------------------------------------

    def _namespace(self, nsid: int) -> tuple[int, Namespace | None]:
        controller = self._controller
        assert controller is not None, "I/O without a controller"
        namespace = controller.subsystem.namespace(nsid, controller.host.nqn)
        if namespace is None:
            return Status.INVALID_NAMESPACE | DNR, None
        if not controller.enabled:
            return Status.COMMAND_SEQUENCE_ERROR | DNR, None
        return Status.SUCCESS, namespace

    def _check(self, command: Command) -> tuple[int, Namespace | None]:
        """Judge a Read or Write by everything but grants."""
        status, namespace = self._namespace(command.nsid)
        if namespace is None:
            return status, None
        count = command.block_count
        length_bytes = count << _LBA_SHIFT
        if length_bytes > self._limits.max_command_bytes:
            return Status.INVALID_FIELD | DNR, None
        if command.slba + count > namespace.volume.lba_count:
            return Status.LBA_OUT_OF_RANGE | DNR, None
        if command.sgl_length_bytes < length_bytes:
            return Status.DATA_SGL_LENGTH_INVALID | DNR, None
        return Status.SUCCESS, namespace

    def _check_write(self, command: Command) -> tuple[int, Namespace | None]:
        """Judge a Write or Dataset Management before any data of it moves; its namespace if it may go on."""
        if command.opcode == _DATASET_MANAGEMENT:
            status, namespace = self._check_dataset_management(command)
        else:
            status, namespace = self._check(command)
            # Refused early, before any data moves; what counts is the check at the write itself, in `_store`.
            if namespace is not None and not self._may_write(namespace, command):
                return _ACCESS_DENIED, None
        if namespace is not None and (
            command.cid in self._writes or any(one.command.cid == command.cid for one in self._waiting)
        ):
            return Status.COMMAND_ID_CONFLICT | DNR, None
        return status, namespace

    def _check_dataset_management(self, command: Command) -> tuple[int, Namespace | None]:
        status, namespace = self._namespace(command.nsid)
        if namespace is not None:
            if not namespace.volume.deallocates:
                return _ACCESS_DENIED, None
            if not _dataset_bytes(command) <= command.sgl_length_bytes <= _MAX_DATASET_BYTES:
                return Status.DATA_SGL_LENGTH_INVALID | DNR, None
        return status, namespace

    def _may_write(self, namespace: Namespace, command: Command) -> bool:
        volume = namespace.volume
        assert self._controller is not None, "a write without a controller"
        if volume.readonly:
            return False
        where = (volume.name, self._controller.host, command.slba, command.block_count)
        return not volume.fenced or self._grants.covers(*where, tag=command.reference_tag)

    def _enter(self, namespace: Namespace) -> bool:
        """From here on this thread may touch the namespace's media, unless it is being taken away.

        Set first, looked second: whoever takes it away from all or from this host does that first and looks at
        `Queue.active` second.
        """
        assert self._controller is not None, "I/O without a controller"
        self._queue.serial += 1
        self._queue.active = namespace
        if namespace.visible_to(self._controller.host.nqn):
            return True
        self._queue.active = None
        return False

    def _tally(self, volume: Volume) -> IoTally:
        tally = self._tallies.get(volume)
        if tally is None:
            tally = self._tallies[volume] = volume.open_tally()
        return tally

    def _failed(self, volume: Volume, what: str, error: OSError, otherwise: int) -> int:
        log.error("%s: %s: %s", volume.name, what, error)
        status = _MEDIA_STATUS.get(error.errno or 0, otherwise)
        tally = self._tally(volume)
        tally.errors += 1
        tally.no_space += status == _NO_SPACE
        return status

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, command: Command) -> None:
        """Run a Read."""
        status, namespace = self._check(command)
        if namespace is None:
            self._queue.respond(command, status)
            return
        if command.sgl_kind != spec.SGL_TRANSPORT_DATA_BLOCK:
            self._queue.respond(command, Status.SGL_DESCRIPTOR_TYPE_INVALID | DNR)
            return
        if not self._enter(namespace):
            self._queue.respond(command, Status.INVALID_NAMESPACE | DNR)
            return
        started_ns = time.monotonic_ns()
        try:
            volume = namespace.volume
            offset_bytes = command.slba << _LBA_SHIFT
            length_bytes = command.block_count << _LBA_SHIFT
            view = volume.read_view
            if view is None:
                self._read_in_chunks(command, volume, offset_bytes, length_bytes)
            elif self._conn.data_digest:
                self._read_view_in_chunks(command.cid, view[offset_bytes : offset_bytes + length_bytes])
                self._count_read(volume, length_bytes)
            else:
                self._count_read(volume, length_bytes)
                self._queue.send_data(command.cid, view[offset_bytes : offset_bytes + length_bytes])
            self._tally(volume).read_ns += time.monotonic_ns() - started_ns
        finally:
            self._queue.active = None

    def _count_read(self, volume: Volume, length_bytes: int) -> None:
        # Before the answer, so that a host that has it finds it counted.
        tally = self._tally(volume)
        tally.reads += 1
        tally.bytes_read += length_bytes

    def _read_view_in_chunks(self, cid: int, view: memoryview) -> None:
        """A PDU for each chunk, so that what was digested is sent out of the cache."""
        chunk_bytes = self._limits.chunk_bytes
        for at in range(0, len(view), chunk_bytes):
            chunk = view[at : at + chunk_bytes]
            self._queue.send_data(cid, chunk, at, last=at + len(chunk) == len(view))

    def _read_in_chunks(self, command: Command, volume: Volume, offset_bytes: int, length_bytes: int) -> None:
        """Disk and socket in turn, a PDU for each chunk, so that an error of the drive can still be told."""
        buffer = self._buffers.take()
        try:
            self._read_by(buffer, command, volume, offset_bytes, length_bytes)
        finally:
            self._buffers.give(buffer)

    def _read_by(
        self, buffer: memoryview, command: Command, volume: Volume, offset_bytes: int, length_bytes: int
    ) -> None:
        done = 0
        while done < length_bytes:
            chunk = buffer[: min(self._limits.chunk_bytes, length_bytes - done)]
            try:
                volume.read_into(chunk, offset_bytes + done)
            except OSError as error:
                what = f"read of {len(chunk)} bytes at {offset_bytes + done}"
                self._failed(volume, what, error, Status.UNRECOVERED_READ_ERROR)
                self._queue.respond(command, Status.UNRECOVERED_READ_ERROR)
                return
            last = done + len(chunk) == length_bytes
            if last:
                self._count_read(volume, length_bytes)
            self._queue.send_data(command.cid, chunk, done, last=last)
            done += len(chunk)

    # --- commands with data -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Throw the current payload away."""
        scratch = self._buffers.take()
        try:
            self._stream.drain(scratch)
        finally:
            self._buffers.give(scratch)

    def in_capsule(self, command: Command, length_bytes: int) -> bool:
        """Run a command whose data is in its capsule; False, with nothing done, if it is none that takes data."""
        if command.opcode not in (_WRITE, _DATASET_MANAGEMENT):
            return False
        status, namespace = self._check_write(command)
        if namespace is not None:
            wanted = command.block_count << _LBA_SHIFT if command.opcode == _WRITE else _dataset_bytes(command)
            if length_bytes < wanted or (command.opcode == _WRITE and length_bytes != wanted):
                status, namespace = Status.DATA_SGL_LENGTH_INVALID | DNR, None
        if namespace is None:
            self.drain()
        else:
            buffer = self._buffers.take()
            try:
                if self._stream.receive(buffer[:length_bytes]):
                    status = self._consume(command, namespace, 0, buffer[:length_bytes])
                    if status == Status.SUCCESS:
                        status = self._finish(command, namespace)
                else:
                    status = Status.TRANSIENT_TRANSPORT_ERROR
            finally:
                self._buffers.give(buffer)
        self._queue.respond(command, status)
        return True

    def start(self, command: Command) -> None:
        """Run a command that brought no data: all but Read."""
        if command.opcode == _FLUSH:
            self._queue.respond(command, self._flush(command.nsid))
        elif command.opcode == _WRITE_ZEROES:
            self._queue.respond(command, self._write_zeroes(command))
        elif command.opcode in (_WRITE, _DATASET_MANAGEMENT):
            self._start_write(command)
        else:
            self._queue.respond(command, Status.INVALID_OPCODE | DNR)

    def _start_write(self, command: Command) -> None:
        status, namespace = self._check_write(command)
        if namespace is not None and command.sgl_kind != spec.SGL_TRANSPORT_DATA_BLOCK:
            status, namespace = Status.SGL_DESCRIPTOR_TYPE_INVALID | DNR, None
        if namespace is None:
            self._queue.respond(command, status)
            return
        if len(self._writes) + len(self._waiting) >= self._entries:
            raise PduError(
                "more commands than the queue has entries",
                fatal_error=FatalError.LIMIT_EXCEEDED,
                termination=self._conn.send_term(FatalError.LIMIT_EXCEEDED),
            )
        # Of Dataset Management all that the host has: Linux has always room for the longest list.
        length_bytes = command.block_count << _LBA_SHIFT if command.opcode == _WRITE else command.sgl_length_bytes
        self._waiting.append(_OpenWrite(command, namespace, length_bytes))
        self._ask_for_data()

    def _ask_for_data(self) -> None:
        """Open R2Ts as long as there is a buffer for what they bring."""
        pieces: list[Buffer] = []
        while self._waiting and len(self._writes) < self._limits.open_writes:
            # The first is the queue's own; others are a help to those that write much, as long as memory is there.
            buffer = self._buffers.take_more() if self._writes else self._buffers.take()
            if buffer is None:
                break
            write = self._waiting.popleft()
            cid = write.command.cid
            write.buffer = buffer
            self._writes[cid] = write
            pieces.append(self._conn.send_r2t(cid, cid, 0, write.length_bytes))
        if pieces:
            self._stream.send(pieces)

    def data(self, tag: int) -> None:
        """Data of one H2CData PDU: into the buffer, and to media whenever a chunk is whole."""
        write = self._writes[tag]
        chunk_bytes = self._limits.chunk_bytes
        while self._conn.payload_remaining:
            room = min(chunk_bytes - write.filled_bytes, self._conn.payload_remaining)
            if not self._stream.receive(write.buffer[write.filled_bytes : write.filled_bytes + room]):
                write.status = Status.TRANSIENT_TRANSPORT_ERROR
            write.filled_bytes += room
            whole = write.at_bytes + write.filled_bytes == write.length_bytes
            if whole or write.filled_bytes == chunk_bytes:
                if write.status == Status.SUCCESS:
                    data = write.buffer[: write.filled_bytes]
                    write.status = self._consume(write.command, write.namespace, write.at_bytes, data)
                write.at_bytes += write.filled_bytes
                write.filled_bytes = 0
        if write.at_bytes == write.length_bytes:
            del self._writes[tag]
            self._buffers.give(write.buffer)
            if write.status == Status.SUCCESS:
                write.status = self._finish(write.command, write.namespace)
            self._queue.respond(write.command, write.status)
            self._ask_for_data()

    def _consume(self, command: Command, namespace: Namespace, at_bytes: int, data: memoryview) -> int:
        """A chunk of a command's data is here; returns the status so far."""
        if command.opcode == _WRITE:
            return self._store(namespace, command.slba + (at_bytes >> _LBA_SHIFT), data, command.reference_tag)
        return self._dataset_management(command, namespace, data)

    def _finish(self, command: Command, namespace: Namespace) -> int:
        """All data of a command went where it belongs."""
        if command.opcode != _WRITE:
            return Status.SUCCESS
        tally = self._tally(namespace.volume)
        tally.writes += 1
        tally.bytes_written += command.block_count << _LBA_SHIFT
        return self._flush_one(namespace) if command.cdw12 & _FORCE_UNIT_ACCESS else Status.SUCCESS

    # --- media ------------------------------------------------------------------------------------------------------

    def _store(self, namespace: Namespace, slba: int, data: memoryview, tag: int) -> int:
        """Write to media, if at this moment this host may. Returns the status."""
        volume = namespace.volume
        assert self._controller is not None, "a write without a controller"
        if not self._enter(namespace):
            return Status.INVALID_NAMESPACE | DNR
        grants = self._grants
        held = None
        try:
            if volume.fenced:
                where = (volume.name, self._controller.host, slba, len(data) >> _LBA_SHIFT)
                held = grants.begin_write(*where, tag=tag)
                if held is None:
                    return _ACCESS_DENIED
            started_ns = time.monotonic_ns()
            volume.write(data, slba << _LBA_SHIFT)
            self._tally(volume).write_ns += time.monotonic_ns() - started_ns
        except OSError as error:
            status = self._failed(volume, f"write of {len(data)} bytes at LBA {slba}", error, Status.WRITE_FAULT)
            if held is not None and status != _NO_SPACE:
                grants.note_failed(held)
            return status
        finally:
            if held is not None:
                grants.end_write(held)
            self._queue.active = None
        return Status.SUCCESS

    def _clear(self, namespace: Namespace, slba: int, nlb: int, act: Callable[[int, int], None]) -> int:
        """Deallocate or zero a range of a raw volume by `act`, a method of it. Returns the status."""
        volume = namespace.volume
        if not self._enter(namespace):
            return Status.INVALID_NAMESPACE | DNR
        try:
            if not volume.deallocates:
                return _ACCESS_DENIED
            started_ns = time.monotonic_ns()
            act(slba << _LBA_SHIFT, nlb << _LBA_SHIFT)
            tally = self._tally(volume)
            tally.unmaps += 1
            tally.bytes_unmapped += nlb << _LBA_SHIFT
            tally.unmap_ns += time.monotonic_ns() - started_ns
        except OSError as error:
            return self._failed(volume, f"clearing {nlb} LBAs at {slba}", error, Status.WRITE_FAULT)
        finally:
            self._queue.active = None
        return Status.SUCCESS

    def _write_zeroes(self, command: Command) -> int:
        status, namespace = self._namespace(command.nsid)
        if namespace is None:
            return status
        volume, count = namespace.volume, command.block_count
        if not volume.deallocates:
            return _ACCESS_DENIED
        if count << _LBA_SHIFT > self._limits.max_command_bytes:
            return Status.INVALID_FIELD | DNR  # WZSL
        if command.slba + count > volume.lba_count:
            return Status.LBA_OUT_OF_RANGE | DNR
        act = volume.release_region if command.cdw12 & _DEALLOCATE else volume.write_zeroes
        status = self._clear(namespace, command.slba, count, act)
        if status == Status.SUCCESS and command.cdw12 & _FORCE_UNIT_ACCESS:
            return self._flush_one(namespace)
        return status

    def _dataset_management(self, command: Command, namespace: Namespace, data: memoryview) -> int:
        """Deallocate ranges; other attributes are hints, and none is taken. NVM §3.2.3."""
        if not command.cdw11 & _DATASET_DEALLOCATE:
            return Status.SUCCESS
        ranges = [row[1:] for row in spec.DATASET_RANGE.iter_unpack(data[: _dataset_bytes(command)])]
        if any(slba + nlb > namespace.volume.lba_count for nlb, slba in ranges):
            return Status.LBA_OUT_OF_RANGE | DNR
        for nlb, slba in ranges:
            if nlb:
                status = self._clear(namespace, slba, nlb, namespace.volume.release_region)
                if status != Status.SUCCESS:
                    return status
        return Status.SUCCESS

    def _flush(self, nsid: int) -> int:
        controller = self._controller
        assert controller is not None, "I/O without a controller"
        if nsid != _ALL_NAMESPACES:
            status, found = self._namespace(nsid)
            return status if found is None else self._flush_one(found)
        for namespace in controller.subsystem.visible(controller.host.nqn):
            if self._flush_one(namespace) == Status.WRITE_FAULT:  # one that was taken away meanwhile is none of them
                return Status.WRITE_FAULT
        return Status.SUCCESS

    def _flush_one(self, namespace: Namespace) -> int:
        if not self._enter(namespace):
            return Status.INVALID_NAMESPACE | DNR
        try:
            namespace.volume.flush()
        except OSError as error:
            self._failed(namespace.volume, "flush", error, Status.WRITE_FAULT)
            return Status.WRITE_FAULT
        finally:
            self._queue.active = None
        return Status.SUCCESS


def _dataset_bytes(command: Command) -> int:
    """Length of a Dataset Management command's ranges: NR is 0's based."""
    return ((command.cdw10 & 0xFF) + 1) * spec.DATASET_RANGE.size
