"""Commands and completions as values, builders for those that a host sends, and the data structures around them."""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from forebay.nvmetcp import spec
from forebay.nvmetcp.spec import AdminOpcode, CnsValue, ConnectAttribute, FabricsType, FeatureId, IoOpcode

__all__ = [
    "DYNAMIC_CONTROLLER",
    "Command",
    "Completion",
    "ConnectData",
    "ControllerIdentity",
    "NamespaceIdentity",
    "active_namespaces",
    "async_event_request",
    "authentication_receive",
    "authentication_send",
    "connect",
    "flush",
    "get_features",
    "identify",
    "keep_alive",
    "namespace_descriptors",
    "nqn_field",
    "property_get",
    "property_set",
    "read",
    "set_features",
    "write",
]


class Command(NamedTuple):
    """A submission queue entry, field by field (`spec.SQE`). A tuple because it is made once per command.

    A host leaves the SGL fields alone: `Connection.send_command` sets them (TCP §3.4.1, Base §4.1.2.1).
    """

    opcode: int
    flags: int
    cid: int
    nsid: int = 0
    cdw2: int = 0
    cdw3: int = 0
    mptr: int = 0
    sgl_address: int = 0
    sgl_length_bytes: int = 0
    sgl_kind: int = spec.SGL_TRANSPORT_DATA_BLOCK
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0
    cdw14: int = 0
    cdw15: int = 0

    @property
    def fabrics_type(self) -> int:
        """FCTYPE of a Fabrics command: byte 4 of the entry. Base §6."""
        return self.nsid & 0xFF

    @property
    def slba(self) -> int:
        """First LBA of Read and Write. NVM §3.2.4."""
        return self.cdw11 << 32 | self.cdw10

    @property
    def block_count(self) -> int:
        """Number of LBAs of Read and Write (the field is 0's based). NVM §3.2.4."""
        return (self.cdw12 & 0xFFFF) + 1

    @property
    def reference_tag(self) -> int:
        """ILBRT of Write, which means nothing to a namespace without protection information. NVM §3.2.6."""
        return self.cdw14


assert len(Command._fields) == 16


class Completion(NamedTuple):
    """A completion queue entry (`spec.CQE`); `status` is SCT << 8 | SC without phase, DNR or CRD bits."""

    result: int
    sq_head: int
    sq_id: int
    cid: int
    status: int
    do_not_retry: bool


def read(cid: int, nsid: int, slba: int, nlb: int) -> Command:
    """Read of `nlb` LBAs (1 to 65,536). NVM §3.2.4."""
    return _transfer(IoOpcode.READ, cid, nsid, slba, nlb)


def write(cid: int, nsid: int, slba: int, nlb: int, reference_tag: int = 0) -> Command:
    """Write of `nlb` LBAs (1 to 65,536). NVM §3.2.6."""
    return _transfer(IoOpcode.WRITE, cid, nsid, slba, nlb)._replace(cdw14=reference_tag)


def _transfer(opcode: int, cid: int, nsid: int, slba: int, nlb: int) -> Command:
    return Command(
        opcode, spec.SQE_PSDT_SGL, cid, nsid, cdw10=slba & 0xFFFFFFFF, cdw11=slba >> 32, cdw12=(nlb - 1) & 0xFFFF
    )


def flush(cid: int, nsid: int) -> Command:
    """Flush of one namespace. NVM §3.2 and Base §7.1."""
    return Command(IoOpcode.FLUSH, spec.SQE_PSDT_SGL, cid, nsid)


def connect(
    cid: int, queue_id: int, queue_entries: int, *, disable_flow_control: bool = True, keep_alive_ms: int = 0
) -> Command:
    """Fabrics Connect of a queue with `queue_entries` slots; its data is a `ConnectData` in the capsule. Base §6.3."""
    attributes = int(ConnectAttribute.DISABLE_SQ_FLOW_CONTROL) if disable_flow_control else 0
    return Command(
        spec.FABRICS_OPCODE,
        spec.SQE_PSDT_SGL,
        cid,
        FabricsType.CONNECT,
        cdw10=queue_id << 16,
        cdw11=(queue_entries - 1) | attributes << 16,
        cdw12=keep_alive_ms,
    )


