"""Metadata are lost or damaged while volumes are whole: an error that says so, or less is found; never a wrong byte."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.appliance.namespace import checkpoint
from forebay.appliance.namespace.rocks import RocksStore
from forebay.errors import OK, ForebayError, MetadataCorrupt, VolumeMismatch
from forebay.ids import BlockKey
from tests.disks.node import FaultyNode
from tests.sim.rig import REGION, Member, Rig

LONG = os.environ.get("FOREBAY_TEST_PROFILE") == "long"
ROUNDS = 20 if LONG else 2
COUNT = 40
_WRITTEN = 4 << 20
"""As far as the blocks of a test reach, and further."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FaultyNode]:
    served = FaultyNode(tmp_path, None, [tmp_path / "a"])
    yield served
    served.stop()


def test_lost_metadata_are_said_and_nothing_old_is_read(node: FaultyNode) -> None:
    values = {f"k{i}".encode(): os.urandom(64 << 10) for i in range(COUNT)}

    def hits() -> int:
        with node.client() as client:
            return sum(result.hit for result in client.get(list(values)))

    with node.client() as client:
        assert all(r.stored for r in client.put(list(values), list(values.values())))
    volume = next((node.drives[0] / "volumes").glob("*.vol"))
    node.stop()
    shutil.rmtree(node.metadata)
    said = node.refused()
    assert "belongs to node" in said and str(node.metadata) in said and "--start-empty" in said
    assert volume.exists(), "a refusal changes nothing on the drive"
    node.start("--start-empty")
    assert "declared empty" in node.log.read_text() and volume.name in node.log.read_text()
    assert hits() == 0
    with node.client() as client:
        assert all(r.stored for r in client.put(list(values), list(values.values())))
    assert hits() == COUNT
    node.stop()
    assert "has them" in node.refused("--start-empty")


def flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def blank(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


class Damaged:
    """A node whose blocks were stored, deleted and stored again, and its metadata as a stop left them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "db"
        self.stored: dict[bytes, list[bytes]] = {}
        self.rig = Rig(folder / "drive", store=RocksStore(self.database), checkpoint=folder / checkpoint.FILE_NAME)

    async def fill(self, *, tables: bool) -> None:
        """Tables: what was stored is in them; else all of it is in the log."""
        rig, store = self.rig, self.rig.store
        assert isinstance(store, RocksStore)
        await rig.start()
        await rig.namespace()
        member = await rig.open()
        for turn in range(3):  # extents change hands
            for i in range(COUNT):
                key, value = b"k%d" % i, random.Random(f"{turn}-{i}").randbytes(16384)
                if turn:
                    await rig.node.blocks.delete(member.session, [BlockKey(key)])
                assert await rig.put(member, key, value) == OK
                self.stored.setdefault(key, []).append(value)
        if tables:
            with store._read() as opened:
                for family in opened.families.values():
                    family.flush()
            assert await rig.node.checkpoint()
        shutil.copytree(self.database, self.folder / "pristine")  # as a kill leaves it: a stop empties the log
        store.close()
        if tables:
            shutil.copy(self.folder / checkpoint.FILE_NAME, self.folder / "pristine.checkpoint")
        shutil.copytree(self.folder / "drive", self.folder / "pristine-drive")
        self.media = {volume: memory[REGION : REGION + _WRITTEN] for volume, memory in rig.target.media.items()}

    def restore(self) -> None:
        """As it was before the damage."""
        for volume, data in self.media.items():
            self.rig.target.media[volume][REGION : REGION + _WRITTEN] = data
        for name, origin in ((self.database, "pristine"), (self.folder / "drive", "pristine-drive")):
            shutil.rmtree(name)
            shutil.copytree(self.folder / origin, name)
        if (self.folder / "pristine.checkpoint").exists():
            shutil.copy(self.folder / "pristine.checkpoint", self.folder / checkpoint.FILE_NAME)

    async def judge(self) -> str:
        """What comes of a start: ``refused``, ``whole`` or ``less``. Raises for a wrong byte, or an error of no use."""
        store = None
        try:
            store = self.rig.store = RocksStore(self.database)
            node = await self.rig.start()
            if node.state.namespace("t/n") is None:
                return "less"
            member = await self.rig.open()
            found = [await self._get(member, key) for key in self.stored]
            self.rig.check()
        except ForebayError as error:
            # a manifest that was cut may leave an empty database: then the drive is not this node's
            assert isinstance(error, (MetadataCorrupt, VolumeMismatch)) or "db" in error.message, error
            assert len(error.message) > 20
            return "refused"
        finally:
            if store is not None:
                store.close()
        return "whole" if all(found) else "less"

    async def _get(self, member: Member, key: bytes) -> bool:
        try:
            value = await self.rig.get(member, key)
        except AssertionError as error:
            assert "does not verify" in str(error)
            return False  # as a client takes it: a miss
        assert value is None or value in self.stored[key], f"wrong bytes of {key!r}"
        return value is not None


@pytest.fixture(scope="module")
def in_tables(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return _filled(tmp_path_factory.mktemp("tables"), tables=True)


@pytest.fixture(scope="module")
def in_log(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return _filled(tmp_path_factory.mktemp("log"), tables=False)


def _filled(folder: Path, *, tables: bool) -> Damaged:
    node = Damaged(folder)
    asyncio.run(node.fill(tables=tables))
    return node


@pytest.mark.parametrize("damage", [flip, pytest.param(cut, marks=pytest.mark.long), blank])
@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        ("*.sst", "in_tables"),
        ("*.log", "in_log"),
        ("MANIFEST-*", "in_tables"),
        ("CURRENT", "in_tables"),
        ("../index.checkpoint", "in_tables"),
    ],
    ids=["tables", "log", "manifest", "current", "checkpoint"],
)
def test_damaged_metadata_are_an_error_or_less_and_never_a_wrong_byte(
    request: pytest.FixtureRequest, pattern: str, where: str, damage: Callable[[bytearray, random.Random], None]
) -> None:
    node: Damaged = request.getfixturevalue(where)
    outcomes: Counter[str] = Counter()
    for seed in range(ROUNDS):
        chance = random.Random(f"{pattern} {damage.__name__} {seed}")
        node.restore()
        files = [file for file in sorted(node.database.glob(pattern)) if file.stat().st_size]
        file = chance.choice(files)
        data = bytearray(file.read_bytes())
        damage(data, chance)
        file.write_bytes(data)
        try:
            outcomes[asyncio.run(node.judge())] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}: {damage.__name__} of {file}")
            raise
    assert outcomes.total() == ROUNDS
    if pattern == "../index.checkpoint":
        assert outcomes == {"whole": ROUNDS}, "a damaged checkpoint costs time and nothing else"


def test_a_file_of_metadata_that_is_gone_is_an_error_or_less(in_tables: Damaged, in_log: Damaged) -> None:
    for node in (in_tables, in_log):
        files = sorted(file.name for file in (node.folder / "pristine").iterdir())
        for name in files if LONG else random.Random(5).sample(files, 2):
            node.restore()
            (node.database / name).unlink()
            asyncio.run(node.judge())


def test_a_table_that_cannot_be_read_is_not_taken_for_a_short_one(tmp_path: Path) -> None:
    """A scan ends where its cursor does: at the end of the table, or where it cannot be read on."""
    store = RocksStore(tmp_path / "db")
    with store._read() as opened:
        for i in range(20_000):
            opened.families["blocks"].put(b"%08d" % i, random.Random(i).randbytes(50))
        opened.families["blocks"].flush()
    store.close()
    table = max((tmp_path / "db").glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    store = RocksStore(tmp_path / "db")
    with pytest.raises(MetadataCorrupt, match="checksum"):
        list(store.scan("blocks"))
    with pytest.raises(MetadataCorrupt):
        store.multi_get("blocks", [b"%08d" % i for i in range(20_000)])
    store.close()
