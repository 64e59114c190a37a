"""A small NVMe/TCP target in threads, for telling lies to the initiator: on the codec's controller role.

It serves one volume from memory. A `Lie` decides what is sent for a Read or a Write; the default is the truth.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command, ConnectData
from forebay.nvmetcp.connection import Connection
from forebay.nvmetcp.events import CommandReceived, DataChunk, DataEnd, DataStart, ICReqReceived
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import DNR, AdminOpcode, CnsValue, FabricsType, IoOpcode, Property, Status
from forebay.nvmetcp.states import Role

NGUID = bytes(range(16))
NQN = "nqn.2026-11.test:peer"


class Link:
    """One connection as the peer sees it; lies send through it what they like."""

    def __init__(self, peer: "Peer", sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.codec = Connection(
            Role.CONTROLLER,
            in_capsule_bytes=8192,
            max_h2c_data_bytes=peer.max_h2c_data_bytes,
            header_digest=peer.digests,
            data_digest=peer.digests,
        )
        self.queue_id = 0
        self.writes: dict[int, tuple[Command, bytearray]] = {}

    def send(self, *pieces: bytes | memoryview | bytearray) -> None:
        for piece in pieces:
            self.sock.sendall(piece)

    def respond(self, cid: int, status: int = 0, result: int = 0) -> None:
        self.send(self.codec.send_response(cid, status, result=result, sq_id=self.queue_id))

    def send_data(self, cid: int, data: bytes | memoryview, *, pdu_bytes: int | None = None) -> None:
        """All of a command's data, in PDUs of ``pdu_bytes``, the last one with SUCCESS."""
        step = pdu_bytes or len(data)
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            last = at + len(piece) == len(data)
            header = self.codec.send_c2h_data(cid, len(piece), offset_bytes=at, last=last, success=last)
            self.send(header, piece, *self.codec.data_digest_of(piece))

    def run(self) -> None:
        try:
            while data := self.sock.recv(1 << 20):
                for event in self.codec.receive_data(data):
                    self.take(event)
        except (OSError, PduError):
            pass
        finally:
            self.sock.close()

    def take(self, event: object) -> None:
        if isinstance(event, ICReqReceived):
            self.send(*self.codec.send_ic_resp())
        elif isinstance(event, CommandReceived):
            if event.in_capsule_bytes:
                self.writes[event.command.cid] = (event.command, bytearray(event.in_capsule_bytes))
            else:
                self.command(event.command)
        elif isinstance(event, DataStart):
            pass
        elif isinstance(event, DataChunk):
            self.writes[event.cid][1][event.offset_bytes : event.offset_bytes + len(event.data)] = event.data
        elif isinstance(event, DataEnd):
            command, data = self.writes[event.cid]
            if event.last:
                done = event.tag is None or self.next_r2t(command, data)
                if done:
                    del self.writes[event.cid]
                    self.command(command, data)

    def next_r2t(self, command: Command, data: bytearray) -> bool:
        """Ask for the next range of a write; whether there was none left."""
        asked = self.peer.asked.setdefault((id(self), command.cid), 0)
        if asked == len(data):
            del self.peer.asked[id(self), command.cid]
            return True
        take = min(self.peer.r2t_bytes, len(data) - asked)
        self.peer.asked[id(self), command.cid] = asked + take
        self.send(self.codec.send_r2t(command.cid, command.cid, asked, take))
        return False

    def command(self, command: Command, data: bytearray | None = None) -> None:
        if command.opcode == spec.FABRICS_OPCODE:
            self.fabrics(command, data)
        elif self.queue_id == 0:
            self.admin(command)
        elif command.opcode == IoOpcode.READ:
            self.peer.lie(self, command)
        elif command.opcode == IoOpcode.WRITE:
            if data is None:
                self.writes[command.cid] = (command, bytearray(command.block_count * 4096))
                self.next_r2t(*self.writes[command.cid])
            else:
                self.peer.write(self, command, data)
        else:
            self.respond(command.cid, Status.INVALID_OPCODE | DNR)

    def fabrics(self, command: Command, data: bytearray | None) -> None:
        result = 0
        if command.fabrics_type == FabricsType.CONNECT:
            assert data is not None
            wanted = ConnectData.from_bytes(data)
            if self.peer.refuse or wanted.subsystem_nqn != NQN:
                self.respond(command.cid, Status.CONNECT_INVALID_HOST | DNR)
                return
            self.queue_id = command.cdw10 >> 16
            self.peer.connects.append(self.queue_id)
            result = 7
        elif command.fabrics_type == FabricsType.PROPERTY_GET:
            result = {Property.CAP: self.peer.capabilities, Property.CSTS: 1}.get(Property(command.cdw11), 0)
        self.respond(command.cid, 0, result)

    def admin(self, command: Command) -> None:
        if command.opcode == AdminOpcode.IDENTIFY:
            if command.cdw10 == CnsValue.CONTROLLER:
                ioccsz = (64 + self.peer.in_capsule_bytes) // 16
                raw = spec.IDENTIFY_CONTROLLER.pack(cntlid=7, mdts=self.peer.mdts, ioccsz=ioccsz, maxcmd=128)
            elif command.nsid == 1:
                blocks = len(self.peer.volume) // 4096
                raw = spec.IDENTIFY_NAMESPACE.pack(nsze=blocks, nguid=NGUID, lbaf0_lbads=self.peer.lba_shift)
            else:
                raw = bytes(4096)
            self.send_data(command.cid, raw)
        elif command.opcode == AdminOpcode.SET_FEATURES:
            self.respond(command.cid, 0, command.cdw11)
        elif command.opcode == AdminOpcode.KEEP_ALIVE:
            self.peer.keep_alives.release()
            if self.peer.answer_keep_alive:
                self.respond(command.cid)
        else:
            self.respond(command.cid, Status.INVALID_OPCODE | DNR)


def truth(link: Link, command: Command) -> None:
    """What is in the volume, in one PDU with SUCCESS."""
    start = command.slba * 4096
    link.send_data(command.cid, memoryview(link.peer.volume)[start : start + command.block_count * 4096])


def store(link: Link, command: Command, data: bytearray) -> None:
    start = command.slba * 4096
    link.peer.volume[start : start + len(data)] = data
    link.respond(command.cid)


Lie = Callable[[Link, Command], None]


class Peer:
    """The target. Close it, or use it as a context manager."""

    def __init__(self, size_bytes: int = 16 << 20) -> None:
        self.volume = bytearray(size_bytes)
        self.lie: Lie = truth
        self.write: Callable[[Link, Command, bytearray], None] = store
        self.refuse = False
        self.mdts = 0
        self.capabilities = 127 | 1 << 24
        self.in_capsule_bytes = 4096
        self.max_h2c_data_bytes = 256 << 10
        self.r2t_bytes = 1 << 20
        self.lba_shift = 12
        self.digests = True
        self.answer_keep_alive = True
        self.keep_alives = threading.Semaphore(0)
        self.asked: dict[tuple[int, int], int] = {}
        self.connects: list[int] = []
        self.links: list[Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(self, sock)
            self.links.append(link)
            self._spawn(link.run)

    def drop(self) -> None:
        """Close every connection that there is."""
        for link in self.links:
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
        self.links.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(60)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
