"""Keys as people write and read them: text, or hexadecimal for bytes that are no text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from forebay.errors import InvalidArgument, KeySize
from forebay.ids import MAX_KEY_BYTES

__all__ = ["hex_option", "key_fields", "parse_key", "parse_keys", "said", "show_key"]

hex_option = click.option("--hex", "as_hex", is_flag=True, help="Keys are given in hexadecimal, with or without 0x.")


def parse_key(text: str, as_hex: bool) -> bytes:
    """The key that an argument names. Raises `InvalidArgument` or `KeySize`."""
    try:
        key = bytes.fromhex(text.removeprefix("0x")) if as_hex else text.encode("utf-8", "surrogateescape")
    except ValueError as e:
        raise InvalidArgument(f"{text!r} is not hexadecimal", field="key") from e
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise KeySize(f"a key of {len(key)} bytes", field="key", limit=f"1 to {MAX_KEY_BYTES}")
    return key


def parse_keys(texts: tuple[str, ...], as_hex: bool) -> list[bytes]:
    """`parse_key` of each."""
    return [parse_key(text, as_hex) for text in texts]


def show_key(key: bytes) -> str:
    """The key's text if it is printable, else ``0x`` and its bytes; so is text that itself begins with ``0x``."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "0x" + key.hex()
    return text if text.isprintable() and not text.startswith("0x") else "0x" + key.hex()


def key_fields(key: bytes) -> dict[str, Any]:
    """How ``--json`` names a key: ``key`` (text, or null where it is none) and ``key_hex``."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    return {"key": text if text.isprintable() and text else None, "key_hex": key.hex()}


def said(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a writer said of a block, for people and JSON: bytes in hexadecimal."""
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in about.items()}
