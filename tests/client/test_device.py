"""Reads into a device's memory. The device is a stand-in, named so: host memory that only its lane may write to.

What torch does on the host is checked in its own environment; what a GPU does, by ``perf/gpu_check.py``.
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from forebay.checksum import crc32c
from forebay.client import Client, ClientOptions
from forebay.client.device import DeviceView, View
from forebay.client.session import Opening
from forebay.client.transports.base import (
    Capabilities,
    DeviceReadOp,
    Outcome,
    ReadOp,
    Segment,
    Transport,
    TransportState,
    WriteOp,
)
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import nvme_tcp
from forebay.clock import Clock
from forebay.errors import InvalidArgument
from forebay.ids import HostIdentity
from forebay.schema import Schema
from forebay.testing.faults import FaultRates, Faulty
from tests.client.scripted_node import TOKEN, ScriptedNode
from tests.envs import ENVIRONMENTS

SIZE = 20_000
OLD = 0xEE


class StandInTensor:
    """Bytes of the device, or pinned host memory."""

    def __init__(self, array: Any, device: str = "device:0") -> None:
        self.array = array
        self.device = device
        self.shape = array.shape

    def __getitem__(self, part: slice) -> "StandInTensor":
        return StandInTensor(self.array[part], self.device)

    def numpy(self) -> Any:
        assert self.device == "pinned", "the host has no way to the device's memory"
        return self.array


class StandInLane:
    """A lane whose copies are made late: at the mark that is waited for, or in the end."""

    def __init__(self) -> None:
        self.queued: list[tuple[DeviceView, Any]] = []
        self.done = 0
        self.lent = 0
        self.most_lent = 0
        self.settled = 0
        self.drained = 0
        self.fails = False

    def host(self, length_bytes: int) -> StandInTensor:
        self.lent += 1
        self.most_lent = max(self.most_lent, self.lent)
        return StandInTensor(np.empty(length_bytes, np.uint8), "pinned")

    def copy(self, view: DeviceView, host: StandInTensor) -> None:
        self.queued.append((view, host))

    def mark(self) -> int:
        return len(self.queued)

    def wait(self, mark: int) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        for view, host in self.queued[self.done : mark]:
            view.tensor.array[:] = host.array
            self.lent -= 1
        self.done = max(self.done, mark)

    def settle(self) -> None:
        self.settled += 1

    def drain(self) -> None:
        self.drained += 1
        self.wait(len(self.queued))


class Straight(Transport):
    """A transport that reaches the stand-in's memory: by the real one, and a copy."""

    capabilities = Capabilities("stand-in", device_memory=True)

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.seeds: list[int | None] = []

    def connect(self, deadline_ms: int) -> None:
        self.inner.connect(deadline_ms)

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        self.seeds += [segment.seed for op in ops for segment in op.segments]
        return self.inner.read(ops, deadline_ms)

    def read_device(self, ops: Sequence[DeviceReadOp], deadline_ms: int) -> list[Outcome]:
        self.seeds += [segment.seed for op in ops for segment in op.segments]
        host = [
            ReadOp(
                op.nsid,
                op.offset_bytes,
                tuple(
                    Segment(None if view is None else memoryview(bytearray(length)), length)
                    for view, length, _ in op.segments
                ),
            )
            for op in ops
        ]
        outcomes = []
        for op, copy, outcome in zip(ops, host, self.inner.read(host, deadline_ms), strict=True):
            sums: list[int | None] = []
            for (view, _, seed), segment in zip(op.segments, copy.segments, strict=True):
                if view is not None and segment.view is not None:
                    view.tensor.array[:] = np.frombuffer(segment.view, np.uint8)
                sums.append(None if seed is None or segment.view is None else crc32c(segment.view, seed))
            outcomes.append(outcome._replace(checksums=tuple(sums)))
        return outcomes

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        return self.inner.write(ops, deadline_ms)

    def state(self) -> TransportState:
        return self.inner.state()

    def close(self) -> None:
        self.inner.close()


