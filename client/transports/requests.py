"""I/O commands planned from operations: neighbours merged, long ones split, with the bookkeeping of their bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from forebay.checksum import crc32c
from forebay.client.transports.base import Outcome, ReadOp, Segment, WriteOp
from forebay.errors import ForebayError

__all__ = ["CHUNK_BYTES", "Request", "clip", "outcomes", "plan"]

CHUNK_BYTES = 256 << 10
"""Bytes received at a time, so that the checksum of a chunk finds it in the core's cache."""
_SMALL_BYTES = 32 << 10
"""Segments shorter than this are received several at a time."""
_IOV = 64
_NOWHERE = memoryview(bytearray(CHUNK_BYTES))
_ZEROS = memoryview(bytes(64 << 10))


class Request:
    """One Read or Write command: a range of one volume and the memory segments behind it.

    ``parts`` says which operations it carries: (operation, first of its segments here, how many), with a count of 0 for
    a piece of an operation that several commands share. ``quiesced`` is False from the first byte sent until the
    completion.
    """

    __slots__ = (
        "_at",
        "_crc",
        "_nowhere",
        "_segment",
        "checksums",
        "damaged",
        "error",
        "length_bytes",
        "nsid",
        "offset_bytes",
        "parts",
        "quiesced",
        "segments",
        "tag",
        "write",
    )

    def __init__(
        self, nsid: int, offset_bytes: int, length_bytes: int, segments: list[Segment], *, write: bool
    ) -> None:
        self.nsid = nsid
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.segments = segments
        self.write = write
        self.tag = 0
        self.parts: list[tuple[int, int, int]] = []
        self.checksums: list[int | None] = []
        self.error: ForebayError | None = None
        self.damaged = False
        """Data came whose digest did not match."""
        self.quiesced = True
        self._segment = 0
        self._at = 0
        self._crc = segments[0].seed if segments else None
        self._nowhere = _NOWHERE

    def fill(
        self, sock: socket.socket, due_bytes: int, digest: Callable[[memoryview], None] | None = None
    ) -> tuple[int, bool]:
        """Receive up to ``due_bytes`` of payload straight to where they belong, taking them into the checksums.

        ``digest`` is told every piece that came, in order.
        Stops at a short read, since nothing more is there then. Returns how many came and whether that is why it
        stopped; 0 bytes are the end of the stream. Raises what the socket raises if nothing came.
        """
        if digest is not None and self._nowhere is _NOWHERE:
            self._nowhere = memoryview(bytearray(CHUNK_BYTES))  # others overwrite the common one
        segments, index, at, crc = self.segments, self._segment, self._at, self._crc
        recv_into = sock.recv_into
        got = 0
        short = False
        try:
            while got < due_bytes and not short:
                view, length_bytes, _ = segments[index]
                take = min(length_bytes - at, due_bytes - got, CHUNK_BYTES)
                if take < _SMALL_BYTES and take < due_bytes - got:
                    self._segment, self._at, self._crc = index, at, crc
                    count, short = self._scatter(sock, min(due_bytes - got, CHUNK_BYTES), digest)
                    index, at, crc = self._segment, self._at, self._crc
                    got += count
                    if not count:
                        break
                    continue
                window = self._nowhere[:take] if view is None else view[at : at + take]
                count = recv_into(window)
                if count < take:
                    short = True
                    if not count:
                        break
                    window = window[:count]
                if crc is not None:
                    crc = crc32c(window, crc)
                if digest is not None:
                    digest(window)
                got += count
                at += count
                if at == length_bytes:
                    self.checksums.append(crc)
                    index, at = index + 1, 0
                    crc = segments[index].seed if index < len(segments) else None
        except BlockingIOError:
            if not got:
                raise
            short = True
        finally:
            self._segment, self._at, self._crc = index, at, crc
        return got, short

    def _scatter(
        self, sock: socket.socket, limit_bytes: int, digest: Callable[[memoryview], None] | None
    ) -> tuple[int, bool]:
        """Receive into many small segments by one call."""
        index, at = self._segment, self._at
        windows: list[memoryview] = []
        asked = 0
        while asked < limit_bytes and len(windows) < _IOV:
            view, length_bytes, _ = self.segments[index]
            take = min(length_bytes - at, limit_bytes - asked)
            windows.append(self._nowhere[asked : asked + take] if view is None else view[at : at + take])
            asked += take
            at += take
            if at == length_bytes:
                index, at = index + 1, 0
        count = sock.recvmsg_into(windows)[0]
        left = count
        for window in windows:
            if not left:
                break
            part = window if len(window) <= left else window[:left]
            left -= len(part)
            if self._crc is not None:
                self._crc = crc32c(part, self._crc)
            if digest is not None:
                digest(part)
            self._at += len(part)
            if self._at == self.segments[self._segment].length_bytes:
                self.checksums.append(self._crc)
                self._segment += 1
                self._at = 0
                self._crc = self.segments[self._segment].seed if self._segment < len(self.segments) else None
        return count, count < asked

    def seal(self) -> None:
        """Compute the checksums of a write, right before its bytes are sent."""
        self.checksums = [
            crc32c(view, seed) if seed is not None and view is not None else None for view, _, seed in self.segments
        ]

    def pieces(self, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """The memory of a range of a write; zeros stand in for segments without a view."""
        out: list[memoryview] = []
        for view, size, _ in self.segments:
            if offset_bytes >= size:
                offset_bytes -= size
                continue
            take = min(size - offset_bytes, length_bytes)
            length_bytes -= take
            if view is not None:
                out.append(view[offset_bytes : offset_bytes + take])
            else:
                out += [_ZEROS[: min(len(_ZEROS), take - at)] for at in range(0, take, len(_ZEROS))]
            offset_bytes = 0
            if not length_bytes:
                break
        return out


def plan(ops: Sequence[ReadOp | WriteOp], which: Sequence[int], sizes: Sequence[int], max_bytes: int) -> list[Request]:
    """Commands for ``ops[i] for i in which``, each of at most ``max_bytes``; ``sizes`` are the operations' bytes.

    Operations that follow one another in the list and in the volume become one command.
    """
    requests: list[Request] = []
    end = -1  # of the last request, if more can be added to it
    for i in which:
        op, size = ops[i], sizes[i]
        write = isinstance(op, WriteOp)
        if size > max_bytes:
            requests += _split(op, i, size, max_bytes, write=write)
            end = -1
            continue
        if requests and op.offset_bytes == end:
            last = requests[-1]
            tag = op.tag if isinstance(op, WriteOp) else 0
            if (last.nsid, last.tag) == (op.nsid, tag) and last.length_bytes + size <= max_bytes:
                last.parts.append((i, len(last.segments), len(op.segments)))
                last.segments += op.segments
                last.length_bytes += size
                end += size
                continue
        request = Request(op.nsid, op.offset_bytes, size, list(op.segments), write=write)
        request.tag = op.tag if isinstance(op, WriteOp) else 0
        request.parts.append((i, 0, len(op.segments)))
        requests.append(request)
        end = op.offset_bytes + size
    return requests


def _split(op: ReadOp | WriteOp, index: int, size: int, max_bytes: int, *, write: bool) -> list[Request]:
    whole = Request(op.nsid, op.offset_bytes, size, list(op.segments), write=write)
    requests = []
    for at in range(0, size, max_bytes):
        length_bytes = min(max_bytes, size - at)
        if write:
            segments = [Segment(piece, len(piece)) for piece in whole.pieces(at, length_bytes)]
        else:
            segments = clip(op.segments, at, length_bytes)
        request = Request(op.nsid, op.offset_bytes + at, length_bytes, segments, write=write)
        request.tag = op.tag if isinstance(op, WriteOp) else 0
        request.parts.append((index, 0, 0))
        requests.append(request)
    return requests


def clip(segments: Sequence[Segment], offset_bytes: int, length_bytes: int) -> list[Segment]:
    """The part of ``segments`` in a range, without seeds: pieces may finish in any order."""
    out: list[Segment] = []
    for view, size, _ in segments:
        if offset_bytes >= size:
            offset_bytes -= size
            continue
        take = min(size - offset_bytes, length_bytes)
        out.append(Segment(None if view is None else view[offset_bytes : offset_bytes + take], take))
        length_bytes -= take
        offset_bytes = 0
        if not length_bytes:
            break
    return out


def outcomes(ops: Sequence[ReadOp | WriteOp], requests: Sequence[Request], results: dict[int, Outcome]) -> None:
    """Put together what became of each operation that ``requests`` carry, into ``results``."""
    pieces: dict[int, list[Request]] = {}
    for request in requests:
        for index, first, count in request.parts:
            if not count:
                pieces.setdefault(index, []).append(request)
            elif request.error is not None:
                results[index] = Outcome(request.error, (None,) * count, request.quiesced)
            else:
                results[index] = Outcome(None, tuple(request.checksums[first : first + count]))
    for index, group in pieces.items():
        segments = ops[index].segments
        error = next((r.error for r in group if r.error is not None), None)
        if error is not None:
            results[index] = Outcome(error, (None,) * len(segments), all(r.quiesced for r in group))
            continue
        # A segment lies in several commands here, so its checksum had to wait for the last of them.
        sums = tuple(
            crc32c(view, seed) if seed is not None and view is not None else None for view, _, seed in segments
        )
        results[index] = Outcome(None, sums)
