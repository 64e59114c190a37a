"""Engines with Forebay as a tier, as processes of a test."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tests.client.conftest import NodeProcess
from tests.connectors.process import EngineProcess

BY_NAME = {"type": "forebay"}
"""Made known by the entry point."""
BY_MODULE = {"type": "ForebayTier", "module_path": "forebay.connectors.vllm.tier"}


class TierProcess(EngineProcess):
    """A vLLM engine with a host pool, and a node behind it. ``extra`` may have ``tier``, the tier's settings."""

    module = "tests.connectors.tier.engine"

    def installed(self, folder: Path) -> Path:
        """What the installation of Forebay that runs the tests says of itself: its entry points, for vLLM to find."""
        here = distribution("forebay")
        about = folder / f"forebay-{here.version}.dist-info"
        about.mkdir(parents=True)
        for name in ("METADATA", "entry_points.txt"):
            (about / name).write_text(here.read_text(name) or "")
        return folder

    def transfer(self, node: NodeProcess, extra: dict[str, Any]) -> dict[str, Any]:
        extra = dict(extra)
        tier = {**BY_MODULE, "url": node.url, **extra.pop("tier", {})}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "PlainCopyTieringSpec",
                "spec_module_path": "tests.connectors.tier.plain_copies",
                "cpu_bytes_to_use": 16 << 20,
                "secondary_tiers": [tier],
                **extra,
            },
        }
