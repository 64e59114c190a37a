"""Which vLLM this release was tested with: its interfaces change between minor versions."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import vllm

from forebay.connectors.vllm.settings import Settings
from forebay.errors import ConfigInvalid

__all__ = ["TESTED_VERSIONS", "check_version", "imported"]

_log = logging.getLogger("vllm.forebay")

TESTED_VERSIONS = ("0.32", "0.33")
"""Minor versions; docs/engines/vllm.md says what was run with each."""


def imported(module: str) -> ModuleType:
    """A module of ours, built on vLLM. Raises `ConfigInvalid` where this vLLM has not what it takes from it."""
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as e:
        if vllm.__version__.startswith(tuple(f"{version}." for version in TESTED_VERSIONS)):
            raise  # a part of the installation is missing, and the error names it
        raise ConfigInvalid(
            f"vLLM {vllm.__version__} has not what this release of Forebay works with ({e}): install one of those that "
            f"it was tested with ({', '.join(TESTED_VERSIONS)})",
            field="vllm",
        ) from e


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
