"""The daemon as an NVMe/TCP host of its own target: for volumes that only the target can reach.

One association at a time with a few commands in flight, opened for one piece of work: a label, a region, a batch of
checksums. Blocks for clients never go this way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import UUID

from forebay.appliance.dataplane.interface import EndpointInfo
from forebay.checksum import crc32c
from forebay.errors import NoSpace, ProtocolError, TargetFailed, Unavailable
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp import command as nvme
from forebay.nvmetcp import spec
from forebay.nvmetcp.authentication import MAX_MESSAGE_BYTES, AuthenticationFailed, HostAuthentication, Step
from forebay.nvmetcp.command import DYNAMIC_CONTROLLER, Command, Completion, ConnectData
from forebay.nvmetcp.connection import Buffer, Connection
from forebay.nvmetcp.events import (
    DataChunk,
    DataEnd,
    DataStart,
    ICRespReceived,
    R2TReceived,
    ResponseReceived,
    TermReceived,
)
from forebay.nvmetcp.pdu import PduError
from forebay.nvmetcp.spec import DhGroup, FeatureId, IoOpcode, Property, Status
from forebay.nvmetcp.states import Role

__all__ = ["NodeHost"]

_ENTRIES = 32
_ENABLE = 0x00460001
"""CC: EN, IOSQES 64 bytes, IOCQES 16 bytes. Base §3.1.3.5."""
_READ_BYTES = 128 << 10
_ZERO_BYTES = 4 << 20
"""Zeroed, or given back, by one command: a cluster of a logical volume store, which is only freed as a whole."""
_DEALLOCATE = 0x4
"""Attribute – Deallocate of Dataset Management. NVM §3.2.3."""
_NOT_THE_DRIVES = frozenset(
    (
        Status.ABORTED_BY_REQUEST,
        Status.ABORTED_SQ_DELETION,
        Status.INVALID_NAMESPACE,
        Status.COMMAND_SEQUENCE_ERROR,
        Status.TRANSIENT_TRANSPORT_ERROR,
        Status.NAMESPACE_NOT_READY,
        Status.AUTHENTICATION_REQUIRED,
    )
)
"""What is answered when the connection or the volume is taken away in between: nothing is known of the drive."""
_RECEIVE_BYTES = 256 << 10


class _Queue:
    """One NVMe/TCP connection, one command at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._codec = Connection(Role.HOST)

    async def initialise(self) -> None:
        """The transport's handshake. TCP §3.1."""
        await self._send(self._codec.send_ic_req())
        while True:
            for event in await self._events():
                if isinstance(event, ICRespReceived):
                    return

    async def execute(
        self, command: Command, *, data: bytes | None = None, in_capsule: bool = True, read_bytes: int = 0
    ) -> tuple[Completion, bytearray]:
        """Run one command; its completion, whatever the status, and what it read."""
        into = bytearray(read_bytes)
        if data is not None and not in_capsule:
            await self._send(self._codec.send_command(command, write_bytes=len(data)))
        else:
            await self._send(self._codec.send_command(command, data=data, read_bytes=read_bytes))
        damaged = False
        while True:
            for event in await self._events():
                if isinstance(event, DataChunk):
                    into[event.offset_bytes : event.offset_bytes + len(event.data)] = event.data
                elif isinstance(event, R2TReceived):
                    piece = memoryview(data or b"")[event.offset_bytes : event.offset_bytes + event.length_bytes]
                    await self._send(self._codec.send_h2c_data(event, [piece]))
                elif isinstance(event, DataEnd) and event.success:
                    return Completion(0, 0, 0, event.cid, 0, False), into
                elif isinstance(event, ResponseReceived):
                    return event.completion, into
                elif isinstance(event, TermReceived):
                    raise Unavailable(f"the target ended the connection: fatal error {event.fatal_error}")
                else:
                    damaged |= not isinstance(event, DataStart | DataEnd)
            if damaged:
                raise ProtocolError("the target sent what answers no command")

    async def _send(self, pieces: Iterable[Buffer]) -> None:
        self._writer.writelines([bytes(piece) for piece in pieces])
        await self._writer.drain()

    async def _events(self) -> Sequence[object]:
        data = await self._reader.read(_RECEIVE_BYTES)
        if not data:
            raise Unavailable("the target closed a connection of the node's own")
        return self._codec.receive_data(data)

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class NodeHost:
    """An association with one subsystem, for the volume that is its namespace ``nsid``; made by `NodeHost.connected`.

    Methods raise `TargetFailed` when the drive does, `NoSpace`, and `Unavailable`.
    """

    def __init__(self, queue: _Queue, nsid: int) -> None:
        self._queue = queue
        self._nsid = nsid

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, where: EndpointInfo, host: HostIdentity, nsid: int, timeout_s: float
    ) -> AsyncIterator[NodeHost]:
        """Connect for the length of the block, which may take ``timeout_s`` in all."""
        queues: list[_Queue] = []
        nqn = where.subsystem_nqn

        async def dial(queue_id: int, controller: int) -> tuple[_Queue, int]:
            queue = _Queue(*await asyncio.open_connection(where.address, where.port))
            queues.append(queue)
            await queue.initialise()
            data = ConnectData(UUID(host.host_id), controller, nqn, host.nqn).to_bytes()
            done, _ = await queue.execute(nvme.connect(0, queue_id, _ENTRIES), data=data)
            if done.status:
                raise Unavailable(f"the node's own host may not connect: status {done.status:#x}", field=nqn)
            if done.result & spec.CONNECT_ATR:
                await _authenticate(queue, host, nqn)
            elif host.secrets is not None:
                raise Unavailable("the target does not authenticate the node's own host", field=nqn)
            return queue, done.result & 0xFFFF

        try:
            async with asyncio.timeout(timeout_s):
                admin, controller = await dial(0, DYNAMIC_CONTROLLER)
                await _good(admin, nvme.property_set(0, Property.CC, _ENABLE))
                while not (await _good(admin, nvme.property_get(0, Property.CSTS, wide=False)))[0].result & 1:
                    await asyncio.sleep(0.002)
                await _good(admin, nvme.set_features(0, FeatureId.NUMBER_OF_QUEUES, 0))
                queue, _ = await dial(1, controller)
                yield cls(queue, nsid)
        except TimeoutError:
            raise Unavailable(f"the target did not serve the node itself within {timeout_s:g} s", field=nqn) from None
        except OSError as error:
            raise Unavailable(f"connection of the node to its target: {error}", field=nqn) from error
        except PduError as error:
            raise ProtocolError(f"the target broke the protocol: {error}") from error
        finally:
            for one in reversed(queues):
                await one.close()

    async def read(self, offset_bytes: int, length_bytes: int) -> bytearray:
        """Bytes of the volume, whole LBAs."""
        found = bytearray()
        while len(found) < length_bytes:
            take = min(_READ_BYTES, length_bytes - len(found))
            command = nvme.read(0, self._nsid, (offset_bytes + len(found)) // LBA_BYTES, take // LBA_BYTES)
            found += (await _good(self._queue, command, read_bytes=take))[1]
        return found

    async def write_block(self, data: bytes, offset_bytes: int) -> None:
        """Write one LBA."""
        command = nvme.write(0, self._nsid, offset_bytes // LBA_BYTES, 1)
        await _good(self._queue, command, data=data, in_capsule=False)

    async def write_zeroes(self, offset_bytes: int, length_bytes: int) -> None:
        """Make a range read as zeros, with its space allocated."""
        for at in range(offset_bytes, offset_bytes + length_bytes, _ZERO_BYTES):
            take = min(_ZERO_BYTES, offset_bytes + length_bytes - at)
            command = nvme.write(0, self._nsid, at // LBA_BYTES, take // LBA_BYTES)
            await _good(self._queue, command._replace(opcode=IoOpcode.WRITE_ZEROES))

    async def deallocate(self, offset_bytes: int, length_bytes: int) -> None:
        """Give a range of whole clusters back, one a command: a store frees a cluster when all of it is unmapped."""
        for at in range(offset_bytes, offset_bytes + length_bytes, _ZERO_BYTES):
            row = spec.DATASET_RANGE.pack(0, _ZERO_BYTES // LBA_BYTES, at // LBA_BYTES)
            command = Command(IoOpcode.DATASET_MANAGEMENT, spec.SQE_PSDT_SGL, 0, self._nsid, cdw10=0, cdw11=_DEALLOCATE)
            await _good(self._queue, command, data=row)

    async def checksums(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        """CRC-32C of ``(offset_bytes, length_bytes, seed)`` ranges."""
        found: list[int] = []
        for offset_bytes, length_bytes, seed in ranges:
            value, at, end = seed, offset_bytes, offset_bytes + length_bytes
            while at < end:
                base = at // LBA_BYTES * LBA_BYTES
                take = min(end, base + _READ_BYTES) - at
                whole = -(-(at - base + take) // LBA_BYTES) * LBA_BYTES
                data = await self.read(base, whole)
                value = crc32c(memoryview(data)[at - base : at - base + take], value)
                at += take
            found.append(value)
        return found


async def _good(
    queue: _Queue, command: Command, *, data: bytes | None = None, in_capsule: bool = True, read_bytes: int = 0
) -> tuple[Completion, bytearray]:
    """Run a command that should succeed."""
    done, into = await queue.execute(command, data=data, in_capsule=in_capsule, read_bytes=read_bytes)
    text = f"command {command.opcode:#x} of the node: status {done.status:#x}"
    if done.status == Status.CAPACITY_EXCEEDED:
        raise NoSpace("the drive has no space left", field="drives")
    if done.status in _NOT_THE_DRIVES:
        raise Unavailable(text, field="target")
    if done.status:
        raise TargetFailed(text, field="drives")
    return done, into


async def _authenticate(queue: _Queue, host: HostIdentity, nqn: str) -> None:
    """Prove that this is the node, and have the target prove itself. Base §8.13.5."""
    if host.secrets is None:
        raise Unavailable("the target wants the node's own host to authenticate", field=nqn)
    proof = HostAuthentication(host.secrets, host.nqn, nqn, 1, groups=(DhGroup.NULL,))
    message: bytes | None = proof.start()
    while message is not None:
        sent, _ = await queue.execute(nvme.authentication_send(0, len(message)), data=message)
        if proof.step is Step.AUTHENTICATED:
            return
        receive = nvme.authentication_receive(0, MAX_MESSAGE_BYTES)
        got, answer = await queue.execute(receive, read_bytes=MAX_MESSAGE_BYTES)
        if sent.status or got.status:
            raise Unavailable(f"authentication: status {sent.status or got.status:#x}", field=nqn)
        try:
            message = proof.received(bytes(answer))
        except AuthenticationFailed as error:  # which says nothing of the volume
            raise Unavailable(f"the node's own host: {error.message}", field=nqn) from error
