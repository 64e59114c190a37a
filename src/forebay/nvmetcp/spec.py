"""Every NVMe/TCP, NVMe-oF and NVMe structure that Forebay puts on the wire, each written once.

Sources, cited as in the comments below:

* "TCP": NVM Express NVMe/TCP Transport Specification 1.1
* "Base": NVM Express Base Specification 2.0 (which absorbed NVMe over Fabrics)
* "NVM": NVM Command Set Specification 1.0

All integers are little endian. Structures on the per-command path are `struct.Struct`; the large, rarely sent ones
(Identify, Connect data) are a `Layout`, a table of named fields at offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import Final

__all__ = [
    "ACTIVE_NS_LIST_ENTRIES",
    "ADMIN_IN_CAPSULE_BYTES",
    "AUTHENTICATION_HEADER",
    "AUTHENTICATION_PROTOCOL",
    "AUTH_FAILURE",
    "AUTH_NEGOTIATE",
    "C2H_DATA",
    "CAPSULE_CMD",
    "CAPSULE_RESP",
    "COMMON_HEADER",
    "CONNECT_ASCR",
    "CONNECT_ATR",
    "CONNECT_DATA",
    "CQE",
    "DATASET_RANGE",
    "DATA_PDU",
    "DHCHAP_CHALLENGE",
    "DHCHAP_DESCRIPTOR",
    "DHCHAP_IDS",
    "DHCHAP_REPLY",
    "DHCHAP_SUCCESS1",
    "DHCHAP_SUCCESS2",
    "DIGEST_BYTES",
    "DISCOVERY_ENTRY",
    "DISCOVERY_HEADER",
    "DISCOVERY_NQN",
    "DNR",
    "ERROR_ENTRY",
    "FABRICS_OPCODE",
    "FIRMWARE_SLOTS",
    "H2C_DATA",
    "HEADER_BYTES",
    "IC_REQ",
    "IC_RESP",
    "IDENTIFY_BYTES",
    "IDENTIFY_CONTROLLER",
    "IDENTIFY_CONTROLLER_NVM",
    "IDENTIFY_NAMESPACE",
    "MIN_HEADER_BYTES",
    "NQN_MAX_BYTES",
    "NS_DESCRIPTOR_HEADER",
    "R2T",
    "SGL_DATA_BLOCK_OFFSET",
    "SGL_TRANSPORT_DATA_BLOCK",
    "SMART",
    "SQE",
    "SQE_PSDT_SGL",
    "TERM_MAX_BYTES",
    "TERM_REQ",
    "AdminOpcode",
    "AsyncEvent",
    "AuthenticationFailure",
    "AuthenticationMessage",
    "AuthenticationType",
    "CnsValue",
    "ConnectAttribute",
    "DhGroup",
    "DhchapHash",
    "FabricsType",
    "FatalError",
    "FeatureId",
    "IoOpcode",
    "Layout",
    "LogPage",
    "NsDescriptorType",
    "PduFlag",
    "PduType",
    "Property",
    "Status",
]


class Layout:
    """A large structure as named fields, `name: (byte offset, struct format without byte order)`.

    A field of format `"Ns"` is bytes, padded with NUL when packed; any other holds one integer.
    """

    __slots__ = ("_fields", "name", "size_bytes")

    def __init__(self, name: str, size_bytes: int, fields: Mapping[str, tuple[int, str]]) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._fields = {field: (offset, struct.Struct("<" + fmt)) for field, (offset, fmt) in fields.items()}
        end = 0
        for field, (offset, layout) in sorted(self._fields.items(), key=lambda item: item[1][0]):
            assert offset >= end, f"{name}.{field} overlaps the field before it"
            end = offset + layout.size
        assert end <= size_bytes, f"{name} is longer than {size_bytes} bytes"

    def pack(self, **values: int | bytes) -> bytes:
        """The structure with `values` set and everything else zero."""
        out = bytearray(self.size_bytes)
        for field, value in values.items():
            offset, layout = self._fields[field]
            layout.pack_into(out, offset, value)
        return bytes(out)

    def integer(self, raw: bytes | bytearray | memoryview, field: str) -> int:
        """One integer field of `raw` (at least `size_bytes` long)."""
        offset, layout = self._fields[field]
        value = layout.unpack_from(raw, offset)[0]
        assert isinstance(value, int), f"{self.name}.{field} is not an integer"
        return value

    def octets(self, raw: bytes | bytearray | memoryview, field: str) -> bytes:
        """One bytes field of `raw`, with its padding."""
        offset, layout = self._fields[field]
        value = layout.unpack_from(raw, offset)[0]
        assert isinstance(value, bytes), f"{self.name}.{field} is not bytes"
        return value

    def offset_bytes(self, field: str) -> int:
        """Where a field starts, for error reports that name an offset."""
        return self._fields[field][0]


# --- PDUs (TCP §3.6) ------------------------------------------------------------------------------------------------


class PduType(IntEnum):
    """PDU-Type, TCP §3.6.1 (Figure "PDU Types")."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM_REQ = 0x02
    C2H_TERM_REQ = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


