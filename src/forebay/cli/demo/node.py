"""The demo's own node: started as a user would, killed without warning, started again."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.appliance.dataplane.process import Process, ProcessName
from forebay.cli.demo.signals import deferred
from forebay.errors import ForebayError, Unavailable

if TYPE_CHECKING:
    from forebay.client import Admin

__all__ = ["DemoNode"]

_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.02


def _lasting_port() -> int:
    """A free port that is still free when a node that was killed comes back.

    None that the system gives to connections, if there are others: not least, those that look for the node meanwhile.
    """
    with suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        for port in random.sample(range(10_000, first), 100):
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DemoNode:
    """A node in ``data``. The daemon is our child; the target, which outlives daemons, is held by its pid file."""

    def __init__(self, data: Path, capacity_bytes: int, log: Path) -> None:
        self.data = data
        self._log = log
        # The replicas know the node by its address, so it must come back on the same port.
        self._listen = f"127.0.0.1:{_lasting_port()}"
        self._capacity_bytes = capacity_bytes
        self._daemon: subprocess.Popen[bytes] | None = None
        self._target: Process | None = None

    @property
    def url(self) -> str:
        return f"forebay://{self._listen}"

    @property
    def token(self) -> str:
        return (self.data / "admin.token").read_text().strip()

    @property
    def command(self) -> list[str]:
        """The daemon's command line."""
        command = [sys.executable, "-m", "forebay.cli.main", "serve", "--data", str(self.data)]
        return [*command, "--capacity", str(self._capacity_bytes), "--listen", self._listen]

    @property
    def environment(self) -> dict[str, str]:
        """The daemon's environment: what configures other nodes must not configure this one.

        All but the control service take any free port.
        """
        mine = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        return mine | {"FOREBAY_TARGET_LISTEN": "127.0.0.1:0", "FOREBAY_HTTP_LISTEN": "127.0.0.1:0"}

    def admin(self) -> Admin:
        """A new administrative connection."""
        from forebay.client import Admin

        return Admin(self.url, token=self.token)

    def start(self) -> float:
        """Start the daemon, which starts the target; returns the seconds until it serves. Raises `Unavailable`."""
        began = time.monotonic()
        with self._log.open("ab") as log, deferred():  # a process that was started is also known
            # A session of its own: Ctrl-C on the terminal is for the demo alone.
            self._daemon = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment,
            )
        while not self._serves():
            if self._daemon.poll() is not None:
                raise Unavailable(f"the node ended with {self._daemon.returncode}: {self._last_words()}", field="node")
            if time.monotonic() - began > _START_S:
                raise Unavailable(f"the node did not start in {_START_S:.0f} s: {self._last_words()}", field="node")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def _serves(self) -> bool:
        assert self._daemon is not None
        try:
            told = json.loads((self.data / "node.json").read_text())
        except (OSError, ValueError):
            return False
        if told.get("pid") != self._daemon.pid:  # the one before
            return False
        try:
            with self.admin() as admin:
                admin.status()
        except (ForebayError, OSError):
            return False
        self._hold_target()
        return True

    def _hold_target(self) -> None:
        self._let_go()
        for path in self.data.rglob("target.pid"):
            name = ProcessName.load(path)
            self._target = Process.find(name) if name is not None else None

    def _let_go(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None

    def kill(self) -> None:
        """SIGKILL the daemon and the target, and wait until both are gone."""
        assert self._daemon is not None
        self._daemon.kill()
        self._signal_target(signal.SIGKILL)
        self._daemon.wait()
        if not self._target_gone():
            raise Unavailable("the target is still there after SIGKILL: it waits for a drive", field="target")

    def stop(self) -> None:
        """End the daemon and the target, cleanly if they can."""
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.terminate()
            try:
                self._daemon.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        if self._target is None:  # a daemon may have started one and then failed
            self._hold_target()
        self._signal_target(signal.SIGTERM)
        if not self._target_gone():
            self._signal_target(signal.SIGKILL)
            self._target_gone()
        self._let_go()

    def _signal_target(self, number: signal.Signals) -> None:
        if self._target is not None:
            self._target.signal(number)

    def _target_gone(self) -> bool:
        deadline = time.monotonic() + _STOP_S
        while self._target is not None and self._target.running:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
