"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "fail", "ok", "warn"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do unless it is well."""

    check: str
    level: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


def ok(check: str, what: str) -> Finding:
    """It is well."""
    return Finding(check, "ok", what)


def warn(check: str, what: str, fix: str) -> Finding:
    """It works, and could be better or safer."""
    return Finding(check, "warn", what, fix)


def fail(check: str, what: str, fix: str) -> Finding:
    """It does not work until it is fixed."""
    return Finding(check, "fail", what, fix)
