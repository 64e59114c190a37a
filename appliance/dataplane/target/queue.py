"""One queue: a transport connection and the thread that serves it.

The thread does one thing after the other: it reads a header, runs the command, sends the answer. A slow peer therefore
holds up nobody but itself; what it can hold is this thread and `TargetLimits.open_writes` + 1 buffers. All calls that
take time (sockets, files) give up the interpreter's lock.
"""

from __future__ import annotations

import logging
import socket
import time
from threading import Event as Flag
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final

from forebay.appliance.dataplane.target.controller import AdminReply, Controller
from forebay.appliance.dataplane.target.io_commands import IoCommands
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.proof import Proof, is_proof
from forebay.appliance.dataplane.target.stream import NotProven, PeerLost, Stream
from forebay.appliance.dataplane.target.subsystems import ListenAddress, Namespace
from forebay.nvmetcp import spec
from forebay.nvmetcp.authentication import MAX_MESSAGE_BYTES
from forebay.nvmetcp.command import Command, ConnectData
from forebay.nvmetcp.connection import MAX_HEADER_BYTES, Buffer, Connection
from forebay.nvmetcp.events import CommandReceived, DataStart, Event, ICReqReceived, TermReceived
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import DNR, FabricsType, IoOpcode, Status
from forebay.nvmetcp.states import Role

if TYPE_CHECKING:
    from forebay.appliance.dataplane.target.server import Server

__all__ = ["Queue"]

log = logging.getLogger(__name__)

_READ: Final = int(IoOpcode.READ)


