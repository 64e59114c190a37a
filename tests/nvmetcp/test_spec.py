"""Golden bytes, written out by hand from the figures of the specifications that `forebay.nvmetcp.spec` cites."""

from uuid import UUID

import pytest

from forebay.nvmetcp import command, pdu, spec
from forebay.nvmetcp.spec import PduType


def octets(text: str) -> bytes:
    return bytes.fromhex(text)


def test_ic_req() -> None:  # TCP §3.6.2.2
    assert pdu.ic_req(hpda=1, digests=3, max_r2t=5) == octets("00 00 80 00 80000000 0000 01 03 05000000") + bytes(112)


def test_ic_resp() -> None:  # TCP §3.6.2.3
    got = pdu.ic_resp(max_h2c_data_bytes=0x20000, cpda=2)
    assert got == octets("01 00 80 00 80000000 0000 02 00 00000200") + bytes(112)


def test_term_req() -> None:  # TCP §3.6.2.4, §3.6.2.5
    got = pdu.term_req(from_host=False, fatal_error=4, fatal_info=0x01020304, header=b"\xaa" * 200)
    assert got == octets("03 00 18 00 98000000 0400 04030201") + bytes(10) + b"\xaa" * 128
    assert pdu.term_req(from_host=True, fatal_error=1)[:8] == octets("02 00 18 00 18000000")


def test_capsule_cmd_of_a_read() -> None:  # TCP §3.6.2.6, NVM §3.2.4
    read = command.read(cid=0x1234, nsid=7, slba=0x1_0000_0002, nlb=256)
    assert pdu.capsule_cmd_header(read, 0) == octets(
        "04 00 48 00 48000000"
        "02 40 3412 07000000 00000000 00000000 0000000000000000"
        "0000000000000000 00000000 000000 5a"
        "02000000 01000000 ff000000 00000000 00000000 00000000"
    )


def test_capsule_cmd_with_data_pads_to_the_alignment() -> None:  # TCP §3.6.1 (PDO)
    header = pdu.capsule_cmd_header(command.write(1, 1, 0, 1), 4096, align_bytes=128)
    assert header[:8] == octets("04 00 48 80 80100000")
    assert len(header) == 128


def test_capsule_resp() -> None:  # TCP §3.6.2.7, Base §3.3.3.2
    got = pdu.capsule_resp(0x1122, 5, 1, 0x1234, spec.Status.ACCESS_DENIED | spec.DNR)
    assert got == octets("05 00 18 00 18000000 2211000000000000 0500 0100 3412 0c85")


def test_data_pdus_and_r2t() -> None:  # TCP §3.6.2.8 to §3.6.2.10
    assert pdu.h2c_data_header(1, 2, 0x1000, 0x2000, last=True) == octets(
        "06 04 18 18 18200000 0100 0200 00100000 00200000 00000000"
    )
    assert pdu.c2h_data_header(1, 0, 0x100000, last=True, success=True) == octets(
        "07 0c 18 18 18001000 0100 0000 00000000 00001000 00000000"
    )
    assert pdu.c2h_data_header(1, 0, 0x1000, last=False, success=False)[:2] == octets("07 00")
    assert pdu.r2t(3, 4, 0x1000, 0x8000) == octets("09 00 18 00 18000000 0300 0400 00100000 00800000 00000000")


def test_fabrics_commands() -> None:  # Base §6.3, §6.4, §6.6
    connect = command.connect(9, queue_id=1, queue_entries=128, keep_alive_ms=0x7530)
    assert spec.SQE.pack(*connect)[:8] == octets("7f 40 0900 01 000000")
    assert spec.SQE.pack(*connect)[40:52] == octets("0000 0100 7f00 04 00 30750000")
    get = spec.SQE.pack(*command.property_get(1, spec.Property.CAP, wide=True))
    assert get[4] == spec.FabricsType.PROPERTY_GET
    assert get[40:48] == octets("01000000 00000000")
    put = spec.SQE.pack(*command.property_set(1, spec.Property.CC, 0x460001))
    assert put[40:56] == octets("00000000 14000000 01004600 00000000")


def test_connect_data_round_trip() -> None:  # Base §6.3
    host = UUID("12345678-1234-1234-1234-123456789abc")
    data = command.ConnectData(host, 0xFFFF, "nqn.2026-01.io.forebay:t", "nqn.2014-08.org.nvmexpress:uuid:x")
    raw = data.to_bytes()
    assert len(raw) == 1024
    assert raw[:18] == host.bytes + b"\xff\xff"
    assert raw[256:280] == b"nqn.2026-01.io.forebay:t"
    assert raw[512:523] == b"nqn.2014-08"
    assert command.ConnectData.from_bytes(raw) == data


@pytest.mark.parametrize("bad", [b"", b"a" * 256, b"a" * 224 + bytes(32), b"\xff\xfe\0"])
def test_what_is_not_an_nqn(bad: bytes) -> None:  # Base §4.5
    assert command.nqn_field(bad.ljust(256, b"\0") if len(bad) < 256 else bad) is None


def test_identify_structures() -> None:  # Base §5.17.2.1, NVM §4.1.5.1
    raw = spec.IDENTIFY_CONTROLLER.pack(
        sn=b"FB1".ljust(20), mn=b"Forebay".ljust(40), cntlid=3, mdts=10, ioccsz=516, kas=10, maxcmd=128, nn=32,
        subnqn=b"nqn.2026-01.io.forebay:t",
    )  # fmt: skip
    assert (raw[77], raw[78], raw[512 + 2], raw[1792:1796]) == (10, 3, 128, (516).to_bytes(4, "little"))
    got = command.ControllerIdentity.from_bytes(raw)
    assert got == command.ControllerIdentity(
        3, "FB1", "Forebay", "nqn.2026-01.io.forebay:t", 4 << 20, 128, 8192, 1000, 32
    )
    assert command.ControllerIdentity.from_bytes(bytes(4096)).max_transfer_bytes is None
    raw = spec.IDENTIFY_NAMESPACE.pack(nsze=1000, lbaf0_lbads=12, nguid=b"g" * 16)
    assert command.NamespaceIdentity.from_bytes(raw) == command.NamespaceIdentity(1000, 4096, b"g" * 16)


def test_namespace_lists() -> None:  # Base §5.17.2.2, §5.17.2.3
    raw = (1).to_bytes(4, "little") + (9).to_bytes(4, "little")
    assert command.active_namespaces(raw.ljust(4096, b"\0")) == [1, 9]
    raw = octets("02 10 0000") + b"n" * 16 + octets("04 01 0000 00")
    assert command.namespace_descriptors(raw.ljust(4096, b"\0")) == {2: b"n" * 16, 4: b"\0"}
    assert command.namespace_descriptors(octets("03 ff 0000") + bytes(100)) == {}


def test_layout_refuses_overlap_and_overflow() -> None:
    with pytest.raises(AssertionError, match="overlaps"):
        spec.Layout("x", 8, {"a": (0, "I"), "b": (2, "I")})
    with pytest.raises(AssertionError, match="longer"):
        spec.Layout("x", 8, {"a": (6, "I")})


def test_every_pdu_type_has_a_header_length() -> None:
    assert set(spec.HEADER_BYTES) == set(PduType)
