"""A target that Linux reaches by a wire in the test's hand, for a write whose connection breaks (design §6.4)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.appliance.target.host import HOST_ID, HOST_NQN, OTHER_ID, OTHER_NQN, Association
from tests.appliance.target.test_process import COMMAND, Process
from tests.fencing.switches import VARIABLE, Switches
from tests.fencing.wire import COMMAND_BYTES, Wire

__all__ = ["Replay"]

ROOT = str(Path(__file__).resolve().parents[2])
LBA = 8
FRESH = b"f" * 4096


class Replay:
    """A fenced volume whose first blocks the guest may write; without ``defended`` no write needs a grant."""

    def __init__(self, directory: Path, nqn: str, *, defended: bool) -> None:
        directory.mkdir()
        switches = Switches(directory / "switches", frozenset() if defended else frozenset({"grants"}))
        self.process = Process(
            directory,
            program=COMMAND if defended else (sys.executable, "-m", "tests.fencing.undefended", "target"),
            environment={"PYTHONPATH": ROOT, VARIABLE: str(switches.file)},
        )
        self.nqn = nqn
        self.volume = directory / "v.vol"
        self.volume.write_bytes(bytes(16 << 20))
        with self.process.client() as client:
            client.bdev_aio_create(name="v", filename=str(self.volume), block_size=4096)
            client.nvmf_create_transport(trtype="TCP")
            client.nvmf_create_subsystem(nqn=nqn, serial_number="REPLAY", allow_any_host=True)
            client.nvmf_subsystem_add_ns(nqn=nqn, namespace={"bdev_name": "v", "nsid": 1})
            address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
            client.nvmf_subsystem_add_listener(nqn=nqn, listen_address=address)
            self.target_port = int(client.nvmf_subsystem_get_listeners(nqn=nqn)[0]["address"]["trsvcid"])
            client.forebay_grants_add(name="v", hosts=[[HOST_NQN, str(HOST_ID)]], grants=[[1, 0, 64, 0]])
        self.wire = Wire(self.target_port)

    def actions(self, name: str) -> dict[str, Callable[[], None]]:
        """What the guest asks for."""
        return {f"hold_{name}": lambda: self.wire.hold("out"), f"give_{name}": self._give}

    def _give(self) -> None:
        """The write is lost with its connection, and the block goes to another host, before Linux connects again."""
        self.wire.await_kept("out", COMMAND_BYTES + 4096)
        self.wire.bar()
        self.wire.cut()
        with self.process.client() as client:
            client.forebay_grants_revoke(ids=[1])
            client.forebay_grants_add(name="v", hosts=[[OTHER_NQN, str(OTHER_ID)]], grants=[[2, LBA, 1, 0]])
        with Association(self.target_port, self.nqn, host_nqn=OTHER_NQN, host_id=OTHER_ID) as other:
            assert other.io[0].write(LBA, FRESH).status == 0
        self.wire.admit()

    def close(self) -> None:
        self.wire.close()
        self.process.process.terminate()
        self.process.process.wait(60)
