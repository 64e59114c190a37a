"""Log pages of an I/O controller (Base §5.16.1), as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from forebay.appliance.dataplane.target.volume import IoTally
from forebay.nvmetcp import spec
from forebay.nvmetcp.spec import AdminOpcode, IoOpcode, LogPage

__all__ = ["FIRMWARE_REVISION", "commands_supported", "error_information", "firmware_slots", "smart", "supported"]

FIRMWARE_REVISION: Final = b"0.1.0".ljust(8)
_SUPPORTED: Final = 0x1
"""CSUPP and LSUPP."""
_CHANGES_CONTENT: Final = 0x2
"""LBCC: the command may change logical blocks."""
_DATA_UNIT_BYTES: Final = 1000 * 512
_MINUTE_NS: Final = 60_000_000_000
_NOMINAL_KELVIN: Final = 298
"""The composite temperature "may not represent the temperature of any physical point" (Base §5.16.1.3): there is no
thermometer behind a file, and 0 would read as a fault."""
_WRITES: Final = (IoOpcode.WRITE, IoOpcode.WRITE_ZEROES, IoOpcode.DATASET_MANAGEMENT)


def supported(pages: Iterable[LogPage]) -> bytes:
    """Supported Log Pages, LID 00h: a dword for each page identifier. Base §5.16.1.1."""
    known = set(pages)
    return b"".join((_SUPPORTED if page in known else 0).to_bytes(4, "little") for page in range(256))


def error_information(entries: Iterable[bytes], room: int) -> bytes:
    """Error Information, LID 01h: the newest first, `room` entries in all. Base §5.16.1.2."""
    return b"".join(entries).ljust(room * spec.ERROR_ENTRY.size_bytes, b"\0")


def smart(tally: IoTally, *, power_on_hours: int, error_log_entries: int) -> bytes:
    """SMART / Health Information, LID 02h, of what was counted on the volumes that a host sees. Base §5.16.1.3."""
    return spec.SMART.pack(
        composite_temperature=_NOMINAL_KELVIN,
        available_spare=100,
        available_spare_threshold=10,
        data_units_read=-(-tally.bytes_read // _DATA_UNIT_BYTES),
        data_units_written=-(-tally.bytes_written // _DATA_UNIT_BYTES),
        host_reads=tally.reads,
        host_writes=tally.writes,
        busy_minutes=(tally.read_ns + tally.write_ns + tally.unmap_ns) // _MINUTE_NS,
        power_cycles=1,
        power_on_hours=power_on_hours,
        media_errors=tally.errors,
        error_log_entries=error_log_entries,
    )


def firmware_slots() -> bytes:
    """Firmware Slot Information, LID 03h: one slot, in use. Base §5.16.1.4."""
    return spec.FIRMWARE_SLOTS.pack(afi=1, frs1=FIRMWARE_REVISION)


def commands_supported(*, deallocates: bool) -> bytes:
    """Commands Supported and Effects, LID 05h: 256 admin and 256 I/O opcodes, a dword each. Base §5.16.1.6.

    `deallocates`: whether a volume of the host takes Write Zeroes and Dataset Management.
    """
    effects = [0] * 1024
    for admin in AdminOpcode:
        effects[admin] = _SUPPORTED
    for opcode in IoOpcode:
        if deallocates or opcode not in (IoOpcode.WRITE_ZEROES, IoOpcode.DATASET_MANAGEMENT):
            effects[256 + opcode] = _SUPPORTED | (_CHANGES_CONTENT if opcode in _WRITES else 0)
    return b"".join(one.to_bytes(4, "little") for one in effects)
