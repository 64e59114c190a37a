"""A small virtual machine with the Linux kernel's NVMe/TCP initiator, built once and kept in the cache.

Software emulation: it judges correctness, and its speed means nothing. It reaches this machine's 127.0.0.1 as 10.0.2.2.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["GuestNotBuilt", "boot", "build", "built", "missing"]

_SCRIPT = Path(__file__).with_name("prepare.sh")
_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")


class GuestNotBuilt(Exception):
    """What the guest is built from could not be had, or something else went wrong; the text says what."""


def _home() -> Path:
    cache = os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay"
    return Path(cache) / "interop" / hashlib.sha256(_SCRIPT.read_bytes()).hexdigest()[:16]


def built() -> bool:
    """Whether the guest of the script as it is now is in the cache, and can be run."""
    return (_home() / "root.img").exists() and shutil.which("qemu-system-x86_64") is not None


def missing() -> str | None:
    """Why the guest can neither be run nor be built here, or None."""
    if built():
        return None
    if os.geteuid():
        return "the guest with Linux's initiator is not built, and only root can build it"
    if not _SOURCES.exists() or shutil.which("apt-get") is None:
        return "the guest with Linux's initiator is built from the sources of a Debian machine, and this is none"
    if os.uname().machine != "x86_64":
        return f"the guest with Linux's initiator is not built for {os.uname().machine}"
    return None


def build() -> None:
    """Build the guest if it is not in the cache: one to two minutes, most of it downloads. Raises `GuestNotBuilt`."""
    home = _home()
    if built():
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix="building-") as scratch:
        work = Path(scratch) / "guest"
        try:
            done = subprocess.run(["bash", _SCRIPT, work], capture_output=True, text=True, timeout=500, check=False)
        except subprocess.TimeoutExpired as error:
            raise GuestNotBuilt("it took too long") from error
        if done.returncode:
            raise GuestNotBuilt((done.stderr or done.stdout).strip()[-500:])
        shutil.rmtree(home, ignore_errors=True)
        work.rename(home)


def boot(share: Path, timeout_s: float) -> str:
    """Run `share`/run.sh in the guest, which has `share` as /share; returns what it printed, by the time limit."""
    home = _home()
    arguments = [
        "qemu-system-x86_64",
        *("-M", "q35,i8042=off", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "640"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio", "-monitor", "none"),
        *("-kernel", str(home / "vmlinuz"), "-initrd", str(home / "initrd.gz")),
        *("-append", "console=ttyS0 quiet panic=-1 net.ifnames=0 mitigations=off no_timer_check random.trust_cpu=on"),
        *("-drive", f"if=none,id=d0,file={home / 'root.img'},format=raw,snapshot=on"),
        *("-device", "virtio-blk-pci,drive=d0"),
        *("-fsdev", f"local,id=fs,path={share},security_model=none"),
        *("-device", "virtio-9p-pci,fsdev=fs,mount_tag=share"),
        *("-netdev", "user,id=n0,ipv6=off", "-device", "virtio-net-pci,netdev=n0,romfile="),
        *("-device", "virtio-rng-pci"),
    ]
    console = share / "console.log"
    with console.open("wb") as out, suppress(subprocess.TimeoutExpired):
        subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=timeout_s, check=False)
    log = share / "run.log"
    assert log.exists(), console.read_text(errors="replace")[-4000:]
    return log.read_text(errors="replace")


if __name__ == "__main__":
    if (reason := missing()) is not None:
        sys.exit(reason)
    build()
    print(_home())
