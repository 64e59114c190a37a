"""Logs of the daemon and of its target: text for people or one JSON object a line.

A line written while a request is worked on carries its id (`forebay.request_id`). Values that a program
may look for are not only put into words: ``extra=fields(method="Match", code=0)`` appends them by name.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from forebay import request_id

__all__ = ["FORMATS", "LEVELS", "fields", "set_up"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
# Libraries whose chatter would drown ours: they are heard from this level on.
_LIBRARIES = ("asyncio", "uvicorn", "opentelemetry")
_GRPC = "grpc._cython.cygrpc"
# A client's words must not look like lines of their own.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\t"}


def fields(**values: str | int | float) -> dict[str, Any]:
    """Named values of one line, for ``extra=``."""
    return {"fields": values}


def set_up(level: str, form: str, file: Path | None = None) -> None:
    """Send the process's log to standard error, or append it to a file; one of `LEVELS`, one of `FORMATS`."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        # a path or a client's words may hold what is no UTF-8
        handler = logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_JsonLines() if form == "json" else _TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger(_GRPC).addFilter(_is_a_fault)


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Not so: a client that goes away while it is answered, of which gRPC tells as of an error with a traceback."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def _named(record: logging.LogRecord) -> dict[str, Any]:
    named: dict[str, Any] = {}
    if ident := request_id.current():
        named["request_id"] = ident
    return named | getattr(record, "fields", {})


class _TextLines(logging.Formatter):
    """``time LEVEL logger: message name=value``, with a traceback below where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base class's name
        named = "".join(f" {name}={value}" for name, value in _named(record).items())
        return (super().formatMessage(record) + named).translate(_ESCAPES)


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_named(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
