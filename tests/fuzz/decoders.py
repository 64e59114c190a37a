"""Everything that is decoded from a disk or from a peer without a state machine around it.

Damaged bytes are refused with a coded error, or they decode to what was encoded: never to something else where a
checksum stands, and never in another way than by `ForebayError`.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import uuid
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cbor2

from forebay.appliance.dataplane.labels import DriveIdentity, decode_identity, encode_identity
from forebay.appliance.namespace.checkpoint import load_checkpoint
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.records import PREFIX, Durability, Record
from forebay.checksum import crc32c
from forebay.client import WritePlan
from forebay.client.plans import PlannedWrite
from forebay.errors import ForebayError
from forebay.ids import BlockKey, Extent, NamespaceId, VolumeId, WriteId, align_up
from forebay.index import COLUMNS, BlockIndex
from forebay.nvmetcp import command as nvme
from forebay.nvmetcp import spec
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_from_proto, keys_to_proto
from forebay.schema import Group, HashAlgorithm, Schema
from forebay.volume_label import LABEL_BYTES, VolumeLabel
from tests.fuzz.source import Source
from tests.fuzz.target import memory_dir
from tests.fuzz.watch import Faults

__all__ = ["changed", "run"]

_NODE = bytes(range(16))


def changed(source: Source, data: bytes) -> bytes:
    """Bytes with some damage: as drives, bugs and people do it."""
    out = bytearray(data)
    for _ in range(1 + source.below(3)):
        at, kind = source.below(len(out) + 1), source.below(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << source.below(8)
        elif kind == 1 and at < len(out):
            out[at] = source.pick([0, 0xFF, source.below(256)])
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = source.take(8)
        elif kind == 4:
            out[at : at + 8] = source.take(8)
        else:
            del out[at : at + source.below(16)]
    return bytes(out)


def _refused(decode: Callable[[], Any]) -> Any:
    """What it decodes to, or None if it was refused as it has to be."""
    try:
        return decode()
    except ForebayError:
        return None


def _record(source: Source) -> Record:
    tiles = 1 + source.below(5)
    tail = cbor2.dumps({"d": {"parent": source.take(8)}, "h": {}}, canonical=True) if source.chance(2) else b""
    return Record(
        WriteId(source.take(16).ljust(16, b"w")),
        Extent(VolumeId(source.number(32)), source.number(64), source.number(64)),
        source.number(64),
        tuple(source.number(32) for _ in range(tiles)),
        source.pick(list(Durability)),
        source.number(64),
        source.number(64),
        tail=tail,
    )


def _records(source: Source) -> None:
    record = _record(source)
    raw = record.encode()
    assert Record.decode(raw) == record
    bad = changed(source, raw)
    found = _refused(lambda: Record.decode(bad))
    assert found is None or bad == raw, "a damaged record was taken for a whole one"
    if source.chance(2) and len(bad) >= PREFIX.size:  # as a program with a mistake would write it
        zeroed = bad[:92] + bytes(4) + bad[96:]
        sealed = bad[:92] + crc32c(zeroed).to_bytes(4, "little") + bad[96:]
        again = _refused(lambda: Record.decode(sealed))
        if again is not None:
            _refused(again.described)


def _labels(source: Source) -> None:
    numbers = [source.number(32), source.number(32), source.number(64), source.number(64), source.number(64)]
    label = VolumeLabel(_NODE, VolumeId(numbers[0]), NamespaceId(numbers[1]), bytes(16), *numbers[2:])
    raw = label.encode()
    assert VolumeLabel.decode(raw) == label
    bad = changed(source, raw[:128]).ljust(LABEL_BYTES, b"\0") if not source.chance(4) else source.take(200)
    found = _refused(lambda: VolumeLabel.decode(bad))
    assert found is None or found == label, "a damaged label was taken for another"
    text = encode_identity(DriveIdentity(_NODE, uuid.UUID(bytes=_NODE)))
    spoilt = changed(source, text.encode()).decode("utf-8", "replace")
    if source.chance(8):
        spoilt = source.pick(["[" * 100_000, '{"version": 1}', "[]", "null", '{"version": ' + "9" * 5000 + "}"])
    _refused(lambda: decode_identity(spoilt, "the drive"))


def _schema() -> Schema:
    group = Group("full", tuple(range(4)), 16, 8, 256, "bf16", "plain", layer_groups=2, head_groups=2)
    return Schema("vllm", b"m" * 32, HashAlgorithm("sha256", 16), (group, group), probe=b"p" * 32)


def _schemas(source: Source) -> None:
    schema = _schema()
    raw: Any = cbor2.loads(schema.cbor)
    kind = source.below(4)
    if kind == 0:
        data = changed(source, schema.cbor)
    elif kind == 1:
        data = source.take(400)
    elif kind == 2:
        data = b"\x81" * source.pick([10, 2000, 60_000]) + b"\x80"
    else:
        odd: list[Any] = [None, -1, 1 << 70, b"", "x" * 200, [], {}, [[]], 1.5, True, schema.groups[0].layers, {"a": 1}]
        place = source.pick([raw, raw["groups"][0], raw["hash"], raw["groups"][0]["scales"], raw["groups"][1]])
        place[source.pick(sorted(place))] = source.pick(odd)
        data = cbor2.dumps(raw, canonical=True)
    found = _refused(lambda: Schema.from_cbor(data))
    if found is not None:
        assert found.cbor == data and Schema.from_cbor(found.cbor) == found
        for group in found.groups:
            layout = _refused(lambda g=group: g.layout(4096))  # type: ignore[misc]  # bound at once
            assert layout is None or layout.extent_bytes == sum(map(align_up, layout.lengths))


def _plans(source: Source) -> None:
    count = 1 + source.below(3)
    writes = tuple(
        PlannedWrite(BlockKey(b"k%d" % i), 5000, 0, bytes([i]) * 16, Extent(VolumeId(1), i * 8192, 8192))
        for i in range(count)
    )
    raw = WritePlan(b"s" * 16, writes, 7).to_bytes()
    assert WritePlan.from_bytes(raw).writes == writes
    if source.chance(2):
        message = pb.WritePlan.FromString(raw)
        for _ in range(1 + source.below(2)):
            name = source.pick(["session", "value_lengths", "status", "write_ids", "volumes", "offsets", "lengths"])
            setattr(message, name, changed(source, getattr(message, name)))
        raw = message.SerializeToString()
    else:
        raw = changed(source, raw)
    found = _refused(lambda: WritePlan.from_bytes(raw))
    if found is not None:
        assert all(w.extent is None or w.extent.length_bytes >= w.length_bytes for w in found.writes)
        assert WritePlan.from_bytes(found.to_bytes()).writes == found.writes


def _keys(source: Source) -> None:
    message = pb.Keys(
        data=source.take(source.below(100)),
        stride=source.pick([0, 0, 1, 4, 36, 1025, source.number(32)]),
        lengths=source.take(source.below(20)),
        groups=source.take(source.below(12)),
        scopes=source.take(source.below(12)),
    )
    keys = _refused(lambda: keys_from_proto(message, allow_empty_key=source.chance(4)))
    if keys is not None:
        assert b"".join(k.key for k in keys) == message.data
        assert keys_from_proto(keys_to_proto(keys), allow_empty_key=True) == keys


def _nvme(source: Source) -> None:
    raw = source.take(200).ljust(4096, source.pick([b"\0", b"\xff", b"a"]))
    data = nvme.ConnectData.from_bytes(raw[: spec.CONNECT_DATA.size_bytes])
    for nqn in (data.subsystem_nqn, data.host_nqn):
        assert nqn is None or 1 <= len(nqn.encode()) <= spec.NQN_MAX_BYTES
    identity = nvme.ControllerIdentity.from_bytes(raw)
    assert identity.in_capsule_bytes >= 0 and identity.max_transfer_bytes != 0
    assert nvme.NamespaceIdentity.from_bytes(raw).lba_bytes >= 1
    assert all(nvme.active_namespaces(raw))
    assert all(value for value in nvme.namespace_descriptors(raw).values())


# --- the checkpoint of the index ---


@lru_cache(maxsize=1)
def _checkpoint() -> tuple[list[bytes], Path]:
    """The parts of a small checkpoint, and where to put damaged ones."""
    index = BlockIndex(bytes(32), 64)
    header = {"v": 1, "node": _NODE, "change": 3, "high": 4, "columns": list(COLUMNS)}
    parts = [cbor2.dumps(header, canonical=True), *(getattr(index, name)[:4].tobytes() for name in COLUMNS)]
    index.pool(2).make_room(3)
    parts += [cbor2.dumps({2: 3}, canonical=True), index.pools[2].data[:3].tobytes()]
    directory = tempfile.mkdtemp(prefix="forebay-fuzz-", dir=memory_dir())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return parts, Path(directory) / "index.checkpoint"


def _checkpoints(source: Source) -> None:
    parts, path = list(_checkpoint()[0]), _checkpoint()[1]
    sealed = source.chance(2)  # the damage is inside a CRC, as a program with a mistake would write it
    if sealed:
        at = source.pick([0, len(parts) - 2, source.below(len(parts))])
        values: list[Any] = [{}, [], 7, {2: -1}, {2: 1 << 40}, {"x": 1}, {1 << 70: 1}, {2: "a"}, {"v": 1}, None, {2: 3}]
        header = cbor2.loads(parts[0])
        header[source.pick(sorted(header))] = source.pick([None, -1, 1 << 70, [], 4, 64, b"x", "high"])
        parts[at] = source.pick([cbor2.dumps(source.pick(values)), cbor2.dumps(header), changed(source, parts[at])])
    raw = b"".join(len(p).to_bytes(8, "little") + p + crc32c(p).to_bytes(4, "little") for p in parts)
    path.write_bytes(raw if sealed else changed(source, raw))
    engine = cast("Engine", SimpleNamespace(index=BlockIndex(bytes(32), 64), changes=SimpleNamespace(last=10, base=0)))
    found = _refused(lambda: load_checkpoint(engine, path, _NODE))
    assert found is None or sealed or path.read_bytes().startswith(raw), "a damaged checkpoint was taken"


def run(data: bytes) -> None:
    """One decoder, one input."""
    faults, source = Faults.install(), Source(data)
    source.pick([_records, _labels, _schemas, _plans, _keys, _nvme, _checkpoints])(source)
    faults.check()
