"""Bars for long work, on standard error; without a terminal there are none."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from forebay.cli.context import console

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = ["Bar"]


class Bar:
    """Shows how far work on many bytes is, how fast, and for how long yet. ``what`` names it, a note says more."""

    def __init__(self, what: str, note: str = "") -> None:
        self._what = what
        self._note = note
        self._console = console(stderr=True)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *self._columns(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
                transient=True,
            )
            self._progress.add_task(self._what, total=None, note=self._note)
            self._progress.start()
        return self

    def _columns(self) -> Sequence[ProgressColumn]:
        """What stands between the bar and the note."""
        from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

        return DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done: int, total: int, note: str = "") -> None:
        """Set how far it is; a ``total`` of 0 is not known."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total or None, note=note)
