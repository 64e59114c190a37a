"""Keeps one target running: finds it, starts it, notices that it died or hangs, starts it again.

The target outlives the daemon. A daemon that starts looks for a target behind its socket and takes it over; only what
does not answer is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.process import Process, ProcessName
from forebay.errors import ConfigInvalid, ForebayError, Unavailable

__all__ = [
    "MAX_SOCKET_PATH_BYTES",
    "TARGET_COMMAND",
    "AttachedTarget",
    "EmbeddedProgram",
    "Supervisor",
    "SupervisorTimes",
    "TargetProgram",
    "socket_path",
]

log = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""`sockaddr_un.sun_path` has 108 bytes and ends with a zero."""
HUNG_AFTER_PROBES = 3
"""Probes without an answer, one after the other, that count as a hang. One alone may be ours: a daemon that was stopped
itself finds, when it goes on, that the time of its last probe has passed. And a machine with more to do than it can
makes answers late for a while: to replace a target that works takes all hosts their connections, where one that hangs
costs some seconds of misses more."""
LOG_TAIL_BYTES = 2000
LOG_TAIL_LINES = 4
TARGET_COMMAND = (sys.executable, "-m", "forebay.appliance.dataplane.target")


@dataclass(frozen=True, slots=True)
class SupervisorTimes:
    """How patient a supervisor is, in seconds of wall-clock time."""

    start_s: float = 20.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0
    stop_s: float = 10.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 10.0
    steady_s: float = 30.0
    """A target that ran this long starts again at once should it fail."""


def socket_path(run_dir: Path, node_id: bytes) -> Path:
    """Where a node's target listens: in ``run_dir``, or in a short private directory if that path is too long.

    Raises `ConfigInvalid` if no short enough path is found or the private directory is somebody else's.
    """
    wanted = run_dir / "target.sock"
    if len(os.fsencode(wanted)) <= MAX_SOCKET_PATH_BYTES:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return wanted
    private = Path(tempfile.gettempdir()) / f"forebay-{os.geteuid()}-{node_id.hex()[:16]}"
    if len(os.fsencode(private / "target.sock")) > MAX_SOCKET_PATH_BYTES:
        raise ConfigInvalid(
            f"no path for the target's socket is short enough: {wanted} and {private} are too long; set TMPDIR",
            field="data",
            limit=MAX_SOCKET_PATH_BYTES,
        )
    private.mkdir(exist_ok=True, mode=0o700)
    found = private.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigInvalid(f"{private} is not a directory that only this user may enter: remove it", field="data")
    return private / "target.sock"


class TargetProgram(ABC):
    """How one kind of target is started, and known by its answers."""

    @abstractmethod
    def command(self, socket: Path, log_file: Path) -> list[str]:
        """The command line of one that listens on ``socket``; what it prints goes to ``log_file`` anyway."""

    @abstractmethod
    async def probe(self, rpc: JsonRpcClient) -> tuple[int, str]:
        """Pid and boot id of whoever answers. Raises a `ForebayError` if nobody does, or it is of another kind."""


@dataclass(frozen=True, slots=True)
class EmbeddedProgram(TargetProgram):
    """Forebay's own; ``start`` may have limits as options."""

    start: Sequence[str] = TARGET_COMMAND

    def command(self, socket: Path, log_file: Path) -> list[str]:
        return [*self.start, "--socket", str(socket), "--log", str(log_file)]

    async def probe(self, rpc: JsonRpcClient) -> tuple[int, str]:
        found = await rpc.call("forebay_get_info")
        return int(found["pid"]), str(found["boot_id"])


