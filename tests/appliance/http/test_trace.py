"""Traces: spans of calls and of what they ask of the target, and nothing at all unless asked for."""

import asyncio
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from forebay.appliance.control.calls import Calls, Method, handler
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.namespace.acl import Acl, hash_token
from forebay.appliance.namespace.desired_state import DesiredState, Principal
from forebay.appliance.namespace.store import MemoryStore
from forebay.appliance.trace import Tracer
from forebay.errors import ConfigInvalid, NotFound
from forebay.proto import forebay_pb2 as pb

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def _target(path: Path) -> asyncio.Server:
    """Answers every request, those of the method ``fail`` with ENOENT; remembers the ids it saw."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            request = json.loads(line)
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
            failed = {"error": {"code": -2, "message": "No such file"}}
            answer |= failed if request["method"] == "fail" else {"result": request["id"]}
            writer.write(json.dumps(answer).encode())
        writer.close()

    return await asyncio.start_unix_server(serve, path)


Work = Callable[[JsonRpcClient], Coroutine[Any, Any, Any]]


def spans_of(tmp_path: Path, work: Work, *metadata: tuple[str, str]) -> list[ReadableSpan]:
    """The spans of one gRPC call whose method does some ``work`` with a target, and of work outside of any call."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)

    async def run() -> None:
        target = await _target(tmp_path / "t")
        client = JsonRpcClient(tmp_path / "t", tracer=tracer)
        await client.call("outside")
        state = DesiredState(MemoryStore())
        await state.add_principal(Principal("tester", hash_token("secret"), 0))

        async def status(principal: Principal, request: pb.NodeStatusRequest) -> pb.NodeStatusReply:
            return pb.NodeStatusReply(node=str(await work(client)))

        calls = Calls(Acl(state), Counter(), tracer=tracer)
        handlers = {"NodeStatus": handler(calls, Method("NodeStatus", pb.NodeStatusRequest, status))}
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary(
                "/x/NodeStatus", pb.NodeStatusRequest.SerializeToString, pb.NodeStatusReply.FromString
            )
            request = pb.NodeStatusRequest(context=pb.AdminContext(request_id="r-1"))
            try:
                reply = await ask(request, metadata=(("authorization", "Bearer secret"), *metadata), timeout=30)
                assert reply.node.endswith("/r-1")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND
        await server.stop(None)
        await client.close()
        target.close()

    asyncio.run(run())
    tracer.close()
    return list(exporter.get_finished_spans())


def test_a_call_and_what_it_asks_of_the_target_are_one_trace(tmp_path: Path) -> None:
    async def twice(target: JsonRpcClient) -> Any:
        await asyncio.ensure_future(target.call("one"))
        return await target.call("two")

    one, two, call = spans_of(tmp_path, twice, ("traceparent", f"00-{TRACE}-{PARENT}-01"))
    assert [span.name for span in (one, two, call)] == ["target one", "target two", "grpc NodeStatus"]
    assert [span.kind for span in (one, two, call)] == [SpanKind.CLIENT, SpanKind.CLIENT, SpanKind.SERVER]
    assert call.parent is not None and call.context is not None
    assert f"{call.parent.span_id:016x}" == PARENT and f"{call.context.trace_id:032x}" == TRACE
    for span in (one, two):
        assert span.parent is not None and span.parent.span_id == call.context.span_id
        assert span.attributes is not None and span.attributes["forebay.request_id"] == "r-1"
    assert call.attributes is not None
    assert dict(call.attributes) == {"forebay.request_id": "r-1", "forebay.code": 0, "forebay.principal": "tester"}


def test_a_failure_is_seen_in_both_spans(tmp_path: Path) -> None:
    asked, call = spans_of(tmp_path, lambda target: target.call("fail"))
    for span in (asked, call):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes is not None and span.attributes["forebay.code"] == NotFound.code
    assert call.parent is None


def test_a_collector_without_the_package_is_a_mistake_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigInvalid, match=r"pip install -e '\.\[otel\]'") as caught:
        Tracer.to_collector("http://127.0.0.1:1/v1/traces", "n")
    assert caught.value.field == "trace.otlp_endpoint"


def test_spans_reach_a_collector() -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        tracer = Tracer.to_collector(f"http://127.0.0.1:{server.server_port}/v1/traces", "node-7")
        copy_context().run(tracer.call, "grpc Match", {}).end(0, "me")  # each call has a context of its own
        tracer.close()
        server.shutdown()
    assert [path for path, _ in got] == ["/v1/traces"]
    body = got[0][1]
    if body.startswith(b"\x1f\x8b"):
        body = gzip.decompress(body)
    assert b"grpc Match" in body and b"node-7" in body


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, forebay.appliance.daemon as d; d._load_http(); "
        "print([m for m in sys.modules if m.startswith('opentelemetry.sdk') or m.startswith('opentelemetry.exporter')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
