"""A node of several drives whose daemon and target run under the shim."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from forebay.client import Admin, Client, ClientOptions, NodeStatus, connect
from forebay.errors import Unavailable
from tests.disks.faults import Faults

__all__ = ["FaultyNode", "eventually"]


def eventually(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class FaultyNode:
    """``drives`` are directories of a file system each, or of one that all share."""

    def __init__(
        self,
        folder: Path,
        faults: Faults | None,
        drives: Sequence[Path],
        *,
        capacity: str = "256MiB",
        metadata: Path | None = None,
        config: str = "",
    ) -> None:
        self.data = folder / "data"
        self.metadata = metadata or self.data / "metadata"
        self.drives = list(drives)
        self.log = folder / "node.log"
        self._file = folder / "node.toml"
        tables = "".join(f'[[drives]]\npath = "{drive}"\ncapacity = "{capacity}"\n' for drive in drives)
        self._file.write_text(f'data = "{self.data}"\nmetadata_dir = "{self.metadata}"\n{config}\n{tables}')
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        self._environment |= {f"FOREBAY_{name}_LISTEN": "127.0.0.1:0" for name in ("GRPC", "HTTP", "TARGET")}
        if faults is not None:
            self._environment |= faults.environment
        self.process: subprocess.Popen[bytes]
        self.about: dict[str, Any] = {}
        self._admin: Admin | None = None
        self.start()

    def start(self, *flags: str) -> None:
        """Start it, and wait until it serves."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        self.launch(*flags)
        described = self.data / "node.json"
        eventually(lambda: described.exists() or self.process.poll() is not None, "node.json")
        assert described.exists(), self.log.read_text()
        self.about = json.loads(described.read_text())
        self.token = (self.data / "admin.token").read_text().strip()
        self.url = f"forebay://{self.about['grpc']}"

    def launch(self, *flags: str) -> None:
        """Start its process only."""
        (self.data / "node.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "forebay.cli.main", "serve", "--config", str(self._file), *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def refused(self, *flags: str) -> str:
        """What it says when it does not start."""
        at = self.log.stat().st_size
        self.launch(*flags)
        assert self.process.wait(60) != 0
        return self.log.read_text()[at:]

    def client(self, **options: Any) -> Client:
        """A client as the administrator."""
        patient = ClientOptions(connect_ms=60_000)  # of a busy machine nothing is to be learnt here
        return connect(self.url, token=self.token, options=patient, **options)

    def admin(self) -> Admin:
        """An administrator, connected: on a busy machine the first attempt may take too long."""
        end = time.monotonic() + 60
        while True:
            admin = Admin(self.url, token=self.token)
            try:
                admin.status()
            except Unavailable:
                admin.close()
                if time.monotonic() > end:
                    raise
            else:
                return admin

    def status(self) -> NodeStatus:
        """What an administrator is told, by a connection that is kept."""
        if self._admin is None:
            self._admin = self.admin()
        return self._admin.status()

    def ready(self) -> tuple[int, dict[str, Any]]:
        """What /readyz answers."""
        answer = httpx.get(f"http://{self.about['http']}/readyz", timeout=30, trust_env=False)
        return answer.status_code, answer.json()

    def degraded(self) -> dict[str, Any]:
        """What /readyz answers once it knows of a problem: it looks once a second at most. The node is ready."""
        eventually(lambda: self.ready()[1]["problems"], "a problem is told")
        status, body = self.ready()
        assert (status, body["ready"], body["reads"]) == (200, True, True)
        return body

    def metric(self, sample: str) -> float:
        """One sample of /metrics, as it stands there."""
        text = httpx.get(f"http://{self.about['http']}/metrics", timeout=30, trust_env=False).text
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(sample)), 0.0)

    def kill(self) -> None:
        """SIGKILL to daemon and target."""
        target = self.status().target_pid
        self.process.kill()
        self.process.wait()
        os.kill(target, signal.SIGKILL)

    def stop(self) -> None:
        """A clean stop, if it runs."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
