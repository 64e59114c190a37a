"""A small virtual machine with the Linux kernel's NVMe initiators and targets and Soft-RoCE, built once and kept.

Software emulation: it judges correctness, and its speed means nothing. It reaches this machine's 127.0.0.1 as 10.0.2.2;
the other way is what `Guest` forwards. The scripts that run in it may source `guest.sh`; see `checks.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["Guest", "GuestNotBuilt", "boot", "build", "built", "missing"]

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
        return "the guest with Linux's NVMe is not built, and only root can build it"
    if not _SOURCES.exists() or shutil.which("apt-get") is None:
        return "the guest with Linux's NVMe is built from the sources of a Debian machine, and this is none"
    if os.uname().machine != "x86_64":
        return f"the guest with Linux's NVMe is not built for {os.uname().machine}"
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


class Guest:
    """A guest that runs `share`/run.sh, which has `share` as /share; it is off when that has ended.

    What it listens at on each of ``forwards`` (ports of the guest) is at ``ports`` here. ``mounts`` are directories of
    this machine by name, read-only at /mnt/NAME in the guest. ``wire`` makes its eth1 the end of one: UDP ports of this
    machine, its own and that of the guest at the other end. A context manager, which ends it.
    """

    def __init__(
        self,
        share: Path,
        *,
        forwards: Iterable[int] = (),
        mounts: Mapping[str, Path] | None = None,
        memory_mib: int = 640,
        wire: tuple[int, int] | None = None,
    ) -> None:
        self.share = share
        self.ports = {port: _free_port() for port in forwards}
        home = _home()
        network = ["user,id=n0,ipv6=off", *(f"hostfwd=tcp:127.0.0.1:{at}-:{port}" for port, at in self.ports.items())]
        console = "console=ttyS0 quiet panic=-1 net.ifnames=0 mitigations=off no_timer_check random.trust_cpu=on"
        arguments = [
            "qemu-system-x86_64",
            *("-M", "q35,i8042=off", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(memory_mib)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
            *("-monitor", "none", "-kernel", str(home / "vmlinuz"), "-initrd", str(home / "initrd.gz")),
            *("-append", f"{console} forebay.mounts={','.join(mounts or ())}"),
            *("-drive", f"if=none,id=d0,file={home / 'root.img'},format=raw,snapshot=on"),
            *("-device", "virtio-blk-pci,drive=d0", "-device", "virtio-rng-pci"),
            *("-netdev", ",".join(network), "-device", "virtio-net-pci,netdev=n0,romfile="),
        ]
        if wire is not None:
            mine, theirs = wire
            ends = f"localaddr=127.0.0.1:{mine},udp=127.0.0.1:{theirs}"
            card = f"virtio-net-pci,netdev=n1,mac=52:54:00:00:{mine >> 8:02x}:{mine & 255:02x},romfile="
            arguments += ["-netdev", f"socket,id=n1,{ends}", "-device", card]
        for tag, path in {"share": share, **(mounts or {})}.items():
            arguments += ["-fsdev", f"local,id={tag},path={path},security_model=none"]
            arguments += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        self._console = share / "console.log"
        with self._console.open("wb") as out:
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    @property
    def runs(self) -> bool:
        """Whether it is not off yet."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> str:
        """What run.sh printed until its end, or until the time limit, by which the guest is off."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.close()
        return self.log()

    def log(self) -> str:
        """What run.sh has printed; what the console shows if the guest did not come so far."""
        try:
            return (self.share / "run.log").read_text(errors="replace")
        except FileNotFoundError:
            return self._console.read_text(errors="replace")[-4000:]

    def pause(self) -> None:
        """Nothing of it runs; what was sent to it waits."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Switch it off, if it is not yet."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def boot(share: Path, timeout_s: float, *, mounts: Mapping[str, Path] | None = None, memory_mib: int = 640) -> str:
    """Run `share`/run.sh in a `Guest` to its end; returns what it printed, by the time limit."""
    with Guest(share, mounts=mounts, memory_mib=memory_mib) as guest:
        return guest.wait(timeout_s)


if __name__ == "__main__":
    if (reason := missing()) is not None:
        sys.exit(reason)
    build()
    print(_home())
