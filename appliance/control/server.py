"""The gRPC server of a node."""

from __future__ import annotations

import grpc

from forebay.appliance.control.admin_calls import AdminCalls
from forebay.appliance.control.call_stream import CallStreams
from forebay.appliance.control.calls import Calls, handler
from forebay.appliance.control.data_calls import DataCalls
from forebay.appliance.settings import Endpoint
from forebay.errors import ConfigInvalid

__all__ = ["ControlServer"]

_DATA = "forebay.v1.Blocks"
_ADMIN = "forebay.v1.Admin"
_GRACE_S = 2.0
_MAX_STREAMS = 512
"""Calls of one connection at a time, however little of them has come: more wait at the client."""


class ControlServer:
    """Serves both services on one address."""

    def __init__(self, calls: Calls, data: DataCalls, admin: AdminCalls, max_message_bytes: int) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", 0),  # two nodes on one port would share its clients
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                # Peers that stand, or say nothing from the start, take no place for long.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # a minute else, whatever the line above says
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ]
        )
        self._streams = CallStreams(calls, data.methods())
        for service, methods, more in (
            (_DATA, data.methods(), self._streams.handlers()),
            (_ADMIN, admin.methods(), {}),
        ):
            handlers = {method.name: handler(calls, method) for method in methods} | more
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def start(self, listen: Endpoint) -> int:
        """Listen and serve; the port, chosen by the system for 0. Raises `ConfigInvalid` if it cannot be had."""
        try:
            bound = self._server.add_insecure_port(str(listen))
        except RuntimeError as e:
            raise ConfigInvalid(f"cannot listen on {listen}: is it in use?", field="grpc.listen") from e
        await self._server.start()
        return bound

    async def stop(self) -> None:
        """Refuse new calls, let running ones end within two seconds."""
        self._streams.drain()
        await self._server.stop(_GRACE_S)
