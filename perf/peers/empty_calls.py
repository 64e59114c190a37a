"""What gRPC itself costs: a server that answers each message of a stream of calls at once, with nothing.

The client's end is the product's own `CallStream`, so that an exchange passes through the same threads.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

import grpc

from forebay.client.call_stream import CallStream
from forebay.errors import Unavailable
from forebay.proto import forebay_pb2 as pb
from forebay.proto import forebay_pb2_grpc as services
from perf.outside import end

__all__ = ["EmptyCalls"]

_REQUEST = bytes(200)
"""About what `Acquire` asks with for a few blocks."""
_TIMEOUT_S = 30.0


class EmptyCalls:
    """The server, as a process, and a stream to it."""

    def __init__(self) -> None:
        self._server = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        port = int(self._server.stdout.readline())
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._stream = CallStream(
            services.BlocksStub(self._channel).Calls, lambda error: Unavailable(f"the empty server failed: {error}")
        )

    @property
    def pid(self) -> int:
        """The serving process."""
        return self._server.pid

    def ask(self) -> None:
        """One exchange."""
        self._stream.call("Acquire", _REQUEST, _TIMEOUT_S, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._channel.close()
        end(self._server)
        assert self._server.stdout is not None
        self._server.stdout.close()


async def _answer(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(pb.CallReply(id=message.id))


async def _serve() -> None:
    server = grpc.aio.server()
    calls = grpc.stream_stream_rpc_method_handler(
        _answer,
        request_deserializer=pb.CallRequest.FromString,
        response_serializer=pb.CallReply.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("forebay.v1.Blocks", {"Calls": calls}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
