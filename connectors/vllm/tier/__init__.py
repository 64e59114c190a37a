"""Forebay as a secondary tier of vLLM's `TieringOffloadingSpec`: of type ``forebay``, or `ForebayTier` of this module.

`register` makes the short name known; `forebay.connectors.vllm.register`, an entry point, calls it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.connectors.vllm.tier.manager import ForebayTier

__all__ = ["ForebayTier", "register"]

_log = logging.getLogger("vllm.forebay")

_TYPE = "forebay"


def register() -> None:
    """Make the tier known to vLLM. It may come several times, and in versions that have no tiers."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        _log.debug("this vLLM has no secondary tiers")
        return
    try:
        SecondaryTierFactory.register_tier(_TYPE, "forebay.connectors.vllm.tier.manager", "ForebayTier")
    except ValueError as e:
        _log.debug("%s", e)


def __getattr__(name: str) -> Any:
    """The tier is found when it is first used: this module is imported by every vLLM that it is installed beside."""
    if name == "ForebayTier":
        from forebay.connectors.vllm.tier.manager import ForebayTier

        return ForebayTier
    raise AttributeError(f"module 'forebay.connectors.vllm.tier' has no attribute {name!r}")
