"""``python -m perf.gpu_check``: on a machine with an NVIDIA GPU, every way of stored bytes into a CUDA tensor.

Each way first brings bytes that are compared with what was stored, then is timed in turns with a plain copy of the same
bytes from pinned host memory. What is not there is said and left out. It needs Forebay's dependencies, torch with CUDA,
and kvikio for the ways that read a drive; no root and no network. ``--rehearse`` runs it on host memory, which shows
that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import forebay
from forebay.checksum import crc32c
from forebay.client.device import DeviceView
from forebay.client.device_checksum import device_crc32c
from forebay.client.registered import register
from forebay.client.transports.base import DeviceReadOp, DeviceSegment, Outcome, ReadOp, Segment, WriteOp
from forebay.client.transports.block_device import BlockDeviceOptions
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.device_reads import DeviceReads
from forebay.client.transports.disks import Disk
from forebay.client.transports.gpu_path import choose_gpu_path
from forebay.client.transports.nvme_rdma import NvmeRdmaTransport, usable
from forebay.client.transports.options import NvmeRdmaOptions
from forebay.clock import SystemClock
from forebay.errors import ForebayError
from forebay.ids import HostIdentity
from perf.harness import Row, Side, file_system, gb_per_s_row, interleave
from perf.node import scratch, start_node
from perf.report import table
from perf.workload import Skipped, Wrong

__all__ = ["main"]

_MIB = 1 << 20
_DEADLINE_MS = 60_000
_LIMIT_S = 60.0
"""Of each way's timed rounds, so that all of them end within eight minutes."""
_IDENT = "6f1a3c4e-7d0e-4c35-9a1f-2f8b6a0d1e02"
_HOST = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{_IDENT}", _IDENT)


