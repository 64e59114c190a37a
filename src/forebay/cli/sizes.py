"""Sizes and times as people write and read them."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from forebay.errors import ConfigInvalid

__all__ = ["duration", "format_duration", "format_size", "format_time", "size"]

_MOST = 1 << 62  # what a node takes of anything


def size(text: str) -> int:
    """A click parameter's type: bytes of ``64MiB``, ``1.5GiB``, ``10GB`` or a plain number, as in the configuration."""
    from forebay.appliance.settings import parse_size_bytes

    try:
        return _bounded(text, parse_size_bytes(text))
    except ConfigInvalid as e:
        raise click.BadParameter(f"{text!r} is not a size: write 64MiB, 10GB or a number of bytes") from e


def duration(text: str) -> int:
    """A click parameter's type: milliseconds of ``500ms``, ``10s``, ``2m``, ``1h``, ``7d``, or ``0`` for none."""
    from forebay.appliance.settings import parse_duration_ms

    try:
        return 0 if text == "0" else _bounded(text, parse_duration_ms(text))
    except ConfigInvalid as e:
        raise click.BadParameter(f"{text!r} is not a duration: write 30s, 10m, 1h or 7d, or 0 for none") from e


def _bounded(text: str, count: int) -> int:
    if count > _MOST:
        raise click.BadParameter(f"{text!r} is more than any node takes (2^62 bytes or milliseconds)")
    return count


def format_size(count_bytes: float) -> str:
    """``1.5 MiB``: binary units, three digits at most before the point."""
    value, unit = float(count_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def format_duration(count_ms: float) -> str:
    """``350 ms``, ``4.2 s``, ``3 min 5 s``, ``2 d 4 h``."""
    if count_ms < 999.5:
        return f"{count_ms:.3g} ms"
    seconds = count_ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit_s, unit, below_s, below in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // below_s} {below}"
    raise AssertionError(seconds)


def format_time(unix_ms: int) -> str:
    """UTC to the second, as ISO 8601 writes it; empty for 0."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if unix_ms else ""
