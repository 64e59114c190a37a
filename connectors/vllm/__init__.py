"""vLLM's connector: ``kv_connector`` is ForebayConnector, ``kv_connector_module_path`` is this package.

`register` is the entry point of the group ``vllm.general_plugins`` that makes connector and tier known by their names.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from forebay.connectors.vllm import tier

if TYPE_CHECKING:
    from forebay.connectors.vllm.connector import ForebayConnector

__all__ = ["ForebayConnector", "register"]

_log = logging.getLogger("vllm.forebay")

_NAME = "ForebayConnector"


def register() -> None:
    """Make connector and tier known to vLLM. It may come several times, and in versions that have neither."""
    _register_connector()
    tier.register()


def _register_connector() -> None:
    """By its name, by which alone vLLM's `MultiConnector` finds whose statistics it has."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        _log.debug("this vLLM has no connectors")
        return
    try:
        KVConnectorFactory.register_connector(_NAME, __name__, _NAME)
    except ValueError as e:
        _log.debug("%s", e)


def __getattr__(name: str) -> Any:
    """The connector is found when it is first used, so that the settings can be read where vLLM is not installed.

    Raises `ConfigInvalid` for a vLLM that lacks what it is built on.
    """
    if name == _NAME:
        from forebay.connectors.vllm.versions import imported

        connector = imported("forebay.connectors.vllm.connector").ForebayConnector
        _register_connector()
        return connector
    raise AttributeError(f"module 'forebay.connectors.vllm' has no attribute {name!r}")