class Blocks:
    """Random blocks in pinned host memory, tensors on the device that ways fill, and the plain copy."""

    def __init__(self, count: int, block_bytes: int, device: torch.device, repeats: int) -> None:
        self.count, self.block_bytes, self.device, self.repeats = count, block_bytes, device, repeats
        pinned = device.type == "cuda"
        flat = torch.randint(
            0, 256, (count * block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        self.values = list((flat.pin_memory() if pinned else flat).view(count, block_bytes))
        self.tensors = list(torch.zeros((count, block_bytes), dtype=torch.uint8, device=device))

    @property
    def size_bytes(self) -> int:
        return self.count * self.block_bytes

    def pinned(self, length_bytes: int) -> Any:
        """Host memory that the device reads by itself."""
        return torch.empty(length_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def copy(self) -> int:
        """The baseline: every block from pinned memory to the device."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value, non_blocking=True)
        self.settle()
        return self.size_bytes

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def proven(self, name: str, move: Callable[[], None]) -> Callable[[], int]:
        """A slot of ``move``, which fills the tensors; it does so once now, into other bytes. Raises `Wrong`."""
        for tensor in self.tensors:
            tensor.fill_(0xEE)
        self.settle()
        move()
        self.settle()
        for i, (tensor, value) in enumerate(zip(self.tensors, self.values, strict=True)):
            if not torch.equal(tensor.cpu(), value):
                raise Wrong(f"{name}: block {i} has other bytes than were stored")

        def slot() -> int:
            move()
            self.settle()
            return self.size_bytes

        return slot

    def row(self, name: str, what: str, move: Callable[[], None], servers: tuple[int, ...] = (), **details: Any) -> Row:
        """The way against the plain copy."""
        sides = [Side(name, self.proven(name, move), servers), Side("copy", self.copy)]
        samples = interleave(sides, self.repeats, limit_s=_LIMIT_S)
        facts = {"block_bytes": self.block_bytes, "working_set_bytes": self.size_bytes, "device": _named(self.device)}
        what = f"{what}, against a copy from pinned memory"
        return gb_per_s_row(
            f"gpu.{name}/copy", what, samples[name], samples["copy"], aim=None, details={**facts, **details}
        )


def checksums(blocks: Blocks) -> Iterator[Row]:
    """CRC-32C on the device, which must be that of the CPU."""
    seeds = [i * 0x9E3779B1 & 0xFFFFFFFF for i in range(blocks.count)]
    expected = [crc32c(value.numpy(), seed) for value, seed in zip(blocks.values, seeds, strict=True)]

    def copy_and_compute() -> None:
        blocks.copy()
        if device_crc32c(blocks.tensors, seeds) != expected:
            raise Wrong("the device computes other checksums than the CPU")

    yield blocks.row("crc32c", "copies and checksums on the device", copy_and_compute)


def by_client(blocks: Blocks, folder: Path) -> Iterator[Row]:
    """`get_into` from a node by NVMe/TCP: staged, copies beside the next reads; and all reads before all copies."""
    keys = [b"gpu-%d" % i for i in range(blocks.count)]
    with (
        start_node(folder, 3 * blocks.size_bytes + 256 * _MIB) as node,
        forebay.connect(node.url, token=node.token) as client,
    ):
        for result in client.put(keys, [value.numpy() for value in blocks.values]):
            if not result.stored:
                raise Wrong(f"put answered {result.reason}")

        def read(buffers: Sequence[Any]) -> None:
            for result in client.get_into(keys, buffers, deadline_ms=_DEADLINE_MS):
                if not result.hit:
                    raise Wrong(f"get_into answered {result.reason}")

        details = {"file_system": file_system(folder)}
        yield blocks.row("tcp.staged", "NVMe/TCP, staged", lambda: read(blocks.tensors), node.servers, **details)
        host = [
            torch.empty_like(value).pin_memory() if blocks.device.type == "cuda" else torch.empty_like(value)
            for value in blocks.values
        ]

        def apart() -> None:
            read(host)
            for tensor, value in zip(blocks.tensors, host, strict=True):
                tensor.copy_(value, non_blocking=True)

        yield blocks.row("tcp.apart", "NVMe/TCP, then the copy", apart, node.servers, **details)


def by_kvikio(blocks: Blocks, folder: Path, wanted: str) -> Iterator[Row]:
    """By kvikio as the block-device transport uses it, from a file in the place of the device. Raises `Skipped`."""
    path = choose_gpu_path(wanted)
    if path.kvikio is None:
        raise Skipped(path.why)
    with scratch(folder) as here, ExitStack() as stack:
        file = here / "volume"
        with file.open("wb") as output:
            for value in blocks.values:
                output.write(value.numpy().data)
        options = BlockDeviceOptions()
        disk = Disk(file)
        stack.callback(disk.close)
        reads = DeviceReads(path, depth=options.depth, max_command_bytes=options.max_command_bytes, clock=SystemClock())
        stack.callback(reads.close)
        ops = dict(enumerate(_device_reads(blocks)))

        def read() -> None:
            outcomes, _ = reads.run(ops, [blocks.block_bytes] * blocks.count, {1: disk}, _until_ms())
            _succeeded(f"kvikio by {path.name}", outcomes.values())

        what = f"kvikio by {path.name}, checksums on the device"
        yield blocks.row(f"kvikio.{path.name}", what, read, why=path.why, file_system=file_system(folder))


def by_rdma(blocks: Blocks, target: str | None) -> Iterator[Row]:
    """NVMe/RDMA to the device, and into registered pinned memory. Overwrites the volume. Raises `Skipped`."""
    why = usable()
    if why is not None:
        raise Skipped(why)
    if target is None:
        raise Skipped("no target is named with --rdma")
    address, _, nqn = target.partition("/")
    host, _, port = address.rpartition(":")
    size, landing = blocks.block_bytes, blocks.pinned(blocks.size_bytes)
    rows = list(landing.view(blocks.count, size))
    with ExitStack() as stack:
        options = NvmeRdmaOptions(device_memory=True)
        transport = NvmeRdmaTransport(SubsystemAddress(host, int(port), nqn), _HOST, options=options)
        stack.callback(transport.close)
        stack.enter_context(register(landing.numpy()))
        writes = [WriteOp(1, i * size, (Segment(value.numpy().data, size),)) for i, value in enumerate(blocks.values)]
        _succeeded("NVMe/RDMA", transport.write(writes, _until_ms()))
        ops = [ReadOp(1, i * size, (Segment(row.numpy().data, size, 0),)) for i, row in enumerate(rows)]

        def read() -> None:
            _succeeded("NVMe/RDMA", transport.read(ops, _until_ms()))
            for tensor, value in zip(blocks.tensors, rows, strict=True):
                tensor.copy_(value, non_blocking=True)

        yield blocks.row("rdma.registered", "NVMe/RDMA into registered pinned memory, then the copy", read)
        device_ops = _device_reads(blocks)

        def straight() -> None:
            _succeeded("NVMe/RDMA to the device", transport.read_device(device_ops, _until_ms()))

        yield blocks.row("rdma.device", "NVMe/RDMA to the device, checksums there", straight)


def _device_reads(blocks: Blocks) -> list[DeviceReadOp]:
    size = blocks.block_bytes
    return [
        DeviceReadOp(1, i * size, (DeviceSegment(DeviceView(tensor), size, 0),))
        for i, tensor in enumerate(blocks.tensors)
    ]


def _until_ms() -> int:
    return SystemClock().monotonic_ms() + _DEADLINE_MS


def _succeeded(name: str, outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise Wrong(f"{name}: {outcome.error}")


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory in the place of a GPU's"


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 when all ways that are there brought the right bytes, 1 when one did not, 2 when there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu_check", description=__doc__)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), metavar="DIR", help="a directory on tmpfs")
    parser.add_argument(
        "--disk", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="a directory on the drive to read"
    )
    parser.add_argument("--blocks", type=int, default=128, metavar="N", help="of 4 MiB each, 128 without")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds of each comparison")
    parser.add_argument("--rdma", metavar="HOST:PORT/NQN", help="a subsystem whose first volume may be overwritten")
    parser.add_argument("--json", action="store_true", help="JSON rows instead of the table")
    parser.add_argument("--rehearse", action="store_true", help="on host memory: whether it runs")
    arguments = parser.parse_args(argv)
    if not arguments.rehearse and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here (--rehearse runs on host memory)", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    blocks = Blocks(arguments.blocks, 4 * _MIB, device, arguments.repeats)
    ways: dict[str, Callable[[], Iterator[Row]]] = {
        "checksums on the device": lambda: checksums(blocks),
        "NVMe/TCP": lambda: by_client(blocks, arguments.memory),
        "kvikio by what is there": lambda: by_kvikio(blocks, arguments.disk, "auto"),
        "kvikio in compatibility mode": lambda: by_kvikio(blocks, arguments.disk, "compat"),
        "NVMe/RDMA": lambda: by_rdma(blocks, arguments.rdma),
    }
    rows: list[Row] = []
    wrong = 0
    for name, way in ways.items():
        print(name, file=sys.stderr, flush=True)
        try:
            for row in way():
                rows.append(row)
                print(f"    {row.name}: {row.ratio.median:.2f}", file=sys.stderr, flush=True)
        except Skipped as reason:
            print(f"    not run: {reason}", file=sys.stderr, flush=True)
        except (Wrong, ForebayError, RuntimeError) as e:  # the other ways are worth knowing all the same
            wrong += 1
            print(f"    FAILED: {e}", file=sys.stderr, flush=True)
    if arguments.json:
        for row in rows:
            print(json.dumps(row.as_json(), ensure_ascii=False))
    else:
        print(table(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
