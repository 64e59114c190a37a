"""Volumes as block devices of this machine's kernel: a local drive, or what `nvme connect` made (ADR 15).

Reads go with O_DIRECT into buffers of this transport's own and from there, by the calling thread, into the caller's
memory: a read that is stuck in the kernel holds no buffer of the caller's (docs/design.md §6.5).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.checksum import crc32c
from forebay.client.transports.base import (
    Capabilities,
    DeviceReadOp,
    Outcome,
    ReadOp,
    Transport,
    TransportState,
    WriteOp,
    op_bytes,
)
from forebay.client.transports.bounce import BouncePool, Job
from forebay.client.transports.device_reads import DeviceReads
from forebay.client.transports.disks import Disk, Look, Machine, VolumeIdentity
from forebay.client.transports.drive_labels import DriveLabels
from forebay.client.transports.gpu_path import gpu_path
from forebay.client.transports.requests import CHUNK_BYTES, Request, outcomes, plan
from forebay.clock import Clock, SystemClock
from forebay.errors import (
    DeadlineExceeded,
    ForebayError,
    InvalidArgument,
    ProtocolError,
    TargetFailed,
    TargetRefused,
    Unavailable,
)
from forebay.ids import LBA_BYTES

__all__ = ["BlockDeviceOptions", "BlockDeviceTransport"]

_log = logging.getLogger(__name__)

_MEDIA = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
"""What the block layer makes of a command that the drive or target failed; the rest says that the way is broken."""
_LOOK_MS = (1_000, 60_000)
"""First and longest wait between looks for a volume that is not here."""
_LOOKS_MS = 1_000
"""How long `connect` looks at all volumes together."""
_MAX_WAIT_S = 0.25
_CLOSE_S = 2.0
"""How long closing waits for looks that are under way."""
_NO_TAG = (
    "a block device cannot carry the tag of a grant, without which the target refuses writes to fenced volumes: "
    "they need another transport"
)


@dataclass(frozen=True, slots=True)
class BlockDeviceOptions:
    """Settings of reads by block device.

    ``depth``: commands under way on all volumes of a subsystem; each has a thread and a buffer of
    ``max_command_bytes``, up to which neighbouring ranges become one command. ``gpu``: how reads reach GPU memory,
    see docs/transports.md.
    """

    depth: int = 8
    max_command_bytes: int = 4 << 20
    gpu: str = "auto"

    def __post_init__(self) -> None:
        for name, low, high in (("depth", 1, 256), ("max_command_bytes", LBA_BYTES, 64 << 20)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}", field=f"block.{name}", limit=f"{low} to {high}")
        if self.max_command_bytes % LBA_BYTES:
            raise InvalidArgument(
                f"max_command_bytes is {self.max_command_bytes}",
                field="block.max_command_bytes",
                limit=f"multiples of {LBA_BYTES}",
            )
        if self.gpu not in ("auto", "gds", "compat", "staging"):
            raise InvalidArgument(f"gpu is {self.gpu!r}", field="block.gpu", limit="auto, gds, compat or staging")


@dataclass(slots=True)
class _Volume:
    """What is known of a volume here: its disk, or why there is none."""

    disk: Disk | None = None
    error: ForebayError | None = None
    suspect: bool = False
    """Something happened: it is looked at before it is used again."""
    attempts: int = 0
    not_before_ms: int = 0
    """After so many looks in vain: when `connect` looks again."""
    look: Look | None = None
    """The last one, which may not have come back."""


class BlockDeviceTransport(Transport):
    """The volumes of one subsystem that are block devices here.

    ``nguids`` maps NSIDs to the NGUID (hex) of the volume; it is looked at whenever it is needed, so its owner may add
    to it. ``local``: the target is on this machine, so a drive of it may be the volume itself. ``writable`` is for
    `raw` volumes only. `serves` says at any time, without waiting, which volumes can be read; `connect` looks again.
    """

    def __init__(
        self,
        subsystem_nqn: str,
        *,
        nguids: Mapping[int, str] | None = None,
        local: bool = False,
        writable: bool = False,
        options: BlockDeviceOptions | None = None,
        clock: Clock | None = None,
        machine: Machine | None = None,
        device_reads: DeviceReads | None = None,
    ) -> None:
        self._nqn = subsystem_nqn
        self._nguids: Mapping[int, str] = {} if nguids is None else nguids  # its owner adds to an empty one, too
        self._writable = writable
        self._options = options or BlockDeviceOptions()
        self._clock = clock or SystemClock()
        self._labels = DriveLabels(self._clock) if local else None
        self._machine = machine or Machine()
        self._device_reads = device_reads
        self.capabilities = Capabilities("block-device", device_memory=device_reads is not None, writes=writable)
        depth, size = self._options.depth, self._options.max_command_bytes
        self._pool: BouncePool[memoryview] = BouncePool(
            lambda: _aligned(size), depth, depth // 2, self._clock, "forebay-block"
        )
        self._volumes: dict[int, _Volume] = {}
        self._looking = threading.Lock()
        self._closed = False
        self._found = 0
        self._failures = 0

    @classmethod
    def of_machine(
        cls, subsystem_nqn: str, *, nguids: Mapping[int, str], local: bool, options: BlockDeviceOptions, clock: Clock
    ) -> BlockDeviceTransport:
        """As this machine has it, reads into GPU memory included where there is a way and torch is in use."""
        reads: DeviceReads | None = None
        if "torch" in sys.modules:  # nobody has a tensor without
            path = gpu_path(options.gpu)
            if path.kvikio is not None:
                reads = DeviceReads(path, depth=options.depth, max_command_bytes=options.max_command_bytes, clock=clock)
        return cls(subsystem_nqn, nguids=nguids, local=local, options=options, clock=clock, device_reads=reads)

    # --- the interface ----------------------------------------------------------------------------------------------

    def connect(self, deadline_ms: int) -> None:
        """Look at every volume that is known of, again if need be. Raises if none of them can be read here."""
        if self._closed:
            raise Unavailable("the transport is closed")
        error: ForebayError | None = None
        # Whoever calls has other things to do, such as to keep a session alive.
        deadline_ms = min(deadline_ms, self._clock.monotonic_ms() + _LOOKS_MS)
        nsids = list(self._nguids)
        self._hear_of(nsids)
        for nsid in nsids:
            known = self._volumes.get(nsid)
            if known is None or self._clock.monotonic_ms() >= known.not_before_ms:
                error = self._look(nsid, deadline_ms) or error
            else:
                error = known.error or error
        if all(self.serves(nsid) is not None for nsid in self._nguids):
            raise error or Unavailable(f"no volume of {self._nqn} is known")

    def serves(self, nsid: int) -> str | None:
        known = self._volumes.get(nsid)
        if known is None:
            return "it has not been looked for yet"
        if known.disk is None or known.suspect:
            return known.error.message if known.error is not None else "it has to be looked at again"
        if self._pool.stuck > self._options.depth // 2:
            return "earlier reads have not come back from the device"
        return None

    def path(self, nsid: int) -> str:
        """The device that a volume is now, "" if there is none: for people."""
        known = self._volumes.get(nsid)
        return str(known.disk.path) if known is not None and known.disk is not None else ""

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        return self._run(ops, [op_bytes(op, writable=True) for op in ops], deadline_ms)

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        sizes = [op_bytes(op, writable=False) for op in ops]
        if not self._writable:
            return [Outcome(TargetRefused(_NO_TAG), (None,) * len(op.segments)) for op in ops]
        return self._run(ops, sizes, deadline_ms)

    def read_device(self, ops: Sequence[DeviceReadOp], deadline_ms: int) -> list[Outcome]:
        if self._device_reads is None:
            return super().read_device(ops, deadline_ms)
        sizes = [op_bytes(op, writable=True) for op in ops]
        results: dict[int, Outcome] = {}
        disks = self._disks(ops, sizes, deadline_ms, results)
        sound = {i: op for i, op in enumerate(ops) if i not in results}
        done, failed = self._device_reads.run(sound, sizes, disks, deadline_ms)
        results |= done
        for nsid in failed:
            self._suspect(nsid)
        return [results[i] for i in range(len(ops))]

    def state(self) -> TransportState:
        disks = [known for known in list(self._volumes.values()) if known.disk is not None and not known.suspect]
        return TransportState(
            connected=bool(disks),
            connections=len(disks),
            reconnects=max(0, self._found - len(self._volumes)),
            failures=self._failures,
            breaker_open=self._pool.stuck > self._options.depth // 2,
            retry_after_ms=0,
        )

    def close(self) -> None:
        self._closed = True
        self._pool.close()
        if self._device_reads is not None:
            self._device_reads.close()
        # No look begins after this; one that a device holds up is left behind.
        until_s = time.monotonic() + _CLOSE_S
        if self._looking.acquire(timeout=_CLOSE_S):
            self._looking.release()
        for known in list(self._volumes.values()):
            if known.look is not None:
                known.look.join(max(0.0, until_s - time.monotonic()))
            if known.disk is not None:
                known.disk.close()

    # --- one call ---------------------------------------------------------------------------------------------------

    def _run(self, ops: Sequence[ReadOp | WriteOp], sizes: Sequence[int], deadline_ms: int) -> list[Outcome]:
        results: dict[int, Outcome] = {}
        disks = self._disks(ops, sizes, deadline_ms, results)
        max_bytes = self._options.max_command_bytes
        requests = plan(ops, [i for i in range(len(ops)) if i not in results], sizes, max_bytes)
        self._carry_out(requests, disks, deadline_ms)
        # A failure concerns the command as a whole: ask again for each neighbour by itself.
        merged = [r for r in requests if isinstance(r.error, TargetFailed) and len(r.parts) > 1]
        if merged:
            alone = [one for r in merged for i, _, _ in r.parts for one in plan(ops, [i], sizes, max_bytes)]
            self._carry_out(alone, disks, deadline_ms)
            requests = [r for r in requests if r not in merged] + alone
        outcomes(ops, requests, results)
        return [results[i] for i in range(len(ops))]

    def _carry_out(self, requests: Sequence[Request], disks: Mapping[int, Disk], deadline_ms: int) -> None:
        jobs = {id(request): _job(request, disks[request.nsid]) for request in requests}
        if not jobs:
            return
        by_job = {id(jobs[id(request)]): request for request in requests}

        def take(job: Job[memoryview], buffer: memoryview) -> None:
            request = by_job[id(job)]
            if not request.write:
                _deliver(request, buffer)

        try:
            self._pool.run(list(jobs.values()), take, deadline_ms)
        except ForebayError as e:
            for request in requests:
                request.error = e
            return
        for request in requests:
            job = jobs[id(request)]
            request.error = job.error
            request.quiesced = not (job.begun and not job.done)
            if job.error is not None:
                self._failures += 1
                if not isinstance(job.error, DeadlineExceeded):
                    self._suspect(request.nsid)

    def _disks(
        self,
        ops: Sequence[ReadOp | WriteOp | DeviceReadOp],
        sizes: Sequence[int],
        deadline_ms: int,
        results: dict[int, Outcome],
    ) -> dict[int, Disk]:
        """The disks of the operations' volumes; operations without one, or beyond its end, get their outcomes here."""
        found: dict[int, Disk] = {}
        errors: dict[int, ForebayError] = {}
        for nsid in {op.nsid for op in ops}:
            disk = self._disk(nsid, deadline_ms)
            if isinstance(disk, Disk):
                found[nsid] = disk
            else:
                errors[nsid] = disk
        for i, op in enumerate(ops):
            error = errors.get(op.nsid)
            if error is None and op.offset_bytes + sizes[i] > found[op.nsid].size_bytes:
                size_bytes = found[op.nsid].size_bytes
                error = ProtocolError(f"{sizes[i]} bytes at {op.offset_bytes} of a volume of {size_bytes}")
            if error is not None:
                results[i] = Outcome(error, (None,) * len(op.segments))
        return found

    # --- volumes ----------------------------------------------------------------------------------------------------

    def _disk(self, nsid: int, deadline_ms: int) -> Disk | ForebayError:
        """The volume's disk as it is now, looked at if it never was or something happened to it."""
        if self._closed:
            return Unavailable("the transport is closed")
        known = self._volumes.get(nsid)
        if known is not None and known.disk is not None and not known.suspect:
            if known.disk.unchanged:
                return known.disk
            self._suspect(nsid)
        self._hear_of([nsid])
        error = self._look(nsid, deadline_ms)
        disk = self._volumes[nsid].disk if error is None else None
        return disk or error or Unavailable("the transport is closed")

    def _suspect(self, nsid: int) -> None:
        known = self._volumes.get(nsid)
        if known is not None:
            known.suspect = True

    def _hear_of(self, nsids: Sequence[int]) -> None:
        """Of volumes that are to be looked for: a new one may be on a drive that had no label when it was seen."""
        if self._labels is not None and any(nsid not in self._volumes for nsid in nsids):
            self._labels.forget()

    def _look(self, nsid: int, deadline_ms: int) -> ForebayError | None:
        """Find the volume, or see whether its disk is still the one; why not, if so. By the deadline."""
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or not self._looking.acquire(timeout=left_ms / 1000):
            return DeadlineExceeded("the device was not looked at before the deadline")
        try:
            if self._closed:
                return Unavailable("the transport is closed")
            known = self._volumes.setdefault(nsid, _Volume())
            if known.look is not None and not known.look.ended:
                return Unavailable("an earlier look at the device has not come back")
            volume = VolumeIdentity(self._nqn, nsid, self._nguids.get(nsid, ""))
            try:
                known.look = look = Look(self._machine, volume, labels=self._labels, writable=self._writable)
            except Unavailable as e:
                return e
            try:
                while not look.wait(min(_MAX_WAIT_S, (deadline_ms - self._clock.monotonic_ms()) / 1000)):
                    if self._closed or self._clock.monotonic_ms() >= deadline_ms:
                        break
            except BaseException:
                if isinstance(disk := look.taken(), Disk):
                    disk.close()
                raise
            found = look.taken()
            if isinstance(found, Disk):
                self._take(nsid, known, found)
                return None
            self._lost(nsid, known, found)
            return found
        finally:
            self._looking.release()

    def _take(self, nsid: int, known: _Volume, disk: Disk) -> None:
        if known.disk is not None and known.disk.same(disk):
            disk.close()
        else:
            if known.disk is not None:
                known.disk.close()
            known.disk = disk
            self._found += 1
            _log.info("NSID %d of %s is %s", nsid, self._nqn, disk.path)
        known.error, known.suspect, known.attempts, known.not_before_ms = None, False, 0, 0
        if self._closed:
            known.disk.close()

    def _lost(self, nsid: int, known: _Volume, error: ForebayError) -> None:
        if known.disk is not None and not isinstance(error, DeadlineExceeded):
            known.disk.close()
            known.disk = None
            if not self._closed:
                _log.warning("NSID %d of %s is no block device here any more: %s", nsid, self._nqn, error)
        known.error, known.suspect = error, True
        known.attempts += 1
        wait_ms = min(_LOOK_MS[1], _LOOK_MS[0] << min(known.attempts - 1, 16))
        known.not_before_ms = self._clock.monotonic_ms() + wait_ms
        self._failures += 1


