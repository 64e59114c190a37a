"""Which vLLM this release was tested with: its interfaces change between minor versions."""

from __future__ import annotations

import logging

import vllm

from forebay.connectors.vllm.settings import Settings
from forebay.errors import ConfigInvalid

__all__ = ["TESTED_VERSIONS", "check_version"]

_log = logging.getLogger("vllm.forebay")

TESTED_VERSIONS = ("0.32",)
"""Minor versions."""


def check_version(settings: Settings) -> None:
    """Refuse another version of vLLM, or warn where its user wants it. Raises `ConfigInvalid`."""
    if ".".join(vllm.__version__.split(".")[:2]) in TESTED_VERSIONS:
        return
    message = (
        f"vLLM {vllm.__version__} is not one of those that this release was tested with ({', '.join(TESTED_VERSIONS)})"
    )
    if not settings.untested_engine:
        raise ConfigInvalid(
            f"{message}: install one of them, or set untested_engine",
            field="untested_engine",
        )
    _log.warning("%s", message)
