"""The user-space NVMe/RDMA initiator: `FabricsTransport` over queue pairs of an RDMA device.

The target writes what is read, and reads what is written, in the host's memory by itself: straight in memory that was
registered (`forebay.client.register`), otherwise in staging memory of the queue, copied from there. A call returns
only when each of its commands that reach registered memory has completed, or the device has confirmed that their queue
pairs are destroyed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from forebay.client import registered
from forebay.client.device_checksum import device_crc32c
from forebay.client.transports.base import Capabilities, DeviceReadOp, Outcome, ReadOp, WriteOp, op_bytes
from forebay.client.transports.controller import Controller, SubsystemAddress
from forebay.client.transports.fabrics import FabricsTransport
from forebay.client.transports.nvme_rdma_device import Device, usable
from forebay.client.transports.nvme_rdma_gpu import Checksum, DeviceStaging, GpuMemory, seal, without_seeds
from forebay.client.transports.nvme_rdma_link import Link
from forebay.client.transports.nvme_rdma_plan import plan_direct
from forebay.client.transports.nvme_rdma_queue import RdmaQueue
from forebay.client.transports.options import NvmeRdmaOptions
from forebay.client.transports.requests import Request, plan
from forebay.clock import Clock
from forebay.errors import TargetRefused, Unavailable
from forebay.ids import HostIdentity
from forebay.nvmerdma import SGLS_KEYED, CmRequest

__all__ = ["NvmeRdmaTransport", "usable"]

_ADMIN_STAGING_BYTES = 64 << 10


class NvmeRdmaTransport(FabricsTransport):
    """NVMe/RDMA to one subsystem as one host: see `FabricsTransport`."""

    def __init__(
        self,
        subsystem: SubsystemAddress,
        host: HostIdentity,
        *,
        nguids: Mapping[int, str] | None = None,
        options: NvmeRdmaOptions | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self._rdma = options or NvmeRdmaOptions()
        self.capabilities = Capabilities(name="nvme-rdma", device_memory=self._rdma.device_memory)
        super().__init__(subsystem, host, nguids=nguids, options=self._rdma, clock=clock, seed=seed)
        self._device_checksum: Checksum = device_crc32c
        self._devices: dict[str, Device] = {}
        self._devices_lock = threading.Lock()
        self._device: Device | None = None  # of the association that stands, or stood last

    def read_device(self, ops: Sequence[DeviceReadOp], deadline_ms: int) -> list[Outcome]:
        if not self.capabilities.device_memory:
            return super().read_device(ops, deadline_ms)
        sizes = [op_bytes(op, writable=True) for op in ops]
        # Whatever lies between here and the queue only passes views on.
        outcomes = self._run(cast("list[ReadOp]", without_seeds(ops)), sizes, deadline_ms)
        return seal(ops, outcomes, self._device_checksum)

    def close(self) -> None:
        super().close()
        with self._devices_lock:
            devices, self._devices = list(self._devices.values()), {}
        for device in devices:
            device.release()

    # --- what the wire is -------------------------------------------------------------------------------------------

    def _open_controller(self, queues: int, deadline_ms: int) -> Controller:
        controller = Controller(self._subsystem, self._host, self._clock, self._options, self._dial)
        controller.open(queues, deadline_ms)
        if not controller.identity.sgl_support & SGLS_KEYED:
            controller.close()
            raise TargetRefused("the target does not support keyed SGLs")
        return controller

    def _dial(self, queue_id: int, entries: int, controller_id: int, deadline_ms: int) -> RdmaQueue:
        link = Link.dial(
            self._opened,
            self._subsystem.address,
            self._subsystem.port,
            source=self._rdma.source,
            request=CmRequest(queue_id, entries, controller_id),
            staging_bytes=self._rdma.staging_bytes if queue_id else _ADMIN_STAGING_BYTES,
            deadline_ms=deadline_ms,
            clock=self._clock,
        )
        self._device = link.device
        return RdmaQueue(link, self._clock, link.device.find, lambda like: self._gpu_memory(link, like))

    def _gpu_memory(self, link: Link, like: Any) -> DeviceStaging:
        return GpuMemory(link.device, like, len(link.staging.view))

    def _plan(
        self, ops: Sequence[ReadOp | WriteOp], which: Sequence[int], sizes: Sequence[int], max_bytes: int
    ) -> list[Request]:
        device = self._device
        if device is None or registered.nothing_registered() or isinstance(ops[0], DeviceReadOp):
            return plan(ops, which, sizes, max_bytes)
        return plan_direct(ops, which, sizes, max_bytes, find=device.find, direct_bytes=self._rdma.direct_bytes)

    def _opened(self, name: str) -> Device:
        failed: Device | None = None
        try:
            with self._devices_lock:
                if self._closed:
                    raise Unavailable("the transport is closed")
                found = self._devices.get(name)
                if found is not None and found.failed:
                    failed = self._devices.pop(name)
                    found = None
                if found is None:
                    found = self._devices[name] = Device(name)
                return found
        finally:
            if failed is not None:
                failed.release()
