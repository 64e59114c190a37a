"""Which commands move bytes straight to and from registered memory, and which by way of a queue's staging memory.

A keyed SGL names one contiguous range, and targets need not take more than one (the kernel's takes one), so a command
goes straight only where its memory is one range and registered. Everything here is arithmetic on addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from forebay.client.registered import address_of
from forebay.client.transports.base import ReadOp, Segment, WriteOp
from forebay.client.transports.requests import Request, clip, plan
from forebay.ids import LBA_BYTES

__all__ = ["Span", "plan_direct", "span"]

Find = Callable[[int, int], object | None]
"""Whether ``(address, length_bytes)`` is registered: anything but None."""


class Span(NamedTuple):
    """A contiguous range of memory."""

    address: int
    length_bytes: int


class _Run(NamedTuple):
    """Bytes ``[start, end)`` of a request that lie in one range of registered memory."""

    start: int
    end: int


def span(segments: Sequence[Segment]) -> Span | None:
    """The memory of ``segments`` if it is one range."""
    first = end = 0
    for i, (view, length_bytes, _) in enumerate(segments):
        if view is None:
            return None
        address = address_of(view)
        if i == 0:
            first = end = address
        elif address != end:
            return None
        end += length_bytes
    return Span(first, end - first)


def plan_direct(
    ops: Sequence[ReadOp | WriteOp],
    which: Sequence[int],
    sizes: Sequence[int],
    max_bytes: int,
    *,
    find: Find,
    direct_bytes: int,
) -> list[Request]:
    """As `plan`, cut so that every run of ``direct_bytes`` or more in registered memory is a command of its own."""
    out: list[Request] = []
    for request in plan(ops, which, sizes, max_bytes):
        runs = _runs(request.segments, find, direct_bytes)
        if not runs or runs == [_Run(0, request.length_bytes)]:
            out.append(request)
            continue
        if len(request.parts) == 1:
            out += _cut(request, runs)
            continue
        for i, _, _ in request.parts:  # several operations of one command, which cannot be one
            out += plan_direct(ops, [i], sizes, max_bytes, find=find, direct_bytes=direct_bytes)
    return out


def _runs(segments: Sequence[Segment], find: Find, direct_bytes: int) -> list[_Run]:
    """Registered ranges, cut to whole blocks of the volume."""
    runs: list[_Run] = []
    offset = begin = address = end = 0

    def close() -> None:
        start, stop = -(-begin // LBA_BYTES) * LBA_BYTES, offset // LBA_BYTES * LBA_BYTES
        if end > address and stop - start >= direct_bytes:
            runs.append(_Run(start, stop))

    for view, length_bytes, _ in segments:
        at = 0 if view is None else address_of(view)
        joins = at and end > address and at == end and find(address, end - address + length_bytes) is not None
        if joins:
            end += length_bytes
        else:
            close()
            begin = offset
            registered = at and find(at, length_bytes) is not None
            address, end = (at, at + length_bytes) if registered else (0, 0)
        offset += length_bytes
    close()
    return runs


def _cut(request: Request, runs: Sequence[_Run]) -> list[Request]:
    """Commands for ``runs`` and for what lies between them."""
    (index, _, _) = request.parts[0]
    borders = sorted({0, request.length_bytes, *(border for run in runs for border in run)})
    pieces = []
    for start, end in pairwise(borders):
        segments = clip(request.segments, start, end - start)
        piece = Request(request.nsid, request.offset_bytes + start, end - start, segments, write=request.write)
        piece.tag = request.tag
        piece.parts.append((index, 0, 0))
        pieces.append(piece)
    return pieces