def _aligned(size_bytes: int) -> memoryview:
    """Memory that O_DIRECT takes, its pages already there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, size_bytes, flags=flags))


def _job(request: Request, disk: Disk) -> Job[memoryview]:
    size_bytes, offset_bytes = request.length_bytes, request.offset_bytes

    def read(buffer: memoryview) -> None:
        disk.read(buffer[:size_bytes], offset_bytes)

    def write(buffer: memoryview) -> None:
        with disk.using() as fd:
            done = 0
            while done < size_bytes:
                done += os.pwritev(fd, [buffer[done:size_bytes]], offset_bytes + done)

    def fill(buffer: memoryview) -> None:
        request.seal()
        at = 0
        for piece in request.pieces(0, size_bytes):
            buffer[at : at + len(piece)] = piece
            at += len(piece)

    return Job(write, _translated, fill) if request.write else Job(read, _translated)


def _deliver(request: Request, memory: memoryview) -> None:
    """Copy what arrived to where it belongs; the checksums are of what the caller then has."""
    at = 0
    for view, length_bytes, seed in request.segments:
        crc = seed
        if view is not None:
            for start in range(0, length_bytes, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, length_bytes)
                window = view[start:end]
                window[:] = memory[at + start : at + end]
                if crc is not None:
                    crc = crc32c(window, crc)
        request.checksums.append(crc)
        at += length_bytes


def _translated(error: OSError) -> ForebayError:
    """An error of the kernel as one of ours."""
    name = errno.errorcode.get(error.errno or 0, "no errno")
    if error.errno in _MEDIA:
        return TargetFailed(f"the device answered {name}: {error.strerror}")
    return Unavailable(f"the device answered {name}: {error.strerror}")