class PduFlag(IntFlag):
    """FLAGS of the common header, TCP §3.6.1 and the PDU's own section."""

    HEADER_DIGEST = 0x01
    DATA_DIGEST = 0x02
    LAST = 0x04
    SUCCESS = 0x08


class FatalError(IntEnum):
    """Fatal Error Status of a termination PDU, TCP §3.6.2.4 (H2C) and §3.6.2.5 (C2H)."""

    INVALID_HEADER_FIELD = 0x01
    SEQUENCE_ERROR = 0x02
    HEADER_DIGEST_ERROR = 0x03
    DATA_OUT_OF_RANGE = 0x04
    #: In a C2HTermReq: Data Transfer Limit Exceeded. In an H2CTermReq: R2T Limit Exceeded.
    LIMIT_EXCEEDED = 0x05
    UNSUPPORTED_PARAMETER = 0x06


#: Common header: type, FLAGS, HLEN, PDO, PLEN. TCP §3.6.1.
COMMON_HEADER: Final = struct.Struct("<BBBBI")
#: Initialize Connection Request: header, PFV, HPDA, DGST, MAXR2T (0's based), reserved. TCP §3.6.2.2.
IC_REQ: Final = struct.Struct("<BBBBIHBBI112x")
#: Initialize Connection Response: header, PFV, CPDA, DGST, MAXH2CDATA, reserved. TCP §3.6.2.3.
IC_RESP: Final = struct.Struct("<BBBBIHBBI112x")
#: Termination Request, both directions: header, FES, FEI, reserved. TCP §3.6.2.4, §3.6.2.5.
TERM_REQ: Final = struct.Struct("<BBBBIHI10x")
#: Command capsule: header, then the SQE (see `SQE`) in one go. TCP §3.6.2.6.
CAPSULE_CMD: Final = struct.Struct("<BBBBI" + "BBHIIIQQI3xB6I")
#: Response capsule: header, then the CQE (see `CQE`). TCP §3.6.2.7.
CAPSULE_RESP: Final = struct.Struct("<BBBBI" + "QHHHH")
#: H2CData: header, CCCID, TTAG, DATAO, DATAL, reserved. TCP §3.6.2.8.
H2C_DATA: Final = struct.Struct("<BBBBIHHII4x")
#: C2HData: header, CCCID, reserved (read here as a tag that is ignored), DATAO, DATAL, reserved. TCP §3.6.2.9.
C2H_DATA: Final = struct.Struct("<BBBBIHHII4x")
#: Ready to Transfer: header, CCCID, TTAG, R2TO, R2TL, reserved. TCP §3.6.2.10.
R2T: Final = struct.Struct("<BBBBIHHII4x")
#: The part that H2CData, C2HData and R2T share after the common header.
DATA_PDU: Final = H2C_DATA

assert COMMON_HEADER.size == 8
assert IC_REQ.size == IC_RESP.size == 128
assert CAPSULE_CMD.size == 72
assert TERM_REQ.size == CAPSULE_RESP.size == H2C_DATA.size == C2H_DATA.size == R2T.size == 24

