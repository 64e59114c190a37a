"""What a process under fuzz must not do: log a fault of its own, or never come to an end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Faults", "settled"]


class Faults(logging.Handler):
    """Collects log records that carry an exception: in every process of Forebay's they mean a mistake of ours.

    Also the exceptions that end a thread. `check` raises for what came since the last time.
    """

    _one: Faults | None = None

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: list[str] = []
        self._formatter = logging.Formatter("%(name)s: %(message)s")
        self._hook = threading.excepthook

    @classmethod
    def install(cls) -> Faults:
        """The one of this process; what the node logs goes nowhere else."""
        if cls._one is None:
            cls._one = cls()
            logger = logging.getLogger("forebay")
            logger.addHandler(cls._one)
            logger.propagate = False
            threading.excepthook = cls._one._thread_ended
        return cls._one

    @classmethod
    def remove(cls) -> None:
        """As it was before `install`."""
        if cls._one is not None:
            logger = logging.getLogger("forebay")
            logger.removeHandler(cls._one)
            logger.propagate = True
            threading.excepthook = cls._one._hook
            cls._one = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[0] is not None:
            self._found.append(self._formatter.format(record))

    def _thread_ended(self, args: threading.ExceptHookArgs) -> None:
        record = logging.LogRecord("thread", logging.ERROR, "", 0, "a thread ended", (), None)
        assert args.exc_value is not None
        record.exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        self._found.append(self._formatter.format(record))

    def check(self) -> None:
        """Raises AssertionError with the first fault."""
        found, self._found = self._found, []
        assert not found, found[0]


def settled(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Poll a condition; the deadline only ends a run that has failed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.0005)
