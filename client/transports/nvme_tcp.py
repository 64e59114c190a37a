"""The user-space NVMe/TCP initiator: `FabricsTransport` over sockets, received straight into the callers' memory."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.client.transports.base import Capabilities
from forebay.client.transports.controller import Controller, SubsystemAddress
from forebay.client.transports.fabrics import FabricsTransport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.client.transports.queue_pair import QueuePair
from forebay.clock import Clock
from forebay.ids import HostIdentity

__all__ = ["NvmeTcpTransport"]


class NvmeTcpTransport(FabricsTransport):
    """NVMe/TCP to one subsystem as one host: see `FabricsTransport`."""

    capabilities = Capabilities(name="nvme-tcp")

    def __init__(
        self,
        subsystem: SubsystemAddress,
        host: HostIdentity,
        *,
        nguids: Mapping[int, str] | None = None,
        options: NvmeTcpOptions | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self._tcp = options or NvmeTcpOptions()
        super().__init__(subsystem, host, nguids=nguids, options=self._tcp, clock=clock, seed=seed)

    def _open_controller(self, queues: int, deadline_ms: int) -> Controller:
        controller = Controller(self._subsystem, self._host, self._clock, self._options, self._dial)
        controller.open(queues, deadline_ms)
        return controller

    def _dial(self, queue_id: int, entries: int, controller_id: int, deadline_ms: int) -> QueuePair:
        return QueuePair.dial(
            self._subsystem.address,
            self._subsystem.port,
            deadline_ms,
            self._clock,
            header_digest=self._tcp.header_digest,
            data_digest=self._tcp.data_digest,
        )