class Queue:
    """A queue from accept to close. `start` it; `cut` ends it from any thread; `ended` is set when it has ended."""

    def __init__(
        self,
        server: Server,
        sock: socket.socket,
        listener: ListenAddress,
        peer: str,
        limits: TargetLimits,
        *,
        refused: bool = False,
    ) -> None:
        self.listener = listener
        self.peer = peer
        self.refused = refused
        """It is one too many: its Connect is answered so, and that is its end."""
        self.accepted_s = time.monotonic()
        self.controller: Controller | None = None
        self.qid = 0
        self.proof: Proof | None = None
        """What its host has to do after Connect, if it has to (set with `controller`)."""
        self.ready = False
        """It takes commands: it is connected, and its host has proven who it is, if it has to."""
        self.ended = Flag()
        self.active: Namespace | None = None
        """The namespace whose media this thread may be touching; see `Server.quiesce`."""
        self.serial = 0
        """Counts up with each command that set `active`, so that another thread can tell one from the next."""
        self.commands = 0
        self._server = server
        self._limits = limits
        self._conn = Connection(
            Role.CONTROLLER,
            max_h2c_data_bytes=limits.max_h2c_data_bytes,
            header_digest=bool(limits.digests & 1),
            data_digest=bool(limits.digests & 2),
        )
        self._stream = Stream(sock, self._conn)
        self._io = IoCommands(self, self._stream, limits, server.grants, server.buffers)
        self._sending = Lock()
        """Of an admin queue, where other threads send events between this thread's answers."""
        self._over = False
        """A termination PDU is the last thing that is sent. Guarded by `_sending`."""
        self._flow_control = True
        self._entries = limits.max_queue_depth
        self._sq_head = 0
        self._in_capsule: Command | None = None

    @property
    def local_address(self) -> str:
        """The address of this end, which is where the host found the target."""
        return self._stream.local_address

    def overdue(self, now_s: float) -> bool:
        """Whether it should take commands by now, and does not."""
        limits = self._limits
        limit_s = limits.connect_timeout_s if self.controller is None else limits.proof_timeout_s
        return not self.ready and now_s - self.accepted_s > limit_s

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
            with self._sending:
                self._over = True
            self._stream.terminate(error.termination)
        except NotProven:
            self.ready = False
            self._stream.linger()
        except (PeerLost, OSError) as error:
            log.info("%s: %s", self.peer, error)
        except Exception:
            # A fault of ours in one queue must not end the process that serves all others.
            log.exception("%s: the queue failed", self.peer)
        finally:
            self._io.close()
            self._server.forget(self)
            self._stream.close()
            self.ended.set()

    def _serve(self) -> None:
        conn, receive = self._conn, self._stream.receive_header
        header = memoryview(bytearray(MAX_HEADER_BYTES))
        while True:
            try:
                count = receive(header, conn.bytes_wanted)
            except BlockingIOError:
                if not self.ready or not conn.between_pdus:
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
                return self.refused
            self._io.data(event.tag)
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
        if self.ready:
            assert controller is not None, "a queue that is ready has a controller"
            controller.heard = True
            if self.qid and not in_capsule_bytes and command.opcode == _READ:
                self._io.read(command)
                return
        if in_capsule_bytes:
            self._in_capsule = command  # runs when its data is here
        elif controller is None:
            # Only Connect may come first, and its data must be in its capsule. Base §6.3.
            self.respond(command, Status.COMMAND_SEQUENCE_ERROR | DNR)
        elif self.proof is not None and is_proof(command):
            if command.fabrics_type == FabricsType.AUTHENTICATION_RECEIVE:
                self.proof.receive(command)
            else:  # what it sends must be in its capsule
                self.respond(command, Status.INVALID_FIELD | DNR)
        elif not self.ready:
            self.respond(command, Status.AUTHENTICATION_REQUIRED | DNR)
        elif command.opcode == spec.FABRICS_OPCODE:
            self._admin(
                command, controller.fabrics(command) if not self.qid else AdminReply(Status.INVALID_FIELD | DNR)
            )
        elif not self.qid:
            self._admin(command, controller.admin(command))
        else:
            self._io.start(command)

    def respond(self, command: Command, status: int, result: int = 0) -> None:
        """Complete a command; what failed is noted for the Error Information log."""
        if status and self.controller is not None:
            self.controller.note_error(self.qid, command, status)
        self._send([self._conn.send_response(command.cid, status, result=result, sq_head=self._sq_head)])

    def send_data(self, cid: int, data: Buffer, offset_bytes: int = 0, *, last: bool = True) -> None:
        """Data to the host, and with its last byte the completion.

        By the SUCCESS flag where the host gave up SQ flow control (TCP §3.6.2.9), else by a response capsule in the
        same call.
        """
        conn = self._conn
        success = last and not self._flow_control
        pieces = [conn.send_c2h_data(cid, len(data), offset_bytes=offset_bytes, last=last, success=success), data]
        if conn.data_digest:
            pieces += conn.data_digest_of(data)
        if last and not success:
            pieces.append(conn.send_response(cid, sq_head=self._sq_head))
        self._send(pieces)

    def _send(self, pieces: list[Buffer]) -> None:
        if self.qid:
            self._stream.send(pieces)
            return
        with self._sending:
            self._stream.send(pieces)
        self.tell_events()

    def tell_events(self) -> None:
        """Complete event requests of an admin queue for which there is something to tell; from any thread.

        Whoever finds the lock taken leaves it to the holder, who looks again after its release. A host that takes
        nothing must not hold up another thread: if the socket is full the connection ends.
        """
        controller = self.controller
        while (
            controller is not None
            and not self._over
            and controller.events.ready()
            and self._sending.acquire(blocking=False)
        ):
            try:
                found = controller.events.take() if not self._over else None
                if found is not None:
                    cid, result = found
                    done = self._conn.response(cid, result=result, sq_head=self._sq_head)
                    if not self._stream.send_now([done]):
                        self._stream.cut()
            finally:
                self._sending.release()

    def _in_capsule_data(self, length_bytes: int) -> None:
        """The data of the command that came just before."""
        command, self._in_capsule = self._in_capsule, None
        assert command is not None, "in-capsule data without a command"
        is_connect = command.opcode == spec.FABRICS_OPCODE and command.fabrics_type == FabricsType.CONNECT
        if self.controller is None and is_connect and length_bytes == spec.CONNECT_DATA.size_bytes:
            raw = memoryview(bytearray(length_bytes))
            if self._stream.receive(raw):
                self._connect(command, ConnectData.from_bytes(raw))
            else:
                self.respond(command, Status.TRANSIENT_TRANSPORT_ERROR)
            return
        is_send = is_proof(command) and command.fabrics_type == FabricsType.AUTHENTICATION_SEND
        if self.proof is not None and is_send and length_bytes <= MAX_MESSAGE_BYTES:
            raw = memoryview(bytearray(length_bytes))
            if self._stream.receive(raw):
                self.proof.send(command, bytes(raw))
            else:
                self.respond(command, Status.TRANSIENT_TRANSPORT_ERROR)
            return
        if self.ready and self.qid and self._io.in_capsule(command, length_bytes):
            return
        self._io.drain()
        if self.controller is None:
            status = Status.INVALID_FIELD if is_connect else Status.COMMAND_SEQUENCE_ERROR
        elif not self.ready:
            status = Status.INVALID_FIELD if is_send else Status.AUTHENTICATION_REQUIRED
        else:
            status = Status.COMMAND_SEQUENCE_ERROR if is_connect else Status.INVALID_FIELD
        self.respond(command, status | DNR)

    def _connect(self, command: Command, data: ConnectData) -> None:
        qid, entries = command.cdw10 >> 16, (command.cdw11 & 0xFFFF) + 1
        status, result = self._server.associate(self, command, data)
        if status == Status.SUCCESS:
            self.qid, self._entries = qid, entries
            self._flow_control = not command.cdw11 >> 16 & spec.ConnectAttribute.DISABLE_SQ_FLOW_CONTROL
            self._sq_head = 1 % entries if self._flow_control else 0xFFFF
            if self.proof is None:
                self.proven()
            else:
                self._stream.set_timeout(self._limits.proof_timeout_s)
        self.respond(command, status, result)

    def proven(self) -> None:
        """From now on the queue takes commands. Raises `PeerLost` where it came too late."""
        assert self.controller is not None, "a connected queue without a controller"
        if not self._server.claim(self):
            raise PeerLost("the controller ended, or another queue has the id")
        if self.qid:
            self._conn.in_capsule_limit_bytes = self._limits.in_capsule_bytes
            self._io.serve(self.controller, self._entries)
        self._stream.set_timeout(self._limits.io_timeout_s)
        self.ready = True

    def _admin(self, command: Command, reply: AdminReply) -> None:
        if reply.held:
            self.tell_events()
            return
        if reply.reset:
            assert self.controller is not None, "a reset without a controller"
            self._server.close_io_queues(self.controller)
        if reply.aborted is not None:
            self.respond(command._replace(cid=reply.aborted), Status.ABORTED_BY_REQUEST)
        if reply.data is None or reply.status:
            self.respond(command, reply.status, reply.result)
        else:
            self.send_data(command.cid, reply.data)
