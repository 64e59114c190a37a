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

        It is not when its files have changed since the engine first used it, unless the request says that the engine
        loads it again: then nobody can tell which of the two the engine computes with.
        """
        key = (int(adapter.lora_int_id), str(adapter.lora_path))
        with self._lock:
            try:
                stamp = _stamp(Path(key[1]))
                known = self._known.get(key)
                if known is None or adapter.load_inplace:
                    known = _Known(stamp, weights_digest(Path(key[1])))
                elif known.digest is not None and known.stamp != stamp:
                    _log.warning(
                        "the files of adapter %s in %s have changed: its blocks are neither loaded nor stored until "
                        "the engine starts anew, or loads it again with load_inplace",
                        adapter.lora_name,
                        key[1],
                    )
                    known = _Known(stamp, None)
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
