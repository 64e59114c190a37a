"""What NVMe/RDMA puts on the wire beside NVMe's own structures: private data of connections, and keyed SGLs.

Sources: "RDMA" is NVM Express RDMA Transport Specification 1.0b, "Base" as in `forebay.nvmetcp.spec`. Commands and
completions are those of `forebay.nvmetcp.command`. No I/O here.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from forebay.errors import ProtocolError
from forebay.nvmetcp import spec
from forebay.nvmetcp.command import Command, Completion

__all__ = [
    "MAX_KEYED_BYTES",
    "SGLS_KEYED",
    "CmAccept",
    "CmRejection",
    "CmRequest",
    "in_capsule",
    "keyed",
    "rejection",
    "response",
]

#: RDMA_CM_REQUEST Private Data: RECFMT, QID, HRQSIZE, HSQSIZE (0's based), CNTLID, reserved. RDMA §3.2.
CM_REQUEST: Final = struct.Struct("<HHHHH22x")
#: RDMA_CM_ACCEPT Private Data: RECFMT, CRQSIZE, reserved. RDMA §3.2.
CM_ACCEPT: Final = struct.Struct("<HH28x")
#: RDMA_CM_REJECT Private Data: RECFMT, STS. RDMA §3.2.
CM_REJECT: Final = struct.Struct("<HH")
#: An SQE whose SGL1 is a Keyed SGL Data Block descriptor: address, length (24 bits), key, identifier. Base §4.1.2.1.
KEYED_SQE: Final = struct.Struct("<BBHIIIQQ3sIB6I")

assert CM_REQUEST.size == 32
assert CM_ACCEPT.size == 32
assert CM_REJECT.size == 4
assert KEYED_SQE.size == spec.SQE.size

_RECFMT: Final = 0
#: Keyed SGL Data Block, sub type address. The other sub type asks the target to invalidate the key, which only keys of
#: fast registration and memory windows can be.
_KEYED_ADDRESS: Final = 0x40
#: SGLS bit 2: keyed SGL data block descriptors are supported. Base §5.17.2.1.
SGLS_KEYED: Final = 1 << 2
#: The longest transfer of one keyed descriptor, whose length has 24 bits.
MAX_KEYED_BYTES: Final = (1 << 24) - 1


class CmRejection(IntEnum):
    """STS of a rejected connection. RDMA §3.2."""

    INVALID_LENGTH = 0x01
    INVALID_RECFMT = 0x02
    INVALID_QID = 0x03
    INVALID_HSQSIZE = 0x04
    INVALID_HRQSIZE = 0x05
    NO_RESOURCES = 0x06
    INVALID_IRD = 0x07
    INVALID_ORD = 0x08
    INVALID_CNTLID = 0x09


class CmRequest(NamedTuple):
    """What a host says when it connects a queue of ``entries`` slots; ``controller_id`` is 0 for the admin queue."""

    queue_id: int
    entries: int
    controller_id: int

    def to_bytes(self) -> bytes:
        """The 32 bytes of private data."""
        return CM_REQUEST.pack(_RECFMT, self.queue_id, self.entries, self.entries - 1, self.controller_id)


class CmAccept(NamedTuple):
    """What a target answers: the entries of its receive queue."""

    receive_entries: int

    @classmethod
    def from_bytes(cls, raw: bytes) -> CmAccept:
        """Decode private data, which the transport may have padded. Raises `ProtocolError`."""
        if len(raw) < 4:
            raise ProtocolError(f"the target accepted a connection with {len(raw)} bytes of private data")
        recfmt, receive_entries = struct.unpack_from("<HH", raw)
        if recfmt != _RECFMT:
            raise ProtocolError(f"the target accepted a connection in format {recfmt}")
        return cls(receive_entries)


def rejection(raw: bytes) -> CmRejection | None:
    """Why a target rejected a connection, None if it does not say in a way that is known."""
    if len(raw) < CM_REJECT.size:
        return None
    recfmt, status = CM_REJECT.unpack_from(raw)
    try:
        return CmRejection(status) if recfmt == _RECFMT else None
    except ValueError:
        return None


def keyed(command: Command, address: int, length_bytes: int, key: int) -> bytes:
    """A command capsule whose data the target reads or writes itself, at ``address`` under the remote ``key``.

    All zeros stand for no data.
    """
    assert 0 <= length_bytes <= MAX_KEYED_BYTES, f"{length_bytes} bytes do not fit a keyed SGL"
    head = (*command[:7], address, length_bytes.to_bytes(3, "little"), key, _KEYED_ADDRESS)
    return KEYED_SQE.pack(*head, *command[10:])


def in_capsule(command: Command, length_bytes: int) -> bytes:
    """The first 64 bytes of a command capsule that carries its data right behind (ICDOFF 0). Base §4.1.2.1."""
    return spec.SQE.pack(*command[:7], 0, length_bytes, spec.SGL_DATA_BLOCK_OFFSET, *command[10:])


def response(raw: bytes | memoryview) -> Completion:
    """Decode the 16 bytes of a response capsule. Base §3.3.3.2."""
    result, sq_head, sq_id, cid, status = spec.CQE.unpack_from(raw)
    return Completion(result, sq_head, sq_id, cid, status >> 1 & 0x7FF, bool(status & 0x8000))