def property_get(cid: int, offset: int, *, wide: bool) -> Command:
    """Property Get of 8 (`wide`) or 4 bytes. Base §6.4."""
    return Command(spec.FABRICS_OPCODE, spec.SQE_PSDT_SGL, cid, FabricsType.PROPERTY_GET, cdw10=int(wide), cdw11=offset)


def property_set(cid: int, offset: int, value: int, *, wide: bool = False) -> Command:
    """Property Set of 8 (`wide`) or 4 bytes. Base §6.6."""
    return Command(
        spec.FABRICS_OPCODE,
        spec.SQE_PSDT_SGL,
        cid,
        FabricsType.PROPERTY_SET,
        cdw10=int(wide),
        cdw11=offset,
        cdw12=value & 0xFFFFFFFF,
        cdw13=value >> 32,
    )


def authentication_send(cid: int, length_bytes: int) -> Command:
    """Authentication Send of a message, which is its in-capsule data. Base §6.2."""
    return _authentication(FabricsType.AUTHENTICATION_SEND, cid, length_bytes)


def authentication_receive(cid: int, room_bytes: int) -> Command:
    """Authentication Receive of a message of at most ``room_bytes``. Base §6.1."""
    return _authentication(FabricsType.AUTHENTICATION_RECEIVE, cid, room_bytes)


def _authentication(kind: FabricsType, cid: int, length_bytes: int) -> Command:
    return Command(
        spec.FABRICS_OPCODE,
        spec.SQE_PSDT_SGL,
        cid,
        kind,
        cdw10=spec.AUTHENTICATION_PROTOCOL,
        cdw11=length_bytes,
    )


def identify(cid: int, cns: CnsValue, nsid: int = 0) -> Command:
    """Identify; the answer is `spec.IDENTIFY_BYTES` of data. Base §5.17."""
    return Command(AdminOpcode.IDENTIFY, spec.SQE_PSDT_SGL, cid, nsid, cdw10=int(cns))


def set_features(cid: int, feature: FeatureId, value: int) -> Command:
    """Set Features with its value in dword 11. Base §5.27."""
    return Command(AdminOpcode.SET_FEATURES, spec.SQE_PSDT_SGL, cid, cdw10=int(feature), cdw11=value)


def get_features(cid: int, feature: FeatureId) -> Command:
    """Get Features. Base §5.15."""
    return Command(AdminOpcode.GET_FEATURES, spec.SQE_PSDT_SGL, cid, cdw10=int(feature))


def keep_alive(cid: int) -> Command:
    """Keep Alive. Base §5.18."""
    return Command(AdminOpcode.KEEP_ALIVE, spec.SQE_PSDT_SGL, cid)


def async_event_request(cid: int) -> Command:
    """Asynchronous Event Request. Base §5.2."""
    return Command(AdminOpcode.ASYNC_EVENT_REQUEST, spec.SQE_PSDT_SGL, cid)


def nqn_field(raw: bytes) -> str | None:
    """The NQN in a 256-byte NUL-padded field, or None if it is empty, too long, unterminated or not UTF-8."""
    text, end, _ = raw.partition(b"\0")
    if not end or not 1 <= len(text) <= spec.NQN_MAX_BYTES:
        return None
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return None


#: CNTLID that asks for a new controller, the dynamic controller model. Base §6.3.
DYNAMIC_CONTROLLER: Final = 0xFFFF


