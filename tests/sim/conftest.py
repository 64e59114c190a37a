from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import MemoryStore, Store
from forebay.crashpoints import disarm
from tests.sim.rig import Rig


@pytest.fixture(params=["memory", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else RocksStore(tmp_path / "metadata")
    yield made
    made.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A node over a simulated target, not started."""
    yield Rig(tmp_path / "drive")
    disarm()


@pytest.fixture
def durable_rig(store: Store, tmp_path: Path) -> Rig:
    """The same over both kinds of store."""
    return Rig(tmp_path / "drive", store=store)
