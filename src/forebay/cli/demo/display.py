"""What a person sees while the demo runs."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from forebay.cli.context import console

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Display"]


class Display:
    """Lines for what happens, and a bar for how far it is; on standard error. Without a terminal: only the lines."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("", total=None, note="starting")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, line: str) -> None:
        """Tell of something that happened."""
        self._console.print(line, soft_wrap=True)

    def advance(self, done: int, total: int, note: str) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, note=note)
