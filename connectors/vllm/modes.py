"""The connector's mode, which an operator can change while the engine runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast, get_args

from forebay.clock import Clock
from forebay.connectors.vllm.settings import Mode

__all__ = ["ModeSwitch"]

_log = logging.getLogger("vllm.forebay")

_LOOK_MS = 1_000
"""How often the file is read."""


class ModeSwitch:
    """``initial``, or what stands in the file ``path`` at the moment, where there is one."""

    def __init__(self, initial: Mode, path: str, clock: Clock) -> None:
        self._initial = initial
        self._path = Path(path).expanduser() if path else None
        self._clock = clock
        self._mode = initial
        self._odd = ""
        self._next_look_ms = 0

    @property
    def now(self) -> Mode:
        """The mode of the moment. A file that cannot be read or says something else changes nothing."""
        if self._path is not None and self._clock.monotonic_ms() >= self._next_look_ms:
            self._next_look_ms = self._clock.monotonic_ms() + _LOOK_MS
            self._look(self._path)
        return self._mode

    def _look(self, path: Path) -> None:
        try:
            word = path.read_text().strip()
        except FileNotFoundError:
            word = self._initial
        except (OSError, UnicodeDecodeError) as e:
            word = f"unreadable ({e})"
        if word not in get_args(Mode):
            if word != self._odd:
                _log.warning("the mode in %s is %r, and stays %s: it takes %s", path, word, self._mode, get_args(Mode))
            self._odd = word
            return
        self._odd = ""
        if word != self._mode:
            _log.warning("mode %s, was %s", word, self._mode)
            self._mode = cast(Mode, word)
