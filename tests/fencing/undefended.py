"""A node whose defences can be taken out: `python -m tests.fencing.undefended serve ...`, as `forebay serve ...`.

It patches the classes of this process, and of the target that this process starts, before they run. While no switch
is on (`switches`) what runs is the product.

================== ============== ======================================================================================
switch             process        what is out
================== ============== ======================================================================================
``grants``         target         writes need no grant, and grants do not exclude one another
``tags``           target         a write need not carry the tag of its grant
``teardown``       target         controllers are not torn down, whoever asks for it
``admission``      target         any host may connect, and sees every volume
``keep-alive``     target         controllers do not end when nothing is heard of their host
``precedence``     target         control requests that come too late are carried out all the same
``evict-leased``   daemon         eviction takes leased blocks too
``free-leased``    daemon         extents of ended blocks are free although they are leased
``whole``          daemon         one committed tile makes a block visible
``taken-back``     daemon         a write that was taken back can be committed
================== ============== ======================================================================================

Faults, which are no defences:

* ``late-release``, ``late-prepare``: the target holds the first request to deallocate (prepare) a region that comes
  while they are on, before it looks at it, until they are off;
* ``impatient``: the daemon gives such a request up at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import numpy as np

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.supervisor import EmbeddedProgram, Supervisor
from forebay.appliance.dataplane.target import __main__ as target_process
from forebay.appliance.dataplane.target.controller import Controller
from forebay.appliance.dataplane.target.grants import GrantTable
from forebay.appliance.dataplane.target.precedence import Precedence
from forebay.appliance.dataplane.target.private_methods import PrivateMethods
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.subsystems import Namespace, Subsystem
from forebay.appliance.namespace.retirement import Retirement
from forebay.appliance.namespace.room import Room
from forebay.appliance.namespace.sessions import PendingWrite, WriteState
from forebay.appliance.namespace.writes import Writes
from forebay.cli.main import main as forebay
from forebay.clock import SystemClock
from forebay.ids import Extent, VolumeId
from forebay.index import RowState, findable
from tests.fencing.switches import ahead_ms, note, on

__all__: list[str] = []

Plain = Callable[..., Any]


def instead(owner: type, name: str) -> Callable[[Plain], Plain]:
    """The function takes the place of a method; its first argument is the method as it was."""

    def take(act: Plain) -> Plain:
        plain = getattr(owner, name)

        @wraps(plain)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return act(plain, *args, **kwargs)

        setattr(owner, name, patched)
        return act

    return take


@instead(SystemClock, "monotonic_ms")
def _monotonic_ms(plain: Plain, *args: Any) -> Any:
    return plain(*args) + ahead_ms()


# --- the target -------------------------------------------------------------------------------------------------------


@instead(GrantTable, "add")
def _add(plain: Plain, self: GrantTable, volume: str, hosts: Any, rows: Any, lba_count: int, order: Any) -> Any:
    if on("grants"):
        return None
    tagged = [(*row[:3], 0) for row in rows] if on("tags") else rows
    return plain(self, volume, hosts, tagged, lba_count, None if on("precedence") else order)


@instead(GrantTable, "covers")
def _covers(plain: Plain, *args: Any, tag: int = 0) -> Any:
    return on("grants") or plain(*args, tag=0 if on("tags") else tag)


@instead(GrantTable, "begin_write")
def _begin_write(plain: Plain, *args: Any, tag: int = 0) -> Any:
    return [] if on("grants") else plain(*args, tag=0 if on("tags") else tag)


@instead(Server, "teardown")
def _teardown(plain: Plain, *args: Any) -> Any:
    return 0 if on("teardown") else plain(*args)


@instead(Subsystem, "allows")
def _allows(plain: Plain, *args: Any) -> Any:
    return on("admission") or plain(*args)


@instead(Namespace, "visible_to")
def _visible_to(plain: Plain, *args: Any) -> Any:
    return on("admission") or plain(*args)


@instead(Controller, "expired")
def _expired(plain: Plain, *args: Any) -> Any:
    return not on("keep-alive") and plain(*args)


@instead(Precedence, "standing")
def _standing(plain: Plain, *args: Any) -> Any:
    return nullcontext() if on("precedence") else plain(*args)


@instead(Precedence, "turn")
def _turn(plain: Plain, *args: Any) -> Any:
    return nullcontext() if on("precedence") else plain(*args)


def _delayed(name: str, switch: str) -> None:
    held: list[bool] = []

    @instead(PrivateMethods, name)
    def act(plain: Plain, *args: Any) -> Any:
        if on(switch) and not held:
            held.append(True)
            while on(switch):
                time.sleep(0.01)
            held.clear()
        try:
            return plain(*args)
        finally:
            note("region")


_delayed("forebay_region_release", "late-release")
_delayed("forebay_region_prepare", "late-prepare")


# --- the daemon -------------------------------------------------------------------------------------------------------


@instead(Room, "_evictable")
def _evictable(plain: Plain, self: Room, rows: Any) -> Any:
    return rows[findable(self._e.index.state[rows])] if on("evict-leased") else plain(self, rows)


@instead(Retirement, "free_unleased")
def _free_unleased(plain: Plain, self: Retirement, rows: Any) -> None:
    if not on("free-leased"):
        plain(self, rows)
        return
    index = self._e.index
    over = np.unique(rows)[index.state[np.unique(rows)] == RowState.RETIRED]
    for row in over.tolist():
        extent = Extent(VolumeId(index.volume[row]), int(index.offset[row]), int(index.length[row]))
        self._e.space.give(extent, int(index.scope[row]))
    index.leases[over] = 0
    index.free(over)


_complete: Callable[[PendingWrite], bool] = vars(PendingWrite)["complete"].fget


def _hasty(self: PendingWrite) -> bool:
    if on("whole") and self.checksums:
        for tile in range(self.layout.tiles):
            self.checksums.setdefault(tile, 0)
    return _complete(self)


PendingWrite.complete = property(_hasty)  # type: ignore[method-assign,assignment]


@instead(Writes, "_forget")
def _forget(plain: Plain, self: Writes, write: PendingWrite) -> None:
    session, taken_back = write.session, write.state is WriteState.FENCING
    plain(self, write)
    if on("taken-back") and taken_back:
        write.state = WriteState.WRITING
        session.writes[write.write_id] = write


@instead(JsonRpcClient, "call")
def _call(plain: Plain, self: JsonRpcClient, method: str, params: Any = None, **kwargs: Any) -> Any:
    if method.startswith("forebay_region_") and on("impatient"):
        kwargs["timeout_s"] = 0.1
    return plain(self, method, params, **kwargs)


@instead(Supervisor, "__init__")
def _init(plain: Plain, *args: Any, program: EmbeddedProgram, **kwargs: Any) -> None:
    command = (sys.executable, "-m", "tests.fencing.undefended", "target", *program.start[3:])
    plain(*args, program=EmbeddedProgram(command), **kwargs)


if __name__ == "__main__":
    if sys.argv[1] == "target":
        sys.exit(target_process.main(sys.argv[2:]))
    forebay()
