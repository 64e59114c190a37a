"""Write plans: what a leader's `Client.allocate` got, in a form that the other ranks of its session can be handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from google.protobuf.message import DecodeError

from forebay.client.buffers import readable
from forebay.client.layouts import check_tiles, group_of, selected_bytes
from forebay.errors import OK, InvalidArgument, ValueSize, reason
from forebay.ids import LBA_BYTES, MAX_VALUE_BYTES, BlockKey, Extent, VolumeId, check_keys
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_from_proto, keys_to_proto, pack, rows16, unpack
from forebay.schema import Schema

__all__ = ["MAX_PLAN_BYTES", "PLAN_VERSION", "PlannedWrite", "WritePlan", "plan_values", "value_lengths"]

PLAN_VERSION = 1
MAX_PLAN_BYTES = 32 << 20
"""A plan of as many keys as a call takes, each as long as can be, is smaller."""
_MAX_EXTENT_BYTES = 2 * MAX_VALUE_BYTES
_NO_WRITE_ID = bytes(16)


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """One block of a plan: write ``extent`` and commit under ``write_id``, if ``code`` is 0; else why not.

    ``length_bytes`` is the exact size of the whole value.
    """

    key: BlockKey
    length_bytes: int
    code: int
    write_id: bytes = _NO_WRITE_ID
    extent: Extent | None = None


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Blocks that the ranks of one session write between them; see `Client.allocate`.

    A plan is no secret and gives no right: the target lets those hosts write that the leader named.
    """

    session: bytes
    writes: tuple[PlannedWrite, ...]
    tag: int = 0
    """What the write commands carry, so that those of an earlier plan for the same place are told from them."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """A word a block: ``ok`` (to be written), ``already_exists``, ``pending`` (another writer has it), ..."""
        return tuple([reason(write.code) for write in self.writes])

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """The blocks."""
        return tuple([write.key for write in self.writes])

    def __len__(self) -> int:
        return len(self.writes)

    def take(self, rows: Sequence[int]) -> WritePlan:
        """The plan of some of the blocks, by number: for ranks that take turns, or write as blocks get ready."""
        if not all(0 <= row < len(self.writes) for row in rows) or len(set(rows)) != len(rows):
            raise InvalidArgument(f"rows {list(rows)} of a plan of {len(self)}", field="rows", limit=len(self) - 1)
        return replace(self, writes=tuple([self.writes[row] for row in rows]))

    def to_bytes(self) -> bytes:
        """For the other ranks, whatever the way there. Format: the protocol's `WritePlan`."""
        extents = [write.extent or Extent(VolumeId(0), 0, 0) for write in self.writes]
        message = pb.WritePlan(
            version=PLAN_VERSION,
            session=self.session,
            keys=keys_to_proto(self.keys),
            value_lengths=pack("u64", [write.length_bytes for write in self.writes]),
            status=pack("u16", [write.code for write in self.writes]),
            write_ids=b"".join([write.write_id for write in self.writes]),
            volumes=pack("u32", [extent.volume for extent in extents]),
            offsets=pack("u64", [extent.offset_bytes for extent in extents]),
            lengths=pack("u64", [extent.length_bytes for extent in extents]),
            write_tag=self.tag,
        )
        return message.SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read and check a plan. Raises `InvalidArgument`, whatever ``data`` is."""
        if len(data) > MAX_PLAN_BYTES:
            raise InvalidArgument(f"a plan of {len(data)} bytes", field="plan", limit=MAX_PLAN_BYTES)
        try:
            message = pb.WritePlan.FromString(bytes(data))
        except DecodeError as e:
            raise InvalidArgument("these bytes are no write plan", field="plan") from e
        if message.version != PLAN_VERSION:
            raise InvalidArgument(
                f"a write plan of version {message.version}: the ranks of a session need the same release",
                field="plan.version",
                limit=PLAN_VERSION,
            )
        if len(message.session) != len(_NO_WRITE_ID):
            raise InvalidArgument("a write plan without its session", field="plan.session")
        keys = keys_from_proto(message.keys)
        check_keys(keys, unique=True)
        count = len(keys)
        write_ids = rows16(message.write_ids, "plan.write_ids")
        if len(write_ids) != count:
            raise InvalidArgument(f"{len(write_ids)} write ids for {count} keys", field="plan.write_ids", limit=count)
        columns = zip(
            keys,
            unpack("u64", message.value_lengths, "plan.value_lengths", count),
            unpack("u16", message.status, "plan.status", count),
            write_ids,
            zip(
                unpack("u32", message.volumes, "plan.volumes", count),
                unpack("u64", message.offsets, "plan.offsets", count),
                unpack("u64", message.lengths, "plan.lengths", count),
                strict=True,
            ),
            strict=True,
        )
        return cls(message.session, tuple([_write(*row) for row in columns]), message.write_tag)


def _write(key: BlockKey, value_bytes: int, code: int, write_id: bytes, place: tuple[int, int, int]) -> PlannedWrite:
    volume, offset_bytes, length_bytes = place
    if not 1 <= value_bytes <= MAX_VALUE_BYTES:
        raise InvalidArgument(f"a value of {value_bytes} bytes", field="plan.value_lengths", limit=MAX_VALUE_BYTES)
    if code != OK:
        return PlannedWrite(key, value_bytes, code)
    if offset_bytes % LBA_BYTES or length_bytes % LBA_BYTES or not value_bytes <= length_bytes <= _MAX_EXTENT_BYTES:
        raise InvalidArgument(
            f"an extent of {length_bytes} bytes at {offset_bytes} for a value of {value_bytes}", field="plan.lengths"
        )
    return PlannedWrite(key, value_bytes, code, write_id, Extent(VolumeId(volume), offset_bytes, length_bytes))


def value_lengths(schema: Schema, keys: Sequence[BlockKey], lengths: Sequence[int] | None) -> list[int]:
    """The bytes of each block's value: as given, or as the schema has it. Raises `InvalidArgument`, `ValueSize`."""
    if lengths is not None and len(lengths) != len(keys):
        raise InvalidArgument(f"{len(lengths)} lengths for {len(keys)} keys", field="lengths", limit=len(keys))
    return [
        group_of(schema, key).layout(None if lengths is None else lengths[i]).value_bytes for i, key in enumerate(keys)
    ]


def plan_values(
    schema: Schema, plan: WritePlan, tiles: Sequence[int] | None, values: Sequence[Any]
) -> list[memoryview]:
    """A caller's ``values`` for the tiles of a plan's blocks, as bytes; empty where nothing is to be written.

    Raises `InvalidArgument` and its kin for what does not fit the plan, and for a plan that does not fit the schema.
    """
    if len(values) != len(plan):
        raise InvalidArgument(f"{len(values)} values for {len(plan)} blocks", field="values", limit=len(plan))
    views: list[memoryview] = []
    for i, write in enumerate(plan.writes):
        if write.code != OK or write.extent is None:
            views.append(memoryview(b""))
            continue
        group = group_of(schema, write.key)
        check_tiles(group, tiles)
        layout = group.layout(write.length_bytes)
        if layout.extent_bytes > write.extent.length_bytes:
            raise InvalidArgument(f"block {i} of the plan has an extent too small for it", field="plan.lengths")
        view = readable(values[i], f"values[{i}]")
        size = selected_bytes(layout, tiles)
        if len(view) != size:
            raise ValueSize(f"values[{i}] has {len(view)} bytes", field=f"values[{i}]", limit=size)
        views.append(view)
    return views
