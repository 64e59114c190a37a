"""What keeps a node from doing all that it should, in words for those who look after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forebay.appliance.namespace.space import DriveState

if TYPE_CHECKING:
    from forebay.appliance.namespace.engine import Engine

__all__ = ["Affects", "Problem", "problems_of", "reads_go_on", "writes_go_on"]

Affects = Literal["all", "writes", "some"]
"""``all``: nothing is read or written; ``writes``: nothing new is stored; ``some``: what is on one drive or volume."""


@dataclass(frozen=True, slots=True)
class Problem:
    """``part`` is ``target``, ``metadata`` or ``drives``; the reason names the path and says what to do."""

    part: str
    reason: str
    affects: Affects


def problems_of(engine: Engine) -> list[Problem]:
    """What is known without looking: of metadata and drives."""
    found = []
    for trouble in (engine.store.problem, engine.reserve.problem):
        if trouble is not None:
            found.append(Problem("metadata", trouble.message, "writes"))
    drives = list(engine.space.drives.values())
    nothing = all(drive.state is DriveState.AWAY for drive in drives)
    readable = not any(drive.state is DriveState.SERVING for drive in drives)
    affects: Affects = "all" if nothing else "writes" if readable else "some"
    for drive in drives:
        if drive.state is not DriveState.SERVING:
            what = "its blocks are misses until it is back" if drive.state is DriveState.AWAY else "it is only read"
            where = "" if drive.path in drive.reason else f" ({drive.path})"
            found.append(Problem("drives", f"drive {drive.name}{where}: {drive.reason}; {what}", affects))
    for volume, reason in engine.space.lost.items():
        known = engine.space.volumes[volume]
        if engine.space.drives[known.drive].state is not DriveState.AWAY:
            text = f"volume {volume} on drive {known.drive}: {reason}; its blocks are misses until it can be served"
            found.append(Problem("drives", text, "some" if engine.space.specs else "all"))
    return found


def reads_go_on(problems: list[Problem]) -> bool:
    """Whether blocks are served, though perhaps not all."""
    return all(problem.affects != "all" for problem in problems)


def writes_go_on(problems: list[Problem]) -> bool:
    """Whether new blocks are stored."""
    return all(problem.affects == "some" for problem in problems)
