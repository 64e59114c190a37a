"""Methods that vLLM calls and that must not end it: an exception from a connector or a tier ends the whole engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["shielded"]

_log = logging.getLogger("vllm.forebay")

_F = TypeVar("_F", bound=Callable[..., Any])


def shielded(default: Callable[[], Any]) -> Callable[[_F], _F]:
    """A method that fails answers ``default()`` instead, and says so: the engine must live on without storage."""

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                _log.exception("%s failed; the engine goes on without what it would have done", method.__name__)
                return default()

        return call  # type: ignore[return-value]

    return decorate
