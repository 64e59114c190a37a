"""SIGKILL of daemon, target and clients, alone and together, at random moments under load: every byte is checked.

`make test-long` does 200 rounds. ``FOREBAY_SEED`` repeats who is killed when, as far as the machine allows.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.counting import Count
from tests.kill.herd import VICTIMS, Herd
from tests.seeds import SEED

ROUNDS = 200 if LONG else 20


@pytest.mark.timeout(60 * ROUNDS)
def test_whoever_is_killed_nothing_is_lost_or_wrong(tmp_path: Path, count: Count) -> None:
    herd = Herd(tmp_path, SEED)
    order = [VICTIMS[i % len(VICTIMS)] for i in range(ROUNDS)]
    random.Random(SEED).shuffle(order)
    left = list(order)
    try:
        while left:
            herd.kill(left[-1])
            herd.check()
            left.pop()
        herd.stop_and_check()
    except BaseException as error:
        error.add_note(f"FOREBAY_SEED={SEED}, {len(left)} rounds left: {left[-3:]}")
        herd.stop()
        raise
    count.add(kill_rounds=ROUNDS, processes_killed=sum(v.count("+") + 1 for v in order))
    count.add(blocks_verified=herd.verified + herd.read_under_load)
