"""An NVMe/RDMA queue: commands in flight on one link, and where their bytes lie meanwhile.

The target moves the bytes itself, by a key that is in the command. Bytes of registered memory go straight there; all
others go by way of the queue's staging memory, so that no target ever has a key to them.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from forebay.checksum import crc32c
from forebay.client.device import DeviceView
from forebay.client.transports.base import DeviceSegment
from forebay.client.transports.nvme_rdma_device import Key
from forebay.client.transports.nvme_rdma_gpu import DeviceStaging
from forebay.client.transports.nvme_rdma_link import Closable, Data, Response, Sent
from forebay.client.transports.nvme_rdma_plan import span
from forebay.client.transports.nvme_rdma_staging import Room
from forebay.client.transports.queues import IoQueue
from forebay.client.transports.requests import CHUNK_BYTES, Request
from forebay.client.transports.status import error_of
from forebay.clock import Clock
from forebay.errors import DeadlineExceeded, ForebayError, ProtocolError
from forebay.ids import LBA_BYTES
from forebay.nvmerdma import in_capsule, keyed, response
from forebay.nvmetcp import command as nvme
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command, Completion

__all__ = ["RdmaQueue", "Staging", "Wire"]

_MAX_POLL_MS = 1_000
_EVENTS = 64
"""Events taken at a time."""
_EVENT_BYTES = 16 << 10
"""What one event counts against `RdmaQueue.receive`'s budget, beside the bytes that are copied for it."""


class Staging(Protocol):
    """What a queue needs of its link's `Memory`."""

    view: memoryview
    address: int
    key: Key


class Wire(Protocol):
    """What a queue needs of a `Link`."""

    fd: int

    @property
    def staging(self) -> Staging: ...
    @property
    def wants_to_send(self) -> bool: ...
    def send(self, slot: int, capsule: bytes, data: Data | None) -> None: ...
    def flush(self) -> None: ...
    def receive(self, limit: int) -> list[Sent | Response]: ...
    def linger(self) -> None: ...
    def quiet(self) -> bool: ...
    def keep(self, memory: Closable) -> None: ...
    def cut(self) -> None: ...
    def close(self, *, proven: bool = True) -> None: ...


class _DeviceRoom(NamedTuple):
    """Staging memory on a device, and what of it is free."""

    memory: DeviceStaging
    room: Room


class _Place(NamedTuple):
    """Where the bytes of a command lie: at ``offset`` of a staging memory, or in the caller's own (None).

    ``device`` is the staging memory if it is a device's, and not the host's.
    """

    address: int
    key: Key
    offset: int | None
    device: _DeviceRoom | None = None


@dataclass(slots=True, eq=False)
class _Command:
    """A command in flight: it is over when its capsule was taken and its response has come."""

    request: Request
    place: _Place | None
    sent: bool = False
    completion: Completion | None = None


