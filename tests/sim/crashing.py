"""Runs one scenario for each crash point, each in a process of its own that is killed there.

``python -m tests.sim.crashing FOLDER`` leaves a directory a point: metadata (RocksDB), the drive, and ``said``, the
lines of what was acknowledged before the kill. A process that was not killed says so by its exit status.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forebay.appliance.namespace.rocks import RocksStore
from forebay.crashpoints import POINTS, arm
from forebay.errors import OK
from forebay.ids import LBA_BYTES, BlockKey
from forebay.schema import Schema
from tests.sim.rig import GRID, Rig
from tests.sim.target import SimTarget

__all__ = ["BASE", "GRID_BYTES", "KEPT", "NOT_REACHED", "open_rig", "value_of"]

NOT_REACHED = 3
BASE = [b"base%d" % i for i in range(8)]
KEPT = BASE[:4]
"""Pinned: nothing may take these away."""
GRID_BYTES = GRID.groups[0].layout().value_bytes
OPAQUE = Schema.opaque()


def value_of(key: bytes, size: int = GRID_BYTES) -> bytes:
    """The bytes that are stored under a key."""
    return (key + b".") * (size // (len(key) + 1)) + b"x" * (size % (len(key) + 1))


def open_rig(folder: Path) -> Rig:
    """A node over what is in the folder."""
    target = SimTarget()
    target.on_files = True
    folder.mkdir(parents=True, exist_ok=True)
    store = RocksStore(folder / "metadata")
    return Rig(folder / "drive", capacity_regions=4, store=store, target=target, checkpoint=folder / "checkpoint")


async def scenario(rig: Rig, say: Callable[[str], None], point: str) -> None:
    """Everything that has a crash point, once."""
    if point.startswith("drive."):
        arm(point)  # only a first start comes there
    await rig.start()
    await rig.namespace()
    m = await rig.open()
    for key in BASE:
        assert await rig.put(m, key, value_of(key)) == OK
        say(f"put {key.decode()}")
    await rig.node.blocks.pin(m.session, [BlockKey(k) for k in KEPT], True, True)
    arm(point)
    await rig.allocate(m, b"pending")
    assert await rig.put(m, b"grid", value_of(b"grid")) == OK
    say("put grid")
    o = await rig.open(schema=OPAQUE)
    assert await rig.put(o, b"opaque", value_of(b"opaque", 3 * LBA_BYTES)) == OK  # another slot size: another region
    say("put opaque")
    say(f"deleting {BASE[7].decode()}")
    await rig.node.blocks.delete(m.session, [BlockKey(BASE[7])])
    say(f"deleted {BASE[7].decode()}")
    say("deleting opaque")
    await rig.node.blocks.delete(o.session, [BlockKey(b"opaque")])
    say("deleted opaque")
    await rig.node.release_empty_regions()
    await rig.node.checkpoint()
    say("evicting")
    await rig.node.update_namespace("t/n", quota_bytes=10 * GRID_BYTES)
    for i in range(4):
        assert await rig.put(m, b"more%d" % i, value_of(b"more%d" % i)) == OK
        say(f"put more{i}")
    await rig.namespace("t/other")
    say("namespace t/other")
    assert await rig.put(await rig.open("t/other"), b"theirs", value_of(b"theirs")) == OK
    say("dropping t/other")
    await rig.node.delete_namespace("t/other", force=True)
    say("dropped t/other")
    await rig.namespace("t/half")
    half = rig.node.state.namespace("t/half")
    assert half is not None
    await rig.node.state.namespaces.put(replace(half, deleting=True))  # as a stop half-way leaves it
    await rig.start()
    say("started")
    await rig.node.close()
    await rig.start()


def main(folder: Path) -> int:
    """Fork a process a point; 0 if each was killed."""
    missed = 0
    for point in POINTS:
        child = os.fork()
        if child == 0:
            home = folder / point
            rig = open_rig(home)
            with (home / "said").open("w", buffering=1) as said:
                asyncio.run(scenario(rig, lambda line: print(line, file=said), point))
            os._exit(NOT_REACHED)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            print(f"{point}: ended with {os.waitstatus_to_exitcode(status)} instead of being killed there")
            missed = 1
    return missed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
