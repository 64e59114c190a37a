"""Identify data structures of this target's controllers and namespaces (Base §5.17.2, NVM §4.1.5), as bytes."""

from __future__ import annotations

from typing import Final

from forebay.appliance.dataplane.target.async_events import AERL
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.log_pages import FIRMWARE_REVISION
from forebay.appliance.dataplane.target.subsystems import Namespace, Subsystem
from forebay.ids import LBA_BYTES
from forebay.nvmetcp import spec
from forebay.nvmetcp.spec import NsDescriptorType

__all__ = [
    "ERROR_LOG_ENTRIES",
    "KAS",
    "MAX_DATASET_RANGES",
    "VERSION",
    "discovery_controller",
    "io_controller",
    "namespace",
    "namespace_descriptors",
    "nvm_controller",
]

VERSION: Final = 0x00010400
"""VS: NVMe 1.4, whose mandatory Identify structures these are."""
KAS: Final = 1
"""Granularity of the keep-alive timer: 100 ms."""
ERROR_LOG_ENTRIES: Final = 16
MAX_DATASET_RANGES: Final = 256
_CTRATT: Final = 1 << 0 | 1 << 6
"""Host identifiers of 128 bits; keep-alive by traffic."""
_LPA: Final = 1 << 1 | 1 << 2
"""Commands Supported and Effects; Get Log Page with offset and 32-bit length."""
_DLFEAT_ZEROES: Final = 0x1
_DLFEAT_WRITE_ZEROES: Final = 0x8
_ONCS_DATASET_MANAGEMENT: Final = 0x4
_ONCS_WRITE_ZEROES: Final = 0x8


def io_controller(subsystem: Subsystem, cntlid: int, limits: TargetLimits, *, deallocates: bool, oaes: int) -> bytes:
    """Identify Controller, CNS 01h. `deallocates`: whether a volume of the host takes the commands that ONCS names."""
    return spec.IDENTIFY_CONTROLLER.pack(
        sn=subsystem.serial.encode().ljust(20)[:20],
        mn=subsystem.model.encode().ljust(40)[:40],
        fr=FIRMWARE_REVISION,
        cmic=0x02,  # the subsystem may have several controllers; no ANA
        mdts=limits.mdts,
        cntlid=cntlid,
        ver=VERSION,
        oaes=oaes,
        ctratt=_CTRATT,
        cntrltype=1,
        acl=3,
        aerl=AERL,
        frmw=0x03,  # one slot, read-only
        lpa=_LPA,
        elpe=ERROR_LOG_ENTRIES - 1,
        kas=KAS,
        sqes=0x66,
        cqes=0x44,
        maxcmd=limits.max_queue_depth,
        nn=subsystem.max_namespaces,
        oncs=_ONCS_DATASET_MANAGEMENT | _ONCS_WRITE_ZEROES if deallocates else 0,
        mnan=subsystem.max_namespaces,
        vwc=0x07,  # volatile cache present; Flush of all namespaces at once is supported
        sgls=1 | 1 << 20,
        subnqn=subsystem.nqn.encode(),
        ioccsz=(spec.SQE.size + limits.in_capsule_bytes) // 16,
        iorcsz=spec.CQE.size // 16,
        msdbd=1,
    )


def discovery_controller(subsystem: Subsystem, cntlid: int, limits: TargetLimits, *, oaes: int) -> bytes:
    """Identify Controller, CNS 01h, of a discovery controller: what concerns I/O is zero. Base §3.1.2.3.3."""
    return spec.IDENTIFY_CONTROLLER.pack(
        sn=subsystem.serial.encode().ljust(20)[:20],
        mn=subsystem.model.encode().ljust(40)[:40],
        fr=FIRMWARE_REVISION,
        mdts=limits.mdts,
        cntlid=cntlid,
        ver=VERSION,
        oaes=oaes,
        ctratt=_CTRATT,
        cntrltype=2,
        aerl=AERL,
        lpa=1 << 2,
        kas=KAS,
        maxcmd=limits.max_queue_depth,
        sgls=1 | 1 << 20,
        subnqn=subsystem.nqn.encode(),
        ioccsz=spec.SQE.size // 16,
        iorcsz=spec.CQE.size // 16,
        msdbd=1,
    )


def nvm_controller(limits: TargetLimits) -> bytes:
    """Identify Controller of the NVM command set, CNS 06h: how much one command may clear."""
    return spec.IDENTIFY_CONTROLLER_NVM.pack(
        wzsl=limits.mdts,
        dmrl=MAX_DATASET_RANGES - 1,  # a byte, which holds no 256
    )


def namespace(found: Namespace) -> bytes:
    """Identify Namespace, CNS 00h."""
    volume = found.volume
    return spec.IDENTIFY_NAMESPACE.pack(
        nsze=volume.lba_count,
        ncap=volume.lba_count,
        nuse=volume.lba_count,
        nmic=0x01,  # other controllers may have it too
        dlfeat=_DLFEAT_ZEROES | (_DLFEAT_WRITE_ZEROES if volume.deallocates else 0),
        nguid=found.nguid,
        lbaf0_lbads=LBA_BYTES.bit_length() - 1,
    )


def namespace_descriptors(found: Namespace) -> bytes:
    """Namespace identification descriptors, CNS 03h."""
    listed = b""
    if any(found.nguid):
        listed += spec.NS_DESCRIPTOR_HEADER.pack(NsDescriptorType.NGUID, 16) + found.nguid
    if found.uuid is not None:
        listed += spec.NS_DESCRIPTOR_HEADER.pack(NsDescriptorType.UUID, 16) + found.uuid.bytes
    return listed.ljust(spec.IDENTIFY_BYTES, b"\0")