class RdmaQueue(IoQueue):
    """A queue over a connected link, which it owns. ``find`` names the key of registered memory, see `Device.find`.

    ``on_device`` makes as much staging memory as the link has, on the device that a tensor is on.
    """

    def __init__(
        self,
        link: Wire,
        clock: Clock,
        find: Callable[[int, int], Key | None],
        on_device: Callable[[Any], DeviceStaging],
    ) -> None:
        self._link = link
        self._staging = link.staging
        self._room = Room(len(link.staging.view))
        self._clock = clock
        self._find = find
        self._on_device = on_device
        self._device_rooms: dict[str, _DeviceRoom] = {}
        self._open: dict[int, _Command] = {}
        self._free = [0]
        self.fd = link.fd
        self.queue_id = 0
        self.in_capsule_bytes = 0
        self.bytes_in_flight = 0
        self.closed = False

    def set_depth(self, commands: int) -> None:
        self._free = list(range(commands))

    # --- one command at a time --------------------------------------------------------------------------------------

    def execute(
        self, command: Command, deadline_ms: int, *, data: bytes | None = None, read_bytes: int = 0
    ) -> tuple[Completion, bytearray]:
        cid = self._free.pop()
        length_bytes = len(data) if data is not None else read_bytes
        place = self._stage(length_bytes) if length_bytes else None
        if data is not None and place is not None and place.offset is not None:
            self._staging.view[place.offset : place.offset + length_bytes] = data
        request = Request(0, 0, length_bytes, [], write=data is not None)
        one = self._open[cid] = _Command(request, place)
        self.bytes_in_flight += length_bytes
        address, key = (place.address, place.key.remote) if place else (0, 0)
        self._link.send(cid, keyed(command._replace(cid=cid), address, length_bytes, key), None)
        self._finish(request, lambda: cid not in self._open, deadline_ms)
        assert one.completion is not None, "a command that is over has a completion"
        into = bytearray(read_bytes)
        if read_bytes and place is not None and place.offset is not None:
            # Nothing else was submitted since its room was given back: the holder is here.
            into[:] = self._staging.view[place.offset : place.offset + read_bytes]
        return one.completion, into

    def _drive(self, deadline_ms: int, done: Callable[[], bool]) -> None:
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while True:
            if self._link.wants_to_send:
                self._link.flush()
            while not done() and self.receive(CHUNK_BYTES):
                pass
            if done():
                return
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                raise DeadlineExceeded("the target did not answer in time")
            poller.poll(min(left_ms, _MAX_POLL_MS))

    # --- many commands ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def wants_to_send(self) -> bool:
        return self._link.wants_to_send

    def takes(self, request: Request) -> bool:
        device = self._device_of(request)
        room = self._room if device is None else device.room
        return bool(self._free) and room.fits(request.length_bytes)

    def _device_of(self, request: Request) -> _DeviceRoom | None:
        """Staging memory on the device that a read is for, made when first needed; None for the host."""
        views: list[Any] = [view for view, _, _ in request.segments]
        tensor = next((view.tensor for view in views if isinstance(view, DeviceView)), None)
        if tensor is None:
            return None
        name = str(tensor.device)
        found = self._device_rooms.get(name)
        if found is None:
            memory = self._on_device(tensor)
            self._link.keep(memory)
            found = self._device_rooms[name] = _DeviceRoom(memory, Room(len(self._staging.view)))
        return found

    def submit(self, request: Request) -> None:
        cid = self._free.pop()
        device = self._device_of(request)
        place = (None if device else self._direct(request)) or self._stage(request.length_bytes, device)
        slba, blocks = request.offset_bytes // LBA_BYTES, request.length_bytes // LBA_BYTES
        if request.write:
            request.seal()
            command = nvme.write(cid, request.nsid, slba, blocks, request.tag)
            if place.offset is not None:
                self._gather(request, place.offset)
        else:
            command = nvme.read(cid, request.nsid, slba, blocks)
        self._open[cid] = _Command(request, place)
        request.quiesced = False
        self.bytes_in_flight += request.length_bytes
        if request.write and request.length_bytes <= self.in_capsule_bytes:
            data = Data(place.address, request.length_bytes, place.key.local)
            self._link.send(cid, in_capsule(command, request.length_bytes), data)
        else:
            self._link.send(cid, keyed(command, place.address, request.length_bytes, place.key.remote), None)

    def _direct(self, request: Request) -> _Place | None:
        memory = span(request.segments)
        key = self._find(*memory) if memory is not None else None
        return _Place(memory.address, key, None) if memory is not None and key is not None else None

    def _stage(self, length_bytes: int, device: _DeviceRoom | None = None) -> _Place:
        memory, room = (self._staging, self._room) if device is None else device
        offset = room.take(length_bytes)
        assert offset is not None, "a command was submitted that the queue does not take"
        return _Place(memory.address + offset, memory.key, offset, device)

    def _gather(self, request: Request, offset: int) -> None:
        view = self._staging.view
        for piece in request.pieces(0, request.length_bytes):
            view[offset : offset + len(piece)] = piece
            offset += len(piece)

    def _scatter(self, request: Request, offset: int) -> None:
        """Copy what was read to where it belongs, with the checksums while it is in the core's cache."""
        staged = self._staging.view
        for view, length_bytes, seed in request.segments:
            crc = seed
            if view is not None:
                for at in range(0, length_bytes, CHUNK_BYTES):
                    piece = staged[offset + at : offset + min(at + CHUNK_BYTES, length_bytes)]
                    view[at : at + len(piece)] = piece
                    if crc is not None:
                        # Of the copy: that is what the caller gets.
                        crc = crc32c(view[at : at + len(piece)], crc)
            request.checksums.append(crc)
            offset += length_bytes

    def flush(self) -> None:
        self._link.flush()

    def receive(self, budget_bytes: int) -> bool:
        took = False
        while budget_bytes > 0:
            try:
                events = self._link.receive(min(_EVENTS, -(-budget_bytes // _EVENT_BYTES)))
            except ForebayError:
                if took:
                    break  # the end has its turn after what came before it, such as a refusal and why
                raise
            if not events:
                return False
            took = True
            for event in events:
                cid = self._note(event)
                budget_bytes -= _EVENT_BYTES
                one = self._open[cid]
                if one.sent and one.completion is not None:
                    budget_bytes -= one.request.length_bytes
                    self._complete(cid, one, one.completion)
        self._link.linger()
        return True

    def _note(self, event: Sent | Response) -> int:
        if isinstance(event, Sent):
            self._open[event.slot].sent = True
            return event.slot
        if event.length_bytes < spec.CQE.size:
            raise ProtocolError(f"a response of {event.length_bytes} bytes")
        completion = response(event.capsule)
        one = self._open.get(completion.cid)
        if one is None or one.completion is not None:
            raise ProtocolError(f"a response to command {completion.cid}, which is not open")
        one.completion = completion
        return completion.cid

    def _complete(self, cid: int, one: _Command, completion: Completion) -> None:
        request, place = one.request, one.place
        if completion.status:
            request.error = error_of(completion.status)
        elif not request.write and request.segments and place is not None:
            if place.offset is None:
                request.seal()
            elif place.device is not None:
                place.device.memory.scatter(cast("list[DeviceSegment]", request.segments), place.offset)
                request.checksums = [None] * len(request.segments)
            else:
                self._scatter(request, place.offset)
        del self._open[cid]  # not before its bytes are where they belong: a copy that fails fails the command
        request.quiesced = True
        self.bytes_in_flight -= request.length_bytes
        if place is not None and place.offset is not None:
            room = self._room if place.device is None else place.device.room
            room.give(place.offset, request.length_bytes)
        self._free.append(cid)

    # --- between holders --------------------------------------------------------------------------------------------

    def usable(self) -> bool:
        return not self.closed and not self._open and not self._link.wants_to_send and self._link.quiet()

    def fail(self, error: ForebayError) -> None:
        self.close()
        for one in self._open.values():
            one.request.error = error
        self._open.clear()

    def cut(self) -> None:
        self._link.cut()

    def close(self) -> None:
        if not self.closed:
            # The device lets go of a caller's memory before anybody goes on; staging memory is nobody else's.
            direct = any(one.place is not None and one.place.offset is None for one in self._open.values())
            self._link.close(proven=direct)
            self.closed = True
