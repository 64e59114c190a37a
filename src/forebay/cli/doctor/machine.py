"""Checks of this machine: Python, limits, clock, kernel NVMe, RDMA, GPU."""

from __future__ import annotations

import ctypes
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import forebay
from forebay.cli.doctor.finding import Finding, fail, ok, warn
from forebay.cli.sizes import format_size
from forebay.client.transports.gpu_path import choose_gpu_path

__all__ = ["check_clock", "check_gpu", "check_libraries", "check_limits", "check_nvme", "check_rdma"]

_SPARE_FILES = 256
_RDMA_MEMLOCK_BYTES = 1 << 30
_STA_UNSYNC = 0x40
_CLOCK_S = 0.1
_CLOCK_JUMP_S = 0.005
_GDS_PLACES = ("usr/local/cuda*/targets/*/lib", "usr/local/cuda*/lib64", "usr/lib/*-linux-gnu", "usr/lib64", "usr/lib")


def _lock() -> dict[str, str]:
    """Versions that this was tested with: the repository's lock, where there is one."""
    path = Path(forebay.__file__).resolve().parents[2] / "requirements.lock"
    try:
        return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", path.read_text(), re.MULTILINE))
    except OSError:
        return {}


def _needed() -> list[str]:
    try:
        named = requires("forebay") or []
    except PackageNotFoundError:
        named = []
    return [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in named if "extra ==" not in line]


def check_libraries(locked: dict[str, str] | None = None) -> Iterator[Finding]:
    """Python, and libraries against the lock."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    lock = _lock() if locked is None else locked
    missing, other = [], []
    for name in sorted(set(lock) | set(_needed())):
        try:
            found = version(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        if name in lock and found != lock[name]:
            other.append(f"{name} {found} ({lock[name]})")
    if missing:
        yield fail("libraries", f"missing: {', '.join(missing)}", "`make venv` in the repository")
    if other:
        yield warn("libraries", f"not the tested versions: {', '.join(other)}", "pip install -r requirements.lock")
    if not missing and not other:
        against = "as in requirements.lock" if lock else "all there; no lock to compare with"
        yield ok("libraries", f"forebay {forebay.__version__}; {against}")


def check_limits(connections: int, rdma: bool) -> Iterator[Finding]:
    """Open files for that many connections, and locked memory where RDMA registers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        raised = (
            f"ulimit -n {need}" if hard == resource.RLIM_INFINITY or hard >= need else "LimitNOFILE= of the service"
        )
        yield warn(
            "open files", f"{soft} allowed; target.max_connections is {connections}", f"{raised}, at least {need}"
        )
    else:
        yield ok("open files", f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} allowed, {need} needed")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = "unlimited" if locked == resource.RLIM_INFINITY else format_size(locked)
    if rdma and locked != resource.RLIM_INFINITY and locked < _RDMA_MEMLOCK_BYTES:
        yield warn("locked memory", f"{told}: RDMA cannot register buffers", "ulimit -l unlimited, or LimitMEMLOCK=")
    else:
        yield ok("locked memory", told if rdma else f"{told}; matters with RDMA only")


def _synchronised() -> bool | None:
    """Whether the kernel holds the wall clock for synchronised (adjtimex(2)); None where it does not tell."""
    buffer = (ctypes.c_long * 64)()  # struct timex; `modes` 0 only reads, `status` is the int after five longs
    if ctypes.CDLL(None).adjtimex(ctypes.byref(buffer)) < 0:
        return None
    return not buffer[5] & _STA_UNSYNC


