"""Forebay: KV cache blocks of LLM inference on flash, read straight from an NVMe-oF target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.client import connect

__all__ = ["__version__", "connect"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    """`connect` is found in `forebay.client` when it is first used, so that importing ``forebay`` stays light."""
    if name == "connect":
        from forebay.client import connect

        return connect
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
