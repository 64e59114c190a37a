"""What may be on a disk after a power loss: a model of files and directories, fed by the log of `shims/recorder.c`.

What it holds stable is what POSIX promises, no more:

* fsync and fdatasync of a file make stable what was written to it, its size included, before they began; O_DSYNC does
  that for each write. Nothing else does: not close, not rename, not O_DIRECT (a drive has a cache), not
  sync_file_range.
* fsync of a directory makes stable the entries that were made, renamed and removed in it before. Fsync of a file says
  nothing of its entry (ext4 does more than POSIX here), and that of a directory nothing of the content of its files.
* A rename is one step: both of its names change, or neither.

Whatever else was done may be there or not, file by file and directory by directory. The seed chooses for each: nothing,
everything, a part from the beginning, or any part at all; a write that is there may be so in part, by sectors of 512
bytes (a drive writes one of those whole or not at all). What is there was done in order: a later write is never
overwritten by an earlier one, and a size without its bytes reads as zeros (ext4 and XFS show no old blocks). Entries
stay in order within a directory for half of the seeds (as ext4 and XFS journal them), for the others they do not (as
POSIX allows). Space that fallocate reserved is not modelled, only what a range reads as.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

__all__ = ["Disk", "Kind", "NotModelled", "Record", "append_mark", "copy_sparse", "read_log"]

SECTOR_BYTES = 512
_HEADER = struct.Struct("<IIQqqIIII")
_PUNCH_HOLE, _ZERO_RANGE, _KEEP_SIZE = 0x02, 0x10, 0x01


class NotModelled(Exception):
    """The log has something that this model cannot follow: no state rebuilt from it would mean anything."""


class Kind(IntEnum):
    """As in `recorder.c`."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    FALLOCATE = 4
    FLUSH_BEGIN = 5
    FLUSH_END = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    MARK = 11
    UNKNOWN = 12


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log; which fields mean something depends on its kind, see `recorder.c`."""

    kind: Kind
    file: int
    a: int
    b: int
    mode: int
    names: tuple[str, ...]
    data: bytes

    @property
    def text(self) -> str:
        """Of a mark."""
        return self.names[0]


def read_log(path: Path) -> Iterator[Record]:
    """All records, in order; one that was cut short by a kill ends the log."""
    with path.open("rb") as file:
        while len(head := file.read(_HEADER.size)) == _HEADER.size:
            kind, _pid, inode, a, b, mode, names, data, _ = _HEADER.unpack(head)
            paths, content = file.read(names), file.read(data)
            if len(content) < data:
                return
            yield Record(Kind(kind), inode, a, b, mode, tuple(paths.decode().split("\0")), content)


def append_mark(path: Path, text: str) -> None:
    """A line of one's own, from a process that is not recorded, behind all that it has heard of."""
    name = text.encode()
    with path.open("ab", buffering=0) as file:
        file.write(_HEADER.pack(Kind.MARK, os.getpid(), 0, 0, 0, 0, len(name), 0, 0) + name)


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of a file's bytes, not yet stable."""

    number: int
    record: Record


@dataclass(slots=True, eq=False)
class _File:
    content: Path
    """Its stable bytes."""
    pending: list[_Change] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Directory:
    stable: dict[str, _Node] = field(default_factory=dict)
    now: dict[str, _Node] = field(default_factory=dict)
    pending: list[tuple[int, _Entries]] = field(default_factory=list)
    """Changes, not yet stable, and their numbers."""


_Node = _File | _Directory
_Entries = dict[str, _Node | None]
"""What becomes of each name; None: it goes."""


