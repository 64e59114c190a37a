"""A daemon as a process of its own, and a caller that speaks the protocol by hand."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import grpc

from forebay.checksum import crc32c, tile_seed
from forebay.errors import BY_CODE, GRPC_STATUS, ForebayError, from_code
from forebay.ids import BlockKey, stored_key
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, pack, rows16, unpack
from forebay.schema import Schema
from tests import targets

__all__ = ["CAPACITY", "STREAMED", "CallStream", "Caller", "Daemon", "eventually", "failure"]

CAPACITY = 256 << 20
STREAMED = {
    m.name
    for m in pb.DESCRIPTOR.services_by_name["Blocks"].methods
    if "context" in m.input_type.fields_by_name and not m.server_streaming
}
"""Calls that can go by the stream."""
_RUN = """
import json, sys
from forebay.appliance.config import load
from forebay.appliance.daemon import run
from forebay.errors import ForebayError
try:
    sys.exit(run(load(None, environ={}, flags=json.loads(sys.argv[1]))))
except ForebayError as error:
    print(json.dumps(error.to_dict()), file=sys.stderr)
    sys.exit(70)
"""


def eventually(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Daemon:
    """A node of its own data directory, started as often as a test likes."""

    def __init__(self, data: Path, **flags: Any) -> None:
        self.data = data
        self.flags = {
            "data": str(data),
            "capacity": CAPACITY,
            "grpc.listen": "127.0.0.1:0",
            "target.listen": "127.0.0.1:0",
            "http.enabled": False,
            **targets.flags(),
            **{name.replace("__", "."): value for name, value in flags.items()},
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.about: dict[str, Any] = {}
        self._target_pid = 0

    @property
    def token(self) -> str:
        return (self.data / "admin.token").read_text().strip()

    @property
    def address(self) -> str:
        return str(self.about["grpc"])

    @property
    def target_pid(self) -> int:
        return int(json.loads((self.data / "run" / "target.pid").read_text())["pid"])

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start without waiting."""
        self.data.parent.mkdir(parents=True, exist_ok=True)
        with (self.data.parent / f"{self.data.name}.log").open("ab") as log:
            command = [sys.executable, "-c", _RUN, json.dumps(self.flags)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        return self.process

    def start(self) -> Daemon:
        """Start and wait until it serves."""
        process, file = self.spawn(), self.data / "node.json"

        def serves() -> bool:
            assert process.poll() is None, self.log()
            try:
                self.about = json.loads(file.read_text())
            except (FileNotFoundError, ValueError):
                return False
            return bool(self.about["pid"] == process.pid)

        eventually(serves, "the node serves")
        self._target_pid = self.target_pid
        return self

    def refused(self) -> dict[str, Any]:
        """Start a node that must not: the error it ends with."""
        process = self.spawn()
        assert process.wait(60) == 70, self.log()
        last: dict[str, Any] = json.loads(self.log().splitlines()[-1])
        return last

    def log(self) -> str:
        return (self.data.parent / f"{self.data.name}.log").read_text()[-8000:]

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def clean_up(self) -> None:
        """End both processes, whatever state they are in."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        try:
            pid = self.target_pid
        except FileNotFoundError:
            return
        if alive(pid):
            os.kill(pid, signal.SIGKILL)

    def caller(self, token: str | None = "", *, streams: bool = False) -> Caller:
        return Caller(self.address, self.token if token == "" else token, streams=streams)


def failure(error: grpc.RpcError) -> tuple[str, ForebayError]:
    """gRPC status and the coded error of a failed call."""
    call = cast(grpc.Call, error)
    trailers = {str(name): value for name, value in call.trailing_metadata() or ()}
    told = json.loads(trailers["forebay-error-bin"])
    found = from_code(
        told["code"], told["message"], field=told["field"], limit=told["limit"], retry_after_ms=told["retry_after_ms"]
    )
    return call.code().name, found


class Refused(grpc.RpcError):
    """An error that came as a message of the stream; as much of gRPC's as `failure` looks at."""

    def __init__(self, error: bytes) -> None:
        self._error = error

    def code(self) -> grpc.StatusCode:
        cls = BY_CODE[json.loads(self._error)["code"]]
        return grpc.StatusCode[next(GRPC_STATUS[one] for one in cls.__mro__ if one in GRPC_STATUS)]

    def trailing_metadata(self) -> Any:
        return (("forebay-error-bin", self._error),)


class CallStream:
    """The stream ``Calls`` of one connection, by hand."""

    def __init__(self, channel: grpc.Channel, metadata: Any) -> None:
        self._outbox: SimpleQueue[pb.CallRequest | None] = SimpleQueue()
        calls: Any = channel.stream_stream(
            "/forebay.v1.Blocks/Calls",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=pb.CallReply.FromString,
        )
        self.replies = calls(iter(self._outbox.get, None), metadata=metadata)

    def send(self, message: pb.CallRequest) -> None:
        self._outbox.put(message)

    def end(self) -> None:
        """No more is sent."""
        self._outbox.put(None)


class Caller:
    """One connection and at most one session. With ``streams`` the calls that can go by the stream."""

    def __init__(self, address: str, token: str | None, *, streams: bool = False) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self.session: pb.SessionReply | None = None
        self.streams = streams
        self._stream: CallStream | None = None
        self._ids = itertools.count(1)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.end()
        self.channel.close()

    def raw(self, path: str, data: bytes) -> bytes:
        """Any bytes to any method."""
        service, method = path.split("/")[-2:]
        if self.streams and service == "forebay.v1.Blocks" and method in STREAMED:
            return self._message(method, data)
        call: Any = self.channel.unary_unary(path)
        reply: bytes = call(data, metadata=self._metadata, timeout=30)
        return reply

    def _message(self, method: str, data: bytes) -> bytes:
        if self._stream is None:
            self._stream = CallStream(self.channel, self._metadata)
        ident = next(self._ids)
        self._stream.send(pb.CallRequest(id=ident, method=method, request=data))
        reply = next(self._stream.replies)
        assert reply.id == ident
        if reply.error:
            raise Refused(reply.error)
        answer: bytes = reply.reply
        return answer

    def __call__(self, method: str, request: Any, service: str = "Blocks") -> Any:
        name = pb.DESCRIPTOR.services_by_name[service].methods_by_name[method].output_type.name
        return getattr(pb, name).FromString(self.raw(f"/forebay.v1.{service}/{method}", request.SerializeToString()))

    def admin(self, method: str, request: Any) -> Any:
        return self(method, request, "Admin")

    def stream(self, method: str, request: Any) -> Any:
        """The replies, as they come; it has ``cancel``."""
        name = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name[method].output_type.name
        call: Any = self.channel.unary_stream(
            f"/forebay.v1.Blocks/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(pb, name).FromString,
        )
        return call(request, metadata=self._metadata, timeout=30)

    def open(
        self, namespace: str = "default/default", *, schema: Schema | None = None, generation: int = 0, **rest: Any
    ) -> pb.SessionReply:
        request = pb.OpenSessionRequest(
            namespace=namespace,
            schema=(schema or Schema.opaque()).cbor,
            generation=generation,
            deadline_ms=10_000,
            **rest,
        )
        self.session = self("OpenSession", request)
        return self.session

    def context(self, **changes: Any) -> pb.Context:
        assert self.session is not None
        values: dict[str, Any] = {
            "session": self.session.session,
            "incarnation": self.session.incarnation,
            "generation": self.session.generation,
            "deadline_ms": 10_000,
        }
        return pb.Context(**(values | changes))

    def allocate(self, *keys: bytes | BlockKey, sizes: list[int] | None = None, **rest: Any) -> pb.AllocateReply:
        assert self.session is not None
        request = pb.AllocateRequest(
            context=rest.pop("context", None) or self.context(),
            keys=self.keys(*keys),
            value_lengths=pack("u64", sizes if sizes is not None else [100] * len(keys)),
            host_nqn=rest.pop("host_nqn", self.session.host_nqn),
            **rest,
        )
        reply: pb.AllocateReply = self("Allocate", request)
        return reply

    def commit(self, write_ids: bytes, checksums: list[int], **rest: Any) -> list[int]:
        request = pb.CommitRequest(
            context=self.context(), write_ids=write_ids, checksums=pack("u32", checksums), **rest
        )
        return unpack("u16", self("Commit", request).status, "status")

    def put(self, *keys: bytes | BlockKey) -> list[int]:
        """Store blocks without writing them: new extents hold zeros, and those are what is committed."""
        reply = self.allocate(*keys)
        assert not any(unpack("u16", reply.status, "status")), unpack("u16", reply.status, "status")
        return self.commit(reply.write_ids, self.zeros(reply, *keys))

    def zeros(self, reply: pb.AllocateReply, *keys: bytes | BlockKey, size: int = 100) -> list[int]:
        """Checksums of zeros, ``size`` bytes a key in one tile each; a node that verifies finds them right."""
        assert self.session is not None
        blocks = [k if isinstance(k, BlockKey) else BlockKey(k) for k in keys]
        namespace, keyspace = self.session.namespace_id, self.session.keyspace
        stored = [stored_key(namespace, keyspace, self.session.generation, block) for block in blocks]
        writes = rows16(reply.write_ids, "write_ids")
        return [crc32c(bytes(size), tile_seed(key, 0, write)) for key, write in zip(stored, writes, strict=True)]

    def match(self, *keys: bytes | BlockKey, **rest: Any) -> list[int]:
        request = pb.MatchRequest(context=rest.pop("context", None) or self.context(), keys=self.keys(*keys))
        return unpack("u16", self("Match", request).status, "status")

    @staticmethod
    def keys(*keys: bytes | BlockKey) -> pb.Keys:
        return keys_to_proto([k if isinstance(k, BlockKey) else BlockKey(k) for k in keys])
