"""A node for tests of the command line, started as a user would."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.demo.node import DemoNode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoNode]:
    """A running node; tests of one module share it and use keys of their own."""
    folder: Path = tmp_path_factory.mktemp("node")
    running = DemoNode(folder / "data", 512 << 20, folder / "node.log")
    try:
        running.start()
        yield running
    finally:
        running.stop()