class Scene:
    """A node, a client on it, and buffers of the stand-in."""

    def __init__(self, node: ScriptedNode, patch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.patch = patch
        self.lane = StandInLane()
        self.transports: list[Any] = []
        self.wrap: Any = lambda inner: inner
        self.values = {b"k%d" % i: bytes([i]) * (SIZE - i) for i in range(24)}
        patch.setattr("forebay.client.reader.lane_of", self.lane_of)

    def lane_of(self, views: Sequence[View]) -> StandInLane | None:
        return self.lane if any(isinstance(view, DeviceView) for view in views) else None

    def client(self, **options: Any) -> Client:
        def make(
            subsystem: SubsystemAddress,
            host: HostIdentity,
            nguids: Mapping[int, str],
            options: ClientOptions,
            clock: Clock,
        ) -> Transport:
            self.transports.append(self.wrap(nvme_tcp(subsystem, host, nguids, options, clock)))
            made: Transport = self.transports[-1]
            return made

        opening = Opening("default/default", Schema.opaque(), 0)
        options = {"deadline_ms": 20_000, "staging_bytes": 4 << 20, **options}
        client = Client(self.node.url, opening, token=TOKEN, options=ClientOptions(**options), transport=make)
        stored = client.put(list(self.values), list(self.values.values()))
        assert all(result.stored for result in stored)
        self.patch.setattr(
            "forebay.client.client.destination",
            lambda buffer, field: DeviceView(buffer) if isinstance(buffer, StandInTensor) else memoryview(buffer),
        )
        return client

    def buffers(self, device: str = "device:0") -> list[StandInTensor]:
        return [StandInTensor(np.full(SIZE, OLD, np.uint8), device) for _ in self.values]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with ScriptedNode() as node:
        yield Scene(node, monkeypatch)


def holds(buffer: StandInTensor, value: bytes) -> bool:
    return bool(buffer.array[: len(value)].tobytes() == value and (buffer.array[len(value) :] == OLD).all())


def test_staged_blocks_are_there_when_the_call_returns(scene: Scene) -> None:
    with scene.client(staging_bytes=4 << 20) as client:
        buffers = scene.buffers()
        assert all(got.hit and got.value is None for got in client.get_into(list(scene.values), buffers))
        assert all(holds(buffer, value) for buffer, value in zip(buffers, scene.values.values(), strict=True))
    assert scene.lane.drained == 1
    assert scene.lane.done == len(scene.values)


def test_a_long_call_keeps_two_parts_in_pinned_memory(scene: Scene) -> None:
    with scene.client(staging_bytes=2 * SIZE) as client:
        buffers = scene.buffers()
        assert all(got.hit for got in client.get_into(list(scene.values), buffers))
        assert all(holds(buffer, value) for buffer, value in zip(buffers, scene.values.values(), strict=True))
    assert scene.lane.most_lent == 4


def test_a_miss_leaves_its_buffer_as_it_was(scene: Scene) -> None:
    scene.wrap = lambda inner: Faulty(inner, 5, FaultRates(corrupt=0.3, media=0.2))
    scene.patch.setattr(Faulty, "write", lambda self, ops, deadline_ms: self._inner.write(ops, deadline_ms))
    with scene.client() as client:
        buffers = scene.buffers()
        results = client.get_into([*scene.values, b"none"], [*buffers, scene.buffers()[0]])
        missed = [i for i, got in enumerate(results[:-1]) if not got.hit]
        assert 0 < len(missed) < len(buffers)
        for i, value in enumerate(scene.values.values()):
            assert holds(buffers[i], b"" if i in missed else value)
        assert {results[i].reason for i in missed} == {"checksum_mismatch", "target_failed"}


def test_a_device_that_fails_is_a_miss(scene: Scene) -> None:
    with scene.client() as client:
        scene.lane.fails = True
        results = client.get_into(list(scene.values), scene.buffers())
        assert {got.reason for got in results} == {"unavailable"}
        (on_host,) = client.get([b"k3"])
        assert on_host.value is not None
        assert bytes(on_host.value) == scene.values[b"k3"]


def test_a_transport_that_reaches_the_device_fills_it_itself(scene: Scene) -> None:
    scene.wrap = Straight
    with scene.client() as client:
        buffers = scene.buffers()
        assert all(got.hit for got in client.get_into(list(scene.values), buffers))
        assert all(holds(buffer, value) for buffer, value in zip(buffers, scene.values.values(), strict=True))
        scene.node.blocks[next(iter(scene.node.blocks))].checksums = [1]
        results = client.get_into(list(scene.values), scene.buffers())
        assert [got.reason for got in results].count("checksum_mismatch") == 1
    assert scene.lane.settled == 2
    assert scene.lane.most_lent == 0


def test_buffers_are_of_one_device() -> None:
    from forebay.client.device import lane_of

    tensors = [DeviceView(StandInTensor(np.zeros(4), name)) for name in ("device:0", "device:1")]
    with pytest.raises(InvalidArgument, match="device:0, device:1"):
        lane_of(tensors)
    with pytest.raises(InvalidArgument, match="cpu, device:0"):
        lane_of([memoryview(b""), tensors[0]])
    assert lane_of([memoryview(b"")]) is None


def test_host_transports_say_that_they_reach_no_device(scene: Scene) -> None:
    with scene.client(), pytest.raises(InvalidArgument, match="reaches host memory only"):
        scene.transports[0].read_device([], 0)


@pytest.mark.parametrize(
    ("verify", "fenced", "verified"),
    [("always", True, 24), ("sample", True, 6), ("never", True, 0), ("sample", False, 24), ("never", False, 24)],
)
def test_less_is_verified_only_where_reads_are_fenced(scene: Scene, verify: str, fenced: bool, verified: int) -> None:
    scene.wrap = Straight
    scene.node.reads_fenced = fenced
    with scene.client(verify=verify, verify_one_in=4) as client:
        scene.transports[0].seeds.clear()
        assert all(got.hit for got in client.get_into(list(scene.values), scene.buffers()))
        seeds = scene.transports[0].seeds
    assert sum(seed is not None for seed in seeds) == verified
    assert len(seeds) == 2 * len(scene.values)  # the values and their padding


def test_what_verify_may_be() -> None:
    with pytest.raises(InvalidArgument, match="always or sample or never"):
        ClientOptions(verify="seldom")  # type: ignore[arg-type]


@pytest.mark.torch
def test_torch_and_the_cpu_agree_on_every_checksum() -> None:
    env = ENVIRONMENTS["torch"]
    if env.missing:
        pytest.skip(env.missing)
    done = subprocess.run(
        [env.python, "-m", "tests.client.device_checks"],
        env=env.variables(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 250
