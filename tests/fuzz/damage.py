"""Damage to one PDU: what a broken, confused or hostile peer makes of it."""

from __future__ import annotations

import struct

from forebay.checksum import crc32c
from forebay.nvmetcp import pdu, spec
from forebay.nvmetcp.spec import PduFlag
from tests.fuzz.source import Source

__all__ = ["damaged", "framed"]


def framed(source: Source, header: bytes, data: bytes, digests: int, *, align_bytes: int = 4) -> bytes:
    """A PDU with the digests that were negotiated (bit 0 header, bit 1 data); now and then one of them is wrong."""
    if not digests:
        return header + data
    raw = pdu.digested(header, align_bytes, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
    out = bytearray(raw + data)
    if data and digests & 2:
        out += crc32c(data).to_bytes(spec.DIGEST_BYTES, "little")
    if source.chance(32):
        out[source.pick([-1, min(header[2], len(out) - 1)])] ^= 1 << source.below(8)
    return bytes(out)


def damaged(source: Source, raw: bytes) -> bytes:
    """``raw``, mostly as it is."""
    if not source.chance(16):
        return raw
    out = bytearray(raw)
    kind = source.below(10)
    if kind == 0:
        at = source.below(min(len(out), 128))
        out[at] ^= 1 << source.below(8)
    elif kind == 1:
        out[2] = source.below(256)
    elif kind == 2:
        out[3] = source.below(256)
    elif kind == 3:
        struct.pack_into("<I", out, 4, source.number(32))
    elif kind == 4:
        out[1] = source.pick([0, PduFlag.LAST, PduFlag.SUCCESS, PduFlag.HEADER_DIGEST, PduFlag.DATA_DIGEST, 0xFF])
    elif kind == 5:
        out[0] = source.below(12)
    elif kind == 6:
        del out[source.below(len(out)) :]
    elif kind == 7:
        return raw + raw
    elif kind == 8:
        at = source.below(len(out))
        out[at:at] = source.take(16)
    else:
        at = source.pick([8, 10, 12, 16, 20])
        if at + 4 <= len(out):
            struct.pack_into("<I", out, at, source.number(32))
    return bytes(out)
