"""An NVMe/RDMA target in this process, without RDMA: it moves bytes at the addresses that its host names, by its keys.

It takes the place of `Link`, so that everything above runs where there is no device. What it does badly is up to `lie`.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np

from forebay.checksum import crc32c
from forebay.client import registered
from forebay.client.registered import address_of
from forebay.client.transports.base import DeviceSegment
from forebay.client.transports.controller import Controller, SubsystemAddress
from forebay.client.transports.nvme_rdma import NvmeRdmaTransport
from forebay.client.transports.nvme_rdma_device import Key
from forebay.client.transports.nvme_rdma_link import Closable, Data, Response, Sent
from forebay.client.transports.nvme_rdma_queue import RdmaQueue
from forebay.client.transports.options import NvmeRdmaOptions
from forebay.errors import ConnectionLost
from forebay.ids import HostIdentity
from forebay.nvmerdma import KEYED_SQE, SGLS_KEYED
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command, ConnectData
from forebay.nvmetcp.spec import AdminOpcode, FabricsType, IoOpcode, Property, Status

NQN = "nqn.2026-01.io.forebay:rdma-peer"
NGUID = bytes(range(16))
IN_CAPSULE_BYTES = 8192


@dataclass(eq=False)
class Memory:
    """Staging memory, and the keys that are good for it."""

    size_bytes: int
    address: int = field(init=False)
    view: memoryview = field(init=False)
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.view = memoryview(bytearray(self.size_bytes))
        self.address = address_of(self.view)
        self.key = Key(int.from_bytes(os.urandom(4), "little"), int.from_bytes(os.urandom(4), "little"))


class StandInTensor:
    """Stands in for a tensor on a GPU: host memory, of which no buffer protocol knows."""

    def __init__(self, array: "np.ndarray[Any, np.dtype[np.uint8]]", device: str = "stand-in:0") -> None:
        self.array = array
        self.device = device
        self.shape = array.shape

    def __getitem__(self, part: slice) -> "StandInTensor":
        return StandInTensor(self.array[part], self.device)

    def copy_(self, other: "StandInTensor") -> None:
        self.array[:] = other.array


class StandInGpu:
    """Stands in for `GpuMemory`."""

    def __init__(self, length_bytes: int) -> None:
        self.memory = np.zeros(length_bytes, np.uint8)
        self.address = int(self.memory.__array_interface__["data"][0])
        self.key = Key(1, int.from_bytes(os.urandom(4), "little"))
        self.closed = False

    def scatter(self, segments: Sequence[DeviceSegment], offset: int) -> None:
        staged = StandInTensor(self.memory)
        for view, length_bytes, _ in segments:
            if view is not None:
                view.tensor.copy_(staged[offset : offset + length_bytes])
            offset += length_bytes

    def close(self) -> None:
        self.closed = True


def stand_in_checksums(tensors: Sequence[StandInTensor], seeds: Sequence[int]) -> list[int]:
    """Stands in for the computation on the device."""
    return [crc32c(tensor.array.tobytes(), seed) for tensor, seed in zip(tensors, seeds, strict=True)]


class Wire:
    """One queue of the peer, with the interface of `Link`."""

    def __init__(self, peer: "Peer", queue_id: int, staging_bytes: int) -> None:
        self.peer = peer
        self.queue_id = queue_id
        self.staging = Memory(staging_bytes)
        self.events: list[Sent | Response] = []
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.out: list[tuple[int, bytes, bytes | None]] = []
        self.broken: str | None = None
        self.closed = False
        self.commands: list[Command] = []
        self.held: list[Command] = []
        self.kept: list[Closable] = []
        self.proven: bool | None = None
        """How it was closed."""
        self._lock = threading.Lock()

    # --- as a host sees it ------------------------------------------------------------------------------------------

    @property
    def wants_to_send(self) -> bool:
        return bool(self.out)

    def send(self, slot: int, capsule: bytes, data: Data | None) -> None:
        assert len(capsule) == 64 and slot < 128
        inline = None
        if data is not None:
            assert data.key in {self.staging.key.local, *(key.local for _, _, key in self.peer.registered)}
            inline = ctypes.string_at(data.address, data.length_bytes)
        self.out.append((slot, capsule, inline))

    def flush(self) -> None:
        out, self.out = self.out, []
        for slot, capsule, inline in out:
            self.say(Sent(slot))
            fields = KEYED_SQE.unpack(capsule)
            length = int.from_bytes(fields[8], "little")
            command = Command._make((*fields[:8], length, *fields[10:]))
            assert command.cid == slot
            self.commands.append(command)
            self.take(command, fields[9], inline)

    def receive(self, limit: int) -> list[Sent | Response]:
        assert not self.closed
        with self._lock:
            if not self.events and self.broken is not None:
                raise ConnectionLost(self.broken)
            events, self.events = self.events[:limit], self.events[limit:]
            with suppress(BlockingIOError):
                os.eventfd_read(self.fd)  # a device tells once, and not again for what is left
        return events

    def linger(self) -> None:
        os.eventfd_write(self.fd, 1)

    def quiet(self) -> bool:
        return not self.events and self.broken is None

    def keep(self, memory: Closable) -> None:
        self.kept.append(memory)

    def cut(self) -> None:
        self.break_off("it was cut")

    def close(self, *, proven: bool = True) -> None:
        if not self.closed:
            self.proven = proven
            self.peer.ending(self)
            self.closed = True
            for memory in self.kept:
                memory.close()
            self.peer.closed.append(self)
            os.close(self.fd)

    # --- as a target does -------------------------------------------------------------------------------------------

    def say(self, *events: Sent | Response) -> None:
        with self._lock:
            self.events += events
        if not self.closed:
            os.eventfd_write(self.fd, 1)

    def break_off(self, why: str) -> None:
        self.broken = why
        if not self.closed:
            os.eventfd_write(self.fd, 1)

    def respond(self, cid: int, status: int = 0, result: int = 0) -> None:
        raw = spec.CQE.pack(result, 0, self.queue_id, cid, status << 1)
        self.say(Response(raw, len(raw)))

    def memory(self, address: int, length: int, key: int) -> bool:
        """Whether the key is good for the range; the device would break the connection otherwise."""
        ranges = [(self.staging.address, len(self.staging.view), self.staging.key), *self.peer.registered]
        good = any(key == k.remote and start <= address and address + length <= start + n for start, n, k in ranges)
        if not good:
            self.break_off("remote access error")
        return good and not self.closed

    def put(self, command: Command, key: int, data: bytes | memoryview) -> bool:
        """RDMA WRITE."""
        address, length = command.sgl_address, command.sgl_length_bytes
        if not self.memory(address, min(length, len(data)), key):
            return False
        ctypes.memmove(address, bytes(data), min(length, len(data)))
        return True

    def get(self, command: Command, key: int, inline: bytes | None) -> bytes | None:
        """RDMA READ, or what came in the capsule."""
        if inline is not None:
            return inline
        if not self.memory(command.sgl_address, command.sgl_length_bytes, key):
            return None
        return ctypes.string_at(command.sgl_address, command.sgl_length_bytes)

    def take(self, command: Command, key: int, inline: bytes | None) -> None:
        if command.opcode == spec.FABRICS_OPCODE:
            self.fabrics(command, key, inline)
        elif self.queue_id == 0:
            self.admin(command, key)
        elif not self.peer.lie(self, command, key):
            self.io(command, key, inline)

    def fabrics(self, command: Command, key: int, inline: bytes | None) -> None:
        if command.fabrics_type == FabricsType.CONNECT:
            raw = self.get(command, key, inline)
            if raw is not None:
                asked = ConnectData.from_bytes(raw)
                bad = asked.subsystem_nqn != NQN
                self.respond(command.cid, Status.CONNECT_INVALID_PARAMETERS if bad else 0, 7)
        elif command.fabrics_type == FabricsType.PROPERTY_GET:
            self.respond(command.cid, 0, 127 if command.cdw11 == Property.CAP else 1)
        else:
            self.respond(command.cid)

    def admin(self, command: Command, key: int) -> None:
        if command.opcode == AdminOpcode.IDENTIFY:
            if command.cdw10 & 0xFF == spec.CnsValue.CONTROLLER:
                raw = spec.IDENTIFY_CONTROLLER.pack(
                    cntlid=7, mdts=6, ioccsz=(64 + IN_CAPSULE_BYTES) // 16, maxcmd=128, sgls=self.peer.sgls
                )
            elif command.nsid == 1:
                raw = spec.IDENTIFY_NAMESPACE.pack(nsze=len(self.peer.volume) // 4096, nguid=NGUID, lbaf0_lbads=12)
            else:
                raw = bytes(4096)
            self.put(command, key, raw)
        elif command.opcode == AdminOpcode.SET_FEATURES:
            self.respond(command.cid, 0, command.cdw11)
            return
        self.respond(command.cid)

    def io(self, command: Command, key: int, inline: bytes | None = None) -> None:
        start, length = command.slba * 4096, command.block_count * 4096
        if command.nsid != 1 or start + length > len(self.peer.volume):
            self.respond(command.cid, Status.LBA_OUT_OF_RANGE)
        elif command.opcode == IoOpcode.READ:
            if self.put(command, key, memoryview(self.peer.volume)[start : start + length]):
                self.respond(command.cid)
        else:
            data = self.get(command, key, inline)
            if data is not None:
                self.peer.volume[start : start + length] = data
                self.respond(command.cid)


class PeerRegion:
    """A caller's buffer that the peer reaches."""

    def __init__(self, peer: "Peer", address: int, length_bytes: int) -> None:
        self.key = Memory(1).key
        self._peer = peer
        self._entry = (address, length_bytes, self.key)
        peer.registered.append(self._entry)

    def close(self) -> None:
        self._peer.registered.remove(self._entry)


