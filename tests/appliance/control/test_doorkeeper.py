"""How often the doorkeeper looks; what it does is in tests/pressure."""

import asyncio
import os

import pytest

from forebay.appliance.control import doorkeeper
from forebay.appliance.control.doorkeeper import Doorkeeper


class Slept(Exception):
    """A look was put off."""


@pytest.mark.parametrize(
    ("limit", "slots", "rest_s"),
    [
        (1 << 20, 256, 0.25),
        (20_000, 256, 0.25),
        (10_000, 4096, (10_000 - 96 - 4096) / 40_000),
        (1024, 256, 0.02),
        (20_000, 20_096, 0.02),
        (20_000, 1 << 30, 0.02),  # nobody knows how many there are
    ],
)
def test_a_look_comes_before_what_is_free_can_be_used_up(
    limit: int, slots: int, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        raise Slept

    monkeypatch.setattr(doorkeeper, "_slots", lambda: slots)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(Slept):
        asyncio.run(Doorkeeper([], limit).watch())
    assert slept == [pytest.approx(rest_s)]


def test_the_table_of_descriptors_is_known() -> None:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    try:
        assert max(files) < doorkeeper._slots() < 1 << 30
    finally:
        for file in files:
            os.close(file)