#: HLEN that each PDU must carry.
HEADER_BYTES: Final[dict[int, int]] = {
    PduType.IC_REQ: IC_REQ.size,
    PduType.IC_RESP: IC_RESP.size,
    PduType.H2C_TERM_REQ: TERM_REQ.size,
    PduType.C2H_TERM_REQ: TERM_REQ.size,
    PduType.CAPSULE_CMD: CAPSULE_CMD.size,
    PduType.CAPSULE_RESP: CAPSULE_RESP.size,
    PduType.H2C_DATA: H2C_DATA.size,
    PduType.C2H_DATA: C2H_DATA.size,
    PduType.R2T: R2T.size,
}
#: HDGST and DDGST: CRC-32C, least significant byte first. TCP §3.3.1.1.
DIGEST_BYTES: Final = 4
#: No PDU header is shorter than this, so as many bytes can always be read without touching payload.
MIN_HEADER_BYTES: Final = min(HEADER_BYTES.values())
#: A termination PDU carries at most 128 bytes of the header that it complains about. TCP §3.6.2.4.
TERM_MAX_BYTES: Final = TERM_REQ.size + 128
#: In-capsule data that every controller takes on its admin queue. TCP §3.3.2.1 ("8,192 bytes").
ADMIN_IN_CAPSULE_BYTES: Final = 8192

# --- queue entries (Base §3.3.3) ------------------------------------------------------------------------------------

#: Submission queue entry: opcode, flags (FUSE, PSDT), CID, NSID, CDW2, CDW3, MPTR, SGL1 (address, length, reserved,
#: identifier), CDW10 to CDW15. Base §3.3.3.1; the SGL descriptor is Base §4.1.2.
SQE: Final = struct.Struct("<BBHIIIQQI3xB6I")
#: Completion queue entry: DW0 and DW1 (as one integer; Fabrics responses use both), SQHD, SQID, CID, status with the
#: phase bit as bit 0. Base §3.3.3.2.
CQE: Final = struct.Struct("<QHHHH")

assert SQE.size == 64
assert CQE.size == 16

#: PSDT = 01b in the flags byte: the data pointer is an SGL. Base §3.3.3.1. Fabrics commands must use it.
SQE_PSDT_SGL: Final = 0x40
#: SGL Data Block, sub type offset: in-capsule data. Base §4.1.2.1.
SGL_DATA_BLOCK_OFFSET: Final = 0x01
#: Transport SGL Data Block, sub type NVMe Transport Specific: data moves in data PDUs. TCP §3.4.1.
SGL_TRANSPORT_DATA_BLOCK: Final = 0x5A


class IoOpcode(IntEnum):
    """I/O command set opcodes, NVM §3.2 and Base §7."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09


class AdminOpcode(IntEnum):
    """Admin command opcodes, Base §5."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    KEEP_ALIVE = 0x18


#: Fabrics commands share one opcode, on every queue. Base §6.
FABRICS_OPCODE: Final = 0x7F


class FabricsType(IntEnum):
    """FCTYPE, byte 4 of a Fabrics command, Base §6."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTHENTICATION_SEND = 0x05
    AUTHENTICATION_RECEIVE = 0x06
    DISCONNECT = 0x08


class ConnectAttribute(IntFlag):
    """CATTR of a Connect command, Base §6.3."""

    DISABLE_SQ_FLOW_CONTROL = 0x04


#: AUTHREQ of a Connect response, in its dword 0: in-band authentication is required, alone (ATR) or before a secure
#: channel (ASCR). Base §6.3.
CONNECT_ATR: Final = 1 << 17
CONNECT_ASCR: Final = 1 << 18


class Property(IntEnum):
    """Offsets of the controller properties that Fabrics has, Base §3.1.3."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C


class FeatureId(IntEnum):
    """Feature identifiers, Base §5.27.1."""

    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    VOLATILE_WRITE_CACHE = 0x06
    NUMBER_OF_QUEUES = 0x07
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENT_CONFIGURATION = 0x0B
    KEEP_ALIVE_TIMER = 0x0F
    HOST_IDENTIFIER = 0x81


