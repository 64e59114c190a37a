"""JSON values one after the other on a byte stream, nothing between them: how SPDK frames JSON-RPC, both ways."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from forebay.errors import ProtocolError

__all__ = ["JsonStream"]

_SPACE: Final = " \t\r\n\0"
_LOOK_BYTES: Final = 64 << 10
_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
"""Strings, the last one perhaps without its end, and brackets outside of strings."""


class JsonStream:
    """Splits a byte stream into JSON objects and arrays; holds the bytes of one that has not ended."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes = max_message_bytes
        self._text = ""  # begins with a value that has not ended
        self._pending = bytearray()  # what came behind it
        self._characters = getincrementaldecoder("utf-8")("replace")  # holds one that is cut
        self._decoder = json.JSONDecoder(parse_constant=_no_constant)

    @property
    def unfinished(self) -> bool:
        """Whether a value has begun that has not ended."""
        return bool(self._pending or self._text)

    def feed(self, data: bytes) -> Iterator[Any]:
        """The values that ``data`` completes, one by one: iterate to the end.

        Raises `ProtocolError` at what is no JSON object or array and cannot become one, is nested too deeply or too
        long; the stream is of no use then.
        """
        self._pending += data
        if len(self._text) + len(self._pending) > self._max_bytes:
            raise ProtocolError("a message is too long", field="message", limit=self._max_bytes)
        # A value ends with a bracket: looking only then keeps a long one from being parsed once per piece. But where
        # one follows the other without a pause no piece may end with it: looked at whenever as much again has come.
        ends = data.rstrip(_SPACE.encode()).endswith((b"}", b"]"))
        if not ends and len(self._pending) < max(_LOOK_BYTES, len(self._text)):
            if not self._text:
                self._pending = self._pending.lstrip(_SPACE.encode())  # no value begins with that
                _check_start(self._pending[:1].decode("utf-8", "replace"))
            return
        text, at = self._text + self._characters.decode(self._pending), 0
        self._pending.clear()
        try:
            while (at := _skip_space(text, at)) < len(text):
                _check_start(text[at])
                try:
                    value, at = self._decoder.raw_decode(text, at)
                except RecursionError:
                    raise ProtocolError("a message is nested too deeply", field="message") from None
                except ValueError as error:
                    if not _is_open(text, at):
                        raise ProtocolError(f"a message is no JSON: {error}", field="message") from error
                    break
                yield value
        finally:
            self._text = text[at:]


def _check_start(text: str) -> None:
    if text and text[0] not in "{[":
        raise ProtocolError("a message is no JSON object", field="message")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _is_open(text: str, at: int) -> bool:
    """Whether the JSON value at ``at`` may still be completed: a bracket is open."""
    depth = 0
    for token in _TOKENS.finditer(text, at):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token.group()[0], 0)
        if depth <= 0:
            return False
    return True
