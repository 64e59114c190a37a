"""How often the doorkeeper looks; what it does is in tests/pressure."""

import asyncio
import os
import subprocess
import sys

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


FULL = """
import asyncio, resource, socket
from forebay.appliance.control.doorkeeper import Doorkeeper

resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
server = socket.create_server(("127.0.0.1", 0))
keeper = Doorkeeper([server.getsockname()[1]], 400)
ends = []

async def main():
    try:
        while True:
            ends.append(socket.create_connection(server.getsockname()))
            ends.append(server.accept()[0])
    except OSError:
        pass
    try:
        while True:
            ends.append(socket.socket())
    except OSError:
        pass
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(60):
        while keeper.ended < 96 and not watching.done():
            await asyncio.sleep(0.01)
    assert not watching.done(), watching

asyncio.run(main())
"""


def test_a_process_without_any_descriptor_left_ends_connections() -> None:
    """When it looks again, a crowd may have taken all there are: none is left then to look by."""
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
