"""The power goes at every crash point, and at any other moment: nothing that was acknowledged is lost or wrong.

Daemon and target are one process here, with the real metadata store and the target's real volumes; what they did to
their files was recorded once, and each test holds a node that starts from what a loss left against what had been
acknowledged by then. ``FOREBAY_SEED`` repeats the choices of a run, though not its timing.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.crashpoints import POINTS
from tests.conftest import LONG
from tests.counting import Count
from tests.power.checking import check, data_ranges
from tests.power.history import History
from tests.power.recorded import Cut, Recording, State
from tests.power.scenario import POLICIES, SUBJECT
from tests.seeds import SEED

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(3_600 if LONG else 120)]

_AT_POINT = 10 if LONG else 1
_ANYWHERE = 400 if LONG else 12
_MOST_TRIES = 60
_AGAIN, _LATER = (10, 10) if LONG else (1, 2)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The recorded run of `tests.power.scenario`."""
    recording = Recording(tmp_path_factory.mktemp("life"))
    recording.run([sys.executable, "-m", "tests.power.scenario", str(recording.root)], 60)
    return recording


@pytest.fixture(scope="module")
def losses(life: Recording) -> dict[str, list[State]]:
    """What losses left, by the point that had just been reached."""
    chance = random.Random(SEED)
    wanted = {point: life.at_mark(f"at {point}", _AT_POINT, chance) for point in POINTS}
    by_cut = {state.cut: state for state in life.lose([cut for cuts in wanted.values() for cut in cuts])}
    return {point: [by_cut[cut] for cut in cuts] for point, cuts in wanted.items()}


def _hold(state: State, count: Count | None = None) -> None:
    history = History(POLICIES).read(mark for mark in state.marks if not mark.startswith("at "))
    try:
        compared = asyncio.run(check(SUBJECT, state.folder, history))
    except BaseException as error:
        error.add_note(f"FOREBAY_SEED={SEED}, {state.cut}, {dict(state.lost)}")
        raise
    shutil.rmtree(state.folder)
    if count is not None:
        count.add(power_losses=1, blocks_verified=compared, changes_lost_or_torn=_lost(state.lost))


def _lost(lost: Counter[str]) -> int:
    return lost["changes_lost"] + lost["changes_torn"] + lost["entries_lost"]


@pytest.mark.parametrize("point", POINTS)
def test_the_power_goes_at(losses: dict[str, list[State]], point: str, count: Count) -> None:
    assert losses[point], f"the scenario never reaches {point}"
    count.add(crash_points_with_power_loss=1)
    for state in losses[point]:
        _hold(state, count)


def test_the_power_goes_at_any_moment(life: Recording, count: Count) -> None:
    for state in life.lose(life.anywhere(_ANYWHERE, random.Random(SEED))):
        _hold(state, count)


def test_the_power_goes_again_while_the_node_starts(life: Recording, tmp_path: Path, count: Count) -> None:
    """Or later in that life: what the first loss left, and what recovery made of it, is under the same promises."""
    chance = random.Random(SEED)
    first = next(place for place, mark in life.marks() if mark.startswith("put "))
    for number, state in enumerate(life.lose(life.anywhere(_AGAIN, chance, after=first))):
        home = tmp_path / str(number)
        home.mkdir()
        again = Recording(home, state.folder)
        again.run([sys.executable, "-m", "tests.power.again", str(state.folder)], 60)
        started = next(place for place, mark in again.marks() if not mark.startswith("at "))
        starting = [Cut(chance.randint(0, started), chance.getrandbits(32)) for _ in range(_LATER)]
        for later in again.lose(starting + again.anywhere(_LATER, chance)):
            _hold(replace(later, marks=state.marks + later.marks), count)


@pytest.mark.parametrize(
    "lies",
    [r"\.vol$", r"/metadata/\d+\.log$", r"/metadata/(MANIFEST|CURRENT|\d+\.dbtmp|\d+\.sst)", r"/$"],
    ids=["volumes", "log", "tables", "directories"],
)
def test_a_drive_that_lies_about_flushes_is_found_out(life: Recording, lies: str) -> None:
    """The proof that the tests above can fail: the same, with flushes of some files only pretended."""
    pretended = re.compile(lies)
    honours: Callable[[str], bool] = lambda path: not pretended.search(path)  # noqa: E731
    for state in life.lose(life.anywhere(_MOST_TRIES, random.Random(SEED)), honours):
        try:
            _hold(state)
        except Exception:  # a check that does not hold, a start that refuses, a file that is cut short
            return
    pytest.fail(f"{_MOST_TRIES} power losses with {lies} never flushed, and nobody noticed")


def test_the_model_has_all_that_the_file_system_has(life: Recording) -> None:
    """Without a loss it is every file as it is, so nothing that was done was missed."""
    left = life.keep()
    names = {path.relative_to(life.root) for path in life.root.rglob("*")}
    assert {path.relative_to(left) for path in left.rglob("*")} == names
    for name in names:
        if (life.root / name).is_file():
            assert _content(left / name) == _content(life.root / name), name


def _content(path: Path) -> tuple[int, dict[int, bytes]]:
    """Size, and the pages that are not all zeros."""
    pages: dict[int, bytes] = {}
    with path.open("rb") as file:
        for start, end in data_ranges(path):
            file.seek(start)
            for at in range(start, end, 4096):
                page = file.read(min(4096, end - at))
                if page.strip(b"\0"):
                    pages[at] = page
    return path.stat().st_size, pages