class Peer:
    """The target: a volume, and the queues to it."""

    def __init__(self, size_bytes: int = 16 << 20) -> None:
        self.volume = bytearray(size_bytes)
        self.sgls = SGLS_KEYED
        self.lie: Callable[[Wire, Command, int], bool] = lambda *_: False
        self.ending: Callable[[Wire], None] = lambda _: None
        """What the device does when a queue pair is to be destroyed."""
        self.wires: list[Wire] = []
        self.closed: list[Wire] = []
        self.registered: list[tuple[int, int, Key]] = []
        self.gpus: list[StandInGpu] = []
        self.refuses = False
        self.owner = registered.Owner("peer", lambda address, length_bytes: PeerRegion(self, address, length_bytes))

    def find(self, address: int, length_bytes: int) -> Key | None:
        """As `Device.find`."""
        buffer = registered.find(address, length_bytes)
        region = None if buffer is None else buffer.region(self.owner)
        return None if region is None else region.key

    def gpu(self, length_bytes: int) -> "StandInGpu":
        """Staging memory on a device, which the peer reaches."""
        memory = StandInGpu(length_bytes)
        self.registered.append((memory.address, length_bytes, memory.key))
        self.gpus.append(memory)
        return memory


class Transport(NvmeRdmaTransport):
    """The transport under test, whose links lead to a `Peer`."""

    def __init__(self, peer: Peer, nqn: str = NQN, **options: object) -> None:
        identity = str(uuid4())
        settings = NvmeRdmaOptions(**{"connections": 1, "backoff_ms": (1, 1), **options})  # type: ignore[arg-type]
        host = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{identity}", identity)
        super().__init__(SubsystemAddress("peer", 4420, nqn), host, options=settings)
        self.peer = peer
        self._device_checksum = stand_in_checksums
        registered.attach(peer.owner)

    def close(self) -> None:
        super().close()
        if not self.peer.owner.gone:
            registered.detach(self.peer.owner)

    def _dial(self, queue_id: int, entries: int, controller_id: int, deadline_ms: int) -> RdmaQueue:
        if self.peer.refuses:
            raise ConnectionLost("nobody listens there")
        wire = Wire(self.peer, queue_id, self._rdma.staging_bytes if queue_id else 64 << 10)
        self.peer.wires.append(wire)
        self._device = self.peer  # type: ignore[assignment]
        return RdmaQueue(wire, self._clock, self.peer.find, lambda like: self.peer.gpu(self._rdma.staging_bytes))

    @property
    def controller(self) -> Controller:
        assert self._association is not None
        return self._association.controller
