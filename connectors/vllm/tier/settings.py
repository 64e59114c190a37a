"""Settings of the tier: what its entry of ``secondary_tiers`` may hold beside ``type`` and ``module_path``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from forebay.connectors.vllm.settings import Settings
from forebay.errors import ConfigInvalid

__all__ = ["TierSettings"]

_SHARED = (
    "url",
    "namespace",
    "token_file",
    "generation",
    "scope",
    "revision",
    "mode",
    "mode_file",
    "guard",
    "prefill_tokens_per_s",
    "probe_timeout_ms",
    "load_timeout_ms",
    "save_timeout_ms",
    "untested_engine",
)
"""Those that mean the same for the connector."""
_LOCALITIES = ("", "LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings, each with a good default.

    Attributes:
        connector: those that the tier has in common with the connector.
        pending_bytes: how much of the host pool may wait to be stored; 0 for half of it. More is not stored.
        enable_kv_events: tell what is stored and removed, where the engine publishes KV events at all.
        locality: of the node's storage in these events and for requests that choose tiers: ``LOCAL``, ``REMOTE`` or
            nothing.
    """

    connector: Settings
    pending_bytes: int = 0
    enable_kv_events: bool = False
    locality: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Check what a user wrote. Raises `ConfigInvalid` naming the setting."""
        own: dict[str, type] = {"pending_bytes": int, "enable_kv_events": bool, "locality": str}
        for name, value in config.items():
            if name in own:
                if type(value) is not own[name]:
                    raise ConfigInvalid(f"{name} is {value!r}", field=name, limit=own[name].__name__)
            elif name not in _SHARED:
                known = ", ".join(sorted([*_SHARED, *own]))
                raise ConfigInvalid(f"{name!r} is no setting of this tier", field=name, limit=known)
        settings = cls(
            Settings.from_config({name: config[name] for name in _SHARED if name in config}),
            **{name: config[name] for name in own if name in config},
        )
        if settings.pending_bytes < 0:
            raise ConfigInvalid(f"pending_bytes is {settings.pending_bytes}", field="pending_bytes", limit="at least 0")
        if settings.locality not in _LOCALITIES:
            raise ConfigInvalid(f"locality is {settings.locality!r}", field="locality", limit="LOCAL, REMOTE or empty")
        return settings
