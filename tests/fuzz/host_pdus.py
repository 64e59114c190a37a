"""What a host may send, drawn from an input: most of it sensible, some untimely, out of range or damaged."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from forebay.nvmetcp import command as nvme
from forebay.nvmetcp import pdu, spec
from forebay.nvmetcp.command import DYNAMIC_CONTROLLER, Command, ConnectData
from forebay.nvmetcp.spec import AdminOpcode, CnsValue, FabricsType, FatalError, FeatureId, IoOpcode, LogPage, Property
from tests.fuzz.damage import damaged, framed
from tests.fuzz.source import Source

__all__ = ["HostPdus"]

_NSIDS = (1, 2, 1, 2, 1, 2, 3, 0, 0xFFFFFFFF)
_CIDS = (1, 2, 3, 4, 0, 0xFFFF)


class HostPdus:
    """Draws the PDUs of one connection. ``qid`` is what its Connect asks for.

    ``lbas`` is how large the volumes are about, ``tag`` that of a live grant, ``offered_digests`` what the target does.
    """

    def __init__(
        self,
        source: Source,
        *,
        subsystem_nqn: str,
        host_nqn: str,
        host_id: UUID,
        qid: int,
        cntlid: int = DYNAMIC_CONTROLLER,
        lbas: int = 256,
        tag: int = 5,
        offered_digests: int = 3,
    ) -> None:
        self._source = source
        self._names = (subsystem_nqn, host_nqn, host_id)
        self._qid = qid
        self._cntlid = cntlid
        self._lbas = lbas
        self._tag = tag
        self._offered = offered_digests
        self._digests = 0
        self._last_write = (1, 4096)  # cid and bytes of the last write without data, for data that fits

    def opening(self) -> Iterator[bytes]:
        """ICReq and Connect, mostly as they should be."""
        source = self._source
        asked = source.pick([0, 0, 0, 3, 1, 2])
        hpda = source.pick([0, 0, 0, 31, 3, 0, 0, 0, 0, 0, 0, 32])
        yield damaged(source, pdu.ic_req(hpda=hpda, digests=asked, max_r2t=source.pick([0, 0, 0xFFFFFFFF])))
        self._digests = asked & self._offered
        yield self._connect(self._qid)
        if self._qid == 0 and not source.chance(8):
            yield self._capsule(nvme.property_set(1, Property.CC, 0x00460001))

    def more(self) -> Iterator[bytes]:
        """PDUs until the input is used up."""
        kinds = (
            self._read,
            self._write,
            self._write,
            self._write_in_capsule,
            self._data_of_the_write,
            self._other_io,
        )
        odd = (self._admin, self._fabrics, self._any_data, self._out_of_place, self._any_command)
        while self._source.left:
            yield self._source.pick(odd if self._source.chance(8) else kinds)()

    # ------------------------------------------------------------------------------------------------ one PDU

    def _capsule(self, command: Command, data: bytes = b"") -> bytes:
        kind = spec.SGL_DATA_BLOCK_OFFSET if data else spec.SGL_TRANSPORT_DATA_BLOCK
        length = len(data) or command.sgl_length_bytes or 4096
        if self._source.chance(32):
            kind, length = self._source.below(256), self._source.number(32)
        header = pdu.capsule_cmd_header(
            tuple(command._replace(sgl_kind=kind, sgl_length_bytes=length, flags=self._flags())), len(data)
        )
        return self._sent(header, data)

    def _flags(self) -> int:
        return self._source.below(256) if self._source.chance(32) else spec.SQE_PSDT_SGL

    def _sent(self, header: bytes, data: bytes = b"") -> bytes:
        return damaged(self._source, framed(self._source, header, data, self._digests))

    def _range(self) -> tuple[int, int]:
        """SLBA and NLB, mostly inside the volume."""
        source = self._source
        if source.chance(6):
            return source.number(64), 1 + source.number(16) % 65_536
        return source.pick([source.below(self._lbas), source.below(32)]), 1 + source.below(16)

    def _read(self) -> bytes:
        source, (slba, nlb) = self._source, self._range()
        command = nvme.read(source.pick(_CIDS), source.pick(_NSIDS), slba, nlb)
        return self._capsule(command._replace(sgl_length_bytes=nlb * 4096 & 0xFFFFFFFF))

    def _write(self) -> bytes:
        source, (slba, nlb) = self._source, self._range()
        command = nvme.write(source.pick(_CIDS), source.pick(_NSIDS), slba, nlb, self._reference_tag())
        if source.chance(8):
            command = command._replace(cdw12=command.cdw12 | 1 << 30)  # FUA
        self._last_write = (command.cid, nlb * 4096)
        raw = self._capsule(command._replace(sgl_length_bytes=nlb * 4096 & 0xFFFFFFFF))
        return raw if source.chance(3) else raw + self._data_of_the_write()

    def _reference_tag(self) -> int:
        return self._source.number(32) if self._source.chance(8) else self._tag

    def _data_of_the_write(self) -> bytes:
        """The data that an R2T for the last write will ask for, in one PDU or two."""
        cid, length = self._last_write
        length = min(length, 64 << 10)
        first = self._source.pick([length, length, length // 2 & ~3, 4096])
        out = self._h2c(cid, cid, 0, min(first, length), last=first >= length)
        if 0 < first < length:
            out += self._h2c(cid, cid, first, length - first, last=True)
        return out

    def _h2c(self, cid: int, tag: int, offset: int, length: int, *, last: bool) -> bytes:
        if not length:
            return b""
        header = pdu.h2c_data_header(cid, tag, offset, length, last=last)
        return self._sent(header, bytes([self._source.below(256)]) * length)

    def _any_data(self) -> bytes:
        source = self._source
        length = source.pick([4096, 8192, 512, 1, 65_536])
        header = pdu.h2c_data_header(
            source.pick(_CIDS), source.pick(_CIDS), source.number(32), length, last=source.chance(2)
        )
        return self._sent(header, b"\xdd" * length)

    def _write_in_capsule(self) -> bytes:
        source, (slba, nlb) = self._source, self._range()
        command = nvme.write(source.pick(_CIDS), source.pick(_NSIDS), slba, min(nlb, 2), self._reference_tag())
        return self._capsule(command, b"\xcc" * source.pick([4096, 8192, 4096, 100, 8196]))

    def _other_io(self) -> bytes:
        source, (slba, nlb) = self._source, self._range()
        opcode = source.pick([IoOpcode.FLUSH, IoOpcode.WRITE_ZEROES, IoOpcode.DATASET_MANAGEMENT])
        command = nvme.read(source.pick(_CIDS), source.pick(_NSIDS), slba, nlb)._replace(opcode=int(opcode))
        if opcode != IoOpcode.DATASET_MANAGEMENT:
            return self._capsule(command._replace(cdw12=command.cdw12 | source.pick([0, 1 << 25, 1 << 30])))
        ranges = 1 + source.below(4)
        command = command._replace(cdw10=source.pick([ranges - 1, 255]), cdw11=4, sgl_length_bytes=ranges * 16)
        rows = b"".join(spec.DATASET_RANGE.pack(0, source.below(32), source.below(self._lbas)) for _ in range(ranges))
        return self._capsule(command, rows if source.chance(2) else b"")

    def _admin(self) -> bytes:
        source, cid = self._source, self._source.pick(_CIDS)
        opcode = source.pick(list(AdminOpcode))
        command = Command(int(opcode), spec.SQE_PSDT_SGL, cid, source.pick(_NSIDS))
        if opcode == AdminOpcode.IDENTIFY:
            command = command._replace(cdw10=int(source.pick(list(CnsValue))))
        elif opcode in (AdminOpcode.SET_FEATURES, AdminOpcode.GET_FEATURES):
            command = command._replace(cdw10=int(source.pick(list(FeatureId))), cdw11=source.number(32))
        elif opcode == AdminOpcode.GET_LOG_PAGE:
            command = command._replace(
                cdw10=int(source.pick(list(LogPage))) | source.below(1024) << 16,
                cdw12=source.pick([0, 4, source.number(32)]),
                sgl_length_bytes=4096,
            )
        elif opcode == AdminOpcode.ABORT:
            command = command._replace(cdw10=source.pick(_CIDS) << 16)
        return self._capsule(command)

    def _fabrics(self) -> bytes:
        source, cid = self._source, self._source.pick(_CIDS)
        kind = source.pick(list(FabricsType))
        if kind == FabricsType.CONNECT:
            return self._connect(source.pick([self._qid, 0, 1, source.number(16)]))
        command = nvme.property_get(cid, source.pick([*Property, source.number(32)]), wide=source.chance(2))
        if kind == FabricsType.PROPERTY_SET:
            command = nvme.property_set(cid, source.pick([*Property, source.number(32)]), source.number(32))
        return self._capsule(command._replace(nsid=int(kind)))

    def _connect(self, qid: int) -> bytes:
        source, (subsystem_nqn, host_nqn, host_id) = self._source, self._names
        cntlid = source.number(16) if source.chance(32) else self._cntlid
        entries = source.pick([1, 65_536]) if source.chance(32) else source.pick([32, 2])
        command = nvme.connect(9, qid, entries, disable_flow_control=not source.chance(4), keep_alive_ms=0)
        raw = bytearray(ConnectData(host_id, cntlid, subsystem_nqn, host_nqn).to_bytes())
        if source.chance(32):
            raw[source.below(len(raw))] = source.below(256)
        return self._capsule(command, bytes(raw[: 1020 if source.chance(32) else 1024]))

    def _out_of_place(self) -> bytes:
        source = self._source
        return source.pick(
            [
                pdu.ic_req(),
                pdu.ic_resp(max_h2c_data_bytes=4096),
                pdu.capsule_resp(0, 0, 1, 1, 0),
                pdu.r2t(1, 1, 0, 4096),
                pdu.c2h_data_header(1, 0, 4096, last=True, success=True) + bytes(4096),
                pdu.term_req(from_host=True, fatal_error=FatalError.SEQUENCE_ERROR, header=source.take(128)),
                source.take(64),
            ]
        )

    def _any_command(self) -> bytes:
        source = self._source
        fields = [source.number(bits) for bits in (8, 8, 16, 32, 32, 32, 64, 64, 32, 8, 32, 32, 32, 32, 32, 32)]
        return self._sent(pdu.capsule_cmd_header(tuple(fields), 0))
