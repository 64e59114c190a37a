"""What LBA 0 of a volume says (ADR 5): the daemon writes it, and who opens the volume as a block device reads it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from forebay.checksum import crc32c
from forebay.errors import VolumeMismatch
from forebay.ids import LBA_BYTES, NamespaceId, VolumeId

__all__ = ["LABEL_BYTES", "VolumeLabel"]

LABEL_BYTES = LBA_BYTES
LABEL_MAGIC = b"FOREBAY\x00volume\r\n"
LABEL_VERSION = 1
LABEL = struct.Struct("<16s I 16s I I 16s Q Q Q")
"""Magic, version, node id, volume id, namespace id, volume uuid, epoch, region bytes, size bytes; a CRC-32C follows.
Everything lies in the first 512 bytes, which a drive writes whole or not at all; the rest of the block stays zero."""
LABEL_CRC = struct.Struct("<I")
assert LABEL.size == 84 and LABEL.size + LABEL_CRC.size <= 512


@dataclass(frozen=True, slots=True)
class VolumeLabel:
    """What LBA 0 of a volume says; metadata holds the same and the two are compared before the volume is served.

    ``node_id`` and ``volume_uuid`` have 16 bytes. ``epoch`` counts how often the volume was taken into service: it
    tells the file from an older copy of itself.
    """

    node_id: bytes
    volume: VolumeId
    namespace: NamespaceId
    volume_uuid: bytes
    epoch: int
    region_bytes: int
    size_bytes: int

    @property
    def regions(self) -> int:
        """Regions that hold extents: region 0, the label's, is not counted."""
        return self.size_bytes // self.region_bytes - 1

    def encode(self) -> bytes:
        """The label's block, `LABEL_BYTES` long."""
        assert len(self.node_id) == len(self.volume_uuid) == 16, (self.node_id, self.volume_uuid)
        body = LABEL.pack(
            LABEL_MAGIC,
            LABEL_VERSION,
            self.node_id,
            self.volume,
            self.namespace,
            self.volume_uuid,
            self.epoch,
            self.region_bytes,
            self.size_bytes,
        )
        return (body + LABEL_CRC.pack(crc32c(body))).ljust(LABEL_BYTES, b"\0")

    @staticmethod
    def present(block: bytes) -> bool:
        """Whether a block begins as a label does, readable or not."""
        return block.startswith(LABEL_MAGIC)

    @classmethod
    def decode(cls, block: bytes, where: str = "the volume") -> VolumeLabel:
        """The label in ``block``. Raises `VolumeMismatch` if there is none that this version reads."""
        if len(block) < LABEL.size + LABEL_CRC.size or not block.startswith(LABEL_MAGIC):
            raise VolumeMismatch(f"{where} has no Forebay label: it is another file, or was overwritten", field="magic")
        _magic, version, *values = LABEL.unpack_from(block)
        if version != LABEL_VERSION:
            raise VolumeMismatch(
                f"the label of {where} has version {version}: start the version of Forebay that wrote it",
                field="version",
                limit=LABEL_VERSION,
            )
        if LABEL_CRC.unpack_from(block, LABEL.size)[0] != crc32c(block[: LABEL.size]):
            raise VolumeMismatch(f"the label of {where} is damaged: its checksum does not match", field="checksum")
        node_id, volume, namespace, volume_uuid, epoch, region_bytes, size_bytes = values
        return cls(node_id, VolumeId(volume), NamespaceId(namespace), volume_uuid, epoch, region_bytes, size_bytes)
