"""Environments of their own for tests and peers of `perf` whose dependencies are too big for the development lock.

`make test` makes them (``python -m tests.envs NAME``) where that can be had within bounds; the tests run in them as
other processes, and skip with the reason where there is none. They lie in the cache outside of the tree, named by what
they are made of, so that they are made once. They hold everything but Forebay itself, which comes by PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENVIRONMENTS", "Environment"]

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment: its lock file, where its packages are beside the configured index, and its bounds."""

    name: str
    lock: str
    index: str | None
    needs_bytes: int
    limit_s: float
    made_by: str

    @property
    def directory(self) -> Path:
        """Where it is, or will be."""
        cache = Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay")
        parts = ((ROOT / self.lock).read_text(), sys.version, platform.machine(), sys.base_prefix)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return cache / "envs" / f"{self.name}-{digest}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def missing(self) -> str | None:
        """Why it cannot be used, or None."""
        if (self.directory / "ready").exists():
            return None
        why = self.directory / "failed"
        return f"no environment with {self.name}: " + (why.read_text() if why.exists() else self.made_by + " makes it")

    def variables(self) -> dict[str, str]:
        """What processes in it need of the tree, and of another version of vLLM (tests/connectors/overlay.py)."""
        paths, added = [str(ROOT / "src"), str(ROOT)], {}
        overlay = os.environ.get("FOREBAY_VLLM_OVERLAY") if self.name == "vllm" else None
        if overlay:
            paths.insert(0, overlay)
            added["VLLM_TARGET_DEVICE"] = "cpu"  # its own name does not say so
        return {**os.environ, **added, "PYTHONPATH": os.pathsep.join(paths)}

    def version(self, package: str) -> str:
        """Of a package in it."""
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def make(self) -> str | None:
        """Make it if it is not there; why it could not be made, or None."""
        with self._lock():
            if self.missing is None:
                return None
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            reason = self._install()
            if reason is None:
                (self.directory / "ready").touch()
                return None
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir()
            (self.directory / "failed").write_text(reason)
            return reason

    def _install(self) -> str | None:
        free = shutil.disk_usage(self.directory).free
        if free < self.needs_bytes:
            return f"it takes {self.needs_bytes // MIB} MiB, and {self.directory.parent} has {free // MIB}"
        print(f"installing {self.name} into {self.directory}", flush=True)
        venv: list[str | Path] = [sys.executable, "-m", "venv", self.directory]
        made = subprocess.run(venv, capture_output=True, text=True, check=False)
        if made.returncode:
            return f"no virtual environment: {_last_line(made.stderr)}"
        pip: list[str | Path] = [
            self.python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",  # locks are whole, or leave out on purpose what the tests do not need
            "--require-hashes",
            "--only-binary",
            ":all:",
        ]
        pip += ["--disable-pip-version-check", "--no-cache-dir", "-r", ROOT / self.lock]
        why = ""
        # First from where everything comes from; elsewhere only if it is not there.
        sources: list[list[str]] = [[]]
        if self.index is not None:
            sources.append(["--retries", "1", "--extra-index-url", self.index])
        for source in sources:
            try:
                done = subprocess.run(
                    [*pip, *source], capture_output=True, text=True, check=False, timeout=self.limit_s
                )
            except subprocess.TimeoutExpired:
                return f"not installed within {self.limit_s:.0f} s"
            if not done.returncode:
                return None
            why = _last_line(done.stderr)
        return why

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One process at a time."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with self.directory.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1]


ENVIRONMENTS = {
    env.name: env
    for env in (
        # The build without CUDA, which only PyTorch's own index has.
        Environment(
            "torch", "requirements-torch.lock", "https://download.pytorch.org/whl/cpu", 2048 * MIB, 300, "make test"
        ),
        # An engine, with the same build of torch.
        Environment(
            "vllm", "requirements-vllm.lock", "https://download.pytorch.org/whl/cpu", 4096 * MIB, 900, "make vllm"
        ),
        # A store that perf compares with.
        Environment("mooncake", "requirements-mooncake.lock", None, 512 * MIB, 300, "make bench"),
        # Another one, used beside vLLM's packages.
        Environment("lmcache", "requirements-lmcache.lock", None, 256 * MIB, 300, "make bench"),
        # Coverage-guided fuzzing.
        Environment("fuzz", "requirements-fuzz.lock", None, 512 * MIB, 300, "make fuzz"),
    )
}


def main(names: list[str]) -> None:
    """Make environments; what cannot be made is said, and no failure."""
    for name in names:
        reason = ENVIRONMENTS[name].make()
        if reason is not None:
            print(f"what needs {name} will be skipped: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
