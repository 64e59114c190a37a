"""A node over a simulated target: the engine as the control service sees it, with time, faults and restarts in hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forebay.appliance.dataplane.volumes import claim_drive
from forebay.appliance.namespace.blocks import Located
from forebay.appliance.namespace.desired_state import Grant, Principal
from forebay.appliance.namespace.meta import NodeMeta
from forebay.appliance.namespace.node import Node, NodeLimits
from forebay.appliance.namespace.room import Watermarks
from forebay.appliance.namespace.sessions import Session
from forebay.appliance.namespace.space import Drive
from forebay.appliance.namespace.store import MemoryStore, Store
from forebay.appliance.namespace.writes import Allocation, TileSum
from forebay.checksum import crc32c, tile_seed
from forebay.clock import ManualClock
from forebay.errors import OK
from forebay.ids import LBA_BYTES, BlockKey, Extent, HostIdentity, VolumeId, WriteId, align_up
from forebay.index import RowState
from forebay.schema import Group, HashAlgorithm, Schema
from tests.sim.target import SimHost, SimTarget

__all__ = ["ADMIN", "GRID", "MIB", "REGION", "Member", "Rig", "grid"]

MIB = 1 << 20
REGION = 64 * MIB
ADMIN = Principal("root", bytes(32), 0, admin=True)


def grid(tile_bytes: int = LBA_BYTES, *, layer_groups: int = 2, head_groups: int = 2) -> Schema:
    """A schema whose blocks have ``layer_groups × head_groups`` tiles of ``tile_bytes`` each."""
    group = Group(
        "full",
        layers=tuple(range(layer_groups)),
        block_tokens=1,
        kv_heads=head_groups,
        bytes_per_head=tile_bytes,
        dtype="bf16",
        format="plain",
        layer_groups=layer_groups,
        head_groups=head_groups,
    )
    return Schema("sim", b"m" * 32, HashAlgorithm("sha256", 1), (group,))


GRID = grid()


@dataclass(slots=True)
class Member:
    """One process of a session: its host, connected."""

    session: Session
    host: SimHost

    @property
    def identity(self) -> HostIdentity:
        return self.host.host


@dataclass
class Rig:
    """A node that can be stopped and started again over the same store, media and drive."""

    drive: Path
    capacity_regions: int = 4
    store: Store = field(default_factory=MemoryStore)
    target: SimTarget = field(default_factory=SimTarget)
    seed: int = 7
    checkpoint: Path | None = None
    limits: NodeLimits = field(
        default_factory=lambda: NodeLimits(REGION, max_blocks=1 << 16, watermarks=Watermarks(1.0, 1.0))
    )

    def __post_init__(self) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self._random = random.Random(self.seed)
        self.node: Node

    async def start(self) -> Node:
        """A new incarnation; as the daemon does it."""
        meta = await NodeMeta.load(self.store, self._random.randbytes, REGION)
        if not meta.drives:
            identity = claim_drive(self.drive, meta.node_id)
            await meta.name_drive("drive0", str(identity.drive_uuid))
        self.node = await Node.open(
            self.store,
            meta,
            self.target,
            drives=[Drive("drive0", str(self.drive), self.capacity_regions)],
            limits=self.limits,
            clock=self.clock,
            random=self._random.randbytes,
            checkpoint=self.checkpoint,
        )
        await self.node.release_empty_regions()
        return self.node

    async def begin(self) -> Member:
        """Start, and make a namespace and a session with it."""
        await self.start()
        await self.namespace()
        return await self.open()

    async def restart(self, *, clean: bool = False) -> Node:
        """Stop (cleanly, or as a kill does) and start."""
        if clean:
            await self.node.close()
        return await self.start()

    async def namespace(self, name: str = "t/n", **options: int | str) -> None:
        """Make a namespace."""
        await self.node.create_namespace(name, **options)

    async def open(
        self,
        name: str = "t/n",
        schema: Schema = GRID,
        *,
        generation: int = 0,
        scopes: Sequence[str] = (),
        principal: Principal = ADMIN,
    ) -> Member:
        """A session with one process, connected."""
        session, host, _ = await self.node.open_session(
            principal, name, schema_cbor=schema.cbor, generation=generation, scopes=scopes, client="test"
        )
        return Member(session, SimHost(self.target, session.access.namespace.tenant, host))

    async def join(self, member: Member) -> Member:
        """Another process of the same session."""
        session, host = await self.node.join_session(ADMIN, member.session.token)
        return Member(session, SimHost(self.target, session.access.namespace.tenant, host))

    async def principal(self, name: str, *grants: Grant) -> Principal:
        """A principal with these grants."""
        await self.node.state.add_principal(Principal(name, name.encode().ljust(32), 0, grants=grants))
        found = self.node.state.principals.get(name)
        assert found is not None
        return found

    # ------------------------------------------------------------------------------------------------ writing

    async def allocate(
        self,
        member: Member,
        *keys: bytes | BlockKey,
        size: int | None = None,
        hosts: Sequence[Member] = (),
        ttl_ms: int = 30_000,
        tail: bytes = b"",
        retain_until_ms: int = 0,
    ) -> list[Allocation]:
        """Allocate for a member, or for these."""
        return await self.node.writes.allocate(
            member.session,
            [block(k) for k in keys],
            None if size is None else [size] * len(keys),
            hosts=[m.identity for m in hosts or (member,)],
            ttl_ms=ttl_ms,
            tails=[tail] * len(keys),
            retain_until_ms=retain_until_ms,
        )

    def sums(self, member: Member, key: bytes | BlockKey, write: WriteId, value: bytes) -> list[TileSum]:
        """Checksums of all tiles of a value."""
        layout = member.session.schema.groups[block(key).group].layout(len(value))
        stored = member.session.stored_keys([block(key)])[0]
        return [
            TileSum(t, crc32c(value[at : at + n], tile_seed(stored, t, write)))
            for t, (at, n) in enumerate(zip(layout.value_offsets, layout.lengths, strict=True))
        ]

    def write(self, member: Member, key: bytes | BlockKey, extent: Extent, value: bytes) -> None:
        """Write a value's tiles to its extent."""
        layout = member.session.schema.groups[block(key).group].layout(len(value))
        for at, where, length in zip(layout.value_offsets, layout.offsets, layout.lengths, strict=True):
            tile = value[at : at + length].ljust(align_up(length), b"\0")
            member.host.write(extent.volume, extent.offset_bytes + where, tile)

    async def put(self, member: Member, key: bytes | BlockKey, value: bytes, **options: int | bytes) -> int:
        """Allocate, write, commit; the status that ended it."""
        (row,) = await self.allocate(member, key, size=len(value), **options)  # type: ignore[arg-type]
        if row.extent is None:
            return row.status
        written = [self.written(member, key, row, value)]
        (status,) = await self.node.writes.commit(member.session, written, host=member.identity)
        return status

    def written(
        self, member: Member, key: bytes | BlockKey, row: Allocation, value: bytes
    ) -> tuple[WriteId, list[TileSum]]:
        """Write a value to where it was allocated; what its commit names."""
        assert row.extent is not None
        self.write(member, key, row.extent, value)
        return row.write_id, self.sums(member, key, row.write_id, value)

    # ------------------------------------------------------------------------------------------------ reading

    async def get(self, member: Member, key: bytes | BlockKey) -> bytes | None:
        """Acquire, read, verify as a client does, release; None for a miss. Raises what a wrong byte deserves."""
        located = self.node.blocks.acquire_at_once(member.session, [block(key)], 10_000)
        if located is None:
            located = await self.node.blocks.acquire(member.session, [block(key)], 10_000)
        if located.status[0] != OK:
            return None
        value = self.read(member, key, located)
        self.node.blocks.release(member.session, [located.lease])
        return value

    def read(self, member: Member, key: bytes | BlockKey, located: Located) -> bytes:
        """The bytes at a location, each tile checked."""
        volume, offset = int(located.volumes[0]), int(located.offsets[0])
        layout = member.session.schema.groups[block(key).group].layout(int(located.value_lengths[0]))
        stored = member.session.stored_keys([block(key)])[0]
        write, sums = located.write_ids[0].tobytes(), located.checksums
        tiles = []
        for t, (where, length) in enumerate(zip(layout.offsets, layout.lengths, strict=True)):
            tile = member.host.read(VolumeId(volume), offset + where, length)
            want = int.from_bytes(sums[4 * t : 4 * t + 4], "little")
            if crc32c(tile, tile_seed(stored, t, write)) != want:
                raise AssertionError(f"tile {t} of {key!r} does not verify")
            tiles.append(tile)
        return b"".join(tiles)

    def present(self, member: Member, *keys: bytes | BlockKey) -> list[bool]:
        """What Match says."""
        return (self.node.blocks.match(member.session, [block(k) for k in keys])[0] == OK).tolist()  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------ checks

    def check(self) -> None:
        """What must hold at every moment between calls: owners, accounting, metadata and free map agree."""
        node, space, index = self.node, self.node.engine.space, self.node.engine.index
        owners: dict[tuple[int, int], str] = {}
        used: dict[int, int] = {}

        def own(volume: int, offset: int, length: int, who: str) -> None:
            assert (volume, offset) not in owners, f"{who} and {owners[volume, offset]} own {volume}:{offset}"
            owners[volume, offset] = who
            used[volume] = used.get(volume, 0) + length

        scoped: Counter[tuple[int, int]] = Counter()
        rows = [r for r in range(index.high) if index.state[r] != RowState.FREE]
        for row in rows:
            name = f"row {row} ({RowState(index.state[row]).name})"
            own(int(index.volume[row]), int(index.offset[row]), int(index.length[row]), name)
            scoped[int(index.namespace[row]), int(index.scope[row])] += int(index.length[row])
        for entry in space.quarantine:
            if not space.quarantine.leased(entry):  # else its retired row still owns it
                own(*_place(entry.extent), "quarantine")
        for write in node.writes._by_digest.values():
            if write.extent is not None:
                own(*_place(write.extent), f"write {write.write_id.hex()} ({write.state.value})")
                scoped[write.session.namespace, write.scope] += write.extent.length_bytes
        for namespace in {n for n, _ in scoped} | {n.id for n in node.state.namespaces}:
            counted = {s: used for (n, s), used in scoped.items() if n == namespace}
            assert space.scopes_of(namespace) == counted, f"{namespace}: {space.scopes_of(namespace)} is not {counted}"
        _no_overlap(owners, node)
        for volume, extents in space.maps.items():
            slots = {(r.slot_bytes, r.slots, r.free_slots, int(r.free.sum())) for r in extents.claimed.values()}
            assert all(free == counted for _, _, free, counted in slots)
            taken = sum((r.slots - r.free_slots) * r.slot_bytes for r in extents.claimed.values())
            assert extents.used_bytes == taken == used.get(volume, 0), (extents.used_bytes, taken, used.get(volume, 0))
        for drive in space.drives.values():
            held = sum(len(space.maps[v.id].claimed) for v in space.volumes.values() if v.drive == drive.name)
            assert drive.claimed_regions == held <= drive.capacity_regions
        self._check_metadata(rows)

    def _check_metadata(self, rows: Sequence[int]) -> None:
        index, store = self.node.engine.index, self.store
        found = [r for r in rows if index.state[r] in (RowState.VISIBLE, RowState.SUSPECT)]
        keys = self.node.engine.keys_of(_array(found))
        for row, key in zip(found, keys, strict=True):
            assert store.get("blocks", key) is not None, f"row {row} has no record"
        assert index.count == len(found)
        assert (index.find(index.digests(keys)) == found).all()


def block(key: bytes | BlockKey) -> BlockKey:
    return key if isinstance(key, BlockKey) else BlockKey(key)


def _array(rows: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64)


def _place(extent: Extent) -> tuple[int, int, int]:
    return extent.volume, extent.offset_bytes, extent.length_bytes


def _no_overlap(owners: dict[tuple[int, int], str], node: Node) -> None:
    regions = {(v, r.number): r for v, m in node.engine.space.maps.items() for r in m.claimed.values()}
    end_of: dict[int, tuple[int, str]] = {}
    for (volume, offset), who in sorted(owners.items()):
        end, other = end_of.get(volume, (0, ""))
        assert offset >= end, f"{who} and {other} overlap at {volume}:{offset}"
        region = regions.get((VolumeId(volume), offset // REGION))
        assert region is not None, f"{who} lies in a region that is not claimed"
        end_of[volume] = (offset + region.slot_bytes, who)
