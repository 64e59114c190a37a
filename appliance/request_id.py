"""The id of the request that is being worked on: from the client through the daemon to the target, in every log line.

A client names its request (``Context.request_id``, the header ``x-request-id``) or gets an id made up. It is bound at
the edge, by the task that a call has to itself, and goes with the tasks that the work starts.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

__all__ = ["HEADER", "MAX_CHARACTERS", "bind", "current", "follow"]

HEADER = "x-request-id"
MAX_CHARACTERS = 64
_ALLOWED = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_CHARACTERS}}}")
_current: ContextVar[str] = ContextVar("forebay_request_id", default="")


def bind(given: str) -> None:
    """Work from here on under the id that a client gave; under a fresh one if that is empty or not fit for a log."""
    _current.set(given if _ALLOWED.fullmatch(given) else secrets.token_hex(8))


def follow(given: str) -> None:
    """Work from here on under the id that the node's other process passed on; under none if it passed none."""
    _current.set(given if _ALLOWED.fullmatch(given) else "")


def current() -> str:
    """The id, empty outside of any request."""
    return _current.get()
