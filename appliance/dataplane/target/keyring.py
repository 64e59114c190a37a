"""Named secrets, read from files once. What is shown of one is its name and its file, never the secret."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from threading import Lock

from forebay.errors import InvalidArgument
from forebay.nvmetcp.secret import HostSecrets, Secret

__all__ = ["HostKeys", "Keyring"]

_MAX_FILE_BYTES = 4096


class HostKeys:
    """The keys that an allowed host has to prove itself by, with the names that they were given by."""

    def __init__(self, name: str, controller_name: str | None, secrets: HostSecrets) -> None:
        self.name = name
        self.controller_name = controller_name
        self.secrets = secrets


class Keyring:
    """Keys by name. Methods raise OSError with the errno that is answered."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._keys: dict[str, tuple[Path, Secret]] = {}

    def add_file(self, name: str, path: Path) -> None:
        """Read a key. EEXIST; EPERM if others than its owner could read the file, EINVAL if it holds no secret."""
        secret = _read(path)
        with self._lock:
            if name in self._keys:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._keys[name] = (path, secret)

    def remove(self, name: str) -> None:
        """Forget a key; hosts that were allowed with it keep it. ENOENT."""
        with self._lock:
            if self._keys.pop(name, None) is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def paths(self) -> dict[str, Path]:
        """The file of each key."""
        with self._lock:
            return {name: path for name, (path, _) in self._keys.items()}

    def host_keys(self, name: str, controller_name: str | None) -> HostKeys:
        """What a host is to have. ENOKEY."""
        try:
            with self._lock:
                own = self._keys[name][1]
                controller = self._keys[controller_name][1] if controller_name is not None else None
        except KeyError:
            raise OSError(errno.ENOKEY, os.strerror(errno.ENOKEY)) from None
        return HostKeys(name, controller_name, HostSecrets(own, controller))


def _read(path: Path) -> Secret:
    if not path.is_absolute():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        data = file.read(_MAX_FILE_BYTES)
    try:
        return Secret.parse(data.decode("ascii"))
    except (InvalidArgument, UnicodeDecodeError):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
