"""The client processes of a soak, from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["WorkerProcess"]

ROOT = Path(__file__).parents[2]
_LIMIT_S = 120.0
"""Only a run that has failed waits this long: a client answers within the deadlines of its calls."""


class WorkerProcess:
    """One worker, started again with the same journal after each kill."""

    def __init__(self, folder: Path, grpc_port: int, nvme_port: int, token: str, number: int, seed: int) -> None:
        self.number = number
        self._folder, self._token = folder, token
        self._address = f"127.0.0.1:{grpc_port}", str(nvme_port)
        self._seed = seed
        self._past: Counter[str] = Counter()
        self._told: dict[str, Any] = {"counts": {}, "wrong": []}
        self._heard = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._listening: threading.Thread | None = None

    @property
    def counts(self) -> Counter[str]:
        """What all processes of this worker counted, as far as they were asked."""
        return self._past + Counter(self._told["counts"])

    @property
    def wrong(self) -> list[str]:
        """What the process found wrong; one with anything to say is not followed by another."""
        found: list[str] = self._told["wrong"]
        return found

    @property
    def journal(self) -> Path:
        """What it began and what was acknowledged."""
        return self._folder / f"worker-{self.number}.journal"

    def start(self) -> None:
        """Start it; it works at once."""
        self._seed += 1
        command = [sys.executable, "-m", "tests.soak.worker", *self._address]
        command += [str(self.journal), str(self.number), str(self._seed)]
        with (self._folder / "workers.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "FOREBAY_TOKEN": self._token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._listening = threading.Thread(target=self._listen, args=[self._process], daemon=True)
        self._listening.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as told:
            for line in told:
                self._told = json.loads(line)
                self._heard.set()

    def tell(self, word: str) -> None:
        """Say ``pause``, ``settle`` or ``go`` and wait until it is done."""
        process = self._process
        assert process is not None and process.stdin is not None
        assert process.poll() is None, f"worker {self.number} ended with {process.returncode}: see workers.log"
        self._heard.clear()
        process.stdin.write(word + "\n")
        process.stdin.flush()
        assert self._heard.wait(_LIMIT_S), f"worker {self.number} hangs: no answer to {word!r} in {_LIMIT_S:.0f} s"

    def signal(self, number: signal.Signals) -> None:
        """To the process as it is now."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end. What it counted since it was last asked is forgotten."""
        assert self._process is not None and self._process.stdin is not None and self._listening is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._listening.join()
        self._past, self._told = self.counts, {"counts": {}, "wrong": self.wrong}
