"""The node under test: daemon and target as real processes, in a directory of the file system that is measured."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay.cli.demo.node import DemoNode

__all__ = ["BenchNode", "scratch", "start_node"]


@dataclass(frozen=True, slots=True)
class BenchNode:
    """A node that serves. ``servers`` are the pids of daemon and target, ``data`` is where all it keeps lies."""

    url: str
    token: str
    servers: tuple[int, ...]
    data: Path


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A directory under ``parent`` that goes away again."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-perf-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def start_node(parent: Path, capacity_bytes: int) -> Iterator[BenchNode]:
    """Start a node on ``parent``'s file system, metadata and volumes both; stop it and remove it in the end."""
    with scratch(parent) as folder:
        node = DemoNode(folder / "data", capacity_bytes, folder / "node.log")
        try:
            node.start()
            about = json.loads((node.data / "node.json").read_text())
            yield BenchNode(node.url, node.token, (about["pid"], about["target"]["pid"]), node.data)
        finally:
            node.stop()
