"""What the node answers, decoded; what is malformed in an answer is the node's fault, never the caller's."""

from __future__ import annotations

from typing import Any

import cbor2

from forebay.client.results import BlockStat, KeyspaceInfo, StatResult, WatchEvent
from forebay.errors import OK, InvalidArgument, ProtocolError, SchemaInvalid, reason
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import rows16, unpack
from forebay.schema import Schema

__all__ = ["column", "event", "keyspaces", "stats"]

_POLICIES = {0: "flush", 1: "verify", 2: "volatile"}


def column(kind: str, data: bytes, field: str, count: int | None = None) -> list[int]:
    """A column of an answer: what is malformed there is the node's fault."""
    try:
        return unpack(kind, data, field, count)
    except InvalidArgument as e:
        raise ProtocolError(f"the node's answer is malformed: {e.message}") from e


def stats(reply: pb.StatReply, count: int) -> list[StatResult]:
    """The rows of Stat's answer. Raises `ProtocolError`."""
    status = column("u16", reply.status, "status", count)
    if all(status):
        return [StatResult(reason(code)) for code in status]
    columns = zip(
        column("u64", reply.value_lengths, "value_lengths", count),
        column("u64", reply.extent_lengths, "extent_lengths", count),
        column("u16", reply.tiles, "tiles", count),
        column("u64", reply.created_unix_ms, "created_unix_ms", count),
        column("u16", reply.pins, "pins", count),
        column("u16", reply.leases, "leases", count),
        column("u32", reply.volumes, "volumes", count),
        column("u64", reply.offsets, "offsets", count),
        column("u8", reply.policies, "policies", count),
        strict=True,
    )
    about = [_about(row) for row in reply.about] or [{}] * count
    if len(about) != count:
        raise ProtocolError("the node's answer does not describe each block")
    if len(reply.write_ids) != 16 * count:
        raise ProtocolError("the node's answer lacks write ids")
    write_ids = rows16(reply.write_ids, "write_ids")
    blocks = [
        BlockStat(
            length_bytes=row[0],
            extent_bytes=row[1],
            tiles=row[2],
            created_unix_ms=row[3],
            pins=row[4],
            leases=row[5],
            write_id=write_ids[i],
            volume=row[6],
            offset_bytes=row[7],
            durability=_POLICIES.get(row[8], f"policy {row[8]}"),
            describe=about[i].get("d", {}),
            hints=about[i].get("h", {}),
        )
        for i, row in enumerate(columns)
    ]
    return [StatResult(reason(code), block if code == OK else None) for code, block in zip(status, blocks, strict=True)]


def _about(tail: bytes) -> dict[str, dict[str, Any]]:
    """What a writer said of a block."""
    if not tail:
        return {}
    try:
        found = cbor2.loads(tail)
    except Exception as e:  # cbor2 raises many kinds on what is malformed
        raise ProtocolError(f"the node's answer does not describe blocks in CBOR: {e}") from e
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise ProtocolError("the node's answer describes blocks by something else than maps")
    return found


def keyspaces(reply: pb.KeyspacesReply) -> list[KeyspaceInfo]:
    """The rows of Keyspaces' answer. Raises `ProtocolError`."""
    try:
        schemas = [Schema.from_cbor(data) for data in reply.schemas]
    except SchemaInvalid as e:
        raise ProtocolError(f"the node's answer has a schema that is none: {e.message}") from e
    generations = column("u64", reply.generations, "generations", len(schemas))
    if b"".join(schema.keyspace for schema in schemas) != reply.keyspaces:
        raise ProtocolError("the node's answer has keyspaces of other schemas")
    return [
        KeyspaceInfo(schema.keyspace, generation, schema)
        for schema, generation in zip(schemas, generations, strict=True)
    ]


def event(log: int, message: pb.Event) -> WatchEvent:
    """One event of the log ``log``."""
    return WatchEvent(
        log,
        message.sequence,
        message.kind,
        message.key,
        message.group,
        message.scope,
        message.generation,
        message.keyspace,
        message.reason,
        message.describe,
        message.value_length,
    )
