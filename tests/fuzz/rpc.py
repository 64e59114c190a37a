"""The control socket, both ends: what a confused daemon asks of a target, and what a confused target answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.target.bdev_methods import BdevMethods
from forebay.appliance.dataplane.target.nvmf_methods import NvmfMethods
from forebay.appliance.dataplane.target.private_methods import PrivateMethods
from forebay.appliance.dataplane.target.rpc import RpcServer
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.volume import Volume
from forebay.errors import ForebayError
from tests.fuzz.source import Source
from tests.fuzz.target import memory_dir
from tests.fuzz.watch import Faults

__all__ = ["answers", "requests", "spoilt"]

_END_S = 30.0
_NQN = "nqn.2026-11.test:rpc"
_UUID = "0f0f0f0f-1111-2222-3333-444444444444"
_LBAS = 64
_TEXTS = ("v", "w", "fresh", _NQN, _UUID, "nqn.host", "TCP", "raw", "fenced", "crc32c", "", "\0", "\ud800", "é" * 300)
_NAMES = (
    "name", "filename", "block_size", "uuid", "nqn", "host", "hosts", "grants", "ids", "mode", "ranges", "kind", "nsid",
    "offset_bytes", "length_bytes", "namespace", "bdev_name", "nguid", "listen_address", "trtype", "traddr", "trsvcid",
    "max_namespaces", "serial_number", "host_nqn", "host_id", "allow_any_host", "names", "no_auto_visible", "adrfam",
    "max_queue_depth", "min_cntlid", "max_cntlid", "readonly", "bogus",
)  # fmt: skip
_INTERNAL = -32603
_KNOWN_INTERNAL = ("Internal error", "spdk_json_decode_object failed", "already exists", "Unable to create subsystem")
"""Answers with SPDK's code for refusals that have no other; a fault of ours is logged with its traceback besides."""


class _Values:
    """JSON values, of the right kind for their name more often than not."""

    def __init__(self, source: Source, directory: Path) -> None:
        self._source = source
        self._directory = directory

    def params(self) -> Any:
        source = self._source
        if source.chance(16):
            return self.value(2)
        names = [source.pick(_NAMES) for _ in range(source.below(5))]
        return {name: self.of(name) for name in names}

    def of(self, name: str) -> Any:
        """A value for a parameter of that name."""
        source = self._source
        if source.chance(8):
            return self.value(3)
        if name == "filename":
            return str(self._directory / source.pick(["v.vol", "w.vol", "none", ".", "v.vol\0", "\ud800"]))
        if name == "traddr":
            return source.pick(["127.0.0.1", "::1", "", "\0", "\ud800", "300.1.1.1"])
        if name == "trsvcid":
            return source.pick(["0", "65536", "-1", "x", "00", "٣"])
        if name in ("namespace", "listen_address"):
            keys = ("bdev_name", "nsid", "nguid", "uuid") if name == "namespace" else ("trtype", "traddr", "trsvcid")
            return {key: self.of(key) for key in keys if not source.chance(12)}
        if name in ("name", "bdev_name"):
            return source.pick(["v", "w", "fresh"])
        if name in ("nqn", "host", "host_nqn"):
            return source.pick([_NQN, "nqn.host", *_TEXTS])
        if name == "hosts":
            return [[source.pick(["nqn.host", "\ud800"]), source.pick([_UUID, "x"])] for _ in range(source.below(3))]
        if name in ("grants", "ranges"):
            width = 4 if name == "grants" else 3
            return [[self._whole() for _ in range(width)] for _ in range(source.below(4))]
        if name in ("ids", "names"):
            return [self._whole() if name == "ids" else source.pick(_TEXTS) for _ in range(source.below(4))]
        if name in ("offset_bytes", "length_bytes"):
            return source.below(_LBAS + 2) * 4096
        if name in ("nsid", "block_size", "max_namespaces", "max_queue_depth", "min_cntlid", "max_cntlid"):
            return source.pick([1, 2, 4096, 0, source.number(64)])
        if name in ("readonly", "allow_any_host", "no_auto_visible"):
            return source.chance(2)
        if name in ("uuid", "host_id", "nguid"):
            return source.pick([_UUID, "00" * 16, "x", ""])
        return source.pick(_TEXTS)

    def _whole(self) -> int:
        return self._source.pick([self._source.below(_LBAS), self._source.number(64)])

    def value(self, depth: int) -> Any:
        """Anything."""
        source = self._source
        kind = source.below(9)
        if kind == 0:
            return source.number(64) - source.pick([0, 1 << 63])
        if kind == 1:
            return source.pick(_TEXTS)
        if kind == 2:
            return source.pick([None, True, False, 1.5, 1e308, -0.0])
        if kind == 3:
            return 10 ** source.pick([30, 400, 4000])
        if kind <= 5 and depth:
            return [self.value(depth - 1) for _ in range(source.below(4))]
        if kind <= 7 and depth:
            return {source.pick(_NAMES): self.value(depth - 1) for _ in range(source.below(4))}
        return source.take(20).decode("latin-1")


def spoilt(source: Source, text: bytes) -> bytes:
    """A message as it is, or what is none."""
    if not source.chance(10):
        return text
    kind = source.below(8)
    if kind == 0:
        return text[: source.below(len(text) + 1)]
    if kind == 1:
        deep = source.pick([10, 900, 5000, 100_000])
        return b'{"method": "x", "params": ' + b'{"a": [' * deep + b"]}" * deep + b"}"
    if kind == 2:
        return b'{"id": ' + b"9" * source.pick([100, 4300, 5000]) + b', "method": "spdk_get_version"}'
    if kind == 3:
        return text + source.pick([b"\0\0", b"\n", b"}", b"]", b'"', b"\xff\xfe", b",", b"NaN"])
    if kind == 4:
        return source.take(40)
    if kind == 5:
        return (
            b'{"id": ' + source.pick([b"NaN", b"-Infinity", b"[[]]", b"{}", b"1e999", b'"\\ud800"']) + b"," + text[1:]
        )
    if kind == 6:
        at = source.below(len(text))
        return text[:at] + bytes([source.below(256)]) + text[at + 1 :]
    return b" " * source.pick([1, 5000]) + text


