"""What the checks of a guest's script did, and what the script has this side do."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.interop import guest

__all__ = ["Check", "complaints", "mounts", "passed", "prepare", "read", "serving"]

log = logging.getLogger(__name__)

_CHECK = re.compile(r"^=== check (\w+)\n(.*?)^=== status (\d+)\n(.*?)^=== end$", re.DOTALL | re.MULTILINE)
_COMPLAINT = re.compile(r"^.*(?i:error|fail|warn|time.?out|bug|invalid|unexpected).*$", re.MULTILINE)


class Check(NamedTuple):
    """What one check printed, how it ended, and what the kernel said meanwhile."""

    status: int
    output: str
    kernel: str


def mounts(package: str) -> dict[str, Path]:
    """This repository and the packages of this environment, ``package`` among them, for a guest to mount.

    Skips the test where they are not for the guest's Python.
    """
    found = importlib.util.find_spec(package)
    if sys.version_info[:2] != (3, 11) or found is None or found.origin is None:
        pytest.skip(f"the guest runs the packages of this environment: they must be of Python 3.11, with {package}")
    return {"repo": Path(__file__).resolve().parents[2], "site": Path(found.origin).parents[1]}


def prepare(share: Path, script: str, settings: Mapping[str, object]) -> None:
    """Build the guest, and make `share` what it runs: ``script`` of this directory, which may source the settings.

    Skips the test where the guest cannot be built; on a CI machine it fails instead.
    """
    try:
        guest.build()
    except guest.GuestNotBuilt as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the guest with Linux's NVMe could not be built: {error}")
    share.mkdir(exist_ok=True)
    (share / "settings").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    here = Path(__file__).parent
    shutil.copy(here / script, share / "run.sh")
    shutil.copy(here / "guest.sh", share / "guest.sh")


@contextmanager
def serving(share: Path, actions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Do what the guest asks for (`ask WORD`) meanwhile."""
    over = threading.Event()
    helper = threading.Thread(target=_serve, args=(share, actions, over), daemon=True)
    helper.start()
    try:
        yield
    finally:
        over.set()
        helper.join(60)


def _serve(share: Path, actions: Mapping[str, Callable[[], None]], over: threading.Event) -> None:
    while not over.wait(0.05):
        for name, action in actions.items():
            asked = share / f"ask.{name}"
            if asked.exists():
                asked.unlink()
                try:
                    action()
                except Exception:
                    log.exception("%s, as the guest asked", name)
                    continue  # the guest gives up
                (share / f"done.{name}").touch()


def read(text: str) -> dict[str, Check]:
    """The checks in what a guest printed, by name."""
    return {name: Check(int(status), output, kernel) for name, output, status, kernel in _CHECK.findall(text)}


def passed(checks: Mapping[str, Check], name: str) -> str:
    """The output of a check that must have succeeded."""
    assert name in checks, f"it did not run; these did: {', '.join(checks)}"
    check = checks[name]
    assert check.status == 0, f"{check.output}\n--- kernel:\n{check.kernel}"
    return check.output


def complaints(check: Check) -> list[str]:
    """Lines of the kernel that speak of something wrong."""
    return _COMPLAINT.findall(check.kernel)
