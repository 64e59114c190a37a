"""Control calls with any content, against a whole node over a simulated target: coded answers, and nothing else harmed.

A neighbour's blocks, in a namespace that no drawn call names, are there with their bytes after each input, and what the
node holds adds up.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from forebay.appliance.control.admin_calls import AdminCalls
from forebay.appliance.control.administration import Administration
from forebay.appliance.control.calls import Calls, Method, Stream
from forebay.appliance.control.data_calls import DataCalls
from forebay.errors import OK, ForebayError, reason
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import pack
from forebay.schema import Schema
from tests.fuzz.source import Source
from tests.fuzz.target import memory_dir
from tests.fuzz.watch import Faults
from tests.sim.rig import ADMIN, GRID, Member, Rig

__all__ = ["Messages", "run"]

_CALLS = 24
_KEYS = (b"k0", b"k1", b"k2", b"k3")
_NAMES = ("t/n", "t/m", "default/default", "t", "", "/", "t/\0", "x" * 200, "t/n/o", "*")
_WORDS = ("read", "write", "delete", "pin", "flush", "verify", "volatile", "lru", "none", "quota_bytes", "ttl_ms", "é")
_VALUE = bytes(range(256)) * 64  # the grid's four tiles


class Messages:
    """Draws request messages: fields by their kind and name, half of them left out or as they should be."""

    def __init__(self, source: Source, known: dict[str, list[Any]]) -> None:
        self._source = source
        self.known = known
        """Values that the node gave: sessions, tokens, write ids, leases, host NQNs."""

    def fill(self, message: Message, depth: int = 0) -> Any:
        """The message, with fields."""
        for field in message.DESCRIPTOR.fields:
            if self._source.chance(24 if field.name == "context" else 4):
                continue
            if field.message_type is not None:
                if depth < 3:
                    self._fill_message(message, field, depth)
            elif field.is_repeated:
                getattr(message, field.name).extend(self._scalar(field) for _ in range(self._source.below(4)))
            else:
                setattr(message, field.name, self._scalar(field))
        if not depth and not self._source.chance(4):
            self._agree(message)
        return message

    def _agree(self, message: Any) -> None:
        """Let columns be as long as each other, so that what comes behind that check is reached too."""
        if isinstance(message, pb.AllocateRequest):
            rows = len(message.keys.data) // 2
            message.value_lengths = pack("u64", [len(_VALUE)] * rows)
            del message.host_nqns[:]
            message.host_nqn = self._source.pick(self.known["texts"])
            message.ClearField("describe")
        elif isinstance(message, pb.CommitRequest) and self.known["write_ids"]:
            ids = [self._source.pick(self.known["write_ids"]) for _ in range(1 + self._source.below(2))]
            message.write_ids = b"".join(ids)
            tiles = self._source.pick([4, 1, 2])
            message.checksums = pack("u32", [self._source.number(32) for _ in range(tiles * len(ids))])
            if self._source.chance(2):
                message.tile_counts = pack("u16", [tiles] * len(ids))
                message.tiles = pack("u16", [*range(tiles)] * len(ids))
            else:
                message.tile_counts = message.tiles = b""

    def _fill_message(self, message: Message, field: Any, depth: int) -> None:
        inner = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            for _ in range(self._source.below(3)):
                inner[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated:
            for _ in range(self._source.below(3)):
                self.fill(inner.add(), depth + 1)
        elif field.message_type.name == "Context" and not self._source.chance(8):
            inner.CopyFrom(self._source.pick(self.known["contexts"]))
        elif field.message_type.name == "AdminContext":
            inner.deadline_ms = self._source.pick([0, 0xFFFFFFFF]) if self._source.chance(12) else 5000
        elif field.message_type.name == "Keys" and not self._source.chance(4):
            self._fill_keys(inner)
        else:
            self.fill(inner, depth + 1)

    def _fill_keys(self, keys: Any) -> None:
        source = self._source
        found = [source.pick(_KEYS) for _ in range(1 + source.below(4))]
        keys.data = b"".join(found)
        if source.chance(2):
            keys.stride = 2
        else:
            keys.lengths = pack("u16", [len(key) for key in found])
        if source.chance(4):
            keys.groups = pack("u16", [source.pick([0, 0, 1, 65_535]) for _ in found])
        if source.chance(4):
            keys.scopes = pack("u32", [source.pick([0, 0, 1, 0xFFFFFFFF]) for _ in found])

    def _scalar(self, field: Any) -> Any:
        source = self._source
        kind = field.type
        if kind == FieldDescriptor.TYPE_STRING:
            return source.pick([*_NAMES[:3], *self.known["texts"], *_NAMES, *_WORDS])
        if kind == FieldDescriptor.TYPE_BYTES:
            return self._bytes(field.name)
        if kind == FieldDescriptor.TYPE_BOOL:
            return source.chance(2)
        bits = 32 if kind == FieldDescriptor.TYPE_UINT32 else 64
        if field.name == "deadline_ms" or source.chance(3):
            return source.pick([1, 0, 0xFFFFFFFF]) if source.chance(6) else 5000
        if field.name in ("lease_ttl_ms", "ttl_ms", "limit", "group", "scope"):
            return source.pick([0, 1, source.number(32)])
        return source.number(bits)

    def _bytes(self, name: str) -> bytes:
        source = self._source
        if name == "schema":
            return source.pick([GRID.cbor, Schema.opaque().cbor, source.take(60)])
        if name in ("session", "token", "write_ids", "leases") and self.known[name] and not source.chance(4):
            return b"".join(source.pick(self.known[name]) for _ in range(1 + source.below(3)))
        if name in ("value_lengths", "lengths", "offsets", "leases", "token_hashes"):
            return pack("u64", [source.pick([len(_VALUE), source.number(64)]) for _ in range(source.below(5))])
        if name in ("checksums",):
            return pack("u32", [source.number(32) for _ in range(source.pick([4, 8, source.below(9)]))])
        if name in ("tiles", "tile_counts"):
            return pack("u16", [source.pick([source.below(5), source.number(16)]) for _ in range(source.below(9))])
        if name in ("prefix", "after"):
            return source.pick([b"", b"k", b"k0", b"\xff" * 1024, b"x" * 1025, source.take(20)])
        return source.take(source.below(64))


class _Node:
    """A node with a neighbour, and what a hostile client knows of it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.known: dict[str, list[Any]] = {
            "contexts": [], "texts": [], "session": [], "token": [], "write_ids": [], "leases": [],
        }  # fmt: skip
        node = rig.node
        self.calls = Calls(node.acl, Counter())
        admin = AdminCalls(Administration(node, "node", lambda: 0))
        self.methods: list[Method[Any, Any] | Stream[Any, Any]] = [
            *DataCalls(node, "node", lambda size: size).methods(),
            *admin.methods(),
        ]

    async def neighbour(self) -> Member:
        """Somebody with blocks."""
        await self.rig.namespace("quiet/neighbour")
        member = await self.rig.open("quiet/neighbour")
        for i in range(3):
            assert await self.rig.put(member, b"n%d" % i, _VALUE[i:] + _VALUE[:i]) == OK
        return member

    async def open(self, schema: Schema) -> None:
        """A session of the hostile client."""
        member = await self.rig.open("t/n", schema)
        session, meta = member.session, self.rig.node.meta
        self.known["contexts"].append(
            pb.Context(session=session.id, incarnation=meta.incarnation, generation=0, deadline_ms=20_000)
        )
        self.known["session"].append(session.id)
        self.known["token"].append(session.token)
        self.known["texts"].append(member.identity.nqn)

    async def call(self, source: Source) -> None:
        """One drawn call, and what it tells."""
        method = source.pick(self.methods)
        request = Messages(source, self.known).fill(method.request())
        if source.chance(12):  # damage below the level of fields
            raw = bytearray(request.SerializeToString() or b"\0")
            raw[source.below(len(raw))] ^= 1 << source.below(8)
            try:
                request = method.request.FromString(bytes(raw))
            except Exception:  # the parser's own refusal, which the edge translates
                return
        if isinstance(method, Stream):
            await self._some_of(method, request)
            return
        reply = await self.calls.perform(
            method, self.calls.accounts.of("grpc", method.name), request, {"authorization": "Bearer " + self.token}
        )
        if isinstance(reply, pb.AllocateReply):
            self.known["write_ids"] += [reply.write_ids[i : i + 16] for i in range(0, len(reply.write_ids), 16)]
        elif isinstance(reply, pb.AcquireReply):
            self.known["leases"].append(reply.lease.to_bytes(8, "little"))
        elif isinstance(reply, pb.SessionReply):
            self.known["session"].append(reply.session)
            self.known["token"].append(reply.token)

    token = "the administrator's"

    async def _some_of(self, method: Stream[Any, Any], request: Any) -> None:
        replies = method.run(ADMIN, request)
        try:
            async with asyncio.timeout(0.01):
                async for _ in replies:
                    pass
        except TimeoutError:
            pass
        finally:
            await replies.aclose()


