"""vLLM's connector: ``kv_connector`` is ForebayConnector, ``kv_connector_module_path`` is this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.connectors.vllm.connector import ForebayConnector

__all__ = ["ForebayConnector"]


def __getattr__(name: str) -> Any:
    """The connector is found when it is first used, so that the settings can be read where vLLM is not installed.

    Raises `ConfigInvalid` for a vLLM that lacks what it is built on.
    """
    if name == "ForebayConnector":
        from forebay.connectors.vllm.versions import imported

        return imported("forebay.connectors.vllm.connector").ForebayConnector
    raise AttributeError(f"module 'forebay.connectors.vllm' has no attribute {name!r}")