def check_clock() -> Iterator[Finding]:
    """Whether the wall clock keeps step with the monotonic one, and whether somebody sets it."""
    before = time.time() - time.monotonic()
    time.sleep(_CLOCK_S)
    moved_s = time.time() - time.monotonic() - before
    if abs(moved_s) > _CLOCK_JUMP_S:
        yield warn(
            "clock",
            f"the wall clock moved {moved_s * 1e3:+.1f} ms against the monotonic one in {_CLOCK_S * 1e3:.0f} ms",
            "leases do not mind, ttl and retention do: let chronyd slew instead of stepping",
        )
    synchronised = _synchronised()
    if synchronised is None:
        yield ok("clock", "keeps step with the monotonic one; the kernel does not tell whether it is synchronised")
    elif synchronised:
        yield ok("clock", "synchronised")
    else:
        yield warn(
            "clock", "not synchronised: ttl, retention and events go by a free-running clock", "start chronyd or ntpd"
        )


def _module(name: str) -> str:
    """``loaded``, ``available`` or ``absent``."""
    if Path("/sys/module", name.replace("-", "_")).is_dir():
        return "loaded"
    folder = Path("/lib/modules", platform.release())
    for listing in ("modules.dep", "modules.builtin"):
        try:
            if re.search(rf"/{name}\.ko", (folder / listing).read_text(errors="replace")):
                return "available"
        except OSError:
            continue
    return "absent"


def check_nvme() -> Iterator[Finding]:
    """The kernel's initiator: not needed, since clients have one in user space."""
    states = {name: _module(name) for name in ("nvme-fabrics", "nvme-tcp", "nvme-rdma")}
    told = ", ".join(f"{name} {state}" for name, state in states.items())
    tool = "nvme-cli is installed" if shutil.which("nvme") else "no nvme-cli"
    fabrics = "/dev/nvme-fabrics is there" if Path("/dev/nvme-fabrics").exists() else "no /dev/nvme-fabrics"
    note = "clients bring their own initiator, so nothing of this is needed unless as block devices: docs/transports.md"
    yield ok("kernel nvme", f"{told}; {fabrics}, {tool}; {note}")


def check_rdma(root: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """RDMA devices and their ports."""
    devices = sorted(root.iterdir()) if root.is_dir() else []
    if not devices:
        yield ok("rdma", "no devices: NVMe/TCP is used")
    for device in devices:
        for port in sorted((device / "ports").iterdir()) if (device / "ports").is_dir() else []:
            state, layer = _read(port / "state"), _read(port / "link_layer")
            what = f"{device.name} port {port.name}: {state or 'unknown'}, {layer or 'unknown'}, {_read(port / 'rate')}"
            if "ACTIVE" in state:
                yield ok("rdma", what)
            else:
                yield warn("rdma", what, f"check cable and switch; `ip link`, `rdma link` and `ibstat {device.name}`")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_gpu(root: Path = Path("/")) -> Iterator[Finding]:
    """GPU direct storage, by paths first: loading a library of another driver can hang."""
    driver = _read(root / "proc/driver/nvidia/version")
    if not driver and not (root / "dev/nvidiactl").exists():
        yield ok("gpu", "no NVIDIA driver: blocks are read into host memory")
        return
    yield ok("gpu", driver.splitlines()[0] if driver else "/dev/nvidiactl is there")
    filesystem = _read(root / "proc/driver/nvidia-fs/version") or (root / "sys/module/nvidia_fs").is_dir()
    libraries = sorted({str(p) for place in _GDS_PLACES for p in root.glob(f"{place}/libcufile.so*")})
    path = choose_gpu_path(root=root)
    yield ok("gpu path", f"block devices are read into GPU memory by {path.name}: {path.why}")
    if filesystem and libraries:
        yield ok("gpu direct", f"nvidia-fs is loaded; {libraries[0]}")
        return
    lacking = [*(["nvidia-fs is not loaded"] if not filesystem else []), *([] if libraries else ["no libcufile"])]
    yield warn(
        "gpu direct",
        f"{', '.join(lacking)}: reads into GPU memory go through host memory",
        "install nvidia-gds (libcufile, nvidia-fs) and `modprobe nvidia-fs`, if block devices are used",
    )
