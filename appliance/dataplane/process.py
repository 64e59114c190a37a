"""A process that may outlive whoever started it: named by pid and start time, held by a pidfd, never by a pid alone.

Pids are used again. The start time (in ticks since the machine's boot, with that boot's id) tells a process from a
later one of the same number; a pidfd, once open, cannot come to mean another process at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from forebay.errors import Unavailable

__all__ = ["Process", "ProcessName"]

MACHINE_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Our children that have not been reaped. A Popen that is collected while its process runs complains.
_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class ProcessName:
    """What a pid file holds: enough to find exactly this process again, and the socket that it serves."""

    pid: int
    start_ticks: int
    machine_boot_id: str
    socket: str

    @classmethod
    def of(cls, pid: int, socket: Path) -> ProcessName | None:
        """The name of the process that has this pid now, or None if there is none."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, MACHINE_BOOT_ID.read_text().strip(), str(socket))

    @classmethod
    def load(cls, file: Path) -> ProcessName | None:
        """The name in a pid file; None if there is no such file or it holds something else (a torn write)."""
        try:
            values = json.loads(file.read_text())
            return cls(int(values["pid"]), int(values["start_ticks"]), values["machine_boot_id"], values["socket"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, file: Path) -> None:
        """Write a pid file, whole or not at all."""
        unfinished = file.with_name(file.name + ".new")
        unfinished.write_text(json.dumps(asdict(self)) + "\n")
        unfinished.rename(file)


class Process:
    """A process of ours that runs, or ran, held by its pidfd. `close` lets go of it and leaves it running."""

    def __init__(self, name: ProcessName, pidfd: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self._pidfd = pidfd
        self._child = child

    @classmethod
    def start(cls, command: Sequence[str], log: Path, socket: Path) -> Process:
        """Start a session of its own that shares nothing with us but ``log``. Raises `Unavailable`."""
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
                )
        except OSError as error:
            raise Unavailable(f"the target does not start: {error}", field="target") from error
        _children.append(child)
        name = ProcessName.of(child.pid, socket)
        if name is None:  # a child stays in /proc until it is reaped, which only we do
            raise Unavailable(f"/proc does not show process {child.pid}", field="target")
        return cls(name, os.pidfd_open(child.pid), child)

    @classmethod
    def find(cls, name: ProcessName) -> Process | None:
        """The process of that name if it still runs; None when it is gone or its pid belongs to another by now."""
        try:
            pidfd = os.pidfd_open(name.pid)
        except (ProcessLookupError, PermissionError):
            return None
        # The order matters: what is compared is the process that the pidfd holds.
        if ProcessName.of(name.pid, Path(name.socket)) != name:
            os.close(pidfd)
            return None
        return cls(name, pidfd)

    @property
    def running(self) -> bool:
        """Whether it has not ended (a zombie has)."""
        return not select.select([self._pidfd], [], [], 0)[0]

    @property
    def exit_text(self) -> str:
        """How it ended, as far as can be known: only a parent learns the status."""
        status = self._child.poll() if self._child is not None else None
        if status is None:
            return "ended"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended gets none."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended within the time (for ever without one)."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def note() -> None:
            loop.remove_reader(self._pidfd)
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(self._pidfd, note)
        try:
            async with asyncio.timeout(timeout_s):
                await ended
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        _children[:] = [child for child in _children if child.poll() is None]
        return True

    def close(self) -> None:
        """Let go of the process, which runs on."""
        os.close(self._pidfd)


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since the machine's boot (field 22 of /proc/<pid>/stat)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])  # the name before it may hold spaces and brackets
