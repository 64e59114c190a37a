"""The id of the request that is being worked on: from the client through the daemon to the target, in every log line.

A client names its request (``Context.request_id``, the header ``x-request-id``) or gets an id made up. It goes with the
tasks that the work starts, not with threads.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from forebay.errors import InvalidArgument

__all__ = ["HEADER", "MAX_CHARACTERS", "bind", "current", "follow", "request"]

HEADER = "x-request-id"
MAX_CHARACTERS = 64
_ALLOWED = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_CHARACTERS}}}")
_current: ContextVar[str] = ContextVar("forebay_request_id", default="")


def bind(given: str) -> None:
    """Work from here on under the id that a client gave; under a fresh one if that is empty or not fit for a log.

    For the edge of a server, where a task is a call's own.
    """
    _current.set(given if _ALLOWED.fullmatch(given) else _fresh())


def follow(given: str) -> None:
    """Work from here on under the id that the node's other process passed on; under none if it passed none."""
    _current.set(given if _ALLOWED.fullmatch(given) else "")


def current() -> str:
    """The id, empty outside of any request."""
    return _current.get()


@contextmanager
def request(given: str = "") -> Iterator[str]:
    """All calls made inside are of one request: of the id given, else of the one around it, else of a fresh one.

    Yields the id. Raises `InvalidArgument` for one that does not fit into a log line.
    """
    if given and not _ALLOWED.fullmatch(given):
        raise InvalidArgument(
            f"{given[:80]!r} is not a request id",
            field="request_id",
            limit=f"1 to {MAX_CHARACTERS} letters, digits, '.', '_', ':', '-'",
        )
    token = _current.set(given or _current.get() or _fresh())
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def _fresh() -> str:
    return secrets.token_hex(8)
