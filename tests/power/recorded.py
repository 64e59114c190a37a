"""One recorded run, and the states that power losses in the middle of it leave."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.power.disk import Disk, Kind, copy_sparse, read_log
from tests.power.recording import environment

__all__ = ["Cut", "Recording", "State"]

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Cut:
    """A power loss: after how many records of the log, and the seed that says what is lost."""

    record: int
    seed: int


@dataclass(frozen=True, slots=True)
class State:
    """What a loss left in ``folder``: ``marks`` had happened, ``lost`` counts what became of what was not stable."""

    cut: Cut
    folder: Path
    marks: list[str]
    lost: Counter[str]


class Recording:
    """A command that was run under the recorder with all its changes below ``root``.

    That is a new directory within ``folder``, or a ``root`` that is there: then what it holds is stable, as after the
    start of a machine.
    """

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.root = root or folder / "root"
        self.log = folder / "log"
        self._folder = folder
        self._restored = 0
        self._before: Path | None = None
        self._inodes: dict[str, int] = {}
        if root is None:
            self.root.mkdir()
        else:
            self._before = folder / "before"
            for path in [root, *sorted(root.rglob("*"))]:
                name = path.relative_to(root)
                self._inodes[str(name)] = path.stat().st_ino
                if path.is_dir():
                    (self._before / name).mkdir()
                else:
                    copy_sparse(path, self._before / name)

    def environment(self) -> dict[str, str]:
        """Variables for the processes that are to be recorded."""
        return environment(self.log, self.root)

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """Run a command, which must succeed."""
        done = subprocess.run(
            command, cwd=_ROOT, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def marks(self) -> list[tuple[int, str]]:
        """Every mark and how many records come before the end of it."""
        return [(i, r.text) for i, r in enumerate(read_log(self.log), 1) if r.kind is Kind.MARK]

    def records(self) -> int:
        """How many there are."""
        return sum(1 for _ in read_log(self.log))

    def anywhere(self, count: int, chance: random.Random, after: int = 0) -> list[Cut]:
        """Losses at any moments after that many records."""
        total = self.records()
        return [Cut(chance.randint(after, total), chance.getrandbits(32)) for _ in range(count)]

    def at_mark(self, text: str, count: int, chance: random.Random) -> list[Cut]:
        """Losses just when a mark was made, the first time and (for more than one) others."""
        places = [place for place, mark in self.marks() if mark == text]
        chosen = places[:1] + chance.choices(places, k=count - 1) if places else []
        return [Cut(place, chance.getrandbits(32)) for place in chosen]

    def lose(self, cuts: Sequence[Cut], honours: Callable[[str], bool] = lambda path: True) -> Iterator[State]:
        """The states, in the order of the log; ``honours`` as in `Disk`."""
        home, disk = self._disk(honours)
        marks: list[str] = []
        at = 0
        log = read_log(self.log)
        for number, cut in enumerate(sorted(cuts, key=lambda cut: cut.record)):
            while at < cut.record:
                record = next(log)
                disk.apply(record)
                at += 1
                if record.kind is Kind.MARK:
                    marks.append(record.text)
            folder = home / str(number)
            yield State(cut, folder, list(marks), disk.lose_power(folder, cut.seed))

    def keep(self) -> Path:
        """All that the run left, without any loss."""
        home, disk = self._disk(lambda path: True)
        for record in read_log(self.log):
            disk.apply(record)
        disk.keep_power(home / "root")
        return home / "root"

    def _disk(self, honours: Callable[[str], bool]) -> tuple[Path, Disk]:
        self._restored += 1
        home = self._folder / f"restored{self._restored}"
        (home / "stable").mkdir(parents=True)
        disk = Disk(self.root, home / "stable", honours)
        if self._before is not None:
            disk.adopt(self._before, self._inodes)
        return home, disk