def _apply_entries(entries: dict[str, _Node], change: _Entries) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """The directory ``root``; each `apply` does one record of the log.

    It is empty when the log begins, or all that is in it then is stable: see `adopt`. ``scratch`` is for the stable
    bytes. ``honours`` says of which paths a flush is believed: where it is not, the drive lies, and a test that checks
    anything must fail. Directories end with a slash there.
    """

    def __init__(self, root: Path, scratch: Path, honours: Callable[[str], bool] = lambda path: True) -> None:
        self._scratch = scratch
        self._honours = honours
        self._root = _Directory()
        self._at = str(root)
        self._by_inode: dict[int, _Node] = {}
        self._paths: dict[int, str] = {}
        self._number = 0
        self._flushes: dict[int, int] = {}
        self._files = 0
        self.counts: Counter[str] = Counter()
        """What was seen: records by kind."""

    def adopt(self, copy: Path, inodes: dict[str, int]) -> None:
        """Begin with a copy of what the root held: ``inodes`` are the numbers that its files (by relative path) had."""
        for path in sorted(copy.rglob("*")):
            name = str(path.relative_to(copy))
            directory, last = self._parent(f"{self._at}/{name}")
            if path.is_dir():
                node: _Node = _Directory()
            else:
                node = self._new_file()
                copy_sparse(path, node.content)
            directory.stable[last] = directory.now[last] = node
            self._by_inode[inodes[name]] = node
            self._paths[inodes[name]] = f"{self._at}/{name}"

    def _new_file(self) -> _File:
        self._files += 1
        made = _File(self._scratch / f"{self._files}")
        made.content.touch()
        return made

    # ------------------------------------------------------------------------------------------------ following

    def apply(self, record: Record) -> None:
        """Do what a record says. Raises `NotModelled`."""
        self._number += 1
        self.counts[record.kind.name.lower()] += 1
        match record.kind:
            case Kind.OPEN:
                self._open(record)
            case Kind.WRITE | Kind.TRUNCATE | Kind.FALLOCATE:
                self._file(record.file).pending.append(_Change(self._number, record))
            case Kind.FLUSH_BEGIN:
                self._flushes[record.a] = self._number
            case Kind.FLUSH_END:
                self._flush(record.file, self._flushes.pop(record.a))
            case Kind.RENAME:
                self._rename(*record.names)
            case Kind.UNLINK | Kind.RMDIR:
                directory, name = self._parent(record.names[0])
                self._change(directory, {name: None})
            case Kind.MKDIR:
                directory, name = self._parent(record.names[0])
                self._know(record, made := _Directory())
                self._change(directory, {name: made})
            case Kind.UNKNOWN:
                raise NotModelled(record.text)

    def _know(self, record: Record, node: _Node) -> None:
        self._by_inode[record.file] = node
        self._paths[record.file] = record.names[0]

    def _parent(self, path: str) -> tuple[_Directory, str]:
        above, _, name = path.rpartition("/")
        node = self._look_up(above)
        if not isinstance(node, _Directory):
            raise NotModelled(f"{path} lies in no directory that the log knows")
        return node, name

    def _look_up(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for name in filter(None, path.removeprefix(self._at).split("/")):
            node = node.now.get(name) if isinstance(node, _Directory) else None
        return node

    def _file(self, inode: int) -> _File:
        node = self._by_inode.get(inode)
        if not isinstance(node, _File):
            raise NotModelled(f"inode {inode} is no file that the log knows")
        return node

    def _change(self, directory: _Directory, change: _Entries) -> None:
        _apply_entries(directory.now, change)
        directory.pending.append((self._number, change))

    def _open(self, record: Record) -> None:
        found = self._look_up(record.names[0])
        if record.mode:
            if found is None:
                raise NotModelled(f"directory {record.names[0]} was not made in the log")
            self._know(record, found)
            return
        if found is None:
            found = self._new_file()
            directory, name = self._parent(record.names[0])
            self._change(directory, {name: found})
        elif record.a & os.O_TRUNC and isinstance(found, _File):
            empty = Record(Kind.TRUNCATE, record.file, 0, 0, 0, ("",), b"")
            found.pending.append(_Change(self._number, empty))
        self._know(record, found)

    def _rename(self, one: str, other: str) -> None:
        (directory, name), (target, new_name) = self._parent(one), self._parent(other)
        node = directory.now.get(name)
        if node is None or directory is not target:
            raise NotModelled(f"rename of {one} to {other}")
        self._change(directory, {name: None, new_name: node})

    def _flush(self, inode: int, began: int) -> None:
        node = self._by_inode.get(inode)
        path = self._paths.get(inode, "")
        if node is None or not self._honours(path + "/" if isinstance(node, _Directory) else path):
            return
        if isinstance(node, _Directory):
            for number, change in node.pending:
                if number < began:
                    _apply_entries(node.stable, change)
            node.pending = [one for one in node.pending if one[0] > began]
            return
        stable = [change.record for change in node.pending if change.number < began]
        if stable:
            handle = os.open(node.content, os.O_RDWR)
            try:
                for record in stable:
                    _perform(handle, record)
            finally:
                os.close(handle)
        node.pending = [change for change in node.pending if change.number > began]

    # ------------------------------------------------------------------------------------------------ losing power

    def lose_power(self, out: Path, seed: int) -> Counter[str]:
        """Write to ``out`` what may be left of it; how many changes were there not at all, in part, or whole."""
        loss = _Loss(random.Random(seed), ordered=seed % 2 == 0)
        self._restore(self._root, out, loss)
        return loss.counts

    def keep_power(self, out: Path) -> None:
        """Write to ``out`` all of it, as whoever reads the files sees it."""
        self._restore(self._root, out, _NoLoss())

    def _restore(self, directory: _Directory, out: Path, loss: _NoLoss) -> None:
        out.mkdir(mode=0o700)
        entries = dict(directory.stable)
        for change in loss.entries([change for _, change in directory.pending]):
            _apply_entries(entries, change)
        for name, node in entries.items():
            if isinstance(node, _Directory):
                self._restore(node, out / name, loss)
                continue
            copy_sparse(node.content, out / name)
            if node.pending:
                handle = os.open(out / name, os.O_RDWR)
                try:
                    for record in loss.changes([change.record for change in node.pending]):
                        _perform(handle, record)
                finally:
                    os.close(handle)


class _NoLoss:
    """What is kept of changes that are not stable: all."""

    def entries(self, pending: list[_Entries]) -> Iterable[_Entries]:
        """Of a directory's."""
        return pending

    def changes(self, pending: list[Record]) -> Iterable[Record]:
        """Of a file's."""
        return pending


class _Loss(_NoLoss):
    """A part, by chance; ``ordered``: directories keep their order. ``counts`` says what became of them."""

    def __init__(self, chance: random.Random, *, ordered: bool) -> None:
        self._chance = chance
        self._ordered = ordered
        self.counts: Counter[str] = Counter()

    def entries(self, pending: list[_Entries]) -> Iterable[_Entries]:
        kept = self._choose(len(pending), ordered=self._ordered)
        self.counts["entries_lost"] += len(pending) - len(kept)
        self.counts["entries_kept"] += len(kept)
        return [pending[i] for i in kept]

    def changes(self, pending: list[Record]) -> Iterable[Record]:
        kept = self._choose(len(pending), ordered=False)
        self.counts["changes_lost"] += len(pending) - len(kept)
        rate = self._chance.choice((0.0, 0.3))
        for i in kept:
            # whoever was the last to write was the likeliest to be cut short
            if pending[i].kind is Kind.WRITE and self._chance.random() < (0.5 if i == kept[-1] else rate):
                self.counts["changes_torn"] += 1
                yield from _torn(pending[i], self._chance)
            else:
                self.counts["changes_kept"] += 1
                yield pending[i]

    def _choose(self, count: int, *, ordered: bool) -> list[int]:
        """Which of ``count`` changes are there."""
        chance = self._chance
        way = chance.random()
        if way < 0.25:
            return []
        if way < 0.4:
            return list(range(count))
        if ordered or way < 0.65:
            return list(range(chance.randint(0, count)))
        share = chance.choice((0.1, 0.5, 0.9))
        return [i for i in range(count) if chance.random() < share]


def _torn(record: Record, chance: random.Random) -> Iterator[Record]:
    """Some of the sectors that a write touches: the first ones, or any."""
    end_bytes = record.a + len(record.data)
    sectors: list[int] = list(range(record.a // SECTOR_BYTES, -(-end_bytes // SECTOR_BYTES)))
    if chance.random() < 0.5:
        sectors = sectors[: chance.randint(0, len(sectors) - 1)]
    else:
        sectors = [s for s in sectors if chance.random() < 0.5]
    for sector in sectors:
        start = max(record.a, sector * SECTOR_BYTES)
        stop = min(end_bytes, (sector + 1) * SECTOR_BYTES)
        yield replace(record, a=start, data=record.data[start - record.a : stop - record.a])


def _perform(handle: int, record: Record) -> None:
    """One change, whole."""
    if record.kind is Kind.WRITE:
        view, at = memoryview(record.data), record.a
        while view:
            done = os.pwrite(handle, view, at)
            view, at = view[done:], at + done
    elif record.kind is Kind.TRUNCATE:
        os.ftruncate(handle, record.a)
    else:
        end = record.a + record.b
        size = os.fstat(handle).st_size
        if record.mode & (_PUNCH_HOLE | _ZERO_RANGE):
            if inside := min(end, size) - record.a:
                _zero(handle, record.a, inside)
        elif record.mode & ~_KEEP_SIZE:
            raise NotModelled(f"fallocate with mode {record.mode}")
        if not record.mode & _KEEP_SIZE and end > size:
            os.ftruncate(handle, end)


def _zero(handle: int, offset_bytes: int, length_bytes: int) -> None:
    if length_bytes > 0:
        with mmap.mmap(handle, 0) as view:
            view.madvise(mmap.MADV_REMOVE, offset_bytes, length_bytes)  # a hole, as fallocate would punch it


def copy_sparse(source: Path, out: Path) -> None:
    """Copy a file, holes as holes."""
    with source.open("rb") as file, out.open("wb") as copy:
        one, other = file.fileno(), copy.fileno()
        size, at = os.fstat(one).st_size, 0
        copy.truncate(size)
        with suppress(OSError):  # ENXIO: only a hole is left
            while at < size:
                at = os.lseek(one, at, os.SEEK_DATA)
                end = os.lseek(one, at, os.SEEK_HOLE)
                while at < end:
                    at += os.copy_file_range(one, other, end - at, at, at)
