"""A node whose target can lie about what it reads and writes: `python -m tests.connectors.liar serve ...`.

The file that FOREBAY_TEST_LIE names holds the lie of the moment; without one, or with no word in it, all is true:

============= ==========================================================
drop          writes are acknowledged, and are not made
corrupt       writes are made with one bit changed
slow          each write takes two seconds
wrong_reads   reads are answered with one bit changed
slow_reads    each read takes a while
============= ==========================================================
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from forebay.appliance.dataplane import supervisor
from forebay.appliance.dataplane.target import __main__ as target_process
from forebay.appliance.dataplane.target.volume import Volume
from forebay.cli.main import main as forebay
from tests.client.conftest import NodeProcess

__all__ = ["LyingNode"]

_ROOT = str(Path(__file__).resolve().parents[2])
_VARIABLE = "FOREBAY_TEST_LIE"
_WRITE_S, _READ_S = 2.0, 0.2


class LyingNode(NodeProcess):
    """The node, and the lie of the moment."""

    program = (sys.executable, "-m", "tests.connectors.liar")

    def __init__(self, data: Path, **environment: str) -> None:
        self._file = data.parent / "lie"
        self.lie("")
        paths = [_ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        own = {"FOREBAY_TARGET_KIND": "embedded", "PYTHONPATH": os.pathsep.join(paths)}  # whatever other nodes have
        super().__init__(data, **{_VARIABLE: str(self._file), **own, **environment})

    def lie(self, word: str) -> None:
        """From now on; "" for the truth."""
        beside = self._file.with_suffix(".new")
        beside.write_text(word)
        beside.replace(self._file)


def _lie() -> str:
    return Path(os.environ[_VARIABLE]).read_text()


def _change_a_bit(view: memoryview) -> None:
    view[len(view) // 2] ^= 1


def _target() -> int:
    init, read_into, write = Volume.__init__, Volume.read_into, Volume.write

    def without_view(self: Volume, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.read_view = None  # of a drive in memory, whose bytes would go by us

    def lying_read(self: Volume, view: memoryview, offset_bytes: int) -> None:
        read_into(self, view, offset_bytes)
        word = _lie()
        if word == "wrong_reads":
            _change_a_bit(view)
        elif word == "slow_reads":
            time.sleep(_READ_S)

    def lying_write(self: Volume, view: memoryview, offset_bytes: int) -> None:
        word = _lie()
        if word == "drop":
            return
        if word == "corrupt":
            _change_a_bit(view)
        elif word == "slow":
            time.sleep(_WRITE_S)
        write(self, view, offset_bytes)

    for name, lying in (("__init__", without_view), ("read_into", lying_read), ("write", lying_write)):
        setattr(Volume, name, lying)
    return target_process.main(sys.argv[2:])


def _node() -> None:
    supervisor.EmbeddedProgram.command = (  # type: ignore[method-assign]
        lambda self, socket, log_file: [
            *(sys.executable, "-m", "tests.connectors.liar", "target"),
            *(*list(self.start)[3:], "--socket", str(socket), "--log", str(log_file)),
        ]
    )
    forebay()


if __name__ == "__main__":
    if sys.argv[1] == "target":
        sys.exit(_target())
    _node()
