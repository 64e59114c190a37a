"""What is fuzzed: functions of bytes that raise if anything is not as it has to be."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

__all__ = ["CORPUS", "HARNESSES", "Harness", "entries", "load"]

Harness = Callable[[bytes], None]

CORPUS = Path(__file__).parent / "corpus"
"""A folder a harness: inputs that reach much, and every one that ever failed (``crash-…``)."""

HARNESSES = {
    "codec_controller": "tests.fuzz.codec:controller",
    "codec_host": "tests.fuzz.codec:host",
    "authentication": "tests.fuzz.authentication:run",
    "target": "tests.fuzz.target:run",
    "initiator": "tests.fuzz.initiator:run",
    "rpc_requests": "tests.fuzz.rpc:requests",
    "decoders": "tests.fuzz.decoders:run",
    "rpc_answers": "tests.fuzz.rpc:answers",
    "control": "tests.fuzz.control:run",
    "metadata": "tests.fuzz.metadata:run",
}
"""Where each one is, by the name of its corpus."""


def load(name: str) -> Harness:
    """The harness, imported."""
    module, _, function = HARNESSES[name].partition(":")
    found: Harness = getattr(importlib.import_module(module), function)
    return found


def entries(name: str) -> list[Path]:
    """The corpus of a harness."""
    return sorted((CORPUS / name).iterdir()) if (CORPUS / name).is_dir() else []
