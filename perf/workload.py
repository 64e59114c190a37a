"""What is moved: blocks of random bytes in one mapping, the buffers that reads end in, and slots of work over both.

Every side of a comparison reads into, and writes from, these same buffers; all have been touched before anything is
timed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forebay.client import Client
from perf.harness import Side, Sizes
from perf.node import BenchNode

__all__ = ["Bench", "Skipped", "Workload", "Wrong", "client_get", "client_put", "fill", "size_name", "workloads"]

_KEY_BYTES = 36


class Skipped(Exception):
    """A comparison that cannot be made here; the text says why."""


class Wrong(Exception):
    """A side did not do its work: a miss, a block not stored, other bytes. Nothing is measured then."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a benchmark is given: sizes, a directory in memory and one on a disk (None: there is none)."""

    sizes: Sizes
    memory_dir: Path
    disk_dir: Path | None

    def disk(self) -> Path:
        """The directory on a disk. Raises `Skipped`."""
        if self.disk_dir is None:
            raise Skipped("the directory for temporary files lies in memory; name one on a disk with --disk")
        return self.disk_dir


class Workload:
    """Blocks of one size, moved in batches of another: ``values`` of the whole working set, ``buffers`` for a batch."""

    def __init__(self, sizes: Sizes, block_bytes: int, batch: int) -> None:
        self.sizes = sizes
        self.block_bytes = block_bytes
        self.batch = batch
        self.count = sizes.working_bytes // block_bytes
        self.name = f"{size_name(block_bytes)}.x{batch}"
        source = mmap.mmap(-1, self.count * block_bytes)
        target = mmap.mmap(-1, batch * block_bytes)
        rng = np.random.default_rng(block_bytes)
        np.frombuffer(source, np.uint64)[:] = rng.integers(0, 1 << 64, len(source) // 8, np.uint64)
        np.frombuffer(target, np.uint8)[:] = 1
        self.values = [memoryview(source)[i * block_bytes : (i + 1) * block_bytes] for i in range(self.count)]
        self.buffers = [memoryview(target)[i * block_bytes : (i + 1) * block_bytes] for i in range(batch)]

    def keys_of(self, turn: int = 0) -> list[bytes]:
        """A key of 36 bytes for every block, other ones for every ``turn``."""
        return [(b"%d/%d/%d" % (self.block_bytes, turn, i)).ljust(_KEY_BYTES, b".") for i in range(self.count)]

    @property
    def details(self) -> dict[str, int]:
        """For the row."""
        return {
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "working_set_bytes": self.count * self.block_bytes,
        }

    def aim(self, figure: float) -> float | None:
        """``figure`` of design §9 for transfers of blocks, which speaks of 1 MiB and more; smaller ones have none."""
        return figure if self.block_bytes >= 1 << 20 else None

    @property
    def calls(self) -> int:
        """Calls of a slot: what its bytes ask for, but no more than are needed for a figure where blocks are small."""
        return max(1, min(self.sizes.slot_calls, self.sizes.slot_bytes // (self.block_bytes * self.batch)))

    def slots(self, move: Callable[[int, int], object]) -> Callable[[], int]:
        """A slot of work: ``move(first, end)`` for one batch after another, on from where the last slot ended."""
        at = 0

        def slot() -> int:
            nonlocal at
            for _ in range(self.calls):
                move(at, at + self.batch)
                at = (at + self.batch) % self.count
            return self.calls * self.batch * self.block_bytes

        return slot

    def reading(self, name: str, servers: tuple[int, ...], move: Callable[[int, int], object]) -> Side:
        """A side that fills ``buffers``; proves first that the bytes are those of ``values``. Raises `Wrong`."""
        for first in (self.count - self.batch, 0):
            move(first, first + self.batch)
            for i, buffer in enumerate(self.buffers):
                if not np.array_equal(np.frombuffer(buffer, np.uint8), np.frombuffer(self.values[first + i], np.uint8)):
                    raise Wrong(f"{name} read other bytes than were written")
        return Side(name, self.slots(move), servers)


def size_name(size_bytes: int) -> str:
    """For the names of rows: ``64KiB``, ``1MiB``."""
    return f"{size_bytes >> 20}MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10}KiB"


def workloads(sizes: Sizes) -> Iterator[Workload]:
    """Every size of block, one at a time and in batches."""
    for block_bytes in sizes.block_bytes:
        for batch in (1, sizes.batch):
            yield Workload(sizes, block_bytes, batch)


def fill(client: Client, keys: list[bytes], values: list[memoryview]) -> None:
    """Store blocks. Raises `Wrong`."""
    for result in client.put(keys, values):
        if not result.stored:
            raise Wrong(f"put answered {result.reason}")


def client_get(node: BenchNode, client: Client, work: Workload) -> Side:
    """Our side of a comparison of reads; stores the working set first."""
    keys = work.keys_of()
    fill(client, keys, work.values)

    def move(first: int, end: int) -> None:
        for result in client.get_into(keys[first:end], work.buffers):
            if not result.hit:
                raise Wrong(f"get_into answered {result.reason}")

    side = work.reading("forebay", node.servers, move)

    def after() -> None:
        client.delete(keys)

    return replace(side, after=after)


def client_put(
    node: BenchNode, client: Client, work: Workload, name: str = "forebay", turns: Iterable[int] = range(1, 1 << 20)
) -> Side:
    """Our side of a comparison of writes: new keys in every slot, and room made for them before it, not timed.

    Two such sides of one node need ``turns`` that differ: the keys are made of them.
    """
    numbers, keys, stored = iter(turns), list[bytes](), list[bytes]()

    def clear() -> None:
        if stored:
            client.delete(stored)
            stored.clear()

    def before() -> None:
        nonlocal keys
        clear()
        keys = work.keys_of(next(numbers))

    def move(first: int, end: int) -> None:
        fill(client, keys[first:end], work.values[first:end])
        stored.extend(keys[first:end])

    return Side(name, work.slots(move), node.servers, before, clear)