class CnsValue(IntEnum):
    """Controller or Namespace Structure of Identify, Base §5.17.1."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NAMESPACES = 0x02
    NAMESPACE_DESCRIPTORS = 0x03
    CONTROLLER_OF_COMMAND_SET = 0x06


class LogPage(IntEnum):
    """Log page identifiers, Base §5.16.1."""

    SUPPORTED_LOG_PAGES = 0x00
    ERROR_INFORMATION = 0x01
    SMART = 0x02
    FIRMWARE_SLOT = 0x03
    CHANGED_NAMESPACES = 0x04
    COMMANDS_SUPPORTED = 0x05
    DISCOVERY = 0x70


class AsyncEvent(IntEnum):
    """Notices by the bit of OAES and of feature 0Bh that offers and enables each. Base §5.2.1, §5.27.1.8."""

    NAMESPACE_ATTRIBUTE = 1 << 8
    DISCOVERY_LOG_CHANGE = 1 << 31

    @property
    def result(self) -> int:
        """Dword 0 of the completion: type (2h, a notice), information, the log page that tells more."""
        if self is AsyncEvent.NAMESPACE_ATTRIBUTE:
            return 0x2 | LogPage.CHANGED_NAMESPACES << 16
        return 0x2 | 0xF0 << 8 | LogPage.DISCOVERY << 16


class NsDescriptorType(IntEnum):
    """NIDT of a namespace identification descriptor, Base §5.17.2.3."""

    EUI64 = 0x01
    NGUID = 0x02
    UUID = 0x03
    CSI = 0x04


#: Do Not Retry, as a bit beside a `Status` value.
DNR: Final = 0x4000


class Status(IntEnum):
    """Status field of a completion without the phase bit: SCT << 8 | SC. Base §3.3.3.2.1, NVM §3.1."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    COMMAND_ID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    ABORTED_BY_REQUEST = 0x007
    ABORTED_SQ_DELETION = 0x008
    INVALID_NAMESPACE = 0x00B
    COMMAND_SEQUENCE_ERROR = 0x00C
    DATA_SGL_LENGTH_INVALID = 0x00F
    SGL_DESCRIPTOR_TYPE_INVALID = 0x011
    HOST_ID_INCONSISTENT = 0x018
    TRANSIENT_TRANSPORT_ERROR = 0x022
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    NAMESPACE_NOT_READY = 0x082
    INVALID_QUEUE_ID = 0x101
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    CONNECT_INCOMPATIBLE_FORMAT = 0x180
    CONNECT_CONTROLLER_BUSY = 0x181
    CONNECT_INVALID_PARAMETERS = 0x182
    CONNECT_INVALID_HOST = 0x184
    AUTHENTICATION_REQUIRED = 0x191
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    ACCESS_DENIED = 0x286


# --- data structures ------------------------------------------------------------------------------------------------

#: An NQN is at most 223 bytes in a 256-byte field. Base §4.5.
NQN_MAX_BYTES: Final = 223
#: The well-known discovery subsystem. Base §4.5.
DISCOVERY_NQN: Final = "nqn.2014-08.org.nvmexpress.discovery"

#: Data of a Connect command. Base §6.3, Figure "Connect Command - Data".
CONNECT_DATA: Final = Layout(
    "Connect data",
    1024,
    {"hostid": (0, "16s"), "cntlid": (16, "H"), "subnqn": (256, "256s"), "hostnqn": (512, "256s")},
)

#: Every Identify data structure is this long. Base §5.17.2.
IDENTIFY_BYTES: Final = 4096
#: Active namespace ID list, CNS 02h: this many 32-bit NSIDs, ascending. Base §5.17.2.2.
ACTIVE_NS_LIST_ENTRIES: Final = 1024

#: Identify Controller, CNS 01h, the fields that are set or read here. Base §5.17.2.1.
IDENTIFY_CONTROLLER: Final = Layout(
    "Identify Controller",
    IDENTIFY_BYTES,
    {
        "vid": (0, "H"),
        "ssvid": (2, "H"),
        "sn": (4, "20s"),
        "mn": (24, "40s"),
        "fr": (64, "8s"),
        "rab": (72, "B"),
        "cmic": (76, "B"),
        "mdts": (77, "B"),
        "cntlid": (78, "H"),
        "ver": (80, "I"),
        "oaes": (92, "I"),
        "ctratt": (96, "I"),
        "cntrltype": (111, "B"),
        "oacs": (256, "H"),
        "acl": (258, "B"),
        "aerl": (259, "B"),
        "frmw": (260, "B"),
        "lpa": (261, "B"),
        "elpe": (262, "B"),
        "wctemp": (266, "H"),
        "cctemp": (268, "H"),
        "kas": (320, "H"),
        "sqes": (512, "B"),
        "cqes": (513, "B"),
        "maxcmd": (514, "H"),
        "nn": (516, "I"),
        "oncs": (520, "H"),
        "vwc": (525, "B"),
        "sgls": (536, "I"),
        "mnan": (540, "I"),
        "subnqn": (768, "256s"),
        "ioccsz": (1792, "I"),
        "iorcsz": (1796, "I"),
        "icdoff": (1800, "H"),
        "fcatt": (1802, "B"),
        "msdbd": (1803, "B"),
        "ofcs": (1804, "H"),
    },
)

