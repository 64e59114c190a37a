"""A node for tests of the command line, started as a user would, and a shell to run commands in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.demo.node import DemoNode
from tests.cli.shell import Shell


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


@pytest.fixture
def forebay(node: DemoNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("URL", "TOKEN", "NAMESPACE"):
        monkeypatch.delenv(f"FOREBAY_{name}", raising=False)
    monkeypatch.setenv("FOREBAY_DATA", str(node.data))
    return Shell(capsys)
