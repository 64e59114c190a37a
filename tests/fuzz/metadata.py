"""A node's metadata with damage, as it lies on a drive: a start refuses it with a code, or serves right bytes only.

RocksDB's own checksums stand before this: what is damaged here is what a lost write, a mistake or a hand would damage.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from forebay.appliance.dataplane.volumes import FileVolumes
from forebay.appliance.namespace.fsck import Fsck
from forebay.appliance.namespace.store import FAMILIES, MemoryStore
from forebay.errors import OK, ForebayError
from tests.fuzz.decoders import changed
from tests.fuzz.source import Source
from tests.fuzz.target import memory_dir
from tests.fuzz.watch import Faults
from tests.sim.rig import Member, Rig

__all__ = ["run"]

_VALUE = bytes(range(256)) * 64  # the grid's four tiles
_BLOCKS = 5


def _value(i: int) -> bytes:
    return _VALUE[i:] + _VALUE[:i]


class _Baseline:
    """A node that was filled once; each input damages a copy of what it left."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="forebay-fuzz-", dir=memory_dir()))
        atexit.register(shutil.rmtree, self.directory, ignore_errors=True)
        self.rig = Rig(self.directory / "drive", checkpoint=self.directory / "index.checkpoint")
        asyncio.run(self._fill())
        self.families = {name: dict(table) for name, table in self.store.families.items()}
        assert self.rig.checkpoint is not None
        self.checkpoint = self.rig.checkpoint.read_bytes()

    @property
    def store(self) -> MemoryStore:
        assert isinstance(self.rig.store, MemoryStore)
        return self.rig.store

    async def _fill(self) -> None:
        await self.rig.start()
        await self.rig.namespace()
        member = await self.rig.open()
        for i in range(_BLOCKS):
            if i == _BLOCKS - 2:
                await self.rig.node.checkpoint()
            assert await self.rig.put(member, b"%d" % i, _value(i)) == OK

    def restore(self) -> None:
        """As it was left."""
        self.store.families = {name: dict(table) for name, table in self.families.items()}
        assert self.rig.checkpoint is not None
        self.rig.checkpoint.write_bytes(self.checkpoint)


@lru_cache(maxsize=1)
def _baseline() -> _Baseline:
    return _Baseline()


def _damage(source: Source, base: _Baseline) -> None:
    for _ in range(1 + source.below(3)):
        family = source.pick(["blocks", "owners", "changes", "state", "regions", "keyspaces", "meta", "checkpoint"])
        if family == "checkpoint":
            path = base.rig.checkpoint
            assert path is not None
            path.write_bytes(changed(source, path.read_bytes()))
            continue
        table = base.store.families[family]
        if not table:
            continue
        key, kind = source.pick(sorted(table)), source.below(6)
        if kind <= 1:
            table[key] = changed(source, table[key])
        elif kind == 2:
            table[key] = table[source.pick(sorted(table))]  # another's, whole
        elif kind == 3:
            table[changed(source, key)] = table[key]
        elif kind == 4:
            table[changed(source, key)] = table.pop(key)
        else:
            del table[key]


async def _start(source: Source, base: _Baseline) -> None:
    rig = base.rig
    checker = Fsck(rig.store, {"drive0": FileVolumes(rig.drive)}, rig.checkpoint or Path())
    try:
        report = await checker.run(media=False, progress=lambda done, total: None)
        assert report.checked or not report.clean
    except ForebayError as error:
        assert error.code != ForebayError.code
    try:
        await rig.restart(clean=False)
        member = await rig.open()
    except ForebayError as error:
        assert error.code != ForebayError.code
        return
    await _read_all(rig, member)
    if source.chance(2):  # and what it writes after that lies on nothing that is still there
        await rig.put(member, b"new", _value(9))
        await _read_all(rig, member)


async def _read_all(rig: Rig, member: Member) -> None:
    for i in range(_BLOCKS):
        try:
            found = await rig.get(member, b"%d" % i)
        except (ForebayError, AssertionError) as error:
            assert isinstance(error, ForebayError) or "does not verify" in str(error), repr(error)
            continue  # the reader's checksum stands between: a miss
        assert found in (None, _value(i)), "wrong bytes"


def run(data: bytes) -> None:
    """One damaged node."""
    faults, base, source = Faults.install(), _baseline(), Source(data)
    base.restore()
    _damage(source, base)
    asyncio.run(_start(source, base))
    faults.check()
    assert set(base.store.families) == set(FAMILIES)
