"""What a person sees while the demo runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.cli.progress import Bar

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = ["Display"]


class Display(Bar):
    """Lines for what happens, and a bar of requests; on standard error. Without a terminal: only the lines."""

    def __init__(self) -> None:
        super().__init__("requests", "starting")

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import MofNCompleteColumn, TimeElapsedColumn

        return MofNCompleteColumn(), TimeElapsedColumn()

    def say(self, line: str) -> None:
        """Tell of something that happened."""
        self._console.print(line, soft_wrap=True)
