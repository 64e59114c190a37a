"""How reads by block device reach GPU memory here: chosen once, by what is there, without touching what is not."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["GpuPath", "choose_gpu_path", "gpu_path"]

_log = logging.getLogger(__name__)

_ASK_S = 10.0
"""A driver that does not answer within that time is left alone."""

PathName = Literal["gds", "compat", "staging", "none"]


@dataclass(frozen=True, slots=True)
class GpuPath:
    """The way, and why it is that one. ``kvikio`` is the library, loaded and set up, for gds and compat only."""

    name: PathName
    why: str
    kvikio: Any = None


_chosen: dict[str, GpuPath] = {}
_choosing = threading.Lock()


def gpu_path(wanted: str) -> GpuPath:
    """`choose_gpu_path`, once a process, with its line in the log."""
    with _choosing:
        if wanted not in _chosen:
            found = _chosen[wanted] = choose_gpu_path(wanted)
            _log.info("reads by block device reach GPU memory by %s: %s", found.name, found.why)
        return _chosen[wanted]


def choose_gpu_path(
    wanted: str = "auto",
    *,
    root: Path = Path("/"),
    load: Callable[[], Any] | None = None,
    ask_s: float = _ASK_S,
) -> GpuPath:
    """The best way that is there; ``wanted`` (`BlockDeviceOptions.gpu`) names one. Raises nothing, waits ``ask_s``.

    What is not there is seen by paths: a library of a driver that is not loaded can hang when it is asked.
    """
    if not (root / "proc/driver/nvidia/version").exists() and not (root / "dev/nvidiactl").exists():
        return GpuPath("none", "no NVIDIA driver is loaded")
    if wanted == "staging":
        return GpuPath("staging", "it was asked for")
    if load is None and importlib.util.find_spec("kvikio") is None:
        return GpuPath("staging", "kvikio is not installed: pip install 'forebay[gpu]'")
    direct = (root / "proc/driver/nvidia-fs/version").exists() or (root / "sys/module/nvidia_fs").is_dir()
    answer: list[GpuPath] = []

    def ask() -> None:
        try:
            answer.append(_ask((load or _load)(), wanted, direct=direct))
        except Exception as e:  # whatever a library of a vendor raises, blocks are read all the same
            answer.append(GpuPath("staging", f"kvikio cannot be used: {type(e).__name__}: {e}"))

    thread = threading.Thread(target=ask, name="forebay-gpu-path", daemon=True)
    thread.start()
    thread.join(ask_s)
    return answer[0] if answer else GpuPath("staging", f"kvikio did not answer within {ask_s:g} s")


def _load() -> Any:
    importlib.import_module("kvikio.defaults")
    return importlib.import_module("kvikio")


def _ask(kvikio: Any, wanted: str, *, direct: bool) -> GpuPath:
    # Its default for reads without GDS is the page cache, which is stale where other hosts write.
    kvikio.defaults.set("auto_direct_io_read", True)
    if wanted == "compat" or not direct:
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)
        why = "it was asked for" if wanted == "compat" else "nvidia-fs is not loaded"
        return GpuPath("compat", f"{why}; kvikio reads through pinned memory of its own", kvikio)
    kvikio.defaults.set("compat_mode", kvikio.CompatMode.AUTO)
    if kvikio.defaults.is_compat_mode_preferred():
        return GpuPath("compat", "nvidia-fs is loaded, but kvikio finds no cuFile that it can use", kvikio)
    return GpuPath("gds", "nvidia-fs is loaded and cuFile answers", kvikio)
