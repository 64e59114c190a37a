"""A node whose answers are written by the test: gRPC in this process, in front of a scripted target.

It takes calls by the stream, as nodes do, unless ``streams`` says that it is of before there was one.

Every call has a true default, kept simple: one volume, blocks one after another. A test replaces attributes to lie.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from forebay.checksum import CRC32C
from forebay.errors import (
    Absent,
    AlreadyExists,
    ForebayError,
    SessionExpired,
    Unauthenticated,
    Unavailable,
)
from forebay.ids import BlockKey, align_up
from forebay.proto import forebay_pb2 as pb
from forebay.proto import forebay_pb2_grpc as services
from forebay.proto.columns import keys_from_proto, pack, rows16, unpack
from forebay.schema import Schema
from tests.client.conftest import NodeAccess
from tests.client.peer import NGUID, NQN, Peer

TOKEN = "scripted"
_R = TypeVar("_R")
_STATUS = {Unauthenticated: grpc.StatusCode.UNAUTHENTICATED, Unavailable: grpc.StatusCode.UNAVAILABLE}


class Block:
    """What the node knows of a block."""

    def __init__(self, offset: int, length: int, write_id: bytes) -> None:
        self.offset = offset
        self.length = length
        self.write_id = write_id
        self.checksums: list[int] = []
        self.tiles = 1


class _Aborted(Exception):
    def __init__(self, error: ForebayError) -> None:
        self.error = error


class _Message:
    """What a servicer sees of gRPC for a message of the stream."""

    def __init__(self, stream: grpc.ServicerContext) -> None:
        self.invocation_metadata = stream.invocation_metadata


class ScriptedNode(services.BlocksServicer, NodeAccess):
    """Start it as a context manager."""

    def __init__(self) -> None:
        self.peer = Peer(16 << 20)
        self.schema = Schema.opaque()
        self.blocks: dict[BlockKey, Block] = {}
        self.pending: dict[bytes, tuple[BlockKey, Block]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.sessions = 0
        self.session = b""
        self.next_offset = 0
        self.reads_fenced = False
        self.lease_ttl_ms = 10_000
        self.fail: dict[str, ForebayError] = {}
        self.answer: dict[str, Callable[[Any], Any]] = {}
        self.streams = True
        self.opened = 0  # streams
        self.on_reply: Callable[[pb.CallReply], pb.CallReply] = lambda reply: reply
        """Changes or delays the reply to each message of a stream; an error that it raises ends the stream."""
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(16))
        services.add_BlocksServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.url = f"forebay://127.0.0.1:{self.port}"
        self.token = TOKEN

    def close(self) -> None:
        self._server.stop(None).wait()
        self.peer.close()

    def __enter__(self) -> "ScriptedNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def named(self, name: str) -> list[Any]:
        """The requests of one call so far."""
        with self._lock:
            return [request for called, request in self.calls if called == name]

    def given_back(self) -> list[int]:
        """Leases that came back."""
        return [lease for request in self.named("Release") for lease in unpack("u64", request.leases, "leases")]

    def _enter(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        with self._lock:
            self.calls.append((name, request))
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            self._abort(context, Unauthenticated("who are you?"))
        if name in self.fail:
            self._abort(context, self.fail[name])
        given = getattr(request, "context", None)
        if given is not None and given.session != self.session:
            self._abort(context, SessionExpired())

    @staticmethod
    def _abort(context: grpc.ServicerContext, error: ForebayError) -> None:
        if isinstance(context, _Message):
            raise _Aborted(error)
        trailer = json.dumps(error.to_dict()).encode()
        context.set_trailing_metadata((("forebay-error-bin", trailer),))
        context.abort(_STATUS.get(type(error), grpc.StatusCode.FAILED_PRECONDITION), error.message)

    def _leave(self, name: str, reply: _R) -> _R:
        changed: _R = self.answer[name](reply) if name in self.answer else reply
        return changed

    def endpoints(self) -> list[pb.Endpoint]:
        return [
            pb.Endpoint(
                transport="tcp",
                address="127.0.0.1",
                port=self.peer.port,
                subsystem_nqn=NQN,
                reads_fenced=self.reads_fenced,
            )
        ]

    # --- the service ---

    def Calls(self, messages: Iterator[pb.CallRequest], context: grpc.ServicerContext) -> Iterator[pb.CallReply]:
        with self._lock:
            self.opened += 1
        if not self.streams:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        service = pb.DESCRIPTOR.services_by_name["Blocks"]
        for message in messages:
            if message.cancel:
                with self._lock:
                    self.calls.append(("cancel", message))
                continue
            request = getattr(pb, service.methods_by_name[message.method].input_type.name)
            try:
                reply = getattr(self, message.method)(request.FromString(message.request), _Message(context))
            except _Aborted as aborted:
                answer = pb.CallReply(id=message.id, error=json.dumps(aborted.error.to_dict()).encode())
            else:
                answer = pb.CallReply(id=message.id, reply=reply.SerializeToString())
            try:
                answer = self.on_reply(answer)
            except ForebayError as error:
                self._abort(context, error)
            yield answer

    def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.SessionReply:
        self._enter("OpenSession", request, context)
        self.sessions += 1
        self.session = uuid.uuid4().bytes
        host_id = str(uuid.uuid4())
        reply = pb.SessionReply(
            session=self.session,
            token=b"join",
            incarnation=self.sessions,
            namespace_id=1,
            keyspace=self.schema.keyspace,
            generation=request.generation,
            host_nqn=f"nqn.2014-08.org.nvmexpress:uuid:{host_id}",
            host_id=host_id,
            endpoints=self.endpoints(),
            volumes=[pb.Volume(volume=5, nsid=1, endpoint=0, nguid=NGUID.hex())],
            heartbeat_ms=60_000,
            expiry_ms=180_000,
            lease_ttl_ms=self.lease_ttl_ms,
            checksum_kind=CRC32C,
        )
        return self._leave("OpenSession", reply)

    def JoinSession(self, request: pb.JoinSessionRequest, context: grpc.ServicerContext) -> pb.SessionReply:
        self._enter("JoinSession", request, context)
        return self.OpenSession(pb.OpenSessionRequest(), context)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        self._enter("Heartbeat", request, context)
        return self._leave("Heartbeat", pb.HeartbeatReply(heartbeat_ms=60_000))

    def CloseSession(self, request: pb.CloseSessionRequest, context: grpc.ServicerContext) -> pb.CloseSessionReply:
        self._enter("CloseSession", request, context)
        return pb.CloseSessionReply()

    def Match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchReply:
        self._enter("Match", request, context)
        keys = keys_from_proto(request.keys)
        reply = pb.MatchReply(status=pack("u16", [0 if key in self.blocks else Absent.code for key in keys]))
        return self._leave("Match", reply)

    def Acquire(self, request: pb.AcquireRequest, context: grpc.ServicerContext) -> pb.AcquireReply:
        self._enter("Acquire", request, context)
        rows = [self.blocks.get(key) for key in keys_from_proto(request.keys)]
        gone = Block(0, 0, bytes(16))
        gone.tiles = 0
        full = [row or gone for row in rows]
        reply = pb.AcquireReply(
            status=pack("u16", [0 if row else Absent.code for row in rows]),
            lease=77,
            lease_ttl_ms=self.lease_ttl_ms,
            volumes=pack("u32", [5 if row else 0 for row in rows]),
            offsets=pack("u64", [row.offset for row in full]),
            lengths=pack("u64", [align_up(row.length) for row in full]),
            value_lengths=pack("u64", [row.length for row in full]),
            write_ids=b"".join(row.write_id for row in full),
            tiles=pack("u16", [row.tiles for row in full]),
            checksums=pack("u32", [c for row in rows if row for c in row.checksums]),
            checksum_kind=CRC32C,
        )
        return self._leave("Acquire", reply)

    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        self._enter("Release", request, context)
        return pb.ReleaseReply(released=len(request.leases) // 8)

    def Allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateReply:
        self._enter("Allocate", request, context)
        keys = keys_from_proto(request.keys)
        lengths = unpack("u64", request.value_lengths, "value_lengths", len(keys))
        status, rows = [], []
        for key, length in zip(keys, lengths, strict=True):
            known = key in self.blocks
            block = Block(0, 0, bytes(16)) if known else Block(self.next_offset, length, uuid.uuid4().bytes)
            if not known:
                self.next_offset += align_up(length)
                self.pending[block.write_id] = (key, block)
            status.append(AlreadyExists.code if known else 0)
            rows.append(block)
        reply = pb.AllocateReply(
            status=pack("u16", status),
            write_ids=b"".join(row.write_id for row in rows),
            volumes=pack("u32", [0 if code else 5 for code in status]),
            offsets=pack("u64", [row.offset for row in rows]),
            lengths=pack("u64", [align_up(row.length) for row in rows]),
        )
        return self._leave("Allocate", reply)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitReply:
        self._enter("Commit", request, context)
        sums = unpack("u32", request.checksums, "checksums")
        for i, write_id in enumerate(rows16(request.write_ids, "write_ids")):
            key, block = self.pending.pop(write_id)
            block.checksums = [sums[i]]
            self.blocks[key] = block
        return self._leave("Commit", pb.CommitReply(status=bytes(len(request.write_ids) // 8)))

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortReply:
        self._enter("Abort", request, context)
        return pb.AbortReply(aborted=len(request.write_ids) // 16)

    def Delete(self, request: pb.DeleteRequest, context: grpc.ServicerContext) -> pb.DeleteReply:
        self._enter("Delete", request, context)
        return self._leave("Delete", pb.DeleteReply())

    def Keyspaces(self, request: pb.KeyspacesRequest, context: grpc.ServicerContext) -> pb.KeyspacesReply:
        self._enter("Keyspaces", request, context)
        return self._leave("Keyspaces", pb.KeyspacesReply())

    def Stat(self, request: pb.StatRequest, context: grpc.ServicerContext) -> pb.StatReply:
        self._enter("Stat", request, context)
        return self._leave("Stat", pb.StatReply())

    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        self._enter("List", request, context)
        return self._leave("List", pb.ListReply())

    def Wait(self, request: pb.WaitRequest, context: grpc.ServicerContext) -> Iterator[pb.WaitReply]:
        self._enter("Wait", request, context)
        yield self._leave("Wait", pb.WaitReply())

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.WatchReply]:
        self._enter("Watch", request, context)
        yield from self.answer["Watch"](request)

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinReply:
        self._enter("Pin", request, context)
        return self._leave("Pin", pb.PinReply())

    def Touch(self, request: pb.TouchRequest, context: grpc.ServicerContext) -> pb.TouchReply:
        self._enter("Touch", request, context)
        return self._leave("Touch", pb.TouchReply())
