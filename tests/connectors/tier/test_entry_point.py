"""vLLM finds the tier where Forebay is installed, and nothing else that is found there is the worse for it."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest


def test_it_is_declared_and_does_no_harm_where_there_are_no_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = entry_points(group="vllm.general_plugins", name="forebay")
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.factory", None)  # as in a version before tiers
    point.load()()