class ConnectData(NamedTuple):
    """Data of a Connect command (`spec.CONNECT_DATA`). The NQNs are None where the field holds no NQN."""

    host_id: UUID
    controller_id: int
    subsystem_nqn: str | None
    host_nqn: str | None

    def to_bytes(self) -> bytes:
        """The 1,024 bytes of the capsule's data."""
        return spec.CONNECT_DATA.pack(
            hostid=self.host_id.bytes,
            cntlid=self.controller_id,
            subnqn=(self.subsystem_nqn or "").encode(),
            hostnqn=(self.host_nqn or "").encode(),
        )

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> ConnectData:
        """Decode 1,024 bytes."""
        layout = spec.CONNECT_DATA
        return cls(
            UUID(bytes=layout.octets(raw, "hostid")),
            layout.integer(raw, "cntlid"),
            nqn_field(layout.octets(raw, "subnqn")),
            nqn_field(layout.octets(raw, "hostnqn")),
        )


class ControllerIdentity(NamedTuple):
    """What a host needs of Identify Controller. Sizes in bytes; `max_transfer_bytes` is None where MDTS is 0."""

    controller_id: int
    serial: str
    model: str
    subsystem_nqn: str
    max_transfer_bytes: int | None
    max_commands: int
    in_capsule_bytes: int
    keep_alive_granularity_ms: int
    namespace_count: int
    sgl_support: int = 0
    in_capsule_offset_bytes: int = 0

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview, *, page_bytes: int = 4096) -> ControllerIdentity:
        """Decode 4,096 bytes; MDTS counts pages of `page_bytes` (CAP.MPSMIN). Base §5.17.2.1, IOCCSZ TCP §3.3.2."""
        layout = spec.IDENTIFY_CONTROLLER
        mdts = layout.integer(raw, "mdts")
        return cls(
            layout.integer(raw, "cntlid"),
            layout.octets(raw, "sn").decode("ascii", "replace").strip(),
            layout.octets(raw, "mn").decode("ascii", "replace").strip(),
            nqn_field(layout.octets(raw, "subnqn")) or "",
            page_bytes << mdts if mdts else None,
            layout.integer(raw, "maxcmd"),
            max(0, layout.integer(raw, "ioccsz") * 16 - spec.SQE.size),
            layout.integer(raw, "kas") * 100,
            layout.integer(raw, "nn"),
            layout.integer(raw, "sgls"),
            layout.integer(raw, "icdoff") * 16,
        )


class NamespaceIdentity(NamedTuple):
    """What a host needs of Identify Namespace."""

    lba_count: int
    lba_bytes: int
    nguid: bytes

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> NamespaceIdentity:
        """Decode 4,096 bytes; only LBA format 0 is looked at, which is the one in use here. NVM §4.1.5.1."""
        layout = spec.IDENTIFY_NAMESPACE
        return cls(layout.integer(raw, "nsze"), 1 << layout.integer(raw, "lbaf0_lbads"), layout.octets(raw, "nguid"))


def active_namespaces(raw: bytes | bytearray | memoryview) -> list[int]:
    """NSIDs of an Active Namespace ID list (CNS 02h). Base §5.17.2.2."""
    words = memoryview(raw)[: spec.IDENTIFY_BYTES].cast("B")
    listed = (int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4))
    return [nsid for nsid in listed if nsid]


def namespace_descriptors(raw: bytes | bytearray | memoryview) -> dict[int, bytes]:
    """Descriptors of CNS 03h by type (`spec.NsDescriptorType`); stops at the first empty one. Base §5.17.2.3."""
    found: dict[int, bytes] = {}
    view = memoryview(raw)[: spec.IDENTIFY_BYTES]
    header = spec.NS_DESCRIPTOR_HEADER
    at = 0
    while at + header.size <= len(view):
        kind, length_bytes = header.unpack_from(view, at)
        at += header.size
        if not length_bytes or at + length_bytes > len(view):
            break
        found[kind] = bytes(view[at : at + length_bytes])
        at += length_bytes
    return found
