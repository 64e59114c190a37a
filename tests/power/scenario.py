"""A node's life with everything in it that has a crash point, recorded: ``python -m tests.power.scenario FOLDER``.

A process of its own, in which the recorder is loaded. Namespaces of all three policies live side by side; keys are
deleted and put again with other bytes, so that their extents change owners while old records may still be about.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rocksdict import Cache, Options

from forebay import crashpoints
from forebay.appliance.namespace import rocks
from forebay.appliance.namespace.records import Durability, encode_tail
from forebay.errors import OK
from forebay.ids import LBA_BYTES, BlockKey
from forebay.schema import Schema
from tests.power.checking import Subject
from tests.power.recording import mark
from tests.sim.rig import GRID, Member

__all__ = ["POLICIES", "SUBJECT", "Life"]

POLICIES = {f"t/{policy.name.lower()}": policy for policy in Durability} | {"t/other": Durability.FLUSH}
OPAQUE_KEY = "opaque"
"""The key that is put under the opaque schema, and takes a region of another slot size."""
_ROUNDS = 5 if os.environ.get("FOREBAY_TEST_PROFILE") == "long" else 1
_TABLE_BYTES = 64 << 10
_TAIL = encode_tail({"parent": bytes(1500)}, {})
"""Makes records large, so that there are many tables."""
_OPAQUE_BYTES = 3 * LBA_BYTES
_GRID_BYTES = GRID.groups[0].layout().value_bytes


def value_of(name: str, key: str, version: int) -> bytes:
    """The bytes of a version of a key."""
    size = _OPAQUE_BYTES if key == OPAQUE_KEY else _GRID_BYTES
    word = f"{name}|{key}|{version}.".encode()
    return (word * (size // len(word) + 1))[:size]


SUBJECT = Subject(
    "metadata", "drive", "checkpoint", 10, value_of, lambda key: Schema.opaque() if key == OPAQUE_KEY else GRID
)


def _small_tables(options: Callable[[Cache], Options]) -> Callable[[Cache], Options]:
    """RocksDB's options with so little memory that it writes tables, and joins them, while the node works."""

    def smaller(cache: Cache) -> Options:
        made = options(cache)
        made.set_write_buffer_size(_TABLE_BYTES)
        made.set_level_zero_file_num_compaction_trigger(2)
        return made

    return smaller


class Life:
    """What a node goes through; every step says what it does and what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rig = SUBJECT.open(folder)
        self._members: dict[str, Member] = {}
        self._opaque: dict[str, Member] = {}
        self._versions: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """All of it."""
        crashpoints.watch(lambda name: mark(f"at {name}"))
        await self._rig.start()
        for name in POLICIES:
            if name != "t/other":
                await self._make(name)
        await self._use(rounds=3)
        await self._restart(clean=False)
        await self._use(rounds=2)
        await self._limits()
        await self._restart(clean=True)
        await self._use(rounds=2)
        await self._come_and_go()
        await self._half()
        await self._restart(clean=True)
        await self._use(rounds=1)

    async def _make(self, name: str) -> None:
        mark(f"making {name}")
        await self._rig.namespace(name, durability=int(POLICIES[name]))
        mark(f"made {name}")
        await self._open(name)

    async def _open(self, name: str) -> None:
        self._members[name] = await self._rig.open(name)
        self._opaque[name] = await self._rig.open(name, Schema.opaque())

    async def _restart(self, *, clean: bool) -> None:
        """Daemon and target end, one by a kill or both as they should, and start."""
        names = list(self._members)
        if clean:
            await self._rig.node.close()
            self._rig.store.close()
            await self._rig.target.close()
            self._rig = SUBJECT.open(self._folder)
        await self._rig.start()
        for name in names:
            await self._open(name)

    async def _put(self, name: str, key: str) -> None:
        member = self._opaque[name] if key == OPAQUE_KEY else self._members[name]
        version = self._versions[name, key] = self._versions.get((name, key), 0) + 1
        mark(f"putting {name} {key} {version}")
        assert await self._rig.put(member, key.encode(), value_of(name, key, version), tail=_TAIL) == OK
        mark(f"put {name} {key} {version}")

    async def _delete(self, name: str, *keys: str) -> None:
        for key in keys:
            mark(f"deleting {name} {key}")
        member = self._opaque[name] if key == OPAQUE_KEY else self._members[name]
        await self._rig.node.blocks.delete(member.session, [BlockKey(key.encode()) for key in keys])
        for key in keys:
            mark(f"deleted {name} {key}")

    async def _use(self, rounds: int) -> None:
        await asyncio.gather(*(self._use_one(name, rounds) for name in self._members))
        await self._rig.node.sweep()  # which tears down the hosts of what was left unfinished
        for name in self._members:
            await self._open(name)
        await self._rig.node.checkpoint()

    async def _use_one(self, name: str, rounds: int) -> None:
        """Blocks come, go and come again in the extents of others."""
        fresh = not self._versions.get((name, "base0"))
        if fresh:
            for i in range(6):
                await self._put(name, f"base{i}")
            kept = ["base0", "base1"]
            member = self._members[name]
            await self._rig.node.blocks.pin(member.session, [BlockKey(k.encode()) for k in kept], True, True)
            for key in kept:
                mark(f"keep {name} {key}")
        for _ in range(rounds * _ROUNDS):
            await self._delete(name, "base5", "base4")
            await asyncio.gather(self._put(name, "base4"), self._put(name, "base5"))
            await self._delete(name, "base3")
            await self._put(name, "base3")
            await self._put(name, OPAQUE_KEY)
            # left unfinished: a grant and an extent, and bytes that nobody committed
            (row,) = await self._rig.allocate(self._members[name], b"pending", ttl_ms=1)
            if row.extent is not None:
                self._rig.write(self._members[name], b"pending", row.extent, value_of(name, "pending", 1))
            await self._delete(name, OPAQUE_KEY)
            self._rig.clock.advance(10)
        await self._rig.node.release_empty_regions()

    async def _limits(self) -> None:
        """A quota that makes room by eviction."""
        name = "t/flush"
        mark(f"evicting {name}")
        await self._rig.node.update_namespace(name, quota_bytes=7 * _GRID_BYTES)
        for i in range(4):
            await self._put(name, f"more{i}")
        await self._rig.node.update_namespace(name, quota_bytes=0)

    async def _half(self) -> None:
        """A start that finds a namespace half made."""
        mark("making t/half")
        await self._rig.namespace("t/half")
        half = self._rig.node.state.namespace("t/half")
        assert half is not None
        await self._rig.node.state.namespaces.put(replace(half, deleting=True))
        await self._restart(clean=False)
        mark("dropped t/half")

    async def _come_and_go(self) -> None:
        """A namespace with blocks, made and deleted, and made again."""
        for _ in range(2):
            await self._make("t/other")
            await self._put("t/other", "base0")
            mark("dropping t/other")
            await self._rig.node.delete_namespace("t/other", force=True)
            mark("dropped t/other")
            del self._members["t/other"], self._opaque["t/other"]


if __name__ == "__main__":
    rocks._options = _small_tables(rocks._options)  # type: ignore[assignment]  # a function by another name
    asyncio.run(Life(Path(sys.argv[1])).run())
