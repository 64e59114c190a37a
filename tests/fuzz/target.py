"""The target as a server: PDUs of a hostile host over a socket, against the real queues, volumes and grants.

After each input nothing of it may be left, no byte outside of the host's own grants may have changed, and none of a
namespace that it does not see may have come to it.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import socket
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from uuid import UUID

from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.subsystems import Namespace, Subsystem
from forebay.appliance.dataplane.target.volume import Volume
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp import command as nvme
from tests.appliance.target.host import RawHost
from tests.fuzz.host_pdus import HostPdus
from tests.fuzz.source import Source
from tests.fuzz.watch import Faults, settled

__all__ = ["FOLDER", "LBAS", "OWN_LBAS", "OWN_TAG", "close", "exchange", "memory_dir", "run"]

NQN = "nqn.2026-11.test:fuzz"
HOST_ID = UUID(int=0xF0)
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
LBAS = 256
OWN_LBAS = 64
"""The hostile host has a grant for the first ones of volume 1."""
OWN_TAG = 5
_LIMITS = TargetLimits(
    max_connections=64,
    max_queue_depth=32,
    max_io_queues=4,
    max_command_bytes=256 << 10,
    chunk_bytes=64 << 10,
    max_h2c_data_bytes=64 << 10,
)
_MARKS = {nsid: (f"what is in volume {nsid}, " * 200).encode()[:LBA_BYTES] for nsid in (1, 2, 3)}
_END_S = 30.0
FOLDER = "FOREBAY_FUZZ_FOLDER"
"""Names the folder of a process that ends without cleaning up."""


class _Rig:
    """One server for all inputs: volume 1 fenced, 2 raw, 3 not seen by the hostile host."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="forebay-fuzz-", dir=memory_dir()))
        self.server = Server(_LIMITS)
        self.server.transport_created = True
        self.subsystem = Subsystem(NQN, serial="F", model="Forebay", max_namespaces=8, allow_any_host=True)
        self.server.add_subsystem(self.subsystem)
        self.port = self.server.add_listener(self.subsystem, "IPv4", "127.0.0.1", 0).port
        self.paths = {nsid: self._add(nsid) for nsid in (1, 2, 3)}
        own, other = HostIdentity(HOST_NQN, str(HOST_ID)), HostIdentity("nqn.2026-11.test:other", str(UUID(int=1)))
        self.server.grants.add("v1", [own], [(1, 0, OWN_LBAS, OWN_TAG)], LBAS)
        self.server.grants.add("v1", [other], [(2, OWN_LBAS, LBAS - OWN_LBAS, OWN_TAG)], LBAS)

    def _add(self, nsid: int) -> Path:
        path = self.directory / f"{nsid}.vol"
        path.write_bytes(_MARKS[nsid] * LBAS)
        volume = Volume(f"v{nsid}", path)
        volume.fenced = nsid != 2
        self.server.add_volume(volume)
        nguid = UUID(int=nsid)
        self.server.add_namespace(
            self.subsystem, Namespace(nsid, volume, nguid=nguid.bytes, uuid=nguid, auto_visible=nsid != 3)
        )
        return path

    def check_media(self) -> None:
        """What nobody may have written is as it was."""
        others = self.paths[1].read_bytes()[OWN_LBAS * LBA_BYTES :]
        assert others == _MARKS[1] * (LBAS - OWN_LBAS), "written outside of the host's grant"
        assert self.paths[3].read_bytes() == _MARKS[3] * LBAS, "written to a namespace that the host does not see"


def memory_dir() -> str | None:
    """Where files of a fuzzed process lie: where its parent says, which removes it, or in memory if that can be."""
    return os.environ.get(FOLDER) or ("/dev/shm" if Path("/dev/shm").is_dir() else None)


@lru_cache(maxsize=1)
def _rig() -> _Rig:
    return _Rig()


@atexit.register
def close() -> None:
    """End the server, if any input was run."""
    if _rig.cache_info().currsize:
        _rig().server.close()
        shutil.rmtree(_rig().directory, ignore_errors=True)
        _rig.cache_clear()


def exchange(port: int, stream: bytes, *, seconds: float = _END_S) -> bytes:
    """Send a stream, then the end of it; all that came back. The peer has to end the connection."""
    came = bytearray()
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT)
        left = memoryview(stream)
        try:
            while True:
                assert time.monotonic() < end, f"the connection did not end in {seconds} s"
                ready = poller.poll(1000)
                if not ready:
                    continue
                if ready[0][1] & select.POLLOUT and left is not None:
                    left = left[sock.send(left) :] if left else left
                    if not left:
                        sock.shutdown(socket.SHUT_WR)
                        poller.modify(sock, select.POLLIN)
                if ready[0][1] & ~select.POLLOUT:
                    data = sock.recv(1 << 18)
                    if not data:
                        return bytes(came)
                    came += data
        except OSError:
            return bytes(came)  # it ended the connection before it had read all


def run(data: bytes) -> None:
    """One hostile connection, beside a controller of the same host that some of them belong to."""
    faults, rig, source = Faults.install(), _rig(), Source(data)
    qid = source.pick([1, 1, 1, 0, 2])
    admin = None
    cntlid = nvme.DYNAMIC_CONTROLLER
    if qid and not source.chance(8):
        admin = RawHost(rig.port).initialize()
        cntlid = admin.connect(NQN, host_nqn=HOST_NQN, host_id=HOST_ID).result & 0xFFFF
        admin.run(nvme.property_set(20, 0x14, 0x00460001))
    drawn = HostPdus(
        source,
        subsystem_nqn=NQN,
        host_nqn=HOST_NQN,
        host_id=HOST_ID,
        qid=qid,
        cntlid=cntlid,
        lbas=LBAS,
        tag=OWN_TAG,
    )
    try:
        came = exchange(rig.port, b"".join([*drawn.opening(), *drawn.more()]))
    finally:
        if admin is not None:
            admin.sock.close()
    settled(lambda: not rig.server.queues and not rig.server.controllers, "queues and controllers are gone")
    faults.check()
    rig.check_media()
    assert _MARKS[3][:64] not in came, "read from a namespace that the host does not see"
