"""A target in this process, with a volume, and ways to change it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.subsystems import Namespace, Subsystem
from forebay.appliance.dataplane.target.volume import Volume
from forebay.clock import Clock
from forebay.ids import HostIdentity
from tests.appliance.target.host import HOST_ID, HOST_NQN, OTHER_ID, OTHER_NQN, Association

NQN = "nqn.2026-01.io.forebay:node:tenant"
NGUID = UUID("0f0f0f0f-1111-2222-3333-444444444444")
HOST = HostIdentity(HOST_NQN, str(HOST_ID))
OTHER = HostIdentity(OTHER_NQN, str(OTHER_ID))
LIMITS = TargetLimits(
    max_connections=24, max_queue_depth=32, max_io_queues=4, max_command_bytes=8 << 20, io_timeout_s=60.0
)
LBAS = 4096


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.002)


class Rig:
    """A server with one subsystem and one volume in it, both named here."""

    def __init__(self, directory: Path, limits: TargetLimits = LIMITS, clock: Clock | None = None) -> None:
        self.directory = directory
        self.server = Server(limits, clock)
        self.server.transport_created = True
        self.subsystem = Subsystem(NQN, serial="FB1", model="Forebay", max_namespaces=64, allow_any_host=True)
        self.server.add_subsystem(self.subsystem)
        self.port = self.server.add_listener(self.subsystem, "IPv4", "127.0.0.1", 0).port
        self.volume = self.add_volume("vol", 1)

    def add_volume(self, name: str, nsid: int, *, lbas: int = LBAS, auto_visible: bool = True) -> Volume:
        path = self.directory / f"{name}.vol"
        with path.open("wb") as file:
            os.truncate(file.fileno(), lbas * 4096)
        volume = Volume(name, path)
        self.server.add_volume(volume)
        namespace = Namespace(nsid, volume, nguid=NGUID.bytes, uuid=NGUID, auto_visible=auto_visible)
        self.server.add_namespace(self.subsystem, namespace)
        return volume

    def grant(self, grant_id: int, slba: int, nlb: int, *hosts: HostIdentity, tag: int = 0) -> None:
        self.server.grants.add("vol", hosts or (HOST,), [(grant_id, slba, nlb, tag)], self.volume.lba_count)

    def attach(self, **options: object) -> Association:
        return Association(self.port, NQN, **options)  # type: ignore[arg-type]

    def other(self, **options: object) -> Association:
        return self.attach(host_nqn=OTHER_NQN, host_id=OTHER_ID, **options)

    def stored(self, slba: int, nlb: int) -> bytes:
        with self.volume.path.open("rb") as file:
            file.seek(slba * 4096)
            return file.read(nlb * 4096)


def memory_dir() -> Path:
    return Path("/dev/shm")


@pytest.fixture(params=["disk", "memory"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """On a disk (O_DIRECT where it works) and on tmpfs (mmap)."""
    if request.param == "disk":
        made = Rig(tmp_path)
        yield made
        made.server.close()
        return
    if not os.access(memory_dir(), os.W_OK):
        pytest.skip("no writable /dev/shm")
    directory = memory_dir() / f"forebay-test-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    try:
        made = Rig(directory)
        yield made
        made.server.close()
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


@pytest.fixture
def disk_rig(tmp_path: Path) -> Iterator[Rig]:
    """On whatever the temporary directory is on."""
    made = Rig(tmp_path)
    yield made
    made.server.close()
