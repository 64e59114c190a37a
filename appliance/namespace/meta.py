"""What a metadata directory says of itself: format, node, incarnation, epochs of the volumes, clean stop."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cbor2

from forebay.appliance.namespace.cbor_map import load_map
from forebay.appliance.namespace.store import Op, Store
from forebay.crashpoints import crash_point
from forebay.errors import ConfigInvalid, DataDirNewer, MetadataCorrupt

__all__ = ["FORMAT", "NodeMeta", "region_bytes_of"]

FORMAT = 1
"""Version of the directory as a whole; a higher one is refused."""


def region_bytes_of(store: Store) -> int:
    """The region size that a directory was made with. Raises `MetadataCorrupt`, also for one that holds no node."""
    region = load_map(store.get("meta", b"format") or b"", "meta.format").get("region")
    if not isinstance(region, int):
        raise MetadataCorrupt(f"a region size of {region!r}", field="meta.format")
    return region


@dataclass(slots=True)
class NodeMeta:
    """The node's identity and counters, as loaded; changes go through the methods, which make them durable."""

    store: Store
    node_id: bytes
    secret: bytes
    region_bytes: int
    incarnation: int
    confirmed_epoch: int
    intended_epoch: int
    was_clean: bool
    drives: dict[str, str]
    absent: dict[str, tuple[int, ...]]
    """Drives that a start went without, and the epochs that the labels there may have."""

    @classmethod
    async def load(cls, store: Store, random: Callable[[int], bytes], region_bytes: int) -> NodeMeta:
        """Read, or make in an empty store.

        Raises `DataDirNewer`, `MetadataCorrupt`, or `ConfigInvalid` for a directory made with another region size.
        """
        data = store.get("meta", b"format")
        if data is None:
            fresh = {
                "v": FORMAT,
                "node": uuid.UUID(bytes=random(16), version=4).bytes,
                "secret": random(32),
                "region": region_bytes,
            }
            data = cbor2.dumps(fresh, canonical=True)
            await store.write([Op("meta", b"format", data)])
        raw = load_map(data, "meta.format")
        version, node, secret, region = (raw.get(name) for name in ("v", "node", "secret", "region"))
        if isinstance(version, int) and version > FORMAT:
            raise DataDirNewer(f"metadata has format {version}", field="meta.format", limit=FORMAT)
        if (
            not isinstance(version, int)
            or not (isinstance(node, bytes) and len(node) == 16)
            or not (isinstance(secret, bytes) and len(secret) == 32)
        ):
            raise MetadataCorrupt("the format record has a field out of range", field="meta.format")
        if region != region_bytes:
            raise ConfigInvalid(
                f"this data directory has regions of {region} bytes, the configuration says {region_bytes}",
                field="space.region",
                limit=region,
            )
        try:
            drives = {k.decode()[6:]: str(uuid.UUID(v.decode())) for k, v in store.scan("meta", prefix=b"drive/")}
            absent = {k.decode()[7:]: tuple(map(int, cbor2.loads(v))) for k, v in store.scan("meta", prefix=b"absent/")}
        except (cbor2.CBORError, TypeError, ValueError) as e:
            raise MetadataCorrupt(f"a drive's record does not decode: {e}", field="meta.drive") from e
        number = cls._number
        return cls(
            store,
            node,
            secret,
            region,
            number(store, b"incarnation"),
            number(store, b"confirmed_epoch"),
            number(store, b"intended_epoch"),
            store.get("meta", b"clean") is not None,
            drives,
            absent,
        )

    @staticmethod
    def _number(store: Store, key: bytes) -> int:
        data = store.get("meta", key) or bytes(8)
        if len(data) != 8:
            raise MetadataCorrupt(f"the number {key.decode()} has {len(data)} bytes", field=f"meta.{key.decode()}")
        return int.from_bytes(data, "big")

    async def begin_incarnation(self) -> None:
        """A new incarnation and a new intended epoch; from here on a stop is not clean until `mark_clean`."""
        self.incarnation += 1
        self.intended_epoch = self.confirmed_epoch + 1
        await self.store.write(
            [
                Op("meta", b"incarnation", self.incarnation.to_bytes(8, "big")),
                Op("meta", b"intended_epoch", self.intended_epoch.to_bytes(8, "big")),
                Op("meta", b"clean", None),
            ]
        )
        crash_point("start.after_incarnation")

    async def confirm_epoch(self) -> None:
        """All labels carry the intended epoch."""
        crash_point("start.after_labels_before_confirm")
        await self.store.write([Op("meta", b"confirmed_epoch", self.intended_epoch.to_bytes(8, "big"))])
        self.confirmed_epoch = self.intended_epoch

    async def name_drive(self, name: str, drive_uuid: str) -> None:
        """Remember which drive is which."""
        crash_point("drive.after_identity_before_record")
        await self.store.write([Op("meta", b"drive/" + name.encode(), drive_uuid.encode())])
        self.drives[name] = drive_uuid

    async def forget_drive(self, name: str, volumes: Iterable[int]) -> None:
        """A drive is gone for good, with these volumes; what stands there at the next claim is a new one.

        Records of blocks on it are left to `recover`, which drops those of volumes that are not known.
        """
        ops = [Op("meta", prefix + name.encode(), None) for prefix in (b"drive/", b"absent/")]
        for volume in volumes:
            ops += self.store.deletes("regions", volume.to_bytes(4, "big"))
            ops.append(Op("state", b"volume/%d" % volume, None))
        await self.store.write(ops)
        self.drives.pop(name, None)
        self.absent.pop(name, None)

    async def note_absent(self, name: str, *epochs: int) -> None:
        """A drive is away, or about to be stamped after it was: its labels may have these epochs or noted ones.

        Of a drive that is noted already only the epoch that it is about to get is of interest.
        """
        known = self.absent.get(name)
        if known is not None and (len(epochs) > 1 or epochs[0] in known):
            return
        noted = (*(known or ()), *epochs)
        await self.store.write([Op("meta", b"absent/" + name.encode(), cbor2.dumps(noted))])
        self.absent[name] = noted

    async def note_present(self, name: str) -> None:
        """Every label of a drive that was away carries the confirmed epoch again."""
        if name in self.absent:
            await self.store.write([Op("meta", b"absent/" + name.encode(), None)])
            del self.absent[name]

    async def mark_clean(self) -> None:
        """Everything acknowledged is on stable media; the next start need not doubt it."""
        await self.store.write([Op("meta", b"clean", b"1")])
