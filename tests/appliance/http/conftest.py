"""Nodes for tests of administration, each a process as an operator would start it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from forebay.client import Admin, Client, connect
from tests.client.conftest import patient

NodeMaker = Callable[[str], "Served"]


def eventually(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Poll a condition; the deadline only ends a test that would fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


class Served:
    """A node that serves; ``config`` is TOML beyond its addresses."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self.data = folder / "data"
        self.log = folder / "node.log"
        file = folder / "node.toml"
        file.write_text(f'data = "{self.data}"\ncapacity = "512MiB"\n{config}')
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        environment |= {f"FOREBAY_{name}_LISTEN": "127.0.0.1:0" for name in ("GRPC", "HTTP", "TARGET")}
        command = [sys.executable, "-m", "forebay.cli.main", "serve", "--config", str(file)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        described = self.data / "node.json"
        eventually(lambda: described.exists() or self.process.poll() is not None, "node.json")
        assert described.exists(), self.log.read_text()
        self.about = json.loads(described.read_text())
        self.url = f"http://{self.about.get('http')}"
        self.token = (self.data / "admin.token").read_text().strip()

    def http(self, token: str | None = None) -> httpx.Client:
        """A client with a token, the administrator's unless another is named."""
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {token or self.token}"}, timeout=30, trust_env=False
        )

    def connect(self, namespace: str = "default/default", token: str | None = None) -> Client:
        url = f"forebay://{self.about['grpc']}"
        return connect(url, namespace=namespace, token=token or self.token, options=patient())

    def admin(self) -> Admin:
        return Admin(f"forebay://{self.about['grpc']}", token=self.token)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One node for the tests of a module; they use names of their own."""
    served = Served(tmp_path_factory.mktemp("node"))
    yield served
    served.stop()


@pytest.fixture(scope="module")
def http(node: Served) -> Iterator[httpx.Client]:
    """An administrator's client of it."""
    with node.http() as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[NodeMaker]:
    """Starts nodes with a configuration of their own."""
    started: list[Served] = []

    def make(config: str) -> Served:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Served(folder, config))
        return started[-1]

    yield make
    for served in started:
        served.stop()