#: Identify Namespace, CNS 00h, the fields that are set or read here. NVM §4.1.5.1.
IDENTIFY_NAMESPACE: Final = Layout(
    "Identify Namespace",
    IDENTIFY_BYTES,
    {
        "nsze": (0, "Q"),
        "ncap": (8, "Q"),
        "nuse": (16, "Q"),
        "nsfeat": (24, "B"),
        "nlbaf": (25, "B"),
        "flbas": (26, "B"),
        "nmic": (30, "B"),
        "dlfeat": (33, "B"),
        "noiob": (46, "H"),
        "nguid": (104, "16s"),
        "eui64": (120, "8s"),
        # LBA format 0: metadata size, LBADS (log2 of the LBA size), relative performance.
        "lbaf0_ms": (128, "H"),
        "lbaf0_lbads": (130, "B"),
        "lbaf0_rp": (131, "B"),
    },
)

#: Namespace identification descriptor, CNS 03h: NIDT, NIDL, reserved; NIDL bytes follow. Base §5.17.2.3.
NS_DESCRIPTOR_HEADER: Final = struct.Struct("<BB2x")
assert NS_DESCRIPTOR_HEADER.size == 4

#: Identify Controller of a command set, CNS 06h, for the NVM command set: limits of single commands. NVM §4.1.5.3.
IDENTIFY_CONTROLLER_NVM: Final = Layout(
    "Identify Controller, NVM command set",
    IDENTIFY_BYTES,
    {"vsl": (0, "B"), "wzsl": (1, "B"), "wusl": (2, "B"), "dmrl": (3, "B"), "dmrsl": (4, "I"), "dmsl": (8, "Q")},
)

#: One range of Dataset Management: context attributes, length in LBAs, first LBA. NVM §3.2.3.
DATASET_RANGE: Final = struct.Struct("<IIQ")
assert DATASET_RANGE.size == 16

# --- log pages (Base §5.16.1) ---------------------------------------------------------------------------------------

#: One entry of the Error Information log. Base §5.16.1.2.
ERROR_ENTRY: Final = Layout(
    "Error Information Log Entry",
    64,
    {
        "error_count": (0, "Q"),
        "sqid": (8, "H"),
        "cid": (10, "H"),
        "status": (12, "H"),
        "parameter": (14, "H"),
        "lba": (16, "Q"),
        "nsid": (24, "I"),
    },
)

#: SMART / Health Information. The counters have 16 bytes, of which the low 8 are used. Base §5.16.1.3.
SMART: Final = Layout(
    "SMART / Health Information",
    512,
    {
        "critical_warning": (0, "B"),
        "composite_temperature": (1, "H"),
        "available_spare": (3, "B"),
        "available_spare_threshold": (4, "B"),
        "percentage_used": (5, "B"),
        "data_units_read": (32, "Q"),
        "data_units_written": (48, "Q"),
        "host_reads": (64, "Q"),
        "host_writes": (80, "Q"),
        "busy_minutes": (96, "Q"),
        "power_cycles": (112, "Q"),
        "power_on_hours": (128, "Q"),
        "unsafe_shutdowns": (144, "Q"),
        "media_errors": (160, "Q"),
        "error_log_entries": (176, "Q"),
    },
)

#: Firmware Slot Information: active slot, revision in slot 1. Base §5.16.1.4.
FIRMWARE_SLOTS: Final = Layout("Firmware Slot Information", 512, {"afi": (0, "B"), "frs1": (8, "8s")})

#: Discovery Log Page, its header and one entry. Base §5.16.1.23; TSAS of TCP is TCP §3.1.1.
DISCOVERY_HEADER: Final = Layout("Discovery Log", 1024, {"genctr": (0, "Q"), "numrec": (8, "Q"), "recfmt": (16, "H")})
DISCOVERY_ENTRY: Final = Layout(
    "Discovery Log Entry",
    1024,
    {
        "trtype": (0, "B"),
        "adrfam": (1, "B"),
        "subtype": (2, "B"),
        "treq": (3, "B"),
        "portid": (4, "H"),
        "cntlid": (6, "H"),
        "asqsz": (8, "H"),
        "eflags": (10, "H"),
        "trsvcid": (32, "32s"),
        "subnqn": (256, "256s"),
        "traddr": (512, "256s"),
        "tsas": (768, "256s"),
    },
)

