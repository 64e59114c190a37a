"""Secrets of hosts on their way to a target: files that only the target's user reads, under names that it is given."""

from __future__ import annotations

import os
from pathlib import Path

from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import Secret

__all__ = ["HostKeyFiles"]


class HostKeyFiles:
    """Key files in a directory of their own; what an earlier daemon left there belongs to hosts that are no more.

    ``node`` is in each key's name: a target may serve several nodes.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self._directory = directory
        self.prefix = f"forebay-{node}-"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in directory.glob(f"{self.prefix}*"):
            left.unlink(missing_ok=True)

    def write(self, host: HostIdentity) -> dict[str, tuple[str, Path]]:
        """By parameter of `nvmf_subsystem_add_host`: the key's name and its file. Raises OSError."""
        found: dict[str, tuple[str, Path]] = {}
        if host.secrets is not None:
            own, controller = self.names(host.nqn)
            found["dhchap_key"] = own, self._write(own, host.secrets.host)
            if host.secrets.controller is not None:
                found["dhchap_ctrlr_key"] = controller, self._write(controller, host.secrets.controller)
        return found

    def _write(self, name: str, secret: Secret) -> Path:
        path, unfinished = self._directory / name, self._directory / f"{name}.new"
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secret.text())
        unfinished.rename(path)  # SPDK may be reading what was written there before
        return path

    def names(self, nqn: str) -> tuple[str, str]:
        """Names of a host's two keys. The NQNs of sessions' hosts end with a UUID, so no two have the same."""
        stem = self.prefix + nqn.rpartition(":")[2]
        return stem, f"{stem}-target"

    def forget(self, nqn: str) -> None:
        """Remove a host's files, if it has any."""
        for name in self.names(nqn):
            (self._directory / name).unlink(missing_ok=True)
