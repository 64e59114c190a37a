from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.appliance.control.peer import Caller, Daemon


@pytest.fixture(scope="module")
def streams() -> bool:
    """Whether `caller` makes its calls by the stream; a module that tries both ways has its own, with parameters."""
    return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, streams: bool) -> Iterator[Daemon]:
    """One node for the tests of a module that do it no harm."""
    daemon = Daemon(tmp_path_factory.mktemp("node") / "data")
    try:
        yield daemon.start()
    finally:
        daemon.clean_up()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes nodes that are ended with the test."""
    made: list[Daemon] = []

    def one(name: str = "data", **flags: Any) -> Daemon:
        made.append(Daemon(tmp_path / name, **flags))
        return made[-1]

    yield one
    for daemon in made:
        daemon.clean_up()


@pytest.fixture
def caller(shared: Daemon, streams: bool) -> Iterator[Caller]:
    """An administrator with a session in the default namespace."""
    one = shared.caller(streams=streams)
    one.open()
    yield one
    one.close()
