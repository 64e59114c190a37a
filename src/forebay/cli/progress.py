"""A bar for work on many bytes, on standard error; without a terminal there is none."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from forebay.cli.context import console

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar"]


class Bar:
    """Shows how far it is, how fast, and for how long yet. ``what`` names the work."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = console(stderr=True)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
                transient=True,
            )
            self._progress.add_task(self._what, total=None, note="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done_bytes: int, total_bytes: int, note: str = "") -> None:
        """Set how far it is."""
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=done_bytes, total=total_bytes or None, note=note)