class Supervisor:
    """The target process of one node.

    ``run_dir`` takes the pid file, the log and (if its path is short enough) the socket. ``on_restart`` runs after each
    start that follows a failure, so that the daemon replays desired state; while it raises it is tried again.
    """

    def __init__(
        self,
        run_dir: Path,
        node_id: bytes,
        on_restart: Callable[[], Awaitable[None]],
        *,
        times: SupervisorTimes | None = None,
        program: TargetProgram | None = None,
    ) -> None:
        self._times = times or SupervisorTimes()
        self._pid_file = run_dir / "target.pid"
        self._log_file = run_dir / "target.log"
        self._on_restart = on_restart
        self._program = program or EmbeddedProgram()
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._boot_id = ""
        self._replayed = True
        self._restarts = 0
        self._run_dir = run_dir
        self._socket = socket_path(run_dir, node_id)
        self._rpc = JsonRpcClient(self._socket, timeout_s=self._times.probe_timeout_s)

    @property
    def socket(self) -> Path:
        """The target's control socket; settled once `start` has returned."""
        return self._socket

    @property
    def pid(self) -> int | None:
        """Pid of the target, or None while there is none."""
        return None if self._process is None else self._process.name.pid

    @property
    def serving(self) -> bool:
        """Whether a target runs that knows the daemon's state."""
        return self._process is not None and self._process.running and self._replayed

    @property
    def restarts(self) -> int:
        """How often a target was replaced since `start`."""
        return self._restarts

    async def start(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Take over the target that runs, or start one; then watch it. True if it ran already.

        ``meanwhile`` is called before a wait for one that was not there. Raises `Unavailable` with the end of the
        target's log if it does not come up.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = await self._adopt()
        if not found:
            if meanwhile is not None:
                meanwhile()
            await self._launch()
        self._watching = asyncio.create_task(self._watch(), name="target supervisor")
        return found

    async def stop(self) -> None:
        """End the target and wait until it has ended: by SIGTERM, then by SIGKILL."""
        await self._stop_watching()
        if self._process is not None:
            await self._end(self._process, gently=True)
        self._socket.unlink(missing_ok=True)
        self._pid_file.unlink(missing_ok=True)

    async def detach(self) -> None:
        """Let go of the target, which goes on serving; a later `start` finds it."""
        await self._stop_watching()
        if self._process is not None:
            self._process.close()
            self._process = None

    async def _stop_watching(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._rpc.close()

    async def _probe(self) -> tuple[int, str]:
        """Pid and boot id of whoever answers on the socket."""
        return await self._program.probe(self._rpc)

    async def _adopt(self) -> bool:
        """Take over a target that answers; end one that runs and does not."""
        known = ProcessName.load(self._pid_file)
        if known is not None and known.socket != str(self._socket):
            # The directory for temporary files moved since; the target listens where it was started.
            await self._use_socket(Path(known.socket))
        answer = await self._first_answer()
        if answer is None:
            process = Process.find(known) if known is not None else None
            if process is not None:
                log.warning("target %d runs but does not answer: it is replaced", process.name.pid)
                await self._end(process, gently=False)
            return False
        pid, self._boot_id = answer
        name = ProcessName.of(pid, self._socket)
        process = Process.find(name) if name is not None else None
        if process is None:
            return False
        process.name.save(self._pid_file)
        self._process = process
        log.info("target %d found running", pid)
        return True

    async def _first_answer(self) -> tuple[int, str] | None:
        """`_probe`, as often as it takes to tell what hangs from what is late; None if nobody answers."""
        for _ in range(HUNG_AFTER_PROBES):
            with suppress(ForebayError):
                return await self._probe()
        return None

    async def _use_socket(self, socket: Path) -> None:
        await self._rpc.close()
        self._socket = socket
        self._rpc = JsonRpcClient(socket, timeout_s=self._times.probe_timeout_s)

    async def _launch(self) -> None:
        """Start a target and wait until it answers."""
        self._socket.unlink(missing_ok=True)
        command = self._program.command(self._socket, self._log_file)
        logged_bytes = self._log_file.stat().st_size if self._log_file.exists() else 0
        process = Process.start(command, self._log_file, self._socket)
        process.name.save(self._pid_file)
        try:
            async with asyncio.timeout(self._times.start_s):
                while True:
                    try:
                        _pid, self._boot_id = await self._probe()
                        break
                    except Unavailable as error:
                        if await process.wait(0.02):
                            text = f"the target {process.exit_text}: {self._log_tail(logged_bytes)}"
                            raise Unavailable(text, field="target") from error
        except BaseException as error:
            await self._end(process, gently=False)
            if isinstance(error, TimeoutError):
                text = f"the target did not answer within {self._times.start_s:g} s: {self._log_tail(logged_bytes)}"
                raise Unavailable(text, field="target") from None
            raise
        self._process = process
        log.info("target %d started", process.name.pid)

    async def _end(self, process: Process, *, gently: bool) -> None:
        if process is self._process:
            self._process = None
        try:
            if gently:
                process.signal(signal.SIGCONT)  # a stopped process would not see what follows
                process.signal(signal.SIGTERM)
                if await process.wait(self._times.stop_s):
                    return
                log.warning("target %d does not stop: it is killed", process.name.pid)
            process.signal(signal.SIGKILL)
            if not await process.wait(self._times.stop_s):
                raise Unavailable(f"target {process.name.pid} cannot be killed: it waits for a drive", field="target")
        finally:
            process.close()

    async def _watch(self) -> None:
        """Notice what ends a target, and replace it, for ever."""
        backoff_s = 0.0
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while True:
            try:
                why = await self._until_failed()
                if loop.time() - since_s >= self._times.steady_s:
                    backoff_s = 0.0
                log.error("target: %s; starting another in %.1f s", why, backoff_s)
                if self._process is not None:
                    await self._end(self._process, gently=False)
                await asyncio.sleep(backoff_s)
                await self._launch()
                since_s = loop.time()
                self._restarts += 1
                self._replayed = False
                await self._replay()
            except ForebayError as error:
                log.error("target: %s", error)
            except Exception:
                # The node serves nothing without its target: whatever went wrong, the next round tries again.
                log.exception("target supervisor")
            backoff_s = min(max(backoff_s * 2, self._times.backoff_min_s), self._times.backoff_max_s)

    async def _until_failed(self) -> str:
        """Wait until the target is dead, hung or another one; says which."""
        unanswered = 0
        while (process := self._process) is not None:
            if await process.wait(self._times.probe_interval_s):
                return process.exit_text
            try:
                pid, boot_id = await self._probe()
            except Unavailable as error:
                unanswered += 1
                if unanswered >= HUNG_AFTER_PROBES and process.running:
                    return f"{process.name.pid} hangs ({error})"
                continue
            if boot_id != self._boot_id:
                name = ProcessName.of(pid, self._socket)
                intruder = Process.find(name) if name is not None else None
                if intruder is not None and pid != process.name.pid:
                    await self._end(intruder, gently=False)  # it would hold on to our volumes
                return f"another target ({boot_id}) answered on the socket"
            unanswered = 0
            if not self._replayed:
                await self._replay()
        return "none runs"

    async def _replay(self) -> None:
        """Let the daemon replay its state once; what fails is tried again after the next probe."""
        try:
            await self._on_restart()
            self._replayed = True
        except ForebayError as error:
            log.error("target: its state could not be replayed: %s", error)

    def _log_tail(self, before_bytes: int) -> str:
        """The last lines of what a target wrote, as one; ``before_bytes`` of the log are older ones' words."""
        try:
            data = self._log_file.read_bytes()
        except FileNotFoundError:
            return "it wrote no log"
        if len(data) >= before_bytes:  # or it was begun anew
            data = data[before_bytes:]
        lines = [line.strip() for line in data[-LOG_TAIL_BYTES:].decode("utf-8", "replace").splitlines()]
        text = " | ".join([line for line in lines if line][-LOG_TAIL_LINES:])
        return f"{text} ({self._log_file})" if text else "it wrote no log"


class AttachedTarget(Supervisor):
    """A target that somebody else starts and ends, and that perhaps serves others as well: it is only watched.

    When another one answers on its socket, the daemon's state is replayed to that.
    """

    def __init__(
        self,
        run_dir: Path,
        node_id: bytes,
        on_restart: Callable[[], Awaitable[None]],
        *,
        socket: Path,
        program: TargetProgram,
        times: SupervisorTimes | None = None,
    ) -> None:
        super().__init__(run_dir, node_id, on_restart, times=times, program=program)
        self._socket = socket
        self._rpc = JsonRpcClient(socket, timeout_s=self._times.probe_timeout_s)

    async def stop(self) -> None:
        """Let go of the target, which is not ours to end."""
        await self.detach()

    async def _adopt(self) -> bool:
        return False

    async def _launch(self) -> None:
        """Wait until somebody answers."""
        try:
            async with asyncio.timeout(self._times.start_s):
                while True:
                    with suppress(Unavailable):
                        pid, self._boot_id = await self._probe()
                        break
                    await asyncio.sleep(self._times.probe_interval_s)
        except TimeoutError:
            raise Unavailable(f"no target answers on {self._socket}", field="nvmf_tgt.socket") from None
        name = ProcessName.of(pid, self._socket)
        self._process = Process.find(name) if name is not None else None
        if self._process is None:
            raise Unavailable(f"the target on {self._socket} is no process that can be watched", field="target")
        log.info("target %d found on %s", pid, self._socket)

    async def _end(self, process: Process, *, gently: bool) -> None:
        if process is self._process:
            self._process = None
        process.close()
