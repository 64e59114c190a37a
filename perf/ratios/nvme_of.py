"""NVMe/TCP reads between each pair of initiator and target, bytes in memory (design §9: ours from SPDK's target, 0.7).

The other initiator is ``spdk_nvme_perf``, which throws away what it reads and takes no checksums; ours fills buffers of
the caller. Queue depth times size is the same on both sides.
"""

from __future__ import annotations

import re
import resource
import subprocess
import time
from collections.abc import Iterator

from forebay.client.transports.base import ReadOp, Segment, Transport
from forebay.client.transports.options import NvmeTcpOptions
from forebay.measure.samples import process_cpu_s
from perf.harness import Row, Sample, Side, file_system, gb_per_s_row, interleave
from perf.peers.volumes import Volume, embedded, nvme_perf, spdk
from perf.workload import Bench, Wrong, size_name

__all__ = ["run_digests", "run_initiators", "run_targets"]

_DEPTH = 16
_DEADLINE_MS = 60_000
_RUN_S = 2
_TOTAL = re.compile(r"^Total\s*:\s+([0-9.]+)\s+([0-9.]+)", re.MULTILINE)


class _Reads:
    """Reads of one size by our initiator, `_DEPTH` of them in a call, over the whole volume again and again."""

    def __init__(self, transport: Transport, block_bytes: int, volume_bytes: int) -> None:
        self._transport = transport
        self._block_bytes = block_bytes
        self._count = volume_bytes // block_bytes
        self._views = [memoryview(bytearray(block_bytes)) for _ in range(_DEPTH)]
        self._at = 0

    def call(self) -> int:
        """One call; bytes read. Raises `Wrong`."""
        ops = [
            ReadOp(1, (self._at + i) % self._count * self._block_bytes, (Segment(view, self._block_bytes),))
            for i, view in enumerate(self._views)
        ]
        self._at = (self._at + _DEPTH) % self._count
        for outcome in self._transport.read(ops, time.monotonic_ns() // 1_000_000 + _DEADLINE_MS):
            if outcome.error is not None:
                raise Wrong(f"a read failed: {outcome.error}")
        return _DEPTH * self._block_bytes

    def slot(self, slot_bytes: int) -> int:
        """Calls for about ``slot_bytes``."""
        return sum(self.call() for _ in range(max(1, slot_bytes // (_DEPTH * self._block_bytes))))

    def for_seconds(self, seconds: float, server: int) -> Sample:
        """Calls until so much time is over."""
        served, cpu, began = process_cpu_s(server), time.process_time(), time.perf_counter()
        done = 0
        while time.perf_counter() - began < seconds:
            done += self.call()
        wall = time.perf_counter() - began
        return Sample(done, wall, time.process_time() - cpu, process_cpu_s(server) - served)


def run_initiators(bench: Bench) -> Iterator[Row]:
    """Our initiator from SPDK's target, against ``spdk_nvme_perf`` from the same."""
    sizes, tool = bench.sizes, nvme_perf()
    seconds = _RUN_S if sizes.repeats > 3 else 1
    with spdk(sizes.working_bytes, interrupt_mode=True) as volume:
        transport = volume.transport()
        try:
            for block_bytes in sizes.block_bytes:
                reads = _Reads(transport, block_bytes, sizes.working_bytes)
                reads.slot(sizes.slot_bytes)
                ours: list[Sample] = []
                theirs: list[Sample] = []
                for turn in range(sizes.repeats):
                    for side in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                        if side == "ours":
                            ours.append(reads.for_seconds(seconds, volume.pid))
                        else:
                            theirs.append(_tool_run(tool, volume, block_bytes, seconds))
                yield gb_per_s_row(
                    f"initiator.{size_name(block_bytes)}/spdk_nvme_perf",
                    "our initiator, SPDK's target, against spdk_nvme_perf",
                    ours,
                    theirs,
                    aim=0.7 if block_bytes == 1 << 20 else None,
                    details={
                        "block_bytes": block_bytes,
                        "depth": _DEPTH,
                        "target": volume.what,
                        "file_system": "memory of the target",
                    },
                )
        finally:
            transport.close()


def _tool_run(tool: str, volume: Volume, block_bytes: int, seconds: int) -> Sample:
    """One run of SPDK's initiator, on the second core, by its own figures; its start is in its CPU time."""
    command = [tool, "-q", str(_DEPTH), "-o", str(block_bytes), "-w", "read", "-t", str(seconds), "-c", "0x2"]
    command += ["--no-huge", "-s", "512", "-r", volume.address]
    served, before = process_cpu_s(volume.pid), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = _TOTAL.search(done.stdout)
    if found is None or not float(found[1]):  # it exits with 0 when it is refused
        raise Wrong(f"spdk_nvme_perf read nothing: {done.stderr[:1500]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    moved = int(float(found[1]) * seconds * block_bytes)
    return Sample(moved, seconds, cpu, process_cpu_s(volume.pid) - served)


def run_targets(bench: Bench) -> Iterator[Row]:
    """The embedded target against SPDK's, read by our initiator."""
    sizes = bench.sizes
    with (
        embedded(bench.memory_dir, sizes.working_bytes) as ours,
        spdk(sizes.working_bytes, interrupt_mode=True) as theirs,
    ):
        what = "embedded target against SPDK's, our initiator"
        yield from _rows(bench, "target.{}/spdk", what, (ours, None), (theirs, None))


def run_digests(bench: Bench) -> Iterator[Row]:
    """Header and data digests against none, our initiator and the embedded target."""
    digests = NvmeTcpOptions(header_digest=True, data_digest=True)
    with embedded(bench.memory_dir, bench.sizes.working_bytes) as volume:
        what = "digests against none, our initiator, embedded target"
        yield from _rows(bench, "digests.{}/none", what, (volume, digests), (volume, None))


_Way = tuple[Volume, NvmeTcpOptions | None]


def _rows(bench: Bench, name: str, what: str, ours: _Way, theirs: _Way) -> Iterator[Row]:
    sizes, transports = bench.sizes, [volume.transport(options) for volume, options in (ours, theirs)]
    try:
        for block_bytes in sizes.block_bytes:
            sides = [
                _side(side, transport, way[0], block_bytes, bench)
                for side, transport, way in zip(("ours", "theirs"), transports, (ours, theirs), strict=True)
            ]
            samples = interleave(sides, sizes.repeats)
            served = {
                "target": ours[0].what,
                "baseline_target": theirs[0].what,
                "file_system": file_system(bench.memory_dir),
            }
            details = {"block_bytes": block_bytes, "depth": _DEPTH, **served}
            yield gb_per_s_row(
                name.format(size_name(block_bytes)), what, samples["ours"], samples["theirs"], aim=None, details=details
            )
    finally:
        for transport in transports:
            transport.close()


def _side(name: str, transport: Transport, volume: Volume, block_bytes: int, bench: Bench) -> Side:
    reads = _Reads(transport, block_bytes, bench.sizes.working_bytes)
    return Side(name, lambda: reads.slot(bench.sizes.slot_bytes), (volume.pid,))