async def _drawn(source: Source, directory: Path) -> None:
    rig = Rig(directory / "drive")
    await rig.start()
    rig.node.acl.authenticate = lambda token: ADMIN  # type: ignore[method-assign]  # tokens are another test's
    await rig.namespace("t/n")
    node = _Node(rig)
    quiet = await node.neighbour()
    for schema in (GRID, Schema.opaque()):
        await node.open(schema)
    refused: Counter[str] = Counter()
    for _ in range(_CALLS):
        if not source.left:
            break
        try:
            await node.call(source)
        except ForebayError as error:
            assert error.code != ForebayError.code, "an error of ours"
            refused[reason(error.code)] += 1
    await _idle()
    for i in range(3):
        assert await rig.get(quiet, b"n%d" % i) == _VALUE[i:] + _VALUE[:i], "a neighbour's block"
    rig.check()
    await rig.node.close()


async def _idle(tasks: Iterable[asyncio.Task[Any]] = ()) -> None:
    """Let what calls left behind come to its end."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(data: bytes) -> None:
    """Some calls."""
    faults = Faults.install()
    directory = Path(tempfile.mkdtemp(prefix="forebay-fuzz-", dir=memory_dir()))
    try:
        asyncio.run(_drawn(Source(data), directory))
    finally:
        shutil.rmtree(directory)
    faults.check()
