"""The recorder sees every change that a process makes, and the model keeps of them what was made stable."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.power.disk import Disk, Kind, NotModelled, read_log
from tests.power.recording import environment

pytestmark = pytest.mark.compiler

SEEDS = 40


class Recorded:
    """What a few lines of Python did in a directory."""

    def __init__(self, tmp_path: Path, code: str) -> None:
        self.root, self._tmp_path = tmp_path / "root", tmp_path
        self.root.mkdir()
        head = "import os, fcntl, ctypes\nroot = os.environ['FOREBAY_POWER_ROOTS']\nos.chdir(root)\n"
        head += "here = os.open('.', os.O_RDONLY)\n"
        log = tmp_path / "log"
        command = [sys.executable, "-c", head + textwrap.dedent(code)]
        subprocess.run(command, env=environment(log, self.root), check=True, timeout=60)
        self.records = list(read_log(log))
        self._states = 0

    def disk(self, upto: int | None = None, believed: bool = True) -> Disk:
        scratch = self._tmp_path / f"scratch{self._states}"
        self._states += 1
        scratch.mkdir()
        disk = Disk(self.root, scratch, lambda path: believed)
        for record in self.records[:upto]:
            disk.apply(record)
        return disk

    def outcomes(self, upto: int | None = None, believed: bool = True) -> set[tuple[tuple[str, bytes], ...]]:
        """What a power loss may leave: names and bytes of the files."""
        disk, found = self.disk(upto, believed), set()
        for seed in range(SEEDS):
            out = self._tmp_path / f"out{self._states}-{seed}"
            disk.lose_power(out, seed)
            files = sorted(p for p in out.rglob("*") if p.is_file())
            found.add(tuple((str(p.relative_to(out)), p.read_bytes()) for p in files))
        return found


def test_what_was_flushed_with_its_name_stays_and_nothing_else_is_sure(tmp_path: Path) -> None:
    did = Recorded(
        tmp_path, "f = open('a', 'wb', 0)\nf.write(b'one')\nos.fsync(f.fileno())\nos.fsync(here)\nf.write(b'two')"
    )
    assert did.outcomes() >= {(("a", b"one"),), (("a", b"onetwo"),)}
    assert all(one[0][1].startswith(b"one") for one in did.outcomes())
    assert () in did.outcomes(believed=False)


def test_a_file_without_its_name_is_gone_and_a_name_without_its_file_is_empty(tmp_path: Path) -> None:
    did = Recorded(tmp_path, "f = open('a', 'wb', 0)\nf.write(b'one')\nos.fsync(f.fileno())")
    assert did.outcomes() == {(), (("a", b"one"),)}
    other = tmp_path / "other"
    other.mkdir()
    did = Recorded(other, "f = open('a', 'wb', 0)\nf.write(b'one')\nos.fsync(here)")
    assert did.outcomes() == {(("a", b""),), (("a", b"one"),)}


def test_a_replacement_is_the_old_file_or_the_new_one_if_that_was_flushed(tmp_path: Path) -> None:
    code = """
    def put(name, data, flush):
        f = open(name, 'wb', 0)
        f.write(data)
        if flush:
            os.fsync(f.fileno())
    put('a', b'old', True)
    os.fsync(here)
    put('a.new', b'fresh', {flush})
    os.replace('a.new', 'a')
    """
    did = Recorded(tmp_path, code.format(flush=True))
    assert {dict(one)["a"] for one in did.outcomes()} == {b"old", b"fresh"}
    other = tmp_path / "other"
    other.mkdir()
    did = Recorded(other, code.format(flush=False))
    assert {dict(one)["a"] for one in did.outcomes()} == {b"old", b"fresh", b""}


def test_a_write_may_be_torn_by_sectors(tmp_path: Path) -> None:
    code = """
    f = os.open('a', os.O_RDWR | os.O_CREAT)
    os.ftruncate(f, 4096)
    os.fsync(f)
    os.fsync(here)
    os.pwrite(f, b'x' * 2048, 1024)
    """
    found = {dict(one)["a"] for one in Recorded(tmp_path, code).outcomes()}
    whole = bytes(1024) + b"x" * 2048 + bytes(1024)
    assert {bytes(4096), whole} < found
    for content in found:
        sectors = [content[at : at + 512] for at in range(0, 4096, 512)]
        assert set(sectors) <= {bytes(512), b"x" * 512} and sectors[:2] == sectors[6:] == [bytes(512)] * 2


def test_a_flush_covers_what_was_written_before_it_began(tmp_path: Path) -> None:
    code = """
    f = os.open('a', os.O_RDWR | os.O_CREAT)
    os.fsync(here)
    os.write(f, b'1')
    os.fdatasync(f)
    """
    did = Recorded(tmp_path, code)
    begin = next(i for i, r in enumerate(did.records) if r.kind is Kind.FLUSH_BEGIN and r.file == did.records[1].file)
    assert did.outcomes(begin + 1) == {(("a", b""),), (("a", b"1"),)}
    assert did.outcomes(begin + 2) == {(("a", b"1"),)}


CHANGES = {
    "write": "os.write(f, b'1')",
    "writev": "os.writev(f, [b'1', b'2'])",
    "pwrite": "os.pwrite(f, b'1', 3)",
    "pwritev": "os.pwritev(f, [b'1', b'2'], 3)",
    "pwritev2": "os.pwritev(f, [b'1'], 3, os.RWF_HIPRI)",
    "append": "g = os.open('a', os.O_WRONLY | os.O_APPEND); os.write(g, b'1')",
    "dup": "g = os.dup(f); os.close(f); os.write(g, b'1')",
    "dup2": "os.dup2(f, 77); os.write(77, b'1')",
    "fcntl": "os.write(fcntl.fcntl(f, fcntl.F_DUPFD_CLOEXEC, 50), b'1')",
    "ftruncate": "os.ftruncate(f, 3)",
    "truncate": "os.truncate(root + '/a', 3)",
    "O_TRUNC": "open('a', 'w')",
    "posix_fallocate": "os.posix_fallocate(f, 0, 9000)",
    "punch": "ctypes.CDLL(None).fallocate(f, 3, ctypes.c_int64(4096), ctypes.c_int64(4096))",
    "zero_range": "ctypes.CDLL(None).fallocate(f, 17, ctypes.c_int64(0), ctypes.c_int64(4096))",
    "rename": "os.rename('a', 'b')",
    "renameat": "os.rename('a', 'b', src_dir_fd=here, dst_dir_fd=here)",
    "unlink": "os.unlink('a')",
    "unlinkat": "os.unlink('a', dir_fd=here)",
    "create": "open('b', 'x')",
    "mkdir": "os.mkdir('d'); open('d/x', 'w')",
    "mkdirat": "os.mkdir('d', dir_fd=here); open('d/x', 'w')",
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_and_may_be_lost(tmp_path: Path, change: str) -> None:
    code = (
        "f = os.open('a', os.O_RDWR | os.O_CREAT, 0o600)\nos.pwrite(f, b'0' * 8192, 0)\nos.fsync(f)\nos.fsync(here)\n"
    )
    did = Recorded(tmp_path, code + CHANGES[change])
    (done,) = {tuple((p.name, p.read_bytes()) for p in sorted(did.root.rglob("*")) if p.is_file())}
    done = tuple((name if name != "x" else "d/x", data) for name, data in done)
    assert did.outcomes() >= {(("a", b"0" * 8192),), done}


@pytest.mark.parametrize(
    "flush",
    ["os.fsync(f)", "os.fdatasync(f)", "g = os.open('a', os.O_WRONLY | os.O_DSYNC); os.pwrite(g, b'1', 0)"],
)
def test_every_way_to_flush_is_seen(tmp_path: Path, flush: str) -> None:
    code = "f = os.open('a', os.O_RDWR | os.O_CREAT, 0o600)\nos.fsync(here)\nos.pwrite(f, b'1', 0)\n"
    assert Recorded(tmp_path, code + flush).outcomes() == {(("a", b"1"),)}


@pytest.mark.parametrize(
    "change",
    [
        "import mmap; f = os.open('a', os.O_RDWR | os.O_CREAT); os.ftruncate(f, 4096); mmap.mmap(f, 4096)",
        "os.close(os.open('a', os.O_CREAT)); os.link('a', 'b')",
        "f = os.open('a', os.O_RDWR | os.O_CREAT); import sys; os.sendfile(f, os.open(sys.executable, 0), 0, 1)",
        "ctypes.CDLL(None).fopen(b'a', b'w')",
        "os.close(os.open('a', os.O_CREAT)); os.rename('a', '../a')",
    ],
    ids=["mapping", "link", "sendfile", "stream", "leaves"],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(NotModelled):
        Recorded(tmp_path, change).disk()


def test_several_processes_write_one_log(tmp_path: Path) -> None:
    code = """
    import subprocess, sys
    for i in range(3):
        open(f'{i}', 'wb', 0).write(b'mine')
        subprocess.run([sys.executable, '-c', f"open('{i}+', 'wb', 0).write(b'theirs')"], check=True)
    """
    did = Recorded(tmp_path, code)
    names = [r.names[0].rpartition("/")[2] for r in did.records if r.kind is Kind.OPEN and not r.mode]
    assert names == ["0", "0+", "1", "1+", "2", "2+"]


def test_directories_that_were_made_are_there_after_a_loss(tmp_path: Path) -> None:
    code = """
    from pathlib import Path
    from forebay.appliance.directories import make_directory, sync_directory
    os.mkdir(f'{root}/half')  # by somebody who was stopped before it was stable
    make_directory(Path(root) / 'half' / 'made' / 'deep')
    with open(f'{root}/half/made/deep/x', 'wb', 0) as f:
        f.write(b'1')
        os.fsync(f.fileno())
    sync_directory(Path(root) / 'half' / 'made' / 'deep')
    """
    assert Recorded(tmp_path, code).outcomes() == {(("half/made/deep/x", b"1"),)}