def _sent(path: Path, stream: bytes, piece_bytes: int) -> bytes:
    """Send a stream, then its end; all that was answered. The target has to end the connection."""
    came = bytearray()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_END_S)
        sock.connect(str(path))
        try:
            for at in range(0, len(stream), piece_bytes):
                sock.sendall(stream[at : at + piece_bytes])
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(1 << 18):
                came += data
        except OSError as error:
            assert not isinstance(error, TimeoutError), f"the connection did not end in {_END_S} s"
    return bytes(came)


def _parsed(came: bytes) -> list[Any]:
    text, at, found = came.decode(), 0, []
    decoder = json.JSONDecoder()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
    return found


def requests(data: bytes) -> None:
    """Requests of every kind to the target's own methods; it answers each at most once, and goes on answering."""
    faults, source = Faults.install(), Source(data)
    directory = Path(tempfile.mkdtemp(prefix="forebay-fuzz-", dir=memory_dir()))
    server = Server()
    rpc: RpcServer | None = None
    try:
        for name in ("v", "w"):
            (directory / f"{name}.vol").write_bytes(bytes(_LBAS * 4096))
        server.add_volume(Volume("v", directory / "v.vol"))
        methods = {**BdevMethods(server).table(), **NvmfMethods(server).table(), **PrivateMethods(server).table()}
        rpc = RpcServer(directory / "s", methods)
        rpc.start()
        values, names, asked = _Values(source, directory), [*methods, "no_such_method"], 0
        stream = bytearray()
        piece_bytes = source.pick([1 << 20, 1 << 20, 1, 7, 4096])
        setting_up = [
            {"method": "nvmf_create_transport", "params": {"trtype": "TCP"}},
            {"method": "nvmf_create_subsystem", "params": {"nqn": _NQN}},
            {"method": "nvmf_subsystem_add_ns", "params": {"nqn": _NQN, "namespace": {"bdev_name": "v"}}},
        ]
        for request in setting_up[: source.below(4)]:
            stream += json.dumps({"jsonrpc": "2.0", "id": 0, **request}).encode()
            asked += 1
        while source.left and asked < 64:
            asked += 1
            idents: list[int | str | None] = [1, "a/b", 2, None]
            drawn = {"id": source.pick(idents), "method": source.pick(names), "params": values.params()}
            stream += spoilt(source, json.dumps(drawn).encode())
        path = directory / "s"
        for answer in _parsed(_sent(path, bytes(stream), max(piece_bytes, len(stream) // 2000))):
            assert ("result" in answer) != ("error" in answer) and answer["jsonrpc"] == "2.0", answer
            if "error" in answer:
                code, message = answer["error"]["code"], answer["error"]["message"]
                assert code != _INTERNAL or any(known in message for known in _KNOWN_INTERNAL), answer
        (alive,) = _parsed(_sent(path, b'{"id": 7, "method": "forebay_get_info"}', 1 << 20))
        assert alive["id"] == 7 and "result" in alive
    finally:
        if rpc is not None:
            rpc.close()
        server.close()
        shutil.rmtree(directory)
    faults.check()


def answers(data: bytes) -> None:
    """What a target may answer to the daemon: a call gets its own result or a coded error, in time."""
    faults, source = Faults.install(), Source(data)
    with tempfile.TemporaryDirectory(prefix="forebay-fuzz-") as directory:
        asyncio.run(_call(source, Path(directory) / "s"))
    faults.check()


async def _call(source: Source, path: Path) -> None:
    values = _Values(source, path.parent)
    lied = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lied
        try:
            while line := await reader.readline():  # the daemon ends a request with one
                request = json.loads(line)
                body: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"], "result": request["params"]["n"]}
                true = json.dumps(body).encode()
                if source.chance(3):
                    kind = source.below(4)
                    if kind == 0:
                        body["id"] = values.value(2)
                    elif kind == 1:
                        del body["result"]
                        error: Any = {"code": source.pick([-32601, -28, values.value(1)]), "message": values.value(2)}
                        body["error"] = error if source.chance(2) else values.value(2)
                    elif kind == 2:
                        body = {source.pick(["id", "result", "error", "x"]): values.value(2) for _ in range(3)}
                    else:
                        lied = True
                        writer.write(spoilt(source, json.dumps(values.value(3)).encode()))
                raw = spoilt(source, json.dumps(body).encode())
                lied |= raw != true
                for at in range(0, len(raw), step := source.pick([1 << 20, 100, 7])):
                    writer.write(raw[at : at + step])
                    await writer.drain()
                if lied:
                    break  # nothing more comes, and that is said
        except (ConnectionError, ValueError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=1 << 20)
    client = JsonRpcClient(path, timeout_s=_END_S)
    began = time.monotonic()
    try:
        for n in range(1 + source.below(4)):
            lied = False
            count = 1 + source.below(3)
            calls = [client.call("m", {"n": [n, i]}) for i in range(count)]
            done = await asyncio.gather(*calls, return_exceptions=True)
            for i, result in enumerate(done):
                assert lied or result == [n, i], f"a true target: {result!r}"
                assert not isinstance(result, BaseException) or isinstance(result, ForebayError), repr(result)
    finally:
        await client.close()
        server.close()
    assert time.monotonic() - began < _END_S, "a call waited for its time-out though the connection had ended"
