"""Threads that begin, or say in one of our errors that the process may have no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.errors import Unavailable

__all__ = ["begin"]


def begin(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that does not keep the process from its end. Raises `Unavailable`."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as e:
        raise Unavailable(f"no thread can be started: {e}") from e
    return thread
