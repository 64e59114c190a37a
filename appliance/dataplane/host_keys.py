"""Secrets of hosts on their way to a target: files that only the target's user reads, under names that it is given."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.errors import AlreadyExists, NotFound, TargetFailed, TargetRefused, Unavailable
from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret

__all__ = ["HostKeyFiles", "HostKeys"]


class HostKeyFiles:
    """Key files in a directory of their own; what an earlier daemon left there belongs to hosts that are no more.

    ``node`` is in each key's name: a target may serve several nodes.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self._directory = directory
        self._prefix = _prefix(node)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clear(directory, node)

    @staticmethod
    def clear(directory: Path, node: str) -> None:
        """Remove what an earlier daemon left, if it left anything."""
        for left in directory.glob(f"{_prefix(node)}*"):
            left.unlink(missing_ok=True)

    def write(self, host: HostIdentity) -> dict[str, tuple[str, Path]]:
        """By parameter of `nvmf_subsystem_add_host`: the key's name and its file. Raises OSError."""
        found: dict[str, tuple[str, Path]] = {}
        if host.secrets is not None:
            own, controller = _names(self._prefix, host.nqn)
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

    def forget(self, nqn: str) -> None:
        """Remove a host's files, if it has any."""
        for name in _names(self._prefix, nqn):
            (self._directory / name).unlink(missing_ok=True)


class HostKeys:
    """Which hosts have to prove to a target who they are, and the keys that it was given for that.

    Without ``files`` none has to; what an earlier daemon left the target is taken from it all the same.
    """

    def __init__(self, rpc: JsonRpcClient, node: str, files: HostKeyFiles | None) -> None:
        self._rpc = rpc
        self._prefix = _prefix(node)
        self._files = files
        self._hosts: dict[str, HostIdentity] = {}

    def __contains__(self, nqn: str) -> bool:
        return nqn in self._hosts

    def learn(self, host: HostIdentity) -> None:
        """Keep a host's secrets, if it has any, until it is forgotten."""
        if host.secrets is not None:
            self._hosts[host.nqn] = host

    def unlearn(self, nqn: str) -> None:
        """Forget a host that nobody was told of: what the target has goes with the next `forget_all_but`."""
        if self._hosts.pop(nqn, None) is not None and self._files is not None:
            self._files.forget(nqn)

    async def allow(self, subsystem: str, nqn: str, *, stranger: bool = False) -> None:
        """Let a host connect to a subsystem: one with secrets by these alone, a ``stranger`` by none there is."""
        host = self._hosts.get(nqn)
        if host is None and stranger and self._files is not None:
            host = HostIdentity(nqn, "", HostSecrets(Secret.generate()))
        keys = {} if host is None else await self._given(host)
        await self._rpc.call("nvmf_subsystem_add_host", {"nqn": subsystem, "host": nqn, **keys})

    async def _given(self, host: HostIdentity) -> dict[str, str]:
        """Have the target know a host's keys; their names, by parameter of `nvmf_subsystem_add_host`."""
        if self._files is None:
            raise TargetRefused(f"host {host.nqn} has secrets, which this driver does not pass on", field="host")
        try:
            written = await asyncio.to_thread(self._files.write, host)
        except OSError as error:
            raise Unavailable(f"the secrets of a host cannot be written: {error.strerror}", field="host") from error
        for key, path in written.values():
            with suppress(AlreadyExists):
                await self._rpc.call("keyring_file_add_key", {"name": key, "path": str(path)})
        return {parameter: key for parameter, (key, _) in written.items()}

    async def forget(self, nqn: str) -> None:
        """A host has no right to connect any more: nobody needs its secrets."""
        self._hosts.pop(nqn, None)
        if self._files is None:
            return
        await asyncio.to_thread(self._files.forget, nqn)
        await self._remove(_names(self._prefix, nqn))

    async def forget_all_but(self, nqns: Collection[str]) -> None:
        """Remove the keys that an earlier daemon gave the target for hosts that are no more."""
        wanted = {key for nqn in nqns if self._files is not None for key in _names(self._prefix, nqn)}
        try:
            there = [str(one["name"]) for one in await self._rpc.call("keyring_get_keys")]
        except (TargetFailed, TargetRefused):
            if self._files is not None:
                raise
            return  # a target that has no keys cannot have old ones
        await self._remove(name for name in there if name.startswith(self._prefix) and name not in wanted)

    async def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(NotFound):
                await self._rpc.call("keyring_file_remove_key", {"name": name})


def _prefix(node: str) -> str:
    return f"forebay-{node}-"


def _names(prefix: str, nqn: str) -> tuple[str, str]:
    """Names of a host's two keys. The NQNs of sessions' hosts end with a UUID, so no two have the same."""
    stem = prefix + nqn.rpartition(":")[2]
    return stem, f"{stem}-target"
