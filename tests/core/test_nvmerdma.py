"""The NVMe/RDMA codec: NVM Express RDMA Transport Specification 1.0b, and SGLs of Base §4.1.2."""

import pytest

from forebay import nvmerdma
from forebay.errors import ProtocolError
from forebay.nvmerdma import CmAccept, CmRejection, CmRequest
from forebay.nvmetcp import command, spec


def test_a_request_says_what_the_queue_is() -> None:
    raw = CmRequest(3, 128, 0x1234).to_bytes()
    assert raw == bytes.fromhex("0000030080007f003412") + bytes(22)  # HSQSIZE is 0's based, HRQSIZE is not


def test_an_acceptance_may_be_padded() -> None:
    assert CmAccept.from_bytes(bytes.fromhex("00008000") + bytes(192)) == CmAccept(128)
    assert CmAccept.from_bytes(bytes.fromhex("00001f00")) == CmAccept(31)


@pytest.mark.parametrize("raw", [b"", b"\0\0\0", bytes.fromhex("01008000")])
def test_an_acceptance_that_is_none(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        CmAccept.from_bytes(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ("00000600", CmRejection.NO_RESOURCES),
        ("00000300" + "00" * 140, CmRejection.INVALID_QID),
        ("0000ff00", None),
        ("01000600", None),
        ("0000", None),
    ],
)
def test_rejections(raw: str, why: CmRejection | None) -> None:
    assert nvmerdma.rejection(bytes.fromhex(raw)) is why


def test_a_keyed_data_block() -> None:
    raw = nvmerdma.keyed(command.write(7, 9, 0x1_0000_0002, 16, 0xAABBCCDD), 0x7F00_1122_3344_5000, 65536, 0xDEAD_BEEF)
    assert len(raw) == 64
    assert raw[:4] == bytes([0x01, 0x40, 7, 0])
    assert raw[24:32] == (0x7F00_1122_3344_5000).to_bytes(8, "little")
    assert raw[32:35] == (65536).to_bytes(3, "little")
    assert raw[35:39] == (0xDEAD_BEEF).to_bytes(4, "little")
    assert raw[39] == 0x40  # Keyed SGL Data Block, address
    fields = spec.SQE.unpack(raw)
    assert fields[-6:] == (2, 1, 15, 0, 0xAABBCCDD, 0)


def test_no_data_is_all_zeros() -> None:
    raw = nvmerdma.keyed(command.keep_alive(1), 0, 0, 0)
    assert raw[24:39] == bytes(15)
    assert raw[39] == 0x40


def test_the_longest_transfer() -> None:
    assert nvmerdma.keyed(command.read(0, 1, 0, 4095), 0, nvmerdma.MAX_KEYED_BYTES, 1)[32:35] == b"\xff\xff\xff"


def test_data_in_the_capsule() -> None:
    raw = nvmerdma.in_capsule(command.write(7, 1, 0, 1, 5), 4096)
    assert len(raw) == 64
    assert raw[24:40] == bytes(8) + (4096).to_bytes(4, "little") + bytes(3) + b"\x01"  # Data Block, offset


def test_a_response() -> None:
    raw = spec.CQE.pack(0x1122334455, 3, 2, 77, (0x286 | spec.DNR) << 1)
    assert nvmerdma.response(raw) == command.Completion(0x1122334455, 3, 2, 77, 0x286, True)
    assert nvmerdma.response(memoryview(raw + b"more")).cid == 77