# --- in-band authentication (Base §8.13) ----------------------------------------------------------------------------

#: SECP, SPSP1 and SPSP0 of Authentication Send and Receive, as dword 10 has them. Base §6.1, §6.2.
AUTHENTICATION_PROTOCOL: Final = 0xE9 << 24 | 0x01 << 16 | 0x01 << 8
#: Hash and group identifiers that one DH-HMAC-CHAP protocol descriptor can list. Base §8.13.5.2.
DHCHAP_IDS: Final = 30


class AuthenticationType(IntEnum):
    """AUTH_TYPE of an authentication message. Base §8.13.5.1."""

    COMMON = 0x00
    DHCHAP = 0x01


class AuthenticationMessage(IntEnum):
    """AUTH_ID of an authentication message. Base §8.13.5.1."""

    NEGOTIATE = 0x00
    CHALLENGE = 0x01
    REPLY = 0x02
    SUCCESS1 = 0x03
    SUCCESS2 = 0x04
    FAILURE2 = 0xF0
    FAILURE1 = 0xF1


class AuthenticationFailure(IntEnum):
    """Reason Code Explanation of a failure message, whose reason code is always 01h. Base §8.13.5.7."""

    FAILED = 0x01
    PROTOCOL_NOT_USABLE = 0x02
    SECURE_CHANNEL_MISMATCH = 0x03
    HASH_NOT_USABLE = 0x04
    GROUP_NOT_USABLE = 0x05
    INCORRECT_PAYLOAD = 0x06
    INCORRECT_MESSAGE = 0x07


class DhchapHash(IntEnum):
    """Hash functions. Base §8.13.5.2."""

    SHA256 = 0x01
    SHA384 = 0x02
    SHA512 = 0x03


class DhGroup(IntEnum):
    """Diffie-Hellman groups; those with a prime are RFC 7919's. Base §8.13.5.2."""

    NULL = 0x00
    FFDHE2048 = 0x01
    FFDHE3072 = 0x02
    FFDHE4096 = 0x03
    FFDHE6144 = 0x04
    FFDHE8192 = 0x05


#: What every authentication message begins with: AUTH_TYPE, AUTH_ID, reserved, T_ID. Base §8.13.5.1.
AUTHENTICATION_HEADER: Final = struct.Struct("<BB2xH")
#: AUTH_Negotiate: header, SC_C, NAPD; NAPD protocol descriptors follow. Base §8.13.5.2.
AUTH_NEGOTIATE: Final = struct.Struct("<BB2xHBB")
#: DH-HMAC-CHAP protocol descriptor: AUTHID, reserved, HALEN, DHLEN; 30 hash, then 30 group identifiers follow.
#: Base §8.13.5.2.
DHCHAP_DESCRIPTOR: Final = struct.Struct("<BxBB30s30s")
#: DH-HMAC-CHAP_Challenge: header, HL, reserved, HashID, DHgID, DHVLEN, SEQNUM; C1 and the DH value follow.
#: Base §8.13.5.3.
DHCHAP_CHALLENGE: Final = struct.Struct("<BB2xHBxBBHI")
#: DH-HMAC-CHAP_Reply: header, HL, reserved, CVALID, reserved, DHVLEN, SEQNUM; response, C2 and DH value follow.
#: Base §8.13.5.4.
DHCHAP_REPLY: Final = struct.Struct("<BB2xHBxBxHI")
#: DH-HMAC-CHAP_Success1: header, HL, reserved, RVALID, reserved; the controller's response follows. Base §8.13.5.5.
DHCHAP_SUCCESS1: Final = struct.Struct("<BB2xHBxB7x")
#: DH-HMAC-CHAP_Success2. Base §8.13.5.6.
DHCHAP_SUCCESS2: Final = struct.Struct("<BB2xH10x")
#: Failure1 and Failure2: header, reason code, explanation. Base §8.13.5.7.
AUTH_FAILURE: Final = struct.Struct("<BB2xHBB")

assert AUTHENTICATION_HEADER.size == 6
assert AUTH_NEGOTIATE.size == AUTH_FAILURE.size == 8
assert DHCHAP_DESCRIPTOR.size == 64
assert DHCHAP_CHALLENGE.size == DHCHAP_REPLY.size == DHCHAP_SUCCESS1.size == DHCHAP_SUCCESS2.size == 16
