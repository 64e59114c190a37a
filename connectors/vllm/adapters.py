"""LoRA adapters by their content: an adapter that is trained anew keeps its name and path, and so its block hashes."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.connectors.keys import weights_digest
from forebay.errors import ForebayError

__all__ = ["Adapters"]

_log = logging.getLogger("vllm.forebay")

_Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter as it was when it was first used: its files' names, sizes, times and inodes, and its digest."""

    stamp: _Stamp
    digest: bytes | None


class Adapters:
    """Digests of the adapters that requests name. Thread-safe; reads files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str], _Known] = {}

    def digest(self, adapter: Any) -> bytes | None:
        """The content of a request's adapter (vLLM's `LoRARequest`), or None where it is not known.

        Once an adapter has had two contents in one engine it never is again: what the engine still has loaded may be
        the one or the other, and its own cache, which goes by name and path, may hold blocks of both.
        """
        key = (int(adapter.lora_int_id), str(adapter.lora_path))
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.digest is None:
                return None
            try:
                stamp = _stamp(Path(key[1]))
                if known is None or known.stamp != stamp or adapter.load_inplace:
                    digest: bytes | None = weights_digest(Path(key[1]))
                    if known is not None and known.digest != digest:
                        _log.warning(
                            "adapter %s in %s has changed: its blocks are neither loaded nor stored until the engine "
                            "starts anew",
                            adapter.lora_name,
                            key[1],
                        )
                        digest = None
                    known = _Known(stamp, digest)
            except (ForebayError, OSError) as e:
                _log.warning("adapter %s: its blocks are neither loaded nor stored: %s", adapter.lora_name, e)
                known = _Known((), None)
            self._known[key] = known
            return known.digest


def _stamp(directory: Path) -> _Stamp:
    rows = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            status = path.stat()
            rows.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(rows)
