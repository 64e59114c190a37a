"""PDU headers as bytes, and the error that a bad one raises.

The encoders return a header, padded up to where its data has to start (`align_bytes`, TCP §3.6.1 "PDO"), and nothing
else: payload is sent from where it lies, as the next piece of the same `sendmsg`. Where digests were negotiated,
`digested` makes of such a header the one to send.
"""

from __future__ import annotations

from forebay.checksum import crc32c
from forebay.errors import ProtocolError
from forebay.nvmetcp import spec
from forebay.nvmetcp.spec import FatalError, PduFlag, PduType

__all__ = [
    "PduError",
    "c2h_data_header",
    "capsule_cmd_header",
    "capsule_resp",
    "digested",
    "h2c_data_header",
    "ic_req",
    "ic_resp",
    "r2t",
    "term_req",
]

_C2H_DATA = int(PduType.C2H_DATA)
_LAST = int(PduFlag.LAST)
_SUCCESS = int(PduFlag.SUCCESS)
_CMD_BYTES = spec.CAPSULE_CMD.size
_DATA_BYTES = spec.DATA_PDU.size


class PduError(ProtocolError):
    """The peer sent something that TCP §3.6 does not allow here; the connection must end.

    `fatal_error` and `fatal_info` are FES and FEI, `header` is as much of the offending PDU's header as was read and
    `termination` the termination PDU to send (best effort) before closing.
    """

    def __init__(
        self, message: str, *, fatal_error: FatalError, fatal_info: int = 0, header: bytes = b"", termination: bytes
    ) -> None:
        super().__init__(message)
        self.fatal_error = fatal_error
        self.fatal_info = fatal_info
        self.header = header
        self.termination = termination


def ic_req(*, hpda: int = 0, digests: int = 0, max_r2t: int = 0) -> bytes:
    """ICReq, TCP §3.6.2.2. `max_r2t` is 0's based, as on the wire."""
    return spec.IC_REQ.pack(PduType.IC_REQ, 0, spec.IC_REQ.size, 0, spec.IC_REQ.size, 0, hpda, digests, max_r2t)


def ic_resp(*, max_h2c_data_bytes: int, cpda: int = 0, digests: int = 0) -> bytes:
    """ICResp, TCP §3.6.2.3."""
    size = spec.IC_RESP.size
    return spec.IC_RESP.pack(PduType.IC_RESP, 0, size, 0, size, 0, cpda, digests, max_h2c_data_bytes)


def term_req(*, from_host: bool, fatal_error: int, fatal_info: int = 0, header: bytes = b"") -> bytes:
    """H2CTermReq or C2HTermReq with the start of the header that it is about, TCP §3.6.2.4 and §3.6.2.5."""
    kind = PduType.H2C_TERM_REQ if from_host else PduType.C2H_TERM_REQ
    about = bytes(header[: spec.TERM_MAX_BYTES - spec.TERM_REQ.size])
    size = spec.TERM_REQ.size
    return spec.TERM_REQ.pack(kind, 0, size, 0, size + len(about), fatal_error, fatal_info) + about


def capsule_cmd_header(command: tuple[int, ...], in_capsule_bytes: int, align_bytes: int = 4) -> bytes:
    """CapsuleCmd without its data, TCP §3.6.2.6. `command` holds the 16 fields of `spec.SQE`."""
    size = _CMD_BYTES
    if not in_capsule_bytes:
        return spec.CAPSULE_CMD.pack(PduType.CAPSULE_CMD, 0, size, 0, size, *command)
    pdo = -(-size // align_bytes) * align_bytes
    header = spec.CAPSULE_CMD.pack(PduType.CAPSULE_CMD, 0, size, pdo, pdo + in_capsule_bytes, *command)
    return header.ljust(pdo, b"\0")


def capsule_resp(result: int, sq_head: int, sq_id: int, cid: int, status: int) -> bytes:
    """CapsuleResp, TCP §3.6.2.7. `status` is SCT << 8 | SC, with `spec.DNR` or not."""
    size = spec.CAPSULE_RESP.size
    return spec.CAPSULE_RESP.pack(PduType.CAPSULE_RESP, 0, size, 0, size, result, sq_head, sq_id, cid, status << 1)


def h2c_data_header(
    cid: int, tag: int, offset_bytes: int, length_bytes: int, *, last: bool, align_bytes: int = 4
) -> bytes:
    """H2CData without its data, TCP §3.6.2.8."""
    size = _DATA_BYTES
    pdo = -(-size // align_bytes) * align_bytes
    flags = _LAST if last else 0
    header = spec.H2C_DATA.pack(
        PduType.H2C_DATA, flags, size, pdo, pdo + length_bytes, cid, tag, offset_bytes, length_bytes
    )
    return header.ljust(pdo, b"\0")


def c2h_data_header(
    cid: int, offset_bytes: int, length_bytes: int, *, last: bool, success: bool, align_bytes: int = 4
) -> bytes:
    """C2HData without its data, TCP §3.6.2.9."""
    size = _DATA_BYTES
    pdo = size if align_bytes <= 8 else -(-size // align_bytes) * align_bytes
    flags = (_LAST if last else 0) | (_SUCCESS if success else 0)
    header = spec.C2H_DATA.pack(_C2H_DATA, flags, size, pdo, pdo + length_bytes, cid, 0, offset_bytes, length_bytes)
    return header if pdo == size else header.ljust(pdo, b"\0")


def r2t(cid: int, tag: int, offset_bytes: int, length_bytes: int) -> bytes:
    """R2T, TCP §3.6.2.10."""
    return spec.R2T.pack(PduType.R2T, 0, spec.R2T.size, 0, spec.R2T.size, cid, tag, offset_bytes, length_bytes)


def digested(header: bytes, align_bytes: int, *, header_digest: bool, data_digest: bool) -> bytes:
    """The header of a PDU of a connection with digests, of one without: flags, lengths, and HDGST behind it.

    If the PDU has data and `data_digest`, its PLEN counts the DDGST that must follow the data. TCP §3.3.1.1, §3.6.1.
    """
    kind, flags, hlen, pdo, plen = spec.COMMON_HEADER.unpack_from(header)
    data_bytes = plen - pdo if pdo else 0
    size = hlen
    if header_digest:
        flags |= PduFlag.HEADER_DIGEST
        size += spec.DIGEST_BYTES
    if data_bytes:
        pdo = -(-size // align_bytes) * align_bytes
        plen = pdo + data_bytes
        if data_digest:
            flags |= PduFlag.DATA_DIGEST
            plen += spec.DIGEST_BYTES
    else:
        plen = size
    out = bytearray(header[:hlen])
    spec.COMMON_HEADER.pack_into(out, 0, kind, flags, hlen, pdo, plen)
    if header_digest:
        out += crc32c(out).to_bytes(spec.DIGEST_BYTES, "little")
    return bytes(out).ljust(pdo, b"\0")
