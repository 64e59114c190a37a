"""Builds the small C libraries that tests load into processes by LD_PRELOAD.

One C file makes one library. It lies in the cache, named by what it was made from, so that it is compiled once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["ShimNotBuilt", "build", "missing"]

_FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")


class ShimNotBuilt(Exception):
    """The compiler refused the source; the text is what it said."""


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc")


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    return None if _compiler() else "no C compiler (cc), which root gets by `make compiler`"


def build(source: Path) -> Path:
    """The shared library of a C file; headers beside it count as part of it.

    Raises `ShimNotBuilt` with the compiler's words. Several processes may call this at once.
    """
    compiler = _compiler()
    if compiler is None:
        raise ShimNotBuilt(missing())
    digest = hashlib.sha256("\0".join((compiler, platform.machine(), *_FLAGS)).encode())
    for part in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(part.read_bytes())
    cache = Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay") / "shims"
    library = cache / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
        made = Path(scratch) / library.name
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", made, source, "-ldl"], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise ShimNotBuilt(f"{source}: {done.stderr}")
        made.rename(library)  # whole or not at all, whoever else builds it
    return library
